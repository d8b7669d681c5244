"""Paths that a parameter's gradient can take to the other sites."""

from __future__ import annotations

from enum import Enum


class GradientPath(str, Enum):
    """Name of a path; equal to, printed and hashed as the plain string.

    A method may name paths of its own beside these, for which `dadplug.reducer.register_handler` has registered a
    handler.
    """

    ALLREDUCE = "allreduce"
    """Gradients are summed over sites."""
    FACTORS = "factors"
    """Rows of activations and deltas are gathered."""
    ACTIVATIONS = "activations"
    """Activations are gathered; deltas are recomputed from those of the layer that follows in a chain."""
    LOWRANK = "lowrank"
    """Gradients are compressed to low-rank factors, which are gathered."""
    POWERSGD = "powersgd"
    """Gradients are compressed to a low rank that is common to all sites."""
    TOPK = "topk"
    """The largest elements of each gradient are gathered with their indices."""
    FROZEN = "frozen"
    """The parameter is not trained, and nothing is sent."""

    __str__ = str.__str__
    __repr__ = str.__repr__
    __format__ = str.__format__  # type: ignore[assignment]
