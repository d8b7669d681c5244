"""`dadplug.accelerate`: what scripts of Accelerate do, held against one process with all rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from comparison import off_by
from torch import nn

accelerate = pytest.importorskip("accelerate")

import dadplug  # noqa: E402
import dadplug.accelerate  # noqa: E402


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def fresh() -> None:
    """Forget the state that accelerate shares between the accelerators of a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def uses() -> None:
    fresh()
    rank, alone = dist.get_rank(), build()
    accelerator = accelerate.Accelerator(cpu=True)
    dadplug.accelerate.use(accelerator, "dad")
    model = accelerator.prepare(build())
    assert isinstance(model, dadplug.DistributedDataParallel)
    assert isinstance(accelerator, accelerate.Accelerator)
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with accelerator.no_sync(model):
        accelerator.backward(model(rows[rank:4:2]).square().mean())
    accelerator.backward(model(rows[4 + rank :: 2]).square().mean())
    alone(rows[:4]).square().mean().backward()
    alone(rows[4:]).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert off_by(p.grad, q.grad) < 1e-10
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is model.module
    model.reduction.detach()


def test_an_accelerator_that_exists_uses_a_mode(sites):
    sites(2).run(uses)
