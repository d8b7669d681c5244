"""Lossy methods and what they keep back: PowerSGD, top-k, error feedback in rankdad, int8 on the wire."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dadplug
from dadplug.errors import NonFiniteError

LOSSY = [
    {"mode": "powersgd", "rank": 2},
    {"mode": "powersgd", "rank": 2, "wire": "bf16"},
    {"mode": "powersgd", "rank": 2, "wire": "int8"},
    {"mode": "topk", "density": 0.1},
    {"mode": "topk", "density": 0.1, "wire": "bf16"},
    {"mode": "rankdad", "rank": 2, "error_feedback": True},
    {"mode": "rankdad", "rank": 2, "error_feedback": True, "wire": "int8"},
    {"mode": "rankdad", "rank": 24, "wire": "int8"},
    {"mode": "rankdad", "rank": 3},
    {"mode": "rankdad"},
    {"mode": "dsgd", "wire": "int8"},
]


def name_of(options):
    return "-".join(str(value) for value in options.values())


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.LayerNorm(60), nn.Linear(60, 50), nn.Linear(50, 30)).to(dtype)


def batch(rank, seed=0, samples=None):
    generator = torch.Generator().manual_seed(seed * 10 + rank)
    return torch.randn(6 + rank if samples is None else samples, 40, generator=generator)


def gradients(model, rank, seed=0, samples=None):
    model.zero_grad()
    inputs = batch(rank, seed, samples).to(next(model.parameters()).dtype)
    model(inputs).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mean_over_steps(options: dict, steps: int) -> float:
    """Largest distance between the mean of many agreed gradients and the true one, by parameter, in its norms."""
    model = network()
    true = [gradients(model, rank) for rank in range(dist.get_world_size())]
    samples = [6 + rank for rank in range(len(true))]
    reduction = dadplug.GradientReduction(model, **options)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for _ in range(steps):
        gradients(model, dist.get_rank())
        reduction.synchronize()
        for name, p in model.named_parameters():
            sums[name] += p.grad
    worst = 0.0
    for name, total in sums.items():
        expected = sum(n * each[name] for n, each in zip(samples, true, strict=True)) / sum(samples)
        worst = max(worst, float((total / steps - expected).norm() / expected.norm()))
    reduction.detach()
    return worst


@pytest.mark.parametrize("options", LOSSY, ids=name_of)
def test_what_is_kept_back_comes_later(sites, options):
    few, many = (max(sites(2).run(mean_over_steps, options, steps)) for steps in (1, 80))
    assert many < 0.06
    assert many < few or few < 1e-3


def test_without_feedback_it_never_comes(sites):
    for options in ({"mode": "powersgd", "rank": 2}, {"mode": "topk", "density": 0.1}):
        assert min(sites(2).run(mean_over_steps, {**options, "error_feedback": False}, 40)) > 0.1


def follows_the_paper() -> None:
    """Beside PowerSGD as its paper writes it, in one process that sees all sites' gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, apart = network(torch.float64), network(torch.float64)
    reduction = dadplug.GradientReduction(model, mode="powersgd", rank=3, bucket_mb=0.001)
    assert {row.path for row in reduction.plan if len(row.shape) == 2} == {"powersgd"}
    samples = [6 + each for each in range(world_size)]
    weights = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    bases = {name: reduction._method.basis(name, tuple(p.shape), p).clone().T for name, p in weights.items()}
    errors = {name: [torch.zeros_like(p) for _ in samples] for name, p in weights.items()}
    for step in range(4):
        all_gradients = [gradients(apart, each, step) for each in range(world_size)]
        gradients(model, rank, step)
        reduction.synchronize()
        for name, p in weights.items():
            # The step's scale of a site's share is that of the first step, whose samples all steps have here.
            matrices = [n / sum(samples) * g[name] + e for n, g, e in zip(samples, all_gradients, errors[name])]
            left = torch.linalg.qr(sum(m @ bases[name] for m in matrices)).Q
            right = sum(m.T @ left for m in matrices)
            torch.testing.assert_close(p.grad, left @ right.T, rtol=1e-8, atol=1e-12)
            errors[name] = [m - left @ right.T / world_size for m in matrices]
            bases[name] = right
    reduction.detach()


@pytest.mark.parametrize("count", [2, 3])
def test_powersgd_follows_its_paper_over_several_buckets(sites, count):
    sites(count).run(follows_the_paper)


def sends_the_largest() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, apart = network(torch.float64), network(torch.float64)
    reduction = dadplug.GradientReduction(model, mode="topk", density=0.05)
    samples = [6 + each for each in range(world_size)]
    weights = {name: p for name, p in model.named_parameters() if p.numel() >= 1024}
    errors = {name: [torch.zeros(p.numel(), dtype=p.dtype) for _ in samples] for name, p in weights.items()}
    for step in range(3):
        all_gradients = [gradients(apart, each, step) for each in range(world_size)]
        gradients(model, rank, step)
        reduction.synchronize()
        for name, p in weights.items():
            agreed = torch.zeros(p.numel(), dtype=p.dtype)
            for site, n in enumerate(samples):
                errors[name][site] += n / sum(samples) * all_gradients[site][name].view(-1)
                chosen = errors[name][site].abs().topk(math.ceil(0.05 * p.numel())).indices
                agreed[chosen] += errors[name][site][chosen]
                errors[name][site][chosen] = 0
            torch.testing.assert_close(p.grad.view(-1), agreed, rtol=1e-9, atol=1e-12)
    assert reduction.traffic.bytes_sent < 0.1 * reduction.traffic.dense_bytes + 3000
    reduction.detach()


def test_topk_sends_the_largest_and_keeps_the_rest(sites):
    sites(2).run(sends_the_largest)


def trains(options: dict, steps: int, state: list | None, save: bool) -> tuple:
    model = network()
    reduction = dadplug.GradientReduction(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if state is not None:
        model.load_state_dict(state[0])
        reduction.load_states(state[1])
        first = state[2]
    for step in range(first, steps):
        gradients(model, dist.get_rank(), step, samples=(4 + (step + dist.get_rank()) % 3))
        reduction.synchronize()
        optimizer.step()
    assert reduction.first_difference() is None
    states = [model.state_dict(), reduction.gather_objects(reduction.state_dict()), steps] if save else None
    reduction.detach()
    return [p.detach().clone() for p in model.parameters()], states


@pytest.mark.parametrize("options", LOSSY, ids=name_of)
def test_replicas_stay_equal_and_resume_on_the_same_curve(sites, options):
    whole, _ = sites(2).run(trains, options, 8, None, False)[0]
    _, states = sites(2).run(trains, options, 5, None, True)[0]
    resumed, _ = sites(2).run(trains, options, 8, states, False)[0]
    for a, b in zip(whole, resumed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def resumes_with_one_site_more(options: dict, states: list) -> None:
    trains(options, 8, states, False)


@pytest.mark.parametrize("options", LOSSY[::3], ids=name_of)
def test_a_new_site_takes_part_after_a_resume(sites, options):
    _, states = sites(2).run(trains, options, 5, None, True)[0]
    sites(3).run(resumes_with_one_site_more, options, states)


def loads_in_mid_training(options: dict) -> None:
    model = network()
    reduction = dadplug.GradientReduction(model, **options)
    for step in range(3):
        gradients(model, dist.get_rank(), step)
        reduction.synchronize()
    state = reduction.state_dict()
    for step in range(2):
        gradients(model, dist.get_rank(), step)
        reduction.synchronize()
    reduction.load_state_dict(state)
    gradients(model, dist.get_rank(), 3)
    reduction.synchronize()
    assert reduction.first_difference() is None
    reduction.detach()


@pytest.mark.parametrize("mode", ["powersgd", "topk", "rankdad"])
def test_a_state_may_be_loaded_in_mid_training(sites, mode):
    sites(2).run(loads_in_mid_training, {"mode": mode})


def survives_nan(options: dict) -> None:
    model = network()
    reduction = dadplug.GradientReduction(model, **options)
    for step in range(6):
        model.zero_grad()
        inputs = batch(dist.get_rank(), step)
        if step in (0, 3) and dist.get_rank() == 1:
            inputs[2, 5] = math.nan
        model(inputs).square().mean().backward()
        if step in (0, 3):
            with pytest.raises(NonFiniteError, match="site 1"):
                reduction.synchronize()
        else:
            reduction.synchronize()
            assert all(p.grad.isfinite().all() for p in model.parameters())
    assert reduction.first_difference() is None
    reduction.detach()


@pytest.mark.parametrize("options", LOSSY, ids=name_of)
def test_nan_is_reported_and_forgotten(sites, options):
    sites(2).run(survives_nan, options)
