"""Samples of keys, such as negative examples: drawn early, signalled by intent, and pulled when they are used."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..jit import njit
from .initialisers import STEP, mixed
from .store import Keys

SCHEMES = ("independent", "pool", "local")
_TRIES = 16  # draws for a local key, before a remote one is accepted


class SampledTable(Protocol):
    """Interface of the table that a sampler draws from, see `Table`."""

    name: str
    rows: int | None
    rank: int

    def intent(self, keys: Tensor, start: int, end: int = 0) -> None: ...

    def here(self, keys: Keys) -> NDArray[np.bool_]: ...

    def pull(self, keys: Tensor) -> Tensor: ...


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


class Sample:
    """Keys that a `Sampler` has prepared; their values are pulled in parts or at once.

    Args:
        sampler: the sampler.
        count: number of keys.
        keys: the keys, of shape (count,); None to draw local keys when they are pulled.

    Attributes:
        remaining: number of keys that have not been pulled.
    """

    def __init__(self, sampler: Sampler, count: int, keys: Keys | None) -> None:
        self._sampler, self._keys = sampler, keys
        self.remaining = count

    def pull(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Pull the next keys of the sample.

        Args:
            count: number of keys; None for all remaining ones.

        Returns:
            The keys, int64 of shape (count,), and their values, of shape (count, width).

        Raises:
            ValueError: if fewer keys remain.
            SiteError: if a site exits or does not answer.
        """
        count = self.remaining if count is None else count
        if not 0 <= count <= self.remaining:
            raise ValueError(f"{count} keys are asked for, of a sample of which {self.remaining} remain")
        if self._keys is None:
            keys = self._sampler._draw_local(count)
        else:
            start = self._keys.shape[0] - self.remaining
            keys = self._keys[start : start + count]
        self.remaining -= count
        found = torch.from_numpy(keys.copy())
        return found, self._sampler.table.pull(found)


class Sampler:
    """Sampler of keys of a table with replacement; created by `Table.sampler`.

    The schemes follow AdaPM (Renz-Wieland et al., arXiv:2206.00470) and NuPS (arXiv:2104.00501):

    - ``"independent"``: keys are drawn independently when a sample is prepared, with intent for the time of use;
    - ``"pool"``: `pool` keys are drawn independently and used `reuse` times, each time in another order. Keys are used
      again while they are still local, so fewer keys move;
    - ``"local"``: keys are drawn among the local keys when they are pulled. Nothing is sent. The distribution depends
      on the keys that the sites use.

    With the first two schemes, the keys of a site depend only on the seed.

    Args:
        table: the table; it must have a number of rows.
        weights: of shape (rows,), at least 0, such as word frequencies; None for a uniform distribution.
        power: exponent on the weights; word2vec uses frequencies with 0.75.
        seed: seed of the samples; each site has its own sequence.
        scheme: ``"independent"``, ``"pool"`` or ``"local"``.
        pool: number of keys of a pool.
        reuse: number of times that a pool is used.

    Attributes:
        table: the table.
        scheme: the scheme.

    Raises:
        ValueError: if an option is out of range.

    Example:
        >>> import torch
        >>> from dadplug.adapm import ParameterManager
        >>> with ParameterManager() as manager:
        ...     contexts = manager.table("contexts", width=2, rows=100)
        ...     sampler = contexts.sampler(torch.arange(100), power=0.75, seed=1)
        ...     sample = sampler.prepare(8, start=manager.current_clock)
        ...     keys, values = sample.pull(5)
        >>> keys.shape, values.shape, sample.remaining
        (torch.Size([5]), torch.Size([5, 2]), 3)
    """

    def __init__(
        self,
        table: SampledTable,
        weights: Tensor | None = None,
        *,
        power: float = 1.0,
        seed: int = 0,
        scheme: str = "independent",
        pool: int = 4096,
        reuse: int = 16,
    ) -> None:
        if scheme not in SCHEMES:
            raise ValueError(f"unknown scheme {scheme!r}; valid ones are {', '.join(map(repr, SCHEMES))}")
        if table.rows is None:
            raise ValueError(f"table {table.name!r} has any keys: samples need one with a number of rows")
        if pool < 1 or reuse < 1 or seed < 0:
            raise ValueError(f"pool and reuse must be at least 1 and seed at least 0, got {pool}, {reuse} and {seed}")
        self.table, self.scheme = table, scheme
        self._rows, self._seed, self._size, self._reuse = table.rows, seed, pool, reuse
        self._shares, self._aliases = np.empty(0), np.empty(0, np.int64)
        if weights is not None:
            self._weigh(weights, power)
        self._drawn = 0
        self._pool, self._used = np.empty(0, np.int64), 0  # keys in the order of use, and number of uses
        self._left = 0  # unused keys of the pool in this use

    def _weigh(self, weights: Tensor, power: float) -> None:
        numbers = weights.detach().double().cpu().numpy().reshape(-1)
        if weights.shape != (self._rows,) or not np.isfinite(numbers).all() or (numbers < 0).any():
            raise ValueError(
                f"weights must be {self._rows} finite numbers of at least 0, one for each row, got shape "
                f"{tuple(weights.shape)}"
            )
        powers = np.where(numbers > 0, np.power(numbers, power, where=numbers > 0, out=np.zeros_like(numbers)), 0)
        if not powers.sum() > 0:
            raise ValueError("weights must not all be 0")
        self._shares, self._aliases = np.empty(self._rows), np.empty(self._rows, np.int64)
        alias_table(powers * (self._rows / powers.sum()), self._shares, self._aliases)

    def prepare(self, count: int, start: int, end: int = 0) -> Sample:
        """Draw keys for later use, and signal intent for them; returns at once.

        Args:
            count: number of keys.
            start: clock at which the use begins, see `Table.intent`.
            end: clock at which the use ends, exclusive; 0 for ``start + 1``.

        Returns:
            The sample.

        Raises:
            ValueError: if `count` is less than 1, or `end` is not greater than `start`.
        """
        if count < 1:
            raise ValueError(f"a sample has at least one key, got {count}")
        if self.scheme == "local":
            return Sample(self, count, None)
        keys = self._draw(count) if self.scheme == "independent" else self._from_pool(count)
        self.table.intent(torch.from_numpy(keys), start, end)
        return Sample(self, count, keys)

    def _draw(self, count: int) -> Keys:
        keys = np.empty(count, np.int64)
        draw(self._seed, self.table.rank, self._drawn, self._shares, self._aliases, self._rows, keys)
        self._drawn += count
        return keys

    def _from_pool(self, count: int) -> Keys:
        parts = []
        while count:
            if not self._left:
                if self._used % self._reuse == 0:
                    self._pool = self._draw(self._size)
                order = np.random.default_rng((self._seed, self.table.rank, self._used)).permutation(self._size)
                self._pool = self._pool[order]
                self._used += 1
                self._left = self._size
            taken = min(count, self._left)
            begin = self._size - self._left
            parts.append(self._pool[begin : begin + taken])
            self._left -= taken
            count -= taken
        return np.concatenate(parts)

    def _draw_local(self, count: int) -> Keys:
        keys = self._draw(count)
        for _ in range(_TRIES):
            away = np.flatnonzero(~self.table.here(keys))
            if not away.shape[0]:
                break
            keys[away] = self._draw(away.shape[0])
        return keys
