"""State of a training with Catalyst for a site that joins others in mid-training."""

from __future__ import annotations

from typing import Any

from ...errors import MismatchError
from ...exchange import Transport

_COUNTERS = ("batch_step", "sample_step")


class ElasticTraining:
    """One training in which sites leave and return. An object with state, for `GradientReduction`.

    The state is that of the beginning of a step: a site that joins repeats the batch that the others are at.

    Args:
        runner: the runner.
        transport: transport for everything but gradients.
    """

    _parts: tuple[str, ...] = ("criterion", "optimizer", "scheduler")

    def __init__(self, runner: Any, transport: Transport) -> None:
        self._runner, self._transport = runner, transport
        self._joined: dict[str, Any] | None = None

    @property
    def joined(self) -> dict[str, Any] | None:
        """State of the others up to the end of this site's first step; None afterwards, and if it does not join."""
        return self._joined if self._transport.joins else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the runner at the beginning of a step, besides the model."""
        runner = self._runner
        measured = {name: dict(runner.epoch_metrics[name]) for name in runner.loaders if name in runner.epoch_metrics}
        return {
            "place": self._transport.place,
            "epoch": runner.epoch_step,
            "loader": runner.loader_key,
            "steps": runner.steps,
            "micro_step": runner.micro_step,
            "splits": runner.engine.splits,
            "metrics": measured,
            "counters": {name: getattr(runner, name) for name in _COUNTERS},
            "parts": {name: _state_of(getattr(runner, name)) for name in self._parts},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of another site until `restore`.

        Raises:
            MismatchError: if the others are at another place of the program, such as a second training.
        """
        if state["place"] != self._transport.place:
            raise MismatchError(
                "the other sites are in another training of the program than the first one, into which a site cannot "
                "return"
            )
        self._joined = state

    def restore(self) -> None:
        """Restore the state of another site, if this one joins."""
        if (state := self.joined) is None:
            return
        runner = self._runner
        for name, own in state["parts"].items():
            _load(getattr(runner, name), own)
        for name, value in state["counters"].items():
            setattr(runner, name, value)
        runner.epoch_step = state["epoch"] - 1  # the epoch begins once more here
        runner.loaders = {name: self._prepare(name, state["splits"][name]) for name in runner.loaders}

    def _prepare(self, name: str, split: str | None) -> Any:
        """Return a loader whose data are split over the sites as at the others."""
        return self._runner.engine.prepare_data_loader(self._runner.undivided[name], name=name, known=split)


class ServerTraining(ElasticTraining):
    """One training with a parameter server, which sends the optimizer's state itself, and deals batches."""

    _parts = ("criterion", "scheduler")

    def _prepare(self, name: str, split: str | None) -> Any:
        return self._runner.loaders[name] if name in self._runner.dealt else super()._prepare(name, split)


def _state_of(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: each.state_dict() for name, each in part.items()}
    return None if not hasattr(part, "state_dict") else {**part.state_dict()}


def _load(part: Any, state: Any) -> None:
    if isinstance(part, dict):
        for name, each in part.items():
            each.load_state_dict(state[name])
    elif state is not None:
        part.load_state_dict(state)
