"""Clipped sums of a linear layer from rows in bfloat16, on processors that multiply these twice as fast as float32.

A kernel adds products of pairs in float32 (the instruction vdpbf16ps), and multiplies what each sample adds to the
sum by the sample's scale, in float32. So what a sample contributes is its scale times the gradient of the rounded
rows, and a norm that is taken of the rounded rows bounds it: rounding comes before clipping, and takes nothing from the
proof. Where a sample has one row, its scale is multiplied into the row before, which is rounded once more; the scale is
smaller by as much as that may add.

torch's own products of bfloat16 also round the sum. How much rounding changes a sum is not bounded by what one sample
adds to it, so that a sum may be rounded only after the noise.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from ..hooks.products import is_amd
from ..support.jit import njit

LEAST_ROWS = 16  # of a sample with more than one: below, scaling its part of the sum takes too long
_LEAST = 1 << 18  # multiplications; below, calls take longer than the work
_UNIT = 2.0**-8  # largest share by which rounding to bfloat16 changes a number, in float32's range of normal numbers
_HEIGHT, _VECTORS, _LANES = 6, 4, 16  # of a tile, which with its factors fills the processor's 32 registers
_WIDTH = _VECTORS * _LANES
_GROUP, _NUMBERS = 4, 2 * _LANES  # rows whose scalar products are computed together; numbers in a vector
_DEARER = 3  # multiplications of scalar products that take as long as one of a gradient that is formed
_PAIRS = 1024  # pairs of rows that are multiplied before the next: a panel of so many stays in the cache
_FEATURE = "+avx512bf16"

Words = NDArray[np.uint32]
Reals = NDArray[np.float32]

llvmlite.binding.initialize_native_asmparser()  # for the instruction in `_tile_code`
_vector = ir.VectorType(ir.FloatType(), _LANES)
_pairs = ir.VectorType(ir.IntType(32), _LANES)


@functools.cache
def is_available() -> bool:
    """Return whether the processor multiplies bfloat16 faster than float32: AMD's do; Intel's were not measured.

    It depends on the processor alone, and not on a measurement, so that runs can be repeated. Where numba's environment
    variables imitate another processor, the features of that one count.
    """
    if config.DISABLE_JIT or not is_amd():
        return False
    features = config.CPU_FEATURES
    if features is None:
        features = "" if config.CPU_NAME else get_host_cpu_features()
    return _FEATURE in features.split(",")


def suits(deltas: Tensor, activations: Tensor, samples: int) -> bool:
    """Return whether the kernel multiplies factors of a linear layer, and is worth its calls.

    Args:
        deltas: D of shape (rows, out).
        activations: A of shape (rows, in).
        samples: number of samples, each with as many rows.
    """
    rows = len(deltas)
    plain = (
        deltas.dtype == activations.dtype == torch.float32 and deltas.device.type == activations.device.type == "cpu"
    )
    enough = rows * deltas.shape[1] * activations.shape[1] >= _LEAST and (
        rows == samples or rows >= LEAST_ROWS * samples
    )
    return plain and enough and is_available()


class NarrowProduct:
    """Sum over samples of ``scale_i D_i^T A_i`` of rows in bfloat16, of which blocks of rows are computed on demand.

    Args:
        deltas: D of shape (rows, out), in bfloat16, whole samples one after the other.
        activations: A of shape (rows, in), in bfloat16.
        scales: of shape (samples,).
    """

    def __init__(self, deltas: Tensor, activations: Tensor, scales: Tensor) -> None:
        samples = len(scales)
        if len(deltas) == samples:  # a pair of rows is one of two samples
            shrunk = scales.float() * (1.0 - _UNIT)
            deltas, samples, scales = (deltas.float() * shrunk[:, None]).bfloat16(), 1, torch.ones(1)
        self._shape = deltas.shape[1], activations.shape[1]
        self._pairs = -(-len(deltas) // samples // 2)  # of a sample
        self._scales = scales.float().numpy()
        self._left = _packed(deltas, samples, self._pairs, _HEIGHT)
        self._right = _packed(activations, samples, self._pairs, _WIDTH)

    def write(self, rows: slice, block: Tensor) -> None:
        """Compute some rows of the sum.

        Args:
            rows: which ones.
            block: of their shape, in float32 and contiguous; overwritten.
        """
        start, end, _ = rows.indices(self._shape[0])
        first = start // _HEIGHT * _HEIGHT
        place = block if first == start else block.new_empty(end - first, self._shape[1])
        panels = self._left[first // _HEIGHT : -(-end // _HEIGHT)]
        _multiply(panels, self._right, self._pairs, self._scales, place.numpy())
        if place is not block:
            block.copy_(place[start - first :])

    def whole(self) -> Tensor:
        """Return the whole sum."""
        made = torch.empty(self._shape)
        self.write(slice(None), made)
        return made


def _packed(rows: Tensor, samples: int, pairs: int, width: int) -> Words:
    """Return rows as panels of some columns, in which the numbers of two rows of a sample are side by side."""
    count = rows.shape[1]
    packed = torch.empty(-(-count // width), samples * pairs, width, dtype=torch.int32).numpy().view(np.uint32)
    words = rows.contiguous().view(torch.int16).numpy().view(np.uint16)
    _pack(words.reshape(samples, len(rows) // samples, count), packed)
    return packed


@njit(nogil=True)
def _pack(rows: NDArray[np.uint16], packed: Words) -> None:
    samples, height, count = rows.shape
    pairs, width = packed.shape[1] // samples, packed.shape[2]
    for sample in range(samples):
        for pair in range(pairs):
            upper = rows[sample, 2 * pair]
            both = 2 * pair + 1 < height
            lower = rows[sample, 2 * pair + 1] if both else upper
            mask = np.uint32(0xFFFF0000) if both else np.uint32(0)
            for panel in range(packed.shape[0]):
                start = panel * width
                place = packed[panel, sample * pairs + pair]
                some = min(width, count - start)
                if some == _HEIGHT:  # a constant, so that the loop is unrolled
                    for x in range(_HEIGHT):
                        place[x] = np.uint32(upper[start + x]) | ((np.uint32(lower[start + x]) << np.uint32(16)) & mask)
                    place[_HEIGHT:] = 0
                    continue
                for x in range(some):
                    place[x] = np.uint32(upper[start + x]) | ((np.uint32(lower[start + x]) << np.uint32(16)) & mask)
                place[some:] = 0


def _tile_of(context: Any, left: Any, right: Any, out: Any, stride: Any, pairs: Any, scale: Any, adds: Any) -> Any:
    """Compute a tile of a product of pairs in bfloat16, times a scale, or add it to what is there.

    Args:
        context: numba's typing context.
        left: address of pairs x 6 pairs.
        right: address of pairs x 64 pairs, a multiple of 64.
        out: address of the tile.
        stride: bytes from one row of the tile to the next.
        pairs: number of pairs.
        scale: the scale.
        adds: whether the tile is added to.
    """
    return types.void(*[types.intp] * 5, types.float32, types.boolean), _tile_code


def _tile_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    left, right, out, stride, pairs, scale, adds = arguments
    word = ir.IntType(64)
    places = [(row, vector) for row in range(_HEIGHT) for vector in range(_VECTORS)]
    sums = {place: cgutils.alloca_once_value(builder, ir.Constant(_vector, [0.0] * _LANES)) for place in places}
    for place in places:  # in a loop the tile is computed more than once
        builder.store(ir.Constant(_vector, [0.0] * _LANES), sums[place])
    with cgutils.for_range(builder, pairs) as loop:
        above = builder.add(right, builder.mul(loop.index, word(4 * _WIDTH)))
        beside = builder.add(left, builder.mul(loop.index, word(4 * _HEIGHT)))
        columns = [_load(builder, builder.add(above, word(64 * vector)), _pairs, 64) for vector in range(_VECTORS)]
        for row in range(_HEIGHT):
            pair = _spread(builder, _load(builder, builder.add(beside, word(4 * row)), ir.IntType(32), 4), _pairs)
            for vector in range(_VECTORS):
                place = sums[row, vector]
                builder.store(_multiply_add(builder, builder.load(place), pair, columns[vector]), place)
    scales = _spread(builder, scale, _vector)
    with builder.if_else(adds) as branches:
        for branch, added in zip(branches, (True, False), strict=True):
            with branch:
                for row, vector in places:
                    address = builder.add(out, builder.add(builder.mul(stride, word(row)), word(64 * vector)))
                    value = builder.fmul(builder.load(sums[row, vector]), scales, flags=("contract",))
                    if added:
                        value = builder.fadd(value, _load(builder, address, _vector, 4), flags=("contract",))
                    builder.store(value, builder.inttoptr(address, _vector.as_pointer())).align = 4
    return context.get_dummy_value()


_tile: Any = intrinsic(_tile_of)


def _dots_of(context: Any, one: Any, other: Any, stride: Any, vectors: Any, out: Any, width: Any) -> Any:
    """Compute the scalar products of 4 rows in bfloat16 with 4 others.

    Args:
        context: numba's typing context.
        one: address of the first of 4 rows.
        other: address of the first of 4 rows.
        stride: bytes from one row to the next.
        vectors: vectors of 32 numbers in a row.
        out: address of the result.
        width: bytes from one row of the result to the next.
    """
    return types.void(*[types.intp] * 6), _dots_code


def _dots_code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    one, other, stride, vectors, out, width = arguments
    word, group = ir.IntType(64), range(_GROUP)
    zero = ir.Constant(_vector, [0.0] * _LANES)
    sums = {(i, j): cgutils.alloca_once_value(builder, zero) for i in group for j in group}
    for place in sums.values():
        builder.store(zero, place)
    with cgutils.for_range(builder, vectors) as loop:
        offset = builder.mul(loop.index, word(64))
        addresses = [builder.add(builder.mul(stride, word(row)), offset) for row in group]
        firsts, seconds = (
            [_load(builder, builder.add(base, each), _pairs, 2) for each in addresses] for base in (one, other)
        )
        for (i, j), place in sums.items():
            builder.store(_multiply_add(builder, builder.load(place), firsts[i], seconds[j]), place)
    for (i, j), place in sums.items():
        address = builder.add(out, builder.add(builder.mul(width, word(i)), word(4 * j)))
        total = builder.load(place)
        for half in (8, 4, 2, 1):
            parts = (
                builder.shuffle_vector(
                    total, total, ir.Constant(ir.VectorType(ir.IntType(32), half), [*range(first, first + half)])
                )
                for first in (0, half)
            )
            total = builder.fadd(*parts)
        value = builder.extract_element(total, ir.IntType(32)(0))
        builder.store(value, builder.inttoptr(address, ir.FloatType().as_pointer())).align = 4
    return context.get_dummy_value()


_dots: Any = intrinsic(_dots_of)


def _multiply_add(builder: Any, total: Any, one: Any, other: Any) -> Any:
    kind = ir.FunctionType(_vector, [_vector, _pairs, _pairs])
    instruction = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", side_effect=False)
    return builder.call(instruction, [total, one, other])


def squared_norms(deltas: Tensor, activations: Tensor, samples: int) -> Tensor | None:
    """Return the squared norm of ``D_i^T A_i`` of each sample, in float64, as ``sum (D_i D_i^T) * (A_i A_i^T)``.

    Args:
        deltas: D of shape (rows, out), in bfloat16, whole samples one after the other.
        activations: A of shape (rows, in), in bfloat16.
        samples: number of samples.

    Returns:
        The squared norms; None where rows are so many that forming the gradients takes less time, and for shapes that
        the kernel does not divide into groups of rows and vectors.
    """
    rows, (out, width) = len(deltas) // samples, (deltas.shape[1], activations.shape[1])
    if rows * (out + width) > _DEARER * out * width:
        return None
    if rows % _GROUP or out % _NUMBERS or width % _NUMBERS:
        return None
    words = [each.contiguous().view(torch.int16).numpy().reshape(samples, rows, -1) for each in (deltas, activations)]
    found = np.empty(samples)
    _add_squares(words[0], words[1], np.empty((2, _GROUP, _GROUP), np.float32), found)
    return torch.from_numpy(found)


@njit(nogil=True)
def _add_squares(deltas: NDArray[np.int16], activations: NDArray[np.int16], room: Reals, found: Any) -> None:
    for sample in range(len(found)):
        total = 0.0
        for i in range(0, deltas.shape[1], _GROUP):
            for j in range(0, i + 1, _GROUP):
                for k, factor in enumerate((deltas, activations)):
                    one, other = factor[sample, i:].ctypes.data, factor[sample, j:].ctypes.data
                    vectors, stride = factor.shape[2] // _NUMBERS, factor.strides[1]
                    _dots(one, other, stride, vectors, room[k].ctypes.data, room.strides[1])
                part = 0.0
                for x in range(_GROUP):
                    for y in range(_GROUP):
                        part += np.float64(room[0, x, y]) * np.float64(room[1, x, y])
                total += part if i == j else 2.0 * part
        found[sample] = total


def _load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    """Return a vector with the same value in all places."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_pairs, [0] * _LANES))


@njit(nogil=True)
def _multiply(left: Words, right: Words, chunk: int, scales: Reals, out: Reals) -> None:
    """Compute the sum over chunks of pairs of ``scale left^T right``.

    Args:
        left: panels of 6 columns, of shape (panels, pairs, 6).
        right: panels of 64 columns, of shape (panels, pairs, 64).
        chunk: pairs with one scale.
        scales: by chunk.
        out: of at most 6 times as many rows as `left` has panels; overwritten.
    """
    rows, width = out.shape
    edge = np.zeros((_HEIGHT, _WIDTH), np.float32)
    pairs = left.shape[1]
    for begin in range(0, pairs, _PAIRS):
        end = min(begin + _PAIRS, pairs)
        for column in range(right.shape[0]):
            x = column * _WIDTH
            some = min(_WIDTH, width - x)
            for panel in range(left.shape[0]):
                y = panel * _HEIGHT
                high = min(_HEIGHT, rows - y)
                inside = some == _WIDTH and high == _HEIGHT
                if inside:
                    address, stride = out[y:, x:].ctypes.data, out.strides[0]
                else:
                    address, stride = edge.ctypes.data, edge.strides[0]
                    if begin > 0:
                        edge[:high, :some] = out[y : y + high, x : x + some]
                first = begin
                while first < end:
                    sample = first // chunk
                    count = min(end, (sample + 1) * chunk) - first
                    source = left[panel, first:].ctypes.data, right[column, first:].ctypes.data
                    _tile(source[0], source[1], address, stride, count, scales[sample], first > 0)
                    first += count
                if not inside:
                    out[y : y + high, x : x + some] = edge[:high, :some]
