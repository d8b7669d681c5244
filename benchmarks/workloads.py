"""Models whose steps the benchmarks time, by name, each with a batch of random data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dadplug.models import MNISTNet, ViT


@dataclass(frozen=True)
class Workload:
    """A model and what a step of it is fed.

    Attributes:
        build: makes the model.
        batch_size: samples a site.
        draw: draws a batch of inputs and targets; gets the number of samples and a generator.
    """

    build: Callable[[], nn.Module]
    batch_size: int
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all positions."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _images(channels: int, size: int, classes: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(count, channels, size, size, generator=generator)
        return images, torch.randint(0, classes, (count,), generator=generator)

    return draw


def _words(length: int, vocabulary: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, vocabulary, (count, length + 1), generator=generator)
        return words[:, :-1], words[:, 1:]

    return draw


class _Attention(nn.Module):
    """Causal attention of linear layers, so that its weights have factors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mixed(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class SmallGPT(nn.Module):
    """Four blocks of width 256 over 64 words of 2,000."""

    def __init__(self, width: int = 256, depth: int = 4, vocabulary: int = 2000, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "first": nn.LayerNorm(width),
                    "attention": _Attention(width, 8),
                    "second": nn.LayerNorm(width),
                    "feed": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places
        for block in self.blocks:
            x = x + block["attention"](block["first"](x))
            x = x + block["feed"](block["second"](x))
        return self.head(x)


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = stride == 1 and before == after
        self.short = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.short(x))


def small_resnet(width: int = 32) -> nn.Sequential:
    """ResNet-18's blocks at half its width, on images of 32 x 32."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = []
    for stage, (before, after) in enumerate(itertools.pairwise(widths)):
        blocks += [_Residual(before, after, 1 if stage == 0 else 2), _Residual(after, after, 1)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))
    return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), *blocks, *head)


class Recurrent(nn.Module):
    """Two layers of LSTM of width 256 over 32 words of 2,000."""

    def __init__(self, width: int = 256, vocabulary: int = 2000) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.recurrent(self.words(words))[0])


class Transformer(nn.Module):
    """A model of transformers with random weights, of the sizes that its configuration has by default.

    Args:
        architecture: name of the model's class.
        configuration: name of the class of its configuration.
        argument: what forward calls its input.
        options: options of the configuration.
    """

    def __init__(self, architecture: str, configuration: str, argument: str, **options: int | bool) -> None:
        super().__init__()
        import transformers

        self.argument = argument
        self.model = getattr(transformers, architecture)(getattr(transformers, configuration)(**options))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(**{self.argument: inputs}).logits


def _texts(length: int, vocabulary: int) -> Callable[[int, torch.Generator], tuple[Tensor, Tensor]]:
    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, vocabulary, (count, length), generator=generator)
        return words, torch.randint(0, 2, (count,), generator=generator)

    return draw


WORKLOADS = {
    "mnistnet": Workload(MNISTNet, 16, _images(1, 28, 10)),
    "vit": Workload(lambda: ViT(image_size=224, patch_size=28, depth=6, dim=128), 32, _images(3, 224, 2)),
    "gpt": Workload(SmallGPT, 4, _words(64, 2000)),
    "resnet": Workload(small_resnet, 8, _images(3, 32, 10)),
    "lstm": Workload(Recurrent, 8, _words(32, 2000)),
}

LARGE = {
    "bert": Workload(
        lambda: Transformer("BertForSequenceClassification", "BertConfig", "input_ids", num_labels=2),
        8,
        _texts(64, 30522),
    ),
    "vit-base": Workload(
        lambda: Transformer("ViTForImageClassification", "ViTConfig", "pixel_values", num_labels=1000),
        4,
        _images(3, 224, 1000),
    ),
    "gpt2": Workload(
        lambda: Transformer("GPT2LMHeadModel", "GPT2Config", "input_ids", use_cache=False), 4, _words(128, 50257)
    ),
}
"""BERT-base, ViT-Base and GPT-2 small: too large for the programs that run all of the others."""
