"""Tunable constants: names, defaults and valid ranges. To add one, add a field, and read it where it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Group = TypeVar("Group", bound="Constants")


def _constant(default: Any, low: float, high: float) -> Any:
    """Define a number with its default and the range of its valid values."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True)
class Constants:
    """Base of a group of constants.

    Raises:
        ValueError: if a value has another type than the default, or is out of its range.
    """

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, wanted = getattr(self, each.name), type(each.default)
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise ValueError(f"{each.name} must be of type {wanted.__name__}, got {value!r}")
            choices = each.metadata.get("choices")
            if choices is not None and value not in choices:
                raise ValueError(f"{each.name} must be one of {', '.join(choices)}, got {value!r}")
            if "low" in each.metadata and not each.metadata["low"] <= value <= each.metadata["high"]:
                raise ValueError(
                    f"{each.name} must lie in {each.metadata['low']:g} to {each.metadata['high']:g}, got {value!r}"
                )

    @classmethod
    def of(cls: type[Group], values: Any) -> Group:
        """Return the constants with some values, by name; the others have their defaults.

        Raises:
            ValueError: if a name is unknown, or a value not valid.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"expected names and values, got {type(values).__name__}")
        if unknown := set(values) - {each.name for each in dataclasses.fields(cls)}:
            raise ValueError(f"unknown constants: {', '.join(sorted(map(str, unknown)))}")
        return cls(**values)

    def values(self) -> dict[str, Any]:
        """Return the values by name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Decoding(Constants):
    """Constants that may change the last bit of a decoded gradient: all sites take those of site 0.

    Attributes:
        few: rows up to which the own product of few rows is taken in place of BLAS.
        strip: columns that this product computes at a time.
        block: numbers of a sum of products that are computed before the next block of rows.
        align: multiple of which the rows of such a block are.
        tile: numbers of a gradient that are computed at a time in a fused optimizer step.
        narrow: rows of all sites up to which a fused step multiplies them by kernels of its own in place of BLAS.
    """

    few: int = _constant(12, 0, 4096)
    strip: int = _constant(1 << 20, 16, 1 << 30)
    block: int = _constant(1 << 17, 16, 1 << 30)
    align: int = _constant(16, 1, 4096)
    tile: int = _constant(1 << 17, 16, 1 << 30)
    narrow: int = _constant(64, 0, 4096)


@dataclass(frozen=True)
class Encoding(Constants):
    """Constants that each site has for itself, since it sends what it has computed by them.

    Attributes:
        fat: multiplications and additions a microsecond of products of large blocks.
        skinny: the same of products with blocks of few rows.
        eigen: rows^3 a microsecond, of the N x N algebra in double precision.
        start_gram: microseconds of a call of the algorithm ``"gram"`` besides its products.
        start_iteration: the same of ``"iteration"``.
        start_formed: the same of ``"formed"``.
        coarse: of the 31 bits of a number's size, those of the first histogram in the search for the largest numbers.
    """

    fat: float = _constant(45_000.0, 1.0, 1e9)
    skinny: float = _constant(30_000.0, 1.0, 1e9)
    eigen: float = _constant(600.0, 0.01, 1e7)
    start_gram: float = _constant(20.0, 0.0, 1e6)
    start_iteration: float = _constant(40.0, 0.0, 1e6)
    start_formed: float = _constant(40.0, 0.0, 1e6)
    coarse: int = _constant(15, 6, 24)


@dataclass(frozen=True)
class Serving(Constants):
    """Way in which a served model computes.

    Attributes:
        backend: ``"eager"``, ``"compiled"`` by torch.compile, or ``"onnxruntime"``.
        channels_last: whether convolutions have the channels of a pixel side by side.
        fused: whether normalisations are part of the weights of the layers before them.
        shape: shape of one input, such as ``"3,224,224"``.
    """

    backend: str = field(default="eager", metadata={"choices": ("eager", "compiled", "onnxruntime")})
    channels_last: bool = False
    fused: bool = False
    shape: str = ""
