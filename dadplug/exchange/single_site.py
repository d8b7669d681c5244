"""Transport of a site that trains alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..logs import get_logger
from .membership import ProcessSites, own_name
from .status import Member
from .traffic import Traffic
from .transport import Gather, Reduction, Transport

_log = get_logger(__name__)
_reported: list[int] = []  # processes that have reported, not the parents that they were forked from


def report_alone() -> None:
    """Log once in a process that it trains alone: without a launcher there is no error."""
    if os.getpid() not in _reported:
        _reported.append(os.getpid())
        _log.info(
            "this site trains alone (rank 0 of 1 site): start the program by torchrun or `python -m dadplug launch`, "
            "or pass rank, num_nodes and dist_url, to train with others"
        )


class _FinishedReduction(Reduction):
    def wait(self) -> None:
        pass


class _OwnGather(Gather):
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.payload = torch.zeros(size, dtype=dtype, device=device)

    def launch(self) -> None:
        pass

    def wait(self) -> list[Tensor]:
        return [self.payload]


class SingleSite(Transport):
    """Transport whose exchanges return what they are given.

    Args:
        traffic: the meter.
        device: device of the model.
        timeout: unused; as that of other transports.
    """

    def __init__(self, traffic: Traffic, device: torch.device, timeout: float) -> None:
        super().__init__(ProcessSites(0, [Member(own_name(), "", 0, b"")]), traffic, 0, device, timeout)

    def close(self) -> None:
        pass

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return _OwnGather(sizes[0], dtype, self.device)

    def all_reduce(self, tensor: Tensor) -> Reduction:
        return _FinishedReduction()

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def broadcast_bytes(self, content: bytes) -> bytes:
        return content

    def gather_objects(self, item: Any) -> list[Any]:
        return [item]

    def prefers_gather(self, nbytes: int) -> bool:
        return False
