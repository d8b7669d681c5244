"""Memory of what rounding takes from the rows of tables, by row; it is sent when a row is looked up again."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...exchange.factor_buckets import FactorPayload
from ...exchange.wire import WireFormat, lasting
from ...hooks import Factor


class _Sent(NamedTuple):
    """Rows of a table that have been encoded.

    Attributes:
        numbers: of the rows, each once, of shape (rows,).
        rest: what rounding has taken from them, without the loss scale.
        weight: the expected weight of the rows in the mean.
        factor: what the memory counted for in them, times that weight; 0.0 for nothing.
        shape: shape of the table.
    """

    numbers: Tensor
    rest: Tensor
    weight: float
    factor: float
    shape: tuple[int, int]


class TableMemory:
    """Memory by table, of its shape, in units of the mean over sites and without the loss scale.

    A step stages what it changes: `commit` adds it, `rollback` drops it. On the CPU only rows that have been looked up
    take memory.

    Args:
        enabled: whether anything is kept at all.
        decay: factor on the memory whenever it is sent.
    """

    def __init__(self, enabled: bool, decay: float) -> None:
        self._enabled, self._decay = enabled, decay
        self._kept: dict[str, Tensor] = {}
        self._staged: dict[str, list[_Sent]] = {}

    def encode(self, name: str, factor: Factor, wire: WireFormat, weight: float, loss_scale: float) -> FactorPayload:
        """Encode rows of a table, with what is kept of them.

        Args:
            name: name of the table.
            factor: the site's factors.
            wire: the format in which they are sent.
            weight: their expected weight in the mean.
            loss_scale: the loss scale of the rows.
        """
        payload = FactorPayload(factor.deltas, factor.activations)
        if not self._enabled or wire.dtype == payload.left.dtype:
            return payload
        numbers, rows = payload.right[:, 0].long(), payload.left
        shape, share = (factor.form.table_rows, rows.shape[1]), 0.0
        if weight and name not in self._staged:  # else the rows come late: the memory has been sent already
            share = self._decay / weight
            rows = torch.add(rows, self._memory(name, rows, shape)[numbers], alpha=share * loss_scale)
        rest = torch.empty_like(rows, memory_format=torch.contiguous_format)
        encoded = wire.encode(rows, rest=rest)
        if loss_scale != 1.0:
            rest.div_(loss_scale)
        self._staged.setdefault(name, []).append(_Sent(numbers, rest, weight, share, shape))
        return FactorPayload(rows, payload.right, encoded=FactorPayload(encoded, payload.right))

    def _memory(self, name: str, like: Tensor, shape: tuple[int, int]) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.shape != shape:
            kept = self._kept[name] = lasting(shape, like.dtype, like.device)
        elif kept.dtype != like.dtype or kept.device != like.device:
            kept = self._kept[name] = kept.to(like)
        return kept

    def commit(self, name: str, weight: float | None) -> None:
        """Keep what rounding has taken from the rows of a table, and what of their memory has not counted.

        Args:
            name: name of the table.
            weight: weight in the mean that the step has given to the rows; None for the expected one.
        """
        for sent in self._staged.pop(name, ()):
            memory, had = self._memory(name, sent.rest, sent.shape), sent.weight if weight is None else weight
            kept = memory[sent.numbers]
            if sent.factor:  # the rows contained the memory times `factor`, and the mean has it times `had`
                kept.mul_(self._decay - had * sent.factor)
            memory[sent.numbers] = kept.add_(sent.rest, alpha=had)

    def rollback(self, name: str) -> None:
        """Drop what the step has staged of a table."""
        self._staged.pop(name, None)

    def retain(self, names: Container[str]) -> None:
        """Drop the memory of all other tables."""
        self._kept = {name: kept for name, kept in self._kept.items() if name in names}

    def state_dict(self) -> dict[str, tuple[Tensor, Tensor, int]]:
        """Return a copy of the memory: by table, numbers of rows that are not zero, those rows, and its height."""
        found = {}
        for name, kept in self._kept.items():
            numbers = kept.any(1).nonzero()[:, 0]
            found[name] = numbers, kept[numbers], len(kept)
        return found

    def load_state_dict(self, state: Mapping[str, tuple[Tensor, Tensor, int]]) -> None:
        """Restore what `state_dict` returned."""
        self._kept = {}
        for name, (numbers, rows, height) in state.items():
            self._kept[name] = lasting((height, rows.shape[1]), rows.dtype, rows.device)
            self._kept[name][numbers] = rows
