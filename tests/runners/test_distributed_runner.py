"""Catalyst's runner between sites: it trains as one process with all sites' data does."""

import contextlib
import io
import os
import warnings

import pytest
import support
import torch
import torch.distributed as dist
from catalyst import dl
from catalyst.core.callback import Callback
from catalyst_training import Losses, data, metrics_callbacks, net, run, train
from dadplug.callbacks import BatchTimerCallback, TrafficMonitorCallback
from dadplug.runners import DistributedRunner, LocalSGDRunner, ParameterServerRunner
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from dadplug import MismatchError, SiteError


def trains_with_metrics(mode: str) -> tuple:
    runner = train(mode, callbacks=metrics_callbacks(), lr=0.5, epochs=8)
    assert runner.reduction.first_difference() is None
    # The metrics of all sites together are those of one process on all of the validation set.
    inputs, targets = data(30, 1).tensors
    runner.model.eval()
    with torch.no_grad():
        logits = runner.model(inputs)
    valid = runner.epoch_metrics["valid"]
    assert valid["accuracy01"] == pytest.approx(float((logits.argmax(1) == targets).float().mean()), abs=1e-6)
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
    return runner.epoch_metrics["train"], runner.epoch_metrics["valid"]


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad"])
def test_metrics_are_those_of_all_sites_together(sites, mode):
    first, second = sites(2).run(trains_with_metrics, mode)
    assert first == second
    assert first[1]["accuracy01"] > 0.6


def curve(mode: str, batch_size: int, uneven: bool, accumulation: int) -> list:
    """The parameters after two epochs without shuffling."""
    samples = 44 if uneven else 48
    loader = DataLoader(data(samples), batch_size=batch_size)
    callbacks = [dl.OptimizerCallback(metric_key="loss", accumulation_steps=accumulation)]
    runner = train(mode, {"train": loader}, callbacks, epochs=2, runner_options={"split_data": True})
    return [p.detach().clone() for p in runner.model.parameters()]


@pytest.mark.parametrize("mode", ["dsgd", "dad"])
def test_one_data_set_is_split_and_trains_like_one_process(sites, mode):
    """Batches of 4 at each of 2 sites hold the same samples as batches of 8 in one process, up to their order."""
    both = sites(2).run(curve, mode, 4, False, 1)
    (one,) = sites(1).run(curve, mode, 8, False, 1)
    for p, q, r in zip(*both, one):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, r, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad"])
def test_uneven_sites_neither_hang_nor_part(sites, mode, accumulation):
    both = sites(2).run(curve, mode, 3, True, accumulation)
    assert all(torch.equal(p, q) for p, q in zip(*both))


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


def evaluates() -> tuple:
    runner = train("dad", callbacks=metrics_callbacks())
    metrics = runner.evaluate_loader(
        DataLoader(data(30, 1), batch_size=8),
        callbacks=[dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,))],
    )
    predictions = torch.cat([b["logits"] for b in runner.predict_loader(loader=DataLoader(data(30, 1), batch_size=8))])
    right = (predictions.argmax(1) == data(30, 1).tensors[1]).float().mean()
    assert metrics["accuracy01"] == pytest.approx(float(right), abs=1e-6)
    return len(predictions)


def test_evaluation_and_prediction_after_training(sites):
    assert sites(2).run(evaluates) == [30, 30]


@support.at_sites(2)
def test_a_custom_runner_only_calls_engine_backward() -> None:
    """A runner with its own batch handling, which calls engine.backward, as Catalyst's examples do."""

    class Custom(DistributedRunner):
        def handle_batch(self, batch):
            logits = self.model(batch["features"])
            loss = nn.functional.cross_entropy(logits, batch["targets"])
            self.batch_metrics["loss"] = loss.detach()
            if self.is_train_loader:
                self.engine.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()

        def get_callbacks(self):
            callbacks = super().get_callbacks()
            for name in ("_criterion", "_backward", "_optimizer"):
                callbacks.pop(name, None)
            return callbacks

    model = net()
    runner = Custom(model, None, torch.optim.Adam(model.parameters(), lr=0.01), mode="dad")
    loaders = {"train": DataLoader(data(), batch_size=8, shuffle=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner.train(loaders=loaders, num_epochs=2)
    assert runner.reduction.first_difference() is None


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


def nan_loss() -> str:
    model = net()
    if dist.get_rank() == 1:
        loaders = {
            "train": DataLoader(TensorDataset(torch.full((8, 8), torch.nan), torch.zeros(8).long()), batch_size=4)
        }
    else:
        loaders = {"train": DataLoader(data(8), batch_size=4)}
    try:
        train("dad", loaders, model=model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_nan_loss_ends_training_on_all_sites(sites):
    for message in sites(2).run(nan_loss):
        assert message.startswith("NonFiniteError: step 0: NaN or Inf at site 1 (")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "foo"}, "unknown mode 'foo'; valid ones are"),
        ({"ranks": 3}, "unknown option 'ranks'"),
        ({"split_data": "maybe"}, "unknown split_data 'maybe'; valid ones are 'auto', True, False"),
    ],
)
def test_wrong_options_are_told_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        DistributedRunner(**settings)


def test_a_missing_model_is_told():
    with pytest.raises(ValueError, match="there is no model"):
        DistributedRunner().train(loaders={"train": DataLoader(data(8))})


def test_errors_have_a_common_base():
    assert issubclass(SiteError, RuntimeError)


# Stock callbacks, loggers and checkpoints in Catalyst's runner between sites: as for one process


def prints(verbose: bool) -> tuple:
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        train("dad", callbacks=metrics_callbacks(), verbose=verbose)
    return output.getvalue(), errors.getvalue()


def test_only_site_0_prints_and_shows_progress(sites):
    (output, errors), (silence, no_errors) = sites(2).run(prints, True)
    assert "train (2/2)" in output
    assert "2/2 * Epoch (train)" in errors
    assert "100%" in errors
    assert silence == ""
    assert no_errors == ""


def logs(folder: str) -> list[str]:
    callbacks = [*metrics_callbacks(), BatchTimerCallback(), TrafficMonitorCallback()]
    runner = train(
        "rankdad",
        callbacks=callbacks,
        logdir=folder,
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
    return sorted(os.listdir(folder))


def test_monitors_reach_the_loggers(sites, tmp_path):
    folder = str(tmp_path / "logs")
    for files in sites(2).run(logs, folder):
        assert files == ["checkpoints", "csv_logger", "tensorboard"]
    table = (tmp_path / "logs" / "csv_logger" / "train.csv").read_text().splitlines()
    assert len(table) == 3
    assert {"_timer/exchange_time", "traffic/mb", "rank/0", "accuracy01"} <= set(table[0].split(","))
    assert not list(tmp_path.glob("**/*.part"))


def clips(where: str) -> float:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clip = {"grad_clip_fn": nn.utils.clip_grad_norm_, "grad_clip_params": {"max_norm": 1e-3}}
    callback = {
        "backward": lambda: dl.BackwardCallback(metric_key="loss", **clip, log_gradient=True),
        "optimizer": lambda: dl.OptimizerCallback(metric_key="loss", **clip),
    }[where]()
    loader = {"train": DataLoader(data(8), batch_size=4)}
    runner = train("dad", loader, [callback], epochs=1, model=model, optimizer=optimizer)
    assert runner.reduction.first_difference() is None
    return float(torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), before)]).norm())


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_clipping_clips(sites, where):
    moved = sites(2).run(clips, where)
    assert moved[0] == moved[1] == pytest.approx(1e-3, rel=1e-3)


def stops_early() -> tuple:
    """Metrics that differ from site to site must not make one site stop alone."""
    callbacks = [dl.EarlyStoppingCallback(patience=2, loader_key="valid", metric_key="accuracy01", minimize=False)]
    callbacks.append(dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,)))
    loaders = {
        "train": DataLoader(data(20, dist.get_rank()), batch_size=4),
        "valid": DataLoader(data(10, 5 + dist.get_rank()), 4),
    }
    runner = train("dad", loaders, callbacks, lr=1e-7, epochs=20)
    return runner.epoch_step, runner.epoch_metrics["valid"]["accuracy01"]


def test_early_stopping_is_agreed(sites):
    first, second = sites(2).run(stops_early)
    assert first == second
    assert first[0] == 3


def check_run() -> int:
    loaders = {"train": DataLoader(data(40 - 12 * dist.get_rank(), dist.get_rank()), batch_size=4)}
    losses = Losses()
    runner = train("dad", loaders, [losses], epochs=9, check=True)
    assert runner.reduction.first_difference() is None
    return len(losses.values), runner.epoch_step


def test_a_stop_within_an_epoch_is_agreed(sites):
    first, second = sites(2).run(check_run)
    assert first[1] == second[1] == 3
    assert first[0] <= 3 * 3


def schedules(kind: str) -> list:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = {
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0),
    }[kind]()
    settings = {"valid_loader": "valid", "valid_metric": "loss", "minimize_valid_metric": True}
    train("dad", model=model, optimizer=optimizer, scheduler=scheduler, epochs=3, **settings)
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("kind", "expected"), [("step", 0.0125), ("plateau", 0.0001)])
def test_schedulers_step(sites, kind, expected):
    assert sites(2).run(schedules, kind) == [pytest.approx(expected)] * 2


def loads_best(folder: str) -> tuple:
    runner = train(
        "dad",
        callbacks=[dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,))],
        lr=0.3,
        epochs=5,
        logdir=folder if dist.get_rank() == 0 else folder + "-elsewhere",  # as on a machine of its own
        valid_loader="valid",
        valid_metric="loss",
        minimize_valid_metric=True,
        load_best_on_end=True,
    )
    assert runner.reduction.first_difference() is None
    return sorted(os.listdir(os.path.join(folder, "checkpoints")))


def test_site_0_writes_and_all_load_the_best(sites, tmp_path):
    folder = str(tmp_path / "here")
    names, _ = sites(2).run(loads_best, folder)
    assert {"model.best.pth", "model.last.pth", "model.storage.json"} < set(names)
    assert os.listdir(folder + "-elsewhere/checkpoints") == []
    state = torch.load(os.path.join(folder, "checkpoints", "model.best.pth"), weights_only=True)
    net().load_state_dict(state)  # loads into the plain model


def bad_checkpoint(path: str) -> str:
    try:
        train("dad", resume=path)
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    return "nothing"


def test_missing_and_damaged_checkpoints_are_told_on_all_sites(sites, tmp_path):
    for message in sites(2).run(bad_checkpoint, str(tmp_path / "none.pth")):
        assert "none.pth is not at site 0" in message
    (tmp_path / "bad.pth").write_bytes(b"nonsense")
    for message in sites(2).run(bad_checkpoint, str(tmp_path / "bad.pth")):
        assert "bad.pth is damaged" in message


def test_older_scripts_keep_their_words():
    runner = DistributedRunner()  # whose training has not ended
    callback = dl.AccuracyCallback(input_key="logits", target_key="targets", topk_args=(1, 3))
    assert list(callback.metric.topk) == [1, 3]
    del runner


# The data of Catalyst's runner: split over the sites if it is the same, else each site's own


def own_loaders(split_data, samples: list) -> tuple:
    """Each site brings its own data, of its own size."""
    rank = dist.get_rank()
    losses = Losses()
    loaders = {"train": DataLoader(data(samples[rank], seed=rank), batch_size=4, shuffle=True)}
    runner = train("dad", loaders, [losses], epochs=1, runner_options={"split_data": split_data})
    return len(losses.values), sum(size for _, size in losses.values), runner.reduction.first_difference()


@pytest.mark.parametrize("split_data", ["auto", False])
def test_sites_bring_their_own_data(sites, split_data):
    assert sites(2).run(own_loaders, split_data, [20, 9]) == [(5, 20, None), (3, 9, None)]
    assert sites(2).run(own_loaders, split_data, [10, 10]) == [(3, 10, None)] * 2


def refuses_to_split() -> str:
    try:
        own_loaders(True, [20, 9])
    except MismatchError as error:
        return str(error)
    return "nothing"


def test_data_that_differs_cannot_be_split(sites):
    for message in sites(2).run(refuses_to_split):
        assert "pass split_data=False where every site brings its own" in message


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


class OddFirst(torch.utils.data.Sampler):
    def __len__(self):
        return 20

    def __iter__(self):
        return iter([*range(1, 20, 2), *range(0, 20, 2)])


def seen_samples(kind: str) -> list:
    """The samples that this site saw in two epochs."""
    rank = dist.get_rank()
    plain = TensorDataset(torch.arange(20.0)[:, None].expand(20, 8), torch.arange(20) % 4)
    loader = {
        "shuffled": lambda: DataLoader(plain, batch_size=3, shuffle=True),
        "generator": lambda: DataLoader(plain, 3, shuffle=True, generator=torch.Generator().manual_seed(4)),
        "dropped": lambda: DataLoader(plain, batch_size=3, drop_last=True),
        "sampler": lambda: DataLoader(plain, batch_size=3, sampler=OddFirst()),
        "batches": lambda: DataLoader(
            plain, batch_sampler=torch.utils.data.BatchSampler(OddFirst(), batch_size=5, drop_last=False)
        ),
        "distributed": lambda: DataLoader(plain, 3, sampler=DistributedSampler(plain, 2, rank, shuffle=False)),
        "augmented": lambda: DataLoader(Augmented(), batch_size=3, shuffle=True),
        "stream": lambda: DataLoader(Stream(), batch_size=3),
        "workers": lambda: DataLoader(plain, batch_size=3, shuffle=True, num_workers=1),
    }[kind]()

    class Seen(Callback):
        def __init__(self):
            super().__init__(order=100)
            self.epochs = []

        def on_loader_start(self, runner):
            self.epochs.append([])

        def on_batch_end(self, runner):
            self.epochs[-1] += runner.batch["features"][:, 0].int().tolist()

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
    first, second = sites(2).run(seen_samples, "dropped")
    assert len(first[0]) == len(second[0]) == 9
    first, second = sites(2).run(seen_samples, "stream")
    assert len(first[0]) == len(second[0]) == 10


def different_loaders() -> str:
    loaders = {"train": DataLoader(data(8), batch_size=4)}
    if dist.get_rank():
        loaders["valid"] = DataLoader(data(8), batch_size=4)
    try:
        train("dad", loaders)
    except MismatchError as error:
        return str(error)
    return "nothing"


def test_loaders_that_differ_are_told(sites):
    for message in sites(2).run(different_loaders):
        assert "the sites do not have the same loaders: ['train']; ['train', 'valid']" in message
