"""Progress of the training that this process takes part in: epochs, passes over data, accumulated statistics."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..exchange import DEFAULT_TIMEOUT, Traffic, Transport, open_transport
from ..hub.link import current_link
from .records import Pass, Statistics, Target, add


class Saver(Protocol):
    """Writer of checkpoints."""

    def after_step(self) -> None:
        """Write a checkpoint if it is time for one."""


class Restorable(Protocol):
    """State of a loader that checkpoints contain."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same at all sites."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Progress:
    """Progress of a program that may be restarted.

    A restarted program executes its code from the start. While it `replays` what lies before the place of the
    checkpoint, passes that had ended give no batches, updates of restored accumulators are ignored, and
    synchronizations return what they returned before.

    Attributes:
        finished: number of finished epochs.
        epoch: number of the epoch that is running; None outside of epochs.
        begun: whether the program has begun a loop over epochs.
        timeout: seconds after which a silent site counts as lost.
        steps_since_save: number of batches, of those that all sites have, since the last checkpoint.
        run: name of the run, by which checkpoints of different trainings are told apart; None before it is known.
        serial: number of checkpoints of the run.
        saved_state: states of the model and others, read from a checkpoint and not loaded yet.
    """

    def __init__(self) -> None:
        self.finished = 0
        self.epoch: int | None = None
        self.begun = False
        self.timeout = DEFAULT_TIMEOUT
        self.steps_since_save = 0
        self.run: str | None = None
        self.serial = 0
        self.saved_state: dict[str, Any] | None = None
        self._saver: Saver | None = None
        self._loop = -1
        self._target: Target | None = None
        self._open: weakref.ref[Pass] | None = None
        self._used: dict[str, list[int]] = {}
        self._outside: weakref.WeakValueDictionary[str, Statistics] = weakref.WeakValueDictionary()
        self._within: dict[str, Statistics] = {}
        self._created = {"epoch": 0, "outside": 0}
        self._loaders: weakref.WeakValueDictionary[str, Restorable] = weakref.WeakValueDictionary()
        self._loader_states: dict[str, dict[str, Any]] = {}
        self._loaders_created = 0
        self._connection: tuple[object, Transport] | None = None

    @property
    def transport(self) -> Transport:
        """Transport over the default process group, opened when it is first needed; all sites must do so together.

        Raises:
            ValueError: if sites may leave, since positions and sums of an absent site would be lost.
        """
        if (link := current_link()) is not None and link.rounds.elastic:
            raise ValueError(
                "remaining_epochs_until, ElasticDataLoader, AdaptiveDataLoader and Accumulator need all sites until "
                "the end: leave min_sites out, or count steps by reduction.step"
            )
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._connection is None or self._connection[0] is not world:
            only_gpus = world is not None and str(dist.get_backend()) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if only_gpus else torch.device("cpu")
            self._connection = world, open_transport(None, Traffic(), device, self.timeout)
        return self._connection[1]

    # Epochs

    def check_idle(self) -> None:
        """Check that no loop over epochs is running.

        Raises:
            RuntimeError: if one is.
        """
        if self.epoch is not None:
            raise RuntimeError("a loop over remaining_epochs_until is running already: such loops cannot be nested")

    def begin(self, until: int) -> bool:
        """Begin a loop over epochs.

        Args:
            until: number of the epoch at which the loop ends.

        Returns:
            Whether the place of the checkpoint is in this loop.
        """
        self.begun = True
        reached = self._target is not None and self._target.is_in(until)
        if self._target is not None and reached and self._target.loop == -1:
            self._target = None
        return reached

    def start_epoch(self, saver: Saver) -> int:
        """Start the next epoch.

        Args:
            saver: what writes checkpoints.

        Returns:
            The number of the epoch.
        """
        self._saver = saver
        self.epoch, self._loop, self._open, self._used = self.finished, -1, None, {}
        self._created["epoch"] = 0
        return self.epoch

    def end_epoch(self) -> None:
        """End the epoch, whether its code was executed to the end or not."""
        self.finished += 1
        self.epoch, self._loop, self._open, self._used = None, -1, None, {}
        self._within.clear()
        for each in self._outside.values():
            each.history["epoch"], each.repeated["epoch"] = [], 0

    def check_reached(self) -> None:
        """Check, at the end of an epoch, that the program has come past the place of the checkpoint.

        Raises:
            RuntimeError: if it has not.
        """
        if self._target is not None and self._target.epoch == self.epoch:
            raise RuntimeError(
                f"the checkpoint was written in pass {self._target.loop + 1} over data of epoch {self.epoch}, and the "
                f"program has made {self._loop + 1}: it must be the same program, with the same loops"
            )

    # Passes over data

    @property
    def replays(self) -> bool:
        """Whether the program repeats code that was executed before a restart."""
        return self._target is not None

    @property
    def open_pass(self) -> Pass | None:
        """The recorded pass that is running."""
        return None if self._open is None else self._open()

    def enter(self, passes: int) -> Pass:
        """Begin a pass over data.

        Args:
            passes: the number of the epoch for passes outside of `remaining_epochs_until`.

        Raises:
            RuntimeError: if another pass has begun and is not at work on a batch, as with ``zip``.
        """
        if self.epoch is None:
            return Pass(passes, False)
        outer = self.open_pass
        if outer is not None and outer.within_batch:
            return Pass(self.epoch, False)
        if outer is not None:
            raise RuntimeError(
                "two ElasticDataLoaders are iterated side by side, whose positions cannot be resumed together: use one "
                "with torch.utils.data.StackDataset(first, second)"
            )
        self._loop += 1
        begun = Pass(self.epoch, True)
        target = self._target
        if target is not None and target.epoch == self.epoch and self._loop <= target.loop:
            if self._loop == target.loop:
                begun.used, self._target = target.used, None
            else:
                begun.over = True
        self._open, self._used = weakref.ref(begun), begun.used
        return begun

    def begin_batch(self, running: Pass, source: str, used: int) -> None:
        """Record that a pass hands out a batch.

        Args:
            running: the pass.
            source: source of the data set.
            used: samples that have been used after the step, by all sites that share the data set.
        """
        running.pending = (source, used)
        running.within_batch = True

    def begin_part(self, running: Pass) -> None:
        """Record that a pass hands out a batch that is not the last one of its step.

        It counts as used once the step is complete, since a restart repeats the whole step.

        Args:
            running: the pass.
        """
        running.within_batch = True

    def register_loader(self, loader: Restorable) -> None:
        """Register a loader with a state, under its number among those of the program.

        Args:
            loader: the loader's state.
        """
        name = str(self._loaders_created)
        self._loaders_created += 1
        self._loaders[name] = loader
        if name in self._loader_states:
            loader.load_state_dict(self._loader_states[name])

    def end_batch(self, running: Pass) -> None:
        """Count the batch that a pass has handed out, after the program has used it; write a checkpoint if due."""
        running.within_batch = False
        self._count(running)
        if running is self.open_pass and running.steps <= running.common_steps and self._saver is not None:
            self._saver.after_step()

    def count_open_batch(self) -> None:
        """Count the batch that the program is at work on, for a checkpoint that is written after its step."""
        if (running := self.open_pass) is not None:
            self._count(running)

    def _count(self, running: Pass) -> None:
        if running.pending is None:
            return
        source, used = running.pending
        running.pending = None
        running.steps += 1
        running.used[source][0] = used
        if running is self.open_pass:
            self.steps_since_save += running.steps <= running.common_steps

    def leave(self, ended: Pass) -> None:
        """End a pass over data."""
        if ended is self.open_pass:
            self._open = None

    # Accumulators

    def register(self, initial: dict[Any, Any]) -> Statistics:
        """Register an accumulator under the number that it has among those of the epoch, or among those outside.

        Args:
            initial: values that it begins with.

        Raises:
            RuntimeError: within a pass over data, whose code is not repeated after a restart.
        """
        if self.open_pass is not None:
            raise RuntimeError("create the Accumulator before the loop over the ElasticDataLoader, not in it")
        scope = self._scope
        name = f"{scope} {self._created[scope]}"
        self._created[scope] += 1
        created = Statistics(initial)
        target = self._target
        if target is not None and name in target.statistics and self.epoch in (None, target.epoch):
            created.restore(target.statistics[name])
        (self._outside if scope == "outside" else self._within)[name] = created
        return created

    @property
    def _scope(self) -> str:
        return "outside" if self.epoch is None else "epoch"

    def ignores_updates(self, statistics: Statistics) -> bool:
        """Return whether updates are those of code that is repeated, which the restored sums contain."""
        return self.replays and statistics.restored

    def synchronize(self, statistics: Statistics) -> dict[Any, Any]:
        """Sum an accumulator's updates over sites; all sites must call it.

        Returns:
            The sums; after a restart, where the code is repeated, those of the time before it.

        Raises:
            RuntimeError: if code that is repeated synchronizes more often than before.
            SiteError: if a site is gone or does not answer.
        """
        scope = self._scope
        repeatable = self.begun and self.open_pass is None
        if self.ignores_updates(statistics):
            number, known = statistics.repeated[scope], statistics.history[scope]
            if number >= len(known):
                raise RuntimeError("the restarted program synchronizes an Accumulator where it did not do so before")
            statistics.repeated[scope] += 1
            return copy.deepcopy(known[number])
        every = self.transport.gather_objects(statistics.updates)
        for updates in every:
            add(statistics.results, updates)
        statistics.updates.clear()
        if repeatable:
            statistics.history[scope].append(copy.deepcopy(statistics.results))
        return statistics.results

    @property
    def _statistics(self) -> dict[str, Statistics]:
        return {**self._outside, **self._within}

    # Checkpoints

    def of_site(self) -> dict[str, Any]:
        """Return this site's part of the progress, for `state_dict`."""
        updates = {name: dict(each.updates) for name, each in self._statistics.items()}
        return {"updates": updates, "used": self._used}

    def state_dict(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the progress of all sites; pending updates of accumulators become part of their sums.

        Args:
            parts: what `of_site` returns at each site, by rank.
        """
        own = self._statistics
        for name, each in own.items():
            each.updates.clear()
            for part in parts:
                add(each.results, part["updates"].get(name, {}))
        for part in parts:
            for source, used in part["used"].items():  # a site knows older numbers of the others' data sets
                self._used[source] = max(used, self._used.get(source, used))
        statistics = {name: {"results": each.results, "history": each.history} for name, each in own.items()}
        place = {"finished": self.finished, "loop": self._loop, "used": self._used}
        loaders = self._loader_states | {name: each.state_dict() for name, each in self._loaders.items()}
        return {"run": self.run, "serial": self.serial, "statistics": statistics, "loaders": loaders} | place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, before the first epoch of the restarted program.

        Args:
            state: the state, with those of other objects as ``states``.
        """
        self.run, self.serial, self.saved_state = state["run"], state["serial"], state["states"]
        self.finished = state["finished"]
        self._target = Target(self.finished, state["loop"], dict(state["used"]), dict(state["statistics"]))
        for name, each in self._outside.items():
            if name in self._target.statistics:
                each.restore(self._target.statistics[name])
        self._loader_states = dict(state.get("loaders", {}))  # none in checkpoints of version 0.2
        for name, loader in self._loaders.items():
            if name in self._loader_states:
                loader.load_state_dict(self._loader_states[name])


_progress = Progress()


def progress() -> Progress:
    """Return the progress of this process."""
    return _progress


def reset_progress() -> None:
    """Forget the epochs and passes so far, for another training in the same process.

    In a script, the loops of one training follow one another: `remaining_epochs_until` goes on where the last loop
    ended. Call this between two trainings, for example in a notebook, before loaders and accumulators are created.
    """
    global _progress
    _progress = Progress()
