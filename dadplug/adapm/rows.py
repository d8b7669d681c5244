"""The memory of a table at a site, and the states that a key can be in there.

A key is in one of these states at a site:

- absent: the site knows at most which site to ask (`Rows.directory`, else the key's home);
- OWNED: the value here is the true one; `peers` is the set of sites with a replica, as bits;
- REPLICA: `values` is the last value from the owner plus all that was pushed here since, of which `deltas` holds what
  has not been sent yet (where `dirty`); `peers` is the site that answered last;
- REQUESTED: asked for, not here yet. What is pushed here meanwhile waits in `values` (where `dirty`); reads ask the
  owner and add it.

Rows of replicas and requests have a slot besides, with their unsent delta and what is under way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..jit import njit
from .index import Index, erase, put

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
def take_row(r: Rows, key: int, state: int) -> int:
    """Makes a row for a key that has none; there must be room for it. Its values are what memory held."""
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
    put(r.finder, key, row if state != REQUESTED else -2 - row)
    return row


# What loops call takes arrays: to pass the tuple counts references of all of them, which takes a microsecond.


@njit(cache=True, nogil=True)
def free_row(finder: Index, keys: Keys, states: Codes, slots: Numbers, counts: Keys, row: int) -> None:
    """Gives a row back."""
    erase(finder, keys[row])
    states[row] = FREE
    slots[row] = counts[ROW_FREE]
    counts[ROW_FREE] = row
    counts[ROWS] -= 1


@njit(cache=True, nogil=True)
def take_slot(r: Rows, row: int, turn: int) -> None:
    """Gives a row a slot, for its unsent delta and what is under way."""
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
def free_slot(slots: Numbers, tracked: Numbers, counts: Keys, row: int) -> None:
    """Gives a row's slot back."""
    slot = slots[row]
    tracked[slot] = -2 - counts[SLOT_FREE]
    counts[SLOT_FREE] = slot
    counts[SLOTS] -= 1
    slots[row] = -1


@njit(cache=True, nogil=True)
def row_of(number: int) -> int:
    """Returns the row behind a number of the index, readable or not; -1 for none."""
    return number if number >= -1 else -2 - number


@njit(cache=True, nogil=True)
def note(directory: Index, counts: Keys, key: int, site: int, move: int) -> None:
    """Notes in the directory where a key is, since which move."""
    counts[DIRECTORY] += put(directory, key, (site << 32) | move)


@njit(cache=True, nogil=True)
def add_row(to: Block, row: int, block: Block, i: int) -> None:
    """Adds ``block[i]`` to ``to[row]``."""
    for x in range(to.shape[1]):
        to[row, x] += block[i, x]


@njit(cache=True, nogil=True)
def copy_row(to: Block, row: int, block: Block, i: int) -> None:
    """Copies ``block[i]`` to ``to[row]``."""
    for x in range(to.shape[1]):
        to[row, x] = block[i, x]
