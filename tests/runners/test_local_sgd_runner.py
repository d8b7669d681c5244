"""Catalyst's runner for local steps: equal models after each training loader, checkpoints, sites of unequal size."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

pytest.importorskip("catalyst")
from catalyst import dl
from catalyst.core.callback import Callback, CallbackOrder
from catalyst_training import data, net, run
from dadplug.runners import LocalSGDRunner


class Differences(Callback):
    """Remembers, after each training loader, whether the sites' parameters differ."""

    def __init__(self):
        super().__init__(order=100)
        self.found = []

    def on_loader_end(self, runner):
        if not runner.is_train_loader:
            self.found.append(runner.reduction.first_difference())


def uneven() -> None:
    rank = dist.get_rank()
    for options in ({"wire": "int8", "rank": 4, "warm_up": 3}, {"outer_lr": 0.7, "outer_momentum": 0.9}):
        model, watch = net(rank), Differences()
        loaders = {"train": DataLoader(data(70 - 30 * rank, rank), 8), "valid": DataLoader(data(30, 9), 8)}
        runner = LocalSGDRunner(every=3, split_data=False, **options)
        run(runner, model, torch.optim.Adam(model.parameters(), lr=0.01), [watch], loaders, epochs=3)
        assert watch.found == [None] * 3
        assert runner.reduction.steps == 3 * 9
        assert runner.loader_metrics["loss"] < 1.3
    with pytest.raises(ValueError, match="wire"):
        LocalSGDRunner(wire="fp4")


def test_sites_of_unequal_size_hold_one_model_after_each_training_loader(sites):
    sites(2).run(uneven)


class Formed(Callback):
    """Counts the steps after which a gradient of a matrix has been formed, before it is cleared."""

    def __init__(self):
        super().__init__(order=CallbackOrder.Internal)
        self.steps = 0

    def on_batch_start(self, runner):
        optimizer, plain = runner.optimizer, type(runner.optimizer).zero_grad

        def zero_grad(*_, **__):
            self.steps += any(type(p.grad) is torch.Tensor for p in runner.model.parameters() if p.dim() == 2)
            plain(optimizer, set_to_none=True)  # accelerate 0.27 keeps zeros else, to which gradients are added

        optimizer.zero_grad = zero_grad


def fuses() -> None:
    """Fused steps are the ordinary ones, with clipping and accumulation."""
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=0.1)
    cases = [
        lambda: [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss", accumulation_steps=2)],
        lambda: [dl.BackwardCallback("loss", grad_clip_fn=clip), dl.OptimizerCallback("loss")],
        lambda: [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss"), Callback(order=CallbackOrder.Backward)],
    ]
    for make in cases:
        models, watches = [net().double(), net().double()], [Formed(), Formed()]
        for model, watch, fused in zip(models, watches, (False, True)):
            torch.manual_seed(0)
            loaders = {"train": DataLoader(data(), batch_size=8, collate_fn=doubles)}
            runner = LocalSGDRunner(every=3, rank=2, wire="int8", fused=fused)
            run(runner, model, torch.optim.Adam(model.parameters(), 0.01), [*make(), watch], loaders, epochs=2)
        for one, other in zip(models[0].parameters(), models[1].parameters()):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
        remark = "fused steps: yes" if len(make()) == 2 else "fused steps: no, Callback may read the gradients"
        assert runner.reduction.remarks == (remark,)
        assert watches[0].steps > 0
        assert watches[1].steps == (0 if len(make()) == 2 else watches[0].steps)


def doubles(rows):
    inputs, targets = default_collate(rows)
    return inputs.double(), targets


def test_steps_may_be_fused(sites):
    sites(2).run(fuses)
