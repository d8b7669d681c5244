"""Rows of large tables: int8 with the defaults of rankdad, and what rounding takes from them is kept by row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from torch import Tensor, nn

import dadplug

ROWS, WIDTH = 5000, 64  # more than the 2**18 numbers from which a table is large
COUNTS = [(6, 2), (3, 8), (5, 5)]  # samples by step and site, in turn


def network(sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse), nn.Tanh(), nn.Linear(WIDTH, 3))


def numbers(step: int, site: int, part: int, rows: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * site + part)
    return torch.randint(rows, (COUNTS[step % 3][site], 7), generator=generator)


def memory_of(reduction: dadplug.GradientReduction) -> Tensor:
    """Return what all sites keep of the table, by its rows."""
    whole = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    state = reduction.state_dict()["method"]["tables"]
    if state:
        found, rows, height = state["0.weight"]
        assert height == ROWS
        assert len(found) <= 40  # no more than have been looked up
        whole[found] = rows.double()
    dist.all_reduce(whole)
    return whole


def backward(reduction: dadplug.GradientReduction, model: nn.Module, step: int, parts: int, scale: float) -> Tensor:
    """Train a step in parts; return the mean gradient of the table that one process would have."""
    rank, alone, true = dist.get_rank(), copy.deepcopy(model).double(), torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    model.zero_grad()
    with reduction.loss_scale(scale):
        for part in range(parts):
            (scale * model(numbers(step, rank, part)).square().mean()).backward()
    reduction.synchronize()
    for site, count in enumerate(COUNTS[step % 3]):
        alone.zero_grad()
        for part in range(parts):
            alone(numbers(step, site, part)).square().mean().backward()
        true += alone[0].weight.grad.to_dense() * count / sum(COUNTS[step % 3])
    return true


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 64.0])
@support.at_sites(2)
def test_what_rounding_takes_from_rows_is_kept(parts: int, scale: float) -> None:
    model = network()
    reduction = dadplug.GradientReduction(model, mode="rankdad", weighting="samples")
    true, agreed = torch.zeros(2, ROWS, WIDTH, dtype=torch.float64)
    for step in range(7):
        true += backward(reduction, model, step, parts, scale)
        agreed += model[0].weight.grad / scale
    lost = off_by(agreed, true)
    assert 1e-4 < lost < 0.02
    assert off_by(agreed + memory_of(reduction), true) < 1e-6
    assert reduction.first_difference() is None


@pytest.mark.parametrize(
    ("options", "sparse"),
    [({"rank": 8}, False), ({"wire": "fp32"}, False), ({}, True), ({"error_feedback": False}, False)],
)
@support.at_sites(2)
def test_rows_are_exact_unless_a_large_dense_table_has_the_defaults(options: dict[str, Any], sparse: bool) -> None:
    model = network(sparse)
    reduction = dadplug.GradientReduction(model, mode="rankdad", weighting="samples", **options)
    true = backward(reduction, model, 0, 1, 1.0)
    rounded = "error_feedback" in options
    assert (off_by(model[0].weight.grad.to_dense(), true) > 1e-4) == rounded
    assert not memory_of(reduction).any()


@support.at_sites(2)
def test_a_step_that_does_not_count_leaves_the_memory() -> None:
    model = network()
    reduction = dadplug.GradientReduction(model, mode="rankdad", weighting="samples")
    backward(reduction, model, 0, 1, 1.0)
    before = memory_of(reduction)
    assert before.any()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(dadplug.NonFiniteError):
        backward(reduction, model, 1, 1, 1.0)
    assert memory_of(reduction).equal(before)


@support.at_sites(2)
def test_a_resumed_run_continues_with_the_memory() -> None:
    model = network()
    reduction = dadplug.GradientReduction(model, mode="rankdad", weighting="samples")
    backward(reduction, model, 0, 1, 1.0)
    state, again = reduction.state_dict(), copy.deepcopy(network())
    backward(reduction, model, 1, 1, 1.0)
    reduction.detach()
    resumed = dadplug.GradientReduction(again, mode="rankdad", weighting="samples")
    resumed.load_state_dict(state)
    backward(resumed, again, 1, 1, 1.0)
    assert again[0].weight.grad.equal(model[0].weight.grad)
    assert memory_of(resumed).any()
