"""Unit of a layer in a chain, whose deltas every site recomputes from those of the layer that follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..exchange.codec import register
from ..exchange.factor_buckets import FactorPayload
from ..hooks import LINEAR, Elementwise, Factor, stack_by_form
from ..methods.paths import GradientPath
from .factor import FactorUnit

register(Elementwise)


@register
@dataclass(frozen=True)
class ChainLink:
    """Link from a layer to the next one of its chain.

    Attributes:
        follower: name of the unit whose layer has the output as its input.
        function: the function between the two.
    """

    follower: str
    function: Elementwise


class ChainedUnit(FactorUnit):
    """A unit that sends activations alone, since its deltas follow from those of another unit.

    Rows of the two are matched call by call: this unit's rows are the first ones of the follower's. Rows without a
    match, since a step took another way through the model, become a dense gradient.

    Args:
        unit: the unit that it replaces.
        link: the link to the unit that follows.
    """

    def __init__(self, unit: FactorUnit, link: ChainLink) -> None:
        super().__init__(unit.name, unit.bias, unit.parameters, unit.layers, GradientPath.ACTIVATIONS, LINEAR)
        self.arrivals, self.expected = unit.arrivals, unit.expected
        self.dense, self.outside = unit.dense, unit.outside
        self.link = link
        self.follower: FactorUnit = unit  # until all units of the plan have been replaced
        self._accepted: list[int] = []
        self._refused: set[int] = set()

    @property
    def widths(self) -> tuple[int, int]:
        return 0, self.shape[1]

    @property
    def row_keys(self) -> list[int]:
        follower_keys = self.follower.row_keys
        for factor in self._peek():
            trace = factor.trace
            if trace is None or trace.key in self._refused or trace.key in self._accepted:
                continue
            place = len(self._accepted)
            fits = (
                trace.function == self.link.function
                and follower_keys[place : place + 1] == [trace.follower_key]
                and not self.follower.weight_changed
            )
            if fits:
                self._accepted.append(trace.key)
            else:
                self._refused.add(trace.key)
        return self._accepted

    def take(self) -> Factor | None:
        accepted = set(self.row_keys)
        fitting: list[Factor] = []
        others: list[Factor] = []
        factors = self._collect()
        self._sent_factors = factors if self._is_small(factors) else []
        for factor in factors:
            fits = factor.trace is not None and factor.trace.key in accepted
            (fitting if fits else others).append(factor)
        for factor in stack_by_form(others):
            self._form(factor)
            self.dense = True
        if not fitting:
            return None
        activations = torch.cat([factor.activations for factor in fitting]) if fitting[1:] else fitting[0].activations
        return Factor(activations, activations.new_empty(len(activations), 0))

    def complete(
        self, payloads: Sequence[FactorPayload], known: Mapping[str, list[FactorPayload]]
    ) -> list[FactorPayload] | None:
        followers = known.get(self.link.follower)
        if followers is None or any(own.rows > other.rows for own, other in zip(payloads, followers, strict=True)):
            return None
        weight = self.follower.lead.detach()
        complete = []
        for own, other in zip(payloads, followers, strict=True):
            matched = other.part(0, own.rows)
            deltas = self.link.function.backward(matched.left @ weight, matched.right)
            complete.append(FactorPayload(deltas.to(own.right.device), own.right))
        return complete

    def before_header(self) -> None:
        if self._is_stale:
            self.reclaim()

    @property
    def broken(self) -> bool:
        return self._is_stale

    @property
    def _is_stale(self) -> bool:
        """Whether other sites would recompute deltas from others than this site had, or by another weight."""
        changed = self.follower.void or self.follower.weight_changed
        return self.sent and not self.void and bool(self._accepted) and changed

    def reclaim(self) -> bool:
        reclaimed = super().reclaim()
        if reclaimed:
            self._forget_matches()
        return reclaimed

    def discard(self) -> None:
        super().discard()
        self._forget_matches()

    def begin_step(self) -> None:
        super().begin_step()
        self._forget_matches()

    def _forget_matches(self) -> None:
        self._accepted.clear()
        self._refused.clear()
