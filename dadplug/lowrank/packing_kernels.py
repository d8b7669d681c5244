"""numba kernels for payloads: quantised rows, largest elements, sums of products."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import njit

_FAST = {"reassoc", "contract"}


@njit(nogil=True)
def quantise(rows: NDArray[np.float32], quantised: NDArray[np.int8], scales: NDArray[np.float32]) -> None:
    """Round each row to whole multiples, -127 to 127, of its scale; a row with NaN or Inf gets NaN for a scale."""
    sizes = rows.view(np.uint32)  # whole numbers, whose maximum vectorises; Inf and NaN are the largest
    for i in range(rows.shape[0]):
        bits = np.uint32(0)
        for x in range(rows.shape[1]):
            bits = max(bits, sizes[i, x] & np.uint32(0x7FFFFFFF))
        if bits >= np.uint32(0x7F800000):
            scales[i] = np.nan
            quantised[i] = 0
            continue
        largest = np.float32(0.0)
        for x in range(rows.shape[1]):
            if sizes[i, x] & np.uint32(0x7FFFFFFF) == bits:
                largest = abs(rows[i, x])
                break
        scales[i] = largest / np.float32(127.0)
        inverse = np.float32(127.0) / largest if scales[i] > 0.0 else np.float32(0.0)
        for x in range(rows.shape[1]):
            quantised[i, x] = np.int8(np.rint(rows[i, x] * inverse))


@njit(nogil=True)
def dequantise(quantised: NDArray[np.int8], scales: NDArray[np.float32], rows: NDArray[np.float32]) -> None:
    """Multiply quantised rows by their scales."""
    for i in range(quantised.shape[0]):
        scale = scales[i]
        for x in range(quantised.shape[1]):
            rows[i, x] = np.float32(quantised[i, x]) * scale


@njit(nogil=True)
def top_k(
    values: NDArray[np.float32], indices: NDArray[np.int64], found: NDArray[np.float32], coarse_bits: int
) -> None:
    """Find the elements of largest magnitude, in the order of their indices; the first of equal ones count.

    By their bits: the size of a number is a whole number of 31 bits that orders like it. A histogram of the upper
    bits finds the range in which the smallest of them lies, a second one of the lower bits the number itself.

    Args:
        values: of shape (n,).
        indices: of shape (k,); filled.
        found: of shape (k,); filled.
        coarse_bits: bits of a size that the first histogram counts.
    """
    k = indices.shape[0]
    if k == 0:
        return
    size = values.view(np.uint32)
    low = 31 - coarse_bits
    counts = np.zeros(1 << coarse_bits, np.int32)
    for x in range(size.shape[0]):
        counts[(size[x] & np.uint32(0x7FFFFFFF)) >> low] += 1
    above = 0
    coarse = counts.shape[0] - 1
    while above + counts[coarse] < k:
        above += counts[coarse]
        coarse -= 1
    fine = np.zeros(1 << low, np.int32)
    for x in range(size.shape[0]):
        bits = size[x] & np.uint32(0x7FFFFFFF)
        if np.int64(bits >> low) == coarse:
            fine[bits & np.uint32((1 << low) - 1)] += 1
    last = fine.shape[0] - 1
    while above + fine[last] < k:
        above += fine[last]
        last -= 1
    least = np.uint32((coarse << low) | last)
    ties = k - above
    place = 0
    for x in range(size.shape[0]):
        bits = size[x] & np.uint32(0x7FFFFFFF)
        if bits >= least:
            if bits == least:
                if ties == 0:
                    continue
                ties -= 1
            indices[place] = x
            found[place] = values[x]
            place += 1


@njit(nogil=True, fastmath=_FAST)
def product(left: NDArray[np.floating], right: NDArray[np.floating], result: NDArray[np.floating], strip: int) -> None:
    """Compute ``left.T @ right`` for few rows: four by four, strip by strip.

    A strip of `right` that stays in the first cache is read from there for all rows of the result.

    Args:
        left: of shape (k, out), k a multiple of 4.
        right: of shape (k, in).
        result: of shape (out, in).
        strip: columns of a strip.
    """
    for start in range(0, result.shape[1], strip):
        _product_of_strip(left, right, result, start, min(start + strip, result.shape[1]))


@njit(nogil=True, fastmath=_FAST)
def _product_of_strip(
    left: NDArray[np.floating], right: NDArray[np.floating], result: NDArray[np.floating], start: int, end: int
) -> None:
    """Compute a strip of ``left.T @ right`` for few rows, each element of the result written in one pass."""
    out, width = result.shape[0], end - start
    for i in range(0, out, 4):
        # The last group may overlap the one before it; it computes the same numbers again.
        i = min(i, out - 4)
        g0, g1 = result[i, start:end], result[i + 1, start:end]
        g2, g3 = result[i + 2, start:end], result[i + 3, start:end]
        for k in range(0, left.shape[0], 4):
            r0, r1 = right[k, start:end], right[k + 1, start:end]
            r2, r3 = right[k + 2, start:end], right[k + 3, start:end]
            a0, a1, a2, a3 = left[k, i], left[k + 1, i], left[k + 2, i], left[k + 3, i]
            b0, b1, b2, b3 = left[k, i + 1], left[k + 1, i + 1], left[k + 2, i + 1], left[k + 3, i + 1]
            c0, c1, c2, c3 = left[k, i + 2], left[k + 1, i + 2], left[k + 2, i + 2], left[k + 3, i + 2]
            d0, d1, d2, d3 = left[k, i + 3], left[k + 1, i + 3], left[k + 2, i + 3], left[k + 3, i + 3]
            if k == 0:
                for x in range(width):
                    e, f, g, h = r0[x], r1[x], r2[x], r3[x]
                    g0[x] = a0 * e + a1 * f + a2 * g + a3 * h
                    g1[x] = b0 * e + b1 * f + b2 * g + b3 * h
                    g2[x] = c0 * e + c1 * f + c2 * g + c3 * h
                    g3[x] = d0 * e + d1 * f + d2 * g + d3 * h
            else:
                for x in range(width):
                    e, f, g, h = r0[x], r1[x], r2[x], r3[x]
                    g0[x] += a0 * e + a1 * f + a2 * g + a3 * h
                    g1[x] += b0 * e + b1 * f + b2 * g + b3 * h
                    g2[x] += c0 * e + c1 * f + c2 * g + c3 * h
                    g3[x] += d0 * e + d1 * f + d2 * g + d3 * h
