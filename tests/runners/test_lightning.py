"""Lightning's strategies: the same training as DDP's by exact modes, whatever the module and the settings."""

import contextlib
import os
import signal

import lightning_zoo as zoo
import pytest
import pytorch_lightning as pl
import support
import torch
from dadplug.runners import DADStrategy, LocalSGDStrategy, ParameterServerStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException

import dadplug
from dadplug.step.model_sync.samples import takes_part


def equals_ddp(name: str, settings: dict, rels: dict[str, float]) -> None:
    reference, ddp = zoo.fit(name, "ddp", **settings)
    for mode, rel in rels.items():
        module, ours = zoo.fit(name, DADStrategy(mode), **settings)
        assert ours.global_step == ddp.global_step > 0
        zoo.assert_close(module, reference, rel)
        for metric, value in ddp.callback_metrics.items():
            if metric.startswith("valid") and list(module.buffers()):
                continue  # DDP validates with each site's own running statistics
            assert float(ours.callback_metrics[metric]) == pytest.approx(float(value), rel=max(rel, 1e-4)), metric
        assert ours.strategy.reduction.first_difference() is None


EXACT = {"dsgd": 1e-5, "dad": 1e-5}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_exact_modes_equal_ddp(sites, name):
    sites(2).run(equals_ddp, name, {}, EXACT)


SETTINGS = {
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "both": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "few steps": {"max_steps": 3, "limit_train_batches": 2},
    "single": {"precision": "32-true"},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_exact_modes_equal_ddp_with_settings_of_the_trainer(sites, case):
    sites(2).run(equals_ddp, "Plain", SETTINGS[case], EXACT)


@pytest.mark.parametrize("name", zoo.AUTOMATIC)
def test_every_module_accumulates_and_clips_as_ddp_does(sites, name):
    sites(2).run(equals_ddp, name, SETTINGS["both"] | {"max_epochs": 1}, EXACT)


# DDP rounds weight gradients to bf16, dad does not.
@pytest.mark.parametrize(("name", "rels"), [("Plain", {"dsgd": 1e-5, "dad": 2e-2}), ("Metrics", {"dsgd": 1e-5})])
def test_exact_modes_equal_ddp_in_bf16(sites, name, rels):
    sites(2).run(equals_ddp, name, {"precision": "bf16-mixed", "max_epochs": 1}, rels)


@pytest.mark.parametrize("way", ["local", "server"])
@support.at_sites(2)
def test_other_ways_without_delay_equal_ddp(way: str) -> None:
    """With SGD with momentum, an agreement after every step is DDP's step; so is a commit without staleness."""
    settings = {} if way == "local" else {"gradient_clip_val": 0.3}  # in local steps each site clips its own gradient
    for accumulate in (1, 2):
        settings["accumulate_grad_batches"] = accumulate
        expected, ddp = zoo.fit("Children", "ddp", **settings)
        if way == "local":
            module, ours = zoo.fit("Children", LocalSGDStrategy(every=1, overlap=False), **settings)
            steps = ours.strategy.local.steps
        else:
            module, ours = zoo.fit("Children", ParameterServerStrategy("dad", staleness=0), **settings)
            steps = ours.strategy.server.version
        assert ours.global_step == ddp.global_step == steps
        zoo.assert_close(module, expected, 1e-9)
        assert float(ours.callback_metrics["valid"]) == pytest.approx(float(ddp.callback_metrics["valid"]))


def learns(name: str, settings: dict) -> tuple[float, float]:
    torch.manual_seed(0)
    before = zoo.ZOO[name]().to(torch.float64)
    module, current = zoo.fit(name, DADStrategy("rankdad", rank=2), **settings)
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


@support.at_sites(2)
def test_evaluation_needs_no_fit_and_fit_can_follow_fit() -> None:
    module = zoo.Metrics().double()
    data, held_out = zoo.loader(40), zoo.loader(24, seed=1, shuffle=False)
    current = zoo.trainer(DADStrategy("dad"))
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


class Whole(zoo.Plain):
    """Takes a step over all batches of an epoch, by plain gradient descent."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfParts(Whole):
    """Calls a part of it, and never itself."""

    def training_step(self, batch, batch_idx):
        return zoo.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(("accumulate", "weighting"), [(1, "samples"), (2, "samples"), (2, "uniform"), (3, "uniform")])
@pytest.mark.parametrize("model", ["Whole", "OfParts"])
@pytest.mark.parametrize("mode", ["dsgd", "dad"])
@support.at_sites(2)
def test_sites_with_different_numbers_of_batches_train_on_all_rows_once(
    mode: str, model: str, accumulate: int, weighting: str
) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    module = {"Whole": Whole, "OfParts": OfParts}[model]().double()
    reference = zoo.Plain().double()
    reference.load_state_dict(module.state_dict())
    shares = [zoo.loader(count, 4, seed=site, shuffle=False) for site, count in enumerate((29, 11))]
    current = zoo.trainer(
        DADStrategy(mode, weighting=weighting),
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
    )
    current.fit(module, shares[rank])
    batches = max(len(share) for share in shares)
    assert current.global_step == -(-batches // accumulate)
    assert current.strategy.reduction.first_difference() is None
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    waiting = [list(share) for share in shares]
    for first in range(0, batches, accumulate):
        losses, weights = [], []
        for own, share in zip(waiting, shares):
            step = range(first, min(first + accumulate, batches))
            now = [own.pop(0) for batch in step if takes_part(batch, len(share), batches)]
            if now:
                losses.append(
                    sum(zoo.cross_entropy(reference(inputs), targets) for inputs, targets in now) / accumulate
                )
                weights.append(1 if weighting == "uniform" else sum(len(inputs) for inputs, _ in now))
        optimizer.zero_grad()
        sum(loss * weight / sum(weights) for loss, weight in zip(losses, weights)).backward()
        optimizer.step()
    assert not any(waiting)
    zoo.assert_close(module, reference, 1e-8)


class WithoutLoss(zoo.Plain):
    """Has no loss in two batches, in the second of which the other site has none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[bool] = []

    def training_step(self, batch, batch_idx):
        self.before = self.net[0].weight.detach().clone()
        lost = batch_idx in (0, 2) and self.global_rank == 0
        return None if lost else zoo.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, *_):
        self.moved.append(not torch.equal(self.before, self.net[0].weight))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad"])
@support.at_sites(2)
def test_a_step_without_a_loss_at_any_site_moves_no_weight(mode: str) -> None:
    module = WithoutLoss()
    rank = int(os.environ["RANK"])
    current = zoo.trainer(DADStrategy(mode), max_epochs=1, use_distributed_sampler=False)
    current.fit(module, zoo.loader([24, 8][rank], 4, seed=rank))  # site 1 has batches in the first and the last step
    assert module.moved == [True, True, False, True, True, True], module.moved
    assert current.strategy.reduction.first_difference() is None


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: int) -> None:
        self.rows = list(zoo.loader(rows, 1).dataset)

    def __iter__(self):
        return iter(self.rows)


def streams(way: str, counts: list[int], accumulate: int, limit: int | None) -> tuple[int, str]:
    """Return the number of steps, and the error."""
    strategy = DADStrategy("dsgd", weighting="uniform") if way == "dad" else LocalSGDStrategy(every=2)
    settings = {"accumulate_grad_batches": accumulate, "limit_train_batches": limit, "max_epochs": 2}
    current = zoo.trainer(strategy, use_distributed_sampler=False, **settings)
    data = torch.utils.data.DataLoader(Stream(4 * counts[int(os.environ["RANK"])]), 4)
    try:
        current.fit(zoo.Plain().double(), data)
    except dadplug.DadplugError as error:
        return current.global_step, str(error)
    return current.global_step, ""


@pytest.mark.parametrize(
    ("way", "counts", "accumulate"),
    [("dad", [3, 5], 1), ("dad", [5, 3], 2), ("local", [3, 5], 1), ("local", [5, 2], 1)],
)
def test_loaders_of_unknown_and_different_lengths_are_an_error_at_the_first_end(sites, way, counts, accumulate):
    for _, error in sites(2).run(streams, way, counts, accumulate, None, timeout=60):
        assert "different numbers of training batches" in error
        assert "limit_train_batches" in error


@pytest.mark.parametrize(("counts", "limit", "steps"), [([4, 4], None, 8), ([3, 5], 3, 6), ([3, 5], 2, 4)])
def test_loaders_of_unknown_length_may_end_together(sites, counts, limit, steps):
    assert sites(2).run(streams, "dad", counts, 1, limit) == [(steps, "")] * 2


@pytest.mark.parametrize("by_trainer", [True, False])
@support.at_sites(2)
def test_batchnorm_can_be_synchronised(by_trainer: bool) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    module, reference = zoo.Metrics().double(), zoo.Metrics().double()
    reference.load_state_dict(module.state_dict())
    strategy = DADStrategy("dad", sync_batchnorm=not by_trainer)
    current = zoo.trainer(strategy, max_epochs=1, use_distributed_sampler=False, sync_batchnorm=by_trainer)
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


@support.at_sites(2)
def test_early_stopping_stops_all_sites() -> None:
    stopper = pl.callbacks.EarlyStopping("valid", patience=1, min_delta=10.0)
    _, current = zoo.fit("Plain", DADStrategy("rankdad"), max_epochs=20, callbacks=[stopper])
    first, second = current.strategy.reduction.gather_objects(current.current_epoch)
    assert first == second < 20


class AskAt(pl.Callback):
    """Ask for the end of the run at one site, in the third batch or in the first validation."""

    def __init__(self, way: str, rank: int) -> None:
        self.way, self.rank = way, rank

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if trainer.global_rank == self.rank and batch_idx == 2:
            if self.way == "flag":
                trainer.should_stop = True
            elif self.way == "signal":
                trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, None)

    def on_validation_end(self, trainer, module) -> None:
        if trainer.global_rank == self.rank and self.way == "validation" and not trainer.sanity_checking:
            trainer.should_stop = True


STRATEGIES = {
    "dad": lambda: DADStrategy("dsgd", timeout=60),
    "local": lambda: LocalSGDStrategy(every=4, timeout=60),
    "server": lambda: ParameterServerStrategy("dad", timeout=60),
}


@pytest.mark.parametrize(
    ("name", "way", "rank", "steps"),
    [
        ("dad", "flag", 1, (4, 4)),
        ("dad", "validation", 0, (5, 5)),
        ("dad", "signal", 1, (4, 4)),
        ("local", "flag", 0, (4, 4)),
        ("local", "flag", 1, (4, 4)),
        ("local", "signal", 0, (4, 4)),
        ("server", "flag", 1, (5, 3)),  # at different batches: the other site ends where they meet, at a validation
    ],
)
@support.at_sites(2, own=True)
def test_an_end_that_one_site_asks_for_is_the_same_at_all_sites(name: str, way: str, rank: int, steps: tuple) -> None:
    current = zoo.trainer(STRATEGIES[name](), max_epochs=3, callbacks=[AskAt(way, rank)], val_check_interval=5)
    torch.manual_seed(0)
    module = zoo.Plain().double()
    signalled = way == "signal"
    with pytest.raises(SIGTERMException) if signalled else contextlib.nullcontext():
        current.fit(module, zoo.loader(160), zoo.loader(24, seed=1, shuffle=False))
    assert current.global_step == steps[int(os.environ["RANK"])]
    assert signalled or current.strategy._exchange.first_difference() is None
