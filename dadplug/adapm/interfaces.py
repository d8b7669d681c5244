"""Interfaces of the parameter manager's engines: what tables call, and what calls in progress return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from .rows import Block, Keys


class Completion(Protocol):
    """Event that marks the end of a call."""

    def is_set(self) -> bool:
        """Return whether the call is known to be complete."""

    def wait(self, timeout: float = -1) -> bool:
        """Wait until the call is complete.

        Args:
            timeout: seconds to wait at most; negative for no limit.

        Returns:
            Whether the call is complete.
        """


class Call(Protocol):
    """Call in progress."""

    @property
    def done(self) -> Completion: ...


class TableEngine(ABC):
    """Engine that stores the tables of a site and moves their values between sites.

    Tables are numbered in the order in which they are added. Keys are int64, distinct only where stated; values are
    float32 of shape (n, width). Callers check types, shapes and ranges, except that `pull` checks the range of keys.

    Attributes:
        locates_keys: whether `here` and `states` are supported.
    """

    locates_keys: ClassVar[bool] = True

    @abstractmethod
    def pull(self, table: int, keys: Keys, out: Block) -> int | Call | None:
        """Copy the values of keys.

        Args:
            table: number of the table.
            keys: n keys.
            out: of shape (n, width), overwritten when the call is complete.

        Returns:
            None if the call is complete, the position of a key out of range (nothing has been done), otherwise the call
            in progress.
        """

    @abstractmethod
    def push(self, table: int, keys: Keys, deltas: Block) -> Call | None:
        """Add deltas to the values of keys; return None if the call is complete, otherwise the call in progress."""

    @abstractmethod
    def set(self, table: int, keys: Keys, values: Block) -> tuple[bool, Call | None]:
        """Set the values of distinct keys, after this site's pushes have been flushed.

        Returns:
            Whether the call has begun (otherwise flush and call again), and the call, None if it is complete.
        """

    @abstractmethod
    def here(self, table: int, keys: Keys) -> NDArray[np.bool_]:
        """Return for each key whether this site can read it without asking another."""

    @abstractmethod
    def states(self, table: int, keys: Keys) -> NDArray[np.int8]:
        """Return the states of keys as `dadplug.adapm.states.KeyState`, -1 for absent keys."""

    @abstractmethod
    def owned(self, table: int) -> tuple[Keys, Block]:
        """Return copies of the keys that this site owns, in ascending order, and of their values."""

    @abstractmethod
    def nbytes(self, table: int) -> int:
        """Return the bytes of memory that this site has reserved for a table."""
