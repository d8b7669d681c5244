"""Hogwild! inside of Lightning's loops: checks before the training, the loader, and the schedules of learning rates."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...hogwild.dealing import check_loader
from ...hogwild.layout import check_model, check_optimizer


def check_trainer(trainer: Any, layer_sync: Any) -> None:
    """Check the settings of a trainer; all processes find the same.

    Args:
        trainer: the trainer.
        layer_sync: what ``Trainer(sync_batchnorm=True)`` has asked for, or None.

    Raises:
        ValueError: for a setting that processes which do not train in step cannot follow.
    """
    for wrong, problem in (
        (trainer.max_steps != -1, "max_steps and fast_dev_run count steps of one process: use max_epochs"),
        (trainer.min_steps is not None, "min_steps counts steps of one process: use min_epochs"),
        (
            trainer.val_check_interval != 1.0,
            "val_check_interval must be 1.0: they validate together",
        ),
        (trainer.check_val_every_n_epoch is None, "check_val_every_n_epoch must be a number"),
        (layer_sync is not None, "sync_batchnorm is for processes in step; running statistics are shared anyway"),
    ):
        if wrong:
            raise ValueError(f"with Hogwild! each process takes its own steps; {problem}")
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if getattr(callback, "_every_n_train_steps", 0) or getattr(callback, "_train_time_interval", None):
            raise ValueError(
                f"with Hogwild! each process takes its own steps, and {name} would write checkpoints in the middle of "
                "those of others: leave every_n_train_steps and train_time_interval out, so that it writes after epochs"
            )
        if getattr(callback, "_interval", None) == "step" and callback.time_remaining() is not None:
            raise ValueError(
                "with Hogwild! each process takes its own steps, and max_time asks in each of them whether all stop: "
                'use the callback Timer(duration, interval="epoch")'
            )


def check_training(module: Any, optimizers: list[Any], configs: list[Any], precision: Any, state: str) -> None:
    """Check what is to be trained; all processes find the same.

    Args:
        module: the LightningModule.
        optimizers: its optimizers.
        configs: Lightning's settings of the learning-rate schedulers.
        precision: the precision plug-in.
        state: as in `Hogwild`.

    Raises:
        ValueError: for what Hogwild! cannot train.
    """
    if not module.automatic_optimization or len(optimizers) != 1:
        raise ValueError("HogwildStrategy needs automatic optimization and one optimizer; DADStrategy takes any module")
    if getattr(precision, "scaler", None) is not None:
        raise ValueError("Hogwild! has no part in a GradScaler: use precision 'bf16-mixed' or '32-true'")
    check_optimizer(optimizers[0], module, state)
    check_model(module, optimizers)
    for config in configs:
        if config.interval == "step" and (config.frequency != 1 or config.reduce_on_plateau):
            raise ValueError(
                "with Hogwild! a learning-rate scheduler of interval 'step' follows the steps of all processes and "
                "needs frequency 1, and may not be ReduceLROnPlateau"
            )


def count_batches(loader: Any, limit: int | float, processes: int) -> int:
    """Return the number of batches of an epoch, of all processes together.

    Args:
        loader: the training loader.
        limit: ``Trainer(limit_train_batches=)``: a number of batches, or a share of them.
        processes: number of processes.

    Raises:
        TypeError: if it is no DataLoader.
        ValueError: if its batches cannot be dealt, or are fewer than the processes.
    """
    check_loader(loader)
    batches = len(loader)
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if batches < processes:
        raise ValueError(f"an epoch of {batches} batches is too short for {processes} processes: use smaller batches")
    return batches


class Schedules:
    """Learning-rate schedulers of interval "step", which follow the steps of all processes.

    Lightning steps them once after each step of this process. Here they are stepped for those of the others.

    Args:
        module: the LightningModule, whose ``lr_scheduler_step`` is called.
        configs: Lightning's settings of the schedulers.
    """

    def __init__(self, module: nn.Module, configs: list[Any]) -> None:
        self._module: Any = module
        self._schedulers = [config.scheduler for config in configs if config.interval == "step"]
        self._steps = 0

    def count(self) -> None:
        """Count a step of this process, after which Lightning steps the schedulers."""
        self._steps += 1

    def catch_up(self, steps: int) -> None:
        """Step the schedulers until they have been stepped a number of times."""
        while self._steps < steps:
            self._steps += 1
            for scheduler in self._schedulers:
                self._module.lr_scheduler_step(scheduler, None)
