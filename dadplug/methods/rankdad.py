"""rank-dAD: sites exchange low-rank factors of their gradients, ``G ~ sum over sites of w_s L_s R_s^T``.

Source: arXiv:2102.09631, section 4. Published with deflation, one vector at a time; here block power iteration with
orthonormalisation, a projection of the gradient whose error is never larger than that of sending nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exchange.factor_buckets import FactorPayload
from ..exchange.wire import WireFormat, wire_format
from ..hooks import Factor
from ..lowrank import Carry, Compressed, compress, compress_matrix, squared_norm
from .base import Method, MethodOptions, Quality, Traits, register_method
from .feedback import ErrorFeedback, LossScales, MergeMemory

_MEASURE_EVERY = 10  # steps between measurements of the residual, which cost about as much as a compression


class _State(NamedTuple):
    """State of a layer that is kept between steps.

    Attributes:
        carry: directions to start from.
        lost: rows whose product is what was not sent, as far as it is kept, without the loss scale: further singular
            vectors, and the rounding error of int8.
        calls: number of compressions.
        quality: quality of the last one.
    """

    carry: Carry | None = None
    lost: FactorPayload | None = None
    calls: int = 0
    quality: Quality | None = None

    def scaled(self, factor: float) -> _State:
        """Return the state with the lost rows times a factor."""
        return self if self.lost is None else self._replace(lost=self.lost._replace(left=self.lost.left * factor))


@register_method("rankdad")
class RankDAD(Method):
    """Gather of r (m + n) values a layer for any number of rows, and of uncompressed bias gradients.

    A layer whose gradient is not larger than that is all-reduced.
    """

    traits = Traits(exact=False, sends_bias=True, detects_nonfinite=True, keeps_state=True)

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.max_rank: int = options.rank
        self.merger = self._make_merger(options)
        self._iterations = options.iterations
        self._kept_rows = options.rank if keeps_rows(options) and not options.error_feedback else 0
        self.errors = ErrorFeedback(bool(options.error_feedback))
        self._states: dict[str, _State] = {}
        self._staged: dict[str, _State] = {}

    @property
    def keeps_errors(self) -> bool:
        return super().keeps_errors or keeps_rows(self.options)

    def _make_merger(self, options: MethodOptions) -> Merger | None:
        return None if options.merge == "all" else Merger(options, self.loss_scales)

    def path(self, out: int, width: int) -> str:
        rank = min(self.options.rank, out, width)
        return "lowrank" if rank * (out + width) < out * width else "allreduce"

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        return min(self.max_rank, rows, out, width)

    def encode(self, name: str, factor: Factor, with_bias: bool) -> FactorPayload:
        state = self._staged.get(name) or self._states.get(name, _State())
        how: dict[str, Any] = {
            "iterations": self._iterations,
            "tolerance": self.options.tolerance,
            "warm_start": state.carry if self.options.warm_start else None,
            "seed": zlib.crc32(name.encode()),
        }
        measure = state.calls % _MEASURE_EVERY == 0 or state.quality is None
        loss_scale = self.loss_scales.of(name)
        if self.errors.enabled:
            whole = self._with_errors(name, factor, loss_scale)
            compressed = compress_matrix(whole, self.max_rank, **how)
            size = float(whole.double().square().sum()) if measure else 0.0
        else:
            deltas, activations = factor.deltas, factor.activations
            if state.lost is not None:  # as further rows
                deltas = torch.cat([deltas, state.lost.left])
                activations = torch.cat([activations, state.lost.right * loss_scale])
            compressed = compress(deltas, activations, self.max_rank + self._kept_rows, **how)
            size = squared_norm(deltas, activations) if measure else 0.0
        sent, carry, lost = min(compressed.effective_rank, self.max_rank), state.carry, None
        if sent and self.options.warm_start:
            carry = compressed.carry
        residual = state.quality.residual if state.quality and not measure else compressed.residual_of(size, sent)
        left, right = compressed.left.T[:sent], compressed.right.T[:sent]
        wire = wire_format(self.options.wire, left.dtype)
        if self.errors.enabled:
            right = right * loss_scale if loss_scale != 1.0 else right
            whole.addmm_(wire.round_trip(left).T, wire.round_trip(right), alpha=-1 / loss_scale)
        else:
            lost = _not_sent(compressed, sent, wire, loss_scale)
        self._staged[name] = _State(carry, lost, state.calls + 1, Quality(sent, residual))
        return FactorPayload(left, right, factor.bias_gradient() if with_bias else None)

    def _with_errors(self, name: str, factor: Factor, loss_scale: float) -> Tensor:
        """Compute the gradient without its loss scale plus the error memory, in the buffer of the next memory."""
        like = factor.deltas.new_empty(1).expand(factor.deltas.shape[1], factor.activations.shape[1])
        error, whole = self.errors.find(name, like), self.errors.prepare(name, like)
        beta = 0.0 if error is None else 1.0
        before = whole if error is None else error
        return torch.addmm(before, factor.deltas.T, factor.activations, beta=beta, alpha=1 / loss_scale, out=whole)

    def commit(self, name: str) -> None:
        self.errors.commit(name)
        if name in self._staged:
            self._states[name] = self._staged.pop(name)

    def rollback(self, name: str) -> None:
        self.errors.rollback(name)
        self._staged.pop(name, None)

    def quality(self) -> dict[str, Quality]:
        states = {**self._states, **self._staged}
        return {name: state.quality for name, state in states.items() if state.quality is not None}

    def state_dict(self) -> dict[str, Any]:
        states = self._states.items()
        return {
            "carried": {name: state.carry.right.clone() for name, state in states if state.carry is not None},
            "lost": {
                name: tuple(p.clone() for p in state.lost[:2]) for name, state in states if state.lost is not None
            },
            "errors": self.errors.state_dict(),
            "calls": {name: state.calls for name, state in states},
            "rank": self.max_rank,
        } | ({} if self.merger is None else {"merger": self.merger.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        carried = {name: Carry(right.clone()) for name, right in state["carried"].items()}
        lost = {name: FactorPayload(*(part.clone() for part in parts)) for name, parts in state.get("lost", {}).items()}
        names = {*carried, *lost, *state["calls"]}
        qualities = self.quality()
        self._states = {
            name: _State(carried.get(name), lost.get(name), state["calls"].get(name, 0), qualities.get(name))
            for name in names
        }
        self.errors.load_state_dict(state["errors"])
        self.max_rank = state.get("rank", self.max_rank)
        if self.merger is not None:
            self.max_rank = min(self.max_rank, self.options.rank)
            self.merger.load_state_dict(state.get("merger", self.merger.state_dict()))

    def load_from_all(self, states: Sequence[dict[str, Any]]) -> None:
        if self.merger is not None:
            for state in states:
                self.merger.add_state(state.get("merger", {}))


def keeps_rows(options: MethodOptions) -> bool:
    """Return whether as many further rows as are sent are kept of what sites and merges do not send.

    Without merges only `error_feedback` keeps anything, as a whole gradient. Merges of divided layers keep rows with it
    as well, since no site has the whole sum.
    """
    return options.merge != "all" and options.error_feedback is not False


def _not_sent(compressed: Compressed, sent: int, wire: WireFormat, loss_scale: float) -> FactorPayload | None:
    """Return rows whose product is what the next step adds, without the loss scale; None for none.

    Args:
        compressed: the compressed gradient.
        sent: number of its first components that are sent.
        wire: the format in which they are sent.
        loss_scale: the loss scale of the gradient.
    """
    kept = compressed.effective_rank
    left, right = compressed.left.T[sent:kept], compressed.right.T[sent:kept]
    if wire.quantised:
        first, second = compressed.left.T[:sent], compressed.right.T[:sent]
        left = torch.cat([left, first, -wire.round_trip(first)])
        right = torch.cat([right, second, wire.round_trip(second)])
    return FactorPayload(left.clone(), right / loss_scale) if len(left) else None


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
        self._reference = 0

    def _make_merger(self, options: MethodOptions) -> None:
        return None

    def refer(self, reference: int) -> None:
        """Set the number of samples whose mean gradient the memory is in units of, and rescale the memory to it."""
        if self._reference not in (0, reference):
            scale = self._reference / reference
            self.memory.scale(scale)
            self._states = {name: state.scaled(scale) for name, state in self._states.items()}
        self._reference = reference
        self.errors.refer(reference)

    def commit(self, name: str) -> None:
        super().commit(name)
        self.memory.commit(name)

    def rollback(self, name: str) -> None:
        super().rollback(name)
        self.memory.rollback(name)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"reference": self._reference, "divided": self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        current = self._reference
        super().load_state_dict(state)
        self.memory.load_state_dict(state.get("divided", {}))
        self._reference = state.get("reference", state["errors"]["reference"])
        if current:
            self.refer(current)

    def add_state(self, state: dict[str, Any]) -> None:
        """Add what another site has returned by `state_dict`: by a new plan, its layers may be this site's.

        Args:
            state: the state; empty for none.
        """
        if not state:
            return
        own = self.state_dict()
        theirs = state.get("reference", state["errors"]["reference"])
        own["reference"] = own["errors"]["reference"] = own["reference"] or theirs
        scale = theirs / own["reference"] if own["reference"] else 1.0
        lost = {name: (left * scale, right) for name, (left, right) in state["lost"].items()}
        errors = {name: error * scale for name, error in state["errors"]["errors"].items()}
        for part, other in (("carried", state["carried"]), ("lost", lost), ("calls", state["calls"])):
            own[part] = {**other, **own[part]}
        own["errors"]["errors"] = errors | own["errors"]["errors"]
        self.load_state_dict(own)
        self.memory.add(state.get("divided", {}), scale)

    def forget_whole(self, names: Iterable[str]) -> None:
        """Drop the state of whole layers that this site does not own."""
        for name in names:
            super().rollback(name)
            self._states.pop(name, None)
            self.errors.forget(name)

    def forget_divided(self, names: Iterable[str]) -> None:
        """Drop the memory of layers that are not divided any more."""
        for name in names:
            self.memory.forget(name)
