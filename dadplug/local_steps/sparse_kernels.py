"""Kernels in numba that select, code and add up the largest entries of blocks; `sparse_portable` says what they do.

Both modules give the same bits: sums are over integers, and all else is one rounding of IEEE 754 at a time. The kernels
run without the GIL, in one pass over a delta and its memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..support.jit import njit

_BITS = 28  # of the fixed-point numbers in which magnitudes are averaged
_TURNS = 4  # of the search for the two magnitudes
_SMALLEST_RATIO = 2.0**-16  # of the magnitudes; below, the small one is zero, so that the memory is exact
_GUESS = 0.93  # share of the last block's threshold with which the search for the next one begins
_SMALLER = 0.75  # factor on a threshold that few entries reach


@njit(nogil=True)
def kth_largest(values: Any, count: int, k: int) -> Any:
    """Return the k-th largest of the first `count` values, which are put in another order."""
    low, high, target = 0, count - 1, k - 1
    while low < high:
        a, b, c = values[low], values[(low + high) // 2], values[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            break
    return values[target]


@njit(nogil=True)
def magnitude_code(value: float) -> int:
    """Return the code of a number of at least 0, rounded towards zero to 6 digits of binary and 11 bits of exponent."""
    if value == 0.0:
        return 0
    mantissa, exponent = math.frexp(value)
    if exponent < -1021:
        return int(math.ldexp(value, 1000) * 2.0**27)
    return ((exponent + 1022) << 5) | int((2.0 * mantissa - 1.0) * 32.0)


@njit(nogil=True)
def magnitude(code: int) -> float:
    """Return the number that `magnitude_code` has coded."""
    exponent, digits = code >> 5, float(code & 31)
    if exponent == 0:
        return math.ldexp(digits, -1027)
    return math.ldexp(1.0 + digits / 32.0, exponent - 1023)


@njit(nogil=True)
def _two_magnitudes(chosen: Any, count: int, fixed: Any) -> tuple[int, int]:
    """Return the codes of the small and the large magnitude of a block's entries, by the means of two groups."""
    top, least = chosen[0], chosen[0]
    for i in range(count):
        top, least = max(top, chosen[i]), min(least, chosen[i])
    if top == 0.0:
        return 0, 0
    shift = _BITS - math.frexp(top)[1]
    half = shift // 2
    first, second = math.ldexp(1.0, half), math.ldexp(1.0, shift - half)
    total = 0
    for i in range(count):
        fixed[i] = np.int64(np.float64(chosen[i]) * first * second)
        total += fixed[i]
    small = large = total // count
    for _ in range(_TURNS):
        above: Any = 0
        number: Any = 0
        middle = small + large
        for i in range(count):
            is_large = np.int64(2 * fixed[i] > middle)  # without branches, which would be guessed wrong
            above += fixed[i] * is_large
            number += is_large
        if number:
            large = above // number
        if number < count:
            small = (total - above) // (count - number)
    first, second = math.ldexp(1.0, -half), math.ldexp(1.0, half - shift)
    large_code = magnitude_code(float(large) * first * second)
    bound = float(small) * first * second
    if bound * 0.5 > least:
        bound = 2.0 * np.float64(least)
    small_code = magnitude_code(bound)
    if magnitude(small_code) < magnitude(large_code) * _SMALLEST_RATIO:
        small_code = 0
    return small_code, large_code


@njit(nogil=True)
def _put(out: Any, position: Any, value: Any, bits: int) -> None:
    """Write bits to memory that is zero, the lowest first."""
    rest, place = value << (position & 7), position >> 3
    for _ in range(((position & 7) + bits + 7) >> 3):
        out[place] |= np.uint8(rest & 255)
        rest >>= 8
        place += 1


@njit(nogil=True)
def _get(payload: Any, position: int, bits: int) -> int:
    value = 0
    for i in range(bits):
        value |= ((payload[(position + i) >> 3] >> ((position + i) & 7)) & 1) << i
    return value


@njit(nogil=True)
def _find_largest(whole: Any, block: int, count: int, guess: Any, values: Any, places: Any) -> Any:
    """Write places and sizes of the largest entries of a block, the first of equal ones; return the least size.

    Entries below a guess of that size are not looked at again, unless it was too large.
    """
    zero = whole.dtype.type(0)
    found: Any = 0
    while True:
        found = 0
        for i in range(block):
            places[found] = i
            found += np.int64(abs(whole[i]) >= guess)
        if found >= count:
            break
        smaller = guess * whole.dtype.type(_SMALLER)
        guess = smaller if found * 2 >= count and smaller < guess else zero  # a denormal number may not shrink
    for i in range(found):
        values[i] = abs(whole[places[i]])
    threshold = kth_largest(values, found, count)
    equal: Any = count
    for i in range(found):
        equal -= np.int64(abs(whole[places[i]]) > threshold)
    kept = 0
    for i in range(found):
        size = abs(whole[places[i]])
        if size > threshold or (size == threshold and equal > 0):
            equal -= size == threshold
            places[kept] = places[i]
            values[kept] = size
            kept += 1
    return threshold


@njit(nogil=True)
def encode(
    delta: Any,
    memory: Any,
    decay: Any,
    limit: Any,
    block: int,
    count: int,
    low: int,
    nbytes: int,
    out: Any,
    values: Any,
    places: Any,
    fixed: Any,
) -> None:
    """Code the largest entries of each block, see `sparse_portable.encode`; the last arguments are scratch."""
    zero = delta.dtype.type(0)
    guess = zero
    out[:] = 0
    for number in range(delta.shape[0] // block):
        changed, whole = delta[number * block : (number + 1) * block], memory[number * block : (number + 1) * block]
        for i in range(block):
            value = whole[i] * decay + changed[i]
            value = limit if value > limit else value
            whole[i] = -limit if value < -limit else value
        guess = _find_largest(whole, block, count, guess, values, places) * delta.dtype.type(_GUESS)
        small_code, large_code = _two_magnitudes(values, count, fixed)
        small, large = delta.dtype.type(magnitude(small_code)), delta.dtype.type(magnitude(large_code))
        middle = np.float64(small) * 0.5 + np.float64(large) * 0.5
        code = out[number * nbytes : (number + 1) * nbytes]
        _put(code, 0, small_code, 16)
        _put(code, 16, large_code, 16)
        for i in range(count):
            place = np.int64(places[i])
            is_large, is_negative = np.int64(values[i] > middle), np.int64(whole[place] < zero)
            sent = large if is_large else small
            whole[place] -= -sent if is_negative else sent
            _put(code, 32 + i, is_negative, 1)
            _put(code, 32 + count + i, is_large, 1)
            _put(code, 32 + 2 * count + low * i, place & ((1 << low) - 1), low)
            _put(code, 32 + (2 + low) * count + (place >> low) + i, 1, 1)


@njit(nogil=True)
def decode(
    payload: Any,
    out: Any,
    share: float,
    limit: float,
    block: int,
    count: int,
    low: int,
    nbytes: int,
    signs: Any,
    places: Any,
) -> int:
    """Add what blocks contain to a sum, see `sparse_portable.decode`."""
    bits, zero = count + ((block - 1) >> low), out.dtype.type(0)
    start = 32 + (2 + low) * count
    for number in range(out.shape[0] // block):
        code, first = payload[number * nbytes : (number + 1) * nbytes], number * block
        small_code, large_code = _get(code, 0, 16), _get(code, 16, 16)
        if small_code > large_code or (large_code >> 5) > 2046 or magnitude(large_code) > limit:
            return number
        found, before = 0, -1
        for bit in range(8 * nbytes - start):
            if not (code[(start + bit) >> 3] >> ((start + bit) & 7)) & 1:
                continue
            if bit >= bits or found == count:
                return number
            place = ((bit - found) << low) | _get(code, 32 + 2 * count + low * found, low)
            if place <= before or place >= block:
                return number
            places[found] = before = place
            found += 1
        if found != count:
            return number
        small = out.dtype.type(share * np.float64(out.dtype.type(magnitude(small_code))))
        large = out.dtype.type(share * np.float64(out.dtype.type(magnitude(large_code))))
        for i in range(count):
            value = large if _get(code, 32 + count + i, 1) else small
            value = -value if _get(code, 32 + i, 1) else value
            place = first + places[i]
            direction = (np.int64(out[place] > zero) - np.int64(out[place] < zero)) * (
                np.int64(value > zero) - np.int64(value < zero)
            )
            signs[0] += np.int64(direction > 0)
            signs[1] += np.int64(direction < 0)
            out[place] += value
    return -1
