"""Slots of layers whose gradients are formed, in a memory of all that has not been sent.

The memory takes the gradient, is projected on a few directions, and what is sent is taken from it. What a step writes
beside the memory has its place in a slot. Kernels get arrays that have been made before: to make one of a tensor costs
as much as a small kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...exchange.factor_buckets import FactorPayload
from ...exchange.wire import WireFormat, lasting
from ...lowrank.algorithms import columns_for
from ...lowrank.compression import Carry, Compressed
from ...lowrank.dispatch import NumbaKernels, kernels_for
from ...lowrank.portable import DEPENDENT


class FormedState:
    """State that a step of a slot leaves for the next one, beside the memory.

    Args:
        kind: the kind of its slot.
        columns: number of directions, at most.
        width: width of the gradient.
        bias: number of elements of what rounding has taken from the gradient of the bias.
        like: gives type and device.

    Attributes:
        bias: what rounding has taken from the gradient of the bias.
        carry: the directions from which the next step starts.
        kept: their number.
    """

    def __init__(self, kind: tuple[object, ...], columns: int, width: int, bias: int, like: Tensor) -> None:
        self.kind = kind
        self.directions = lasting((columns, width), like.dtype, like.device)
        self.bias = lasting(bias, like.dtype, like.device)
        self.carry, self.kept = Carry(self.directions), columns
        if _kernels_of(like) is not None:
            self.arrays = self.directions.numpy(), self.bias[None].numpy()

    def keep(self, found: int) -> None:
        """Keep the first directions for the next step."""
        self.carry, self.kept = Carry(self.directions[:found]), found

    def keep_those_of(self, known: Tensor) -> None:
        """Keep directions that lie elsewhere, as many as there is room for."""
        found = min(len(known), len(self.directions))
        self.directions[:found] = known[:found]
        self.keep(found)


class FormedSlot:
    """Place of what is sent of a layer.

    Args:
        rank: number of components that are sent, at most.
        shape: height and width of the gradient.
        bias: number of elements of the gradient of the bias, 0 for none.
        wire: the format in which they are sent.
        like: gives type and device.

    Attributes:
        kind: the arguments, but type and device of the last, by which slots are alike.
        values: the singular values of the components.
    """

    def __init__(self, rank: int, shape: tuple[int, int], bias: int, wire: WireFormat, like: Tensor) -> None:
        self.kind = rank, shape, bias, wire, like.dtype, like.device
        self._wire, self._columns = wire, min(columns_for(rank), *shape)
        self.values = torch.zeros(rank, dtype=torch.float64, device=like.device)
        rows, kind = [(rank, shape[0]), (rank, shape[1]), (1, bias)], (like.dtype, like.device)
        self._parts = [lasting(each, *kind) for each in rows]
        self._rounded = [lasting(each, *kind) for each in rows[:2]]
        self._found = [lasting((self._columns, size), *kind) for size in shape]  # a basis, and the projection onto it
        self._encoded = [lasting((count, wire.row_size(size)), wire.dtype, like.device) for count, size in rows]
        self._payloads: dict[int, tuple[FactorPayload, Tensor, Tensor]] = {}  # see `encode`, by number of components
        self._kernels = _kernels_of(like)
        if self._kernels is not None:
            self._arrays = [each.numpy() for each in (*self._found, *self._parts[:2])]
            self._values = self.values.numpy()
        if self._kernels is not None and wire.quantised:
            self._to_encode = [each.numpy() for each in (*self._parts, *self._encoded, *self._rounded)]

    def state(self) -> FormedState:
        """Return a place for the next state."""
        bias = self._parts[2].shape[1] if self._wire.quantised else 0
        return FormedState(self.kind, self._columns, self._parts[1].shape[1], bias, self._parts[0])

    def find(self, memory: Tensor, start: Carry | None, state: FormedState, tolerance: float) -> int:
        """Find the components of a memory by one pass from directions that are known.

        Args:
            memory: of shape (out, in).
            start: the directions.
            state: takes the directions for the next step.
            tolerance: components up to this share of the largest are not sent.

        Returns:
            The number of components that are sent; -1 where another algorithm has to find them.
        """
        if self._kernels is None or start is None or start.right.shape[0] < self._columns:
            return -1
        (basis, projected), arrays = self._found, self._arrays
        torch.mm(start.right[: self._columns], memory.T, out=basis)
        count = self._kernels.orthonormalise(arrays[0], DEPENDENT[basis.dtype])
        torch.mm(basis, memory, out=projected)
        sent, found = self._kernels.components(*arrays, state.arrays[0], self._values, tolerance)
        kept = count if found == self._values.shape[0] else found
        if kept != state.kept:
            state.keep(kept)
        return int(sent)

    def take(self, compressed: Compressed, state: FormedState, tolerance: float) -> int:
        """Take components that another algorithm has found, as `find` does."""
        found, directions = compressed.effective_rank, compressed.carry.right[: self._columns]
        for place, part in zip(self._parts, compressed, strict=False):
            place[:found] = part.T[:found]
        self.values[:found] = compressed.singular_values[:found]
        state.directions[: len(directions)] = directions
        state.keep(len(directions))
        if self.values.is_cuda:  # reading values would wait for the device
            return found
        lengths: list[float] = self.values[:found].tolist()
        return len([length for length in lengths if length > tolerance * lengths[0]])

    def encode(
        self,
        sent: int,
        memory: Tensor,
        bias: Tensor | None,
        kept: Tensor | None,
        share: float,
        loss_scale: float,
        state: FormedState,
    ) -> FactorPayload:
        """Encode what is sent, and take it, as the sites decode it, from the memory.

        Args:
            sent: number of components.
            memory: the memory.
            bias: the gradient of the bias, or None.
            kept: what is kept of earlier ones, without the loss scale, or None.
            share: factor of that.
            loss_scale: the loss scale of the gradient; the components are found without it, and sent with it.
            state: takes what rounding takes from the gradient of the bias.
        """
        left, right, place = self._parts
        if loss_scale != 1.0:
            right.mul_(loss_scale)
        if bias is not None:
            place[0] = bias
            if kept is not None:
                place.add_(kept, alpha=share * loss_scale)
        if self._kernels is not None and self._wire.quantised:
            self._kernels.quantise_factors(*self._to_encode, state.arrays[1], sent, loss_scale)
        else:
            for part, encoded, rounded in zip((left, right), self._encoded, self._rounded, strict=False):
                self._wire.encode(part, encoded, rounded=rounded)
            self._wire.encode(place, self._encoded[2], rest=state.bias[None] if len(state.bias) else None)
            state.bias.div_(loss_scale)
        if sent not in self._payloads:
            self._payloads[sent] = self._views(sent)
        payload, rounded_left, rounded_right = self._payloads[sent]
        memory.addmm_(rounded_left, rounded_right, alpha=-1 / loss_scale)
        return payload

    def _views(self, sent: int) -> tuple[FactorPayload, Tensor, Tensor]:
        """Return what is sent of some components, and the two factors that the sites decode."""
        payload, encoded = (
            FactorPayload(left[:sent], right[:sent], bias[0] if bias.shape[1] else None)
            for left, right, bias in (self._parts, self._encoded)
        )
        if self._wire.dtype != payload.left.dtype:
            payload = payload._replace(encoded=encoded)
        left, right = self._rounded
        return payload, left[:sent].T, right[:sent]


def _kernels_of(like: Tensor) -> Any:
    """Return the compiled kernels for a memory; None where they do not run, or do not take its type."""
    kernels = kernels_for(like)
    return kernels.compiled if isinstance(kernels, NumbaKernels) and like.dtype in DEPENDENT else None
