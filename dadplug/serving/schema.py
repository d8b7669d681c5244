"""Schema of one input: shape, dtype, and no NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError

DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_MOST_DIMENSIONS = 8


class Schema(NamedTuple):
    """Shape and dtype of one input, without the dimension of the batch.

    Attributes:
        shape: sizes, None for any; None for any shape.
        dtype: name of the dtype; None for float32, or int64 where all numbers are integers.
    """

    shape: tuple[int | None, ...] | None = None
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
        if self.shape is not None and not self._fits(x.shape):
            expected = "(" + ", ".join("any" if size is None else str(size) for size in self.shape) + ")"
            raise InputError(f"the input has shape {_text(x.shape)}, the model expects {expected}")
        x = self._converted(x)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            position = tuple(int(each) for each in np.argwhere(~np.isfinite(x))[0])
            raise InputError(f"the input has a number that is not finite at position {_text(position)}")
        return np.ascontiguousarray(x)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        assert self.shape is not None
        return len(shape) == len(self.shape) and all(b in (None, a) for a, b in zip(shape, self.shape, strict=True))

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
        given = given.detach().cpu().numpy()
    if isinstance(given, (str, bytes, dict)) or given is None:
        raise InputError(f"the input is {type(given).__name__}, not numbers")
    try:
        x = np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"the input is no array of numbers: {error}") from None
    if x.dtype.kind not in "fiub":
        raise InputError("the input is no array of numbers: it has other values, or integers of more than 64 bits")
    return x


def _text(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def merged(schemas: Sequence[Schema | None]) -> Schema:
    """Return the schema that all models have in common.

    Raises:
        ValueError: if two models expect different inputs.
    """
    shape: tuple[int | None, ...] | None = None
    dtype: str | None = None
    for schema in schemas:
        if schema is None:
            continue
        if None not in (dtype, schema.dtype) and dtype != schema.dtype:
            raise ValueError(f"the models expect different inputs: {dtype} and {schema.dtype}")
        dtype = dtype or schema.dtype
        shape = _merged_shape(shape, schema.shape)
    return Schema(shape, dtype)


def _merged_shape(
    first: tuple[int | None, ...] | None, second: tuple[int | None, ...] | None
) -> tuple[int | None, ...] | None:
    if first is None or second is None:
        return second if first is None else first
    same = len(first) == len(second)
    if not same or any(None not in (a, b) and a != b for a, b in zip(first, second, strict=True)):
        raise ValueError(f"the models expect different inputs: shapes {first} and {second}")
    return tuple(b if a is None else a for a, b in zip(first, second, strict=True))
