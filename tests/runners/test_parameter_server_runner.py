"""Catalyst's runner for asynchronous steps: one model after each training loader, checkpoints, unequal sites."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

pytest.importorskip("catalyst")
from catalyst import dl
from catalyst.core.callback import Callback
from catalyst_training import data, net, run
from dadplug.runners import ParameterServerRunner

import dadplug


class Watch(Callback):
    """Makes site 1 slow; remembers, after each training loader, whether the sites differ."""

    def __init__(self):
        super().__init__(order=100)
        self.found, self.batches = [], 0

    def on_batch_start(self, runner):
        self.batches += runner.is_train_loader
        time.sleep(0.005 * dist.get_rank())

    def on_loader_start(self, runner):
        if not runner.is_train_loader:
            versions = set(runner.reduction.gather_objects(runner.reduction.version))
            self.found.append((runner.reduction.first_difference(), len(versions)))


def uneven() -> None:
    rank = dist.get_rank()
    for options in ({"wire": "int8", "rank": 4}, {"mode": "dsgd", "staleness": 1}):
        model, watch = net(rank), Watch()
        loaders = {"train": DataLoader(data(70 - 30 * rank, rank), 8), "valid": DataLoader(data(30, 9), 8)}
        runner = ParameterServerRunner(split_data=False, **options)
        run(runner, model, torch.optim.Adam(model.parameters(), lr=0.01), [watch], loaders, epochs=3)
        assert watch.found == [(None, 1)] * 3
        assert watch.batches == 3 * (5 if rank else 9)
        assert 0 < runner.reduction.version <= 3 * 14  # contributions may be committed together
        assert runner.loader_metrics["loss"] < 1.3
    with pytest.raises(ValueError, match="staleness must be"):
        ParameterServerRunner(staleness=0.5)
    with pytest.raises(ValueError, match="'edad' recomputes"):
        ParameterServerRunner(mode="edad")


class Used(Callback):
    """Remembers the samples of this site's training batches; makes site 1 slow."""

    def __init__(self):
        super().__init__(order=0)
        self.epochs = []

    def on_loader_start(self, runner):
        if runner.is_train_loader:
            self.epochs.append([])

    def on_batch_start(self, runner):
        if runner.is_train_loader:
            self.epochs[-1] += [row.tolist() for row in runner.batch["features"]]
            time.sleep(0.005 * dist.get_rank())


def deals() -> None:
    """Batches that are handed out: each sample once an epoch, by whichever site."""
    model, used, watch = net(), Used(), Watch()
    samples = data(70)
    loaders = {"train": DataLoader(samples, 8, shuffle=True), "valid": DataLoader(data(30, 9), 8)}
    runner = ParameterServerRunner(mode="dad", deal="shared", staleness=2)
    run(runner, model, torch.optim.Adam(model.parameters(), lr=0.01), [used, watch], loaders, epochs=2)
    assert watch.found == [(None, 1)] * 2
    every = sorted(row.tolist() for row, _ in samples)
    orders = []
    for epoch in used.epochs:
        by_site = runner.reduction.gather_objects(epoch)
        assert sorted(row for rows in by_site for row in rows) == every
        orders.append(by_site)
    assert orders[0] != orders[1]
    for wrong, message in (
        ({"split_data": False}, "deal='shared' deals the batches of one"),
        ({}, "cannot accumulate gradients"),
    ):
        keys = {"metric_key": "loss", "accumulation_steps": 2}
        callbacks = [] if wrong else [dl.OptimizerCallback(**keys), dl.BackwardCallback("loss")]
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises((ValueError, dadplug.MismatchError), match=message):
            run(ParameterServerRunner(deal="shared", **wrong), model, optimizer, callbacks, loaders)


def test_batches_of_a_shared_data_set_are_used_once_an_epoch():
    import support

    with support.Sites(2) as group:  # the last cases end the sites' connections
        group.run(deals)


def test_unequal_sites_hold_one_model(sites):
    sites(2).run(uneven)
