"""Local steps in Lightning and Catalyst: one model at every evaluation, checkpoints, sites of unequal size."""

import os
from functools import partial

import lightning_zoo as zoo
import pytest
import pytorch_lightning as pl
import support
import torch
import torch.distributed as dist
from catalyst import dl
from catalyst.core.callback import Callback, CallbackOrder
from catalyst_training import data, net, run
from dadplug.runners import LocalSGDRunner, LocalSGDStrategy
from support import refuses
from torch.utils.data import DataLoader, default_collate


class Differences(pl.Callback):
    """Remembers, at each evaluation, whether the sites' parameters differ."""

    def __init__(self):
        self.found = []

    def on_validation_epoch_start(self, trainer, pl_module):
        self.found.append(trainer.strategy.local.first_difference())


@support.at_sites(2)
def test_every_module_with_one_optimizer_trains() -> None:
    for name in zoo.AUTOMATIC:
        watch = Differences()
        options = {"every": 3, "rank": 2, "wire": "int8", "outer_lr": 0.7, "outer_momentum": 0.5, "warm_up": 2}
        settings = {"callbacks": [watch], "max_epochs": 3, "num_sanity_val_steps": 1}
        _, current = zoo.fit(name, LocalSGDStrategy(**options), gradient_clip_val=1.0, **settings)
        assert watch.found == [None] * 4, name
        assert current.strategy.local.first_difference() is None
        assert current.strategy.local.agreements >= 3
        assert current.strategy.local.steps == current.global_step


@support.at_sites(2)
def test_sites_may_have_different_numbers_of_batches() -> None:
    """A site with fewer batches skips steps; the sites stay at one step, and hold one model."""
    data = zoo.loader(64 if os.environ["RANK"] == "0" else 24, shuffle=False)
    for options in ({}, {"sync_batchnorm": True, "overlap": False}, {"fragments": 2, "delay": 1}):
        watch = Differences()
        for accumulate in (1, 2):
            settings = {"callbacks": [watch], "use_distributed_sampler": False, "accumulate_grad_batches": accumulate}
            _, current = zoo.fit("Metrics", LocalSGDStrategy(every=3, **options), data, **settings)
            local = current.strategy.local
            assert set(local.gather_objects(local.steps)) == {current.global_step}
        assert set(watch.found) == {None}


class Formed(pl.Callback):
    """Counts the steps after which a gradient of a matrix has been formed."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += any(type(p.grad) is torch.Tensor for p in pl_module.parameters() if p.dim() == 2)


class Reads(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert all(type(p.grad) is torch.Tensor for p in pl_module.parameters() if p.grad is not None)


@support.at_sites(2)
def test_steps_may_be_fused() -> None:
    """Fused steps are the ordinary ones, with clipping, accumulation, and synchronous steps before."""
    options = {"every": 3, "rank": 2, "wire": "int8"}
    cases = [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}, {"callbacks": [Reads()]}]
    for settings, more in zip(cases, ({}, {"warm_up": 2, "warm_up_mode": "dad"}, {})):
        expected, _ = zoo.fit("Plain", LocalSGDStrategy(**options, **more), **settings)
        watch = Formed()
        settings = settings | {"callbacks": [watch, *settings.get("callbacks", ())]}
        module, current = zoo.fit("Plain", LocalSGDStrategy(fused=True, **options, **more), **settings)
        local = current.strategy.local
        zoo.assert_close(module, expected, 1e-11)
        assert local.first_difference() is None
        if len(settings["callbacks"]) > 1:
            assert local.remarks == ("fused steps: no, Reads.on_before_optimizer_step may read the gradients",)
            assert watch.steps == local.steps
        else:
            assert local.remarks == ("fused steps: yes",)
            assert watch.steps <= 2 * more.get("warm_up", 0)


@support.at_sites(2)
def test_names_and_errors() -> None:
    current = zoo.trainer("diloco")
    assert type(current.strategy).__name__ == "LocalSGDStrategy"
    assert (current.strategy.local_options.outer_lr, current.strategy.local_options.outer_momentum) == (0.7, 0.9)
    assert zoo.trainer("localsgd").strategy.local_options.outer_lr is None
    zoo.fit("Plain", "localsgd", max_epochs=1)
    refuses(
        (lambda: LocalSGDStrategy(every=0), "every must be"),
        (lambda: LocalSGDStrategy(outer=1), "unknown option 'outer'"),
        (lambda: zoo.fit("TwoOptimizers", "localsgd"), "one optimizer"),
    )


# Catalyst's runner for local steps: equal models after each training loader, checkpoints, sites of unequal size


class CatalystDifferences(Callback):
    """Remembers, after each training loader, whether the sites' parameters differ."""

    def __init__(self):
        super().__init__(order=100)
        self.found = []

    def on_loader_end(self, runner):
        if not runner.is_train_loader:
            self.found.append(runner.reduction.first_difference())


@support.at_sites(2)
def test_sites_of_unequal_size_hold_one_model_after_each_training_loader() -> None:
    rank = dist.get_rank()
    sparse = {"fragments": 2, "wire": "int2", "density": 0.2}
    for options in ({"wire": "int8", "rank": 4, "warm_up": 3}, {"outer_lr": 0.7, "outer_momentum": 0.9}, sparse):
        model, watch = net(rank), CatalystDifferences()
        loaders = {"train": DataLoader(data(70 - 30 * rank, rank), 8), "valid": DataLoader(data(30, 9), 8)}
        runner = LocalSGDRunner(every=3, split_data=False, **options)
        run(runner, model, torch.optim.Adam(model.parameters(), lr=0.01), [watch], loaders, epochs=3)
        assert watch.found == [None] * 3
        assert runner.reduction.steps == 3 * 9
        assert runner.loader_metrics["loss"] < 1.3
    with pytest.raises(ValueError, match="wire"):
        LocalSGDRunner(wire="fp4")


class CatalystFormed(Callback):
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


def doubles(rows):
    inputs, targets = default_collate(rows)
    return inputs.double(), targets


@support.at_sites(2)
def test_steps_may_be_fused_in_catalyst() -> None:
    """Fused steps are the ordinary ones, with clipping and accumulation."""
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=0.1)
    cases = [
        lambda: [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss", accumulation_steps=2)],
        lambda: [dl.BackwardCallback("loss", grad_clip_fn=clip), dl.OptimizerCallback("loss")],
        lambda: [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss"), Callback(order=CallbackOrder.Backward)],
    ]
    for make in cases:
        models, watches = [net().double(), net().double()], [CatalystFormed(), CatalystFormed()]
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
