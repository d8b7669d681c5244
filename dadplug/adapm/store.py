"""Rows of one table at one site: arrays of values with an index by key, which grow when they are full."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from . import index, kernels
from . import rows as layout
from .initialisers import Initialiser
from .rows import Block, Keys, Numbers, Rows

_GROWTH = 1.5
UNBOUNDED = np.iinfo(np.int64).max


class Store:
    """Rows of a table at a site. Callers hold the lock of the engine.

    A row takes the memory of its values, 34 bytes of state and 24 to 48 bytes of index; replicas take as much again
    while they have unsent deltas. Reserved rows that have not been used take no physical memory.

    Args:
        width: number of float32 values per key.
        limit: upper bound of keys, exclusive; None for any key.
        initialiser: initialiser of the values.
        capacity: number of rows to reserve at first.
        max_rows: number of rows to keep; above it, the least recently used ones are evicted. None for all.

    Attributes:
        clock: function that returns the clock of the site; rows with intent ahead are not evicted.
        evicted: number of evicted rows.
    """

    def __init__(
        self, width: int, limit: int | None, initialiser: Initialiser, capacity: int, max_rows: int | None = None
    ) -> None:
        self.max_rows, self.evicted = max_rows, 0
        self.clock: Callable[[], int] = int
        self._time, self._used = 0, np.zeros(0, np.int64)  # number of calls, and the last call that used each row
        self.width = width
        self.limit = UNBOUNDED if limit is None else limit
        self.initialiser = initialiser
        counts = np.zeros(8, np.int64)
        counts[[layout.ROW_FREE, layout.SLOT_FREE]] = -1
        rows, slots = max(capacity, 16), 16
        self.rows = Rows(
            finder=index.empty(rows),
            directory=index.empty(16),
            values=np.empty((rows, width), np.float32),
            keys=np.empty(rows, np.int64),
            states=np.zeros(rows, np.int8),
            versions=np.empty(rows, np.int32),
            peers=np.empty(rows, np.int64),
            intent_end=np.empty(rows, np.int64),
            slots=np.empty(rows, np.int32),
            tracked=np.empty(slots, np.int32),
            deltas=np.empty((slots, width), np.float32),
            dirty=np.empty(slots, np.int8),
            in_flight=np.empty(slots, np.int8),
            asked=np.empty(slots, np.int64),
            answered=np.empty(slots, np.int64),
            counts=counts,
        )

    def __len__(self) -> int:
        return int(self.rows.counts[layout.ROWS])

    @property
    def replicas(self) -> int:
        """Number of replicated and requested keys."""
        return int(self.rows.counts[layout.SLOTS])

    @property
    def nbytes(self) -> int:
        """Bytes of reserved memory; unused rows take no physical memory."""
        return sum(array.nbytes for array in self.rows)

    def make_room(self, rows: int, slots: int = 0) -> None:
        """Make room for more rows and slots, by evicting rows above the maximum and by growing the arrays."""
        if self.max_rows is not None and len(self) + rows > self.max_rows:
            self._evict(len(self) + rows - self.max_rows)
        r, counts = self.rows, self.rows.counts
        needed = int(counts[layout.ROWS]) + rows
        if needed > r.keys.shape[0]:
            size = max(needed, int(_GROWTH * r.keys.shape[0]))
            names: tuple[str, ...] = ("values", "keys", "states", "versions", "peers", "intent_end", "slots")
            self._grow(names, size, int(counts[layout.ROW_TOP]))
            self.rows = self.rows._replace(finder=_grown(self.rows.finder, size))
        needed = int(counts[layout.SLOTS]) + slots
        if needed > r.tracked.shape[0]:
            size = max(needed, int(_GROWTH * r.tracked.shape[0]))
            names = ("tracked", "deltas", "dirty", "in_flight", "asked", "answered")
            self._grow(names, size, int(counts[layout.SLOT_TOP]))

    def touch(self, rows: Numbers) -> None:
        """Record the use of rows, if rows may be evicted; numbers below 0 are ignored."""
        if self.max_rows is None:
            return
        if self._used.shape[0] < self.rows.keys.shape[0]:
            used = np.zeros(self.rows.keys.shape[0], np.int64)
            used[: self._used.shape[0]] = self._used
            self._used = used
        self._time += 1
        self._used[rows[rows >= 0]] = self._time

    def _evict(self, count: int) -> None:
        """Evict the least recently used rows, some more than needed so that not every call has to."""
        assert self.max_rows is not None
        self.touch(np.empty(0, np.int32))
        found = np.empty(self.rows.keys.shape[0], np.int32)
        # A call in progress has recorded its own rows at most two uses ago.
        found = found[: kernels.list_evictable(self.rows, self.clock(), self._used, self._time - 2, found)]
        count = min(found.shape[0], count + self.max_rows // 16)
        if count < found.shape[0]:
            found = found[np.argpartition(self._used[found], count)[:count]]
        kernels.free_rows(self.rows, found)
        self.evicted += found.shape[0]

    def _grow(self, names: tuple[str, ...], size: int, used: int) -> None:
        grown = {}
        for name in names:
            array = getattr(self.rows, name)
            grown[name] = np.empty((size, *array.shape[1:]), array.dtype)
            grown[name][:used] = array[:used]
        self.rows = self.rows._replace(**grown)

    def make_directory_room(self, keys: int) -> None:
        """Make room for more keys in the directory."""
        needed = int(self.rows.counts[layout.DIRECTORY]) + keys
        if needed > index.room(self.rows.directory):
            self.rows = self.rows._replace(directory=_grown(self.rows.directory, int(_GROWTH * needed)))

    def locate(self, rank: int, sites: int, keys: Keys) -> tuple[Numbers, NDArray[np.int8]]:
        """Find the owners of keys; keys of this site that have no row get one, with initial values.

        Args:
            rank: this site.
            sites: number of sites.
            keys: n keys in range.

        Returns:
            n rows of keys owned by this site, -1 for others; and n sites to ask.
        """
        return self.located(rank, sites, keys)[:2]

    def located(self, rank: int, sites: int, keys: Keys) -> tuple[Numbers, NDArray[np.int8], int]:
        """Return the results of `locate`, and the number of keys of other sites."""
        where, targets = np.empty(keys.shape[0], np.int32), np.empty(keys.shape[0], np.int8)
        r = self.rows
        fresh, away = kernels.locate(r.finder, r.directory, r.states, r.counts, rank, sites, keys, where, targets)
        if self.max_rows is not None:
            self.touch(where)
        if fresh:
            self.make_room(fresh)
            rows = np.empty(fresh, np.int32)
            rows = rows[: kernels.create(self.rows, keys, where, rows)]
            block = np.empty((rows.shape[0], self.width), np.float32)
            self.initialiser(self.rows.keys[rows], block)
            self.rows.values[rows] = block
            self.touch(rows)
        return where, targets, away

    def read(
        self, rank: int, sites: int, owned_only: bool, keys: Keys, out: Block
    ) -> tuple[Numbers, NDArray[np.int8], int, int, int]:
        """Copy values if this site can read all of them, see `kernels.read`.

        Returns:
            Rows, sites to ask, and the three numbers of `kernels.read`.
        """
        where, targets = np.empty(keys.shape[0], np.int32), np.empty(keys.shape[0], np.int8)
        r = self.rows
        numbers = kernels.read(
            r.finder,
            r.directory,
            r.states,
            r.counts,
            r.values,
            rank,
            sites,
            self.limit,
            owned_only,
            keys,
            where,
            targets,
            out,
        )
        return where, targets, *numbers

    def read_rows(self, rows: Numbers) -> Block:
        """Return copies of the values of rows."""
        out = np.empty((rows.shape[0], self.width), np.float32)
        kernels.gather_rows(self.rows.values, rows, out)
        return out

    def owned(self) -> tuple[Keys, Block]:
        """Return copies of the keys owned by this site, in ascending order, and of their values."""
        rows = np.empty(len(self), np.int32)
        rows = rows[: kernels.list_owned(self.rows, rows)]
        keys = self.rows.keys[rows]
        order = np.argsort(keys)
        return keys[order], self.rows.values[rows[order]]


def _grown(old: index.Index, size: int) -> index.Index:
    larger = index.empty(size)
    index.copy_into(old, larger)
    return larger
