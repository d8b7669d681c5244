"""Options that may keep data from being recovered: each is tried by the attacks again, and the cheapest is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..privacy import DifferentialPrivacy
from .capture import LOCAL

_RANKS = (8, 4, 2, 1)
_MARGIN = 0.8  # similarity up to which a setting counts as a remedy: other batches are easier


@dataclass(frozen=True)
class Remedy:
    """A change of options that an audit has tried.

    Attributes:
        options: the options that it changes, as keyword arguments.
        cost: order in which it costs: 0 for bytes alone, 1 for changed gradients too, 2 for noise.
        recovered: share of samples that the attacks have recovered in spite of it.
        similarity: largest similarity of a reconstruction of data.
        bytes_sent: payload of a step, in bytes.
    """

    options: Mapping[str, Any]
    cost: int
    recovered: float = 1.0
    similarity: float = 1.0
    bytes_sent: int = 0

    @property
    def stops(self) -> bool:
        """Whether no attack has recovered a sample, or has come near to it."""
        return self.recovered == 0 and self.similarity <= _MARGIN

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def candidates(mode: str, options: Mapping[str, Any], rows: int) -> Iterator[Remedy]:
    """Yield the changes that are tried, those that cost least first.

    Args:
        mode: the mode.
        options: its options.
        rows: samples of the batch.
    """
    rank = options.get("rank")
    present = rank if isinstance(rank, int) else rows
    if mode in ("dad", "edad", "rankdad", "auto") and options.get("share_inputs", True):
        yield Remedy({"share_inputs": False}, 0)
    # A local step's deltas are compressed in the same way.
    name = mode if mode in (LOCAL, "powersgd") else "rankdad"
    for smaller in _RANKS:
        if mode not in ("rankdad", "powersgd") or smaller < present:
            yield Remedy({"mode": name, "rank": smaller} if name != mode else {"rank": smaller}, 1)
    if mode != LOCAL and options.get("privacy") is None:
        privacy = DifferentialPrivacy(noise_multiplier=1.0, expected_batch=rows)
        yield Remedy({"mode": "rankdad", "rank": 8, "privacy": privacy}, 2)
