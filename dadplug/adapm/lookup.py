"""A kernel that tells where keys are, for who watches."""

from __future__ import annotations

from ..jit import njit
from .index import Index, get
from .rows import Codes, Keys


@njit(cache=True, nogil=True)
def states_of(finder: Index, states: Codes, keys: Keys, out: Codes) -> None:
    """Looks the states of keys up in a store's `Rows`; -1 for one that is absent."""
    for i in range(keys.shape[0]):
        found = get(finder, keys[i])
        row = found if found >= -1 else -2 - found
        out[i] = states[row] if row >= 0 else -1
