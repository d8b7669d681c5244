"""numba kernels of placement: the requests of intents, an owner's decision, and changes of ownership.

Loops take the arrays out of the store before they begin: reading a field inside costs more than the work on a key.
"""

from __future__ import annotations

from ..jit import njit
from .index import Index, get, put
from .rows import (
    Block,
    Codes,
    Keys,
    Numbers,
    Rows,
    add_row,
    copy_row,
    free_row,
    free_slot,
    record_location,
    row_of,
    take_row,
    take_slot,
)
from .states import OWNED, RELOCATE, RELOCATE_OR_REPLICATE, REPLICA, REQUESTED


@njit(cache=True, nogil=True)
def request_keys(
    r: Rows, keys: Keys, where: Numbers, targets: Codes, end: int, round_number: int, wanted: Keys, asked: Codes
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
    """Choose, for each key that another site requests, between a replica and relocation.

    A key is relocated if no third site has a replica and this site has no intent for it.

    Args:
        r: the store.
        origin: the site that requests the keys.
        clock: clock of this site.
        technique: one of `dadplug.adapm.states.Technique`.
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
def install_replicas(r: Rows, owner: int, keys: Keys, versions: Numbers, values: Block) -> None:
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
    r: Rows, rank: int, keys: Keys, versions: Numbers, moves: Numbers, masks: Keys, values: Block
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
def update_directory(r: Rows, keys: Keys, moves: Numbers, site: int) -> None:
    """Record the site that keys have moved to, except where a later move is known."""
    directory, counts = r.directory, r.counts
    for i in range(keys.shape[0]):
        entry = get(directory, keys[i])
        if entry < 0 or (entry & 0xFFFFFFFF) < moves[i]:
            record_location(directory, counts, keys[i], site, moves[i])
