"""Bodies of requests and answers: JSON, and numpy's file format for large inputs."""

from __future__ import annotations

import ast
import hashlib
import json
import math
from functools import lru_cache
from typing import Any

import numpy as np

from dadplug.serving import InputError, Prediction

JSON, NPY = "application/json", "application/x-npy"
_MAGIC = b"\x93NUMPY"
_LONGEST_HEAD = 10_000
_ENCODER = json.JSONEncoder(allow_nan=False)


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object in a body.

    Raises:
        InputError: if it is no JSON object.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {error}", status=400) from None
    if not isinstance(found, dict):
        raise InputError(f"the body has to be a JSON object, not {type(found).__name__}", status=400)
    return found


def parse_npy(body: bytes) -> np.ndarray[Any, Any]:
    """Return the array in a body of `numpy.save`, without copying it; its head has to fit its length.

    Raises:
        InputError: if it is no such file, or has objects.
    """
    try:
        if body[:6] != _MAGIC or len(body) < 12:
            raise ValueError("it does not begin like one")
        width = 2 if body[6] == 1 else 4
        size = int.from_bytes(body[8 : 8 + width], "little")
        if size > _LONGEST_HEAD:
            raise ValueError(f"its head has {size} bytes")
        head = ast.literal_eval(body[8 + width : 8 + width + size].decode("latin1"))
        dtype, shape = np.dtype(head["descr"]), tuple(head["shape"])
        if dtype.hasobject or dtype.names is not None or not all(type(each) is int and each >= 0 for each in shape):
            raise ValueError("it has other values than numbers")
        start = 8 + width + size
        if math.prod(shape) * dtype.itemsize != len(body) - start:
            raise ValueError(f"shape {shape} of {dtype.name} does not fit its length")
        flat = np.frombuffer(body, dtype, offset=start) if len(body) > start else np.empty(0, dtype)
        array = flat.reshape(shape, order="F" if head["fortran_order"] else "C")
    except (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError) as error:
        raise InputError(f"the body is no file of numpy.save: {error}", status=400) from None
    return array.astype(dtype.newbyteorder("="), copy=False)


def dump_npy(x: np.ndarray[Any, Any]) -> bytes:
    """Return an array as a body that `parse_npy` reads."""
    from io import BytesIO

    file = BytesIO()
    np.save(file, x, allow_pickle=False)
    return file.getvalue()


def output_text(output: np.ndarray[Any, Any]) -> bytes:
    """Return an output as JSON; numbers that are not finite, such as log-probabilities, become null."""
    try:
        return _ENCODER.encode(output.tolist()).encode()
    except ValueError:  # a number is not finite
        replaced = output.astype(object)
        replaced[~np.isfinite(output)] = None
        return _ENCODER.encode(replaced.tolist()).encode()


def answer_of(prediction: Prediction, output: bytes) -> bytes:
    """Return the body of an answer.

    Args:
        prediction: the prediction.
        output: its output as JSON.
    """
    end = _end_of(prediction.label, prediction.model, prediction.confidence, prediction.models)
    return b"".join((b'{"id": "', prediction.id.encode(), b'", "output": ', output, end))


@lru_cache(maxsize=1024)
def _end_of(label: int | None, model: str, confidence: float, models: tuple[str, ...]) -> bytes:
    values = {"label": label, "model": model, "confidence": confidence, "models": models}
    return b", " + _ENCODER.encode(values)[1:].encode()


def digest_of(kind: str, context: str | None) -> Any:
    """Return the hash of a request up to its body, which is to be added: equal requests have equal hashes.

    Args:
        kind: type of the body.
        context: context that is not in the body.
    """
    return hashlib.blake2b(repr((kind, context)).encode(), digest_size=32)
