"""Catalyst's runner between sites: trains as one process with all sites' data does."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("catalyst")
from catalyst import dl
from catalyst_training import data, metrics_callbacks, net, run, train
from dadplug.runners import DistributedRunner, LocalSGDRunner, ParameterServerRunner

from dadplug import SiteError


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


def equals_synchronous(way: str) -> None:
    """With SGD with momentum and accumulation, an agreement after every step is the synchronous step."""
    *runners, clipping, tolerance = WAYS[way]
    models = [net(), net()]
    for make, model in zip(runners, models):
        callbacks = [dl.OptimizerCallback("loss", accumulation_steps=2, **clipping), dl.BackwardCallback("loss")]
        run(make(), model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), callbacks)
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert torch.allclose(one, other, atol=tolerance)


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_without_delay_are_synchronous(sites, way):
    sites(2).run(equals_synchronous, way)


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


def custom_runner() -> None:
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


def test_a_custom_runner_only_calls_engine_backward(sites):
    sites(2).run(custom_runner)


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
