"""Initial values of keys, computed from seed and key only: they are equal on all sites, and none are sent.

An initialiser is a callable ``(keys, out) -> None`` that fills a float32 array of shape (n, width) for n int64 keys. It
must depend on nothing else, since the initial value of a key may be computed on any site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..jit import njit

Initialiser = Callable[[NDArray[np.int64], NDArray[np.float32]], None]

STEP = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def mixed(x: np.uint64) -> np.uint64:
    """Return 64 pseudo-random bits: the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _fill_uniform(keys: NDArray[np.int64], seed: int, low: float, high: float, out: NDArray[np.float32]) -> None:
    for i in range(keys.shape[0]):
        state = mixed(mixed(np.uint64(seed)) + np.uint64(keys[i]) * STEP)
        for x in range(out.shape[1]):
            state += STEP
            unit = np.float64(mixed(state) >> np.uint64(11)) * 2.0**-53
            out[i, x] = low + (high - low) * unit


@njit(cache=True, nogil=True)
def _fill_normal(keys: NDArray[np.int64], seed: int, mean: float, std: float, out: NDArray[np.float32]) -> None:
    for i in range(keys.shape[0]):
        state = mixed(mixed(np.uint64(seed)) + np.uint64(keys[i]) * STEP)
        for x in range(out.shape[1]):
            state += STEP
            first = (np.float64(mixed(state) >> np.uint64(11)) + 1.0) * 2.0**-53
            state += STEP
            second = np.float64(mixed(state) >> np.uint64(11)) * 2.0**-53
            out[i, x] = mean + std * np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)  # Box and Muller


class Constant:
    """Initialiser that sets all values to one number.

    Args:
        value: the number.

    Example:
        >>> import numpy as np
        >>> from dadplug.adapm import Constant
        >>> out = np.empty((2, 3), np.float32)
        >>> Constant(0.5)(np.array([7, 8]), out)
        >>> out.tolist()
        [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def __call__(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        out[:] = self.value


class Uniform:
    """Initialiser with uniformly distributed values.

    Args:
        low: lower bound, inclusive.
        high: upper bound, exclusive.
        seed: seed of the values.

    Raises:
        ValueError: if `low` exceeds `high`.

    Example:
        >>> import numpy as np
        >>> from dadplug.adapm import Uniform
        >>> out = np.empty((1000, 4), np.float32)
        >>> Uniform(-0.1, 0.1, seed=3)(np.arange(1000), out)
        >>> bool((abs(out) <= 0.1).all())
        True
    """

    def __init__(self, low: float, high: float, *, seed: int = 0) -> None:
        if not low <= high:
            raise ValueError(f"low must not exceed high, got {low} and {high}")
        self.low, self.high, self.seed = low, high, seed

    def __call__(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        _fill_uniform(keys, self.seed, self.low, self.high, out)


class Normal:
    """Initialiser with normally distributed values, the default of torch.nn.Embedding.

    Args:
        mean: mean of the values.
        std: standard deviation of the values.
        seed: seed of the values.

    Raises:
        ValueError: if `std` is negative.

    Example:
        >>> import numpy as np
        >>> from dadplug.adapm import Normal
        >>> out = np.empty((1000, 4), np.float32)
        >>> Normal(std=0.01)(np.arange(1000), out)
        >>> round(float(out.std()), 3)
        0.01
    """

    def __init__(self, mean: float = 0.0, std: float = 1.0, *, seed: int = 0) -> None:
        if std < 0:
            raise ValueError(f"std must be at least 0, got {std}")
        self.mean, self.std, self.seed = mean, std, seed

    def __call__(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        _fill_normal(keys, self.seed, self.mean, self.std, out)


class Columns:
    """Initialiser that divides the columns between initialisers, such as weights and optimizer state.

    Args:
        parts: pairs of number of columns and initialiser, from the left; the numbers add up to the width of the table.

    Raises:
        ValueError: when called, if the numbers of columns do not add up to the width.

    Example:
        >>> import numpy as np
        >>> from dadplug.adapm import Columns, Constant
        >>> out = np.empty((1, 3), np.float32)
        >>> Columns([(2, Constant(1.0)), (1, Constant())])(np.array([5]), out)
        >>> out.tolist()
        [[1.0, 1.0, 0.0]]
    """

    def __init__(self, parts: Sequence[tuple[int, Initialiser]]) -> None:
        self.parts = list(parts)

    def __call__(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        if sum(width for width, _ in self.parts) != out.shape[1]:
            raise ValueError(f"the columns add up to {sum(w for w, _ in self.parts)}, the table has {out.shape[1]}")
        start = 0
        for width, initialiser in self.parts:
            part = np.empty((keys.shape[0], width), np.float32)
            initialiser(keys, part)
            out[:, start : start + width] = part
            start += width
