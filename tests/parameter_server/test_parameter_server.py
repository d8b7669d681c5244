"""The parameter server in processes: synchronous bits, equal replicas, counted contributions, errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dadplug


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 16, bias=False), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers)


def batch(step: int, rank: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(rows, 12, generator=generator)
    return inputs, (inputs.abs().argmax(1) % 3)


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def follows_reduction(mode: str, steps: int, options: dict) -> None:
    rank = dist.get_rank()
    first = network(rank)
    second = copy.deepcopy(first)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (first, second)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 20, 0.5) for each in optimizers]
    reduction = dadplug.GradientReduction(first, mode=mode, rank=2, **options)
    server = dadplug.ParameterServer(second, optimizers[1], mode=mode, rank=2, staleness=0, **options)
    for step in range(steps):
        inputs, targets = batch(step, rank, 4 + (step + rank) % 3)
        optimizers[0].zero_grad()
        nn.functional.cross_entropy(first(inputs), targets).backward()
        reduction.synchronize()
        optimizers[0].step()
        nn.functional.cross_entropy(second(inputs), targets).backward()
        server.step()
        assert server.version == step + 1
        for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(one, other), f"{mode}, step {step}: {name}"
        for scheduler in schedulers:
            scheduler.step()
    server.finish()
    assert server.first_difference() is None
    server.detach()
    reduction.detach()


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_staleness_it_has_the_bits_of_the_reduction(sites, world_size):
    for mode in ("dsgd", "dad", "rankdad"):
        sites(world_size).run(follows_reduction, mode, 50, {})
