"""Lightning's strategy for local steps: DDP's training where it must be equal, and one model at every evaluation."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

pl = pytest.importorskip("pytorch_lightning")

import lightning_zoo as zoo  # noqa: E402
from dadplug.runners import LocalSGDStrategy  # noqa: E402


def trainer(strategy, **settings):
    warnings.filterwarnings("ignore")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"enable_checkpointing": False, "max_epochs": 2, "precision": "64-true"} | quiet | settings
    if strategy == "ddp":
        os.environ.update(NODE_RANK=os.environ["RANK"], LOCAL_RANK="0")
        strategy, settings["num_nodes"] = "ddp_find_unused_parameters_true", 2
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, **settings)


class Differences(pl.Callback):
    """Remembers, at each evaluation, whether the sites' parameters differ, and the losses of training."""

    def __init__(self):
        self.found, self.losses = [], []

    def on_validation_epoch_start(self, trainer, pl_module):
        self.found.append(trainer.strategy.local.first_difference())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def fit(name: str, strategy, data=None, resume=None, **settings):
    torch.manual_seed(0)
    module = zoo.ZOO[name]().double()
    current = trainer(strategy, **settings)
    current.fit(module, data or zoo.loader(), zoo.loader(24, seed=1, shuffle=False), ckpt_path=resume)
    return module, current


def equals_ddp() -> None:
    """With SGD with momentum, the mean of parameters after every step is DDP's step."""
    for settings in ({}, {"accumulate_grad_batches": 2}):
        expected, ddp = fit("Children", "ddp", **settings)
        module, ours = fit("Children", LocalSGDStrategy(every=1, overlap=False), **settings)
        assert ours.global_step == ddp.global_step == ours.strategy.local.steps
        for parameter, other in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(parameter, other, rtol=1e-9, atol=1e-9)
        assert float(ours.callback_metrics["valid"]) == pytest.approx(float(ddp.callback_metrics["valid"]))


def test_an_agreement_after_every_step_of_sgd_is_ddp(sites):
    sites(2).run(equals_ddp)


def trains_all() -> None:
    for name in [name for name in zoo.ZOO if not name.startswith("Two")]:
        watch = Differences()
        options = {"every": 3, "rank": 2, "wire": "int8", "outer_lr": 0.7, "outer_momentum": 0.5, "warm_up": 2}
        settings = {"callbacks": [watch], "max_epochs": 3, "num_sanity_val_steps": 1}
        _, current = fit(name, LocalSGDStrategy(**options), gradient_clip_val=1.0, **settings)
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
            _, current = fit("Metrics", LocalSGDStrategy(every=3, **options), data, **settings)
            local = current.strategy.local
            assert set(local.gather_objects(local.steps)) == {current.global_step}
        assert set(watch.found) == {None}


def test_sites_may_have_different_numbers_of_batches(sites):
    sites(2).run(uneven)


def resumes(folder: str) -> None:
    def run(epochs: int, resume=None):
        pl.seed_everything(0)
        watch = Differences()
        saver = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        strategy = LocalSGDStrategy(every=3, rank=2, wire="int8", outer_lr=0.7, outer_momentum=0.9)
        settings = {"max_epochs": epochs, "callbacks": [watch, saver], "enable_checkpointing": True}
        module, _ = fit("Metrics", strategy, zoo.loader(60, shuffle=False), resume, **settings)
        return watch.losses, module

    whole, expected = run(4)
    half, _ = run(2)
    rest, module = run(4, f"{folder}/epoch=1.ckpt")
    assert half + rest == whole
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), expected.parameters(), strict=True))


def test_a_resumed_run_goes_on_along_the_same_curve(sites, tmp_path):
    sites(2).run(resumes, str(tmp_path))


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
        expected, _ = fit("Plain", LocalSGDStrategy(**options, **more), **settings)
        watch = Formed()
        settings = settings | {"callbacks": [watch, *settings.get("callbacks", ())]}
        module, current = fit("Plain", LocalSGDStrategy(fused=True, **options, **more), **settings)
        local = current.strategy.local
        for parameter, other in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(parameter, other, rtol=1e-10, atol=1e-12), settings
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
    current = trainer("diloco")
    assert type(current.strategy).__name__ == "LocalSGDStrategy"
    assert (current.strategy.local_options.outer_lr, current.strategy.local_options.outer_momentum) == (0.7, 0.9)
    assert trainer("localsgd").strategy.local_options.outer_lr == 1.0
    fit("Plain", "localsgd", max_epochs=1)
    with pytest.raises(ValueError, match="every must be"):
        LocalSGDStrategy(every=0)
    with pytest.raises(ValueError, match="unknown option 'outer'"):
        LocalSGDStrategy(outer=1)
    with pytest.raises(ValueError, match="one optimizer"):
        fit("TwoOptimizers", "localsgd")


def test_names_and_errors(sites):
    sites(2).run(names)
