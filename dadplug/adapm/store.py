"""Memory of a table at a site: initial values, arrays of rows with an index by key, their numba kernels, and `Store`.

A key is in one of these states at a site (`KeyState`):

- absent: no row; `TableRows.directory` holds the site to ask, otherwise it is the key's home;
- OWNED: this site is the owner, and `values` holds the true value; `peers` is the set of sites with a replica, as bits;
- REPLICA: `values` holds the last value from the owner plus everything pushed here since, of which `deltas` holds the
  part that has not been sent (where `dirty`); `peers` is the site that replied last;
- REQUESTED: an intent has been sent, and the reply has not arrived. Pushes are collected in `values` (where `dirty`);
  reads ask the owner and add them.

Rows of replicas and requested keys also have a slot, with their unsent delta and the state of their messages.

Initial values are computed from seed and key only: they are equal on all sites, and none are sent. An initialiser is a
callable ``(keys, out) -> None`` that fills a float32 array of shape (n, width) for n int64 keys. It must depend on
nothing else, since the initial value of a key may be computed on any site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..support.jit import njit

# Initial values

Initialiser = Callable[[NDArray[np.int64], NDArray[np.float32]], None]

STEP = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def mixed(x: np.uint64) -> np.uint64:
    """Return 64 pseudo-random bits: the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _fill_uniform(keys: NDArray[np.int64], seed: int, low: float, high: float, out: NDArray[np.float32]) -> None:
    for i in range(keys.shape[0]):
        state = mixed(mixed(np.uint64(seed)) + np.uint64(keys[i]) * STEP)
        for x in range(out.shape[1]):
            state += STEP
            unit = np.float64(mixed(state) >> np.uint64(11)) * 2.0**-53
            out[i, x] = low + (high - low) * unit


@njit(cache=True, nogil=True)
def _fill_normal(keys: NDArray[np.int64], seed: int, mean: float, std: float, out: NDArray[np.float32]) -> None:
    for i in range(keys.shape[0]):
        state = mixed(mixed(np.uint64(seed)) + np.uint64(keys[i]) * STEP)
        for x in range(out.shape[1]):
            state += STEP
            first = (np.float64(mixed(state) >> np.uint64(11)) + 1.0) * 2.0**-53
            state += STEP
            second = np.float64(mixed(state) >> np.uint64(11)) * 2.0**-53
            out[i, x] = mean + std * np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)  # Box and Muller


class Constant:
    """Initialiser that sets all values to one number.

    Args:
        value: the number.

    Example:
        >>> import numpy as np
        >>> from dadplug.adapm import Constant
        >>> out = np.empty((2, 3), np.float32)
        >>> Constant(0.5)(np.array([7, 8]), out)
        >>> out.tolist()
        [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def __call__(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        out[:] = self.value


class Uniform:
    """Initialiser with uniformly distributed values.

    Args:
        low: lower bound, inclusive.
        high: upper bound, exclusive.
        seed: seed of the values.

    Raises:
        ValueError: if `low` exceeds `high`.

    Example:
        >>> import numpy as np
        >>> from dadplug.adapm import Uniform
        >>> out = np.empty((1000, 4), np.float32)
        >>> Uniform(-0.1, 0.1, seed=3)(np.arange(1000), out)
        >>> bool((abs(out) <= 0.1).all())
        True
    """

    def __init__(self, low: float, high: float, *, seed: int = 0) -> None:
        if not low <= high:
            raise ValueError(f"low must not exceed high, got {low} and {high}")
        self.low, self.high, self.seed = low, high, seed

    def __call__(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        _fill_uniform(keys, self.seed, self.low, self.high, out)


class Normal:
    """Initialiser with normally distributed values, the default of torch.nn.Embedding.

    Args:
        mean: mean of the values.
        std: standard deviation of the values.
        seed: seed of the values.

    Raises:
        ValueError: if `std` is negative.

    Example:
        >>> import numpy as np
        >>> from dadplug.adapm import Normal
        >>> out = np.empty((1000, 4), np.float32)
        >>> Normal(std=0.01)(np.arange(1000), out)
        >>> round(float(out.std()), 3)
        0.01
    """

    def __init__(self, mean: float = 0.0, std: float = 1.0, *, seed: int = 0) -> None:
        if std < 0:
            raise ValueError(f"std must be at least 0, got {std}")
        self.mean, self.std, self.seed = mean, std, seed

    def __call__(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        _fill_normal(keys, self.seed, self.mean, self.std, out)


class Columns:
    """Initialiser that divides the columns between initialisers, such as weights and optimizer state.

    Args:
        parts: pairs of number of columns and initialiser, from the left; the numbers add up to the width of the table.

    Raises:
        ValueError: when called, if the numbers of columns do not add up to the width.

    Example:
        >>> import numpy as np
        >>> from dadplug.adapm import Columns, Constant
        >>> out = np.empty((1, 3), np.float32)
        >>> Columns([(2, Constant(1.0)), (1, Constant())])(np.array([5]), out)
        >>> out.tolist()
        [[1.0, 1.0, 0.0]]
    """

    def __init__(self, parts: Sequence[tuple[int, Initialiser]]) -> None:
        self.parts = list(parts)

    def __call__(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        if sum(width for width, _ in self.parts) != out.shape[1]:
            raise ValueError(f"the columns add up to {sum(w for w, _ in self.parts)}, the table has {out.shape[1]}")
        start = 0
        for width, initialiser in self.parts:
            part = np.empty((keys.shape[0], width), np.float32)
            initialiser(keys, part)
            out[:, start : start + width] = part
            start += width


# States of keys

Keys = NDArray[np.int64]
Numbers = NDArray[np.int32]
Codes = NDArray[np.int8]
Block = NDArray[np.float32]
Index = NDArray[np.int64]  # of shape (power of two, 2): key or -1, and number, which share a cache line

_ROW_ARRAYS = ("keys", "values", "states", "versions", "peers", "intent_end", "slots")
_SLOT_ARRAYS = ("tracked", "deltas", "dirty", "in_flight", "asked", "answered")
UNBOUNDED = np.iinfo(np.int64).max  # limit of the keys of a table that takes any key
_GROWTH = 1.5
_HALF = np.uint64(32)


class KeyState(IntEnum):
    """State of a key at a site."""

    FREE = 0
    OWNED = 1
    REQUESTED = 2
    REPLICA = 3


# Kernels use plain integers, which numba compiles into them.
FREE, OWNED, REQUESTED, REPLICA = (state.value for state in KeyState)
IDLE, ASKED, LEAVING, OUTDATED = 0, 1, 2, 4  # synchronisation of a replica; a bit makes the reply's value be ignored

# Positions in Rows.counts
ROWS, ROW_TOP, ROW_FREE, SLOTS, SLOT_TOP, SLOT_FREE, DIRECTORY = 0, 1, 2, 3, 4, 5, 6


# Hash table from int64 keys of at least 0 to int64 numbers: linear probing, no tombstones


def empty_index(size: int) -> Index:
    """Create an index with room for `size` keys at a load of at most two thirds."""
    places = 16
    while 2 * places < 3 * size:
        places *= 2
    index = np.empty((places, 2), np.int64)
    index[:, 0] = -1
    return index


@njit(cache=True, nogil=True)
def _first(index: Index, key: int) -> int:
    place: int = np.int64((np.uint64(key) * STEP) >> _HALF) & (index.shape[0] - 1)
    return place


@njit(cache=True, nogil=True)
def get(index: Index, key: int) -> int:
    """Return the number of a key, or -1."""
    mask = index.shape[0] - 1
    place = _first(index, key)
    while True:
        found = index[place, 0]
        if found == key:
            number: int = index[place, 1]
            return number
        if found < 0:
            return -1
        place = (place + 1) & mask


@njit(cache=True, nogil=True)
def put(index: Index, key: int, number: int) -> int:
    """Set the number of a key; return 1 if the key is new, else 0."""
    mask = index.shape[0] - 1
    place = _first(index, key)
    while index[place, 0] >= 0:
        if index[place, 0] == key:
            index[place, 1] = number
            return 0
        place = (place + 1) & mask
    index[place, 0] = key
    index[place, 1] = number
    return 1


@njit(cache=True, nogil=True)
def erase(index: Index, key: int) -> None:
    """Remove a key, and move the keys probed past it back."""
    mask = index.shape[0] - 1
    hole = _first(index, key)
    while index[hole, 0] != key:
        if index[hole, 0] < 0:
            return
        hole = (hole + 1) & mask
    place = (hole + 1) & mask
    while index[place, 0] >= 0:
        if ((place - _first(index, index[place, 0])) & mask) >= ((place - hole) & mask):
            index[hole, 0] = index[place, 0]
            index[hole, 1] = index[place, 1]
            hole = place
        place = (place + 1) & mask
    index[hole, 0] = -1


@njit(cache=True, nogil=True)
def copy_into(index: Index, larger: Index) -> None:
    """Insert all keys of an index into a larger one."""
    for place in range(index.shape[0]):
        if index[place, 0] >= 0:
            put(larger, index[place, 0], index[place, 1])


# Rows and slots


class TableRows(NamedTuple):
    """Memory of one table at one site."""

    finder: Index  # key to row where it can be read, to -2 - row where it is REQUESTED
    directory: Index  # key to (site << 32 | move): the site that the key moved to, by the highest move known here
    values: Block  # (rows, width)
    keys: Keys  # (rows,)
    states: Codes  # (rows,)
    versions: Numbers  # (rows,)
    peers: Keys  # (rows,)
    intent_end: Keys  # (rows,): clock at which the last intent of this site ends
    slots: Numbers  # (rows,); of a free row, the next free one
    tracked: Numbers  # (slots,): the row, or -2 - the next free slot
    deltas: Block  # (slots, width)
    dirty: Codes  # (slots,)
    in_flight: Codes  # (slots,)
    asked: Keys  # (slots,): round of the last message about this replica
    answered: Keys  # (slots,): round of the last message that was answered
    counts: Keys


@njit(cache=True, nogil=True)
def take_row(r: TableRows, key: int, state: int) -> int:
    """Allocate a row for a key that has none; there must be room. Its values are not initialised."""
    row: int = r.counts[ROW_FREE]
    if row >= 0:
        r.counts[ROW_FREE] = r.slots[row]
    else:
        row = r.counts[ROW_TOP]
        r.counts[ROW_TOP] += 1
    r.counts[ROWS] += 1
    r.keys[row] = key
    r.states[row] = state
    r.versions[row] = 0
    r.peers[row] = 0
    r.intent_end[row] = 0
    r.slots[row] = -1
    put(r.finder, key, row if state != REQUESTED else -2 - row)
    return row


# Functions called in loops take arrays: passing the tuple counts references of all its arrays, which takes 1 us.


@njit(cache=True, nogil=True)
def free_row(finder: Index, keys: Keys, states: Codes, slots: Numbers, counts: Keys, row: int) -> None:
    """Free a row."""
    erase(finder, keys[row])
    states[row] = FREE
    slots[row] = counts[ROW_FREE]
    counts[ROW_FREE] = row
    counts[ROWS] -= 1


@njit(cache=True, nogil=True)
def take_slot(r: TableRows, row: int, round_number: int) -> None:
    """Allocate a slot for a row; there must be room."""
    slot = r.counts[SLOT_FREE]
    if slot >= 0:
        r.counts[SLOT_FREE] = -2 - r.tracked[slot]
    else:
        slot = r.counts[SLOT_TOP]
        r.counts[SLOT_TOP] += 1
    r.counts[SLOTS] += 1
    r.tracked[slot] = row
    r.dirty[slot] = 0
    r.in_flight[slot] = IDLE
    r.asked[slot] = round_number
    r.answered[slot] = 0
    r.slots[row] = slot


@njit(cache=True, nogil=True)
def free_slot(slots: Numbers, tracked: Numbers, counts: Keys, row: int) -> None:
    """Free the slot of a row."""
    slot = slots[row]
    tracked[slot] = -2 - counts[SLOT_FREE]
    counts[SLOT_FREE] = slot
    counts[SLOTS] -= 1
    slots[row] = -1


@njit(cache=True, nogil=True)
def row_of(number: int) -> int:
    """Return the row that a number in `TableRows.finder` refers to, readable or not; -1 for none."""
    return number if number >= -1 else -2 - number


@njit(cache=True, nogil=True)
def record_location(directory: Index, counts: Keys, key: int, site: int, move: int) -> None:
    """Record in the directory the site of a key, and the number of the move that brought it there."""
    counts[DIRECTORY] += put(directory, key, (site << 32) | move)


@njit(cache=True, nogil=True)
def add_row(to: Block, row: int, block: Block, i: int) -> None:
    """Add ``block[i]`` to ``to[row]``."""
    for x in range(to.shape[1]):
        to[row, x] += block[i, x]


@njit(cache=True, nogil=True)
def copy_row(to: Block, row: int, block: Block, i: int) -> None:
    """Copy ``block[i]`` to ``to[row]``."""
    for x in range(to.shape[1]):
        to[row, x] = block[i, x]


# Many keys at a time


@njit(cache=True, nogil=True)
def read(
    index: Index,
    directory: Index,
    states: Codes,
    counts: Keys,
    values: Block,
    rank: int,
    sites: int,
    limit: int,
    owned_only: bool,
    keys: Keys,
    where: Numbers,
    targets: Codes,
    out: Block,
) -> tuple[int, int, int]:
    """Copy the values of keys if this site can read all of them, else find the sites to ask.

    Args:
        index: `TableRows.finder` of the store.
        directory: directory of the store.
        states: states of the store.
        counts: counts of the store.
        values: values of the store.
        rank: this site.
        sites: number of sites.
        limit: upper bound of keys, exclusive.
        owned_only: whether to regard replicas as not readable.
        keys: n keys.
        where: n rows, overwritten; less than 0 for keys that cannot be read here.
        targets: n sites, overwritten for keys that cannot be read here: the site to ask.
        out: of shape (n, width), overwritten.

    Returns:
        The number of keys that this site has to create, the number of keys at other sites, and the position of a key
        that is out of range or -1. Unless the result is (0, 0, -1), no value has been copied.
    """
    all_owned, no_moves = counts[SLOTS] == 0 or not owned_only, counts[DIRECTORY] == 0
    fresh, away = 0, 0
    for i in range(keys.shape[0]):
        if keys[i] < 0 or keys[i] >= limit:
            return 0, 0, i
        row = get(index, keys[i])
        if row >= 0 and (all_owned or states[row] == OWNED):
            where[i] = row
            continue
        where[i] = -1
        entry = -1 if no_moves else get(directory, keys[i])
        targets[i] = keys[i] % sites if entry < 0 else entry >> 32
        if targets[i] == rank:
            fresh += 1
        else:
            away += 1
    if fresh == 0 and away == 0:
        for i in range(keys.shape[0]):
            row = where[i]
            for x in range(values.shape[1]):
                out[i, x] = values[row, x]
    return fresh, away, -1


@njit(cache=True, nogil=True)
def locate(
    index: Index,
    directory: Index,
    states: Codes,
    counts: Keys,
    rank: int,
    sites: int,
    keys: Keys,
    where: Numbers,
    targets: Codes,
) -> tuple[int, int]:
    """Find the owners of keys, as far as this site knows.

    Args:
        index: `TableRows.finder` of the store.
        directory: `TableRows.directory` of the store.
        states: `TableRows.states` of the store.
        counts: `TableRows.counts` of the store.
        rank: this site.
        sites: number of sites.
        keys: n keys.
        where: n rows of keys owned by this site, overwritten; -2 for keys of this site that have no row yet, -1 for
            keys of other sites.
        targets: n sites to ask, overwritten.

    Returns:
        The number of keys without a row, and the number of keys of other sites.
    """
    no_replicas, no_moves = counts[SLOTS] == 0, counts[DIRECTORY] == 0  # each saves a read of cold memory
    fresh, away = 0, 0
    for i in range(keys.shape[0]):
        row = get(index, keys[i])
        if row >= 0 and (no_replicas or states[row] == OWNED):
            where[i] = row
            targets[i] = rank
            continue
        entry = -1 if no_moves else get(directory, keys[i])
        targets[i] = keys[i] % sites if entry < 0 else entry >> 32
        where[i] = -1
        if targets[i] == rank:
            where[i] = -2
            fresh += 1
        else:
            away += 1
    return fresh, away


@njit(cache=True, nogil=True)
def create(r: TableRows, keys: Keys, where: Numbers, rows: Numbers) -> int:
    """Allocate rows for the keys without one (-2 in `where`), write them to `rows`, and return their number."""
    created = 0
    for i in range(keys.shape[0]):
        if where[i] != -2:
            continue
        row = get(r.finder, keys[i])
        if row < 0:  # not a duplicate of one just made
            row = take_row(r, keys[i], OWNED)
            rows[created] = row
            created += 1
        where[i] = row
    return created


@njit(cache=True, nogil=True)
def free_rows(r: TableRows, rows: Numbers) -> None:
    """Free rows and discard their values."""
    finder, keys, states, slots, counts = r.finder, r.keys, r.states, r.slots, r.counts
    for i in range(rows.shape[0]):
        free_row(finder, keys, states, slots, counts, rows[i])


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
        counts[[ROW_FREE, SLOT_FREE]] = -1
        rows, slots = max(capacity, 16), 16
        self.rows = TableRows(
            finder=empty_index(rows),
            directory=empty_index(16),
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
        return int(self.rows.counts[ROWS])

    @property
    def replicas(self) -> int:
        """Number of replicated and requested keys."""
        return int(self.rows.counts[SLOTS])

    @property
    def nbytes(self) -> int:
        """Bytes of reserved memory; unused rows take no physical memory."""
        return sum(array.nbytes for array in self.rows)

    def make_room(self, rows: int, slots: int = 0) -> None:
        """Make room for more rows and slots, by evicting rows above the maximum and by growing the arrays."""
        if self.max_rows is not None and len(self) + rows > self.max_rows:
            self._evict(len(self) + rows - self.max_rows)
        self._grow(_ROW_ARRAYS, ROWS, ROW_TOP, rows)
        self._grow(_SLOT_ARRAYS, SLOTS, SLOT_TOP, slots)

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
        r, top = self.rows, self.rows.counts[ROW_TOP]
        free = (r.states[:top] == OWNED) & (r.peers[:top] == 0) & (r.intent_end[:top] <= self.clock())
        # A call in progress has recorded its own rows at most two uses ago.
        found = np.flatnonzero(free & (self._used[:top] < self._time - 2)).astype(np.int32)
        count = min(found.shape[0], count + self.max_rows // 16)
        if count < found.shape[0]:
            found = found[np.argpartition(self._used[found], count)[:count]]
        free_rows(self.rows, found)
        self.evicted += found.shape[0]

    def _grow(self, names: tuple[str, ...], taken: int, top: int, more: int) -> None:
        """Make room in some arrays, if they have too little; `taken` and `top` are positions in the counts."""
        needed, size = int(self.rows.counts[taken]) + more, getattr(self.rows, names[0]).shape[0]
        if needed <= size:
            return
        size, used = max(needed, int(_GROWTH * size)), int(self.rows.counts[top])
        grown = {}
        for name in names:
            array = getattr(self.rows, name)
            grown[name] = np.empty((size, *array.shape[1:]), array.dtype)
            grown[name][:used] = array[:used]
        if names is _ROW_ARRAYS:
            grown["finder"] = _grown(self.rows.finder, size)
        self.rows = self.rows._replace(**grown)

    def make_directory_room(self, keys: int) -> None:
        """Make room for more keys in the directory."""
        needed = int(self.rows.counts[DIRECTORY]) + keys
        if needed > 2 * self.rows.directory.shape[0] // 3:
            self.rows = self.rows._replace(directory=_grown(self.rows.directory, int(_GROWTH * needed)))

    def locate(self, rank: int, sites: int, keys: Keys) -> tuple[Numbers, Codes, int]:
        """Find the owners of keys; keys of this site that have no row get one, with initial values.

        Args:
            rank: this site.
            sites: number of sites.
            keys: n keys in range.

        Returns:
            n rows of keys owned by this site, -1 for others; n sites to ask; and the number of keys of other sites.
        """
        where, targets = np.empty(keys.shape[0], np.int32), np.empty(keys.shape[0], np.int8)
        r = self.rows
        fresh, away = locate(r.finder, r.directory, r.states, r.counts, rank, sites, keys, where, targets)
        if self.max_rows is not None:
            self.touch(where)
        if fresh:
            self.make_room(fresh)
            rows = np.empty(fresh, np.int32)
            rows = rows[: create(self.rows, keys, where, rows)]
            block = np.empty((rows.shape[0], self.width), np.float32)
            self.initialiser(self.rows.keys[rows], block)
            self.rows.values[rows] = block
            self.touch(rows)
        return where, targets, away

    def read(
        self, rank: int, sites: int, owned_only: bool, keys: Keys, out: Block
    ) -> tuple[Numbers, Codes, int, int, int]:
        """Copy values if this site can read all of them, see `read`.

        Returns:
            Rows, sites to ask, and the three numbers of `read`.
        """
        where, targets = np.empty(keys.shape[0], np.int32), np.empty(keys.shape[0], np.int8)
        r = self.rows
        numbers = read(
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

    def owned(self) -> tuple[Keys, Block]:
        """Return copies of the keys owned by this site, in ascending order, and of their values."""
        rows = np.flatnonzero(self.rows.states[: self.rows.counts[ROW_TOP]] == OWNED)
        keys = self.rows.keys[rows]
        order = np.argsort(keys)
        return keys[order], self.rows.values[rows[order]]


def _grown(old: Index, size: int) -> Index:
    larger = empty_index(size)
    copy_into(old, larger)
    return larger
