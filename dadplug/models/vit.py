"""Vision transformer with the attention of Linformer (arXiv:2010.11929, arXiv:2006.04768)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .registry import MODELS


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

MODELS.register("vit")(ViT)
MODELS.register("vit-small")(functools.partial(ViT, **SMALL))
