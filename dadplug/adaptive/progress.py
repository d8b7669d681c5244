"""Progress of the training that this process takes part in: epochs, passes over data, accumulated statistics."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import escaped
from ..exchange import DEFAULT_TIMEOUT, Traffic, Transport, open_transport
from ..exchange.codec import register
from ..exchange.factory import sites_may_leave
from ..exchange.fields import invalid
from ..exchange.restrictions import OBJECTS, declared
from ..step.model_sync.replicated_model import Stateful


@dataclass(eq=False)
class Pass:
    """A pass of a loader over its data set.

    Attributes:
        epoch: number of the epoch.
        recorded: whether checkpoints contain the position in this pass. They do not for passes outside of epochs, and
            not for passes that begin within a batch of another one.
        over: whether the pass had ended before the program was restarted.
        used: for each data set by its source, the number of samples that have been used and the length.
        steps: number of batches that have been used since the pass began in this process.
        common_steps: number of batches that every site has in this pass.
        within_batch: whether the program is at work on a batch.
        pending: source and number of used samples after that batch; None once it has been counted.
    """

    epoch: int
    recorded: bool
    over: bool = False
    used: dict[str, list[int]] = field(default_factory=dict)
    steps: int = 0
    common_steps: int = 0
    within_batch: bool = False
    pending: tuple[str, int] | None = None

    def hand_out(self, pending: tuple[str, int] | None = None) -> None:
        """Record that the pass hands out a batch.

        Args:
            pending: source of the data set, and samples that have been used after the step, by all sites that share the
                data set; None for a batch that is not the last one of its step, since a restart repeats whole steps.
        """
        self.within_batch = True
        self.pending = pending


Summand = float | complex | Tensor | np.ndarray[Any, Any]


@register
@dataclass
class SiteProgress:
    """Part of one site in the progress of a program, see `ProgramProgress.state_dict`.

    Attributes:
        updates: what the site has added to accumulators since their sums were formed, by name.
        used: as in `Pass`.
    """

    updates: dict[str, dict[Any, Summand]]
    used: dict[str, list[int]]


@dataclass
class _Target:
    """Place of a checkpoint in the program; a restarted program repeats the code before it.

    Attributes:
        epoch: number of finished epochs.
        loop: number of the recorded pass in the epoch, from 0; -1 at the begin of an epoch.
        used: as in `Pass`.
        statistics: states of accumulators by name.
    """

    epoch: int
    loop: int
    used: dict[str, list[int]]
    statistics: dict[str, Any]


class ProgramProgress:
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
        self._after_step: Callable[[], None] | None = None
        self._loop = -1
        self._target: _Target | None = None
        self._open: weakref.ref[Pass] | None = None
        self._used: dict[str, list[int]] = {}
        self._outside: weakref.WeakValueDictionary[str, Accumulator] = weakref.WeakValueDictionary()
        self._within: dict[str, Accumulator] = {}
        self._created = {"epoch": 0, "outside": 0}
        self._loaders: weakref.WeakValueDictionary[str, Stateful] = weakref.WeakValueDictionary()
        self._loader_states: dict[str, dict[str, Any]] = {}
        self._loaders_created = 0
        self._connection: tuple[object, Transport] | None = None

    @property
    def transport(self) -> Transport:
        """Transport over the default process group, opened when it is first needed; all sites must do so together.

        Raises:
            ValueError: if sites may leave, since positions and sums of an absent site would be lost.
        """
        if sites_may_leave():
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

    def begin(self, until: int) -> bool:
        """Begin a loop over epochs.

        Args:
            until: number of the epoch at which the loop ends.

        Returns:
            Whether the place of the checkpoint is in this loop.
        """
        self.begun = True
        target = self._target
        if target is None or target.epoch > until or (target.epoch == until and target.loop != -1):
            return False
        if target.loop == -1:
            self._target = None
        return True

    def start_epoch(self, after_step: Callable[[], None]) -> int:
        """Start the next epoch.

        Args:
            after_step: called after each step that all sites take; writes a checkpoint if it is time for one.

        Returns:
            The number of the epoch.
        """
        self._after_step = after_step
        self.epoch = self.finished
        return self.epoch

    def end_epoch(self) -> None:
        """End the epoch, whether its code was executed to the end or not."""
        self.finished += 1
        self.epoch, self._loop, self._open, self._used = None, -1, None, {}
        self._created["epoch"] = 0
        self._within.clear()
        for each in self._outside.values():
            each.forget_epoch()

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

    def register_loader(self, loader: Stateful) -> None:
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
        if running is self.open_pass and running.steps <= running.common_steps and self._after_step is not None:
            self._after_step()

    def count_open_batch(self) -> None:
        """Count the batch that the program is at work on, for a checkpoint that is written after its step."""
        self._count(self.open_pass)

    def _count(self, running: Pass | None) -> None:
        if running is None or running.pending is None:
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

    @property
    def scope(self) -> str:
        """Place of the code that is executed: ``"epoch"``, or ``"outside"`` of epochs."""
        return "outside" if self.epoch is None else "epoch"

    def register(self, created: Accumulator) -> None:
        """Register an accumulator under the number that it has among those of the epoch, or among those outside.

        Args:
            created: the accumulator.

        Raises:
            RuntimeError: within a pass over data, whose code is not repeated after a restart.
        """
        if self.open_pass is not None:
            raise RuntimeError("create the Accumulator before the loop over the ElasticDataLoader, not in it")
        scope, target = self.scope, self._target
        name = f"{scope} {self._created[scope]}"
        self._created[scope] += 1
        if target is not None and name in target.statistics and self.epoch in (None, target.epoch):
            created.restore(target.statistics[name])
        (self._outside if scope == "outside" else self._within)[name] = created

    @property
    def _accumulators(self) -> dict[str, Accumulator]:
        return {**self._outside, **self._within}

    # Checkpoints

    def of_site(self) -> SiteProgress:
        """Return this site's part of the progress, for `state_dict`."""
        return SiteProgress({name: each.pending for name, each in self._accumulators.items()}, self._used)

    def state_dict(self, parts: list[SiteProgress]) -> dict[str, Any]:
        """Return the progress of all sites; pending updates of accumulators become part of their sums.

        Args:
            parts: what `of_site` returns at each site, by rank.
        """
        own = self._accumulators
        for name, each in own.items():
            each.include([part.updates.get(name, {}) for part in parts])
        for part in parts:
            for source, used in part.used.items():  # a site knows older numbers of the others' data sets
                self._used[source] = max(used, self._used.get(source, used))
        statistics = {name: each.state() for name, each in own.items()}
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
        self._target = _Target(self.finished, state["loop"], dict(state["used"]), dict(state["statistics"]))
        for name, each in self._outside.items():
            if name in self._target.statistics:
                each.restore(self._target.statistics[name])
        self._loader_states = dict(state.get("loaders", {}))  # none in checkpoints of version 0.2
        for name, loader in self._loaders.items():
            if name in self._loader_states:
                loader.load_state_dict(self._loader_states[name])


_progress = ProgramProgress()


def progress() -> ProgramProgress:
    """Return the progress of this process."""
    return _progress


def reset_progress() -> None:
    """Forget the epochs and passes so far, for another training in the same process.

    In a script, the loops of one training follow one another: `remaining_epochs_until` goes on where the last loop
    ended. Call this between two trainings, for example in a notebook, before loaders and accumulators are created.
    """
    global _progress
    _progress = ProgramProgress()


class Accumulator(MutableMapping[Any, Any]):
    """Dictionary of sums over sites, and over the restarts of a program.

    Each site adds to it as to a dictionary, without communication: ``stats["loss"] += 1.0``. Within
    ``with stats.synchronized():`` it holds the sums of all sites, the same on each, and all operations of dictionaries
    are allowed. Outside of the block values cannot be read.

    What has been added before a checkpoint counts after a restart, also with another number of sites. Code of the
    running epoch that a restarted program repeats up to the place of the checkpoint does not add a second time, and
    its ``synchronized`` blocks see the values of the first time. All sites, and a restarted program, must create their
    accumulators in the same order, and not within a loop over an `ElasticDataLoader`. See `remaining_epochs_until`.

    Args:
        args: initial values, as for ``dict``, the same on all sites; they are counted once.
        kwargs: likewise.

    Raises:
        RuntimeError: if it is created within a loop over an `ElasticDataLoader`.

    Example:
        >>> stats = dadplug.Accumulator()
        >>> for inputs, targets in loader:
        ...     stats["loss"] += criterion(model(inputs), targets).item() * len(inputs)
        ...     stats["samples"] += len(inputs)
        >>> with stats.synchronized():
        ...     print(stats["loss"] / stats["samples"])
        ...     stats.clear()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._results: dict[Any, Any] = dict(*args, **kwargs)  # the sums over sites
        self._updates: dict[Any, Any] = {}  # what this site has added since the last synchronization
        self._values: dict[Any, Any] | None = None  # within `synchronized`
        self._restored = False  # whether the state is that of a checkpoint
        # Results of the synchronizations that a restarted program repeats, and how many this process has gone through:
        self._history: dict[str, list[dict[Any, Any]]] = {"epoch": [], "outside": []}
        self._repeated = {"epoch": 0, "outside": 0}
        self._progress = progress()
        self._progress.register(self)

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Sum over all sites, and allow to read and change the sums; all sites must call it at the same place.

        Changes within the block, such as ``stats.clear()``, must be the same on all sites.

        Raises:
            MismatchError: on all sites, if a value of one is no number, tensor or array, or of another shape.
            SiteError: if a site is gone or does not answer.
            TypeError: on all sites, if a value at one cannot be sent.

        Example:
            >>> with stats.synchronized():
            ...     accuracy = stats["correct"] / stats["samples"]
        """
        if self._values is not None:
            yield self
            return
        self._values = self._synchronize()
        try:
            yield self
        finally:
            self._values = None

    @property
    def _is_repeated(self) -> bool:
        """Whether code is repeated whose updates the restored sums contain."""
        return self._progress.replays and self._restored

    def _synchronize(self) -> dict[Any, Any]:
        """Return the sums; after a restart, where the code is repeated, those of the time before it."""
        current, scope = self._progress, self._progress.scope
        if self._is_repeated:
            number, known = self._repeated[scope], self._history[scope]
            if number >= len(known):
                raise RuntimeError("the restarted program synchronizes an Accumulator where it did not do so before")
            self._repeated[scope] += 1
            return copy.deepcopy(known[number])
        repeatable = current.begun and current.open_pass is None
        with declared(OBJECTS):
            every = current.transport.gather_objects(self._updates, dict[Any, Summand], "list of sums")
        self.include(every)
        if repeatable:
            self._history[scope].append(copy.deepcopy(self._results))
        return self._results

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add to several sums.

        Args:
            args: a mapping, or pairs of keys and values, as for ``dict``.
            kwargs: likewise.
        """
        for key, value in dict(*args, **kwargs).items():
            self._add(key, value)

    def subtract(self, *args: Any, **kwargs: Any) -> None:
        """Subtract from several sums.

        Args:
            args: a mapping, or pairs of keys and values, as for ``dict``.
            kwargs: likewise.
        """
        self.update({key: -value for key, value in dict(*args, **kwargs).items()})

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a sum; within a `synchronized` block only.

        Args:
            key: the key.
            default: what is returned if there is no such sum.
        """
        return self._read().get(key, default)

    def _add(self, key: Any, value: Any) -> None:
        value = _plain(value)
        if self._values is not None:
            self._values[key] = self._values.get(key, 0) + value
        elif not self._is_repeated:
            self._updates[key] = self._updates.get(key, 0) + value

    def __iadd__(self, other: Mapping[Any, Any]) -> Accumulator:
        self.update(other)
        return self

    def __isub__(self, other: Mapping[Any, Any]) -> Accumulator:
        self.subtract(other)
        return self

    def __getitem__(self, key: Any) -> Any:
        return UnsynchronizedSum(self, key) if self._values is None else self._values[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._values is not None:
            self._values[key] = value
        elif isinstance(value, UnsynchronizedSum) and value.owner is self and value.key == key:
            self._add(key, value.added)
        else:
            raise RuntimeError(f"outside of `with stats.synchronized():`, use += and -= on {key!r}, and nothing else")

    def __delitem__(self, key: Any) -> None:
        del self._read()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._read()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __bool__(self) -> bool:
        return self._values is None or bool(self._values)

    def __repr__(self) -> str:
        return f"Accumulator({'not synchronized' if self._values is None else self._values})"

    def _read(self) -> dict[Any, Any]:
        if self._values is None:
            raise RuntimeError("values of an Accumulator can be read within `with stats.synchronized():` only")
        return self._values

    # For `ProgramProgress`

    @property
    def pending(self) -> dict[Any, Any]:
        """Sums of what this site has added since the last synchronization."""
        return dict(self._updates)

    def include(self, every: list[dict[Any, Any]]) -> None:
        """Add what all sites have added, this one's updates among them, to the sums; tensors are moved to the CPU."""
        results = dict(self._results)
        for rank, updates in enumerate(every):
            for key, value in updates.items():
                value = value.cpu() if isinstance(value, Tensor) else value
                try:
                    results[key] = _add_up(results[key], value) if key in results else value
                except (TypeError, ValueError, RuntimeError) as error:
                    sites = self._progress.transport.sites
                    raise invalid("list of sums", sites[rank], f"{escaped(f'{key!r:.40}')}: {error}") from None
        self._results.update(results)  # in place, within a `synchronized` block, too
        self._updates.clear()

    def forget_epoch(self) -> None:
        """Forget the synchronizations of an epoch that has ended."""
        self._history["epoch"], self._repeated["epoch"] = [], 0

    def state(self) -> dict[str, Any]:
        """Return the sums, and what a restarted program repeats."""
        return {"results": self._results, "history": self._history}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Replace the state by one that a checkpoint contains."""
        self._results, self._history = saved["results"], saved["history"]
        self._updates.clear()
        self._restored = True


class UnsynchronizedSum:
    """Stand-in for a sum outside of `Accumulator.synchronized`, which only takes what is added.

    Args:
        owner: the accumulator.
        key: key of the sum.
        added: what has been added.
    """

    def __init__(self, owner: Accumulator, key: Any, added: Any = 0) -> None:
        self.owner, self.key, self.added = owner, key, added

    def __add__(self, value: Any) -> UnsynchronizedSum:
        return UnsynchronizedSum(self.owner, self.key, self.added + _plain(value))

    def __sub__(self, value: Any) -> UnsynchronizedSum:
        return UnsynchronizedSum(self.owner, self.key, self.added - _plain(value))

    def __bool__(self) -> bool:
        raise RuntimeError(f"the value of {self.key!r} can be read within `with stats.synchronized():` only")


def _add_up(total: Any, value: Any) -> Any:
    """Add a site's value to a sum, which takes no more memory than the larger of both."""
    shapes = np.shape(total), np.shape(value)
    if np.broadcast_shapes(*shapes) not in shapes:
        raise ValueError(f"shapes {shapes[0]} and {shapes[1]} differ")
    return total + value


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
