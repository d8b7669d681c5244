"""What lossy methods keep: all that is applied and kept is the sum of the mean gradients, whatever the shares are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from torch import Tensor, nn

import dadplug

SITES, STEPS, WIDTH = 3, 7, 32
METHODS: list[dict[str, Any]] = [
    {"mode": "topk", "density": 0.2},
    {"mode": "topk", "density": 0.2, "wire": "bf16"},
    {"mode": "powersgd", "rank": 8},
    {"mode": "powersgd", "rank": 8, "wire": "int8"},
    {"mode": "rankdad", "rank": 8, "error_feedback": True},
    {"mode": "rankdad", "rank": 8, "error_feedback": True, "wire": "int8"},
    {"mode": "rankdad", "rank": 8},
    {"mode": "rankdad", "rank": 8, "wire": "int8"},
    {"mode": "rankdad", "rank": 8, "error_feedback": True, "merge": "owner"},
    {"mode": "dsgd", "wire": "int8"},
]
SHARES: dict[str, tuple[str, list[list[int]]]] = {  # weighting; rows by step and site, in turn, 0 for an idle site
    "in turn": ("samples", [[16, 4, 9], [4, 9, 16], [9, 16, 4]]),
    "small batches": ("samples", [[16, 4, 9], [2, 1, 1], [3, 9, 16]]),
    "idle by samples": ("samples", [[16, 4, 9], [0, 9, 4], [9, 0, 0]]),
    "idle": ("uniform", [[4, 4, 4], [0, 4, 4], [4, 0, 0], [0, 4, 0]]),
    "frozen": ("uniform", [[4, 4, 4]]),  # a layer for some steps
}
FROZEN = range(4, 6)
QUIET = dict.fromkeys(SHARES, 24) | {"small batches": 45}  # steps at the end, until what is kept has been sent


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def rows(step: int, site: int, part: int, count: int) -> Tensor:
    seed = 100 * step + 10 * site + part
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sum_of(options: dict[str, Any], shares: str, accumulates: bool) -> float:
    """Return the distance of all that is applied from the sum of the mean gradients, after quiet steps at the end."""
    weighting, table = SHARES[shares]
    rank, model, alone = dist.get_rank(), network(), network()
    reduction = dadplug.GradientReduction(model, weighting=weighting, **options)
    applied, true = ([torch.zeros_like(each) for each in model.parameters()] for _ in range(2))
    for step in range(STEPS + QUIET[shares]):
        counts, scale = table[step % len(table)], float(step < STEPS)
        frozen = shares == "frozen" and step in FROZEN
        model[2].requires_grad_(not frozen)
        model.zero_grad()
        for part in range(1 + accumulates if counts[rank] else 0):
            with reduction.no_sync() if part < accumulates else nullcontext():
                (scale * model(rows(step, rank, part, counts[rank])).square().mean()).backward()
        if counts[rank]:
            reduction.synchronize()
        else:
            reduction.idle()
        weights = [float(count if weighting == "samples" else count > 0) for count in counts]
        for site in [site for site in range(SITES) if counts[site] and scale]:
            alone.zero_grad()
            for part in range(1 + accumulates):
                alone(rows(step, site, part, counts[site])).square().mean().backward()
            for total, each in zip(true, alone[0 : 2 if frozen else 3].parameters(), strict=False):
                total += weights[site] / sum(weights) * each.grad
        for total, each in zip(applied, model.parameters(), strict=True):
            total += 0 if each.grad is None else each.grad
    assert reduction.first_difference() is None
    reduction.detach()
    assert min(float(each.norm()) for each in true) > 0.01
    return max(off_by(one, other) for one, other in zip(applied, true, strict=True))


@pytest.mark.parametrize("options", METHODS, ids=lambda options: "-".join(map(str, options.values())))
@support.at_sites(SITES)
def test_what_is_kept_is_neither_lost_nor_multiplied(options: dict[str, Any]) -> None:
    found = {shares: sum_of(options, shares, shares in ("in turn", "idle")) for shares in SHARES}
    keeps_rows = options["mode"] == "rankdad" and "error_feedback" not in options  # a number of them, not all
    assert max(found.values()) < (0.1 if keeps_rows else 3e-2 if "wire" in options else 1e-3), found


@support.at_sites(SITES)
def test_without_a_memory_what_is_kept_back_is_lost() -> None:
    for options in ({"mode": "powersgd", "rank": 2}, {"mode": "topk", "density": 0.1}, {"mode": "rankdad", "rank": 3}):
        assert sum_of({**options, "error_feedback": False}, "in turn", False) > 0.1
