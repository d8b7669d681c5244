"""Catalyst programs of many kinds train at two sites as in one process, or end with an error that all sites see."""

import os
import warnings
from pathlib import Path

import pytest
import support
import torch
from catalyst import dl
from catalyst.core.callback import Callback
from dadplug.runners import DistributedRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dadplug.exchange.codec import gather_objects

WIDTH, CLASSES, COUNT = 6, 3, 7
ROWS = (5, 3)  # of each batch, by site
# A rank of at least a site's rows loses nothing, so that rankdad is as exact as its compression.
MODES = {
    "dsgd": {},
    "dad": {},
    "rankdad": {"rank": 8, "tolerance": 0.0},
    "fused": {"mode": "dad", "fused": True},
}
UNFUSED = {"skipped": "SkipsBatches may read", "adversaries": "no OptimizerCallback"}  # why gradients are formed
cross_entropy = nn.functional.cross_entropy


def rank() -> int:
    return int(os.environ["RANK"])


def rows(site: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + site)
    inputs = torch.randn(COUNT * ROWS[site], WIDTH, generator=generator, dtype=torch.float64)
    return inputs, (inputs[:, :CLASSES] + 0.3 * inputs[:, CLASSES:]).argmax(1)


def loaders() -> dict[str, DataLoader]:
    return {
        name: DataLoader(TensorDataset(*rows(rank(), seed)), batch_size=ROWS[rank()])
        for seed, name in enumerate(("train", "valid"))
    }


def batches(skips: tuple[int, ...] = ()) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of all sites together; of the first alone where the second skips."""
    parts = [[part.split(ROWS[site]) for part in rows(site)] for site in range(2)]
    return [
        tuple(torch.cat([parts[site][kind][number] for site in range(1 if number in skips else 2)]) for kind in (0, 1))
        for number in range(COUNT)
    ]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, CLASSES)).double()


def confidence(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.square().mean()


class SkipsBatches(dl.BackwardCallback):
    """A callback of the user's that leaves batches out: the second at site 1, the fourth everywhere."""

    def on_loader_start(self, runner):
        self.number = -1

    def on_batch_end(self, runner):
        self.number += 1
        if self.number == 3 or (self.number == 1 and rank() == 1):
            return
        super().on_batch_end(runner)


class Adversaries(DistributedRunner):
    """Two networks and two optimizers, stepped by the runner's own batches."""

    def handle_batch(self, batch):
        real, noise = batch["features"], torch.sin(batch["features"][:, :CLASSES])
        adversarial_batch(self.model, self.optimizer, real, noise, self.is_train_loader, self.engine.backward)
        self.batch_metrics["loss"] = self.model["judge"](real).mean().detach()


def adversarial_batch(model, optimizer, real, noise, trains, backward):
    loss = nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones(len(real), 1).to(real), torch.zeros(len(real), 1).to(real)
    judge, maker = model["judge"], model["maker"]
    if not trains:
        return
    backward(loss(judge(real), ones) + loss(judge(maker(noise).detach()), zeros))
    optimizer["judge"].step()
    judge.zero_grad()
    maker.zero_grad()
    backward(loss(judge(maker(noise)), ones))
    optimizer["maker"].step()
    judge.zero_grad()
    maker.zero_grad()


def adversaries() -> nn.ModuleDict:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, WIDTH))
    judge = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    return nn.ModuleDict({"maker": maker, "judge": judge}).double()


def sgd(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; without momentum where a step has no gradient: accelerate clears to zeros or to None."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if name == "skipped" else 0.9)


def program(name: str, mode: str) -> list[torch.Tensor]:
    """Train a program at this site."""
    options = {"mode": mode, "split_data": False, "timeout": 30} | MODES[mode]
    criterion, callbacks, runner = nn.CrossEntropyLoss(), [], DistributedRunner(**{"weighting": "samples"} | options)
    if name == "adversaries":
        model = dict(adversaries().items())
        optimizer = {key: torch.optim.Adam(part.parameters(), lr=0.02) for key, part in model.items()}
        runner = Adversaries(**{"weighting": "samples"} | options)
    else:
        model = net()
        optimizer = sgd(name, model)
    if name in ("accumulation", "clipping"):
        clip = {"grad_clip_fn": nn.utils.clip_grad_norm_, "grad_clip_params": {"max_norm": 0.05}}
        callbacks = [
            dl.OptimizerCallback("loss", accumulation_steps=3, **(clip if name == "clipping" else {})),
        ]
    elif name == "criteria":
        criterion = {"ce": criterion, "confidence": confidence}
        keys = {"input_key": "logits", "target_key": "targets"}
        callbacks = [dl.CriterionCallback(**keys, metric_key=key, criterion_key=key) for key in criterion]
        callbacks.append(
            dl.MetricAggregationCallback("loss", metrics={"ce": 1.0, "confidence": 0.5}, mode="weighted_sum")
        )
        callbacks += [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")]
    elif name == "skipped":
        callbacks = [SkipsBatches("loss")]
    if name == "adversaries":
        criterion = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner.train(
            model=model,
            criterion=criterion,
            optimizer=optimizer,
            loaders=loaders(),
            callbacks=callbacks,
            num_epochs=2,
        )
    assert runner.reduction.first_difference() is None
    if mode == "fused":
        assert UNFUSED.get(name, "fused steps: yes") in runner.reduction.plan.remarks[0]
    parts = nn.ModuleDict(model) if isinstance(model, dict) else model
    return [parameter.detach().clone() for parameter in parts.parameters()]


def reference(name: str) -> list[torch.Tensor]:
    """Train the program by a plain loop on all sites' rows."""
    if name == "adversaries":
        parts = adversaries()
        optimizers = {key: torch.optim.Adam(part.parameters(), lr=0.02) for key, part in parts.items()}
        for inputs, _ in batches() * 2:
            adversarial_batch(parts, optimizers, inputs, torch.sin(inputs[:, :CLASSES]), True, torch.Tensor.backward)
        return list(parts.parameters())
    model = net()
    optimizer = sgd(name, model)
    own = batches((1,) if name == "skipped" else ())
    size = 3 if name in ("accumulation", "clipping") else 1
    for _ in range(2):
        for group in (range(COUNT)[at : at + size] for at in range(0, COUNT, size)):
            for number in group:
                logits = model(own[number][0])
                loss = cross_entropy(logits, own[number][1])
                if name == "criteria":
                    loss = loss + 0.5 * confidence(logits, own[number][1])
                if name != "skipped" or number != 3:
                    (loss / len(group)).backward()
            if name == "clipping":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("name", ["plain", "accumulation", "clipping", "criteria", "skipped", "adversaries"])
@support.at_sites(2)
def test_a_program_trains_as_in_one_process(name: str) -> None:
    expected = reference(name)
    for mode in MODES:
        rel = 1e-6 if mode == "rankdad" else 1e-9
        for p, q in zip(program(name, mode), expected, strict=True):
            assert torch.allclose(p, q, rtol=rel, atol=rel), (mode, p, q)


class TwoLosses(DistributedRunner):
    """Two losses of a batch, each with a graph of its own."""

    def handle_batch(self, batch):
        inputs, targets = batch["features"], batch["targets"]
        self.batch_metrics["loss"] = cross_entropy(self.model(inputs), targets)
        self.batch_metrics["second"] = confidence(self.model(inputs), targets)


UNEQUAL = (6, 2)  # batches of each site


def unequal_program(kind: type, way: str, mode: str) -> tuple[nn.Module, DistributedRunner]:
    model, batch = net(), ROWS[rank()]
    clip = {"grad_clip_fn": nn.utils.clip_grad_norm_, "grad_clip_params": {"max_norm": 0.05}, "log_gradient": True}
    callbacks = [dl.BackwardCallback("loss", **(clip if way != "two" else {})), dl.OptimizerCallback("loss")]
    if way != "one":
        callbacks.append(dl.BackwardCallback("second", **(clip if way != "two" else {})))
    runner = kind(**{"mode": mode, "split_data": False, "timeout": 30} | MODES[mode])
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss() if kind is DistributedRunner else None,
        optimizer=sgd(way, model),
        loaders={"train": DataLoader(TensorDataset(*(p[: UNEQUAL[rank()] * batch] for p in rows(rank()))), batch)},
        callbacks=callbacks,
    )
    return model, runner


@pytest.mark.parametrize("way", ["one", "two", "clipped twice"])
@support.at_sites(2)
def test_a_site_without_a_batch_clips_and_takes_part_in_each_exchange(way: str) -> None:
    kind = DistributedRunner if way == "one" else TwoLosses
    expected = net()
    optimizer = sgd(way, expected)
    parts = [[part.split(ROWS[site]) for part in rows(site)] for site in range(2)]
    for step in range(UNEQUAL[0]):
        second = {0: 0, UNEQUAL[0] - 1: 1}.get(step)  # spread over the epoch
        own = [(0, step)] + ([] if second is None else [(1, second)])
        batches = [[part[number] for part in parts[site]] for site, number in own]
        for loss in (cross_entropy, confidence)[: 1 if way == "one" else 2]:
            (sum(loss(expected(x), y) for x, y in batches) / len(batches)).backward()
            if way != "two":
                nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    for mode in MODES:
        model, runner = unequal_program(kind, way, mode)
        assert runner.reduction.first_difference() is None
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-6 if mode in ("rankdad", "fused") else 1e-9), mode


class Twice(DistributedRunner):
    def handle_batch(self, batch):
        self.engine.backward(self.model(batch["features"]).square().mean())  # before that of the callback
        self.batch_metrics["loss"] = cross_entropy(self.model(batch["features"]), batch["targets"])


@support.at_sites(2)
def test_several_exchanges_of_a_users_batch_need_equally_many_batches() -> None:
    model, batch = net(), ROWS[rank()]
    data = TensorDataset(*(p[: UNEQUAL[rank()] * batch] for p in rows(rank())))
    with pytest.raises(Exception, match=r"batches|ended") as caught:
        Twice(mode="dad", split_data=False, timeout=30).train(
            model=model,
            optimizer=sgd("", model),
            loaders={"train": DataLoader(data, batch)},
            callbacks=[dl.OptimizerCallback("loss")],
        )
    assert any("equally many batches" in error for error in gather_objects(str(caught.value)))


class Ends(Callback):
    """Raises an error at one event at site 0."""

    def __init__(self, event: str, loader: str, error: BaseException) -> None:
        super().__init__(order=35)
        self.loader = loader
        if rank() == 0:
            setattr(self, event, self._end)
        self.error = error
        self.calls = 0

    def _end(self, runner):
        self.calls += 1
        if runner.loader_key in (None, self.loader) and self.calls > 1 - (self.loader == ""):
            raise self.error


EVENTS = (
    ("on_batch_start", "train", ValueError("broken")),
    ("on_batch_end", "train", KeyError("missing")),
    ("on_batch_end", "valid", OSError("no space left")),
    ("on_loader_end", "valid", ValueError("no metric")),
    ("on_epoch_start", "valid", RuntimeError("second epoch")),
    ("on_batch_end", "train", KeyboardInterrupt()),
    ("on_batch_end", "train", SystemExit(4)),
)


def breaks_everywhere() -> list[str]:
    reported = []
    for event, loader, error in EVENTS:
        model = net()
        runner = DistributedRunner(mode="dad", split_data=False, timeout=200, weighting="samples")
        try:
            runner.train(
                model=model,
                criterion=nn.CrossEntropyLoss(),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                loaders=loaders(),
                callbacks=[Ends(event, loader, error)],
                num_epochs=3,
            )
            reported.append("nothing")
        except BaseException as caught:
            reported.append(f"{type(caught).__name__}: {caught}")
        assert "forward" not in vars(model[0])
    for p, q in zip(program("plain", "dad"), reference("plain"), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-9)
    return reported


def test_an_error_at_one_site_reaches_the_others_with_its_reason_and_training_can_follow(sites):
    own, others = sites(2).run(breaks_everywhere)
    for (_, _, error), raised, reported in zip(EVENTS, own, others, strict=True):
        assert raised == f"{type(error).__name__}: {error}"
        assert reported.startswith("SiteError: site 0 ("), reported
        assert reported.endswith(raised if str(error) else type(error).__name__), reported


@support.at_sites(2)
def test_a_second_runs_checkpoint_holds_its_own_state(tmp_path: Path) -> None:
    runner = DistributedRunner(mode="rankdad", rank=2, split_data=False)
    for count in (7, 3):
        model = net()
        data = TensorDataset(*(part[: count * ROWS[rank()]] for part in rows(rank())))
        runner.train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loaders={"train": DataLoader(data, batch_size=ROWS[rank()])},
            callbacks=[dl.CheckpointCallback(logdir=f"{tmp_path}/{count}", mode="runner")],
            num_epochs=1,
        )
        gather_objects(None)  # site 0 has written it
        saved = torch.load(tmp_path / str(count) / "runner.last.pth", weights_only=True)
        assert saved["dadplug"][0]["step"] == count
