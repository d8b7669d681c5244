"""Hash table from int64 keys of at least 0 to int64 numbers, for numba kernels: linear probing, no tombstones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import njit

Index = NDArray[np.int64]  # of shape (power of two, 2): key or -1, and number, which share a cache line

MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_HALF = np.uint64(32)


def empty(size: int) -> Index:
    """Create an index with room for `size` keys at a load of at most two thirds."""
    places = 16
    while 2 * places < 3 * size:
        places *= 2
    index = np.empty((places, 2), np.int64)
    index[:, 0] = -1
    return index


def room(index: Index) -> int:
    """Return the number of keys that fit before the index must grow."""
    places: int = index.shape[0]
    return 2 * places // 3


@njit(cache=True, nogil=True)
def _first(index: Index, key: int) -> int:
    place: int = np.int64((np.uint64(key) * MIX) >> _HALF) & (index.shape[0] - 1)
    return place


@njit(cache=True, nogil=True)
def get(index: Index, key: int) -> int:
    """Return the number of a key, or -1."""
    mask = index.shape[0] - 1
    place = _first(index, key)
    while True:
        found = index[place, 0]
        if found == key:
            number: int = index[place, 1]
            return number
        if found < 0:
            return -1
        place = (place + 1) & mask


@njit(cache=True, nogil=True)
def put(index: Index, key: int, number: int) -> int:
    """Set the number of a key; return 1 if the key is new, else 0."""
    mask = index.shape[0] - 1
    place = _first(index, key)
    while index[place, 0] >= 0:
        if index[place, 0] == key:
            index[place, 1] = number
            return 0
        place = (place + 1) & mask
    index[place, 0] = key
    index[place, 1] = number
    return 1


@njit(cache=True, nogil=True)
def erase(index: Index, key: int) -> None:
    """Remove a key, and move the keys probed past it back."""
    mask = index.shape[0] - 1
    hole = _first(index, key)
    while index[hole, 0] != key:
        if index[hole, 0] < 0:
            return
        hole = (hole + 1) & mask
    place = (hole + 1) & mask
    while index[place, 0] >= 0:
        if ((place - _first(index, index[place, 0])) & mask) >= ((place - hole) & mask):
            index[hole, 0] = index[place, 0]
            index[hole, 1] = index[place, 1]
            hole = place
        place = (place + 1) & mask
    index[hole, 0] = -1


@njit(cache=True, nogil=True)
def copy_into(index: Index, larger: Index) -> None:
    """Insert all keys of an index into a larger one."""
    for place in range(index.shape[0]):
        if index[place, 0] >= 0:
            put(larger, index[place, 0], index[place, 1])


@njit(cache=True, nogil=True)
def count_absent(keys: NDArray[np.int64], others: NDArray[np.int64]) -> int:
    """Count the keys that are not in `others`; both may hold any int64."""
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
