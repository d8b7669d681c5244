"""Loop over the epochs that remain, also after a restart, and the file with the progress of the training.

The file is checked when it is read; where sites have files of their own, the newest counts.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import MismatchError, escaped
from ..exchange import DEFAULT_TIMEOUT, Transport, codec
from ..exchange.fields import checked
from ..support.files import PRIVATE, write_file
from ..support.logs import get_logger
from ..support.refusals import refuse
from .progress import ProgramProgress, SiteProgress, progress

_log = get_logger(__name__)
_VARIABLE = "DADPLUG_CHECKPOINT"  # the path, where the program gives none
_HEAD = b"dadplug progress 1\n"
_DIGEST_BYTES = 32


class Epochs:
    """Loop over the epochs that remain; made by `remaining_epochs_until`.

    Args:
        until: number of the epoch at which the loop ends.
        checkpoint: path of the checkpoint.
        state: objects whose states the checkpoint contains.
        every: number of batches after which a checkpoint is written.
        timeout: seconds after which a silent site counts as lost.

    Raises:
        ValueError: if an argument is out of its range, a checkpoint is given without `state`, or layers are private.
    """

    def __init__(
        self,
        until: int,
        checkpoint: str | os.PathLike[str] | None,
        state: Mapping[str, Any] | None,
        every: int | None,
        timeout: float,
    ) -> None:
        given = os.environ.get(_VARIABLE) if checkpoint is None else checkpoint
        refuse(
            (
                not isinstance(until, int) or until < 0,
                f"the number of epochs must be a whole number of at least 0, got {until!r}",
            ),
            (
                every is not None and (not isinstance(every, int) or every < 1),
                f"every must be a number of batches of at least 1, or None, got {every!r}",
            ),
            (
                given and state is None,
                "a checkpoint needs state={'model': model, 'optimizer': optimizer, ...}: what has to be saved together "
                "with the position in the data; state={} if that is nothing",
            ),
        )
        self._path = Path(given) if given else None
        self._until, self._every, self._timeout = until, every, timeout
        self._state = dict(state or {})
        for name, each in self._state.items():
            if getattr(getattr(each, "options", None), "private", ()):
                raise ValueError(
                    f"private: a site's checkpoint is sent to those that have an older one, with its private layers, "
                    f"and {name!r} has private=: leave that out, or save the states of each site by torch.save"
                )
        self._saves = False
        self._progress: ProgramProgress | None = None

    def __iter__(self) -> Iterator[int]:
        current = self._progress = progress()
        if current.epoch is not None:
            raise RuntimeError("a loop over remaining_epochs_until is running already: such loops cannot be nested")
        current.timeout = self._timeout
        self._agree(current)
        if self._saves and current.run is None:
            current.run, state = _newest(self._path, current.transport)
            if state is not None:
                current.load_state_dict(state)
        if current.begin(self._until):
            self._load_state(current)
        while current.finished < self._until:
            epoch = current.start_epoch(self._after_step)
            try:
                yield epoch
                current.check_reached()
            finally:  # also after `break`
                current.end_epoch()
            if self._saves:
                self.save()

    def _agree(self, current: ProgramProgress) -> None:
        """Compare the arguments of all sites, and find out whether any of them has a place for checkpoints."""
        own = {"until": self._until, "every": self._every, "state": sorted(self._state)}
        found = current.transport.gather_present((own, self._path is not None))
        every = checked(found, tuple[dict[str, Any], bool], "argument", current.transport)
        for rank, (other, _) in every.items():
            if other != every[0][0]:
                raise MismatchError(
                    f"remaining_epochs_until has {every[0][0]} at {current.transport.sites[0]} and {other} at "
                    f"{current.transport.sites[rank]}"
                )
        self._saves = any(saves for _, saves in every.values())

    def _load_state(self, current: ProgramProgress) -> None:
        saved = current.saved_state
        current.saved_state = None
        if saved is None:
            return
        if set(saved) != set(self._state):
            raise ValueError(f"the checkpoint has the states {sorted(saved)}, and state= has {sorted(self._state)}")
        for name, each in self._state.items():
            (each.load_states if _is_of_site(each) else each.load_state_dict)(saved[name])
        _log.info("training resumes in epoch %d", current.finished)

    def _after_step(self) -> None:
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
        kind = tuple[SiteProgress, dict[str, Any]]
        parts = current.transport.gather_objects((current.of_site(), own), kind, "part of a checkpoint")
        states = {
            name: [states.get(name) for _, states in parts] if name in own else each.state_dict()
            for name, each in self._state.items()
        }
        current.serial += 1
        content = current.state_dict([part for part, _ in parts])
        _write_everywhere(self._path, codec.encode(content | {"states": states}), current.transport)
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


# The file


def _read(path: Path) -> bytes | None:
    """Read the encoded state that a checkpoint contains; None if there is no file.

    Raises:
        ValueError: if the file is damaged, or cannot be read.
    """
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    content = whole[len(_HEAD) + _DIGEST_BYTES :]
    refuse(
        (whole[: len(_HEAD)] != _HEAD, f"{path} is no checkpoint of remaining_epochs_until"),
        (
            hashlib.sha256(content).digest() != whole[len(_HEAD) : len(_HEAD) + _DIGEST_BYTES],
            f"checkpoint {path} is damaged: it is not what was written",
        ),
    )
    return content


def _newest(path: Path | None, transport: Transport) -> tuple[str, dict[str, Any] | None]:
    """Read the newest checkpoint of all sites; all sites must call it.

    Args:
        path: path of this site's checkpoint; None if it has none.
        transport: the transport.

    Returns:
        The name of the run, and the state; None if no site has a checkpoint.

    Raises:
        ValueError: on all sites, if there are only damaged files.
        MismatchError: on all sites, if their files are of different runs.
        SiteError: if a site is gone or does not answer.
    """
    content, state, damage = None, None, None
    try:
        content = None if path is None else _read(path)
        state = None if content is None else codec.decode(content)
    except ValueError as error:
        content, damage = None, str(error)
    fact = None
    if state is not None and content is not None:
        fact = (state["run"], state["serial"], hashlib.sha256(content).digest(), len(content))
    own = (fact, damage, secrets.token_hex(8))
    kind = tuple[tuple[str, int, bytes, int] | None, str | None, str]
    every = checked(transport.gather_present(own), kind, "state of its checkpoint", transport)
    facts = {rank: known for rank, (known, _, _) in every.items() if known is not None}
    damages = [each for _, each, _ in every.values() if each is not None]
    if not facts:
        if damages:
            raise ValueError(f"{escaped(damages[0])}; remove the file to begin anew")
        return every[0][2], None
    sizes = [facts[rank][3] if rank in facts else 0 for rank in every]
    codec.check_lengths(sizes, transport.sites.__getitem__, codec.MAX_BYTES)
    first = min(facts)
    for rank, (run, *_) in facts.items():
        if run != facts[first][0]:
            raise MismatchError(
                f"the checkpoints of {transport.sites[first]} and {transport.sites[rank]} are of different runs: "
                "remove the one that is not to be resumed"
            )
    if damage is not None:
        warnings.warn(f"{damage}; the checkpoint of another site is used", stacklevel=2)
    best = max(facts, key=lambda rank: facts[rank][1])  # the first of several
    if any(each != facts[best] for each, _, _ in every.values()):
        content = _send(content if transport.rank == best else None, facts[best][3], transport)
        state = codec.decode(content)
    assert state is not None
    return state["run"], state


def _send(content: bytes | None, length: int, transport: Transport) -> bytes:
    """Send the bytes of one site to all: a sum to which the others, whose content is None, add nothing."""
    data = torch.zeros(length, dtype=torch.uint8, device=transport.device)
    if content is not None:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    transport.all_reduce(data).wait()
    return data.cpu().numpy().tobytes()


def _write_everywhere(path: Path | None, content: bytes, transport: Transport) -> None:
    """Write a checkpoint at each site that has a place for it; all sites must call it.

    After an error the file is what it was before. Of the processes that torchrun starts on one machine, the first one
    writes.

    Args:
        path: path of this site's checkpoint; None if it has none.
        content: the encoded state.
        transport: the transport.

    Raises:
        OSError: on all sites, if none could write. If some could not, these warn, and training goes on.
        SiteError: if a site is gone or does not answer.
    """
    outcome = None
    if path is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, _HEAD + hashlib.sha256(content).digest() + content, PRIVATE)
            outcome = ""
        except OSError as error:
            outcome = f"checkpoint {path} cannot be written, the last one is left: {error.strerror}"
    every = checked(transport.gather_present(outcome), str | None, "outcome", transport)
    outcomes = [escaped(each) for each in every.values() if each is not None]
    if "" not in outcomes:
        raise OSError(next(iter(outcomes), "no process has a path for the checkpoint"))
    if outcome:
        warnings.warn(outcome, RuntimeWarning, stacklevel=2)
