"""numba kernels on the rows of a table, for many keys at a time and with the GIL released.

Kernels on the path of a remote pull of one key take the arrays that they need: passing the whole tuple takes 1 us.
Other loops take the arrays out of the store before they begin: reading a field inside costs more than a key's work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..support.jit import njit
from .store import (
    ASKED,
    IDLE,
    LEAVING,
    OUTDATED,
    OWNED,
    REPLICA,
    REQUESTED,
    SLOT_TOP,
    STEP,
    Block,
    Codes,
    Index,
    Keys,
    Numbers,
    TableRows,
    add_row,
    copy_row,
    free_row,
    free_slot,
    get,
    mixed,
    put,
    record_location,
    row_of,
    take_row,
    take_slot,
)

RELOCATE_OR_REPLICATE, REPLICATE, RELOCATE, STAY = (
    0,
    1,
    2,
    3,
)  # techniques: responses to another site's intent
SAME, VALUE, DROPPED, MOVED, AWAY = 0, 1, 2, 3, 4  # replies to a replica's SYNC; AWAY: another site owns the key
DIRTY, DROP = 1, 2  # bits of a replica in a SYNC: it has an unsent delta; it leaves

# Pulls, pushes and sets


@njit(cache=True, nogil=True)
def read_found(values: Block, where: Numbers, out: Block) -> None:
    """Copy the values of the keys that `read` has found."""
    for i in range(where.shape[0]):
        row = where[i]
        if row >= 0:
            for x in range(values.shape[1]):
                out[i, x] = values[row, x]


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
def add(r: TableRows, keys: Keys, deltas: Block, where: Numbers) -> int:
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
def readable(r: TableRows, rank: int, sites: int, keys: Keys, found: Codes) -> None:
    """Flag the keys whose value this site has, or creates at first use."""
    index, directory = r.finder, r.directory
    for i in range(keys.shape[0]):
        number = get(index, keys[i])
        found[i] = number >= 0
        if number == -1:
            entry = get(directory, keys[i])
            found[i] = (keys[i] % sites if entry < 0 else entry >> 32) == rank


@njit(cache=True, nogil=True)
def add_owned(r: TableRows, where: Numbers, deltas: Block) -> None:
    """Add deltas to rows owned by this site."""
    values, versions = r.values, r.versions
    for i in range(where.shape[0]):
        row = where[i]
        for x in range(values.shape[1]):
            values[row, x] += deltas[i, x]
        versions[row] += 1


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
def assign(r: TableRows, where: Numbers, values: Block) -> None:
    """Set rows owned by this site."""
    for i in range(where.shape[0]):
        copy_row(r.values, where[i], values, i)
        r.versions[where[i]] += 1


@njit(cache=True, nogil=True)
def overwrite_replicas(r: TableRows, keys: Keys, values: Block) -> None:
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
def any_requested(r: TableRows, keys: Keys) -> bool:
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
        index: `TableRows.finder` of the store.
        values: `TableRows.values` of the store.
        slots: `TableRows.slots` of the store.
        dirty: `TableRows.dirty` of the store.
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
def states_of(finder: Index, states: Codes, keys: Keys, out: Codes) -> None:
    """Look up the states of keys; -1 for absent keys.

    Args:
        finder: `TableRows.finder` of the store.
        states: `TableRows.states` of the store.
        keys: n keys.
        out: n states, overwritten.
    """
    for i in range(keys.shape[0]):
        row = row_of(get(finder, keys[i]))
        out[i] = states[row] if row >= 0 else -1


# Placement: the requests of intents, an owner's decision, and changes of ownership


@njit(cache=True, nogil=True)
def request_keys(
    r: TableRows, keys: Keys, where: Numbers, targets: Codes, end: int, round_number: int, wanted: Keys, asked: Codes
) -> int:
    """Record an intent; keys that are not at this site become REQUESTED.

    Args:
        r: the store, with room for as many rows and slots.
        keys: n keys.
        where: n rows of keys owned by this site, less than 0 for others.
        targets: n sites to ask.
        end: clock at which the intent ends.
        round_number: number of the round.
        wanted: room for n keys, overwritten with the keys to request.
        asked: room for n sites, overwritten with the sites to ask for them.

    Returns:
        The number of keys to request.
    """
    finder, intent_end = r.finder, r.intent_end
    count = 0
    for i in range(keys.shape[0]):
        row = where[i]
        if row < 0:
            row = row_of(get(finder, keys[i]))
            if row < 0:
                row = take_row(r, keys[i], REQUESTED)
                take_slot(r, row, round_number)
                wanted[count] = keys[i]
                asked[count] = targets[i]
                count += 1
        if intent_end[row] < end:
            intent_end[row] = end
    return count


@njit(cache=True, nogil=True)
def hand_over(
    finder: Index, directory: Index, keys: Keys, states: Codes, slots: Numbers, counts: Keys, row: int, origin: int
) -> int:
    """End this site's ownership of a row's key; return the number of the move."""
    entry = get(directory, keys[row])
    move = 1 if entry < 0 else (entry & 0xFFFFFFFF) + 1
    record_location(directory, counts, keys[row], origin, move)
    free_row(finder, keys, states, slots, counts, row)
    return move


@njit(cache=True, nogil=True)
def serve_intent(
    r: TableRows,
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
    """Choose, for each key that another site requests, between a replica and relocation.

    A key is relocated if no third site has a replica and this site has no intent for it.

    Args:
        r: the store.
        origin: the site that requests the keys.
        clock: clock of this site.
        technique: the placement technique, such as RELOCATE.
        wanted: n keys owned by this site.
        where: their rows.
        keys: n keys, overwritten: relocated keys from the front, replicated keys from the back.
        versions: n versions, overwritten in the order of `keys`, as all following arguments.
        moves: numbers of the moves.
        masks: sites with replicas, as bits.
        values: of shape (n, width).

    Returns:
        The number of relocated keys.
    """
    peers, intent_end, known, rows = r.peers, r.intent_end, r.versions, r.values
    finder, directory, own_keys, states, slots, counts = r.finder, r.directory, r.keys, r.states, r.slots, r.counts
    moved, last = 0, where.shape[0]
    for i in range(where.shape[0]):
        row = where[i]
        others = peers[row] & ~(1 << origin)
        alone = others == 0 and intent_end[row] <= clock
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
            moves[place] = hand_over(finder, directory, own_keys, states, slots, counts, row, origin)
    return moved


@njit(cache=True, nogil=True)
def install_replicas(r: TableRows, owner: int, keys: Keys, versions: Numbers, values: Block) -> None:
    """Turn requested keys into replicas; what was pushed since the request becomes their unsent delta."""
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
def take_ownership(
    r: TableRows, rank: int, keys: Keys, versions: Numbers, moves: Numbers, masks: Keys, values: Block
) -> None:
    """Make this site the owner of keys that it had requested or replicated."""
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
        record_location(directory, counts, keys[i], rank, moves[i])


@njit(cache=True, nogil=True)
def update_directory(r: TableRows, keys: Keys, moves: Numbers, site: int) -> None:
    """Record the site that keys have moved to, except where a later move is known."""
    directory, counts = r.directory, r.counts
    for i in range(keys.shape[0]):
        entry = get(directory, keys[i])
        if entry < 0 or (entry & 0xFFFFFFFF) < moves[i]:
            record_location(directory, counts, keys[i], site, moves[i])


# Synchronisation rounds: what replicas send, an owner's replies, and their effect


@njit(cache=True, nogil=True)
def collect_replica_updates(
    r: TableRows,
    clock: int,
    round_number: int,
    keys: Keys,
    versions: Numbers,
    flags: Codes,
    owners: Codes,
    slots: Numbers,
) -> int:
    """List the replicas that have no message in flight, and mark them as in flight.

    Replicas without intent ahead get the flag DROP.

    Args:
        r: the store.
        clock: clock of this site.
        round_number: number of the round.
        keys: room for all replicas, overwritten, as all following arguments.
        versions: versions of the replicas.
        flags: bits DIRTY and DROP.
        owners: sites to send to.
        slots: slots of the replicas.

    Returns:
        The number of replicas.
    """
    states, known, peers, intent_end, row_keys = r.states, r.versions, r.peers, r.intent_end, r.keys
    tracked, dirty, in_flight, asked = r.tracked, r.dirty, r.in_flight, r.asked
    count = 0
    for slot in range(r.counts[SLOT_TOP]):
        row = tracked[slot]
        if row < 0 or states[row] != REPLICA or in_flight[slot] != IDLE:
            continue
        leaves = intent_end[row] <= clock
        keys[count] = row_keys[row]
        versions[count] = known[row]
        flags[count] = (DIRTY if dirty[slot] else 0) | (DROP if leaves else 0)
        owners[count] = peers[row]
        slots[count] = slot
        in_flight[slot] = LEAVING if leaves else ASKED
        asked[slot] = round_number
        count += 1
    return count


@njit(cache=True, nogil=True)
def take_deltas(r: TableRows, slots: Numbers, deltas: Block) -> int:
    """Move the unsent deltas of slots into a block; return their number."""
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
def serve_sync(
    r: TableRows,
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
    """Add the deltas of a site's replicas, and choose a reply for each key.

    Args:
        r: the store.
        origin: the site of the replicas.
        clock: clock of this site.
        technique: the placement technique; decides whether the last site with intent becomes the owner.
        where: n rows, less than 0 where this site is not the owner.
        flags: n bits DIRTY and DROP.
        deltas: one row for each DIRTY key, in order.
        codes: n replies, overwritten.
        versions: n versions of the replicas; overwritten with the owner's.
        moves: n numbers of moves, overwritten where MOVED.
        values: of shape (n, width), overwritten: values to send from the front, in order; values of moved keys from
            the back.

    Returns:
        The number of values to send, and the number of moved keys.
    """
    known, peers, intent_end, rows = r.versions, r.peers, r.intent_end, r.values
    finder, directory, own_keys, states, slots, counts = r.finder, r.directory, r.keys, r.states, r.slots, r.counts
    next_delta, sent, moved = 0, 0, 0
    for i in range(where.shape[0]):
        row = where[i]
        newer = row >= 0 and known[row] != versions[i]
        if flags[i] & DIRTY:
            if row >= 0:
                add_row(rows, row, deltas, next_delta)
                known[row] += 1
            next_delta += 1
        if row < 0:
            codes[i] = AWAY
            continue
        versions[i] = known[row]
        codes[i] = VALUE if newer else SAME
        if flags[i] & DROP:
            peers[row] &= ~(1 << origin)
            codes[i] = DROPPED
        elif technique == RELOCATE_OR_REPLICATE and intent_end[row] <= clock and peers[row] == 1 << origin:
            moved += 1
            copy_row(values, values.shape[0] - moved, rows, row)
            codes[i] = MOVED
            moves[i] = hand_over(finder, directory, own_keys, states, slots, counts, row, origin)
        elif newer:
            copy_row(values, sent, rows, row)
            sent += 1
    return sent, moved


@njit(cache=True, nogil=True)
def _request_again(
    finder: Index, states: Codes, dirty: Codes, unsent: Block, rows: Block, key: int, row: int, slot: int
) -> None:
    """Turn a replica that its owner has dropped into a requested key; its unsent delta becomes its value."""
    states[row] = REQUESTED
    if dirty[slot]:
        copy_row(rows, row, unsent, slot)
    put(finder, key, -2 - row)


@njit(cache=True, nogil=True)
def _refresh(rows: Block, row: int, dirty: Codes, unsent: Block, slot: int, values: Block, i: int) -> None:
    """Replace a replica's value by the owner's plus the unsent delta."""
    copy_row(rows, row, values, i)
    if dirty[slot]:
        add_row(rows, row, unsent, slot)


@njit(cache=True, nogil=True)
def apply_sync_reply(
    r: TableRows,
    owner: int,
    clock: int,
    round_number: int,
    keys: Keys,
    codes: Codes,
    versions: Numbers,
    values: Block,
    after: Codes,
    rest: Block,
) -> int:
    """Apply an owner's reply to the replicas of this site.

    Args:
        r: the store.
        owner: the site that replies.
        clock: clock of this site.
        round_number: number of the round.
        keys: n keys.
        codes: n replies: SAME, VALUE or DROPPED.
        versions: n versions.
        values: one row for each VALUE, in order.
        after: n flags, overwritten: DIRTY where a delta has to be pushed, which is in `rest`; DROP where a dropped key
            has intent again and has become REQUESTED.
        rest: of shape (n, width), overwritten.

    Returns:
        The number of deltas to push.
    """
    states, known, peers, intent_end, rows, finder = r.states, r.versions, r.peers, r.intent_end, r.values, r.finder
    unsent, dirty, in_flight, asked, answered = r.deltas, r.dirty, r.in_flight, r.asked, r.answered
    own_keys, slots, tracked, counts = r.keys, r.slots, r.tracked, r.counts
    next_value, left = 0, 0
    for i in range(keys.shape[0]):
        after[i] = 0
        row = get(finder, keys[i])
        slot = slots[row]
        outdated = in_flight[slot] & OUTDATED
        in_flight[slot] = IDLE
        answered[slot] = asked[slot]
        peers[row] = owner
        if codes[i] != DROPPED:
            known[row] = -1 if outdated else versions[i]
            if codes[i] == VALUE and not outdated:
                _refresh(rows, row, dirty, unsent, slot, values, next_value)
        elif intent_end[row] > clock:
            _request_again(finder, states, dirty, unsent, rows, keys[i], row, slot)
            asked[slot] = round_number
            after[i] = DROP
        else:
            if dirty[slot]:
                copy_row(rest, left, unsent, slot)
                left += 1
                after[i] = DIRTY
            free_slot(slots, tracked, counts, row)
            free_row(finder, own_keys, states, slots, counts, row)
        next_value += codes[i] == VALUE
    return left


@njit(cache=True, nogil=True)
def count_pending(r: TableRows, since: int) -> int:
    """Count the replicas that no round from `since` on has refreshed, and the requests of earlier rounds."""
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


# Samples


@njit(cache=True, nogil=True)
def alias_table(weights: NDArray[np.float64], shares: NDArray[np.float64], aliases: Keys) -> None:
    """Compute the tables of the alias method, which draws in constant time (Walker 1977, in the form of Vose 1991).

    Args:
        weights: n weights of at least 0 with mean 1.
        shares: n numbers, overwritten: probability that column i yields i.
        aliases: n numbers, overwritten: the number that column i yields otherwise.
    """
    n = weights.shape[0]
    small, large = np.empty(n, np.int64), np.empty(n, np.int64)
    smalls, larges = 0, 0
    for i in range(n):
        shares[i] = weights[i]
        aliases[i] = i
        if weights[i] < 1:
            small[smalls] = i
            smalls += 1
        else:
            large[larges] = i
            larges += 1
    while smalls and larges:
        smalls -= 1
        less, more = small[smalls], large[larges - 1]
        aliases[less] = more
        shares[more] -= 1 - shares[less]
        if shares[more] < 1:
            larges -= 1
            small[smalls] = more
            smalls += 1
    for i in range(smalls):  # left over by rounding
        shares[small[i]] = 1
    for i in range(larges):
        shares[large[i]] = 1


@njit(cache=True, nogil=True)
def draw(seed: int, rank: int, first: int, shares: NDArray[np.float64], aliases: Keys, rows: int, out: Keys) -> None:
    """Draw keys; the key at position p of a site's sequence depends only on (seed, rank, p).

    Args:
        seed: seed of the sequences.
        rank: the site.
        first: position of the first key in the sequence.
        shares: see `alias_table`; empty for a uniform distribution.
        aliases: see `alias_table`.
        rows: number of keys.
        out: n keys, overwritten.
    """
    begin = mixed(mixed(np.uint64(seed)) + np.uint64(rank + 1) * STEP)
    for i in range(out.shape[0]):
        state = mixed(begin + np.uint64(first + i) * STEP)
        column = np.int64(np.float64(state >> np.uint64(11)) * 2.0**-53 * rows)
        if shares.shape[0]:
            part = np.float64(mixed(state + STEP) >> np.uint64(11)) * 2.0**-53
            if part >= shares[column]:
                column = aliases[column]
        out[i] = column
