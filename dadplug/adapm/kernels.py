"""numba kernels of workers' calls: many keys at once, with the GIL released.

Kernels that every remote pull of a key runs take the arrays that they need: the whole tuple costs microseconds.
"""

from __future__ import annotations

import numpy as np

from ..jit import njit
from .index import MIX, Index, get
from .rows import (
    DIRECTORY,
    IDLE,
    OUTDATED,
    OWNED,
    REPLICA,
    ROW_TOP,
    SLOTS,
    Block,
    Codes,
    Keys,
    Numbers,
    Rows,
    add_row,
    copy_row,
    free_row,
    row_of,
    take_row,
)


@njit(cache=True, nogil=True)
def read(index: Index, values: Block, keys: Keys, limit: int, out: Block, where: Numbers) -> int:
    """Copies the values of keys if all can be read here.

    Args:
        index: the store's `Rows.finder`.
        values: the store's values.
        keys: n keys.
        limit: keys must be smaller.
        out: of shape (n, width).
        where: n numbers, overwritten: the row, or less than 0.

    Returns:
        How many keys cannot be read here, or -1 - i where key i is out of range; unless 0, nothing has been copied.
    """
    missing = 0
    for i in range(keys.shape[0]):
        if keys[i] < 0 or keys[i] >= limit:
            return -1 - i
        where[i] = get(index, keys[i])
        if where[i] < 0:
            missing += 1
    if missing == 0:
        for i in range(keys.shape[0]):
            row = where[i]
            for x in range(values.shape[1]):
                out[i, x] = values[row, x]
    return missing


@njit(cache=True, nogil=True)
def read_found(values: Block, where: Numbers, out: Block) -> None:
    """Copies the values of those keys that `read` has found."""
    for i in range(where.shape[0]):
        row = where[i]
        if row >= 0:
            for x in range(values.shape[1]):
                out[i, x] = values[row, x]


@njit(cache=True, nogil=True)
def first_bad_key(keys: Keys, limit: int) -> int:
    """Returns the position of the first key out of range, or -1."""
    for i in range(keys.shape[0]):
        if keys[i] < 0 or keys[i] >= limit:
            return i
    return -1


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def first_not_finite(block: Block) -> int:
    """Returns the first row that holds NaN or Inf, or -1."""
    for i in range(block.shape[0]):
        zero = np.float32(0)
        for x in range(block.shape[1]):
            zero += block[i, x] * np.float32(0)
        if zero != zero:
            return i
    return -1


@njit(cache=True, nogil=True)
def add(r: Rows, keys: Keys, deltas: Block, where: Numbers) -> int:
    """Adds deltas to keys that are owned, replicated or requested here; returns how many are not.

    Args:
        r: the store.
        keys: n keys, checked.
        deltas: of shape (n, width).
        where: n numbers, overwritten: the row, or -1.
    """
    index, values, states, versions = r.finder, r.values, r.states, r.versions
    slots, dirty, unsent = r.slots, r.dirty, r.deltas
    missing = 0
    for i in range(keys.shape[0]):
        where[i] = row_of(get(index, keys[i]))
        if where[i] < 0:
            missing += 1
    for i in range(keys.shape[0]):
        row = where[i]
        if row < 0:
            continue
        if states[row] == OWNED:
            versions[row] += 1
        else:
            slot = slots[row]
            first = not dirty[slot]
            dirty[slot] = 1
            if states[row] == REPLICA:
                if first:
                    copy_row(unsent, slot, deltas, i)
                else:
                    add_row(unsent, slot, deltas, i)
            elif first:
                copy_row(values, row, deltas, i)
                continue
        for x in range(values.shape[1]):
            values[row, x] += deltas[i, x]
    return missing


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
    """Finds the owners of keys, as far as this site knows.

    Args:
        index: the store's `Rows.finder`.
        directory: the store's.
        states: the store's.
        counts: the store's.
        rank: this site.
        sites: number of sites.
        keys: n keys.
        where: n numbers, overwritten: the row of a key that is owned here; -2 where it would be but has never been
            touched; else -1.
        targets: n numbers, overwritten: the site to ask.

    Returns:
        How many keys have never been touched, and how many belong to other sites.
    """
    no_replicas, no_moves = counts[SLOTS] == 0, counts[DIRECTORY] == 0  # each saves a look at cold memory
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
def readable(r: Rows, rank: int, sites: int, keys: Keys, found: Codes) -> None:
    """Flags the keys whose value is here, or comes to be here when it is first used."""
    index, directory = r.finder, r.directory
    for i in range(keys.shape[0]):
        number = get(index, keys[i])
        found[i] = number >= 0
        if number == -1:
            entry = get(directory, keys[i])
            found[i] = (keys[i] % sites if entry < 0 else entry >> 32) == rank


@njit(cache=True, nogil=True)
def create(r: Rows, keys: Keys, where: Numbers, rows: Numbers) -> int:
    """Makes rows for the keys that `locate` found untouched; returns how many, numbered in `rows`."""
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
def add_owned(r: Rows, where: Numbers, deltas: Block) -> None:
    """Adds deltas to rows that are owned here."""
    values, versions = r.values, r.versions
    for i in range(where.shape[0]):
        row = where[i]
        for x in range(values.shape[1]):
            values[row, x] += deltas[i, x]
        versions[row] += 1


@njit(cache=True, nogil=True)
def take(block: Block, rows: Numbers, out: Block) -> None:
    """Copies rows of a block, ``out[i] = block[rows[i]]``."""
    for i in range(rows.shape[0]):
        row = rows[i]
        for x in range(block.shape[1]):
            out[i, x] = block[row, x]


@njit(cache=True, nogil=True)
def place(values: Block, positions: Numbers, out: Block) -> None:
    """Copies rows to positions, ``out[positions[i]] = values[i]``."""
    for i in range(positions.shape[0]):
        row = positions[i]
        for x in range(values.shape[1]):
            out[row, x] = values[i, x]


@njit(cache=True, nogil=True)
def assign(r: Rows, where: Numbers, values: Block) -> None:
    """Sets rows that are owned here."""
    for i in range(where.shape[0]):
        copy_row(r.values, where[i], values, i)
        r.versions[where[i]] += 1


@njit(cache=True, nogil=True)
def overwrite(r: Rows, keys: Keys, values: Block) -> None:
    """Lets the replicas here follow what this site has set at their owners; answers under way are older."""
    for i in range(keys.shape[0]):
        row = get(r.finder, keys[i])
        if row < 0 or r.states[row] != REPLICA:
            continue
        slot = r.slots[row]
        copy_row(r.values, row, values, i)
        if r.dirty[slot]:
            add_row(r.values, row, r.deltas, slot)
        r.versions[row] = -1
        if r.flight[slot] != IDLE:
            r.flight[slot] |= OUTDATED


@njit(cache=True, nogil=True)
def any_requested(r: Rows, keys: Keys) -> bool:
    """Says whether one of the keys is on its way here."""
    found = False
    for i in range(keys.shape[0]):
        found |= get(r.finder, keys[i]) < -1
    return found


@njit(cache=True, nogil=True)
def reconcile(
    index: Index,
    values: Block,
    slots: Numbers,
    dirty: Codes,
    keys: Keys,
    positions: Numbers,
    out: Block,
    absent: Codes,
) -> int:
    """Brings values that came from other sites up to what this site has pushed.

    Args:
        index: the store's `Rows.finder`.
        values: the store's.
        slots: the store's.
        dirty: the store's.
        keys: n keys that were asked for elsewhere.
        positions: their places in `out`.
        out: the values.
        absent: n flags, overwritten: 1 where this site knows nothing of a key.

    Returns:
        How many are absent.
    """
    count = 0
    for i in range(keys.shape[0]):
        number = get(index, keys[i])
        absent[i] = number == -1
        count += absent[i]
        if number >= 0:
            copy_row(out, positions[i], values, number)
        elif number < -1 and dirty[slots[-2 - number]]:
            add_row(out, positions[i], values, -2 - number)
    return count


@njit(cache=True, nogil=True)
def owned(r: Rows, rows: Numbers) -> int:
    """Lists the rows that are owned here; returns how many."""
    count = 0
    for row in range(r.counts[ROW_TOP]):
        if r.states[row] == OWNED:
            rows[count] = row
            count += 1
    return count


@njit(cache=True, nogil=True)
def count_absent(keys: Keys, others: Keys) -> int:
    """Counts the keys, of any value, that are not among others."""
    bits = 4
    while (1 << bits) < 2 * others.shape[0]:
        bits += 1
    mask, shift = (1 << bits) - 1, np.uint64(64 - bits)
    places = np.full(1 << bits, -1, np.int64)
    for i in range(others.shape[0]):
        place = np.int64((np.uint64(others[i]) * MIX) >> shift)
        while places[place] >= 0 and others[places[place]] != others[i]:
            place = (place + 1) & mask
        places[place] = i
    count = 0
    for i in range(keys.shape[0]):
        place = np.int64((np.uint64(keys[i]) * MIX) >> shift)
        while places[place] >= 0 and others[places[place]] != keys[i]:
            place = (place + 1) & mask
        count += places[place] < 0
    return count


@njit(cache=True, nogil=True)
def unused(r: Rows, clock: int, used: Keys, before: int, found: Numbers) -> int:
    """Lists the rows that may be dropped: owned, without replicas or intent, and not used since a time.

    Args:
        r: the store.
        clock: this site's.
        used: time of the last use, by row.
        before: rows used then or later are kept.
        found: room for all rows, overwritten.

    Returns:
        How many there are.
    """
    states, peers, until = r.states, r.peers, r.until
    count = 0
    for row in range(r.counts[ROW_TOP]):
        if states[row] == OWNED and peers[row] == 0 and until[row] <= clock and used[row] < before:
            found[count] = row
            count += 1
    return count


@njit(cache=True, nogil=True)
def drop(r: Rows, rows: Numbers) -> None:
    """Gives rows back, with their values."""
    finder, keys, states, slots, counts = r.finder, r.keys, r.states, r.slots, r.counts
    for i in range(rows.shape[0]):
        free_row(finder, keys, states, slots, counts, rows[i])
