"""Descriptions by users: models in files, the schema of their inputs, options of a predictor."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, LoadError
from ..support.refusals import refuse
from ..support.signature import (
    Check,
    OptionSet,
    check_hub_timeout,
    check_seconds,
    number,
    option,
    valid,
    whole_number,
)
from .policies import POLICIES, TASKS, Policy

DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_MOST_DIMENSIONS = 8
Shape = tuple[int | None, ...]
_check_dtype = valid(f"None or one of {', '.join(DTYPES)}", lambda value: value is None or value in DTYPES)
_check_shape = valid(
    "a tuple of sizes of at least 1, None for any, or None", lambda value: value is None or _is_shape(value)
)


@dataclass(frozen=True)
class Model:
    """A model in a file, for `Predictor`.

    Files are read without running code from them: weights as tensors and plain values, programs by
    `torch.export.load` or onnxruntime. Code comes from `builder` only.

    Attributes:
        path: a Lightning checkpoint, a Catalyst checkpoint, a state dict, a file of ``torch.export`` (``.pt2``), an
            ONNX file (``.onnx``), or a folder written by `dadplug.adapm.save_shards`.
        builder: class or function that returns the model into which weights are loaded: the object, or its name as
            ``"FILE.py:NAME"`` or ``"MODULE:NAME"``. Not needed for ``.pt2`` and ``.onnx`` files, nor for a folder with
            one table, whose rows are then the outputs.
        arguments: keyword arguments of the builder; None for the hyperparameters of a Lightning checkpoint.
        input_shape: shape of one input, None for a size that varies; None to have it from the file.
        dtype: dtype of the inputs; None to have it from the file.

    Raises:
        ValueError: if a value is not valid; the message describes the valid ones.

    Example:
        >>> from dadplug.serving import Model
        >>> Model("best.ckpt", builder="train.py:Classifier", input_shape=(1, 28, 28)).path
        'best.ckpt'
    """

    path: str | Path
    builder: Callable[..., Any] | str | None = None
    arguments: dict[str, Any] | None = field(default=None, hash=False)
    input_shape: Shape | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        valid("a path", lambda value: isinstance(value, (str, os.PathLike)))("path", self.path)
        is_keywords = valid("a dictionary or None", lambda value: value is None or isinstance(value, dict))
        is_keywords("arguments", self.arguments)
        _check_shape("input_shape", self.input_shape)
        _check_dtype("dtype", self.dtype)

    def description(self) -> dict[str, Any]:
        """Return the values for the model's process, which JSON can hold.

        Raises:
            LoadError: if the path does not exist, or the builder cannot be found by its name.
        """
        path = Path(self.path).absolute()
        if not path.exists():
            raise LoadError(f"there is no file or folder {self.path}")
        return {
            "path": str(path),
            "builder": None if self.builder is None else builder_name(self.builder),
            "arguments": self.arguments,
            "shape": self.input_shape,
            "dtype": self.dtype,
        }


def builder_name(builder: Callable[..., Any] | str) -> str:
    """Return the name by which another process imports a class or function.

    Raises:
        LoadError: if it has no such name.
    """
    if isinstance(builder, str):
        place, separator, name = builder.rpartition(":")
        if not separator or not place or not name:
            raise LoadError(f"{builder!r} does not read like FILE.py:NAME or MODULE:NAME")
        return f"{Path(place).absolute()}:{name}" if place.endswith(".py") else builder
    name, module = getattr(builder, "__qualname__", ""), getattr(builder, "__module__", None)
    file = getattr(sys.modules.get("__main__"), "__file__", None) if module == "__main__" else None
    if not name or module is None or "<" in name or (module == "__main__" and file is None):
        raise LoadError(f"{builder!r} cannot be imported by another process: give a class or function of a module")
    return f"{Path(file).absolute()}:{name}" if file else f"{module}:{name}"


class Schema(NamedTuple):
    """Shape and dtype of one input, without the dimension of the batch.

    Attributes:
        shape: sizes, None for any; None for any shape.
        dtype: name of the dtype; None for float32, or int64 where all numbers are integers.
    """

    shape: Shape | None = None
    dtype: str | None = None

    def check(self, given: Any) -> np.ndarray[Any, Any]:
        """Return an input as an array of this schema.

        Args:
            given: a tensor, an array or nested lists of numbers.

        Raises:
            InputError: if it does not fit; the message has what is expected and what was found.
        """
        x = _as_array(given)
        if x.ndim > _MOST_DIMENSIONS:
            raise InputError(f"the input has {x.ndim} dimensions, at most {_MOST_DIMENSIONS} are allowed")
        if self.shape is not None and not _fits(x.shape, self.shape):
            raise InputError(f"the input has shape {_text(x.shape)}, the model expects {_text(self.shape)}")
        x = self._converted(x)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            position = _text(np.argwhere(~np.isfinite(x))[0].tolist())
            raise InputError(f"the input has a number that is not finite at position {position}")
        return np.ascontiguousarray(x)

    def _converted(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        dtype = np.dtype(self.dtype or ("float32" if x.dtype.kind == "f" else x.dtype.name))
        if x.dtype == dtype:
            return x
        if x.dtype.kind == "f" and dtype.kind != "f":
            raise InputError(f"the input has numbers of {x.dtype.name}, the model expects {dtype.name}")
        if x.dtype.kind == "b" and dtype.kind != "b":
            raise InputError(f"the input has true and false, the model expects {dtype.name}")
        if dtype.kind == "b" or (dtype.kind in "iu" and x.size and not _in_range(x, dtype)):
            raise InputError(f"the input has numbers outside the range of {dtype.name}")
        with np.errstate(over="ignore"):
            return x.astype(dtype)


def _in_range(x: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= int(x.min()) and int(x.max()) <= limits.max)


def _as_array(given: Any) -> np.ndarray[Any, Any]:
    if hasattr(given, "detach"):
        given = given.detach().cpu()
        given = given.float().numpy() if str(given.dtype) == "torch.bfloat16" else given.numpy()
    if given is None or isinstance(given, (str, bytes, dict)):
        raise InputError(f"the input is {type(given).__name__}, not numbers")
    try:
        x = np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"the input is not an array of numbers: {error}") from None
    if x.dtype.kind not in "fiub":
        raise InputError("the input is not an array of numbers: it has other values, or integers of more than 64 bits")
    return x


def _is_shape(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and all(each is None or (type(each) is int and each > 0) for each in given)


def _may_be_file(path: Path) -> bool:
    return path.absolute().parent.is_dir() and not path.is_dir()


def _fits(first: Shape, second: Shape) -> bool:
    return len(first) == len(second) and all(None in (a, b) or a == b for a, b in zip(first, second, strict=True))


def _text(shape: Sequence[int | None]) -> str:
    return "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"


def merged(schemas: Sequence[Schema]) -> Schema:
    """Return the schema that all models have in common.

    Raises:
        ValueError: if two models expect different inputs.
    """
    shape, dtype = schemas[0]
    for schema in schemas[1:]:
        if None not in (dtype, schema.dtype) and dtype != schema.dtype:
            raise ValueError(f"the models expect different inputs: {dtype} and {schema.dtype}")
        dtype = dtype or schema.dtype
        if shape is None or schema.shape is None:
            shape = schema.shape if shape is None else shape
        elif _fits(shape, schema.shape):
            shape = tuple(b if a is None else a for a, b in zip(shape, schema.shape, strict=True))
        else:
            raise ValueError(f"the models expect different inputs: shapes {shape} and {schema.shape}")
    return Schema(shape, dtype)


def check_models(models: Any) -> None:
    """Raise ValueError if an argument is no dictionary with a model, by names."""
    is_named = isinstance(models, Mapping) and all(isinstance(name, str) and name for name in models)
    refuse(
        (
            not is_named,
            f"models must be a dictionary by name, such as {{'global': model}}, got {type(models).__name__}",
        ),
        (is_named and not models, "there is no model to serve"),
    )


def _named(kind: str, registry: Mapping[str, Any]) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, str):
            raise ValueError(f"unknown {kind} {value!r}; valid ones are {', '.join(registry)}")
        registry[value]

    return check


def _check_policy(name: str, value: Any) -> None:
    if not isinstance(value, Policy):
        _named("policy", POLICIES)(name, value)


@dataclass(frozen=True)
class ServingOptions(OptionSet):
    """Options of `Predictor` and `dadplug.serve`.

    Raises:
        ValueError: if a value is not valid; the message describes the valid ones.
    """

    slo: float = option(0.05, "latency goal in seconds", check_seconds)
    policy: str | Policy = option("fixed", '``"fixed"``, ``"exp3"``, ``"exp4"`` or a `Policy`', _check_policy)  # noqa: RUF009
    context: str | None = option(
        None,
        'name of the field that holds a request\'s context, such as ``"site"``; None without contexts',
        valid(
            "the name of a further field of requests, such as 'site', or None",
            lambda value: value is None or (isinstance(value, str) and value not in ("", "input")),
        ),
    )
    task: str = option(
        "classification",
        '``"classification"``: outputs are scores of classes; ``"regression"``: outputs are numbers',
        _named("task", TASKS),
    )
    scale: float = option(
        1.0,
        "for regression, the error that counts as the largest loss",
        number("a positive number", lambda value: 0 < value < math.inf),
    )
    input_shape: Shape | None = option(  # noqa: RUF009
        None,
        "shape of one input, None for a size that varies; None to have it from the models' files",
        _check_shape,
    )
    dtype: str | None = option(
        None,
        "dtype of the inputs; None to have it from the models' files",
        _check_dtype,
    )
    deadline: float | None = option(
        None,
        "seconds after which a request without an answer fails with status 503; None for 20 times `slo`, at least 10 "
        "seconds",
        check_hub_timeout,
    )
    max_batch: int = option(256, "upper limit of the batch size", whole_number(1))
    max_waiting: int = option(
        4096,
        "largest number of requests that wait for one model; further ones fail with status 503",
        whole_number(1),
    )
    cache_bytes: int = option(
        64 << 20, "size of the cache; 0 for no cache, also none for concurrent requests", whole_number(0)
    )
    feedback_seconds: float = option(
        3600.0, "time limit of feedback", number("a positive number of seconds", lambda value: value > 0)
    )
    max_open: int = option(100_000, "largest number of predictions that wait for feedback", whole_number(1))
    max_contexts: int = option(10_000, "largest number of contexts with weights", whole_number(1))
    state: str | Path | None = option(  # noqa: RUF009
        None,
        "file of the policy's weights, read at the start and written after feedback and at the end",
        valid(
            "None or the path of a file in a folder that exists",
            lambda value: value is None or (isinstance(value, (str, Path)) and _may_be_file(Path(value))),
        ),
    )
    reload: bool = option(True, "whether a model is loaded again when its file changes")
    hang_seconds: float = option(
        10.0, "time without an answer after which a model's process is ended and started again", check_seconds
    )
    load_seconds: float = option(120.0, "time limit for loading a model", check_seconds)
    threads: int = option(1, "threads of each model's process", whole_number(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest < self.slo:
            raise ValueError(f"deadline ({self.deadline} s) has to be at least slo ({self.slo} s)")

    @property
    def longest(self) -> float:
        """Seconds that a request may take."""
        return max(10.0, 20 * self.slo) if self.deadline is None else self.deadline
