"""One site of the tests of Catalyst's runner where sites leave: trains, and is killed in a round that it is told.

Run as ``elastic_catalyst.py CASE``, where the case is JSON, see `Case`. Writes a JSON file at the end.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import elastic_data
import torch
from catalyst import dl
from catalyst.core.callback import Callback
from catalyst_training import data, metrics_callbacks, net
from dadplug.runners import DistributedRunner, LocalSGDRunner
from elastic_data import SiteCase, die_in_round, digest
from torch import nn
from torch.utils.data import DataLoader

import dadplug

BATCH = 8


@dataclass(frozen=True)
class Case(SiteCase):
    """One process of a site, killed in a "train" round of gradients of the second epoch, or any "other".

    Attributes:
        ended: whether it has ended its part of the round when it is killed.
        returns: whether to train on the data of `elastic_data`, in order, and to be killed in step `leave`, so that the
            training can be compared to that in one process. `stop` ends the training after the epoch.
    """

    where: str = "train"
    ended: bool = False
    returns: bool = False


def train_data(slot: int):
    return data(40 + 16 * slot, seed=slot)


def valid_data(slot: int):
    return data(20 + 7 * slot, seed=100 + slot)


def steps_of(runner: Any) -> int:
    return runner.reduction.steps if isinstance(runner.reduction, dadplug.LocalSGD) else runner.reduction.step


class Steps(Callback):
    """Record of each step; kills the process."""

    def __init__(self, case: Case) -> None:
        super().__init__(order=1000)
        self.case = case
        self.file = (Path(case.folder) / "log.jsonl").open("a", buffering=1)

    def on_batch_start(self, runner) -> None:
        if runner.is_train_loader and steps_of(runner) == self.case.leave:
            os.kill(os.getpid(), signal.SIGKILL)
        self.before = getattr(runner.reduction, "agreements", 0)
        while runner.is_train_loader and self.case.hold and Path(self.case.hold).exists():
            time.sleep(0.01)

    def on_batch_end(self, runner) -> None:
        if not runner.is_train_loader:
            return
        line = {"number": steps_of(runner), "epoch": runner.epoch_step, "batch": runner.micro_step}
        line |= {"present": runner.reduction.present_sites, "digest": digest(runner.model)}
        line |= {"agreements": getattr(runner.reduction, "agreements", 0), "before": self.before}
        line |= {"weights": [float(each.detach().sum()) for each in runner.model.parameters()]}
        line |= {"lr": runner.optimizer.param_groups[0]["lr"], "first": float(runner.batch["features"][0, 0])}
        self.file.write(json.dumps(line) + "\n")
        time.sleep(0.01)

    def on_epoch_end(self, runner) -> None:
        runner.need_early_stop |= bool(self.case.stop) and Path(self.case.stop).exists()


class Record(Callback):
    """Record of the metrics of each loader, and of the number of steps."""

    def __init__(self) -> None:
        super().__init__(order=1000)
        self.epochs: list[dict] = []

    def on_epoch_start(self, runner) -> None:
        self.epochs.append({})

    def on_epoch_end(self, runner) -> None:
        scalars = {key: dict(runner.epoch_metrics[key]) for key in ("train", "valid")}
        self.epochs[-1] |= {"metrics": scalars, "step": steps_of(runner), "digest": digest(runner.model)}
        self.epochs[-1]["present"] = runner.reduction.present_sites
        self.epochs[-1]["main"] = runner.engine.is_main_process


def run(case: Case) -> None:
    dadplug.connect(kit=case.kit, timeout=200, **case.terms)
    slot = torch.distributed.get_rank()
    record = Record()
    if case.leave >= 0 and not case.returns:
        trains = case.where == "train"
        die_in_round(case, lambda answer: len(record.epochs) == 2 and (answer is not None) == trains, ended=case.ended)
    model = elastic_data.net() if case.returns else net()
    optimizer, scheduler = torch.optim.Adam(model.parameters(), lr=0.01), None
    if case.returns:
        optimizer, scheduler = elastic_data.optimisation(model)
    runner = (LocalSGDRunner if case.every else DistributedRunner)(**case.options(), split_data=False)
    loaders = {
        "train": DataLoader(train_data(slot), batch_size=BATCH, shuffle=True),
        "valid": DataLoader(valid_data(slot), batch_size=BATCH),
    }
    if case.returns:
        loaders = {
            "valid": DataLoader(elastic_data.valid_data(slot), BATCH),
            "train": DataLoader(elastic_data.train_data(slot), BATCH),
        }
    checkpoints = dl.CheckpointCallback(
        str(Path(case.folder) / "checkpoints"), loader_key="valid", metric_key="loss", minimize=True, mode="runner"
    )
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        scheduler=scheduler,
        loaders=loaders,
        callbacks=[Steps(case)] * case.returns + metrics_callbacks() * (not case.returns) + [checkpoints, record],
        num_epochs=case.epochs,
        verbose=case.bar,
    )
    assert runner.reduction.first_difference() is None
    torch.distributed.barrier()
    result = {"epochs": record.epochs, "digest": digest(model)}
    (Path(case.folder) / "result.json").write_text(json.dumps(result, default=float))
    torch.save(model.state_dict(), Path(case.folder) / "model.pth")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Case(**json.loads(sys.argv[1])))
