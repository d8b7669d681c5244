"""Common part of the two-site examples: flags, sites, and one training in Catalyst, Lightning and a plain loop."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from runs import RunProgress, RunRecord, picture, seconds_on_links, table
from torch import nn
from torch.utils.data import DataLoader

from dadplug import GradientReduction
from dadplug.data import DATASETS, SPLITS, DataPair, load_dataset, site_indices
from dadplug.options import Options
from dadplug.support.processes import launch_sites
from dadplug.tools.cli import add_kit_argument, add_option_arguments, options_of, place_of, plain_errors


@dataclass(frozen=True)
class Task:
    """A model and the settings of its training.

    Attributes:
        title: name of the model in messages.
        build: function that returns the model for a data set, and the data set in the size that the model needs.
        epochs: number of epochs by data set.
        batch_size: samples in a batch of one site.
        lr: learning rate of Adam.
        defaults: options of the reduction whose defaults differ from dadplug's.
        add_flags: function that adds flags, which `build` reads.
    """

    title: str
    build: Callable[[DataPair, argparse.Namespace], tuple[nn.Module, DataPair]]
    epochs: dict[str, int]
    batch_size: int = 32
    lr: float = 1e-3
    defaults: dict[str, Any] = field(default_factory=dict)
    add_flags: Callable[[argparse.ArgumentParser], Any] = lambda parser: None


def parse(task: Task, argv: list[str], doc: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    name = Path(sys.argv[0]).stem
    parser.add_argument("--rank", type=int, help="number of this site; without it, all sites start on this machine")
    parser.add_argument("--num-nodes", type=int, help="number of sites (default: 2)")
    parser.add_argument("--dist-url", help="rendezvous address, an address of site 0 (default: tcp://127.0.0.1:8998)")
    add_kit_argument(parser)
    parser.add_argument("--trainer", default="catalyst", choices=TRAINERS, help="what trains (default: catalyst)")
    parser.add_argument("--dataset", default="digits", help=f"data set: {', '.join(DATASETS)} (default: digits)")
    parser.add_argument("--data-dir", help="folder of the data set's files (default: data)")
    parser.add_argument("--split", default="iid", help=f"how samples are assigned to sites: {', '.join(SPLITS)}")
    parser.add_argument("--epochs", type=int, help="number of epochs (default: by data set)")
    parser.add_argument("--batch-size", type=int, default=task.batch_size, help="samples in a batch of one site")
    parser.add_argument("--lr", type=float, default=task.lr, help=f"learning rate of Adam (default: {task.lr})")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--compare", action="store_true", help="run dsgd, dad and rankdad one after the other")
    parser.add_argument("--log-dir", default=f"logs/{name}", help="folder of results")
    task.add_flags(parser)
    add_option_arguments(parser)
    parser.set_defaults(**{f"option_{option}": value for option, value in task.defaults.items()})
    parser.set_defaults(master_addr="127.0.0.1", master_port=8998)
    arguments = parser.parse_args(argv)
    if arguments.option_min_sites is not None:
        if arguments.compare:
            parser.error("--compare trains several times, and a site can return into the first training: leave it out")
        if "--sync-batchnorm" not in argv:  # it needs all sites in every step
            arguments.option_sync_batchnorm = False
    if arguments.num_nodes is None and arguments.kit is None:
        arguments.num_nodes = 2
    return arguments


class History:
    """Loss, bytes and time of every step of a run, and its progress.

    Args:
        epochs: number of epochs.
        progress: shows them while the run lasts; None to show nothing.
    """

    def __init__(self, epochs: int, progress: RunProgress | None = None) -> None:
        self.epochs = epochs
        self.losses, self.samples, self.bytes_sent, self.seconds = [], [], [], []
        self.epoch_seconds, self.accuracies = [], []
        self.complete = True  # whether this site has been there since the first step
        self._progress = progress
        self._set_up = self._start = self._epoch_start = 0

    def begin_epoch(self) -> None:
        self._epoch_start = time.perf_counter()

    def begin(self, reduction: GradientReduction) -> None:
        if not self.losses:
            self._set_up = reduction.traffic.total_bytes_sent
            self.complete = reduction.step == 0
        self._start = time.perf_counter()

    def end(self, reduction: GradientReduction, loss: float, samples: int) -> None:
        self.losses.append(loss)
        self.samples.append(samples)
        self.bytes_sent.append(reduction.traffic.total_bytes_sent - self._set_up)
        self.seconds.append(time.perf_counter() - self._start)
        if self._progress is not None:
            self._progress.step(**self._values(reduction, last=50))

    def _values(self, reduction: GradientReduction, last: int) -> dict[str, str]:
        """Mean loss and median step time of the last steps, and the bytes of the last one."""
        shown = {"sites": f"{len(reduction.present_sites)}/{reduction.world_size}"}
        if not self.losses:  # it has returned in this epoch
            return shown
        return {
            "loss": f"{statistics.fmean(self.losses[-last:]):.4f}",
            "MB/step": f"{reduction.traffic.bytes_sent / 1e6:.3f}",
            "ms/step": f"{1e3 * statistics.median(self.seconds[-last:]):.1f}",
        } | (shown if reduction.options.min_sites is not None else {})

    def end_training_epoch(self) -> None:
        self.epoch_seconds.append(time.perf_counter() - self._epoch_start)

    def end_epoch(self, reduction: GradientReduction, epoch: int, accuracy: float) -> None:
        self.accuracies.append(accuracy)
        if self._progress is not None:
            values = self._values(reduction, last=len(self.losses) // epoch)
            self._progress.end_epoch(**values, accuracy=f"{accuracy:.4f}")


@dataclass
class Run:
    """One training: the objects that a trainer needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    train: DataLoader
    valid: DataLoader
    options: dict[str, Any]
    classes: int
    seed: int
    steps: int
    history: History


def by_catalyst(run: Run) -> GradientReduction:
    from catalyst import dl
    from dadplug.runners import DistributedRunner

    class Recorder(dl.Callback):
        def __init__(self) -> None:
            super().__init__(order=dl.CallbackOrder.External)

        def on_loader_start(self, runner) -> None:
            if runner.is_train_loader:
                run.history.begin_epoch()

        def on_batch_start(self, runner) -> None:
            run.history.begin(runner.reduction)

        def on_batch_end(self, runner) -> None:
            if runner.is_train_loader:
                run.history.end(runner.reduction, float(runner.batch_metrics["loss"]), runner.batch_size)

        def on_loader_end(self, runner) -> None:
            if runner.is_train_loader:
                run.history.end_training_epoch()

        def on_epoch_end(self, runner) -> None:
            accuracy = runner.epoch_metrics["valid"]["accuracy01"]
            run.history.end_epoch(runner.reduction, runner.epoch_step, accuracy)

    class Silent(dl.ConsoleLogger):
        def log_metrics(self, *args, **kwargs) -> None:
            pass

    runner = DistributedRunner(run.model, nn.CrossEntropyLoss(), run.optimizer, **run.options)
    runner.train(
        loaders={"train": run.train, "valid": run.valid},
        scheduler=run.scheduler,
        num_epochs=run.history.epochs,
        seed=run.seed,
        loggers={"console": Silent()},
        callbacks=[dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1,)), Recorder()],
    )
    return runner.reduction


def by_lightning(run: Run) -> GradientReduction:
    import logging
    import warnings

    import pytorch_lightning as pl
    from dadplug.runners.pytorch_lightning import DADStrategy
    from torchmetrics.classification import MulticlassAccuracy

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.model
            self.accuracy = MulticlassAccuracy(run.classes, average="micro")

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.accuracy.update(self.net(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)

        def configure_optimizers(self):
            return [run.optimizer], [run.scheduler]

    class Recorder(pl.Callback):
        def on_train_epoch_start(self, trainer, module) -> None:
            run.history.begin_epoch()

        def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
            run.history.begin(trainer.strategy.reduction)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            run.history.end(trainer.strategy.reduction, float(outputs["loss"]), len(batch[0]))
            if trainer.is_last_batch:
                run.history.end_training_epoch()

        def on_validation_epoch_end(self, trainer, module) -> None:
            if not trainer.sanity_checking:
                accuracy = float(module.accuracy.compute())
                run.history.end_epoch(trainer.strategy.reduction, trainer.current_epoch + 1, accuracy)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    trainer = pl.Trainer(
        strategy=DADStrategy(**run.options),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_epochs=run.history.epochs,
        use_distributed_sampler=False,  # each site has its own samples
        callbacks=[Recorder()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), run.train, run.valid)
    return trainer.strategy.reduction


def by_hand(run: Run) -> GradientReduction:
    """Train in a plain loop; a site with fewer batches contributes no data to the last steps.

    A site that returns goes on at the step that the others are at, which `reduction.step` counts.
    """
    state = {"optimizer": run.optimizer, "scheduler": run.scheduler}
    reduction = GradientReduction(run.model, state=state, **run.options)
    steps, loss, targets = run.steps, torch.zeros(()), ()
    for epoch in range(reduction.step // steps + 1, run.history.epochs + 1):
        run.model.train()
        run.history.begin_epoch()
        first = reduction.step % steps
        batches = itertools.islice(run.train, first, None)
        for step in range(first, steps):
            run.history.begin(reduction)
            run.optimizer.zero_grad()
            if step < len(run.train):
                inputs, targets = next(batches)
                loss = nn.functional.cross_entropy(run.model(inputs), targets)
                loss.backward()
                reduction.synchronize()
            else:
                reduction.idle()
            run.optimizer.step()
            run.history.end(reduction, float(loss.detach()), len(targets))
        run.history.end_training_epoch()
        run.scheduler.step()
        reduction.average_buffers()
        run.model.eval()
        with torch.no_grad():
            right = sum(int((run.model(inputs).argmax(1) == targets).sum()) for inputs, targets in run.valid)
        run.history.end_epoch(reduction, epoch, right / len(run.valid.dataset))
    reduction.detach()
    return reduction


TRAINERS = {"catalyst": by_catalyst, "lightning": by_lightning, "plain": by_hand}


def train(task: Task, arguments: argparse.Namespace, data: DataPair, rank: int, num_nodes: int, mode: str) -> RunRecord:
    """Train one model by one method; every site calls it."""
    torch.manual_seed(arguments.seed)
    model, data = task.build(data, arguments)
    shares = [
        site_indices(data.train.labels, site, num_nodes, arguments.split, arguments.seed) for site in range(num_nodes)
    ]
    steps = max(-(-len(share) // arguments.batch_size) for share in shares)
    epochs = arguments.epochs or task.epochs.get(arguments.dataset, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    progress = RunProgress(mode, epochs, steps, shown=rank == 0)
    run = Run(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        train=DataLoader(data.train.subset(shares[rank]), batch_size=arguments.batch_size, shuffle=True),
        valid=DataLoader(data.test, batch_size=256),
        options=options_of(arguments) | {"mode": mode},
        classes=data.classes,
        seed=arguments.seed,
        steps=steps,
        history=History(epochs, progress),
    )
    try:
        reduction = TRAINERS[arguments.trainer](run)
    finally:
        progress.close()
    history, traffic = run.history, reduction.traffic
    return RunRecord(
        mode=mode,
        losses=mean_over_sites(reduction.gather_objects((history.losses, history.samples, history.complete))),
        bytes_sent=history.bytes_sent,
        accuracies=history.accuracies,
        bytes_a_step=traffic.bytes_sent,
        dense_bytes=traffic.dense_bytes,
        step_seconds=statistics.median(history.seconds),
        replicas_equal=reduction.first_difference() is None,
    )


def mean_over_sites(found: list[tuple[list[float], list[int], bool] | None]) -> list[float]:
    """Average the losses step by step, up to the last step of the site with the fewest steps.

    Sites that are absent, or have returned, are left out.
    """
    present = [each for each in found if each is not None]
    runs = [(losses, samples) for losses, samples, complete in present if complete] or [present[0][:2]]
    steps = min(len(losses) for losses, _ in runs)
    return [
        sum(losses[step] * samples[step] for losses, samples in runs) / sum(samples[step] for _, samples in runs)
        for step in range(steps)
    ]


def run_site(task: Task, arguments: argparse.Namespace) -> None:
    place = place_of(arguments)
    rank, num_nodes = place.rank, place.num_nodes
    data = load_dataset(arguments.dataset, arguments.data_dir)
    place.connect(arguments.option_timeout)
    title = f"{task.title} on {arguments.dataset}, {num_nodes} sites, split {arguments.split}"
    if rank == 0:
        print(f"{title}, {arguments.trainer}", flush=True)
    runs = []
    for mode in ("dsgd", "dad", "rankdad") if arguments.compare else (arguments.option_mode,):
        runs.append(train(task, arguments, data, rank, num_nodes, mode))
    if rank == 0:
        print(f"\n{table(runs)}\n\n{seconds_on_links(runs)}")
        if arguments.compare:
            folder = Path(arguments.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            picture(runs, folder / "comparison.png", title)
            print(f"\npicture: {folder / 'comparison.png'}")


def main(task: Task, argv: list[str], doc: str) -> int:
    arguments = parse(task, argv, doc)
    with plain_errors(ValueError, ImportError):
        Options.create(**options_of(arguments))
        # Without a place, all sites start here; the place of the first is then as good as any.
        place = place_of(arguments)
        if place.processes > 1:
            raise ValueError("these examples divide their data among sites with one process: start one at each site")
        num_nodes = place.num_nodes
        data = load_dataset(arguments.dataset, arguments.data_dir)  # downloads what is missing, once
        site_indices(data.train.labels, 0, num_nodes, arguments.split)
    if arguments.rank is None and arguments.kit is None and "RANK" not in os.environ:
        return launch_sites([sys.argv[0], *argv], num_nodes)
    with plain_errors():
        run_site(task, arguments)
    return 0
