"""Payloads of deltas: whole or of low rank, or sparse.

**Payloads of dense and low-rank deltas in the formats of `dadplug.exchange.wire`, and the memory of what they lose.**

With D the delta of a site plus its error memory E, and C the encoding (rounding, or rank-r factors and rounding):

    sent = C(D)            E <- D - sent            mean = sum over sites of w_s sent_s

All sites decode the same payloads in the order of ranks, so that they get the same bits.

**Payloads of sparse deltas: the largest entries of each block in two bits, and the memory of all else.**

With d_s what site s has done in a round, E_s its memory, and C the code of `SparseCode`:

    whole_s = d_s + decay E_s        sent_s = C(whole_s)        E_s <- whole_s - sent_s        mean = sum of w_s sent_s

The subtraction is exact. The memory takes the place of an outer momentum: what is often near the largest is sent soon,
and the rest fades.

**The outer rate** is the factor of the mean in the step of the agreed model. Where it is not fixed, it follows the
signs: an entry that is sent stands for more that waits in the memories, and a rate above 1 makes up for it, but only
where the sites go the same way.
Sums are taken by rank. Of the entries that are added to a sum that is not zero, n have its sign, and m the other one:

    agreement q = (n - m) / (n + m + 16)        rate = 1 + 1.5 max(0, q)

It costs no bytes, and is computed from whole numbers that all sites count alike, so that it has the same bits at all of
them.

Source: arXiv:2508.15706 (SparseLoCo), algorithm 1.

"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidDeltaError
from ..exchange import Transport
from ..exchange.factor_buckets import finite
from ..exchange.wire import WireFormat, wire_format
from ..lowrank import sum_of_products
from ..lowrank.compression import Carry, compress_matrix
from ..step.methods.feedback import ErrorFeedback
from ..step.reducer.clipping import FEW_STEPS, OUTSIZED, OutsizedGradients, sum_of_squares
from ..step.reducer.handler import FORGET
from .sparse_codec import SparseCode

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
    size = 0.0  # norm of the largest means so far

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
        return sizes

    def retain(self, names: Container[str]) -> None:
        """Drop what is kept of parameters with other names; frozen ones may be trained again."""
        self._errors.retain(names)
        self._carries = {name: carry for name, carry in self._carries.items() if name in names}

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


_MEMINFO = Path("/proc/meminfo")
_FURTHEST = 1.5  # by which the outer rate exceeds 1 where all signs agree
_FEW = 16  # entries without an agreement, so that chance counts little where few entries are sent by several sites


def available_memory(device: torch.device) -> int | None:
    """Return the bytes of memory that a process can still take on a device; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None


def check_memory(model: nn.Module) -> None:
    """Raise ValueError if the memory of sparse deltas does not fit beside a model.

    Args:
        model: the model.
    """
    needed: dict[torch.device, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            size = max(parameter.dtype.itemsize, torch.float32.itemsize)
            needed[parameter.device] = needed.get(parameter.device, 0) + parameter.numel() * size
    for device, size in needed.items():
        room = available_memory(device)
        if room is not None and size > room:
            raise ValueError(
                f"the memory of what sparse deltas do not send takes {size / 1e9:.1f} GB on {device}, and "
                f"{room / 1e9:.1f} GB are available: take wire='int8' with rank=32 and error_feedback=False, or freeze "
                "a part of the model"
            )


def outer_rate(same: int, opposite: int) -> float:
    """Return the outer rate of a round of sparse deltas.

    Args:
        same: entries whose signs agree between sites.
        opposite: entries whose signs do not.
    """
    return 1.0 + _FURTHEST * max(0.0, (same - opposite) / (same + opposite + _FEW))


class _SparseSlot(NamedTuple):
    """Place of a tensor in the payload."""

    shape: torch.Size
    dtype: torch.dtype
    code: SparseCode
    place: slice


class SparseFormat:
    """Format of the payloads of sparse deltas, with the memory of this site.

    Args:
        density: function of the number of the round, from 0, that returns the share of the entries that is sent.
        decay: factor on the memory in each round.
        error_feedback: whether to keep what is not sent.
        names: names of the sites by rank, for errors.

    Attributes:
        rate: outer rate of the deltas that were decoded last.
    """

    keeps_deltas = True  # `encode` only reads them, and may do so beside the next steps
    size = 0.0  # norm of the largest means so far

    def __init__(
        self, density: Callable[[int], float], decay: float, error_feedback: bool, names: Callable[[int], str] = str
    ) -> None:
        self._density, self._decay, self._names = density, decay, names
        self._errors = ErrorFeedback(enabled=True)
        self._keeps = error_feedback
        self._slots: dict[str, _SparseSlot] = {}
        self._means: dict[str, Tensor] = {}  # room for the next ones
        self._present = 0.0  # density of the layout
        self.rate = 1.0

    def begin_round(self, number: int) -> str:
        """Choose the density of a round; return what payloads depend on besides the tensors, as a text.

        Args:
            number: number of the round, the same on all sites.
        """
        self._present = self._density(number)
        return f"density {self._present!r}"

    def layout(self, tensors: Mapping[str, Tensor]) -> dict[torch.dtype, int]:
        """Lay out the payload for a set of tensors, as `DeltaFormat.layout` does."""
        self._slots, start = {}, 0
        for name, tensor in tensors.items():
            code = SparseCode(tensor.numel(), self._present)
            self._slots[name] = _SparseSlot(tensor.shape, tensor.dtype, code, slice(start, start + code.nbytes))
            start += code.nbytes
        return {torch.uint8: start}

    def retain(self, names: Container[str]) -> None:
        """Drop the memory of parameters with other names, as `DeltaFormat.retain` does."""
        self._errors.retain(names)

    def encode(self, deltas: Mapping[str, Tensor], payloads: Mapping[torch.dtype, Tensor]) -> None:
        """Encode this site's deltas, and update its memory.

        Args:
            deltas: the deltas by name, contiguous and finite.
            payloads: room for the payload, by type.
        """
        for name, slot in self._slots.items():
            delta, place = deltas[name], payloads[torch.uint8][slot.place]
            memory = self._errors.of(name, delta)
            room = place if place.device == delta.device else torch.empty_like(place, device=delta.device)
            slot.code.encode(delta.view(-1), memory.view(-1), self._decay, room)
            if room is not place:
                place.copy_(room)
            if not self._keeps:
                memory.zero_()

    def rate_of(self, name: str) -> float:
        """Return the outer rate of a parameter in the round that was decoded last, where it is not fixed."""
        return self.rate

    def decode(self, payloads: Mapping[torch.dtype, Sequence[Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
        """Compute the mean of what all sites have sent, as `DeltaFormat.decode` does.

        The memory of the means is that of the last call.

        Raises:
            InvalidDeltaError: if a payload is not what `encode` makes; it names the site and the tensor.
        """
        means, parts, signs = {}, payloads[torch.uint8], torch.zeros(2, dtype=torch.int64)
        for name, slot in self._slots.items():
            mean = self._means.get(name)
            if mean is None or (mean.shape, mean.dtype, mean.device) != (slot.shape, slot.dtype, parts[0].device):
                mean = torch.empty(slot.shape, dtype=slot.dtype, device=parts[0].device)
            mean.zero_()
            for rank, weight in enumerate(weights):
                if weight:
                    try:
                        slot.code.decode(parts[rank][slot.place], mean.view(-1), weight, signs)
                    except ValueError as error:
                        raise InvalidDeltaError(
                            f"{self._names(rank)} has sent an invalid delta of parameter {name!r}: {error}. It is not "
                            "applied: check that all sites run one version of dadplug, and the network between",
                            rank,
                        ) from None
            means[name] = mean
        self._means, self.rate = means, outer_rate(*signs.tolist())
        return {**means}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the memory."""
        return {"errors": self._errors.state_dict()["errors"], "carries": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._errors.load_state_dict({"reference": 0, "errors": state["errors"]})


class DeltaCheck:
    """Check of the deltas that arrive: those that are not finite are found, those out of all proportion are logged.

    Args:
        transport: the transport.
        every: number of steps between two agreements.
    """

    def __init__(self, transport: Transport, every: int) -> None:
        self._outsized = OutsizedGradients(transport, None, "delta", FEW_STEPS * every)

    def find_spoilt(
        self,
        form: DeltaFormat | SparseFormat,
        payloads: Mapping[torch.dtype, Sequence[Tensor]],
        means: Mapping[str, Tensor],
        shares: Sequence[float],
        step: int,
    ) -> tuple[int, str] | None:
        """Return the rank of the first site with NaN, Inf or overflows in its payload, and the parameter, if any.

        Where the means are more than 1,000 times as large as those before, the deltas of the sites are measured.

        Args:
            form: the format, which has decoded the means.
            payloads: the payloads of all sites by rank, by type.
            means: the means by name; where one is not finite, their memory may be used again.
            shares: share of each site in them.
            step: number of the step.
        """
        size = math.hypot(*map(float, torch._foreach_norm([*means.values()]))) if means else 0.0
        if not size <= OUTSIZED * form.size:
            finite_means, norms = all(map(finite, means.values())), [0.0] * len(shares)
            size = math.sqrt(sum_of_squares(means.values()))
            for rank, share in enumerate(shares):
                own = form.decode(payloads, [float(other == rank) for other in range(len(shares))]) if share else {}
                norms[rank] = math.sqrt(sum_of_squares(own.values()))
                if spoilt := [name for name, delta in own.items() if not (finite_means or finite(delta))]:
                    return rank, spoilt[0]
            form.decode(payloads, shares)  # into the same memory
            self._outsized.follow(norms, step)
        form.size = max(size, FORGET * form.size)
        return None

    def explain(self, step: int) -> str:
        """Return what explains NaN or Inf in a step, see `OutsizedGradients.explain`."""
        return self._outsized.explain(step)


def describe_spoilt(site: str, name: str) -> str:
    """Return the description of a site's payload that is not what its header states."""
    return (
        f"{site} states that its parameters are finite, and has sent NaN, Inf or numbers that overflow for {name!r}: "
        "its program has been changed, or its memory is faulty"
    )
