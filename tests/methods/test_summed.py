"""Gradients that are summed: int8 with the defaults of rankdad where they are many, and what rounding takes is kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from torch import Tensor, nn

import dadplug

WIDTH = 1 << 14  # a scale and a shift of as many are the 2**15 numbers from which they are many
IDLE = [(6, 2), (0, 8), (5, 0)]  # the same, where sites are idle
COUNTS = [(6, 2, 1, 1, 3), (3, 8, 2, 5, 1), (5, 5, 1, 3, 2)]  # samples by step and site, in turn


class Scaled(nn.Module):
    """A layer that divides into vectors only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs).square().mean()


def inputs(step: int, site: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + site)
    return torch.randn(count, WIDTH, generator=generator)


def memory_of(reduction: dadplug.GradientReduction, model: nn.Module) -> list[Tensor]:
    """Return what all sites keep of each parameter."""
    kept = reduction.state_dict()["rounding"]["errors"]
    found = [kept.get(name, torch.zeros(WIDTH)).double().view(-1) for name, _ in model.named_parameters()]
    for each in found:
        dist.all_reduce(each)
    return found


def run(
    reduction: dadplug.GradientReduction,
    model: nn.Module,
    steps: int,
    scales: Sequence[float] = (1.0,),
    samples: Sequence[Sequence[int]] = COUNTS,
) -> tuple[float, float]:
    """Return how far what was agreed, without and with what is kept, is from the sum of true mean gradients.

    Args:
        reduction: the reduction.
        model: its model.
        steps: number of steps.
        scales: loss scales by step, in turn.
        samples: samples by step and site, in turn.
    """
    sites, alone = range(dist.get_world_size()), copy.deepcopy(model).double()
    true, agreed = ([torch.zeros(WIDTH, dtype=torch.float64) for _ in range(2)] for _ in range(2))
    for step in range(steps):
        model.zero_grad()
        scale, counts = scales[step % len(scales)], [samples[step % 3][site] for site in sites]
        with reduction.loss_scale(scale):
            if own := counts[dist.get_rank()]:
                (scale * model(inputs(step, dist.get_rank(), own))).backward()
                reduction.synchronize()
            else:
                reduction.idle()
        for site in filter(counts.__getitem__, sites):
            batch = inputs(step, site, counts[site]).double()
            gradients = torch.autograd.grad(alone(batch), list(alone.parameters()))
            for total, each in zip(true, gradients, strict=True):
                total += each * counts[site] / sum(counts)
        for total, parameter in zip(agreed, model.parameters(), strict=True):
            total += parameter.grad / scale
    kept = memory_of(reduction, model)
    whole = [one + other for one, other in zip(agreed, kept, strict=True)]
    return off_by(torch.cat(agreed), torch.cat(true)), off_by(torch.cat(whole), torch.cat(true))


@pytest.mark.parametrize("samples", [COUNTS, IDLE], ids=["all", "idle"])
@pytest.mark.parametrize("scales", [(1.0,), (64.0,), (1.0, 64.0)], ids=str)
@support.at_sites(2)
def test_what_rounding_takes_from_many_numbers_is_kept(
    scales: Sequence[float], samples: Sequence[Sequence[int]]
) -> None:
    model = Scaled()
    reduction = dadplug.GradientReduction(model, mode="rankdad", weighting="samples")
    assert reduction.plan.bytes == 2 * (WIDTH + 4 * WIDTH // 512)  # with a scale for each block of 512
    lost, missing = run(reduction, model, 7, scales, samples)
    assert 1e-4 < lost < 0.02
    assert missing < 1e-6
    assert reduction.traffic.bytes_sent < 1.1 * 2 * WIDTH
    assert reduction.first_difference() is None


@support.at_sites(2)
def test_a_small_gradient_is_sent_beside_large_ones() -> None:
    model = nn.ParameterDict(
        {name: torch.ones(size) for name, size in {"large": 2 * WIDTH, "small": 700, "one": 1}.items()}
    )
    reduction = dadplug.GradientReduction(model, mode="rankdad")
    for _ in range(2):
        model.zero_grad()
        (1e6 * model["large"].sum() + (model["small"] * torch.arange(1, 701)).sum() + 1e-6 * model["one"]).backward()
        reduction.synchronize()
        assert off_by(model["small"].grad, torch.arange(1.0, 701.0)) < 0.01
        assert model["one"].grad.item() == pytest.approx(1e-6)
    assert reduction.plan.bytes < 2 * WIDTH + 701 + 300


@pytest.mark.parametrize("options", [{"rank": 8}, {"wire": "fp32"}, {"mode": "dsgd"}])
@support.at_sites(2)
def test_they_are_exact_where_a_format_or_a_rank_is_given(options: dict[str, Any]) -> None:
    model = Scaled()
    reduction = dadplug.GradientReduction(model, weighting="samples", **{"mode": "rankdad"} | options)
    assert run(reduction, model, 2)[0] < 1e-6


@support.at_sites(5)
def test_they_are_exact_where_many_sites_sum() -> None:
    model = Scaled()
    reduction = dadplug.GradientReduction(model, mode="rankdad", weighting="samples")
    assert run(reduction, model, 2)[0] < 1e-6
