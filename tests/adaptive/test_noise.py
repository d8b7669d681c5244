"""Gradient noise of a reduction: held against the gradients of single samples, which autograd computes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap

import dadplug


class Transformer(nn.Module):
    """A transformer of one layer, for sequences of tokens; its data come batch first or sequence first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        rows = self.embedding(tokens)
        if self.batch_first:
            return self.head(self.encoder(rows).mean(1))
        return self.head(self.encoder(rows.transpose(0, 1)).mean(0))


class Twice(nn.Module):
    """A model that calls one of its layers twice for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs):
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(inputs)))))


def build(name):
    torch.manual_seed(3)
    model = {
        "mlp": lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3, bias=False)),
        "twice": Twice,
        "sequence": lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Flatten(), nn.Linear(20, 3)),
        "long": lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(60, 3)),
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, groups=2),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 4, 3, groups=2),
            nn.Flatten(),
            nn.Linear(100, 3),
        ),
        "transformer": lambda: Transformer(True),
        "sequence first": lambda: Transformer(False),
    }[name]()
    return model.double()


SHAPES = {"mlp": (6,), "twice": (6,), "sequence": (5, 6), "long": (20, 6), "cnn": (2, 8, 8)}


def batch(name, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, (samples,), generator=generator)
    if name in SHAPES:
        return torch.randn(samples, *SHAPES[name], generator=generator, dtype=torch.float64), targets
    return torch.randint(11, (samples, 5), generator=generator), targets


def sample_gradients(model, inputs, targets):
    """Return the gradients of single samples by parameter, of shape (samples, elements)."""

    def loss(parameters, x, y):
        return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    parameters = {name: each.detach() for name, each in model.named_parameters()}
    found = vmap(grad(loss), (None, 0, 0))(parameters, inputs, targets)
    return {name: each.flatten(1) for name, each in found.items()}


def expected(gradients, shares):
    """Return variance and squared norm by the textbook: deviations from the mean of each share of a batch."""
    count = len(gradients)
    deviations = sum(float((gradients[share] - gradients[share].mean(0)).square().sum()) for share in shares)
    variance = deviations / (count - len(shares))
    return variance, float(gradients.mean(0).square().sum()) - variance / count


def step(model, reduction, inputs, targets, parts=1):
    model.zero_grad()
    pieces = list(zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True))
    for x, y in pieces[:-1]:
        with reduction.no_sync():
            (nn.functional.cross_entropy(model(x), y) * len(y) / len(targets)).backward()
    x, y = pieces[-1]
    (nn.functional.cross_entropy(model(x), y) * len(y) / len(targets)).backward()
    reduction.synchronize()


def has_factors(parameter):
    return not any(part in parameter for part in ("norm", "attn", "embedding"))


def is_near(found, variance, squared_norm):
    near = {"rel_tol": 1e-9, "abs_tol": 1e-9 * variance}
    return math.isclose(found.variance, variance, **near) and math.isclose(found.squared_norm, squared_norm, **near)


@pytest.mark.parametrize("name", ["mlp", "twice", "sequence", "long", "cnn", "transformer", "sequence first"])
def test_layers_with_factors_match_the_gradients_of_samples(name):
    model = build(name)
    inputs, targets = batch(name, 7, 1)
    gradients = sample_gradients(model, inputs, targets)
    for mode in ("dad", "dsgd", "rankdad", "powersgd"):
        reduction = dadplug.GradientReduction(model, mode=mode, rank=2)
        assert math.isnan(reduction.noise.scale)
        step(model, reduction, *batch(name, 5, 0))
        step(model, reduction, inputs, targets)
        layers = reduction.noise.layers
        factored = [each for each in gradients if has_factors(each)]
        assert set(factored) == set(layers)
        for parameter in factored:
            assert is_near(layers[parameter], *expected(gradients[parameter], [slice(0, 7)])), (mode, parameter)
        if len(factored) == len(gradients):
            totals = [sum(each[place] for each in layers.values()) for place in (0, 1)]
            assert is_near(reduction.noise, *totals)
        reduction.detach()


def matches_at_sites(name: str, modes: list[str]) -> list[tuple[float, ...]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []
    model = build(name)
    inputs, targets = batch(name, 19, 1)
    bounds = [0, 4, 13, 19] if world_size == 3 else [0, 7, 19]
    shares = [slice(*pair) for pair in pairwise(bounds)]
    gradients = sample_gradients(model, inputs, targets)
    for mode in modes:
        reduction = dadplug.GradientReduction(model, mode=mode, rank=2)
        if rank == 0:  # the others are asked by its header
            reduction.noise.every = 1
        step(model, reduction, *batch(name, 4, rank))
        step(model, reduction, inputs[shares[rank]], targets[shares[rank]])
        for parameter in filter(has_factors, gradients):
            found, (variance, squared_norm) = reduction.noise.layers[parameter], expected(gradients[parameter], shares)
            if mode in ("dad", "dsgd", "edad"):
                assert is_near(found, variance, squared_norm), (mode, parameter)
            else:  # the squared norm comes from sketches
                assert math.isclose(found.variance, variance, rel_tol=1e-9), (mode, parameter)
        assert set(reduction.noise.layers) == set(gradients)
        assert reduction.noise.batch == 19
        results.append((reduction.noise.variance, reduction.noise.squared_norm, reduction.noise.scale))
        step(model, reduction, inputs[shares[rank]], targets[shares[rank]], parts=2)
        results.append((reduction.noise.variance, reduction.noise.squared_norm, reduction.noise.scale))
        reduction.detach()
    return results


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_sites_with_unequal_batches_have_the_same_estimates_to_the_bit(sites, name):
    first, *others = sites(3).run(matches_at_sites, name, ["dad", "dsgd", "edad", "rankdad", "powersgd"])
    assert all(other == first for other in others)
    assert not any(math.isnan(number) for numbers in first for number in numbers)
