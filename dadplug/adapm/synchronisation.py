"""numba kernels of synchronisation rounds: what replicas send, an owner's replies, and their effect.

Loops take the arrays out of the store before they begin: reading a field inside costs more than the work on a key.
"""

from __future__ import annotations

from ..jit import njit
from .index import Index, get, put
from .placement import hand_over
from .rows import SLOT_TOP, Block, Codes, Keys, Numbers, Rows, add_row, copy_row, free_row, free_slot
from .states import (
    ASKED,
    AWAY,
    DIRTY,
    DROP,
    DROPPED,
    IDLE,
    LEAVING,
    MOVED,
    OUTDATED,
    RELOCATE_OR_REPLICATE,
    REPLICA,
    REQUESTED,
    SAME,
    VALUE,
)


@njit(cache=True, nogil=True)
def collect_replica_updates(
    r: Rows, clock: int, round_number: int, keys: Keys, versions: Numbers, flags: Codes, owners: Codes, slots: Numbers
) -> int:
    """List the replicas that have no message in flight, and mark them as in flight.

    Replicas without intent ahead get the flag DROP.

    Args:
        r: the store.
        clock: clock of this site.
        round_number: number of the round.
        keys: room for all replicas, overwritten, as all following arguments.
        versions: versions of the replicas.
        flags: bits of `dadplug.adapm.states.ReplicaFlag`.
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
def take_deltas(r: Rows, slots: Numbers, deltas: Block) -> int:
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
    """Add the deltas of a site's replicas, and choose a reply for each key.

    Args:
        r: the store.
        origin: the site of the replicas.
        clock: clock of this site.
        technique: one of `dadplug.adapm.states.Technique`; decides whether the last site with intent becomes the owner.
        where: n rows, less than 0 where this site is not the owner.
        flags: n bits of `dadplug.adapm.states.ReplicaFlag`.
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
    r: Rows,
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
def count_pending(r: Rows, since: int) -> int:
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
