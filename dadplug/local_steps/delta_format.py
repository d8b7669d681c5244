"""Payloads of dense and low-rank deltas in the formats of `dadplug.exchange.wire`, and the memory of what they lose.

With D the delta of a site plus its error memory E, and C the encoding (rounding, or rank-r factors and rounding):

    sent = C(D)            E <- D - sent            mean = sum over sites of w_s sent_s

All sites decode the same payloads in the order of ranks, so that they get the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exchange import Transport
from ..exchange.wire import WireFormat, wire_format
from ..lowrank import Carry, compress_matrix, sum_of_products
from ..methods.feedback import ErrorFeedback

_ITERATIONS = 2  # power iterations of the first compression
_WARM_ITERATIONS = 1  # of those that begin with the basis of the last one


class _Slot(NamedTuple):
    """Place of a tensor in a payload.

    Attributes:
        shape: shape of the tensor.
        dtype: type of its delta.
        wire: wire format.
        rank: rank of the factors; None where the tensor is sent whole.
        start: first element of the payload.
        size: number of elements.
    """

    shape: torch.Size
    dtype: torch.dtype
    wire: WireFormat
    rank: int | None
    start: int
    size: int

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape as a matrix: the first dimension times all others."""
        return self.shape[0], self.shape.numel() // self.shape[0]

    def whole(self, part: Tensor) -> Tensor:
        """Decode a tensor that has been sent whole."""
        return self.wire.decode_flat(part, self.shape.numel()).to(self.dtype).view(self.shape)

    def factors(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Decode the factors of a tensor, of shapes (rank, out) and (rank, width)."""
        rank, between = self.rank or 0, (self.rank or 0) * self.wire.row_size(self.shape[0])
        left = self.wire.decode(part[:between].view(rank, -1))
        right = self.wire.decode(part[between:].view(rank, -1))
        return left.to(self.dtype), right.to(self.dtype)


class DeltaFormat:
    """Format of the payloads of a model's deltas, with the error memory of this site.

    Args:
        wire: value of the option ``wire``.
        rank: rank of the factors of matrices; None where all tensors are sent whole. A matrix whose factors would not
            be smaller is sent whole.
        error_feedback: whether to add what was not sent to the next delta.
    """

    keeps_deltas = False  # `encode` overwrites them

    def __init__(self, wire: str, rank: int | None, error_feedback: bool) -> None:
        self._wire, self._rank = wire, rank
        self._slots: dict[str, _Slot] = {}
        self._errors = ErrorFeedback(error_feedback)
        self._carries: dict[str, Tensor] = {}

    def begin_round(self, number: int) -> str:
        """Return what payloads depend on besides the tensors, as a text: nothing.

        Args:
            number: number of the round.
        """
        return ""

    def choose(self, deltas: Mapping[str, Tensor], transport: Transport) -> None:
        """Do nothing: options say how each delta is sent."""

    def layout(self, tensors: Mapping[str, Tensor]) -> dict[torch.dtype, int]:
        """Lay out the payloads for a set of tensors.

        Args:
            tensors: tensors of the shapes and types of the deltas, by name, in an order that is the same on all sites.

        Returns:
            The number of elements of each payload, by type.
        """
        sizes: dict[torch.dtype, int] = {}
        self._slots = {}
        for name, tensor in tensors.items():
            wire = wire_format(self._wire, tensor.dtype)
            rank = self.rank_of(tensor)
            size = wire.flat_size(tensor.numel())
            if rank is not None:
                size = rank * (wire.row_size(len(tensor)) + wire.row_size(tensor.numel() // len(tensor)))
            start = sizes.get(wire.dtype, 0)
            self._slots[name] = _Slot(tensor.shape, tensor.dtype, wire, rank, start, size)
            sizes[wire.dtype] = start + size
        self._errors.retain(self._slots)
        self._carries = {name: carry for name, carry in self._carries.items() if name in self._slots}
        return sizes

    def rank_of(self, tensor: Tensor) -> int | None:
        """Return the rank of the factors as which a tensor is sent; None where it is sent whole."""
        if self._rank is None or tensor.dim() < 2 or not tensor.numel():
            return None
        out, width = tensor.shape[0], tensor.numel() // tensor.shape[0]
        rank = min(self._rank, out, width)
        return rank if rank * (out + width) < out * width else None

    def rate_of(self, name: str) -> float:
        """Return the outer rate of a parameter where it is not fixed: 1, the mean itself."""
        return 1.0

    def encode(self, deltas: Mapping[str, Tensor], payloads: Mapping[torch.dtype, Tensor]) -> None:
        """Encode this site's deltas, and update its error memory.

        Args:
            deltas: the deltas by name; they may be overwritten.
            payloads: room for the payloads, by type.
        """
        for name, slot in self._slots.items():
            delta = deltas[name]
            if not delta.numel():
                continue
            error = self._errors.find(name, delta)
            if error is not None:
                delta = delta.add_(error)
            place = payloads[slot.wire.dtype][slot.start : slot.start + slot.size]
            if slot.rank is not None:
                sent = self._encode_factors(name, slot, slot.rank, delta, place)
            else:
                place.copy_(slot.wire.encode_flat(delta.reshape(-1)))
                sent = slot.whole(place)
            if self._errors.enabled and (slot.rank is not None or slot.wire.dtype != slot.dtype):
                torch.sub(delta, sent, out=self._errors.of(name, delta))

    def _encode_factors(self, name: str, slot: _Slot, rank: int, delta: Tensor, place: Tensor) -> Tensor:
        """Write the factors of a delta to their place in the payload; return the values that are decoded from them."""
        out, width = slot.matrix
        carry = self._carries.get(name)
        start = None if carry is None or carry.shape[1] != width else Carry(carry.to(delta))
        iterations = _ITERATIONS if start is None else _WARM_ITERATIONS
        compressed = compress_matrix(
            delta.view(out, width), rank, iterations=iterations, warm_start=start, seed=zlib.crc32(name.encode())
        )
        kept = compressed.effective_rank
        if kept:
            self._carries[name] = compressed.carry.right.clone()
        left, right = delta.new_zeros(rank, out), delta.new_zeros(rank, width)
        left[:kept], right[:kept] = compressed.left.T[:kept], compressed.right.T[:kept]
        torch.cat([slot.wire.encode(each).reshape(-1) for each in (left, right)], out=place)
        left, right = slot.factors(place)
        return (left.T @ right).view(slot.shape)

    def decode(self, payloads: Mapping[torch.dtype, Sequence[Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
        """Compute the mean delta of all sites.

        Args:
            payloads: the payloads of all sites by rank, by type.
            weights: share of each site in the mean; payloads of sites without a share are not read.

        Returns:
            The mean deltas by name, on the device of the payloads.
        """
        counted = [rank for rank, weight in enumerate(weights) if weight]
        shares = [weights[rank] for rank in counted]
        means = {}
        for name, slot in self._slots.items():
            parts = [payloads[slot.wire.dtype][rank][slot.start : slot.start + slot.size] for rank in counted]
            if slot.rank is not None:
                lefts, rights = zip(*map(slot.factors, parts), strict=True)
                means[name] = sum_of_products(lefts, rights, shares).view(slot.shape)
                continue
            means[name] = parts[0].new_zeros(slot.shape, dtype=slot.dtype)
            for part, share in zip(parts, shares, strict=True):
                means[name].add_(slot.whole(part), alpha=share)
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the error memory and of the bases from which compression starts."""
        carries = {name: each.clone() for name, each in self._carries.items()}
        return {"errors": self._errors.state_dict()["errors"], "carries": carries}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._errors.load_state_dict({"reference": 0, "errors": state["errors"]})
        self._carries = {name: each.clone() for name, each in state["carries"].items()}
