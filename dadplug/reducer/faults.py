"""Faults of a step: NaN or Inf in gradients, and chains whose deltas cannot be recomputed."""

from __future__ import annotations

from enum import IntEnum

from ..exchange.factor_buckets import finite
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
