"""Interfaces of a parameter manager's backends and engines, and the registry of backends."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import MismatchError
from ..exchange import Traffic, open_transport
from ..hub.pki.project import check_restrictions
from ..registry import Registry
from ..signature import check_choice
from .store import Block, Codes, Initialiser, Keys

NO_PLACES = 'backend="adapm" does not report which keys are at a site'


class Done:
    """Event that marks the end of a call, set once; creating it takes a fifth of the time of `threading.Event`.

    `set` must not be called by two threads at once.
    """

    __slots__ = ("_happened", "_lock")

    def __init__(self) -> None:
        self._happened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Return whether the call is known to be complete."""
        return self._happened

    def set(self) -> None:
        """Set the event, and end all waits."""
        if not self._happened:
            self._happened = True
            self._lock.release()

    def wait(self, timeout: float = -1) -> bool:
        """Wait until the call is complete.

        Args:
            timeout: seconds to wait at most; negative for no limit.

        Returns:
            Whether the call is complete.
        """
        if not self._happened and self._lock.acquire(timeout=timeout):
            self._lock.release()  # for other waiting threads
        return self._happened


class TableEngine(ABC):
    """Engine that stores the tables of a site and moves their values between sites.

    Tables are numbered in the order in which they are added. Keys are int64, distinct only where stated; values are
    float32 of shape (n, width). Callers check types, shapes and ranges, except that `pull` checks the range of keys.

    Attributes:
        locates_keys: whether `here` and `states` are supported.
        clock: clock of this site.
    """

    locates_keys: ClassVar[bool] = True
    clock: int

    @abstractmethod
    def pull(self, table: int, keys: Keys, out: Block) -> int | Done | None:
        """Copy the values of keys.

        Args:
            table: number of the table.
            keys: n keys.
            out: of shape (n, width), overwritten when the call is complete.

        Returns:
            None if the call is complete, the position of a key out of range (nothing has been done), otherwise the end
            of the call in progress.
        """

    @abstractmethod
    def push(self, table: int, keys: Keys, deltas: Block) -> Done | None:
        """Add deltas to the values of keys; return None if the call is complete, otherwise its end."""

    @abstractmethod
    def set(self, table: int, keys: Keys, values: Block) -> tuple[bool, Done | None]:
        """Set the values of distinct keys, after this site's pushes have been flushed.

        Returns:
            Whether the call has begun (otherwise flush and call again), and its end, None if it is complete.
        """

    def here(self, table: int, keys: Keys) -> NDArray[np.bool_]:
        """Return for each key whether this site can read it without asking another.

        Raises:
            RuntimeError: if `locates_keys` is false.
        """
        raise RuntimeError(NO_PLACES)

    def states(self, table: int, keys: Keys) -> Codes:
        """Return the states of keys as `dadplug.adapm.store.KeyState`, -1 for absent keys.

        Raises:
            RuntimeError: if `locates_keys` is false.
        """
        raise RuntimeError(NO_PLACES)

    @abstractmethod
    def owned(self, table: int) -> tuple[Keys, Block]:
        """Return copies of the keys that this site owns, in ascending order, and of their values."""

    def nbytes(self, table: int) -> int:
        """Return the bytes of memory that this site has reserved for a table; 0 if unknown."""
        return 0


@dataclass(frozen=True)
class TableSpec:
    """Arguments of `ParameterManager.table`, checked.

    Attributes:
        name: name of the table.
        width: number of values per key.
        rows: upper bound of keys, exclusive; None for any key of at least 0.
        initialiser: initialiser of the values.
        capacity: number of keys to reserve memory for; None for the default.
        max_rows: number of keys that this site keeps; None for all.
    """

    name: str
    width: int
    rows: int | None
    initialiser: Initialiser
    capacity: int | None
    max_rows: int | None


class Backend(ABC):
    """Engine of a parameter manager, with its connections to the other sites.

    Args:
        technique: name of the placement technique.
        process_group: group whose processes are the sites; None for the default group.
        timeout: seconds after which a site that does not respond counts as lost.
        interval: minimum time between two synchronisation rounds, in seconds.

    Attributes:
        techniques: names of the supported techniques.
        engine: the engine of the tables.
        transport: transport of the process group.
        traffic: meter of the bytes that this site has sent.
        rank: number of this site.
        world_size: number of sites.

    Raises:
        ValueError: if an option is out of range.
        MismatchError: if the sites' options differ.
        SiteError: if a site exits or does not answer.
    """

    techniques: ClassVar[tuple[str, ...]]
    engine: TableEngine

    def __init__(
        self, technique: str, process_group: dist.ProcessGroup | None, timeout: float, interval: float
    ) -> None:
        check_choice("technique", technique, self.techniques)
        if timeout <= 0 or interval < 0:
            raise ValueError(f"timeout must exceed 0 and interval be at least 0, got {timeout} and {interval}")
        self.technique, self.timeout, self.interval = technique, timeout, interval
        check_restrictions(SimpleNamespace(mode="adapm", share_inputs=False), sends_factors=False)
        self.traffic = Traffic()
        self.transport = open_transport(process_group, self.traffic, torch.device("cpu"), timeout)
        self.rank, self.world_size = self.transport.rank, self.transport.world_size

    def check_equal(self, what: str, item: tuple[Any, ...]) -> None:
        """Compare an object with those of the other sites.

        Args:
            what: description of the object, for the message.
            item: the object.

        Raises:
            MismatchError: if the objects differ.
        """
        for rank, other in enumerate(self.transport.gather_objects(item)):
            if other != item:
                sites = self.transport.sites
                raise MismatchError(f"{what} of the manager is {item} at {sites[self.rank]}, {other} at {sites[rank]}")

    @abstractmethod
    def add_table(self, spec: TableSpec) -> None:
        """Add a table; tables are numbered in the order of these calls.

        Raises:
            ValueError: if the backend does not support an argument.
            RuntimeError: if no more tables can be added.
        """

    @abstractmethod
    def advance_clock(self) -> int:
        """Advance the clock by one; return the new value."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Numbers of keys by event, see `ParameterManager.counts`."""

    @abstractmethod
    def intend(self, table: int, keys: Keys, start: int, end: int) -> None:
        """Record that this site will use keys, which are in range, while ``start <= clock < end``."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all pushes of this site have reached the owners, and its replicas have been refreshed.

        Raises:
            SiteError: if a site exits or does not answer.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all sites have called it.

        Raises:
            SiteError: if a site exits or does not answer.
        """

    @abstractmethod
    def wait_for(self, done: Done) -> None:
        """Wait until a call is complete.

        Raises:
            SiteError: if a site exits or does not answer.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise the error that has ended the manager, if there is one.

        Raises:
            SiteError: if a site is lost.
            RuntimeError: if the manager has been closed.
        """

    def leave(self) -> None:
        """Leave the other sites by `ParameterManager.close`, without an error."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Leave the other sites; may be called twice."""

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Leave the other sites without waiting for any of them.

        Args:
            reason: exit reason, for the other sites' messages.
        """


BACKENDS: Registry[str, type[Backend]] = Registry("backend")
