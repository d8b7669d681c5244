"""Gaussian noise for private gradients: from a cryptographic generator, added in place, and never stored.

A gradient may also be formed block by block with its noise, so that each block is used while it is in the processor's
cache.

The keys come from the operating system, new ones for each call, so that no copy of a model, forked process or
checkpoint can draw the same noise again.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..support.jit import njit
from .masks import KEY_BYTES, word_stream

_SUMMED = 4  # Gaussian numbers that are added up for one with secure=True: the low bits of a single one betray others
_BLOCK = 1 << 14  # numbers at a time: with their bits they stay in the processor's cache
_BLOCKS_OF_A_THREAD = 32  # least number for which a thread is started
_FAST = {"reassoc", "contract", "arcp", "nsz"}

_INT, _REAL = np.int32, np.float32
_MAGNITUDE = _INT(0x7FFFFFFF)  # bits of an integer without its sign
_ROOT_HALF = _INT(0x3F3504F3)  # bits of sqrt(1/2)
_FRACTION, _TWICE = _INT(23), _INT(1)  # bits of a fraction; shift
_STEP, _LEAST = _REAL(2.0**-31), _REAL(2.0**-32)
_ANGLE = _REAL(math.pi / 4 * 2.0**-31)
_ONE, _TWO, _LN2 = _REAL(1), _REAL(2), _REAL(math.log(2))
_LN3, _LN5, _LN7, _LN9 = (_REAL(2 / power) for power in (3, 5, 7, 9))  # of 2 artanh(s)
_SIN3, _SIN5, _SIN7, _SIN9 = (_REAL(sign / math.factorial(power)) for sign, power in ((-1, 3), (1, 5), (-1, 7), (1, 9)))
_COS2, _COS4, _COS6, _COS8 = (_REAL(sign / math.factorial(power)) for sign, power in ((-1, 2), (1, 4), (-1, 6), (1, 8)))

Bits = NDArray[np.int32]
Reals = NDArray[np.float32]


@njit(nogil=True, fastmath=_FAST)
def _split(first: Bits, scratch: Reals) -> None:
    """Make uniform numbers of random bits, and split them into fractions from sqrt(1/2) to sqrt(2) and exponents."""
    fractions, exponents = scratch[0], scratch[1]
    bits = fractions.view(np.int32)
    for i in range(len(first)):
        fractions[i] = _REAL(_INT(first[i] & _MAGNITUDE)) * _STEP + _LEAST
    for i in range(len(first)):
        exponent = _INT(_INT(bits[i] - _ROOT_HALF) >> _FRACTION)
        exponents[i] = _REAL(exponent)
        bits[i] = _INT(bits[i] - _INT(exponent << _FRACTION))


@njit(nogil=True, fastmath=_FAST, error_model="numpy", inline="always")
def _pair(first: np.int32, second: np.int32, fraction: np.float32, exponent: np.float32) -> tuple[Any, Any]:
    """Return a pair of independent normal numbers over sqrt(2) (Box-Muller), largest ones 6.6 deviations.

    The angle of a pair is uniform within 45 degrees around 0, turned by 45 degrees, which takes the root; the signs of
    both numbers are random. Logarithm, sine and cosine are their series, to the precision of the numbers; without
    branches, so that loops use vector instructions.

    Args:
        first: random bits, whose sign counts; the others have been split.
        second: random bits for angle and the other sign.
        fraction: of the uniform number of `first`.
        exponent: of the same.
    """
    s = (fraction - _ONE) / (fraction + _ONE)
    z = s * s
    logarithm = s * (_TWO + z * (_LN3 + z * (_LN5 + z * (_LN7 + z * _LN9)))) + exponent * _LN2
    radius = np.sqrt(-logarithm)
    angle = _REAL(_INT(second << _TWICE)) * _ANGLE
    z = angle * angle
    sine = angle * (_ONE + z * (_SIN3 + z * (_SIN5 + z * (_SIN7 + z * _SIN9))))
    cosine = _ONE + z * (_COS2 + z * (_COS4 + z * (_COS6 + z * _COS8)))
    one = (radius if first >= 0 else -radius) * (cosine - sine)
    return one, (radius if second >= 0 else -radius) * (cosine + sine)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _add_normal(
    one: Reals, other: Reals, first: Bits, second: Bits, deviation: float, scale: float, scratch: Reals
) -> None:
    """Add pairs of independent normal numbers to two arrays; scale the sums.

    Args:
        one: first numbers of the pairs, changed in place.
        other: second numbers, as many.
        first: random bits, as many, see `_pair`.
        second: random bits, as many.
        deviation: the standard deviation.
        scale: what the sums are multiplied by.
        scratch: of shape (2, at least as many).
    """
    _split(first, scratch)
    fractions, exponents = scratch[0], scratch[1]
    factor, spread = _REAL(scale), _REAL(deviation * scale)
    for i in range(len(other)):
        a, b = _pair(first[i], second[i], fractions[i], exponents[i])
        one[i] = one[i] * factor + a * spread
        other[i] = other[i] * factor + b * spread


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _add_normal_and(
    sums: Reals, before: Reals, share: float, made: Reals, bits: Bits, deviation: float, scale: float, scratch: Reals
) -> None:
    """Write sums plus normal numbers, scaled, and a share of another array; all are as long, by an even number.

    Args:
        sums: the sums.
        before: the other array.
        share: the share.
        made: the result, in memory of its own.
        bits: as many random bits.
        deviation: the standard deviation.
        scale: what the sums are multiplied by.
        scratch: of shape (2, at least half as many).
    """
    half = len(sums) // 2
    first, second = bits[:half], bits[half:]
    one, other, one_made, other_made = sums[:half], sums[half:], made[:half], made[half:]
    one_before, other_before = before[:half], before[half:]
    _split(first, scratch)
    fractions, exponents = scratch[0], scratch[1]
    factor, spread, kept = _REAL(scale), _REAL(deviation * scale), _REAL(share)
    for i in range(half):
        a, b = _pair(first[i], second[i], fractions[i], exponents[i])
        one_made[i] = one[i] * factor + one_before[i] * kept + a * spread
        other_made[i] = other[i] * factor + other_before[i] * kept + b * spread


def add_noise(tensors: Sequence[Tensor], deviation: float, secure: bool = False, scale: float = 1.0) -> None:
    """Add independent Gaussian noise to each element of some tensors, and scale the sums, in place.

    On processors, threads of PyTorch's number share the work where there is enough.

    Args:
        tensors: the tensors, of floating-point types.
        deviation: the standard deviation, before scaling; nothing is added for 0.
        secure: whether each number is the sum of several in double precision, whose bits come from the operating
            system one by one; against attacks on the low bits of floating-point numbers (arXiv:2112.05307).
        scale: what the sums are multiplied by, in the same pass over memory.
    """
    Noise(deviation, secure, scale).add(tensors)


class Noise:
    """Independent Gaussian noise for tensors that come one after the other; the key is new, see `add_noise`.

    Args:
        deviation: the standard deviation, before scaling; nothing is added for 0.
        secure: as in `add_noise`.
        scale: what sums are multiplied by.
    """

    def __init__(self, deviation: float, secure: bool = False, scale: float = 1.0) -> None:
        self._deviation, self._secure, self._scale = deviation, secure, scale
        self._stream: _Stream | None = None

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add noise to each element of some tensors, and scale the sums, in place.

        Args:
            tensors: the tensors, of floating-point types.
        """
        if self._deviation == 0:
            for tensor in tensors:
                tensor.mul_(self._scale)
            return
        blocks: list[Reals] = []
        with torch.no_grad():
            for tensor in tensors:
                if tensor.device.type == "cpu" and tensor.dtype == torch.float32 and not self._secure:
                    if tensor.is_contiguous():
                        flat = tensor.detach().view(-1).numpy()
                        blocks += [flat[start : start + _BLOCK] for start in range(0, len(flat), _BLOCK)]
                    else:
                        noise = torch.zeros(tensor.shape)
                        add_noise([noise], self._deviation)
                        tensor.add_(noise).mul_(self._scale)
                else:
                    tensor.add_(self._noise_like(tensor), alpha=self._deviation).mul_(self._scale)
        self._add_to_blocks(blocks)

    def add_into(self, sums: Tensor, made: Tensor, before: Tensor | None, share: float) -> None:
        """Write sums plus noise, scaled, and a share of another tensor.

        Args:
            sums: the sums; contiguous, as the others are.
            made: of their shape; overwritten.
            before: of their shape; None for none.
            share: what it is multiplied by.
        """
        by_kernel = sums.device.type == "cpu" and sums.dtype == torch.float32 and not self._secure
        if self._deviation == 0 or before is None or not by_kernel:
            made.copy_(sums)
            self.add([made])
            if before is not None:
                made.add_(before, alpha=share)
            return
        self._stream = self._stream or _Stream()
        flat = [each.detach().view(-1).numpy() for each in (sums, before, made)]
        for start in range(0, sums.numel(), _BLOCK):
            one, other, result = (each[start : start + _BLOCK] for each in flat)
            self._stream.add_into(one, other, share, result, self._deviation, self._scale)

    def _noise_like(self, tensor: Tensor) -> Tensor:
        """Return standard normal numbers of another type, or on another device, than the kernel's."""
        if tensor.device.type == "cpu" or self._secure:
            noise = torch.from_numpy(_normal(tensor.numel(), _SUMMED if self._secure else 1)).view(tensor.shape)
            return noise.to(tensor.device)
        generator = torch.Generator(tensor.device)
        generator.manual_seed(secrets.randbits(63))
        return torch.empty_like(tensor).normal_(generator=generator)

    def _add_to_blocks(self, blocks: Sequence[Reals]) -> None:
        how = self._deviation, self._scale
        threads = min(torch.get_num_threads(), len(blocks) // _BLOCKS_OF_A_THREAD)
        if threads > 1:
            with ThreadPoolExecutor(threads, "dadplug-noise") as pool:
                for each in [pool.submit(_Stream().add, blocks[k::threads], *how) for k in range(threads)]:
                    each.result()
            return
        self._stream = self._stream or _Stream()
        self._stream.add(blocks, *how)


class _Stream:
    """Normal numbers of one key."""

    def __init__(self) -> None:
        self._draw = _random_bits()
        self._scratch = np.empty((2, _BLOCK // 2 + 1), np.float32)

    def add(self, blocks: Sequence[Reals], deviation: float, scale: float) -> None:
        """Add noise to blocks, and scale the sums."""
        for block in blocks:
            pairs = len(block) // 2
            one, other = block[:pairs], block[pairs : 2 * pairs]
            bits = self._draw(2 * pairs + 2)
            _add_normal(one, other, bits[:pairs], bits[pairs:-2], deviation, scale, self._scratch)
            if len(block) % 2:
                self._add_to_last(block, bits[-2:], deviation, scale)

    def add_into(self, sums: Reals, before: Reals, share: float, made: Reals, deviation: float, scale: float) -> None:
        """Write a block of sums plus noise, scaled, and a share of another block."""
        even = len(sums) // 2 * 2
        bits = self._draw(even + 2)
        _add_normal_and(sums[:even], before[:even], share, made[:even], bits[:even], deviation, scale, self._scratch)
        if even < len(sums):
            made[-1] = sums[-1]
            self._add_to_last(made, bits[-2:], deviation, scale)
            made[-1] += _REAL(share) * before[-1]

    def _add_to_last(self, block: Reals, bits: Bits, deviation: float, scale: float) -> None:
        rest = np.zeros(2, np.float32)
        _add_normal(rest[:1], rest[1:], bits[:1], bits[1:], deviation, scale, self._scratch)
        block[-1] = block[-1] * _REAL(scale) + rest[0]


def _random_bits() -> Callable[[int], Bits]:
    """Return a function that draws random words of 32 bits: AES in counter mode, or the operating system's own."""
    try:
        draw = word_stream(secrets.token_bytes(KEY_BYTES), bytes(12), _BLOCK + 2)
    except ImportError:  # several times slower
        return lambda count: np.frombuffer(os.urandom(4 * count), np.int32)
    return lambda count: draw(count).view(np.int32)


def _normal(count: int, summed: int) -> NDArray[np.float64]:
    """Return standard normal numbers in double precision, each the sum of some by Box-Muller."""
    words = np.frombuffer(os.urandom(16 * summed * count), np.uint64).reshape(2, summed, count)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # inside (0, 1)
    normal = np.sqrt(-2.0 * np.log(uniform[0])) * np.cos(2.0 * np.pi * uniform[1])
    return np.asarray(normal.sum(0) / math.sqrt(summed))


class Sum(Protocol):
    """Clipped sum of a weight as a matrix, of which blocks of rows are computed on demand."""

    def write(self, rows: slice, block: Tensor) -> None:
        """Compute some rows.

        Args:
            rows: which ones.
            block: of their shape, contiguous; overwritten.
        """


class FormedSum:
    """Clipped sum that has been formed.

    Args:
        matrix: the sum.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def write(self, rows: slice, block: Tensor) -> None:
        block.copy_(self._matrix[rows])


class TableSum:
    """Clipped sum of lookups in a table.

    Args:
        numbers: row of the table of each lookup.
        deltas: what each adds to it, of shape (lookups, width).
        table_rows: number of rows of the table.
    """

    def __init__(self, numbers: Tensor, deltas: Tensor, table_rows: int) -> None:
        self._numbers, order = numbers.long().sort(stable=True)
        self._deltas, self._table_rows = deltas[order], table_rows

    def write(self, rows: slice, block: Tensor) -> None:
        start, end, _ = rows.indices(self._table_rows)
        first, last = torch.searchsorted(self._numbers, torch.tensor([start, end])).tolist()
        block.zero_().index_add_(0, self._numbers[first:last] - start, self._deltas[first:last])


class UnformedGradient:
    """Private gradient of a weight as a matrix: a clipped sum and its noise, which is drawn as a block is formed.

    The sum cannot be had without its noise, and no block of it twice, with different noise.

    Args:
        total: the sum; None for zero.
        noise: adds the noise, and scales.
        rows: number of its rows.
    """

    def __init__(self, total: Sum | None, noise: Noise, rows: int) -> None:
        self._sum, self._noise, self._rows = total, noise, rows
        self._next = 0  # first row that is not formed yet
        self._room: Tensor | None = None

    def write(self, rows: slice, block: Tensor, memory: Tensor | None = None, share: float = 1.0) -> None:
        """Form the next rows, and add a share of a memory to them.

        Args:
            rows: which ones: those that follow the ones formed before.
            block: of their shape, contiguous; overwritten.
            memory: of their shape, contiguous; None for none.
            share: the share.

        Raises:
            RuntimeError: if they are others.
        """
        start, end, _ = rows.indices(self._rows)
        if start != self._next:
            raise RuntimeError(f"rows {start} to {end} of a private gradient, of which {self._next} are formed")
        self._next = end
        if memory is None:
            sums = block
        else:  # the sum stays in the cache, and the result is written once
            if self._room is None or self._room.numel() < block.numel():
                self._room = torch.empty_like(block)
            sums = self._room.view(-1)[: block.numel()].view(block.shape)
        if self._sum is None:
            sums.zero_()
        else:
            self._sum.write(slice(start, end), sums)
        if memory is None:
            self._noise.add([block])
        else:
            self._noise.add_into(sums, block, memory, share)
        if end == self._rows:
            self._sum = self._room = None  # their memory is not needed any more
