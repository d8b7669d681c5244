"""Catalyst's runner between sites: it trains as one process with all sites' data does."""

import contextlib
import io
import os
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from catalyst import dl
from catalyst.core.callback import Callback
from catalyst_training import Losses, data, metrics_callbacks, net, run, train
from dadplug.callbacks import BatchTimerCallback, TrafficMonitorCallback
from dadplug.runners import DistributedRunner, LocalSGDRunner, ParameterServerRunner
from support import refuses
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from dadplug import MismatchError, SiteError
from dadplug.errors import NonFiniteError
from dadplug.exchange.codec import gather_objects


def same_at_all_sites(value: object) -> bool:
    first, *others = gather_objects(value)
    return all(other == first for other in others)


@support.at_sites(2)
def test_metrics_are_those_of_all_sites_together() -> None:
    runner = train("rankdad", callbacks=metrics_callbacks(), lr=0.5, epochs=8)
    assert runner.reduction.first_difference() is None
    # The metrics of all sites together are those of one process on all of the validation set.
    inputs, targets = data(30, 1).tensors
    runner.model.eval()
    with torch.no_grad():
        logits = runner.model(inputs)
    valid = runner.epoch_metrics["valid"]
    assert valid["accuracy01"] == pytest.approx(float((logits.argmax(1) == targets).float().mean()), abs=1e-6)
    assert valid["accuracy01"] > 0.6
    top3 = (logits.topk(3, 1).indices == targets[:, None]).any(1).float().mean()
    assert valid["accuracy03"] == pytest.approx(float(top3), abs=1e-6)
    assert valid["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, targets)), abs=1e-5)
    confusion = torch.zeros(4, 4)
    for target, guess in zip(targets, logits.argmax(1)):
        confusion[target, guess] += 1
    recall = (confusion.diag() / confusion.sum(1)).mean()
    assert valid["recall/_macro"] == pytest.approx(float(recall), abs=1e-4)
    assert 0.5 < valid["auc"] <= 1
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    assert valid["loss/std"] < float(losses.std())
    assert same_at_all_sites([runner.epoch_metrics["train"], valid])


def curve(mode: str, batch_size: int) -> list:
    """The parameters after two epochs without shuffling."""
    loader = DataLoader(data(48), batch_size=batch_size)
    runner = train(mode, {"train": loader}, epochs=2, runner_options={"split_data": True})
    return [p.detach().clone() for p in runner.model.parameters()]


@pytest.mark.parametrize("mode", ["dsgd", "dad"])
def test_one_data_set_is_split_and_trains_like_one_process(sites, mode):
    """Batches of 4 at each of 2 sites hold the same samples as batches of 8 in one process, up to their order."""
    both = sites(2).run(curve, mode, 4)
    (one,) = sites(1).run(curve, mode, 8)
    for p, q, r in zip(*both, one):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, r, rtol=1e-4, atol=1e-5)


def clip(parameters):
    return nn.utils.clip_grad_norm_(parameters, 0.3)


WAYS = {  # a runner of synchronous steps, one that is to take the same, how gradients are clipped, a tolerance
    "local": (lambda: DistributedRunner(mode="dsgd"), lambda: LocalSGDRunner(every=1, overlap=False), {}, 1e-5),
    "server": (
        lambda: DistributedRunner(mode="dad"),
        lambda: ParameterServerRunner(mode="dad", staleness=0),
        {"grad_clip_fn": clip, "grad_clip_params": {}},  # not in local steps, where each site clips its own gradient
        1e-6,
    ),
}


@pytest.mark.parametrize("way", WAYS)
@support.at_sites(2)
def test_other_ways_without_delay_are_synchronous(way: str) -> None:
    """With SGD with momentum and accumulation, an agreement after every step is the synchronous step."""
    *runners, clipping, tolerance = WAYS[way]
    models = [net(), net()]
    for make, model in zip(runners, models):
        callbacks = [dl.OptimizerCallback("loss", accumulation_steps=2, **clipping), dl.BackwardCallback("loss")]
        run(make(), model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), callbacks)
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert torch.allclose(one, other, atol=tolerance)


@support.at_sites(2)
def test_evaluation_and_prediction_after_training() -> None:
    runner = train("dad", callbacks=metrics_callbacks())
    metrics = runner.evaluate_loader(
        DataLoader(data(30, 1), batch_size=8),
        callbacks=[dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,))],
    )
    predictions = torch.cat([b["logits"] for b in runner.predict_loader(loader=DataLoader(data(30, 1), batch_size=8))])
    assert len(predictions) == 30
    right = (predictions.argmax(1) == data(30, 1).tensors[1]).float().mean()
    assert metrics["accuracy01"] == pytest.approx(float(right), abs=1e-6)


def trains_twice() -> None:
    model = net()
    runner = DistributedRunner(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.01), mode="dad")
    loaders = {"train": DataLoader(data(), batch_size=8)}
    for _ in range(2):
        runner.train(loaders=loaders, num_epochs=1)
        assert "forward" not in vars(model[0])
        assert runner.reduction.first_difference() is None
    runner.train(loaders=loaders, num_epochs=1, engine=dl.CPUEngine())


def test_a_runner_trains_again(sites):
    sites(1).run(trains_twice)
    sites(2).run(trains_twice)


@support.at_sites(2)
def test_all_sites_refuse_what_cannot_work(tmp_path: Path) -> None:
    rank = dist.get_rank()
    good = {"train": DataLoader(data(8), batch_size=4)}
    spoilt = {"train": DataLoader(TensorDataset(torch.full((8, 8), torch.nan), torch.zeros(8).long()), batch_size=4)}
    other = good | ({"valid": good["train"]} if rank else {})
    own = {"train": DataLoader(data([20, 9][rank], seed=rank), batch_size=4)}
    (tmp_path / "bad.pth").write_bytes(b"nonsense")
    loaders = r"the sites do not have the same loaders: \['train'\]; \['train', 'valid'\]"
    split = "pass split_data=False where every site brings its own"
    refuses(
        (lambda: train("dad", [good, spoilt][rank]), r"^step 0: NaN or Inf at site 1 \(", NonFiniteError),
        (lambda: train("dad", other), loaders, MismatchError),
        (lambda: train("dad", own, runner_options={"split_data": True}), split, MismatchError),
        (lambda: train("dad", resume=tmp_path / "none.pth"), "none.pth is not at site 0", FileNotFoundError),
        (lambda: train("dad", resume=tmp_path / "bad.pth"), "bad.pth is damaged"),
    )


def test_wrong_options_are_refused_at_once():
    refuses(
        (lambda: DistributedRunner(mode="foo"), "unknown mode 'foo'; valid ones are"),
        (lambda: DistributedRunner(ranks=3), "unknown option 'ranks'"),
        (
            lambda: DistributedRunner(split_data="maybe"),
            "unknown split_data 'maybe'; valid ones are 'auto', True, False",
        ),
        (lambda: DistributedRunner().train(loaders={"train": DataLoader(data(8))}), "there is no model"),
    )
    assert issubclass(SiteError, RuntimeError)


# Stock callbacks, loggers and checkpoints in Catalyst's runner between sites: as for one process


@support.at_sites(2)
def test_only_site_0_prints_and_shows_progress() -> None:
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        train("dad", callbacks=metrics_callbacks(), verbose=True)
    if dist.get_rank() == 0:
        assert "train (2/2)" in output.getvalue()
        assert "2/2 * Epoch (train)" in errors.getvalue()
        assert "100%" in errors.getvalue()
    else:
        assert output.getvalue() == errors.getvalue() == ""


@support.at_sites(2)
def test_monitors_reach_the_loggers(tmp_path: Path) -> None:
    callbacks = [*metrics_callbacks(), BatchTimerCallback(), TrafficMonitorCallback()]
    runner = train(
        "rankdad",
        callbacks=callbacks,
        logdir=str(tmp_path / "logs"),
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
        runner_options={"rank": 2},
    )
    train_metrics = runner.epoch_metrics["train"]
    whole = train_metrics["_timer/batch_time"]
    parts = ("_timer/data_time", "_timer/model_time", "_timer/exchange_time")
    assert sum(train_metrics[name] for name in parts) == pytest.approx(whole, rel=1e-6)
    assert 0 < train_metrics["_timer/exchange_time"] < whole
    assert train_metrics["_timer/_fps"] > 0
    assert train_metrics["traffic/ratio"] > 2
    assert train_metrics["traffic/mb"] == pytest.approx(runner.reduction.traffic.bytes_sent / 1e6, rel=0.2)
    assert train_metrics["rank/0"] == 2
    assert 0 < train_metrics["residual/0"] < 1
    dist.barrier()
    assert sorted(os.listdir(tmp_path / "logs")) == ["checkpoints", "csv_logger", "tensorboard"]
    table = (tmp_path / "logs" / "csv_logger" / "train.csv").read_text().splitlines()
    assert len(table) == 3
    assert {"_timer/exchange_time", "traffic/mb", "rank/0", "accuracy01"} <= set(table[0].split(","))
    assert not list(tmp_path.glob("**/*.part"))


@support.at_sites(2)
def test_stops_are_agreed() -> None:
    """Metrics that differ from site to site do not make one site stop alone, nor does a stop within an epoch."""
    rank, losses = dist.get_rank(), Losses()
    callbacks = [dl.EarlyStoppingCallback(patience=2, loader_key="valid", metric_key="accuracy01", minimize=False)]
    callbacks.append(dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,)))
    loaders = {"train": DataLoader(data(20, rank), batch_size=4), "valid": DataLoader(data(10, 5 + rank), 4)}
    runner = train("dad", loaders, callbacks, lr=1e-7, epochs=20)
    assert runner.epoch_step == 3
    assert same_at_all_sites(runner.epoch_metrics["valid"]["accuracy01"])
    loaders = {"train": DataLoader(data(40 - 12 * rank, rank), batch_size=4)}
    runner = train("dad", loaders, [losses], epochs=9, check=True)
    assert runner.reduction.first_difference() is None
    assert runner.epoch_step == 3
    assert len(losses.values) <= 3 * 3


SCHEDULERS = {  # and the learning rate at the end
    "step": (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), 0.0125),
    "plateau": (
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0),
        0.0001,
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@support.at_sites(2)
def test_schedulers_step(kind: str) -> None:
    model, (scheduler, expected) = net(), SCHEDULERS[kind]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"valid_loader": "valid", "valid_metric": "loss", "minimize_valid_metric": True}
    train("dad", model=model, optimizer=optimizer, scheduler=scheduler(optimizer), epochs=3, **settings)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@support.at_sites(2)
def test_site_0_writes_and_all_load_the_best(tmp_path: Path) -> None:
    folders = [tmp_path / "here", tmp_path / "elsewhere"]  # as on a machine of its own
    runner = train(
        "dad",
        callbacks=[dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,))],
        lr=0.3,
        epochs=5,
        logdir=str(folders[dist.get_rank()]),
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
        load_best_on_end=True,
    )
    assert runner.reduction.first_difference() is None
    names = os.listdir(folders[0] / "checkpoints")
    assert {"model.best.pth", "model.last.pth", "model.storage.json"} < set(names)
    assert os.listdir(folders[1] / "checkpoints") == []
    state = torch.load(folders[0] / "checkpoints" / "model.best.pth", weights_only=True)
    net().load_state_dict(state)  # loads into the plain model


def test_older_scripts_keep_their_words():
    runner = DistributedRunner()  # whose training has not ended
    callback = dl.AccuracyCallback(input_key="logits", target_key="targets", topk_args=(1, 3))
    assert list(callback.metric.topk) == [1, 3]
    del runner


# The data of Catalyst's runner: split over the sites if it is the same, else each site's own


@pytest.mark.parametrize("split_data", ["auto", False])
@support.at_sites(2)
def test_sites_bring_their_own_data(split_data: object) -> None:
    """Each site brings its own data, of its own size."""
    rank = dist.get_rank()
    for samples, batches in (((20, 9), (5, 3)), ((10, 10), (3, 3))):
        losses = Losses()
        loaders = {"train": DataLoader(data(samples[rank], seed=rank), batch_size=4, shuffle=True)}
        runner = train("dad", loaders, [losses], epochs=1, runner_options={"split_data": split_data})
        assert len(losses.values) == batches[rank]
        assert sum(size for _, size in losses.values) == samples[rank]
        assert runner.reduction.first_difference() is None


class Augmented(Dataset):
    """Random augmentations must not hide that the data is the same."""

    def __len__(self):
        return 21

    def __getitem__(self, index):
        return torch.full((8,), float(index)) + torch.rand(8), index % 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(8), 1)] * 10)

    def __len__(self):
        return 10


ODD_FIRST = [*range(1, 20, 2), *range(0, 20, 2)]  # a sampler


class Seen(Callback):
    """Keeps the samples of each epoch."""

    def __init__(self):
        super().__init__(order=100)
        self.epochs = []

    def on_loader_start(self, runner):
        self.epochs.append([])

    def on_batch_end(self, runner):
        self.epochs[-1] += runner.batch["features"][:, 0].int().tolist()


def seen_samples(kind: str) -> list:
    """The samples that this site saw in two epochs."""
    rank = dist.get_rank()
    plain = TensorDataset(torch.arange(20.0)[:, None].expand(20, 8), torch.arange(20) % 4)
    loader = {
        "shuffled": lambda: DataLoader(plain, batch_size=3, shuffle=True),
        "generator": lambda: DataLoader(plain, 3, shuffle=True, generator=torch.Generator().manual_seed(4)),
        "dropped": lambda: DataLoader(plain, batch_size=3, drop_last=True),
        "sampler": lambda: DataLoader(plain, batch_size=3, sampler=ODD_FIRST),
        "batches": lambda: DataLoader(
            plain, batch_sampler=torch.utils.data.BatchSampler(ODD_FIRST, batch_size=5, drop_last=False)
        ),
        "distributed": lambda: DataLoader(plain, 3, sampler=DistributedSampler(plain, 2, rank, shuffle=False)),
        "augmented": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True),
        "stream": lambda: DataLoader(Stream(), batch_size=3),
        "workers": lambda: DataLoader(plain, batch_size=3, shuffle=True, num_workers=1),
    }[kind]()
    seen = Seen()
    train("dsgd", {"train": loader}, [seen], lr=1e-6)
    return seen.epochs


@pytest.mark.parametrize("kind", ["shuffled", "generator", "sampler", "batches", "distributed", "augmented", "workers"])
def test_every_sample_goes_to_one_site(sites, kind):
    first, second = sites(2).run(seen_samples, kind)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(21 if kind == "augmented" else 20))
        assert abs(len(first[epoch]) - len(second[epoch])) <= (5 if kind == "batches" else 1)
    shuffled = kind in ("shuffled", "generator", "augmented", "workers")
    assert (first[0] != first[1]) == shuffled  # another order in another epoch


def test_drop_last_and_streams_stay_what_they_are(sites):
    for kind, count in (("dropped", 9), ("stream", 10)):
        assert [len(epochs[0]) for epochs in sites(2).run(seen_samples, kind)] == [count] * 2
