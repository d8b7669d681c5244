"""GCN: a graph convolutional network on sampled neighbourhoods, with one embedding per node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from .registry import MODELS


@MODELS.register("GCN")
class GCN(nn.Module):
    """Graph convolutions over trees of sampled neighbours: ``h_v' = relu(W mean(h_v, h_u for sampled u of v) + b)``.

    The only features of a node are its embedding, which is trained. A batch is a matrix of node numbers with one row
    per node to classify: the node itself, its f1 sampled neighbours, f2 neighbours of each of these, and so on.

    Source: Kipf and Welling, arXiv:1609.02907; sampled as in Hamilton et al., arXiv:1706.02216, equation (2).

    Args:
        nodes: number of nodes.
        classes: number of classes.
        width: width of an embedding.
        hidden: width of the hidden layers.
        fanouts: number of neighbours sampled at each hop; there is one layer per hop.

    Raises:
        ValueError: if a number is out of range.
    """

    def __init__(
        self, nodes: int, classes: int, width: int = 32, hidden: int = 32, fanouts: Sequence[int] = (5, 5)
    ) -> None:
        super().__init__()
        if min(nodes, classes, width, hidden, *fanouts) < 1 or not fanouts:
            raise ValueError("nodes, classes, width, hidden and all fanouts must be at least 1, and there is a fanout")
        self.fanouts = tuple(fanouts)
        self.nodes = nn.Embedding(nodes, width)
        widths = [width, *[hidden] * (len(self.fanouts) - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))

    def forward(self, trees: Tensor) -> Tensor:
        """Compute logits of shape (batch, classes) from trees of shape (batch, size of a tree).

        Raises:
            ValueError: if the size of a tree does not fit the fanouts.
        """
        sizes = hop_sizes(self.fanouts)
        if trees.dim() != 2 or trees.shape[1] != sum(sizes):
            raise ValueError(f"trees must be of shape (batch, {sum(sizes)}), got {tuple(trees.shape)}")
        hops = list(self.nodes(trees).split(sizes, 1))
        for number, layer in enumerate(self.layers):
            merged = []
            for own, below, fanout in zip(hops, hops[1:], self.fanouts, strict=False):
                total = own + below.unflatten(1, (own.shape[1], fanout)).sum(2)
                merged.append(layer(total / (fanout + 1)))
            hops = merged if number + 1 == len(self.layers) else [torch.relu(each) for each in merged]
        logits: Tensor = hops[0].squeeze(1)
        return logits


def hop_sizes(fanouts: Sequence[int]) -> list[int]:
    """Return the number of nodes of each hop of a tree: 1, f1, f1 f2, ..."""
    return [math.prod(fanouts[:hop]) for hop in range(len(fanouts) + 1)]
