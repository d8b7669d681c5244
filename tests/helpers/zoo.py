"""A zoo of small models, each with batches of any number of samples: what a method has to cope with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zoo_layers as layers
from torch import Tensor, nn


class Mixed(nn.Module):
    """The acceptance model: every kind of parameter in one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.recur = nn.LSTM(8, 6, batch_first=True)
        self.conv = nn.Conv1d(6, 5, 3, padding=1)
        self.batchnorm = nn.BatchNorm1d(5).eval()
        self.hidden = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.tied = nn.Linear(8, 11, bias=False)
        self.tied.weight = self.embed.weight

    def train(self, mode: bool = True) -> Mixed:
        super().train(mode)
        self.batchnorm.eval()
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        x = self.recur(x)[0]
        x = self.batchnorm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.tied(self.hidden(x)).mean(1)


class Repeated(nn.Module):
    """A layer called three times in one forward, once on other leading dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        x = self.layer(x.view(-1, 1, 1, 6)).flatten(1) + x
        return self.out(self.layer(x))


class TiedLinears(nn.Module):
    """Two linear layers that share weight and bias, and one that shares only the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias
        self.third, self.fourth = nn.Linear(6, 6), nn.Linear(6, 6)
        self.fourth.weight = self.third.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(torch.tanh(self.third(self.second(torch.tanh(self.first(x))))))[:, :4]


class Functional(nn.Module):
    """A layer whose weight is also used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.bare = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.layer(x)) @ self.layer.weight.T) @ self.bare


class Partly(nn.Module):
    """A frozen layer, an unused layer, a frozen bias, and a layer used for some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.held = nn.Linear(6, 6)
        self.held.bias.requires_grad_(False)
        self.sometimes = nn.Linear(6, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.held(self.frozen(x)))
        if x.shape[0] % 2:
            x = torch.tanh(self.sometimes(x))
        return self.out(x)


class Checkpointed(nn.Module):
    """Layers under activation checkpointing of either kind, one of them called twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.first = nn.Linear(6, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.out(self.inner(x))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x.view(-1, 1, 2, 3))))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.view(-1, 1, 6).expand(-1, 3, -1)).mean(1))


class Dictionary(nn.Module):
    """Inputs and outputs in containers, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        halves = {"left": self.left(input=x), "right": (self.right(x),)}
        return {"logits": halves["left"] + halves["right"][0], **halves}


def floats(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 6, generator=generator, dtype=torch.float64)


def tokens(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 11, (count, 4), generator=generator)


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 4), floats),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.LayerNorm(9), nn.Linear(9, 4, bias=False)),
        floats,
    ),
    "mixed": (Mixed, tokens),
    "repeated": (Repeated, floats),
    "tied": (TiedLinears, floats),
    "functional": (Functional, floats),
    "partly": (Partly, floats),
    "checkpointed": (lambda: Checkpointed(False), floats),
    "reentrant": (lambda: Checkpointed(True), floats),
    "conv": (Convolutional, floats),
    "transformer": (Transformer, floats),
    "dictionary": (Dictionary, floats),
    "gru": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.GRU(3, 5, batch_first=True), Last(), nn.Linear(5, 4)),
        floats,
    ),
    "bilinear": (lambda: nn.Sequential(nn.Linear(6, 5), Twice(nn.Bilinear(5, 5, 4))), floats),
    "weightnorm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 4)),
        floats,
    ),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, 4)), floats),
    "conv1d": (layers.conv1d, floats),
    "conv2d": (layers.conv2d, floats),
    "conv3d": (layers.conv3d, floats),
    "transposed": (layers.transposed, floats),
    "transposed 1 and 3": (layers.transposed_1_and_3, floats),
    "images": (layers.Images, floats),
    "attention": (layers.Attention, floats),
    "words": (layers.Words, tokens),
    "sparse": (lambda: layers.Words(sparse=True), tokens),
    "bags": (layers.Bags, tokens),
    "renormed": (layers.Renormed, tokens),
    "language": (layers.Language, tokens),
    "resumed": (lambda: layers.Resumed(False), tokens),
    "resumed reentrant": (lambda: layers.Resumed(True), tokens),
    "towers": (layers.Towers, tokens),
    "sizes": (layers.Sizes, floats),
    "waves": (layers.Waves, floats),
}
CHAINS = (
    "mixed",
    "partly",
    "checkpointed",
    "reentrant",
    "transformer",
    "images",
)  # models that edad can do something for
BY_BATCH = ("partly", "towers", "sizes")  # models whose way depends on the batch, not only on each sample


class Last(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x[0][:, -1]


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a model of the zoo, the same for the same random state."""
    model = ZOO[name][0]()
    for parameter in model.parameters():
        if parameter.is_floating_point():  # a complex one stays as it is
            parameter.data = parameter.data.to(dtype)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return model


def batch(name: str, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets of a number of samples."""
    generator = torch.Generator().manual_seed(seed)
    inputs = ZOO[name][1](count, generator)
    return inputs, torch.randint(0, 4, (count,), generator=generator)


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Run a model of the zoo and return the mean cross-entropy."""
    outputs = model(inputs)
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return nn.functional.cross_entropy(logits, targets)
