"""Command line of the experiments: ``python -m dadplug.experiment --rank 0 --num-nodes 2``, once for each site."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from .data import DATASETS, SPLITS, Samples, fold_indices, load_dataset, site_indices
from .models import MODELS, build_for
from .options import Options
from .support.refusals import refuse
from .support.registry import Registry
from .tools.cli import (
    Place,
    add_kit_argument,
    add_option_arguments,
    argument,
    group,
    options_of,
    place_of,
    plain_errors,
)

CRITERIA: Registry[str, type[nn.Module]] = Registry("criterion")
CRITERIA.register("crossentropyloss", "crossentropy")(nn.CrossEntropyLoss)
CRITERIA.register("nllloss", "nll")(nn.NLLLoss)
CRITERIA.register("multimarginloss")(nn.MultiMarginLoss)

OPTIMIZERS: Registry[str, Any] = Registry("optimizer")
OPTIMIZERS.register("adam")(torch.optim.Adam)
OPTIMIZERS.register("adamw")(torch.optim.AdamW)
OPTIMIZERS.register("sgd")(torch.optim.SGD)
OPTIMIZERS.register("rmsprop")(torch.optim.RMSprop)

# Functions of the optimizer, the number of epochs, and the user's own settings.
SCHEDULERS: Registry[str, Any] = Registry("scheduler")
SCHEDULERS.register("none")(lambda optimizer, epochs: None)
SCHEDULERS.register("step", "steplr")(
    lambda optimizer, epochs, **own: lr_scheduler.StepLR(optimizer, **{"step_size": max(1, epochs // 3)} | own)
)
SCHEDULERS.register("exponential", "exponentiallr")(
    lambda optimizer, epochs, **own: lr_scheduler.ExponentialLR(optimizer, **{"gamma": 0.95} | own)
)
SCHEDULERS.register("cosine", "cosineannealinglr")(
    lambda optimizer, epochs, **own: lr_scheduler.CosineAnnealingLR(optimizer, **{"T_max": epochs} | own)
)
SCHEDULERS.register("plateau", "reducelronplateau")(
    lambda optimizer, epochs, **own: lr_scheduler.ReduceLROnPlateau(optimizer, **{"patience": 2} | own)
)


FLAGS = (
    group(
        "this site (under torchrun, from its environment)",
        argument("--rank", type=int, help="number of this site, from 0 (default: 0)"),
        argument("--num-nodes", type=int, help="number of sites (default: 1)"),
        add_kit_argument,
        argument("--start-sites", type=int, help="with --kit: number of sites with which training may start"),
        argument("--start-after", type=float, help="with --start-sites: seconds to wait for the others (default: 60)"),
        argument("--backend", default=None, help="gloo or nccl (default: by device)"),
        argument("--dist-url", default=None, help="rendezvous, tcp://HOST:PORT, an address of site 0"),
        argument("--master-addr", default="127.0.0.1", help="address of site 0, if --dist-url is not given"),
        argument("--master-port", type=int, default=8998, help="port of site 0, if --dist-url is not given"),
    ),
    group(
        "the experiment",
        argument("--name", default="experiment", help="name of the experiment, and of its folder of results"),
        argument("--log-dir", default="logs", help="folder of all results (default: logs)"),
        argument("--epochs", type=int, default=10, help="number of epochs (default: 10)"),
        argument("--batch-size", type=int, default=16, help="samples in a batch of one site (default: 16)"),
        argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)"),
        argument("--criterion", default="crossentropyloss", help=f"loss: {', '.join(CRITERIA)}"),
        argument("--optimizer", default="adam", help=f"optimizer: {', '.join(OPTIMIZERS)}"),
        argument("--scheduler", default="none", help=f"learning rate schedule: {', '.join(SCHEDULERS)}"),
        argument("--scheduler-kwargs", default="{}", help="settings of the schedule, a JSON object"),
        argument("--seed", type=int, default=0, help="seed of model, folds and batches (default: 0)"),
        argument("--resume", default=None, help="checkpoint of site 0 to resume from"),
    ),
    group(
        "model and data",
        argument("--model", default="MNISTNet", help=f"model: {', '.join(MODELS)}"),
        argument("--model-args", default="[]", help="positional arguments of the model, a JSON list"),
        argument("--model-kwargs", default="{}", help="keyword arguments of the model, a JSON object"),
        argument("--dataset", default="digits", help=f"data set: {', '.join(DATASETS)}"),
        argument("--data-dir", help="folder of the data set's files (default: data)"),
        argument("--split", default="iid", help=f"distribution of the training data over sites: {', '.join(SPLITS)}"),
        argument("--num-folds", type=int, default=5, help="number of folds of cross-validation (default: 5)"),
        argument("--k", type=int, default=0, help="fold to validate on, from 0 (default: 0)"),
        argument("--N", type=int, default=-1, help="samples to use, the first N; -1: all (default: -1)"),
    ),
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(prog="dadplug.experiment", description=__doc__.split(":")[0])
    for declare in FLAGS:
        declare(parser)
    add_option_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run one site of an experiment.

    Args:
        argv: arguments; those of the program if None.
    """
    arguments = build_parser().parse_args(argv)
    with plain_errors(ValueError, ImportError):
        experiment = Experiment(arguments)
    with plain_errors(FileNotFoundError):
        experiment.run()


class Experiment:
    """One site of an experiment.

    Args:
        arguments: arguments, parsed by `build_parser`.

    Attributes:
        rank: number of this site.
        num_nodes: number of sites.
        options: options of the gradient reduction.
        model: model that is trained.
        loaders: train and validation loader of this site.
        folder: folder of this site's results.

    Raises:
        ValueError: if an argument is unknown or out of range; the message lists the valid ones.
        DataError: if the data set is not available.

    Example:
        >>> arguments = build_parser().parse_args(["--dataset", "digits", "--epochs", "2"])
        >>> Experiment(arguments).run()["replicas_equal"]
        True
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self._place = place_of(arguments)
        self.rank, self.num_nodes = self._place.rank, self._place.num_nodes
        self.options = Options.create(**options_of(arguments))
        refuse(
            (arguments.epochs < 1, f"epochs must be at least 1, got {arguments.epochs}"),
            (arguments.batch_size < 1, f"batch-size must be at least 1, got {arguments.batch_size}"),
            (
                arguments.N == 0 or arguments.N < -1,
                f"N must be a number of samples, or -1 for all, got {arguments.N}",
            ),
        )
        model_args = _json(arguments.model_args, "model-args", list)
        model_kwargs = _json(arguments.model_kwargs, "model-kwargs", dict)
        scheduler_kwargs = _json(arguments.scheduler_kwargs, "scheduler-kwargs", dict)
        torch.manual_seed(arguments.seed)
        data = load_dataset(arguments.dataset, arguments.data_dir)
        self.model, data = build_for(data, arguments.model, *model_args, **model_kwargs)
        self.criterion = CRITERIA[arguments.criterion]()
        self.optimizer = OPTIMIZERS[arguments.optimizer](self.model.parameters(), lr=arguments.lr)
        try:
            self.scheduler = SCHEDULERS[arguments.scheduler](self.optimizer, arguments.epochs, **scheduler_kwargs)
        except TypeError as error:
            raise ValueError(f"scheduler {arguments.scheduler!r} does not take scheduler-kwargs: {error}") from error
        self.classes = data.classes
        self.loaders = _loaders(arguments, data.train, self._place)
        process = f"_process_{self._place.process}" if self._place.process else ""
        self.folder = Path(arguments.log_dir) / arguments.name / f"site_{self.rank}{process}"

    def run(self) -> dict[str, Any]:
        """Train with the other sites.

        Returns:
            Contents of ``results.json``: the last epoch's metrics by loader, the traffic, and whether the replicas of
            the sites are equal.

        Raises:
            SiteError: if another site does not connect, exits or does not answer.
            FileNotFoundError: if site 0 does not have the checkpoint to resume from.
        """
        if self.num_nodes > 1:
            start = {name: getattr(self.arguments, name) for name in ("start_sites", "start_after")}
            self._place.connect(self.options.timeout, self.arguments.backend, **start)
        self.folder.mkdir(parents=True, exist_ok=True)
        options = options_of(self.arguments)
        parameters = {name: value for name, value in vars(self.arguments).items() if not name.startswith("option_")}
        parameters |= {"rank": self.rank, "num_nodes": self.num_nodes, "options": options}
        (self.folder / "parameters.json").write_text(json.dumps(parameters, indent=2) + "\n")
        results = self._train()
        (self.folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        return results

    def _train(self) -> dict[str, Any]:
        from catalyst import dl

        from .callbacks import BatchTimerCallback, TrafficMonitorCallback
        from .runners import DistributedRunner

        keys = {"input_key": "logits", "target_key": "targets"}
        runner = DistributedRunner(self.model, self.criterion, self.optimizer, **options_of(self.arguments))
        runner.train(
            loaders=self.loaders,
            scheduler=self.scheduler,
            num_epochs=self.arguments.epochs,
            logdir=str(self.folder),
            valid_loader="valid",
            valid_metric="loss",
            minimize_valid_metric=True,
            verbose=sys.stderr.isatty(),
            seed=self.arguments.seed,
            resume=self.arguments.resume,
            callbacks=[
                dl.AccuracyCallback(**keys, topk=(1, min(3, self.classes))),
                dl.PrecisionRecallF1SupportCallback(**keys, num_classes=self.classes),
                dl.AUCCallback(**keys),
                BatchTimerCallback(),
                TrafficMonitorCallback(),
                dl.CheckpointCallback(
                    logdir=str(self.folder / "checkpoints"),
                    mode="runner",
                    loader_key="valid",
                    metric_key="loss",
                    minimize=True,
                ),
            ],
        )
        traffic = runner.reduction.traffic
        return {
            "metrics": {name: values for name, values in runner.epoch_metrics.items() if values},
            "traffic": {"bytes_a_step": traffic.bytes_sent, "dense_bytes": traffic.dense_bytes},
            "replicas_equal": runner.reduction.first_difference() is None,
        }


def _json(text: str, flag: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} is not JSON: {error} in {text!r}") from error
    if not isinstance(value, kind):
        wanted = "a JSON list, such as [784, 10]" if kind is list else 'a JSON object, such as {"classes": 10}'
        raise ValueError(f"{flag} must be {wanted}, got {text!r}")
    return value


def _loaders(arguments: argparse.Namespace, samples: Samples, place: Place) -> dict[str, DataLoader[Any]]:
    """Build the loaders: the part of this process in the site's training folds, and the validation fold."""
    if arguments.N > 0:
        samples = samples.subset(torch.arange(min(arguments.N, len(samples))))
    train, valid = fold_indices(len(samples), arguments.num_folds, arguments.k, arguments.seed)
    mine = train[site_indices(samples.labels[train], place.rank, place.num_nodes, arguments.split, arguments.seed)]
    mine = mine[place.process :: place.processes]
    held_out: Any = samples.plain().subset(valid)
    own: Any = samples.subset(mine)
    return {
        "train": DataLoader(own, batch_size=arguments.batch_size, shuffle=True),
        "valid": DataLoader(held_out, batch_size=max(arguments.batch_size, 64)),
    }


if __name__ == "__main__":
    main()
