"""Models of the experiments: MNISTNet, a vision transformer, Wide & Deep, and a graph network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class MNISTNet(nn.Module):
    """Five linear layers without biases, 784-2048-1024-512-256-10; batch normalisation follows the middle three.

    Source: the experiments of dAD (arXiv:2102.09631), in the sizes of their Catalyst code.

    Args:
        in_features: number of pixels.
        classes: number of classes.
    """

    def __init__(self, in_features: int = 784, classes: int = 10) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.first = nn.Linear(in_features, 2048, bias=False)
        self.middle = nn.Sequential(*_block(2048, 1024), *_block(1024, 512), *_block(512, 256))
        self.last = nn.Linear(256, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits of shape (batch, classes) from images of shape (batch, ...)."""
        hidden = nn.functional.relu(self.first(self.flatten(images)))
        logits: Tensor = self.last(self.middle(hidden))
        return logits


def _block(in_features: int, out_features: int) -> list[nn.Module]:
    return [nn.Linear(in_features, out_features, bias=False), nn.BatchNorm1d(out_features), nn.ReLU()]


class ViT(nn.Module):
    """Vision transformer: patches, a class token, positions, blocks of Linformer, and a linear head.

    All weights except positions, class token and Linformer's projections along the sequence belong to linear layers,
    which have factors.

    Args:
        image_size: height and width of the images, in pixels.
        patch_size: height and width of a patch; a divisor of `image_size`.
        channels: channels of the images.
        classes: number of classes.
        dim: width of a token.
        depth: number of blocks.
        heads: heads of the attention; a divisor of `dim`.
        k: sequence length that keys and values are projected to.
        dropout: dropout probability in attention and feed-forward layers.

    Raises:
        ValueError: if the patches do not fill the image.
        ImportError: if the package `linformer` is not installed.
    """

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 32,
        channels: int = 3,
        classes: int = 2,
        dim: int = 128,
        depth: int = 12,
        heads: int = 8,
        k: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patches of {patch_size} pixels do not fill an image of {image_size}")
        if dim % heads:
            raise ValueError(f"heads must divide dim, got {heads} and {dim}")
        try:
            from linformer import Linformer
        except ImportError as error:
            raise ImportError("the ViT needs the package linformer: pip install 'dadplug[examples]'") from error
        self.image_size = image_size
        self.patch_size = patch_size
        patches = (image_size // patch_size) ** 2
        self.patches = nn.Linear(channels * patch_size**2, dim)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, patches + 1, dim) * 0.02)
        self.blocks = Linformer(dim=dim, seq_len=patches + 1, depth=depth, heads=heads, k=k, dropout=dropout)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits of shape (batch, classes) from images of shape (batch, channels, height, width)."""
        batch, channels, height, width = images.shape
        if (height, width) != (self.image_size, self.image_size):
            raise ValueError(f"this ViT is for images of {self.image_size} pixels, got {height} x {width}")
        side, count = self.patch_size, self.image_size // self.patch_size
        cut = images.view(batch, channels, count, side, count, side).permute(0, 2, 4, 1, 3, 5)
        tokens = self.patches(cut.reshape(batch, count * count, channels * side * side))
        tokens = torch.cat([self.token.expand(batch, -1, -1), tokens], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)[:, 0]))
        return logits


# A size that trains in minutes on two cores.
SMALL: dict[str, Any] = {"image_size": 64, "patch_size": 8, "depth": 6, "k": 16}


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
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(widths))

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
