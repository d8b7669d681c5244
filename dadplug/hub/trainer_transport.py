"""Transport of a trainer for everything but gradients, where sites leave and come."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .elastic import ElasticTransport


class TrainerTransport(ElasticTransport):
    """Messages of a trainer besides those of its gradient reduction.

    A site that joins in mid-training runs the program from its beginning, and so comes to exchanges that the others had
    long ago. Until the end of its first step it therefore exchanges nothing: it is alone in every exchange, and `joins`
    is true. The trainer calls `end_step` after every step of its reduction, which ends that.
    """

    @property
    def present(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.link.rounds.absent]

    def end_step(self) -> None:
        super().end_step()
        self.joins = False
        self.grow()
        self.absent, self._collectives = self._of_run(self.link.rounds.absent), 0  # the same at a site that has joined

    @property
    def place(self) -> int:
        """Number of this transport among those of the process, the same at all sites at the same place of a program."""
        return self._channel

    def close_round(self, admits: bool = False, idle: bool = False) -> None:
        if not self.joins:
            super().close_round(admits, idle)

    def broadcast(self, tensor: Tensor) -> None:
        if not self.joins:
            super().broadcast(tensor)

    def broadcast_bytes(self, content: bytes) -> bytes:
        return content if self.joins else super().broadcast_bytes(content)

    def gather_present(self, item: Any) -> dict[int, Any]:
        return {self.rank: item} if self.joins else super().gather_present(item)
