"""numba kernels of what sites tell each other: who gets a key, what replicas send, and what comes of answers.

Loops take the arrays out of the store before they begin: a field taken inside costs more than the work on a key.
"""

from __future__ import annotations

from numba import njit

from .index import get, put
from .rows import (
    ASKED,
    AWAY,
    DIRTY,
    DROP,
    DROPPED,
    IDLE,
    LEAVING,
    MOVED,
    OUTDATED,
    OWNED,
    RELOCATE,
    RELOCATE_OR_REPLICATE,
    REPLICA,
    REQUESTED,
    SAME,
    SLOT_TOP,
    VALUE,
    Block,
    Codes,
    Keys,
    Numbers,
    Rows,
    add_row,
    copy_row,
    free_row,
    free_slot,
    note,
    row_of,
    take_row,
    take_slot,
)


@njit(cache=True, nogil=True)
def want(r: Rows, keys: Keys, where: Numbers, end: int, turn: int, wanted: Codes) -> None:
    """Notes an intent; keys that are not here become REQUESTED, and are flagged in `wanted`."""
    for i in range(keys.shape[0]):
        wanted[i] = 0
        row = where[i] if where[i] >= 0 else row_of(get(r.finder, keys[i]))
        if row < 0:
            row = take_row(r, keys[i], REQUESTED)
            take_slot(r, row, turn)
            wanted[i] = 1
        r.until[row] = max(r.until[row], end)


@njit(cache=True, nogil=True)
def _hand_over(r: Rows, row: int, origin: int) -> int:
    """Ends this site's ownership; returns the number of the move."""
    entry = get(r.directory, r.keys[row])
    move = 1 if entry < 0 else (entry & 0xFFFFFFFF) + 1
    note(r, r.keys[row], origin, move)
    free_row(r, row)
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
        copy_row(values, i, r.values, row)
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
    known, peers, until, rows = r.versions, r.peers, r.until, r.values
    next_delta = 0
    for i in range(where.shape[0]):
        row = where[i]
        delta = next_delta
        if flags[i] & DIRTY:
            next_delta += 1
        if row < 0:
            codes[i] = AWAY
            continue
        news = known[row] != versions[i]
        if flags[i] & DIRTY:
            add_row(rows, row, deltas, delta)
            known[row] += 1
        versions[i] = known[row]
        if flags[i] & DROP:
            peers[row] &= ~(1 << origin)
            codes[i] = DROPPED
        elif technique == RELOCATE_OR_REPLICATE and until[row] <= clock and peers[row] == 1 << origin:
            copy_row(values, i, rows, row)
            masks[i] = 0
            codes[i] = MOVED
            moves[i] = _hand_over(r, row, origin)
        elif news:
            copy_row(values, i, rows, row)
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
            copy_row(r.deltas, slot, r.values, row)
            add_row(r.values, row, values, i)
        else:
            copy_row(r.values, row, values, i)
        r.states[row] = REPLICA
        r.versions[row] = versions[i]
        r.peers[row] = owner
        put(r.finder, keys[i], row)


@njit(cache=True, nogil=True)
def own(r: Rows, rank: int, keys: Keys, versions: Numbers, moves: Numbers, masks: Keys, values: Block) -> None:
    """Makes this site the owner of keys that it had requested or replicated."""
    for i in range(keys.shape[0]):
        row = row_of(get(r.finder, keys[i]))
        slot = r.slots[row]
        r.versions[row] = versions[i]
        if r.dirty[slot]:
            r.versions[row] += 1
            if r.states[row] == REPLICA:
                copy_row(r.values, row, r.deltas, slot)
            add_row(r.values, row, values, i)
        else:
            copy_row(r.values, row, values, i)
        free_slot(r, row)
        r.states[row] = OWNED
        r.peers[row] = masks[i]
        put(r.finder, keys[i], row)
        note(r, keys[i], rank, moves[i])


@njit(cache=True, nogil=True)
def direct(r: Rows, keys: Keys, moves: Numbers, site: int) -> None:
    """Notes where keys went, unless this site knows of later moves."""
    for i in range(keys.shape[0]):
        entry = get(r.directory, keys[i])
        if entry < 0 or (entry & 0xFFFFFFFF) < moves[i]:
            note(r, keys[i], site, moves[i])


@njit(cache=True, nogil=True)
def collect(
    r: Rows, clock: int, turn: int, keys: Keys, versions: Numbers, flags: Codes, owners: Codes, slots: Numbers
) -> int:
    """Begins a round: lists the replicas of which nothing is under way, and marks them as under way.

    Those without intent ahead leave. Returns how many there are.
    """
    states, known, peers, until, tracked, dirty, flight, asked, row_keys = (
        r.states,
        r.versions,
        r.peers,
        r.until,
        r.tracked,
        r.dirty,
        r.flight,
        r.asked,
        r.keys,
    )
    count = 0
    for slot in range(r.counts[SLOT_TOP]):
        row = tracked[slot]
        if row < 0 or states[row] != REPLICA or flight[slot] != IDLE:
            continue
        leaves = until[row] <= clock
        keys[count] = row_keys[row]
        versions[count] = known[row]
        flags[count] = (DIRTY if dirty[slot] else 0) | (DROP if leaves else 0)
        owners[count] = peers[row]
        slots[count] = slot
        flight[slot] = LEAVING if leaves else ASKED
        asked[slot] = turn
        count += 1
    return count


@njit(cache=True, nogil=True)
def take_deltas(r: Rows, slots: Numbers, deltas: Block) -> int:
    """Moves the unsent deltas of slots into a block; returns how many there were."""
    unsent, dirty = r.deltas, r.dirty
    count = 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if dirty[slot]:
            copy_row(deltas, count, unsent, slot)
            dirty[slot] = 0
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
    states, known, peers, until, slots_of, unsent, dirty, flight, asked, answered, rows, finder = (
        r.states,
        r.versions,
        r.peers,
        r.until,
        r.slots,
        r.deltas,
        r.dirty,
        r.flight,
        r.asked,
        r.answered,
        r.values,
        r.finder,
    )
    next_value = 0
    left = 0
    for i in range(keys.shape[0]):
        value = next_value
        if codes[i] == VALUE:
            next_value += 1
        after[i] = 0
        row = get(finder, keys[i])
        slot = slots_of[row]
        outdated = flight[slot] & OUTDATED
        flight[slot] = IDLE
        answered[slot] = asked[slot]
        peers[row] = owner
        if codes[i] == DROPPED:
            if until[row] > clock:
                states[row] = REQUESTED
                rows[row] = 0
                if dirty[slot]:
                    copy_row(rows, row, unsent, slot)
                asked[slot] = turn
                put(finder, keys[i], -2 - row)
                after[i] = DROP
            else:
                if dirty[slot]:
                    copy_row(rest, left, unsent, slot)
                    left += 1
                    after[i] = DIRTY
                free_slot(r, row)
                free_row(r, row)
        elif outdated:
            known[row] = -1
        else:
            known[row] = versions[i]
            if codes[i] == VALUE:
                copy_row(rows, row, values, value)
                if dirty[slot]:
                    add_row(rows, row, unsent, slot)
    return left


@njit(cache=True, nogil=True)
def unsettled(r: Rows, since: int) -> int:
    """Counts the replicas not refreshed by a round from `since` on, and the requests of earlier rounds."""
    states, tracked, dirty, asked, answered = r.states, r.tracked, r.dirty, r.asked, r.answered
    count = 0
    for slot in range(r.counts[SLOT_TOP]):
        row = tracked[slot]
        if row < 0:
            continue
        if states[row] == REQUESTED:
            count += asked[slot] < since or dirty[slot] != 0
        else:
            count += answered[slot] < since
    return count
