"""Mode auto: the choice between factors and the all-reduce, equal on all sites, and joining at the end."""

import pytest
import support
import torch
import torch.distributed as dist
from torch import nn

import dadplug
from dadplug.step.planning.merging import LinkCosts, measure_link


def wide_and_long():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 6))


def paths(reduction):
    return {row.parameter: row.path for row in reduction.plan}


def step(reduction, model, samples, seed=0):
    generator = torch.Generator().manual_seed(seed * 10 + dist.get_rank())
    model.zero_grad()
    model(torch.randn(samples, 300, generator=generator)).square().mean().backward()
    reduction.synchronize()


def with_link(reduction, slow: bool):
    """Give a reduction a link that all sites believe in: bytes cost, or computing does."""
    reduction._planner._link = LinkCosts(1e-4, 1e-6, 1e-6, 0.0) if slow else LinkCosts(0.0, 0.0, 0.0, 1e-9)
    return reduction


def chooses() -> None:
    model = wide_and_long()
    reduction = with_link(dadplug.GradientReduction(model, mode="auto"), slow=True)
    for seed in range(3):
        step(reduction, model, samples=8 + dist.get_rank(), seed=seed)
    assert list(paths(reduction).values()) == ["factors", "factors", "allreduce", "allreduce"]
    assert "ms by factors" in str(reduction.plan)
    assert reduction.first_difference() is None
    for seed in range(12):  # batches grow: after some steps rows cost more than gradients
        step(reduction, model, samples=400, seed=seed)
    assert set(paths(reduction).values()) == {"allreduce"}
    for seed in range(12):  # and shrink
        step(reduction, model, samples=4, seed=seed)
    assert paths(reduction)["0.weight"] == "factors"
    assert reduction.first_difference() is None


@pytest.mark.parametrize("count", [2, 3])
def test_the_choice_follows_the_rows_equally_on_all_sites(sites, count):
    sites(count).run(chooses)


@support.at_sites(2)
def test_on_a_link_without_cost_nobody_computes_for_others() -> None:
    model = wide_and_long()
    reduction = with_link(dadplug.GradientReduction(model, mode="auto"), slow=False)
    step(reduction, model, samples=8)
    assert set(paths(reduction).values()) == {"allreduce"}


@support.at_sites(2)
def test_the_link_is_measured() -> None:
    model = wide_and_long()
    reduction = dadplug.GradientReduction(model, mode="auto")
    before = reduction.traffic.steps
    link = measure_link(reduction._transport)
    assert reduction.traffic.steps == before
    assert 0 < link.latency < 1
    assert 0 <= link.gather < 1e-5
    assert 0 <= link.reduce < 1e-5
    assert 0 < link.multiply < 1e-6


def joins(mode: str) -> list:
    rank, model = dist.get_rank(), wide_and_long()
    reduction = dadplug.GradientReduction(model, mode=mode, rank=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for seed in range(3 + 2 * rank):
        step(reduction, model, samples=5, seed=seed)
        optimizer.step()
    reduction.join(optimizer.step)
    assert reduction.first_difference() is None
    steps = reduction.step
    return [steps, [p.detach() for p in model.parameters()]]


@pytest.mark.parametrize("mode", ["dad", "auto", "rankdad", "powersgd"])
def test_a_site_that_is_done_joins_the_others(sites, mode):
    first, second, third = sites(3).run(joins, mode)
    assert first[0] == second[0] == third[0] == 8  # seven with data somewhere, and one that says there is no more
    for a, b in zip(first[1], third[1], strict=True):
        assert torch.equal(a, b)
