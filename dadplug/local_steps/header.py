"""Headers of an agreement: what each site states before deltas are sent, as one row of integers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from ..exchange import Gather, Transport


@dataclass(frozen=True)
class Header:
    """A site's statement before an agreement.

    Attributes:
        step: number of the site's steps.
        weight: weight of its delta in the mean, such as its samples since the last agreement; 0 if it has trained
            nothing.
        layout: fingerprint of the parameters that it agrees on, see `fingerprint`.
        finished: whether it has no more batches.
        nonfinite: number of the first parameter with NaN or Inf, in the order of the layout; -1 if there is none.
        changes: whether buffers have changed that the site has not announced yet.
    """

    step: int
    weight: int
    layout: int
    finished: bool
    nonfinite: int
    changes: bool


class HeaderGather:
    """Gather of the headers of all sites.

    Args:
        transport: the transport.
    """

    def __init__(self, transport: Transport) -> None:
        self._gather: Gather = transport.gather([len(Header.__dataclass_fields__)] * transport.world_size, torch.int64)

    def exchange(self, own: Header) -> list[Header]:
        """Send this site's header; return those of all sites by rank.

        Raises:
            SiteError: if a site is gone or silent.
        """
        self._gather.payload.copy_(torch.tensor([int(value) for value in astuple(own)]))
        self._gather.launch()
        rows = [row.tolist() for row in self._gather.wait()]
        return [Header(row[0], row[1], row[2], bool(row[3]), row[4], bool(row[5])) for row in rows]


def fingerprint(tensors: Mapping[str, Tensor]) -> int:
    """Return a number of 63 bits that stands for names, shapes and types of tensors, in their order."""
    text = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
