"""Gaussian noise for private gradients: from a cryptographic generator, added in place, and never stored.

The keys come from the operating system, new ones for each call, so that no copy of a model, forked process or
checkpoint can draw the same noise again.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..jit import njit
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


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _add_normal(
    one: Reals, other: Reals, first: Bits, second: Bits, deviation: float, scale: float, scratch: Reals
) -> None:
    """Add pairs of independent normal numbers to two arrays (Box-Muller), largest ones 6.6 deviations; scale the sums.

    The angle of a pair is uniform within 45 degrees around 0, turned by 45 degrees, and the signs of both numbers are
    random. Logarithm, sine and cosine are their series, to the precision of the numbers; without branches, so that all
    three loops use vector instructions.

    Args:
        one: first numbers of the pairs, changed in place.
        other: second numbers, as many.
        first: random bits, as many, for radius and one sign.
        second: random bits, as many, for angle and the other sign.
        deviation: the standard deviation.
        scale: what the sums are multiplied by.
        scratch: of shape (2, at least as many).
    """
    count = len(other)
    fractions, exponents = scratch[0], scratch[1]
    bits = fractions.view(np.int32)
    for i in range(count):
        fractions[i] = _REAL(_INT(first[i] & _MAGNITUDE)) * _STEP + _LEAST
    for i in range(count):  # u = fraction * 2^exponent, with a fraction from sqrt(1/2) to sqrt(2)
        exponent = _INT(_INT(bits[i] - _ROOT_HALF) >> _FRACTION)
        exponents[i] = _REAL(exponent)
        bits[i] = _INT(bits[i] - _INT(exponent << _FRACTION))
    factor = _REAL(scale)
    spread = _REAL(deviation * scale)
    for i in range(count):
        s = (fractions[i] - _ONE) / (fractions[i] + _ONE)
        z = s * s
        logarithm = s * (_TWO + z * (_LN3 + z * (_LN5 + z * (_LN7 + z * _LN9)))) + exponents[i] * _LN2
        radius = np.sqrt(-logarithm) * spread  # over sqrt(2), which the turn by 45 degrees takes
        angle = _REAL(_INT(second[i] << _TWICE)) * _ANGLE
        z = angle * angle
        sine = angle * (_ONE + z * (_SIN3 + z * (_SIN5 + z * (_SIN7 + z * _SIN9))))
        cosine = _ONE + z * (_COS2 + z * (_COS4 + z * (_COS6 + z * _COS8)))
        one[i] = one[i] * factor + (radius if first[i] >= 0 else -radius) * (cosine - sine)
        other[i] = other[i] * factor + (radius if second[i] >= 0 else -radius) * (cosine + sine)


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
    if deviation == 0:
        for tensor in tensors:
            tensor.mul_(scale)
        return
    blocks: list[Reals] = []
    with torch.no_grad():
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.dtype == torch.float32 and not secure:
                if tensor.is_contiguous():
                    flat = tensor.detach().view(-1).numpy()
                    blocks += [flat[start : start + _BLOCK] for start in range(0, len(flat), _BLOCK)]
                else:
                    noise = torch.zeros(tensor.shape)
                    add_noise([noise], deviation)
                    tensor.add_(noise).mul_(scale)
            elif tensor.device.type == "cpu" or secure:
                noise = torch.from_numpy(_normal(tensor.numel(), _SUMMED if secure else 1)).view(tensor.shape)
                tensor.add_(noise.to(tensor.device), alpha=deviation).mul_(scale)
            else:
                generator = torch.Generator(tensor.device)
                generator.manual_seed(secrets.randbits(63))
                tensor.add_(torch.empty_like(tensor).normal_(generator=generator), alpha=deviation).mul_(scale)
    threads = min(torch.get_num_threads(), len(blocks) // _BLOCKS_OF_A_THREAD)
    if threads > 1:
        with ThreadPoolExecutor(threads, "dadplug-noise") as pool:
            for each in [pool.submit(_add_to_blocks, blocks[k::threads], deviation, scale) for k in range(threads)]:
                each.result()
    else:
        _add_to_blocks(blocks, deviation, scale)


def _add_to_blocks(blocks: Sequence[Reals], deviation: float, scale: float) -> None:
    draw = _random_bits()
    scratch = np.empty((2, _BLOCK // 2 + 1), np.float32)
    for block in blocks:
        pairs = len(block) // 2
        bits = draw(2 * pairs + 2)
        _add_normal(block[:pairs], block[pairs : 2 * pairs], bits[:pairs], bits[pairs:-2], deviation, scale, scratch)
        if len(block) % 2:
            rest = np.zeros(2, np.float32)
            _add_normal(rest[:1], rest[1:], bits[-2:-1], bits[-1:], deviation, scale, scratch)
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
