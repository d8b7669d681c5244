"""Reductions of this process, so that a loader finds the one whose gradients its batches lead to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from ..exchange import Traffic


class Noise(Protocol):
    """Gradient noise, as `dadplug.GradientReduction.noise` estimates it."""

    base_batch: int | None

    @property
    def scale(self) -> float:
        """Noise scale, in samples; NaN before the first estimate."""


class GradientSource(Protocol):
    """Part of `dadplug.GradientReduction` that the choice of batches needs."""

    traffic: Traffic
    options: Any

    @property
    def noise(self) -> Noise:
        """The gradient noise."""

    @property
    def gain(self) -> float:
        """Scale-invariant steps that the last step is worth."""

    @property
    def plan(self) -> Iterable[Any]:
        """The path and bytes of every parameter."""


_sources: weakref.WeakSet[GradientSource] = weakref.WeakSet()


def register_source(source: Any) -> None:
    """Register a `GradientSource`; it is forgotten when it is no longer referenced."""
    _sources.add(source)


def remove_source(source: Any) -> None:
    """Remove a `GradientSource` that has been detached."""
    _sources.discard(source)


class StepWatch:
    """Watch for the reduction that takes steps in a loop.

    Args:
        source: the reduction, if the program has named it.
    """

    def __init__(self, source: GradientSource | None) -> None:
        self.source = source
        self._steps: dict[int, int] = {}

    def begin(self) -> None:
        """Begin to watch, before a step."""
        if self.source is None:
            self._steps = {id(each): each.traffic.steps for each in _sources}

    def end(self) -> GradientSource | None:
        """Return the reduction that has taken a step since `begin`; None if there was none.

        Raises:
            ValueError: if several have.
        """
        if self.source is None:
            found = [each for each in _sources if each.traffic.steps > self._steps.get(id(each), 0)]
            if len(found) > 1:
                raise ValueError(
                    "several GradientReductions take steps in the loop: name the one that decides about the batch, "
                    "autoscale_batch_size(..., reduction=REDUCTION)"
                )
            self.source = found[0] if found else None
        return self.source
