"""Loop over the epochs that remain, also after a restart."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import MismatchError
from ..exchange import DEFAULT_TIMEOUT, codec
from ..logs import get_logger
from . import checkpoint as files
from .progress import Progress, progress

_log = get_logger(__name__)


class Epochs:
    """Loop over the epochs that remain; made by `remaining_epochs_until`.

    Args:
        until: number of the epoch at which the loop ends.
        checkpoint: path of the checkpoint.
        state: objects whose states the checkpoint contains.
        every: number of batches after which a checkpoint is written.
        timeout: seconds after which a silent site counts as lost.

    Raises:
        ValueError: if an argument is out of its range, or a checkpoint is given without `state`.
    """

    def __init__(
        self,
        until: int,
        checkpoint: str | os.PathLike[str] | None,
        state: Mapping[str, Any] | None,
        every: int | None,
        timeout: float,
    ) -> None:
        if not isinstance(until, int) or until < 0:
            raise ValueError(f"the number of epochs must be a whole number of at least 0, got {until!r}")
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ValueError(f"every must be a number of batches of at least 1, or None, got {every!r}")
        self._path = files.path_of(checkpoint)
        if self._path is not None and state is None:
            raise ValueError(
                "a checkpoint needs state={'model': model, 'optimizer': optimizer, ...}: what has to be saved together "
                "with the position in the data; state={} if that is nothing"
            )
        self._until, self._every, self._timeout = until, every, timeout
        self._state = dict(state or {})
        self._saves = False
        self._progress: Progress | None = None

    def __iter__(self) -> Iterator[int]:
        current = self._progress = progress()
        current.check_idle()
        current.timeout = self._timeout
        self._agree(current)
        if self._saves and current.run is None:
            current.run, state = files.newest(self._path, current.transport)
            if state is not None:
                current.load_state_dict(state)
        if current.begin(self._until):
            self._load_state(current)
        while current.finished < self._until:
            epoch = current.start_epoch(self)
            try:
                yield epoch
                current.check_reached()
            finally:  # also after `break`
                current.end_epoch()
            if self._saves:
                self.save()

    def _agree(self, current: Progress) -> None:
        """Compare the arguments of all sites, and find out whether any of them has a place for checkpoints."""
        own = {"until": self._until, "every": self._every, "state": sorted(self._state)}
        every = current.transport.gather_objects((own, self._path is not None))
        for rank, (other, _) in enumerate(every):
            if other != every[0][0]:
                raise MismatchError(
                    f"remaining_epochs_until has {every[0][0]} at {current.transport.sites[0]} and {other} at "
                    f"{current.transport.sites[rank]}"
                )
        self._saves = any(saves for _, saves in every)

    def _load_state(self, current: Progress) -> None:
        saved = current.saved_state
        current.saved_state = None
        if saved is None:
            return
        if set(saved) != set(self._state):
            raise ValueError(f"the checkpoint has the states {sorted(saved)}, and state= has {sorted(self._state)}")
        for name, each in self._state.items():
            (each.load_states if _is_of_site(each) else each.load_state_dict)(saved[name])
        _log.info("training resumes in epoch %d", current.finished)

    def after_step(self) -> None:
        """Write a checkpoint if it is time for one; all sites call it after the same batch."""
        current = self._progress
        if current is not None and self._saves and self._every and current.steps_since_save >= self._every:
            self.save()

    def save(self) -> None:
        """Write a checkpoint now; all sites must call it in the same place, in an epoch after the optimizer's step.

        In a loop over an `ElasticDataLoader` the current batch counts as used. While a restarted program repeats the
        code before the place of its checkpoint, nothing is written.

        Raises:
            ValueError: if the loop has not begun, or has no checkpoint at any site.
            OSError: on all sites, if none can write, for example to a full disk; the last checkpoint is left.
            SiteError: if a site is gone or does not answer.
        """
        current = self._progress
        if current is None or not self._saves:
            raise ValueError("there is no checkpoint to write: give remaining_epochs_until(..., checkpoint=...)")
        if current.replays:
            return
        current.count_open_batch()
        for each in self._state.values():
            if hasattr(each, "average_buffers"):
                each.average_buffers()
        own = {name: each.state_dict() for name, each in self._state.items() if _is_of_site(each)}
        parts = current.transport.gather_objects({"progress": current.of_site(), "states": own})
        states = {
            name: [part["states"][name] for part in parts] if name in own else each.state_dict()
            for name, each in self._state.items()
        }
        current.serial += 1
        content = current.state_dict([part["progress"] for part in parts])
        files.write_everywhere(self._path, codec.encode(content | {"states": states}), current.transport)
        current.steps_since_save = 0


def _is_of_site(item: Any) -> bool:
    """Return whether each site has a state of its own, as `dadplug.GradientReduction` does."""
    return hasattr(item, "load_states")


def remaining_epochs_until(
    until: int,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    state: Mapping[str, Any] | None = None,
    every: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Epochs:
    """Iterate over the epochs that remain until a number, also after a restart of the program.

    In a program without restarts this is ``range(until)``. A second such loop goes on where the first has ended. After
    a restart the loop begins with the epoch that was interrupted, and loops over an `ElasticDataLoader` in it with the
    first batch after the checkpoint. The number of sites may be another one.

    A restarted program executes its code from the start. In the epoch that was interrupted it repeats the code before
    the place of the checkpoint, in which loops over an `ElasticDataLoader` that had ended give no batches. That code
    must do no harm when it is executed twice: a scheduler's step belongs at the end of the epoch, after the last such
    loop. An `Accumulator` does not count twice.

    Args:
        until: number of the epoch at which the loop ends; the first epoch has the number 0.
        checkpoint: path of the checkpoint; without, the environment variable DADPLUG_CHECKPOINT. It is written at the
            end of each epoch and whenever `every` says so, atomically. Sites without a common file system have files of
            their own; the newest of them counts.
        state: objects by name whose states the checkpoint contains, such as
            ``{"model": model, "optimizer": optimizer, "reduction": reduction}``. Each has ``state_dict`` and
            ``load_state_dict``.
        every: number of batches after which a checkpoint is written in an epoch, as long as all sites have batches.
        timeout: seconds after which a silent site counts as lost.

    Returns:
        An iterable of the numbers of the epochs. Its method `save() <Epochs.save>` writes a checkpoint.

    Raises:
        ValueError: if an argument is out of its range, or a checkpoint is given without `state`. When the loop begins:
            if the checkpoint is damaged or does not fit.
        MismatchError: when the loop begins, if arguments or checkpoints of the sites do not belong together.
        SiteError: when the loop begins, if a site is gone or does not answer.

    Example:
        >>> loader = dadplug.ElasticDataLoader(dataset, batch_size=32, shuffle=True)
        >>> state = {"model": model, "optimizer": optimizer, "reduction": reduction}
        >>> for epoch in dadplug.remaining_epochs_until(20, checkpoint="run.ckpt", state=state, every=200):
        ...     for inputs, targets in loader:
        ...         train(inputs, targets)
    """
    return Epochs(until, checkpoint, state, every, timeout)
