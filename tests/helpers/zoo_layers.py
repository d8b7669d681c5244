"""Further animals of the zoo: convolutions, embeddings, attention by hand, several inputs, inputs of several sizes."""

from __future__ import annotations

import torch
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
