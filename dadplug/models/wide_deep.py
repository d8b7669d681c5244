"""Wide & Deep: a linear model of categories and a network on their embeddings (arXiv:1606.07792)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .registry import MODELS


@MODELS.register("wide_deep")
class WideDeep(nn.Module):
    """Binary classifier of rows of counts and categories.

    The wide part is the sum of one weight per category and a linear function of the counts. The deep part is a network
    of fully connected layers on the counts and the embeddings of the categories. Both tables have the same ids.

    Args:
        rows: number of ids.
        dense: number of counts in a row.
        fields: number of categories in a row.
        dim: width of an embedding.
        hidden: widths of the hidden layers.
        std: standard deviation of the initial embeddings; weights of the wide part are initialised with 0.
        sparse: whether the gradients of the tables are sparse tensors.
        device: device of the tables; on ``"meta"`` they take no memory, and `dadplug.adapm.AdaModel` creates rows at
            first use.
    """

    def __init__(
        self,
        rows: int,
        dense: int = 13,
        fields: int = 26,
        dim: int = 16,
        hidden: Sequence[int] = (256, 128),
        std: float = 0.01,
        sparse: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.wide = nn.Embedding(rows, 1, sparse=sparse, device=device)
        self.deep = nn.Embedding(rows, dim, sparse=sparse, device=device)
        nn.init.zeros_(self.wide.weight)
        nn.init.normal_(self.deep.weight, std=std)
        self.linear = nn.Linear(dense, 1)
        widths = [dense + fields * dim, *hidden]
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        self.network = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Compute logits of shape (batch,) from counts (batch, dense) and ids (batch, fields)."""
        wide: Tensor = self.wide(ids).sum((1, 2)) + self.linear(dense)[:, 0]
        deep: Tensor = self.network(torch.cat([dense, self.deep(ids).flatten(1)], 1))[:, 0]
        return wide + deep
