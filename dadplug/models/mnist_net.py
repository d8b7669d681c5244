"""MNISTNet: the feed-forward network of the dAD experiments."""

from __future__ import annotations

from torch import Tensor, nn

from .registry import MODELS


@MODELS.register("MNISTNet", "mnist_net")
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
