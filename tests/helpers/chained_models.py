"""Models whose layers form chains."""

import itertools

import torch
from torch import nn


def mlp(*widths: int, phi=nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, out in itertools.pairwise(widths):
        layers += [nn.Linear(width, out), phi()]
    return nn.Sequential(*layers[:-1])


class Functions(nn.Module):
    """Every function that chains go through, and reshapes that keep rows."""

    def __init__(self) -> None:
        super().__init__()
        functions = [
            *(nn.ReLU(inplace=True), nn.LeakyReLU(0.1), nn.LeakyReLU(0.2, inplace=True), nn.ELU(), nn.Tanh()),
            *(nn.ELU(0.5, inplace=True), nn.SELU(), nn.Sigmoid()),
            *(nn.Identity(), nn.Unflatten(1, (1, 6)), nn.Flatten(), nn.Dropout(0.0).eval()),
        ]
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in functions)
        self.functions = nn.ModuleList(functions)
        self.out = nn.Linear(6, 4)

    def forward(self, x):
        for layer, function in zip(self.layers, self.functions):
            x = function(layer(x))
        return self.out(x.clone().view(-1, 1, 6)).squeeze(1)

    def train(self, mode: bool = True):
        super().train(mode)
        self.functions[-1].eval()
        return self


class Skips(nn.Module):
    """A residual layer, an output that two layers use, and one that the loss sees too, between chains."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e, self.f = (nn.Linear(6, 6) for _ in range(6))
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        x = x + torch.tanh(self.c(x))
        x = torch.relu(self.e(torch.relu(self.d(x))))
        x = self.f(x)
        return self.left(x) + self.right(x)


class Positions(nn.Module):
    """Layers over positions, with batch normalisation and dropout of its own between chains."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3), nn.Flatten(), nn.Linear(9, 7))
        self.norm = nn.LayerNorm(7)
        self.last = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x):
        return self.last(self.norm(self.first(x.view(-1, 3, 2))))


def chained(reduction) -> list[str]:
    return [row.parameter for row in reduction.plan if row.path == "activations"]
