"""State that a site gets from another one when it joins in mid-training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..exchange.codec import register


class Stateful(Protocol):
    """Object with state, such as an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Restore what `state_dict` returned."""


@register
@dataclass(frozen=True)
class JoinState:
    """State of a site at the beginning of a step.

    Attributes:
        description: options, and types and shapes of the model's tensors, which have to be the same.
        tensors: parameters and buffers by name.
        step: number of the step.
        plan: state of the plan.
        further: state of the objects that the program has named, such as the optimizer, by name.
        noise: state of the estimates of the gradient's noise; None where there are none.
    """

    description: dict[str, str]
    tensors: dict[str, Tensor]
    step: int
    plan: Any
    further: dict[str, Any]
    noise: dict[str, Any] | None = None
