"""Memory of a table at a site, and numba kernels that allocate and free its rows and slots.

A key is in one of these states at a site (`dadplug.adapm.states.KeyState`):

- absent: no row; `Rows.directory` holds the site to ask, otherwise it is the key's home;
- OWNED: this site is the owner, and `values` holds the true value; `peers` is the set of sites with a replica, as bits;
- REPLICA: `values` holds the last value from the owner plus everything pushed here since, of which `deltas` holds the
  part that has not been sent (where `dirty`); `peers` is the site that replied last;
- REQUESTED: an intent has been sent, and the reply has not arrived. Pushes are collected in `values` (where `dirty`);
  reads ask the owner and add them.

Rows of replicas and requested keys also have a slot, with their unsent delta and the state of their messages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..jit import njit
from .index import Index, erase, put
from .states import FREE, IDLE, OWNED, REPLICA, REQUESTED

# Positions in Rows.counts
ROWS, ROW_TOP, ROW_FREE, SLOTS, SLOT_TOP, SLOT_FREE, DIRECTORY = 0, 1, 2, 3, 4, 5, 6

Keys = NDArray[np.int64]
Numbers = NDArray[np.int32]
Codes = NDArray[np.int8]
Block = NDArray[np.float32]


class Rows(NamedTuple):
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
def take_row(r: Rows, key: int, state: int) -> int:
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
def take_slot(r: Rows, row: int, round_number: int) -> None:
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
    """Return the row that a number in `Rows.finder` refers to, readable or not; -1 for none."""
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


__all__ = ["FREE", "OWNED", "REPLICA", "REQUESTED", "Block", "Codes", "Keys", "Numbers", "Rows"]
