"""Graphs: random graphs with a structure to learn, and batches of sampled neighbourhoods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Graph:
    """Undirected graph with one class per node; every node is also its own neighbour.

    Args:
        edges: of shape (m, 2), int64; both directions of each edge are added, duplicates and loops count once.
        labels: of shape (n,), int64, the class of each node.

    Attributes:
        labels: as passed.
        starts: of shape (n + 1,); the neighbours of node v are ``neighbours[starts[v] : starts[v + 1]]``.
        neighbours: of shape (2 m + n,) or smaller.

    Raises:
        ValueError: if a shape or type does not fit, or an edge has a node out of range.
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
        """Sample neighbours of each node uniformly with replacement.

        Args:
            nodes: int64, of any shape.
            count: number of neighbours per node.
            generator: random number generator; None for torch's default.

        Returns:
            An int64 tensor of shape (*nodes.shape, count).
        """
        starts, degrees = self.starts[nodes], self.starts[nodes + 1] - self.starts[nodes]
        chance = torch.rand((*nodes.shape, count), generator=generator, dtype=torch.float64)
        drawn: Tensor = self.neighbours[starts.unsqueeze(-1) + (chance * degrees.unsqueeze(-1)).long()]
        return drawn

    def trees(self, nodes: Tensor, fanouts: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Sample a tree of neighbours for each node, as `dadplug.models.GCN` takes them.

        Args:
            nodes: of shape (batch,).
            fanouts: number of neighbours at each hop.
            generator: random number generator; None for torch's default.

        Returns:
            An int64 tensor of shape (batch, 1 + f1 + f1 f2 + ...).
        """
        hops = [nodes.unsqueeze(1)]
        for fanout in fanouts:
            hops.append(self.sample(hops[-1], fanout, generator).flatten(1))
        return torch.cat(hops, 1)


def block_graph(
    nodes: int = 10_000, classes: int = 8, degree: float = 10.0, inside: float = 0.8, seed: int = 0
) -> Graph:
    """Generate a graph of the stochastic block model: each class is a block with more edges inside than to others.

    Args:
        nodes: number of nodes; node v is of class ``v * classes // nodes``.
        classes: number of blocks, whose sizes differ by at most one.
        degree: approximate mean number of neighbours per node.
        inside: share of edges inside of blocks.
        seed: seed of the generator.

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
    """Loader of batches of trees and labels for nodes of a graph; order and trees change in each epoch.

    Args:
        graph: the graph.
        nodes: of shape (k,), the nodes.
        fanouts: number of neighbours at each hop.
        batch_size: number of nodes per batch; the last batch may have fewer.
        shuffle: whether order and trees change; otherwise all epochs are equal.
        seed: seed of the generator.

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
