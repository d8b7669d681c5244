"""Models of many kinds of layers, each with its batches, for tests over all methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from chained_models import Functions, Positions, Skips, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Stages(nn.Module):
    """A linear layer, convolutions over what it makes of the input, and a linear layer on the mean over positions."""

    def __init__(self, size: tuple[int, ...], convolutions: nn.Module, channels: int) -> None:
        super().__init__()
        self.start = nn.Linear(6, torch.Size(size).numel())
        self.size = size
        self.convolutions = convolutions
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolutions(self.start(x).unflatten(1, self.size))
        return self.head(x.flatten(2).mean(2))


def conv1d() -> nn.Module:
    return Stages((24, 4), nn.Sequential(nn.Conv1d(24, 48, 3, 2, 1), nn.ReLU(True), nn.Conv1d(48, 32, 2)), 32)


def conv2d() -> nn.Module:
    """Each kind of padding, dilation, groups; the last but one depthwise."""
    layers = [
        nn.Conv2d(16, 32, 3, padding="same", padding_mode="reflect"),
        nn.Tanh(),
        nn.Conv2d(32, 32, (2, 3), padding="same", groups=2),
        nn.Tanh(),
        nn.Conv2d(32, 32, 2, padding=1, dilation=2, padding_mode="circular", bias=False),
        nn.Conv2d(32, 32, 3, padding=1, groups=32, padding_mode="replicate"),
        nn.Conv2d(32, 8, 1),
    ]
    return Stages((16, 2, 2), nn.Sequential(*layers), 8)


def conv3d() -> nn.Module:
    return Stages((8, 2, 2, 1), nn.Sequential(nn.Conv3d(8, 16, (2, 2, 1)), nn.Tanh(), nn.Conv3d(16, 8, 1)), 8)


def transposed() -> nn.Module:
    """There and back, with output padding and groups."""
    layers = [
        nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1),
        nn.Tanh(),
        nn.ConvTranspose2d(16, 8, 2, dilation=2, groups=2, bias=False),
    ]
    return Stages((32, 1, 2), nn.Sequential(*layers), 8)


def transposed_1_and_3() -> nn.Module:
    layers = [nn.ConvTranspose1d(24, 32, 3), nn.Unflatten(2, (2, 2, 1)), nn.Tanh(), nn.ConvTranspose3d(32, 8, 2)]
    return Stages((24, 2), nn.Sequential(*layers), 8)


class Images(nn.Module):
    """Patches by a convolution, a class token and places as bare parameters, an encoder, batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, (2, 1), (2, 1))
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 4, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x.view(-1, 1, 2, 3)).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


class Attention(nn.Module):
    """Attention by hand, of linear layers called one by one, the input also over a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 12, bias=False) for _ in range(3))
        self.out = nn.Linear(12, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.roll(1, 1), x.flip(1)], 1)
        q, k, v = (layer(x).unflatten(2, (2, 6)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = (q @ k.transpose(2, 3) / 6**0.5).softmax(-1) @ v
        return self.head((x + self.out(mixed.transpose(1, 2).flatten(2))).mean(1))


class Words(nn.Module):
    """A table far larger than a batch, with a padding row, looked up twice."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(400, 6, padding_idx=3, sparse=sparse)
        self.mix = nn.Conv1d(6, 4, 2)
        self.small = nn.Embedding(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.table((7 * tokens).roll(1, 1))
        return self.mix(x.transpose(1, 2)).mean(2) + self.small(tokens[:, 0] % 5)


class Renormed(nn.Module):
    """Tables whose rows are kept short while they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 4, max_norm=1.0)
        self.bags = nn.EmbeddingBag(40, 4, max_norm=0.5, norm_type=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).sum(1) + self.bags(3 * tokens)


class Bags(nn.Module):
    """Bags of each kind: a mean with a padding row, a weighted sum over offsets, a maximum, and a sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(300, 4, mode="mean", padding_idx=2)
        self.sum = nn.EmbeddingBag(300, 4, mode="sum")
        self.max = nn.EmbeddingBag(30, 4, mode="max")
        self.rare = nn.EmbeddingBag(300, 4, mode="sum", sparse=True)
        self.weigh = nn.Linear(1, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        offsets = torch.arange(0, tokens.numel(), tokens.shape[1])
        weights = self.weigh(tokens.to(self.sum.weight.dtype)[..., None] / 11).flatten()
        mixed = self.mean(tokens) + self.sum(tokens.flatten(), offsets, per_sample_weights=weights)
        return mixed + self.max(tokens) + self.rare(input=tokens + 11)


class Language(nn.Module):
    """A next-word model whose output layer shares the table; an LSTM between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.recur = nn.LSTM(6, 6, batch_first=True)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.recur(self.table(tokens))[0][:, -1])


class Resumed(nn.Module):
    """A table and convolutions under activation checkpointing of either kind, the convolution called twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.table = nn.Embedding(200, 24)
        self.block = nn.Sequential(nn.Conv1d(24, 24, 3, padding=1), nn.Tanh(), nn.Conv1d(24, 24, 1))
        self.head = nn.Linear(24, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(lambda numbers, _: self.table(numbers), tokens, self.head.weight, use_reentrant=self.reentrant)
        x = x.transpose(1, 2)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(2))


class Towers(nn.Module):
    """Several inputs, of different kinds, and one tower that is left out of some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 8)
        self.numbers = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.extra = nn.Conv1d(1, 8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.join(tokens, numbers=tokens.to(self.words.weight.dtype) / 11)
        return x[:, :4] + x[:, 4:]

    def join(self, tokens: Tensor, *, numbers: Tensor) -> Tensor:
        x = self.words(tokens).mean(1) * self.numbers(numbers)
        if len(tokens) % 3 == 0:
            x = x + self.extra(numbers[:, None])[..., 0]
        return x


class Sizes(nn.Module):
    """Convolutions of inputs whose length depends on the batch; one is also called on two lengths at once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 48, 2)
        self.both = nn.Conv1d(48, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.roll(1, 1), x.roll(2, 1)][: 3 - len(x) % 2], 2)
        x = torch.tanh(self.conv(x))
        return self.both(x).mean(2) + self.both(torch.cat([x, x.flip(2)], 2)).mean(2)


class Waves(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 5, dtype=torch.complex128))
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(self.turn.dtype) @ self.turn).abs().to(x.dtype))


# A zoo of small models, each with batches of any number of samples: what a method has to cope with


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
    "conv1d": (conv1d, floats),
    "conv2d": (conv2d, floats),
    "conv3d": (conv3d, floats),
    "transposed": (transposed, floats),
    "transposed 1 and 3": (transposed_1_and_3, floats),
    "images": (Images, floats),
    "attention": (Attention, floats),
    "words": (Words, tokens),
    "sparse": (lambda: Words(sparse=True), tokens),
    "bags": (Bags, tokens),
    "renormed": (Renormed, tokens),
    "language": (Language, tokens),
    "resumed": (lambda: Resumed(False), tokens),
    "resumed reentrant": (lambda: Resumed(True), tokens),
    "towers": (Towers, tokens),
    "sizes": (Sizes, floats),
    "waves": (Waves, floats),
    "chain": (lambda: mlp(6, 9, 8, 7, 4), floats),
    "tanh": (lambda: mlp(6, 9, 4, phi=nn.Tanh), floats),
    "functions": (Functions, floats),
    "skips": (Skips, floats),
    "positions": (Positions, floats),
}
CHAINS = {  # models that edad can do something for, and how many weights it leaves out
    "chain": 3,
    "tanh": 1,
    "functions": 12,
    "skips": 3,
    "positions": 2,
    "mixed": 1,
    "partly": 2,
    "checkpointed": 1,
    "reentrant": 1,
    "transformer": 2,
    "images": 1,
}


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


def batch(name: str, count: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    """Draw inputs and targets of a number of samples."""
    generator = torch.Generator().manual_seed(seed)
    inputs = ZOO[name][1](count, generator)
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        inputs = inputs.to(dtype)
    return inputs, torch.randint(0, 4, (count,), generator=generator)


def part(given: tuple[Any, Tensor], rows: slice) -> tuple[Any, Tensor]:
    """Return some rows of a batch."""
    inputs, targets = given
    if isinstance(inputs, dict):
        return {name: each[rows] for name, each in inputs.items()}, targets[rows]
    return inputs[rows], targets[rows]


def loss(model: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
    """Run a model of the zoo and return the mean cross-entropy; outputs of all positions are averaged."""
    outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    logits = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    return nn.functional.cross_entropy(logits if logits.dim() == 2 else logits.mean(1), targets)
