"""numba kernels of the store: what happens to the rows of many keys at once, with the GIL released.

A key is in one of these states at a site:

- absent: the site knows at most which site to ask (`Rows.directory`, else the key's home);
- OWNED: the value here is the true one; `peers` is the set of sites with a replica, as bits;
- REPLICA: `values` is the last value from the owner plus all that was pushed here since, of which `deltas` holds what
  has not been sent yet (where `dirty`); `peers` is the site that answered last;
- REQUESTED: asked for, not here yet. What is pushed here meanwhile waits in `values`; reads ask the owner and add it.

Rows of replicas and requests have a slot besides, with their unsent delta and what is under way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from .index import Index, erase, get, put

FREE, OWNED, REQUESTED, REPLICA = 0, 1, 2, 3
RELOCATE_OR_REPLICATE, REPLICATE, RELOCATE, STAY = 0, 1, 2, 3  # techniques
IDLE, ASKED, LEAVING, OUTDATED = 0, 1, 2, 4  # what is under way for a replica; OUTDATED is a bit: ignore the answer
SAME, VALUE, DROPPED, MOVED, AWAY = 0, 1, 2, 3, 4  # what an owner does with a request
DIRTY, DROP = 1, 2  # bits of a replica's message
# Places in Rows.counts
ROWS, ROW_TOP, ROW_FREE, SLOTS, SLOT_TOP, SLOT_FREE, DIRECTORY = 0, 1, 2, 3, 4, 5, 6

Keys = NDArray[np.int64]
Numbers = NDArray[np.int32]
Codes = NDArray[np.int8]
Block = NDArray[np.float32]


class Rows(NamedTuple):
    """The memory of one table at one site."""

    finder: Index  # key to row where it can be read, to -2 - row where it is REQUESTED
    directory: Index  # key to (site << 32 | move): where the key went, by the highest move known here
    values: Block  # (rows, width)
    keys: Keys  # (rows,)
    states: Codes  # (rows,)
    versions: Numbers  # (rows,)
    peers: Keys  # (rows,)
    until: Keys  # (rows,): clock at which the last intent of this site ends
    slots: Numbers  # (rows,); of a free row, the next free one
    tracked: Numbers  # (slots,): the row, or -2 - the next free slot
    deltas: Block  # (slots, width)
    dirty: Codes  # (slots,)
    flight: Codes  # (slots,)
    asked: Keys  # (slots,): round of the last message about this replica
    answered: Keys  # (slots,): round of the last message that was answered
    counts: Keys


@njit(cache=True, nogil=True)
def _take_row(r: Rows, key: int, state: int) -> int:
    row = r.counts[ROW_FREE]
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
    r.until[row] = 0
    r.slots[row] = -1
    r.values[row] = 0
    put(r.finder, key, row if state != REQUESTED else -2 - row)
    return row


@njit(cache=True, nogil=True)
def _free_row(r: Rows, row: int) -> None:
    erase(r.finder, r.keys[row])
    r.states[row] = FREE
    r.slots[row] = r.counts[ROW_FREE]
    r.counts[ROW_FREE] = row
    r.counts[ROWS] -= 1


@njit(cache=True, nogil=True)
def _take_slot(r: Rows, row: int, turn: int) -> None:
    slot = r.counts[SLOT_FREE]
    if slot >= 0:
        r.counts[SLOT_FREE] = -2 - r.tracked[slot]
    else:
        slot = r.counts[SLOT_TOP]
        r.counts[SLOT_TOP] += 1
    r.counts[SLOTS] += 1
    r.tracked[slot] = row
    r.dirty[slot] = 0
    r.flight[slot] = IDLE
    r.asked[slot] = turn
    r.answered[slot] = 0
    r.slots[row] = slot


@njit(cache=True, nogil=True)
def _free_slot(r: Rows, row: int) -> None:
    slot = r.slots[row]
    r.tracked[slot] = -2 - r.counts[SLOT_FREE]
    r.counts[SLOT_FREE] = slot
    r.counts[SLOTS] -= 1
    r.slots[row] = -1


@njit(cache=True, nogil=True)
def _row(number: int) -> int:
    """Returns the row behind a number of the index, readable or not; -1 for none."""
    return number if number >= -1 else -2 - number


@njit(cache=True, nogil=True)
def _direct(r: Rows, key: int, site: int, move: int) -> None:
    r.counts[DIRECTORY] += put(r.directory, key, (site << 32) | move)


@njit(cache=True, nogil=True)
def _add(to: Block, row: int, block: Block, i: int) -> None:
    for x in range(to.shape[1]):
        to[row, x] += block[i, x]


@njit(cache=True, nogil=True)
def _copy(to: Block, row: int, block: Block, i: int) -> None:
    for x in range(to.shape[1]):
        to[row, x] = block[i, x]


@njit(cache=True, nogil=True)
def read(r: Rows, keys: Keys, limit: int, out: Block, where: Numbers) -> int:
    """Copies the values of keys if all can be read here.

    Args:
        r: the store.
        keys: n keys.
        limit: keys must be smaller.
        out: of shape (n, width).
        where: n numbers, overwritten: the row, or less than 0.

    Returns:
        How many keys cannot be read here, or -1 - i where key i is out of range; unless 0, nothing has been copied.
    """
    index, values = r.finder, r.values  # a field taken inside of the loop costs more than the copy of a row
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
def read_found(r: Rows, where: Numbers, out: Block) -> None:
    """Copies the values of those keys that `read` has found."""
    values = r.values
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
        where[i] = _row(get(index, keys[i]))
        if where[i] < 0:
            missing += 1
    for i in range(keys.shape[0]):
        row = where[i]
        if row < 0:
            continue
        for x in range(values.shape[1]):
            values[row, x] += deltas[i, x]
        if states[row] == OWNED:
            versions[row] += 1
        else:
            slot = slots[row]
            if states[row] == REPLICA:
                if dirty[slot]:
                    _add(unsent, slot, deltas, i)
                else:
                    _copy(unsent, slot, deltas, i)
            dirty[slot] = 1
    return missing


@njit(cache=True, nogil=True)
def locate(r: Rows, rank: int, sites: int, keys: Keys, where: Numbers, targets: Codes) -> int:
    """Finds the owners of keys, as far as this site knows.

    Args:
        r: the store.
        rank: this site.
        sites: number of sites.
        keys: n keys.
        where: n numbers, overwritten: the row of a key that is owned here; -2 where it would be but has never been
            touched; else -1.
        targets: n numbers, overwritten: the site to ask.

    Returns:
        How many keys have never been touched.
    """
    index, directory, states = r.finder, r.directory, r.states
    no_replicas, no_moves = r.counts[SLOTS] == 0, r.counts[DIRECTORY] == 0  # each saves a look at cold memory
    fresh = 0
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
    return fresh


@njit(cache=True, nogil=True)
def create(r: Rows, keys: Keys, where: Numbers, rows: Numbers) -> int:
    """Makes zero rows for the keys that `locate` found untouched; returns how many, numbered in `rows`."""
    created = 0
    for i in range(keys.shape[0]):
        if where[i] != -2:
            continue
        row = get(r.finder, keys[i])
        if row < 0:  # not a duplicate of one just made
            row = _take_row(r, keys[i], OWNED)
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
        _copy(r.values, where[i], values, i)
        r.versions[where[i]] += 1


@njit(cache=True, nogil=True)
def overwrite(r: Rows, keys: Keys, values: Block) -> None:
    """Lets the replicas here follow what this site has set at their owners; answers under way are older."""
    for i in range(keys.shape[0]):
        row = get(r.finder, keys[i])
        if row < 0 or r.states[row] != REPLICA:
            continue
        slot = r.slots[row]
        _copy(r.values, row, values, i)
        if r.dirty[slot]:
            _add(r.values, row, r.deltas, slot)
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
def reconcile(r: Rows, keys: Keys, positions: Numbers, out: Block, absent: Codes) -> int:
    """Brings values that came from other sites up to what this site has pushed.

    Args:
        r: the store.
        keys: n keys that were asked for elsewhere.
        positions: their places in `out`.
        out: the values.
        absent: n flags, overwritten: 1 where this site knows nothing of a key.

    Returns:
        How many are absent.
    """
    index, values, slots, dirty = r.finder, r.values, r.slots, r.dirty
    count = 0
    for i in range(keys.shape[0]):
        number = get(index, keys[i])
        absent[i] = number == -1
        count += absent[i]
        if number >= 0:
            _copy(out, positions[i], values, number)
        elif number < -1 and dirty[slots[-2 - number]]:
            _add(out, positions[i], values, -2 - number)
    return count


@njit(cache=True, nogil=True)
def want(r: Rows, keys: Keys, where: Numbers, end: int, turn: int, wanted: Codes) -> None:
    """Notes an intent; keys that are not here become REQUESTED, and are flagged in `wanted`."""
    for i in range(keys.shape[0]):
        wanted[i] = 0
        row = where[i] if where[i] >= 0 else _row(get(r.finder, keys[i]))
        if row < 0:
            row = _take_row(r, keys[i], REQUESTED)
            _take_slot(r, row, turn)
            wanted[i] = 1
        r.until[row] = max(r.until[row], end)


@njit(cache=True, nogil=True)
def _hand_over(r: Rows, row: int, origin: int) -> int:
    """Ends this site's ownership; returns the number of the move."""
    entry = get(r.directory, r.keys[row])
    move = 1 if entry < 0 else (entry & 0xFFFFFFFF) + 1
    _direct(r, r.keys[row], origin, move)
    _free_row(r, row)
    return move


@njit(cache=True, nogil=True)
def serve_intent(
    r: Rows,
    origin: int,
    clock: int,
    technique: int,
    where: Numbers,
    codes: Codes,
    versions: Numbers,
    moves: Numbers,
    masks: Keys,
    values: Block,
) -> None:
    """Decides, for each key that a site wants, between a replica (VALUE) and the key itself (MOVED).

    The site gets the key itself where no other site wants it at present.
    """
    for i in range(where.shape[0]):
        row = where[i]
        if row < 0:
            codes[i] = AWAY
            continue
        others = r.peers[row] & ~(1 << origin)
        versions[i] = r.versions[row]
        masks[i] = others
        _copy(values, i, r.values, row)
        alone = others == 0 and r.until[row] <= clock
        if technique == RELOCATE or (technique == RELOCATE_OR_REPLICATE and alone):
            codes[i] = MOVED
            moves[i] = _hand_over(r, row, origin)
        else:
            codes[i] = VALUE
            r.peers[row] |= 1 << origin


@njit(cache=True, nogil=True)
def serve_sync(
    r: Rows,
    origin: int,
    clock: int,
    technique: int,
    where: Numbers,
    flags: Codes,
    deltas: Block,
    codes: Codes,
    versions: Numbers,
    moves: Numbers,
    masks: Keys,
    values: Block,
) -> None:
    """Adds a replica's deltas, and answers each key: nothing new, the new value, dropped, or the key itself.

    Args:
        r: the store.
        origin: the site of the replicas.
        clock: this site's.
        technique: decides whether the last site with intent becomes the owner.
        where: n rows, or less than 0 where this site is not the owner.
        flags: n of DIRTY and DROP.
        deltas: one row for each DIRTY key, in order.
        codes: n, overwritten.
        versions: those that the replicas have; overwritten by the owner's.
        moves: n, overwritten where MOVED.
        masks: n, overwritten where MOVED: the sites with other replicas.
        values: of shape (n, width), overwritten where VALUE or MOVED.
    """
    next_delta = 0
    for i in range(where.shape[0]):
        row = where[i]
        delta = next_delta
        if flags[i] & DIRTY:
            next_delta += 1
        if row < 0:
            codes[i] = AWAY
            continue
        news = r.versions[row] != versions[i]
        if flags[i] & DIRTY:
            _add(r.values, row, deltas, delta)
            r.versions[row] += 1
        versions[i] = r.versions[row]
        if flags[i] & DROP:
            r.peers[row] &= ~(1 << origin)
            codes[i] = DROPPED
        elif technique == RELOCATE_OR_REPLICATE and r.until[row] <= clock and r.peers[row] == 1 << origin:
            _copy(values, i, r.values, row)
            masks[i] = 0
            codes[i] = MOVED
            moves[i] = _hand_over(r, row, origin)
        elif news:
            _copy(values, i, r.values, row)
            codes[i] = VALUE
        else:
            codes[i] = SAME


@njit(cache=True, nogil=True)
def install(r: Rows, owner: int, keys: Keys, versions: Numbers, values: Block) -> None:
    """Turns requested keys into replicas; what was pushed meanwhile is to be sent."""
    for i in range(keys.shape[0]):
        row = -2 - get(r.finder, keys[i])
        slot = r.slots[row]
        if r.dirty[slot]:
            _copy(r.deltas, slot, r.values, row)
            _add(r.values, row, values, i)
        else:
            _copy(r.values, row, values, i)
        r.states[row] = REPLICA
        r.versions[row] = versions[i]
        r.peers[row] = owner
        put(r.finder, keys[i], row)


@njit(cache=True, nogil=True)
def own(r: Rows, rank: int, keys: Keys, versions: Numbers, moves: Numbers, masks: Keys, values: Block) -> None:
    """Makes this site the owner of keys that it had requested or replicated."""
    for i in range(keys.shape[0]):
        row = _row(get(r.finder, keys[i]))
        slot = r.slots[row]
        r.versions[row] = versions[i]
        if r.dirty[slot]:
            r.versions[row] += 1
            if r.states[row] == REPLICA:
                _copy(r.values, row, r.deltas, slot)
            _add(r.values, row, values, i)
        else:
            _copy(r.values, row, values, i)
        _free_slot(r, row)
        r.states[row] = OWNED
        r.peers[row] = masks[i]
        put(r.finder, keys[i], row)
        _direct(r, keys[i], rank, moves[i])


@njit(cache=True, nogil=True)
def direct(r: Rows, keys: Keys, moves: Numbers, site: int) -> None:
    """Notes where keys went, unless this site knows of later moves."""
    for i in range(keys.shape[0]):
        entry = get(r.directory, keys[i])
        if entry < 0 or (entry & 0xFFFFFFFF) < moves[i]:
            _direct(r, keys[i], site, moves[i])


@njit(cache=True, nogil=True)
def collect(
    r: Rows, clock: int, turn: int, keys: Keys, versions: Numbers, flags: Codes, owners: Codes, slots: Numbers
) -> int:
    """Begins a round: lists the replicas of which nothing is under way, and marks them as under way.

    Those without intent ahead leave. Returns how many there are.
    """
    count = 0
    for slot in range(r.counts[SLOT_TOP]):
        row = r.tracked[slot]
        if row < 0 or r.states[row] != REPLICA or r.flight[slot] != IDLE:
            continue
        leaves = r.until[row] <= clock
        keys[count] = r.keys[row]
        versions[count] = r.versions[row]
        flags[count] = (DIRTY if r.dirty[slot] else 0) | (DROP if leaves else 0)
        owners[count] = r.peers[row]
        slots[count] = slot
        r.flight[slot] = LEAVING if leaves else ASKED
        r.asked[slot] = turn
        count += 1
    return count


@njit(cache=True, nogil=True)
def take_deltas(r: Rows, slots: Numbers, deltas: Block) -> int:
    """Moves the unsent deltas of slots into a block; returns how many there were."""
    count = 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if r.dirty[slot]:
            _copy(deltas, count, r.deltas, slot)
            r.dirty[slot] = 0
            count += 1
    return count


@njit(cache=True, nogil=True)
def settle(
    r: Rows,
    owner: int,
    clock: int,
    turn: int,
    keys: Keys,
    codes: Codes,
    versions: Numbers,
    values: Block,
    after: Codes,
    rest: Block,
) -> int:
    """Takes in an owner's answer to a round.

    Args:
        r: the store.
        owner: the site that answers.
        clock: this site's.
        turn: number of the round.
        keys: n keys.
        codes: n of SAME, VALUE and DROPPED.
        versions: n versions.
        values: one row for each VALUE, in order.
        after: n flags, overwritten: DIRTY where a delta is left to be pushed, which is in `rest`; DROP where a dropped
            key is wanted again and has become REQUESTED.
        rest: of shape (n, width).

    Returns:
        How many deltas are left to be pushed.
    """
    next_value = 0
    left = 0
    for i in range(keys.shape[0]):
        value = next_value
        if codes[i] == VALUE:
            next_value += 1
        after[i] = 0
        row = get(r.finder, keys[i])
        slot = r.slots[row]
        outdated = r.flight[slot] & OUTDATED
        r.flight[slot] = IDLE
        r.answered[slot] = r.asked[slot]
        r.peers[row] = owner
        if codes[i] == DROPPED:
            if r.until[row] > clock:
                r.states[row] = REQUESTED
                r.values[row] = 0
                if r.dirty[slot]:
                    _copy(r.values, row, r.deltas, slot)
                r.asked[slot] = turn
                put(r.finder, keys[i], -2 - row)
                after[i] = DROP
            else:
                if r.dirty[slot]:
                    _copy(rest, left, r.deltas, slot)
                    left += 1
                    after[i] = DIRTY
                _free_slot(r, row)
                _free_row(r, row)
        elif outdated:
            r.versions[row] = -1
        else:
            r.versions[row] = versions[i]
            if codes[i] == VALUE:
                _copy(r.values, row, values, value)
                if r.dirty[slot]:
                    _add(r.values, row, r.deltas, slot)
    return left


@njit(cache=True, nogil=True)
def unsettled(r: Rows, since: int) -> int:
    """Counts the replicas not refreshed by a round from `since` on, and the requests of earlier rounds."""
    count = 0
    for slot in range(r.counts[SLOT_TOP]):
        row = r.tracked[slot]
        if row < 0:
            continue
        if r.states[row] == REQUESTED:
            count += r.asked[slot] < since or r.dirty[slot] != 0
        else:
            count += r.answered[slot] < since
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
