"""Lightning's strategy for local steps: DDP's training where it must be equal, and one model at every evaluation."""

from __future__ import annotations

import os

import pytest
import torch

pl = pytest.importorskip("pytorch_lightning")

import lightning_zoo as zoo  # noqa: E402
from dadplug.runners import LocalSGDStrategy  # noqa: E402


class Differences(pl.Callback):
    """Remembers, at each evaluation, whether the sites' parameters differ."""

    def __init__(self):
        self.found = []

    def on_validation_epoch_start(self, trainer, pl_module):
        self.found.append(trainer.strategy.local.first_difference())


def trains_all() -> None:
    for name in zoo.AUTOMATIC:
        watch = Differences()
        options = {"every": 3, "rank": 2, "wire": "int8", "outer_lr": 0.7, "outer_momentum": 0.5, "warm_up": 2}
        settings = {"callbacks": [watch], "max_epochs": 3, "num_sanity_val_steps": 1}
        _, current = zoo.fit(name, LocalSGDStrategy(**options), gradient_clip_val=1.0, **settings)
        assert watch.found == [None] * 4, name
        assert current.strategy.local.first_difference() is None
        assert current.strategy.local.agreements >= 3
        assert current.strategy.local.steps == current.global_step


def test_every_module_with_one_optimizer_trains(sites):
    sites(2).run(trains_all)


def uneven() -> None:
    """A site with fewer batches skips steps; the sites stay at one step, and hold one model."""
    data = zoo.loader(64 if os.environ["RANK"] == "0" else 24, shuffle=False)
    for options in ({}, {"sync_batchnorm": True, "overlap": False}):
        watch = Differences()
        for accumulate in (1, 2):
            settings = {"callbacks": [watch], "use_distributed_sampler": False, "accumulate_grad_batches": accumulate}
            _, current = zoo.fit("Metrics", LocalSGDStrategy(every=3, **options), data, **settings)
            local = current.strategy.local
            assert set(local.gather_objects(local.steps)) == {current.global_step}
        assert set(watch.found) == {None}


def test_sites_may_have_different_numbers_of_batches(sites):
    sites(2).run(uneven)


class Formed(pl.Callback):
    """Counts the steps after which a gradient of a matrix has been formed."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += any(type(p.grad) is torch.Tensor for p in pl_module.parameters() if p.dim() == 2)


class Reads(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        assert all(type(p.grad) is torch.Tensor for p in pl_module.parameters() if p.grad is not None)


def fuses() -> None:
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


def test_steps_may_be_fused(sites):
    sites(2).run(fuses)


def names() -> None:
    current = zoo.trainer("diloco")
    assert type(current.strategy).__name__ == "LocalSGDStrategy"
    assert (current.strategy.local_options.outer_lr, current.strategy.local_options.outer_momentum) == (0.7, 0.9)
    assert zoo.trainer("localsgd").strategy.local_options.outer_lr == 1.0
    zoo.fit("Plain", "localsgd", max_epochs=1)
    with pytest.raises(ValueError, match="every must be"):
        LocalSGDStrategy(every=0)
    with pytest.raises(ValueError, match="unknown option 'outer'"):
        LocalSGDStrategy(outer=1)
    with pytest.raises(ValueError, match="one optimizer"):
        zoo.fit("TwoOptimizers", "localsgd")


def test_names_and_errors(sites):
    sites(2).run(names)
