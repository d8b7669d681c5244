"""Lightning's strategy: the same training as DDP's by exact modes, whatever the module and the trainer's settings."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

pl = pytest.importorskip("pytorch_lightning")

import lightning_zoo as zoo  # noqa: E402
from dadplug.runners import DADStrategy  # noqa: E402

from dadplug.model_sync.samples import takes_part  # noqa: E402

MODES = ("dsgd", "dad", "rankdad")


def trainer(strategy, **settings):
    warnings.filterwarnings("ignore")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    settings = {"enable_checkpointing": False, "max_epochs": 2, "precision": "64-true"} | quiet | settings
    if strategy == "ddp":  # Lightning's own way to know of processes that others have started
        os.environ.update(NODE_RANK=os.environ["RANK"], LOCAL_RANK="0")
        strategy, settings["num_nodes"] = "ddp_find_unused_parameters_true", 2
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, **settings)


def fit(name: str, mode: str, settings: dict, options: dict):
    torch.manual_seed(0)
    module = zoo.ZOO[name]()
    double = settings.get("precision", "64-true") == "64-true"
    strategy = "ddp" if mode == "ddp" else DADStrategy(mode, **options)
    current = trainer(strategy, **settings)
    dtype = torch.float64 if double else torch.float32
    current.fit(module.to(dtype), zoo.loader(dtype=dtype), zoo.loader(24, seed=1, dtype=dtype, shuffle=False))
    return module, current


def equals_ddp(name: str, mode: str, settings: dict, options: dict, rel: float) -> None:
    reference, ddp = fit(name, "ddp", settings, {})
    module, ours = fit(name, mode, settings, options)
    assert ours.global_step == ddp.global_step > 0
    for (path, expected), parameter in zip(reference.named_parameters(), module.parameters(), strict=True):
        assert torch.allclose(parameter, expected, rtol=rel, atol=rel), path
    for metric, value in ddp.callback_metrics.items():
        if metric.startswith("valid") and list(module.buffers()):
            continue  # DDP validates with each site's own running statistics
        assert float(ours.callback_metrics[metric]) == pytest.approx(float(value), rel=max(rel, 1e-4)), metric
    assert ours.strategy.reduction.first_difference() is None


@pytest.mark.parametrize("name", zoo.ZOO)
@pytest.mark.parametrize("mode", ["dsgd", "dad"])
def test_exact_modes_equal_ddp(sites, mode, name):
    sites(2).run(equals_ddp, name, mode, {}, {}, 1e-5)


SETTINGS = {
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "both": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "few steps": {"max_steps": 3, "limit_train_batches": 2},
    "single": {"precision": "32-true"},
}


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("mode", ["dsgd", "dad"])
def test_exact_modes_equal_ddp_with_settings_of_the_trainer(sites, mode, case):
    sites(2).run(equals_ddp, "Plain", mode, SETTINGS[case], {}, 1e-5)


AUTOMATIC = [name for name in zoo.ZOO if not name.startswith("Two")]


@pytest.mark.parametrize("name", AUTOMATIC)
@pytest.mark.parametrize("mode", ["dsgd", "dad"])
def test_every_module_accumulates_and_clips_as_ddp_does(sites, mode, name):
    sites(2).run(equals_ddp, name, mode, SETTINGS["both"] | {"max_epochs": 1}, {}, 1e-5)


# DDP rounds weight gradients to bf16, dad does not.
@pytest.mark.parametrize(
    ("mode", "name", "rel"), [("dsgd", "Plain", 1e-5), ("dsgd", "Metrics", 1e-5), ("dad", "Plain", 2e-2)]
)
def test_exact_modes_equal_ddp_in_bf16(sites, mode, name, rel):
    sites(2).run(equals_ddp, name, mode, {"precision": "bf16-mixed", "max_epochs": 1}, {}, rel)


def learns(name: str, settings: dict) -> tuple[float, float]:
    torch.manual_seed(0)
    before = zoo.ZOO[name]().to(torch.float64)
    module, current = fit(name, "rankdad", settings, {"rank": 2})
    assert current.strategy.reduction.first_difference() is None
    batch = next(iter(zoo.loader(64, 64)))
    return tuple(float(zoo.cross_entropy(each.eval()(batch[0]), batch[1])) for each in (before, module.double()))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_rankdad_trains_every_module(sites, name):
    for before, after in sites(2).run(learns, name, {"max_epochs": 6}):
        assert after < before


@pytest.mark.parametrize("case", SETTINGS)
def test_rankdad_trains_with_settings_of_the_trainer(sites, case):
    for before, after in sites(2).run(learns, "Plain", SETTINGS[case]):
        assert after < before


class Losses(pl.Callback):
    """Remembers the loss of every batch."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def resumes(folder: str, mode: str) -> None:
    checkpoints = {"enable_checkpointing": True, "accumulate_grad_batches": 2}

    def run(epochs: int, resume=None):
        pl.seed_everything(0)
        losses = Losses()
        saver = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        current = trainer(
            DADStrategy(mode, rank=2, iterations=1), max_epochs=epochs, callbacks=[losses, saver], **checkpoints
        )
        module = zoo.Metrics().double()
        data = zoo.loader(60, shuffle=False)
        current.fit(module, data, zoo.loader(24, seed=1, shuffle=False), ckpt_path=resume)
        return losses.losses, module

    whole, expected = run(4)
    half, _ = run(2)
    rest, module = run(4, f"{folder}/epoch=1.ckpt")
    assert half + rest == whole
    for parameter, other in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_goes_on_along_the_same_curve(sites, tmp_path, mode):
    sites(2).run(resumes, str(tmp_path), mode)


def evaluates_and_fits_again() -> None:
    module = zoo.Metrics().double()
    data, held_out = zoo.loader(40), zoo.loader(24, seed=1, shuffle=False)
    current = trainer(DADStrategy("dad"))
    assert current.validate(module, held_out, verbose=False)[0].keys() == {"valid_accuracy"}
    current.test(module, held_out, verbose=False)
    assert len(current.predict(module, held_out)) == 2
    assert current.strategy.reduction is None
    current.fit(module, data, held_out)
    first = current.global_step
    current.test(module, held_out, verbose=False)
    current.fit_loop.max_epochs = 4
    current.fit(module, data, held_out)
    assert current.global_step == 2 * first
    assert current.strategy.reduction.first_difference() is None
    assert current.strategy.reduction.traffic.total_bytes_sent > 0


def test_evaluation_needs_no_fit_and_fit_can_follow_fit(sites):
    sites(2).run(evaluates_and_fits_again)


class Whole(zoo.Plain):
    """Takes a step over all batches of an epoch, by plain gradient descent."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def uneven(rows: list[int], mode: str, accumulate: int) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    module = Whole().double()
    reference = zoo.Plain().double()
    reference.load_state_dict(module.state_dict())
    shares = [zoo.loader(count, 4, seed=site, shuffle=False) for site, count in enumerate(rows)]
    current = trainer(
        DADStrategy(mode), max_epochs=1, use_distributed_sampler=False, accumulate_grad_batches=accumulate
    )
    current.fit(module, shares[rank])
    steps = max(len(share) for share in shares)
    assert current.global_step == -(-steps // accumulate)
    if accumulate > 1:
        assert current.strategy.reduction.first_difference() is None
        return
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    waiting = [list(share) for share in shares]
    for step in range(steps):
        now = [own.pop(0) for own, share in zip(waiting, shares) if takes_part(step, len(share), steps)]
        inputs, targets = (torch.cat(parts) for parts in zip(*now, strict=True))
        optimizer.zero_grad()
        zoo.cross_entropy(reference(inputs), targets).backward()
        optimizer.step()
    assert not any(waiting)
    for parameter, other in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(parameter, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", ["dsgd", "dad"])
def test_sites_with_different_numbers_of_batches_train_on_all_rows_once(sites, mode, accumulate):
    sites(2).run(uneven, [29, 11], mode, accumulate)


def synchronises_batchnorm(by_trainer: bool) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    module, reference = zoo.Metrics().double(), zoo.Metrics().double()
    reference.load_state_dict(module.state_dict())
    own = {"sync_batchnorm": True}
    settings = own if by_trainer else {}
    current = trainer(
        DADStrategy("dad", **({} if by_trainer else own)), max_epochs=1, use_distributed_sampler=False, **settings
    )
    shares = [zoo.loader(24, 6, seed=site, shuffle=False) for site in range(2)]
    current.fit(module, shares[rank])
    optimizer = reference.configure_optimizers()
    for pair in zip(*shares, strict=True):
        inputs, targets = (torch.cat(parts) for parts in zip(*pair, strict=True))
        optimizer.zero_grad()
        zoo.cross_entropy(reference(inputs), targets).backward()
        optimizer.step()
    named = dict(module.named_parameters()) | dict(module.named_buffers())
    for name in ("net.1.running_mean", "net.1.weight", "net.3.weight"):
        expected = reference.get_parameter(name) if "weight" in name else reference.get_buffer(name)
        assert torch.allclose(named[name], expected, rtol=1e-6, atol=1e-8), name


@pytest.mark.parametrize("by_trainer", [True, False])
def test_batchnorm_can_be_synchronised(sites, by_trainer):
    sites(2).run(synchronises_batchnorm, by_trainer)


def stops_early() -> list[int]:
    stopper = pl.callbacks.EarlyStopping("valid", patience=1, min_delta=10.0)
    torch.manual_seed(0)
    current = trainer(DADStrategy("rankdad"), max_epochs=20, callbacks=[stopper])
    current.fit(zoo.Plain().double(), zoo.loader(), zoo.loader(24, seed=1, shuffle=False))
    return current.current_epoch


def test_early_stopping_stops_all_sites(sites):
    first, second = sites(2).run(stops_early)
    assert first == second < 20
