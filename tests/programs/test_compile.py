"""`torch.compile` of a model under reduction: its layers run as they are, the rest is compiled."""

from __future__ import annotations

import copy

import pytest
import support
import torch
import torch.distributed as dist
import zoo
from torch import nn

import dadplug


@pytest.mark.parametrize("mode", ["dsgd", "dad"])
@pytest.mark.parametrize("order", ["first", "last", "wrapped", "inside"])
@support.at_sites(2)
def test_a_compiled_model_is_reduced_exactly(order: str, mode: str) -> None:
    rank = dist.get_rank()
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = nn.Embedding(300, 6), nn.Flatten(), nn.Linear(24, 8), nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 4, 1)
    reference = nn.Sequential(*layers, nn.Flatten()).double()
    model = copy.deepcopy(reference)
    if order in ("first", "inside"):
        model = torch.compile(model, backend="aot_eager")
    if order in ("wrapped", "inside"):
        wrapper = trained = dadplug.DistributedDataParallel(model, mode=mode, rank=16, weighting="samples")
        reduction = wrapper.reduction
    else:
        reduction, trained = dadplug.GradientReduction(model, mode=mode, rank=16, weighting="samples"), model
    trained = torch.compile(trained, backend="aot_eager") if order in ("last", "wrapped") else trained
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        model.zero_grad(), reference.zero_grad()
        inputs, targets = zoo.batch("words", 8, seed=step)
        mine = slice(0, 3) if rank == 0 else slice(3, 8)
        nn.functional.cross_entropy(trained(inputs[mine]), targets[mine]).backward()
        if order in ("first", "last"):
            reduction.synchronize()
        nn.functional.cross_entropy(reference(inputs), targets).backward()
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
    paths = {row.parameter: row.path for row in reduction.plan}
    assert mode == "dsgd" or "factors" in paths.values(), paths
    assert reduction.first_difference() is None
    assert reduction.step == 3
    assert order in ("first", "inside") or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert not any("Tensor.item" in reason for reason in breaks), breaks  # a warning that points to this library
    reduction.detach()
