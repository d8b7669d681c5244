"""Statements of sites before an agreement, as integers that are checked where they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import MismatchError
from ..exchange import Transport
from ..exchange.fields import COUNT, NUMBER, check_fields, invalid


class Header(NamedTuple):
    """A site's statement before an agreement.

    Attributes:
        step: number of the site's steps.
        weight: weight of its delta in the mean, such as its samples since the last agreement; 0 if it has trained
            nothing.
        layout: fingerprint of the parameters that it agrees on, see `fingerprint`.
        finished: 1 if it has no more batches, else 0.
        nonfinite: number of the first parameter with NaN or Inf, in the order of the layout; -1 if there is none.
        changes: 1 if buffers have changed that the site has not announced yet, else 0.
        batch: digest of its first batch, in the first agreement; 0 for none.
        samples: samples of that; 0 where they are not known.
        travel: hundredths of its steps in which deltas have arrived; 0 if not measured, see `DelayChoice`.
    """

    step: int
    weight: int
    layout: int
    finished: int
    nonfinite: int
    changes: int
    batch: int
    samples: int = 0  # states of 0.3 have none
    travel: int = 0  # nor those of 0.4

    @classmethod
    def read(cls, row: Tensor, sender: str, parameters: int, most: int = COUNT) -> Header:
        """Return the header that a site has sent.

        Args:
            row: its integers.
            sender: the site.
            parameters: number of parameters of the agreement.
            most: largest weight.

        Raises:
            MismatchError: if it is none.
        """
        header = cls(*row.tolist())
        ranges = _RANGES | {"nonfinite": (-1, max(parameters, 1) - 1), "weight": (0, most)}
        check_fields("header", sender, header._asdict(), ranges)
        return header


_RANGES = {
    "step": (0, NUMBER),
    "layout": (0, (1 << 63) - 1),
    "finished": (0, 1),
    "changes": (0, 1),
    "batch": (0, NUMBER),
    "samples": (0, COUNT),
    "travel": (0, COUNT),
}


def read_headers(rows: Sequence[Tensor], transport: Transport, parameters: int, uniform: bool) -> dict[int, Header]:
    """Return the valid headers of the sites that are present, by rank.

    Args:
        rows: the integers of the headers, by rank.
        transport: the transport.
        parameters: number of parameters of the agreement.
        uniform: whether weights are 0 or 1.

    Raises:
        MismatchError: if one is invalid, where all sites have to stay.
    """
    rounds, sites, headers = transport.rounds, transport.sites, dict[int, Header]()
    for rank in rounds.present:
        try:
            headers[rank] = Header.read(rows[rank], sites[rank], parameters, 1 if uniform else COUNT)
        except MismatchError as error:  # all sites find it, and go on without the site
            rounds.leave_out(rank, error)
    for rank, header in [*headers.items()]:  # the steps that follow are counted from the largest number
        others = max((each.step for other, each in headers.items() if other != rank), default=NUMBER)
        if header.step > others + COUNT:
            del headers[rank]
            why = f"step is {header.step}, where the others are at {others} at most"
            rounds.leave_out(rank, invalid("header", sites[rank], why))
    return headers


def shares_of(headers: Sequence[Header]) -> list[float]:
    """Return the shares of the sites in a mean, by rank."""
    total = sum(header.weight for header in headers)
    return [header.weight / total if total else 1 / len(headers) for header in headers]


def fingerprint(tensors: Mapping[str, Tensor], setting: str = "") -> int:
    """Return a number of 63 bits that stands for names, shapes and types of tensors, in their order, and a setting."""
    text = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]) + setting
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
