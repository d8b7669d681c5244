"""Bucket of selected elements of several gradients, with their indices, which all sites gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .transport import Gather, Transport
from .wire import WireFormat

_ALIGNMENT = 16  # bytes
_INDEX = torch.int32


def element_size(wire: WireFormat) -> int:
    """Return the bytes of one element and its index in a payload.

    Args:
        wire: format of the values.
    """
    return _INDEX.itemsize + wire.itemsize


class SparseBucket:
    """Indices and values of several gradients in one all-gather.

    A payload holds, gradient by gradient, the indices as int32 and then the values in the wire format.

    Args:
        counts: number of elements that each site sends of each gradient.
        transport: the transport.
        wire: format of the values; not a quantised one.
    """

    def __init__(self, counts: Sequence[int], transport: Transport, wire: WireFormat) -> None:
        self._wire = wire
        self._counts = list(counts)
        self._starts = [0]
        for count in counts:
            for size in (count * _INDEX.itemsize, count * wire.itemsize):
                self._starts.append(self._starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self._gather: Gather = transport.gather([self._starts[-1]] * transport.world_size, torch.uint8)
        self._payloads: Sequence[Tensor] = ()

    def _views(self, payload: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return views of a gradient's indices and values in a payload."""
        count, (first, second) = self._counts[index], self._starts[2 * index : 2 * index + 2]
        indices = payload[first : first + count * _INDEX.itemsize].view(_INDEX)
        return indices, payload[second : second + count * self._wire.itemsize].view(self._wire.dtype)

    def fill(self, index: int, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the selected elements of a gradient into its place.

        Args:
            index: its place.
            indices: of shape (k,), any integer type.
            values: of shape (k,), any floating-point type.

        Returns:
            Views of the indices and of the values in the payload, rounded to the wire format.
        """
        places = self._views(self._gather.payload, index)
        places[0].copy_(indices)
        places[1].copy_(values)
        return places

    def launch(self) -> None:
        """Start the exchange."""
        self._gather.launch()

    def wait(self) -> None:
        """Wait for the payloads of all sites."""
        self._payloads = self._gather.wait()

    def received(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """Return the indices and values of a gradient, by rank; they hold until the next `fill`."""
        return [self._views(payload, index) for payload in self._payloads]
