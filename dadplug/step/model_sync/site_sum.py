"""Sum of the gradients of a site's processes, which act as one site where sites may leave.

Gradients are held until the end of a step. Then each process gets the rows and gradients of all, weighted by its share
of the site's samples, and goes on as if one process had computed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...exchange import Transport
from ...exchange.codec import register
from ...exchange.fields import checked
from ...hooks import LINEAR, Factor, Form
from ..methods.feedback import LossScales
from ..units.base import Unit
from ..units.factor import FactorUnit
from .samples import SampleCounter

_PIECE = 1 << 22  # elements of the weights whose gradients are exchanged together


@register
@dataclass(frozen=True)
class StepPart:
    """Part of a process in a step of its site.

    Attributes:
        weight: its weight in the site's mean.
        samples: its samples; 0 where they are not known.
        has_gradients: whether it has gradients.
        stop: whether it asks all sites to stop.
    """

    weight: int
    samples: int
    has_gradients: bool
    stop: bool

    def counts(self) -> list[int]:
        """Return the numbers that are counts."""
        return [self.weight, self.samples]


@register
@dataclass(frozen=True)
class GradientPart:
    """Gradients of a unit at one process.

    Attributes:
        rows: factors: activations, deltas, form, the bias's gradient where it does not follow from the deltas, and
            whether activations and deltas have exchanged their roles.
        formed: gradients that are compressed as matrices, each with that of the bias.
        gradients: what is in ``.grad``, by name of the parameter.
        loss_scale: the loss scale that they contain.
        arrivals: as in `Unit`.
        dense: as in `Unit`.
        outside: as in `FactorUnit`.
    """

    rows: list[tuple[Tensor, Tensor, Form, Tensor | None, bool]]
    formed: list[tuple[Tensor, Tensor | None]]
    gradients: dict[str, Tensor]
    loss_scale: float
    arrivals: int
    dense: bool = False
    outside: bool = False

    @classmethod
    def of(cls, unit: Unit, loss_scale: float) -> GradientPart:
        """Take what this process has of a unit; factors are not held any more."""
        if not isinstance(unit, FactorUnit):
            return cls([], [], _dense(unit), loss_scale, unit.arrivals)
        rows, formed = [], []
        for factor in unit.take_held():
            if factor.whole is None:
                rows.append((factor.activations, factor.deltas, factor.form, factor.bias, factor.exchanged))
            else:
                formed.append((factor.whole, factor.bias))
        dense = _dense(unit) if unit.dense else {}
        return cls(rows, formed, dense, loss_scale, unit.arrivals, unit.dense, unit.outside)


def _dense(unit: Unit) -> dict[str, Tensor]:
    found = {name: each.grad.detach() for name, each in unit.parameters.items() if each.grad is not None}
    return {name: each.to_dense() if each.is_sparse else each for name, each in found.items()}


def add_up(
    units: Sequence[Unit], stop: bool, inside: Transport | None, counter: SampleCounter, scales: LossScales
) -> bool:
    """Replace what the units have by the sum of the site's processes, and the counter's samples by those of the site.

    Where samples are not counted, processes with gradients count the same in a site, and sites with gradients in the
    mean.

    Args:
        units: the units, the same at all processes.
        stop: whether this process asks all sites to stop.
        inside: messages between the processes; None where the site has one.
        counter: counter of this process's samples.
        scales: loss scales of this process's gradients.

    Returns:
        Whether one of the processes asks to stop.

    Raises:
        SiteError: if a process of the site has ended or does not answer.
    """
    if inside is None:
        return stop
    own = StepPart(counter.weight(provisional=False), counter.count, counter.pending, stop)
    parts = [*checked(inside.gather_present(own), StepPart, "part in a step", inside, StepPart.counts).values()]
    total = sum(part.weight for part in parts)
    shares = [part.weight / total if total else 1.0 - bool(rank) for rank, part in enumerate(parts)]
    for piece in _pieces(units):
        taken = [GradientPart.of(unit, scales.of(unit.name)) for unit in piece]
        every = checked(inside.gather_present(taken), list[GradientPart], "gradients", inside)
        every[inside.rank] = taken
        for unit, of_unit in zip(piece, zip(*every.values(), strict=True), strict=True):
            _put(unit, of_unit, shares)
            if (other := next((part for part in of_unit if part.arrivals), None)) is not None:
                scales.adopt(unit.name, other.loss_scale)
    counts = [part.samples for part in parts if part.has_gradients]
    counter.pending = any(part.has_gradients for part in parts)
    counted = counter.by_samples or counter.dealt is not None
    counter.of_site = (total if counted else min(1, total)), sum(counts) if all(counts) else 0
    return any(part.stop for part in parts)


def _pieces(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Divide units into groups that are exchanged together."""
    group: list[Unit] = []
    for unit in units:
        group.append(unit)
        if sum(each.lead.numel() for each in group) >= _PIECE:
            yield group
            group = []
    if group:
        yield group


def _put(unit: Unit, parts: Sequence[GradientPart], shares: Sequence[float]) -> None:
    """Let a unit have what all processes have of it.

    Args:
        unit: the unit.
        parts: what each process has.
        shares: weight of each process in the mean of the site.
    """
    unit.arrivals = max(part.arrivals for part in parts)
    if isinstance(unit, FactorUnit):
        unit.dense, unit.outside = any(part.dense for part in parts), any(part.outside for part in parts)
        unit.hold([*_factors(unit, parts, shares)])
    for name, parameter in unit.parameters.items():
        sent = [
            (part.gradients[name], share) for part, share in zip(parts, shares, strict=True) if name in part.gradients
        ]
        if sent:
            parameter.grad = sum(
                (share * each.to(parameter.device) for each, share in sent), torch.zeros_like(parameter)
            )


def _factors(unit: FactorUnit, parts: Sequence[GradientPart], shares: Sequence[float]) -> Iterator[Factor]:
    """Yield the factors of all processes, weighted; of formed gradients their sum."""
    device, whole = unit.lead.device, None
    bias: Tensor | None = None
    for part, share in zip(parts, shares, strict=True):
        for activations, deltas, form, own, exchanged in part.rows:
            scaled = None if own is None else share * own.to(device)
            linear = LINEAR if form == LINEAR else form
            yield Factor(activations.to(device), share * deltas.to(device), linear, scaled, exchanged=exchanged)
        for gradient, own in part.formed:
            scaled = share * gradient.to(device)
            whole = scaled if whole is None else whole + scaled
            if own is not None:
                bias = share * own.to(device) if bias is None else bias + share * own.to(device)
    if whole is not None:
        yield replace(Factor.formed(whole.view(unit.lead.shape)), bias=bias)
