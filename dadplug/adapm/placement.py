"""numba kernels of what sites tell each other: who gets a key, what replicas send, and what comes of answers.

Loops take the arrays out of the store before they begin: a field taken inside costs more than the work on a key.
"""

from __future__ import annotations

from ..jit import njit
from .index import Index, get, put
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
def want(r: Rows, keys: Keys, where: Numbers, targets: Codes, end: int, turn: int, wanted: Keys, asked: Codes) -> int:
    """Notes an intent; keys that are not here become REQUESTED.

    Args:
        r: the store, with room for as many rows and slots.
        keys: n keys.
        where: n rows of what is owned here, else less than 0.
        targets: n sites to ask.
        end: clock at which the intent ends.
        turn: number of the round.
        wanted: room for n keys, overwritten by those to be asked for.
        asked: the sites to ask for them.

    Returns:
        How many are to be asked for.
    """
    finder, until = r.finder, r.until
    count = 0
    for i in range(keys.shape[0]):
        row = where[i]
        if row < 0:
            row = row_of(get(finder, keys[i]))
            if row < 0:
                row = take_row(r, keys[i], REQUESTED)
                take_slot(r, row, turn)
                wanted[count] = keys[i]
                asked[count] = targets[i]
                count += 1
        if until[row] < end:
            until[row] = end
    return count


@njit(cache=True, nogil=True)
def _hand_over(
    finder: Index, directory: Index, keys: Keys, states: Codes, slots: Numbers, counts: Keys, row: int, origin: int
) -> int:
    """Ends this site's ownership; returns the number of the move."""
    entry = get(directory, keys[row])
    move = 1 if entry < 0 else (entry & 0xFFFFFFFF) + 1
    note(directory, counts, keys[row], origin, move)
    free_row(finder, keys, states, slots, counts, row)
    return move


@njit(cache=True, nogil=True)
def serve_intent(
    r: Rows,
    origin: int,
    clock: int,
    technique: int,
    wanted: Keys,
    where: Numbers,
    keys: Keys,
    versions: Numbers,
    moves: Numbers,
    masks: Keys,
    values: Block,
) -> int:
    """Decides, for each key that a site wants, between a replica and the key itself.

    The site gets the key itself where no other site wants it at present.

    Args:
        r: the store.
        origin: the site that asks.
        clock: this site's.
        technique: one of the techniques.
        wanted: n keys that are owned here.
        where: their rows.
        keys: n, overwritten: the keys that move, from the front; those that are replicated, from the back.
        versions: n, overwritten in the order of `keys`, as are the others.
        moves: numbers of the moves.
        masks: the sites with replicas.
        values: of shape (n, width).

    Returns:
        How many keys move.
    """
    peers, until, known, rows = r.peers, r.until, r.versions, r.values
    finder, directory, own_keys, states, slots, counts = r.finder, r.directory, r.keys, r.states, r.slots, r.counts
    moved, last = 0, where.shape[0]
    for i in range(where.shape[0]):
        row = where[i]
        others = peers[row] & ~(1 << origin)
        alone = others == 0 and until[row] <= clock
        if technique == RELOCATE or (technique == RELOCATE_OR_REPLICATE and alone):
            place = moved
            moved += 1
        else:
            last -= 1
            place = last
            peers[row] |= 1 << origin
        keys[place] = wanted[i]
        versions[place] = known[row]
        masks[place] = others
        for x in range(rows.shape[1]):
            values[place, x] = rows[row, x]
        if place < last:
            moves[place] = _hand_over(finder, directory, own_keys, states, slots, counts, row, origin)
    return moved


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
    values: Block,
) -> tuple[int, int]:
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
        values: of shape (n, width), overwritten: those that are sent, in order, from the front; those of the keys that
            move from the back.

    Returns:
        How many values are sent, and how many keys move.
    """
    known, peers, until, rows = r.versions, r.peers, r.until, r.values
    finder, directory, own_keys, states, slots, counts = r.finder, r.directory, r.keys, r.states, r.slots, r.counts
    next_delta, sent, moved = 0, 0, 0
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
            moved += 1
            copy_row(values, values.shape[0] - moved, rows, row)
            codes[i] = MOVED
            moves[i] = _hand_over(finder, directory, own_keys, states, slots, counts, row, origin)
        elif news:
            copy_row(values, sent, rows, row)
            sent += 1
            codes[i] = VALUE
        else:
            codes[i] = SAME
    return sent, moved


@njit(cache=True, nogil=True)
def install(r: Rows, owner: int, keys: Keys, versions: Numbers, values: Block) -> None:
    """Turns requested keys into replicas; what was pushed meanwhile is to be sent."""
    finder, slots, dirty, unsent, rows = r.finder, r.slots, r.dirty, r.deltas, r.values
    states, known, peers = r.states, r.versions, r.peers
    for i in range(keys.shape[0]):
        row = -2 - get(finder, keys[i])
        slot = slots[row]
        if dirty[slot]:
            copy_row(unsent, slot, rows, row)
            add_row(rows, row, values, i)
        else:
            copy_row(rows, row, values, i)
        states[row] = REPLICA
        known[row] = versions[i]
        peers[row] = owner
        put(finder, keys[i], row)


@njit(cache=True, nogil=True)
def own(r: Rows, rank: int, keys: Keys, versions: Numbers, moves: Numbers, masks: Keys, values: Block) -> None:
    """Makes this site the owner of keys that it had requested or replicated."""
    finder, directory, slots, dirty, unsent, rows = r.finder, r.directory, r.slots, r.dirty, r.deltas, r.values
    states, known, peers, tracked, counts = r.states, r.versions, r.peers, r.tracked, r.counts
    for i in range(keys.shape[0]):
        row = row_of(get(finder, keys[i]))
        slot = slots[row]
        known[row] = versions[i]
        if dirty[slot]:
            known[row] += 1
            if states[row] == REPLICA:
                copy_row(rows, row, unsent, slot)
            add_row(rows, row, values, i)
        else:
            copy_row(rows, row, values, i)
        free_slot(slots, tracked, counts, row)
        if states[row] == REQUESTED:
            put(finder, keys[i], row)
        states[row] = OWNED
        peers[row] = masks[i]
        note(directory, counts, keys[i], rank, moves[i])


@njit(cache=True, nogil=True)
def direct(r: Rows, keys: Keys, moves: Numbers, site: int) -> None:
    """Notes where keys went, unless this site knows of later moves."""
    directory, counts = r.directory, r.counts
    for i in range(keys.shape[0]):
        entry = get(directory, keys[i])
        if entry < 0 or (entry & 0xFFFFFFFF) < moves[i]:
            note(directory, counts, keys[i], site, moves[i])


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
    own_keys, tracked, counts = r.keys, r.tracked, r.counts
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
                free_slot(slots_of, tracked, counts, row)
                free_row(finder, own_keys, states, slots_of, counts, row)
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
