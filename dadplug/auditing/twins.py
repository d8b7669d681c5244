"""Transport of a site whose partners are its twins: they send what it sends, so that one process sees what they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import SiteError
from ..exchange.status import PeerNames
from ..exchange.traffic import Traffic
from ..exchange.transport import Gather, PendingSum, Transport

SITES = 2
"""Number of sites: with two, each can subtract its own part of a sum, and has that of the other."""

_FEW_BYTES = 1 << 20  # of which two sites gather sums, as they do over torch.distributed


class _TwinNames(PeerNames):
    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        return SiteError(str(error))  # a twin cannot be lost


class _TwinGather(Gather):
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, meter: Traffic) -> None:
        self.payload = torch.zeros(size, dtype=dtype, device=device)
        self._arrived = [self.payload, *(torch.zeros_like(self.payload) for _ in range(SITES - 1))]
        self._meter = meter

    def launch(self) -> None:
        self._meter.add((SITES - 1) * self.payload.numel() * self.payload.element_size())
        for copy in self._arrived[1:]:
            copy.copy_(self.payload)

    def wait(self) -> list[Tensor]:
        return self._arrived


class TwinTransport(Transport):
    """Transport without a network, whose other site sends to the bit what this one sends.

    The agreed gradient is that of one site then, after encoding and decoding by the formats of the network.

    Args:
        traffic: the meter.
        device: device of the tensors that are exchanged.
    """

    def __init__(self, traffic: Traffic, device: torch.device) -> None:
        names = _TwinNames(0, ["audited site", *(f"observer {number}" for number in range(1, SITES))])
        super().__init__(names, traffic, 0, device, 1.0)

    def close(self) -> None:
        pass

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return _TwinGather(sizes[0], dtype, self.device, self.traffic)

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        self.traffic.add(int(self.ring * tensor.numel() * tensor.element_size()))
        tensor.mul_(SITES)
        return PendingSum()

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def broadcast_bytes(self, content: bytes) -> bytes:
        return content

    def gather_objects(self, item: Any) -> list[Any]:
        return [item] * SITES

    def prefers_gather(self, nbytes: int) -> bool:
        return nbytes <= _FEW_BYTES
