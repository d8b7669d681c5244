"""Faults of a step: NaN or Inf in gradients, and chains whose deltas cannot be recomputed; and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from ...errors import MismatchError, NonFiniteError
from ...exchange import PeerNames
from ...exchange.factor_buckets import finite
from ..units.base import Unit


class Fault(IntEnum):
    """Kind of a fault, as it is sent in a step header."""

    NONE = 0
    ACTIVATIONS = 1
    """NaN or Inf in the activations of a layer."""
    DELTAS = 2
    """NaN or Inf in the deltas of a layer."""
    GRADIENT = 3
    """NaN or Inf in a gradient that autograd has formed."""
    CHAIN_BROKEN = 4
    """Deltas that the other sites cannot recompute."""
    ATTACHED = 5
    """NaN or Inf in a gradient that the reduction does not send."""
    MERGED = 6
    """NaN or Inf in the merged gradient of finite ones; never sent, since all sites find it."""
    SENT = 7
    """NaN or Inf in what a site has sent, of which its header states that it is finite; never sent, either."""
    SUMMED = 8
    """NaN or Inf in a sum, where all headers state that the summands are finite; never sent, either."""


class FaultLog:
    """Faults of this site in the present step.

    Attributes:
        entries: kind and name of the unit, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Fault, str]] = []

    def record(self, fault: Fault, unit: Unit) -> None:
        """Record a fault of a unit."""
        self.entries.append((fault, unit.name))

    def check_gradient(self, unit: Unit) -> None:
        """Record a fault if ``.grad`` of a unit's leading parameter holds NaN or Inf."""
        gradient = unit.lead.grad
        if gradient is not None and not finite(gradient):
            self.record(Fault.GRADIENT, unit)

    def drop(self, unit: Unit) -> None:
        """Drop the faults of a unit, whose gradient has been discarded."""
        self.entries = [entry for entry in self.entries if entry[1] != unit.name]

    def clear(self) -> None:
        """Forget the step."""
        self.entries.clear()

    @property
    def first(self) -> tuple[Fault, str]:
        """The fault to report: that which comes first in the forward pass, if it is one of activations.

        Backward reaches the layers in the reverse order. Without a fault of activations, the first that backward
        reached.
        """
        activations = [entry for entry in self.entries if entry[0] == Fault.ACTIVATIONS]
        return activations[-1] if activations else self.entries[0]


class Stated(Protocol):
    """Part of a step header about a fault, see `dadplug.step.reducer.handler.StepHeader`."""

    step: int
    samples: int
    fault: Fault
    culprit: int


_MESSAGES = {
    Fault.ACTIVATIONS: "the input of the layer of {!r}, the first in the forward pass: look at the data, or at a layer "
    "before it that has no factors",
    Fault.DELTAS: "the loss's gradient at the output of the layer of {!r}, the first that backward reached: the loss "
    "itself is probably not finite",
    Fault.GRADIENT: "the gradient of {!r}, the first that backward reached",
    Fault.ATTACHED: "the gradient of {!r}",
    Fault.SENT: "what it has sent of {!r}, although its step header states that all is finite",
}
_EVERYWHERE = "All sites that have data find some: their parameters may be out of range since an earlier step. "


def raise_fault(
    headers: Sequence[Stated],
    units: Sequence[str],
    sites: PeerNames,
    others: Sequence[str] = (),
    explanation: str = "",
) -> None:
    """Raise the error that a step header reports, the same on every site.

    Args:
        headers: the headers of all sites, by rank.
        units: names of the units.
        sites: the sites by name.
        others: names of attached parameters, which no unit sends.
        explanation: what may explain NaN and Inf, see `clipping.OutsizedGradients.explain`.

    Raises:
        NonFiniteError: if some site's gradients hold NaN or Inf.
        MismatchError: if a layer's deltas cannot be recomputed.
    """
    for rank, header in enumerate(headers):
        if not header.fault:
            continue
        name = (others if header.fault == Fault.ATTACHED else units)[header.culprit]
        if header.fault == Fault.CHAIN_BROKEN:
            raise MismatchError(
                f"step {header.step}: mode 'edad' cannot recompute the gradient of {name!r} of {sites[rank]}: the "
                "layer behind it had its weight changed, or its gradient alone cleared, between backward() and "
                "synchronize(). Use mode='dad'. No gradient has been changed by this step"
            )
        if header.fault == Fault.SUMMED:
            raise NonFiniteError(
                f"step {header.step}: {explanation}NaN or Inf in the sum of the sites' gradients of {name!r}, although "
                "all step headers state that these are finite: a site has sent another one, or the sum leaves the "
                "range of its type. No parameter has been changed by this step. Scale the loss, or pass wire='fp32'"
            )
        if header.fault == Fault.MERGED:
            raise NonFiniteError(
                f"step {header.step}: {explanation}NaN or Inf in the gradient of {name!r} that {sites[rank]} has "
                "merged, though all step headers state that the sites' own are finite: a site has sent another one, or "
                "the merged one leaves the range of its type. No parameter has been changed by this step. Scale the "
                "loss, or pass merge='all'"
            )
        everywhere = len(headers) > 1 and all(each.fault or not each.samples for each in headers)
        raise NonFiniteError(
            f"step {header.step}: {explanation}NaN or Inf at {sites[rank]}, in {_MESSAGES[header.fault].format(name)}. "
            f"{_EVERYWHERE if everywhere else ''}No parameter has been changed by this step. (Under a GradScaler this "
            "is normal: pass check_finite=False.)"
        )
