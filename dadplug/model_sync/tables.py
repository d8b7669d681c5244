"""Embeddings with ``max_norm``, whose lookups change their rows: all sites have to change the same ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..exchange import Transport
from ..hooks import eager

_ROUNDS = 8  # of renormalisation; two are enough, but with NaN there is always a change


def tables_with_max_norm(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the embeddings with ``max_norm``, whose lookups change their rows."""
    tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return [table for table in tables if table.max_norm is not None]


@torch.no_grad()
def renormalise(table: nn.Embedding | nn.EmbeddingBag, rows: Tensor | None = None) -> None:
    """Renormalise rows of a table, as a lookup does, since sites have looked up different rows.

    This is repeated until nothing changes, so that a row that has been looked up twice has the bits of one that has
    not.

    Args:
        table: an embedding with ``max_norm``.
        rows: numbers of the rows; all where None.
    """
    assert table.max_norm is not None
    weight = table.weight
    chosen = torch.arange(table.num_embeddings, device=weight.device) if rows is None else rows.to(weight.device)
    for _ in range(_ROUNDS):
        before = weight[chosen]
        torch.embedding_renorm_(weight, chosen, table.max_norm, table.norm_type)
        if torch.equal(before, weight[chosen]):
            break


class LookedUpRows:
    """Rows of tables with ``max_norm`` that this site has looked up since the last exchange.

    Args:
        model: the model.
        elastic: whether sites may leave: all rows count as looked up then, which needs no message.
    """

    def __init__(self, model: nn.Module, elastic: bool) -> None:
        self._elastic = elastic
        self._tables = tables_with_max_norm(model)
        self._lookups = [] if elastic else [_Lookups(table.num_embeddings) for table in self._tables]
        self._handles = [
            table.register_forward_pre_hook(lookups, with_kwargs=True)
            for table, lookups in zip(self._tables, self._lookups)
        ]

    def renormalise(self, transport: Transport) -> None:
        """Renormalise what any site has looked up, at all sites; all of them must call it."""
        if self._elastic or not self._tables:
            for table in self._tables:
                renormalise(table)
            return
        every = [*transport.gather_present([lookups.take() for lookups in self._lookups]).values()]
        for number, table in enumerate(self._tables):
            renormalise(table, torch.cat([site[number] for site in every]).unique())

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class _Lookups:
    """Hook of a table that records which rows are looked up; that of a copied or pickled model records nothing."""

    def __init__(self, rows: int | None = None) -> None:
        self._seen = None if rows is None else torch.zeros(rows, dtype=torch.bool)

    def take(self) -> Tensor:
        """Return the numbers of the rows, and forget them."""
        assert self._seen is not None
        numbers = self._seen.nonzero().flatten()
        self._seen.zero_()
        return numbers

    @eager
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._seen is not None:
            numbers = args[0] if args else kwargs["input"]
            self._seen[numbers.detach().flatten().cpu().long()] = True

    def __reduce__(self) -> Any:
        return _Lookups, ()
