"""numba kernels for the rows of a table that are chosen by number: reading, adding, and steps of optimizers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..support.jit import njit

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads neighbouring keys over the index
_DIVIDE = "numpy"  # no check for zero in every division, which keeps loops from being vectorised


@njit(nogil=True)
def first_outside(rows: NDArray[np.integer], count: int) -> int:
    """Return the position of the first row that is not in 0 to count - 1, or -1."""
    for i in range(rows.shape[0]):
        if rows[i] < 0 or rows[i] >= count:
            return i
    return -1


@njit(nogil=True)
def gather(table: NDArray[np.floating], rows: NDArray[np.integer], out: NDArray[np.floating]) -> None:
    """Copy rows of a table, ``out[i] = table[rows[i]]``."""
    for i in range(rows.shape[0]):
        row = rows[i]
        for x in range(table.shape[1]):
            out[i, x] = table[row, x]


@njit(nogil=True)
def scatter_add(
    table: NDArray[np.floating], rows: NDArray[np.int64], deltas: NDArray[np.floating], scale: float
) -> None:
    """Add to rows of a table in order, ``table[rows[i]] += scale * deltas[i]``."""
    by = table.dtype.type(scale)
    for i in range(rows.shape[0]):
        row = rows[i]
        for x in range(table.shape[1]):
            table[row, x] += by * deltas[i, x]


@njit(nogil=True)
def unique(keys: NDArray[np.int64], inverse: NDArray[np.int64], found: NDArray[np.int64]) -> int:
    """Number distinct keys by their first occurrence.

    Args:
        keys: n keys, of any value.
        inverse: n numbers, overwritten: ``found[inverse[i]] == keys[i]``.
        found: room for n keys; the distinct ones come first.

    Returns:
        How many distinct keys there are.
    """
    n = keys.shape[0]
    bits = 4
    while (1 << bits) < 2 * n:
        bits += 1
    mask = (1 << bits) - 1
    shift = np.uint64(64 - bits)
    index = np.full(1 << bits, -1, np.int32)
    count = 0
    for i in range(n):
        key = keys[i]
        place = np.int64((np.uint64(key) * _MIX) >> shift)
        while index[place] >= 0 and found[index[place]] != key:
            place = (place + 1) & mask
        if index[place] < 0:
            index[place] = count
            found[count] = key
            count += 1
        inverse[i] = index[place]
    return count


@njit(nogil=True)
def sum_by(inverse: NDArray[np.int64], deltas: NDArray[np.floating], sums: NDArray[np.floating]) -> None:
    """Sum rows in order, ``sums[inverse[i]] += deltas[i]`` from zero."""
    sums[:] = 0
    for i in range(inverse.shape[0]):
        row = inverse[i]
        for x in range(deltas.shape[1]):
            sums[row, x] += deltas[i, x]


@njit(nogil=True, error_model=_DIVIDE)
def adagrad(
    weights: NDArray[np.floating],
    sums: NDArray[np.floating],
    rows: NDArray[np.int64],
    gradients: NDArray[np.floating],
    lr: float,
    eps: float,
) -> None:
    """Step distinct rows as torch.optim.Adagrad does: ``s += g^2; w -= lr g / (sqrt(s) + eps)``."""
    rate, small = weights.dtype.type(lr), weights.dtype.type(eps)
    for i in range(rows.shape[0]):
        row = rows[i]
        for x in range(weights.shape[1]):
            g = gradients[i, x]
            s = sums[row, x] + g * g
            sums[row, x] = s
            weights[row, x] -= rate * (g / (np.sqrt(s) + small))


@njit(nogil=True, error_model=_DIVIDE)
def rowwise_adagrad(
    weights: NDArray[np.floating],
    sums: NDArray[np.floating],
    rows: NDArray[np.int64],
    gradients: NDArray[np.floating],
    lr: float,
    eps: float,
) -> None:
    """Step distinct rows with one sum a row: ``s += mean(g^2); w -= lr g / (sqrt(s) + eps)``."""
    width = weights.shape[1]
    small = weights.dtype.type(eps)
    for i in range(rows.shape[0]):
        row = rows[i]
        square = 0.0
        for x in range(width):
            square += gradients[i, x] * gradients[i, x]
        sums[row] += weights.dtype.type(square / width)
        rate = weights.dtype.type(lr) / (np.sqrt(sums[row]) + small)
        for x in range(width):
            weights[row, x] -= rate * gradients[i, x]


@njit(nogil=True, error_model=_DIVIDE)
def adam(
    weights: NDArray[np.floating],
    averages: NDArray[np.floating],
    squares: NDArray[np.floating],
    rows: NDArray[np.int64],
    gradients: NDArray[np.floating],
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Step distinct rows: ``m += (1-b1)(g-m); v += (1-b2)(g^2-v); w -= rate m / (sqrt(v) + eps)``."""
    number = weights.dtype.type
    step, first, second, small = number(rate), number(1 - beta1), number(1 - beta2), number(eps)
    for i in range(rows.shape[0]):
        row = rows[i]
        for x in range(weights.shape[1]):
            g = gradients[i, x]
            m = averages[row, x] + first * (g - averages[row, x])
            v = squares[row, x] + second * (g * g - squares[row, x])
            averages[row, x] = m
            squares[row, x] = v
            weights[row, x] -= step * (m / (np.sqrt(v) + small))
