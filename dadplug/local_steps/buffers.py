"""Buffers of a model that training changes, such as running statistics, averaged at each agreement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..exchange import Transport
from ..model_sync import replicas


class MovingBuffers:
    """Buffers that have changed at some site since the start.

    Args:
        model: the model.

    Attributes:
        names: their names, the same on all sites.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: list[str] = []
        self._agreed = self._copies(dict(model.named_buffers()))

    @staticmethod
    def _copies(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in buffers.items()}

    def changed(self) -> list[str]:
        """List buffers that have changed at this site, and are not among the known ones.

        Values are compared: torch does not count its changes of running statistics as those of a tensor's version.
        """
        return [
            name
            for name, buffer in self._model.named_buffers()
            if name not in self.names and not (name in self._agreed and torch.equal(buffer, self._agreed[name]))
        ]

    def announce(self, transport: Transport) -> None:
        """Exchange the names of buffers that have changed; all sites must call it together."""
        names = {name for changed in transport.gather_objects(self.changed()) for name in changed}
        self.names = sorted({*self.names, *names})

    def average(self, transport: Transport, shares: Mapping[int, float]) -> None:
        """Replace the known buffers by their weighted mean over sites, counters by their maximum.

        Args:
            transport: the transport.
            shares: share in the mean of each site, by rank.
        """
        buffers: dict[str, Tensor] = dict(self._model.named_buffers())
        found = [buffers[name] for name in self.names if name in buffers and buffers[name].numel()]
        if found and transport.world_size > 1:
            replicas.average_tensors(found, transport, shares)
        self._agreed.update(self._copies({name: buffers[name] for name in self.names if name in buffers}))

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers to their values at the last agreement."""
        for name, buffer in self._model.named_buffers():
            if name in self._agreed and self._agreed[name].shape == buffer.shape:
                buffer.copy_(self._agreed[name])

    def load(self, names: Iterable[str]) -> None:
        """Take the model's present buffers as the agreed ones.

        Args:
            names: names of the buffers that have changed so far.
        """
        self.names = list(names)
        self._agreed = self._copies(dict(self._model.named_buffers()))
