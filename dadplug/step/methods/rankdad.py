"""rank-dAD: sites exchange low-rank factors of their gradients, ``G ~ sum over sites of w_s L_s R_s^T``.

Source: arXiv:2102.09631, section 4. Published with deflation, one vector at a time; here block power iteration with
orthonormalisation, a projection of the gradient whose error is never larger than that of sending nothing.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...exchange.factor_buckets import FactorPayload
from ...exchange.fields import check_kinds
from ...exchange.wire import WireFormat, lasting, wire_format
from ...hooks import LINEAR, Factor
from ...lowrank.algorithms import columns_for
from ...lowrank.compression import (
    Carry,
    Compressed,
    compress,
    compress_matrix,
    squared_norm,
    squared_norm_of,
)
from ...support.schedules import current
from .base import GradientPath, Method, MethodOptions, Quality, Traits, register_method
from .feedback import ErrorFeedback, LossScales
from .formed import FormedSlot, FormedState
from .merge_memory import MergeMemory
from .tables import TableMemory

_FEW = 8  # components that a step may have with int8, however few its rows are
_SAMPLES = 4  # for each component that is sent of a layer whose input is data
_NARROW = 4  # numbers of a gradient's smaller side for each component, with rank="auto"
_WORTH = 1024  # bytes; what 100 Mbit/s carry while a small matrix is compressed
_SHARE, _LEAST = 0.01, 4  # share of a gradient that components take; how many may take more, with rank="auto"
_LARGE = 3072  # bytes that this saves of a layer at least
_COLUMNS = 24  # components that are sent and kept, about; from there on a compression becomes dear
_CALLS = 60.0  # microseconds that a compression takes beside its products, about
_PREFERRED = 3.0  # how many times as long a compression may take that keeps all that is not sent
_MEASURE_EVERY = 10  # steps between measurements of the residual, which cost about as much as a compression

_KINDS: dict[str, Any] = {  # of what is kept by layer
    "carried": dict[str, Tensor],
    "biases": dict[str, Tensor],
    "room": dict[str, int],
    "weights": dict[str, float],
    "calls": dict[str, int],
    "whole": dict[str, bool],
    "rank": int | None,
    "tables": dict[str, tuple[Tensor, Tensor, int]],
}


class _Kept(NamedTuple):
    """Rows whose product is what was not sent of a gradient.

    Attributes:
        left: of shape (k, out).
        right: of shape (k, in), times the loss scale.
        loss_scale: the loss scale of the gradient.
    """

    left: Tensor
    right: Tensor
    loss_scale: float

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return the rows without the loss scale."""
        return self.left, self.right if self.loss_scale == 1.0 else self.right / self.loss_scale


class _Storage:
    """Memory of the state of a layer.

    Args:
        size: number of elements.
        like: gives type and device.
    """

    def __init__(self, size: int, like: Tensor) -> None:
        self.flat = lasting(size, like.dtype, like.device)
        self._layout: tuple[object, ...] = ()
        self._views: tuple[Tensor, ...] = ()

    def views(
        self, left: tuple[int, int], right: tuple[int, int], bias: int, kept: slice, carried: slice
    ) -> tuple[Tensor, ...]:
        """Lay the memory out.

        Views are those of the last call where the layout is: even small objects that last, if they are made during
        backward, leave gaps between activations that are freed.

        Args:
            left: shape of the left vectors.
            right: shape of the right vectors.
            bias: number of elements of what rounding takes from the gradient of the bias.
            kept: the right vectors of `_Kept`.
            carried: those that the next step starts from.

        Returns:
            The left vectors, all right vectors, those of `_Kept`, those that are carried, and the place of the bias.
        """
        layout = (left, right, bias, kept.start, kept.stop, carried.start)
        if self._layout != layout:
            sizes = [math.prod(left), math.prod(right), bias]
            lefts, rights, rest = self.flat[: sum(sizes)].split(sizes)
            whole = rights.view(right)
            self._layout, self._views = layout, (lefts.view(left), whole, whole[kept], whole[carried], rest)
        return self._views


class _State(NamedTuple):
    """State of a layer that is kept between steps.

    Attributes:
        carry: directions to start from.
        lost: what was not sent, as far as it is kept: further singular vectors, and the rounding errors of the wire
            format. None where the error memory has all of it.
        room: number of components that the next step may keep at least.
        bias: what rounding to int8 has taken from the gradient of the bias, without the loss scale.
        weight: weight of these, and of the error memory, in the mean over sites; 0.0 where it is not known.
        calls: number of compressions.
        quality: quality of the last one.
        fits: shape and type of the gradient, and size of that of the bias, for which the state is known to fit.
        storage: where all tensors lie, to be taken again by a later step; None where they lie elsewhere.
    """

    carry: Carry | None = None
    lost: _Kept | None = None
    room: int = 0
    bias: Tensor | None = None
    weight: float = 0.0
    calls: int = 0
    quality: Quality | None = None
    fits: tuple[object, ...] = ()
    storage: _Storage | FormedState | None = None


class _Given(NamedTuple):
    """Gradient of a weight that is encoded, and how.

    Attributes:
        name: name of the weight.
        bias: the gradient of the bias, or None.
        wire: the format in which it is sent.
        rank: number of components that are sent, at most.
        found: number of components that are found for it, at least; those that are not sent are kept.
        state: the state that the step begins with.
        share: what is kept of earlier gradients counts for.
        loss_scale: the loss scale of the gradient.
    """

    name: str
    bias: Tensor | None
    wire: WireFormat
    rank: int
    found: int
    state: _State
    share: float
    loss_scale: float


@register_method("rankdad")
class RankDAD(Method):
    """Gather of r (m + n) values a layer for any number of rows, and of uncompressed bias gradients.

    A layer whose gradient is hardly larger than that, in bytes, is all-reduced.
    """

    traits = Traits(
        exact=False,
        sends_bias=True,
        detects_nonfinite=True,
        keeps_state=True,
        reads=("rank", "iterations", "tolerance", "warm_start", "error_feedback", "dense"),
    )

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.max_rank: int = options.largest_rank
        self.largest_rank = self._largest = options.largest_rank
        self.merger = self._make_merger(options)
        self._iterations = options.iterations
        self._keeps_rows = options.error_feedback is None
        self._wire = options.wire_of(GradientPath.LOWRANK)
        self._tolerance = 0.0 if self._keeps_rows else options.tolerance  # components that are not sent are kept
        self.errors = ErrorFeedback(options.error_feedback is not False)
        self._caps = not isinstance(options.rank, int) and options.budget is None  # the rank of layers fed by data
        self._whole: dict[str, bool] = {}  # whether all that is not sent of a weight's gradient is kept, as a matrix
        self._decay = 1.0 if options.memory_decay is None else options.memory_decay
        self._tables = TableMemory(self.errors.enabled, self._decay)
        self._states: dict[str, _State] = {}
        self._staged: dict[str, _State] = {}
        self._spare: dict[str, _Storage | FormedState] = {}  # by layer, storage that a state has left
        self._slots: dict[str, FormedSlot] = {}

    @property
    def keeps_rows(self) -> bool:
        # Sites keep all of it, in a tensor of the layer's size, with ``error_feedback=True``, and else where
        # `keeps_whole` says so. Merges of divided layers keep rows then as well: no site has the whole sum.
        return self._keeps_rows or (self.options.merge != "all" and bool(self.options.error_feedback))

    @property
    def keeps_errors(self) -> bool:
        return super().keeps_errors or self.keeps_rows

    def _make_merger(self, options: MethodOptions) -> Merger | None:
        return None if options.merge == "all" else Merger(options, self.loss_scales)

    def path(self, out: int, width: int) -> str:
        return self.path_of(out, width, torch.float32)

    def path_of(self, out: int, width: int, dtype: torch.dtype) -> str:
        rank = self.rank_of(self.options.largest_rank, out, width)
        if rank * (out + width) < out * width:
            return GradientPath.LOWRANK
        wire, dense = (wire_format(self.options.wire_of(path), dtype) for path in ("lowrank", "allreduce"))
        factors = rank * (wire.row_size(out) + wire.row_size(width)) * wire.itemsize
        gradient = dense.flat_size(out * width) * dense.itemsize
        return GradientPath.LOWRANK if gradient - factors >= _WORTH else GradientPath.ALLREDUCE

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        return min(rows, self.rank_of(self._room, out, width))

    def rank_of(self, rank: int, out: int, width: int) -> int:
        most = most_worth(self._largest, out, width, self._wire) if self._caps else min(out, width)
        return min(rank, most)

    @property
    def _room(self) -> int:
        """Most components that may be sent at present: the rank, or what owners have room for."""
        assert self.max_rank is not None
        return self.max_rank if self.merger is None else min(self.max_rank, self.largest_rank)

    def encode(self, name: str, factor: Factor, with_bias: bool) -> FactorPayload:
        before, weight = self._staged.get(name), self.weight
        state = before or self._states.get(name) or _State()
        if before is not None and weight:
            weight = before.weight
        whole = self._whole.get(name)
        if whole is None:
            whole = self._whole[name] = self._keeps_whole(factor)
        if before is not None or not (weight and whole):  # else it is formed in the memory
            factor = factor.settled()
        deltas, (rows, out), width = factor.deltas, factor.deltas.shape, factor.activations.shape[1]
        bias = factor.bias if with_bias else None
        if with_bias and bias is None:
            bias = deltas.sum(0) if factor.form is LINEAR else factor.form.bias_gradient(deltas)
        shape = out, width, deltas.dtype, 0 if bias is None else bias.shape[0]
        if state.fits != shape:
            state = _fitting(state, factor, bias)._replace(fits=shape)
            if before is None:  # no later step can use the rest of it
                self._states[name] = state
        if not weight:  # what a site without weight sends is lost, so that it sends nothing of what it keeps
            most = min(self.rank_of(self._room, out, width), self.most_sent(name, rows))
            left, right = compress(deltas, factor.activations, most, **self._how(name, state))
            return FactorPayload(left.T, right.T, bias)
        room = self.max_rank if self.merger is None else self._room
        wire, found = wire_format(self._wire, deltas.dtype), self.rank_of(room, out, width)
        # Rounding to int8 leaves small parts of all components, which need not make a batch of few rows as large again.
        if wire.quantised and self._keeps_rows:
            found = min(found, max(rows, _FEW))
        rank = min(found, self.most_sent(name, rows)) if self._caps and self.is_fed(name) else found
        loss_scale = self.loss_scales.of(name) if LossScales.scaled else 1.0
        share = state.weight / weight if state.weight else 1.0
        given = _Given(name, bias, wire, rank, found, state, share, loss_scale)
        if whole:
            memory = self._added(name, factor, state.lost, share * self._decay, loss_scale)
            payload, staged = self._encode_formed(given, memory)
        else:
            payload, staged = self._encode_rows(given, factor)
        if before is not None:
            self._release(name, before)
        self._staged[name] = staged._replace(weight=weight, calls=state.calls + 1, fits=shape)
        return payload

    def encode_table(self, name: str, factor: Factor, wire: WireFormat) -> FactorPayload:
        loss_scale = self.loss_scales.of(name) if LossScales.scaled else 1.0
        return self._tables.encode(name, factor, wire, self.weight, loss_scale)

    def _how(self, name: str, state: _State) -> dict[str, Any]:
        """Return the options of a compression."""
        return {
            "iterations": self._iterations,
            "tolerance": self._tolerance,
            "warm_start": state.carry if self.options.warm_start else None,
            "seed": zlib.crc32(name.encode()),
        }

    def most_sent(self, name: str, rows: int) -> int:
        room = self._room
        if not (self._caps and rows and self.is_fed(name)):
            return room
        # With as many components of data's own layer as samples, or half as many, other sites recover inputs.
        return min(room, max(1, min(self.batch() or rows, rows) // _SAMPLES))

    def _keeps_whole(self, factor: Factor) -> bool:
        """Return whether all that is not sent of a weight's gradient is kept, in a matrix of its size.

        It is chosen when the first gradient of the weight is compressed, by the predicted time.
        """
        if not self._keeps_rows:
            return bool(self.options.error_feedback)
        out, width = factor.deltas.shape[1], factor.activations.shape[1]
        formed = factor.whole is not None or factor.write is not None
        return formed or keeps_whole(factor.rows, out, width, self.rank_of(self._room, out, width))

    def _count_sent(self, compressed: Compressed, rank: int) -> int:
        """Return the number of components that are sent, the rank at most; the others may be kept."""
        found = min(compressed.effective_rank, rank)
        if not found or compressed.left.is_cuda or self._tolerance == self.options.tolerance:
            return found
        values: list[float] = compressed.singular_values[:found].tolist()
        return len([value for value in values if value > self.options.tolerance * values[0]])

    def _encode_formed(self, given: _Given, memory: Tensor) -> tuple[FactorPayload, _State]:
        """Encode a gradient of which all that is not sent is kept.

        Args:
            given: what is encoded.
            memory: the next memory, from which what is sent is taken.

        Returns:
            The payload and the next state.
        """
        name, bias, wire, rank, _, state, share, loss_scale = given
        (out, width), tolerance, warm = memory.shape, self.options.tolerance, self.options.warm_start
        kind = min(rank, out, width), (out, width), 0 if bias is None else bias.shape[0], wire
        slot = self._slots.get(name)
        if slot is None or slot.kind != (*kind, memory.dtype, memory.device):
            slot = self._slots[name] = FormedSlot(*kind, memory)
        following = self._spare.pop(name, None)
        if not isinstance(following, FormedState) or following.kind != slot.kind:
            following = slot.state()
        sent = -1
        if state.carry is not None and warm and self._iterations <= 1:
            sent = slot.find(memory, state.carry, following, tolerance)
        if sent < 0:
            compressed = compress_matrix(memory, rank, **(self._how(name, state) | {"tolerance": 0.0}))
            sent = slot.take(compressed, following, tolerance)
        quality = state.quality
        if quality is None or state.calls % _MEASURE_EVERY == 0 or quality.effective_rank != sent:
            whole, found = squared_norm_of(memory), float((slot.values[:sent] ** 2).sum())
            quality = Quality(sent, math.sqrt(max(0.0, 1.0 - found / whole)) if whole > 0 else 0.0)
        payload = slot.encode(sent, memory, bias, state.bias, share, loss_scale, following)
        if state.carry is not None and not len(following.carry.right):  # the memory is zero; the storage may be reused
            following.keep_those_of(state.carry.right)
        carry = following.carry if warm and len(following.carry.right) else None
        kept = following.bias if len(following.bias) else None
        return payload, _State(carry=carry, bias=kept, quality=quality, storage=following)

    def _encode_rows(self, given: _Given, factor: Factor) -> tuple[FactorPayload, _State]:
        """Encode a gradient by its rows; the strongest components that are not sent are kept.

        Args:
            given: what is encoded.
            factor: the site's factors.

        Returns:
            The payload and the next state.
        """
        name, bias, wire, rank, found, state, share, loss_scale = given
        # No less than before: a small batch does not drop what is kept of a large one.
        room = max(state.room, rows_kept(found, factor.rows) + found - rank) if self._keeps_rows else 0
        measure = state.calls % _MEASURE_EVERY == 0 or state.quality is None
        deltas, activations = factor.deltas, factor.activations
        if state.lost is not None:  # as further rows
            (left, right), scale = state.lost.rows(), share * loss_scale
            deltas = torch.cat([deltas, left])
            activations = torch.cat([activations, right if scale == 1.0 else right * scale])
        compressed = compress(deltas, activations, rank + room, precise=rank, **self._how(name, state))
        size = squared_norm(deltas, activations) if measure else 0.0
        sent = self._count_sent(compressed, rank)
        residual = state.quality.residual if state.quality and not measure else compressed.residual_of(size, sent)
        left, right = compressed.left.T[:sent], compressed.right.T[:sent]
        if bias is not None and state.bias is not None:
            bias = torch.add(bias, state.bias.to(bias), alpha=share * loss_scale)
        kept = compressed.effective_rank - sent
        payload, staged = self._stored(name, compressed, FactorPayload(left, right, bias), wire, state.carry)
        return payload, staged._replace(room=min(room, kept), quality=Quality(sent, residual, kept))

    def _stored(
        self, name: str, compressed: Compressed, payload: FactorPayload, wire: WireFormat, before: Carry | None
    ) -> tuple[FactorPayload, _State]:
        """Encode what is sent, and keep what the next step needs to know of the gradient.

        With ``L R`` what is sent, L' and R' the same as the sites decode it, and ``l r`` the other components, the rest
        is ``L' (R - R') + (L - L') R + l r``: its right vectors lie beside the directions, which begin with R and r.
        The storage is that of the step before the last.

        Args:
            name: name of the weight.
            compressed: the compressed gradient.
            payload: its first components, which are sent, and the gradient of the bias.
            wire: the format in which they are sent.
            before: directions from which the step has started.

        Returns:
            The payload, with what has been encoded, and the state.
        """
        sent, others = payload.rows, compressed.effective_rank - payload.rows if self._keeps_rows else 0
        directions = compressed.carry.right if sent or before is None else before.right
        if not self.options.warm_start:
            directions = compressed.right.T[: compressed.effective_rank]
        loss_scale = self.loss_scales.of(name)
        rounds = wire.dtype != payload.left.dtype and (self._keeps_rows or wire.quantised)
        again = sent if rounds else 0  # right vectors beside the directions
        count = 2 * again + others
        shapes = (count, payload.left.shape[1]), (again + len(directions), payload.right.shape[1])
        rest = len(payload.bias) if payload.bias is not None and wire.quantised else 0
        storage = self._storage(name, sum(map(math.prod, shapes)) + rest, payload.left)
        left, right, kept, carried, bias = storage.views(
            *shapes, rest, slice(sent - again, sent - again + count), slice(again, None)
        )
        carried.copy_(directions)
        left[count - others :] = compressed.left.T[sent : sent + others]
        if rounds:
            lefts = wire.encode(payload.left, rounded=left[:sent], rest=left[sent : 2 * sent])
            rights = wire.encode(payload.right, rest=right[:sent])
            biases = None
            if payload.bias is not None:
                biases = wire.encode(payload.bias[None], rest=bias[None] if len(bias) else None)[0]
            if loss_scale != 1.0:
                bias.div_(loss_scale)
            payload = payload._replace(encoded=FactorPayload(lefts, rights, biases))
        return payload, _State(
            carry=Carry(carried) if self.options.warm_start and len(directions) else before,
            lost=_Kept(left, kept, loss_scale) if count else None,
            bias=bias if rest else None,
            storage=storage,
        )

    def _storage(self, name: str, size: int, like: Tensor) -> _Storage:
        """Return memory for the state of a weight: that of the step before the last, where it is large enough."""
        storage = self._spare.pop(name, None)
        return storage if isinstance(storage, _Storage) and len(storage.flat) >= size else _Storage(size, like)

    def _release(self, name: str, state: _State | None) -> None:
        """Let the next step have the storage of a state that is not needed any more."""
        if state is not None and state.storage is not None:
            self._spare[name] = state.storage

    def _added(self, name: str, factor: Factor, lost: _Kept | None, share: float, loss_scale: float) -> Tensor:
        """Return the next memory of a weight: the gradient, without its loss scale, plus the memory times a share.

        Args:
            name: name of the weight.
            factor: the site's factors.
            lost: rows whose product is a part of the memory, too; None for none.
            share: scale of the memory.
            loss_scale: the loss scale of the gradient.
        """
        like, shape = factor.deltas, (factor.deltas.shape[1], factor.activations.shape[1])
        error, whole = self.errors.prepare(name, like, shape)
        if factor.write is not None:
            factor.write(slice(None), whole, error, share * loss_scale)
            if loss_scale != 1.0:
                whole.mul_(1 / loss_scale)
        elif factor.whole is None:
            before, beta = (whole, 0.0) if error is None else (error, share)
            torch.addmm(before, factor.deltas.T, factor.activations, beta=beta, alpha=1 / loss_scale, out=whole)
        elif error is None:
            torch.mul(factor.whole, 1 / loss_scale, out=whole)
        elif loss_scale == 1.0:
            torch.add(factor.whole, error, alpha=share, out=whole)
        else:  # the two may be the same, in a further call of a step
            torch.mul(error, share, out=whole).add_(factor.whole, alpha=1 / loss_scale)
        if lost is not None:
            left, right = (each.to(like) for each in lost.rows())
            whole.addmm_(left.T, right, alpha=share)
        return whole

    def commit(self, name: str, weight: float | None = None) -> None:
        if weight == 0.0:  # the step has taken nothing of what was sent
            self.rollback(name)
            return
        self._tables.commit(name, weight)
        if name in self._staged:
            staged, before = self._staged.pop(name), self._states.get(name, _State())
            if weight not in (None, staged.weight):
                staged = self._settled(name, staged, before, weight)
            self.errors.commit(name)
            if before.storage is not None:
                self._spare[name] = before.storage
            self._states[name] = staged

    def _settled(self, name: str, staged: _State, before: _State, weight: float) -> _State:
        """Return the next state of a weight whose gradient has had another weight in the mean than was expected.

        What was sent of the memory before has had it, too: the rest of it stays.

        Args:
            name: the name of the weight.
            staged: the next state, were the expected weight right.
            before: the present state.
            weight: the weight that it has had.
        """
        rest = (before.weight or staged.weight) * (1 / weight - 1 / staged.weight)
        lost, bias = staged.lost, staged.bias
        rows = None if before.lost is None else before.lost.rows()
        if self._whole.get(name):
            self.errors.add(name, rest, rows)
        elif rows is not None:
            left, right = rows[0] * rest, rows[1]
            if lost is not None:
                left, right = (torch.cat(each) for each in zip(lost.rows(), (left, right), strict=True))
            if (most := max(len(rows[0]), len(left) - len(rows[0]), _COLUMNS)) < len(left):
                left, right = (factor.T for factor in compress(left, right, most))
            lost = _loaded(left, right)
        if before.bias is not None:
            bias = before.bias * rest if bias is None else bias + before.bias * rest
        return staged._replace(weight=weight, lost=lost, bias=bias)

    def rollback(self, name: str) -> None:
        self.errors.rollback(name)
        self._tables.rollback(name)
        self._release(name, self._staged.pop(name, None))

    def retain(self, names: Container[str]) -> None:
        super().retain(names)
        self._tables.retain(names)
        for name, state in self._states.items():
            if name not in names:
                self._whole.pop(name, None)
                self._slots.pop(name, None)
                carry = None if state.carry is None else Carry(state.carry.right.clone())
                self._states[name] = state._replace(carry=carry, lost=None, room=0, bias=None, storage=None)
                self._spare.pop(name, None)
        if self.merger is not None:
            self.merger.retain(names)

    def quality(self) -> dict[str, Quality]:
        states = {**self._states, **self._staged}
        return {name: state.quality for name, state in states.items() if state.quality is not None}

    def state_dict(self) -> dict[str, Any]:
        states = self._states.items()
        return {
            "carried": {name: state.carry.right.clone() for name, state in states if state.carry is not None},
            "lost": {name: _loaded(*state.lost.rows())[:2] for name, state in states if state.lost is not None},
            "biases": {name: state.bias.clone() for name, state in states if state.bias is not None},
            "room": {name: state.room for name, state in states},
            "weights": {name: state.weight for name, state in states},
            "errors": self.errors.state_dict(),
            "tables": self._tables.state_dict(),
            "calls": {name: state.calls for name, state in states},
            "whole": {name: self._whole[name] for name, _ in states if name in self._whole},
            "rank": self.max_rank,
        } | ({} if self.merger is None else {"merger": self.merger.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_kinds(state, _KINDS)
        if any(right.ndim != 2 for right in state["carried"].values()) or (state.get("rank") or 1) < 1:
            raise ValueError("the directions of a layer are no matrix, or the rank is not positive")
        carried = {name: Carry(right.clone()) for name, right in state["carried"].items()}
        lost = {name: _loaded(*parts) for name, parts in state.get("lost", {}).items()}
        biases = {name: bias.clone() for name, bias in state.get("biases", {}).items()}
        names = {*carried, *lost, *state["calls"]}
        qualities = self.quality()
        self._states = {
            name: _State(
                carry=carried.get(name),
                lost=lost.get(name),
                room=state.get("room", {}).get(name, 0),
                bias=biases.get(name),
                weight=state.get("weights", {}).get(name, 0.0),
                calls=state["calls"].get(name, 0),
                quality=qualities.get(name),
            )
            for name in names
        }
        self.errors.load_state_dict(state["errors"])
        self._tables.load_state_dict(state.get("tables", {}))
        if self._keeps_rows:  # otherwise the options say it
            chosen = dict.fromkeys(lost, False) | dict.fromkeys(state["errors"]["errors"], True)
            self._whole = chosen | state.get("whole", {})
        self.max_rank = state.get("rank", self.max_rank)
        if self.merger is not None:
            self.max_rank = min(state.get("rank", self._room), self.options.largest_rank)
            self.merger.load_state_dict(state.get("merger", self.merger.state_dict()))

    def load_from(self, state: dict[str, Any]) -> None:
        if self.merger is not None:
            self.merger.add_state(state.get("merger", {}))


@functools.cache
def most_worth(rank: int, out: int, width: int, wire: str) -> int:
    """Return the most components of a gradient that are worth sending: all, or fewer where that saves bytes.

    They are a quarter of its smaller side where that saves a kilobyte of what a rank takes, and no more than 4 beyond a
    hundredth of its bytes in fp32 where that saves three.

    Args:
        rank: the largest rank that may be chosen.
        out: height of the gradient.
        width: its width.
        wire: name of the number format of the components.
    """
    most, sent = min(out, width), wire_format(wire)
    row = (sent.row_size(out) + sent.row_size(width)) * sent.itemsize
    few = max(_LEAST, int(_SHARE * out * width * torch.float32.itemsize / row))
    for fewer, least in ((max(1, most // _NARROW), _WORTH), (few, _LARGE)):
        if (min(rank, most) - fewer) * row >= least:
            most = fewer
    return most


def rows_kept(rank: int, rows: int) -> int:
    """Return how many components are kept of what is not sent: more where the rows make their cost small.

    Args:
        rank: number of components that are sent.
        rows: rows of the factors of a step.
    """
    least = rank // 2
    most = max(least, _COLUMNS - rank)
    return least if rank >= rows else min(most, max(2 * rank, rows // 4))


def keeps_whole(rows: int, out: int, width: int, rank: int) -> bool:
    """Return whether a gradient had better be formed, and all of it kept, than compressed by its rows.

    Args:
        rows: rows of the factors of a step.
        out: height of the gradient.
        width: its width.
        rank: number of components that are sent.
    """
    rates, size, columns = current().encoding, out * width, columns_for(rank)
    formed = rows * size / rates.fat + (2 * columns + rank) * size / rates.skinny
    by_rows = 2 * (rank + rows_kept(rank, rows)) * rows * (out + width) / rates.skinny
    return _CALLS + formed <= _PREFERRED * (_CALLS + by_rows)


def _loaded(left: Tensor, right: Tensor) -> _Kept:
    """Return copies of rows without a loss scale."""
    return _Kept(left.clone(), right.clone(), 1.0)


def _fitting(state: _State, factor: Factor, bias: Tensor | None) -> _State:
    """Return what a gradient can use of a state: directions in its type, and nothing of a layer of another shape."""
    (out, width), dtype, carry = (factor.deltas.shape[1], factor.activations.shape[1]), factor.deltas.dtype, state.carry
    if carry is not None and carry.right.shape[1] != width:
        state = _State(weight=state.weight, calls=state.calls)
    elif carry is not None and carry.right.dtype != dtype:
        state = state._replace(carry=Carry(carry.right.to(dtype)))
    if state.lost is not None and (state.lost.left.shape[1], state.lost.right.shape[1]) != (out, width):
        state = state._replace(lost=None)
    if state.bias is not None and bias is not None and state.bias.shape != bias.shape:
        state = state._replace(bias=None)
    return state


_MERGE_ITERATIONS = 2  # at least: the sum of the sites' factors changes more from step to step than each of them


class Merger(RankDAD):
    """Compression of the sum of all sites' factors, for the layers that this site owns.

    Args:
        options: the options of the reduction.
        loss_scales: those of the site's own gradients.

    Attributes:
        memory: what the merges of divided layers have dropped.
    """

    def __init__(self, options: MethodOptions, loss_scales: LossScales) -> None:
        super().__init__(options)
        self.loss_scales = loss_scales
        self.memory = MergeMemory()
        self._iterations = max(_MERGE_ITERATIONS, options.iterations)

    def _make_merger(self, options: MethodOptions) -> None:
        return None

    def commit(self, name: str, weight: float | None = None) -> None:
        super().commit(name, weight)
        self.memory.commit(name)

    def rollback(self, name: str) -> None:
        super().rollback(name)
        self.memory.rollback(name)

    def retain(self, names: Container[str]) -> None:
        super().retain(names)
        self.memory.retain(names)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"divided": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"rank": self.max_rank})  # that of the room in the present plan
        self.memory.load_state_dict(state.get("divided", {}))

    def add_state(self, state: dict[str, Any]) -> None:
        """Add what another site has returned by `state_dict`: by a new plan, its layers may be this site's.

        Args:
            state: the state; empty for none.
        """
        if not state:
            return
        own = self.state_dict()
        for part in ("carried", "lost", "room", "biases", "calls", "weights", "whole"):
            own[part] = {**state.get(part, {}), **own[part]}
        own["errors"]["errors"] = {**state["errors"]["errors"], **own["errors"]["errors"]}
        self.load_state_dict(own)
        self.memory.add(state.get("divided", {}))

    def forget_whole(self, names: Iterable[str]) -> None:
        """Drop the state of whole layers that this site does not own."""
        for name in names:
            super().rollback(name)
            for kept in (self._states, self._spare, self._slots, self._whole):
                kept.pop(name, None)
            self.errors.forget(name)

    def forget_divided(self, names: Iterable[str]) -> None:
        """Drop the memory of layers that are not divided any more."""
        for name in names:
            self.memory.forget(name)
