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

from ..exchange.payload import FactorPayload
from ..exchange.wire import wire_format
from ..hooks import Factor
from ..lowrank import Carry, compress, compress_matrix, squared_norm
from .base import Method, MethodOptions, Quality, Traits, register_method
from .feedback import ErrorFeedback
from .loss_scale import LossScales

_MEASURE_EVERY = 10  # steps between measurements of the residual, which cost about as much as a compression


class _State(NamedTuple):
    """State of a layer that is kept between steps.

    Attributes:
        carry: directions to start from.
        lost: rows whose product is the rounding error of int8, without the loss scale.
        calls: number of compressions.
        quality: quality of the last one.
    """

    carry: Carry | None = None
    lost: FactorPayload | None = None
    calls: int = 0
    quality: Quality | None = None


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
        self.errors = ErrorFeedback(bool(options.error_feedback))
        self._states: dict[str, _State] = {}
        self._staged: dict[str, _State] = {}

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
            compressed = compress(deltas, activations, self.max_rank, **how)
            size = squared_norm(deltas, activations) if measure else 0.0
        kept, carry, lost = compressed.effective_rank, state.carry, None
        if kept and self.options.warm_start:
            carry = compressed.carry
        residual = state.quality.residual if state.quality and not measure else compressed.residual_of(size)
        left, right = compressed.left.T[:kept], compressed.right.T[:kept]
        wire = wire_format(self.options.wire, left.dtype)
        if self.errors.enabled:
            right = right * loss_scale if loss_scale != 1.0 else right
            whole.addmm_(wire.round_trip(left).T, wire.round_trip(right), alpha=-1 / loss_scale)
        elif wire.quantised:
            lost = FactorPayload(
                torch.cat([left, -wire.round_trip(left)]),
                torch.cat([right, wire.round_trip(right)]).div_(loss_scale),
            )
        self._staged[name] = _State(carry, lost, state.calls + 1, Quality(kept, residual))
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


_MERGE_ITERATIONS = 2  # at least: the sum of the sites' factors changes more from step to step than each of them


class Merger(RankDAD):
    """Compression of the sum of all sites' factors, for the layers that this site owns.

    Args:
        options: the options of the reduction.
        loss_scales: those of the site's own gradients.
    """

    def __init__(self, options: MethodOptions, loss_scales: LossScales) -> None:
        super().__init__(options)
        self.loss_scales = loss_scales
        self._iterations = max(_MERGE_ITERATIONS, options.iterations)

    def _make_merger(self, options: MethodOptions) -> None:
        return None

    def add_state(self, state: dict[str, Any]) -> None:
        """Add what another site has returned by `state_dict`: by a new plan, its layers may be this site's.

        Args:
            state: the state; empty for none.
        """
        own = self.state_dict()
        for part in ("carried", "lost", "calls"):
            own[part] = {**state.get(part, {}), **own[part]}
        if state and state["errors"]["errors"]:
            other, reference = state["errors"], own["errors"]["reference"] or state["errors"]["reference"]
            scale = other["reference"] / reference if reference else 1.0
            errors = {name: error * scale for name, error in other["errors"].items()}
            own["errors"] = {"reference": reference, "errors": errors | own["errors"]["errors"]}
        self.load_state_dict(own)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the state of layers that this site does not own."""
        for name in names:
            self.rollback(name)
            self._states.pop(name, None)
            self.errors.forget(name)
