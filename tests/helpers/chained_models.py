"""Models whose layers form chains, and their comparison with one process."""

import copy
import itertools

import torch
from comparison import off_by
from torch import nn
from torch.utils.checkpoint import checkpoint


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


class Tokens(nn.Module):
    """Layers over positions, with batch normalisation and dropout of its own between chains."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3), nn.Flatten(), nn.Linear(9, 7))
        self.norm = nn.LayerNorm(7)
        self.last = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x):
        return self.last(self.norm(self.first(x.view(-1, 3, 2))))


class Partial(nn.Module):
    """A frozen layer, a frozen bias, an unused layer, and a layer that only some batches go through."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.held, self.unused, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.held.bias.requires_grad_(False)
        self.hidden, self.out = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x):
        x = torch.tanh(self.held(self.frozen(x)))
        if len(x) % 2:
            x = torch.tanh(self.sometimes(x))
        return self.out(torch.relu(self.hidden(x)))


class Checkpointed(nn.Module):
    """Chains under checkpointing of either kind, called twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.start, self.inner, self.end = mlp(6, 8, 6), mlp(6, 7, 6), mlp(6, 5, 4)

    def forward(self, x):
        x = self.start(x)
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.end(x)


MODELS = {
    "mlp": lambda: mlp(6, 9, 8, 7, 4),
    "tanh": lambda: mlp(6, 9, 4, phi=nn.Tanh),
    "functions": Functions,
    "skips": Skips,
    "tokens": Tokens,
    "partial": Partial,
    "checkpointed": lambda: Checkpointed(False),
    "reentrant": lambda: Checkpointed(True),
}


def pair(name: str, dtype: torch.dtype = torch.float64):
    torch.manual_seed(7)
    reference = MODELS[name]().to(dtype)
    return copy.deepcopy(reference), reference


def draw(count: int, seed: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(0, 4, (count,), generator=generator)


def loss(model, inputs, targets):
    return nn.functional.cross_entropy(model(inputs), targets)


def compare(model, reference, bound: float, what) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        assert (p.grad is None) == (q.grad is None), (what, name)
        assert q.grad is None or off_by(p.grad, q.grad) < bound, (what, name, off_by(p.grad, q.grad))


def chained(reduction) -> list[str]:
    return [row.parameter for row in reduction.plan if row.path == "activations"]
