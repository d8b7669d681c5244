"""Private gradients that are formed block by block, so that each block is used while it is in the processor's cache."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .noise import Noise


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
