"""Graphs: made by chance with a structure to learn, and sampled neighbourhoods of their nodes as batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Graph:
    """An undirected graph with a class a node; every node is its own neighbour too, so that none is without.

    Args:
        edges: of shape (m, 2), int64; both directions are made of each, double ones and loops count once.
        labels: of shape (n,), int64, the class of each node.

    Attributes:
        labels: as given.
        starts: of shape (n + 1,): node v's neighbours are ``neighbours[starts[v] : starts[v + 1]]``.
        neighbours: of shape (2 m + n,) at most.

    Raises:
        ValueError: if a shape or type does not fit, or an edge names a node that is not there.
    """

    def __init__(self, edges: Tensor, labels: Tensor) -> None:
        nodes = labels.shape[0]
        if edges.dim() != 2 or edges.shape[1] != 2 or edges.dtype != torch.int64 or labels.dim() != 1:
            raise ValueError(f"edges must be int64 of shape (m, 2), got {edges.dtype} of shape {tuple(edges.shape)}")
        if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
            raise ValueError(f"edges name nodes {int(edges.min())} to {int(edges.max())}, there are 0 to {nodes - 1}")
        own = torch.arange(nodes)
        sources = torch.cat([edges[:, 0], edges[:, 1], own])
        targets = torch.cat([edges[:, 1], edges[:, 0], own])
        pairs = torch.unique(sources * nodes + targets)
        self.labels = labels
        self.neighbours = pairs % nodes
        degrees = torch.bincount(pairs // nodes, minlength=nodes)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.labels.shape[0]

    def sample(self, nodes: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws neighbours of each node, evenly and with replacement.

        Args:
            nodes: int64, of any shape.
            count: number of neighbours to draw of each.
            generator: where chance comes from.

        Returns:
            Of shape (nodes' shape, count).
        """
        starts, degrees = self.starts[nodes], self.starts[nodes + 1] - self.starts[nodes]
        chance = torch.rand((*nodes.shape, count), generator=generator, dtype=torch.float64)
        drawn: Tensor = self.neighbours[starts.unsqueeze(-1) + (chance * degrees.unsqueeze(-1)).long()]
        return drawn

    def trees(self, nodes: Tensor, fanouts: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Draws a tree of neighbours for each node, as `dadplug.models.GCN` takes them.

        Args:
            nodes: of shape (batch,).
            fanouts: number of neighbours to draw at each hop.
            generator: where chance comes from.

        Returns:
            Of shape (batch, 1 + f1 + f1 f2 + ...).
        """
        hops = [nodes.unsqueeze(1)]
        for fanout in fanouts:
            hops.append(self.sample(hops[-1], fanout, generator).flatten(1))
        return torch.cat(hops, 1)


def block_graph(
    nodes: int = 10_000, classes: int = 8, degree: float = 10.0, inside: float = 0.8, seed: int = 0
) -> Graph:
    """Makes a graph of the stochastic block model: each class is a block, whose nodes know one another more.

    Args:
        nodes: number of nodes; node v is of class ``v * classes // nodes``.
        classes: number of blocks, of equal sizes up to one.
        degree: mean number of neighbours of a node, about.
        inside: share of edges that stay in their block.
        seed: another seed makes another graph.

    Raises:
        ValueError: if a number is out of range.
    """
    if not 1 <= classes <= nodes or degree <= 0 or not 0 <= inside <= 1:
        raise ValueError(f"cannot make a graph of {nodes} nodes, {classes} classes, degree {degree}, inside {inside}")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(nodes) * classes // nodes
    bounds = torch.searchsorted(labels, torch.arange(classes + 1))
    sources = torch.randint(nodes, (round(nodes * degree / 2),), generator=generator)
    blocks = labels[sources]
    if classes > 1:
        others = (blocks + torch.randint(1, classes, blocks.shape, generator=generator)) % classes
        stays = torch.rand(blocks.shape, generator=generator) < inside
        blocks = torch.where(stays, blocks, others)
    sizes = bounds[blocks + 1] - bounds[blocks]
    chance = torch.rand(blocks.shape, generator=generator, dtype=torch.float64)
    return Graph(torch.stack([sources, bounds[blocks] + (chance * sizes).long()], 1), labels)


class NeighbourLoader:
    """Batches of trees and labels for some nodes of a graph, in a new order, with new trees, in each epoch.

    Args:
        graph: the graph.
        nodes: of shape (k,), the nodes.
        fanouts: number of neighbours to draw at each hop.
        batch_size: nodes in a batch; the last one may have fewer.
        shuffle: whether the order changes; otherwise each epoch has the same trees too.
        seed: another seed gives other orders and trees.

    Raises:
        ValueError: if there are no nodes, or the batch size is below 1.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: Tensor,
        fanouts: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or not nodes.numel():
            raise ValueError(f"batch_size and number of nodes must be at least 1, got {batch_size} and {len(nodes)}")
        self.graph, self.nodes, self.fanouts = graph, nodes, tuple(fanouts)
        self.batch_size, self.shuffle = batch_size, shuffle
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.nodes) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        nodes = self.nodes
        if self.shuffle:
            nodes = nodes[torch.randperm(len(nodes), generator=self._generator)]
        else:
            self._generator.manual_seed(self._seed)
        for batch in nodes.split(self.batch_size):
            yield self.graph.trees(batch, self.fanouts, self._generator), self.graph.labels[batch]
