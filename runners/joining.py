"""State of a trainer at the beginning of a step, which a site gets that joins the others in mid-training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import MismatchError
from ..exchange import Transport
from ..exchange.fields import fits, invalid
from ..step.model_sync.private import load_joined_state, shared_state
from ..step.model_sync.replicated_model import load_joined


class TrainerState:
    """State of one training in which sites leave and return. An object with state, for `GradientReduction`.

    The state is that of the beginning of a step: a site that joins repeats the batch that the others are at. A trainer
    has a subclass, which names the objects with a state in `_parts` and returns the place in the epoch by `_progress`.

    Args:
        trainer: the trainer.
        transport: transport for everything but gradients; None where the trainer needs none.
        sends_optimizer: whether the state of the optimizer is a part; if not, the exchange sends it.

    Attributes:
        joined: state of another site, which this one joins in mid-training; None elsewhere.
    """

    _training = "training"  # what the trainer calls it, for messages
    _kinds: Mapping[str, Any] = {}  # types of what `_progress` returns, by name

    def __init__(self, trainer: Any, transport: Transport | None = None, sends_optimizer: bool = True) -> None:
        self._trainer, self._transport, self._sends_optimizer = trainer, transport, sends_optimizer
        self.joined: dict[str, Any] | None = None

    def _parts(self) -> dict[str, Any]:
        """Return the objects with ``state_dict()``, by name; also lists and dictionaries of them, and None."""
        raise NotImplementedError

    def _progress(self) -> dict[str, Any]:
        """Return what a site needs besides to go on at the batch of the others."""
        raise NotImplementedError

    @property
    def _place(self) -> Any:
        """Place in the program, which is the same at all sites."""
        assert self._transport is not None
        return self._transport.rounds.place

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer at the beginning of a step, besides the model."""
        return {"place": self._place, "parts": _state_of(self._parts()), **self._progress()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of another site until the trainer restores it.

        Raises:
            MismatchError: if the others are at another place of the program, such as a second training, or if it is no
                state of this trainer.
        """
        if state["place"] != self._place:
            raise MismatchError(
                f"the other sites are in another {self._training} of the program than the first one, into which a site "
                "cannot return"
            )
        for name, kind in self._kinds.items():
            if not fits(state[name], kind):
                raise invalid("state of its trainer", "another site", f"{name} is {state[name]!r:.100}")
        self.joined = state

    def restore_parts(self) -> None:
        """Restore the objects with a state from the state of another site."""
        assert self.joined is not None
        load_joined(self._training, partial(_load, self._parts()), self.joined["parts"])


def _state_of(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _state_of(each) for name, each in part.items()}
    if isinstance(part, list):
        return [_state_of(each) for each in part]
    return shared_state(part) if hasattr(part, "state_dict") else None


def _load(part: Any, state: Any) -> None:
    if isinstance(part, (dict, list)):
        for name, each in part.items() if isinstance(part, dict) else enumerate(part):
            _load(each, state[name])
    elif state is not None:
        load_joined_state(part, state)
