"""Code of the largest entries of a tensor: two bits for a value, and Elias-Fano codes of the indices in each block.

Of each block of 4,096 entries, and of the rest of a tensor, the same share is sent: exactly ``k = ceil(density * m)``
of m entries, so that sizes are the same at all sites. An entry travels as its sign and one of two magnitudes of its
block, the means of the smaller and of the larger entries. Indices take about ``log2(1 / density) + 2`` bits, half a bit
more than their entropy, ``log2(C(m, k)) / k``.

Sources: arXiv:2508.15706 (SparseLoCo), arXiv:2112.00301 and SIGMOD 1996 (Elias-Fano codes).
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..lowrank.dispatch import scratch
from . import sparse_portable

BLOCK = 4096
"""Entries of a tensor that share their magnitudes, and of which the same number is sent."""

_HEAD = 32  # bits of the two magnitudes


class BlockCode(NamedTuple):
    """Sizes of the code of a block.

    Attributes:
        size: entries of the block.
        sent: entries that are sent.
        low: bits of an index that are stored as they are; of the rest, differences are stored.
        nbytes: bytes of the code.
    """

    size: int
    sent: int
    low: int
    nbytes: int

    @classmethod
    def of(cls, size: int, density: float) -> BlockCode:
        """Return the smallest code of blocks of a size.

        Args:
            size: entries of a block, at least 1.
            density: share of them that is sent.
        """
        count = min(size, max(1, math.ceil(density * size)))
        indices, low = min(((low + 1) * count + ((size - 1) >> low), low) for low in range(size.bit_length()))
        return cls(size, count, low, -(-(_HEAD + 2 * count + indices) // 8))


class SparseCode:
    """Code of the largest entries of tensors of one size.

    Args:
        numel: entries of a tensor.
        density: share of them that is sent, above 0 and up to 1.

    Attributes:
        nbytes: bytes of a code.
        count: entries that are sent.
    """

    def __init__(self, numel: int, density: float) -> None:
        blocks, rest = divmod(numel, BLOCK)
        self._parts: list[tuple[slice, slice, BlockCode]] = []  # entries, bytes, code of a block
        self.nbytes = self.count = 0
        for first, number, size in ((0, blocks, BLOCK), (numel - rest, 1, rest)):
            if number and size:
                code = BlockCode.of(size, density)
                end = self.nbytes + number * code.nbytes
                self._parts.append((slice(first, first + number * size), slice(self.nbytes, end), code))
                self.nbytes = end
                self.count += number * code.sent

    def encode(self, delta: Tensor, memory: Tensor, decay: float, out: Tensor) -> None:
        """Code the largest entries of ``delta + decay * memory``, and keep the rest in the memory.

        The memory and what is decoded add up to ``delta + decay * memory`` exactly, unless that sum overflows: it is
        then the largest finite number.

        Args:
            delta: float32 or float64, of shape (numel,), finite.
            memory: of the same shape and type, contiguous; updated.
            decay: factor on the memory.
            out: room for the code, uint8, of shape (nbytes,), contiguous.
        """
        limit = torch.finfo(delta.dtype).max
        for entries, room, code in self._parts:
            _kernels_for(delta).encode(delta[entries], memory[entries], decay, limit, *code, out[room])

    def decode(self, payload: Tensor, out: Tensor, share: float, signs: Tensor | None = None) -> None:
        """Add the entries of a code, times a share, to a sum.

        Args:
            payload: the code, uint8, of shape (nbytes,).
            out: the sum, float32 or float64, of shape (numel,), contiguous.
            share: the share.
            signs: two whole numbers on the CPU; to the first one is added how many entries have the sign of the sum so
                far, to the second one how many have the other sign. Entries whose sum is zero are not counted.

        Raises:
            ValueError: if `encode` cannot have made the code; the sum is then undefined.
        """
        if payload.dtype != torch.uint8 or payload.numel() != self.nbytes:
            raise ValueError(f"expected {self.nbytes} bytes, got {payload.numel()} elements of {payload.dtype}")
        limit = torch.finfo(out.dtype).max
        signs = torch.zeros(2, dtype=torch.int64) if signs is None else signs
        for entries, room, code in self._parts:
            wrong = _kernels_for(out).decode(payload[room], out[entries], share, limit, *code, signs)
            if wrong >= 0:
                raise ValueError(f"block {wrong} of {code.size} entries is not a valid code")


class _NumbaKernels:
    """The functions of `sparse_portable` by numba.

    Raises:
        Exception: if numba cannot run here.
    """

    def __init__(self) -> None:
        from . import sparse_kernels

        self._kernels = sparse_kernels
        sparse_kernels.magnitude(sparse_kernels.magnitude_code(1.0))

    def encode(self, delta: Tensor, memory: Tensor, decay: float, limit: float, *code_and_out: Any) -> None:
        block, count, low, nbytes, out = code_and_out
        values = scratch.take("values", (block,), delta)
        places = scratch.take("places", (block + 1,), delta, torch.int32)
        fixed = scratch.take("fixed", (count,), delta, torch.int64)
        flat = delta.contiguous().numpy()
        factors = (flat.dtype.type(decay), flat.dtype.type(limit))
        rooms = (each.numpy() for each in (out, values, places, fixed))
        self._kernels.encode(flat, memory.numpy(), *factors, block, count, low, nbytes, *rooms)

    def decode(self, payload: Tensor, out: Tensor, share: float, limit: float, *code_and_signs: Any) -> int:
        block, count, low, nbytes, signs = code_and_signs
        places = scratch.take("places", (block + 1,), out, torch.int32).numpy()
        flat, sizes = payload.contiguous().numpy(), (block, count, low, nbytes)
        return int(self._kernels.decode(flat, out.numpy(), share, limit, *sizes, signs.numpy(), places))


def _kernels_for(tensor: Tensor) -> Any:
    return _cpu_kernels() if tensor.device.type == "cpu" else sparse_portable


@functools.cache
def _cpu_kernels() -> Any:
    try:
        return _NumbaKernels()
    except Exception as error:
        warnings.warn(f"numba cannot run here ({error}): torch takes its place, more slowly", stacklevel=3)
        return sparse_portable
