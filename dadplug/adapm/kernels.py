"""numba kernels of pulls, pushes and sets, for many keys at a time and with the GIL released.

Kernels on the path of a remote pull of one key take the arrays that they need: passing the whole tuple takes 1 us.
"""

from __future__ import annotations

import numpy as np

from ..jit import njit
from .index import Index, get
from .rows import (
    DIRECTORY,
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
from .states import IDLE, OUTDATED, OWNED, REPLICA


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
        index: `Rows.finder` of the store.
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
def read_found(values: Block, where: Numbers, out: Block) -> None:
    """Copy the values of the keys that `read` has found."""
    for i in range(where.shape[0]):
        row = where[i]
        if row >= 0:
            for x in range(values.shape[1]):
                out[i, x] = values[row, x]


@njit(cache=True, nogil=True)
def first_bad_key(keys: Keys, limit: int) -> int:
    """Return the position of the first key out of range, or -1."""
    for i in range(keys.shape[0]):
        if keys[i] < 0 or keys[i] >= limit:
            return i
    return -1


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def first_not_finite(block: Block) -> int:
    """Return the first row with NaN or Inf, or -1."""
    for i in range(block.shape[0]):
        zero = np.float32(0)
        for x in range(block.shape[1]):
            zero += block[i, x] * np.float32(0)
        if zero != zero:
            return i
    return -1


@njit(cache=True, nogil=True)
def add(r: Rows, keys: Keys, deltas: Block, where: Numbers) -> int:
    """Add deltas to keys that are owned, replicated or requested at this site.

    Args:
        r: the store.
        keys: n keys in range.
        deltas: of shape (n, width).
        where: n rows, overwritten; -1 for other keys.

    Returns:
        The number of other keys.
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
    """Find the owners of keys, as far as this site knows.

    Args:
        index: `Rows.finder` of the store.
        directory: `Rows.directory` of the store.
        states: `Rows.states` of the store.
        counts: `Rows.counts` of the store.
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
def readable(r: Rows, rank: int, sites: int, keys: Keys, found: Codes) -> None:
    """Flag the keys whose value this site has, or creates at first use."""
    index, directory = r.finder, r.directory
    for i in range(keys.shape[0]):
        number = get(index, keys[i])
        found[i] = number >= 0
        if number == -1:
            entry = get(directory, keys[i])
            found[i] = (keys[i] % sites if entry < 0 else entry >> 32) == rank


@njit(cache=True, nogil=True)
def create(r: Rows, keys: Keys, where: Numbers, rows: Numbers) -> int:
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
def add_owned(r: Rows, where: Numbers, deltas: Block) -> None:
    """Add deltas to rows owned by this site."""
    values, versions = r.values, r.versions
    for i in range(where.shape[0]):
        row = where[i]
        for x in range(values.shape[1]):
            values[row, x] += deltas[i, x]
        versions[row] += 1


@njit(cache=True, nogil=True)
def gather_rows(block: Block, rows: Numbers, out: Block) -> None:
    """Compute ``out[i] = block[rows[i]]``."""
    for i in range(rows.shape[0]):
        row = rows[i]
        for x in range(block.shape[1]):
            out[i, x] = block[row, x]


@njit(cache=True, nogil=True)
def scatter_rows(values: Block, positions: Numbers, out: Block) -> bool:
    """Compute ``out[positions[i]] = values[i]``; return False, without changes, if a position is out of range."""
    for i in range(positions.shape[0]):
        if positions[i] < 0 or positions[i] >= out.shape[0]:
            return False
    for i in range(positions.shape[0]):
        row = positions[i]
        for x in range(values.shape[1]):
            out[row, x] = values[i, x]
    return True


@njit(cache=True, nogil=True)
def assign(r: Rows, where: Numbers, values: Block) -> None:
    """Set rows owned by this site."""
    for i in range(where.shape[0]):
        copy_row(r.values, where[i], values, i)
        r.versions[where[i]] += 1


@njit(cache=True, nogil=True)
def overwrite_replicas(r: Rows, keys: Keys, values: Block) -> None:
    """Set the replicas of this site to the values that it has set at their owners, and outdate replies in flight."""
    for i in range(keys.shape[0]):
        row = get(r.finder, keys[i])
        if row < 0 or r.states[row] != REPLICA:
            continue
        slot = r.slots[row]
        copy_row(r.values, row, values, i)
        if r.dirty[slot]:
            add_row(r.values, row, r.deltas, slot)
        r.versions[row] = -1
        if r.in_flight[slot] != IDLE:
            r.in_flight[slot] |= OUTDATED


@njit(cache=True, nogil=True)
def any_requested(r: Rows, keys: Keys) -> bool:
    """Return whether any of the keys is REQUESTED."""
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
    """Add this site's pushes to values that other sites have sent.

    Args:
        index: `Rows.finder` of the store.
        values: `Rows.values` of the store.
        slots: `Rows.slots` of the store.
        dirty: `Rows.dirty` of the store.
        keys: n keys that other sites have sent.
        positions: n rows of `out`.
        out: the values, changed in place.
        absent: n flags, overwritten: 1 where this site has no row for a key.

    Returns:
        The number of absent keys.
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
def list_owned(r: Rows, rows: Numbers) -> int:
    """Write the rows owned by this site to `rows`, and return their number."""
    count = 0
    for row in range(r.counts[ROW_TOP]):
        if r.states[row] == OWNED:
            rows[count] = row
            count += 1
    return count


@njit(cache=True, nogil=True)
def list_evictable(r: Rows, clock: int, used: Keys, before: int, found: Numbers) -> int:
    """List the rows that may be evicted: owned, without replicas or intent, and not used recently.

    Args:
        r: the store.
        clock: clock of this site.
        used: time of the last use, by row.
        before: rows used at this time or later are kept.
        found: room for all rows, overwritten.

    Returns:
        The number of rows found.
    """
    states, peers, intent_end = r.states, r.peers, r.intent_end
    count = 0
    for row in range(r.counts[ROW_TOP]):
        if states[row] == OWNED and peers[row] == 0 and intent_end[row] <= clock and used[row] < before:
            found[count] = row
            count += 1
    return count


@njit(cache=True, nogil=True)
def free_rows(r: Rows, rows: Numbers) -> None:
    """Free rows and discard their values."""
    finder, keys, states, slots, counts = r.finder, r.keys, r.states, r.slots, r.counts
    for i in range(rows.shape[0]):
        free_row(finder, keys, states, slots, counts, rows[i])


@njit(cache=True, nogil=True)
def states_of(finder: Index, states: Codes, keys: Keys, out: Codes) -> None:
    """Look up the states of keys; -1 for absent keys.

    Args:
        finder: `Rows.finder` of the store.
        states: `Rows.states` of the store.
        keys: n keys.
        out: n states, overwritten.
    """
    for i in range(keys.shape[0]):
        row = row_of(get(finder, keys[i]))
        out[i] = states[row] if row >= 0 else -1
