"""Lightning's strategy for Hogwild!, for either of Lightning's packages, neither of which it imports."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...exchange import Transport
from ...exchange.status import describe
from ...hogwild import Hogwild
from ...hogwild.layout import check_model, check_optimizer
from ...hogwild.training import HogwildOptions
from ...support.loaders import check_loader
from ...support.refusals import refuse
from ...support.signature import takes_keywords_of
from ..exchanges import SharedMemorySteps
from ..loaders import HogwildLoader
from .strategy import SiteStrategy, StrategyArguments


class HogwildStrategyBase(SharedMemorySteps, SiteStrategy):
    """Lightning strategy for Hogwild!: processes of one machine train one model in shared memory; also ``"hogwild"``.

    No process waits for another within an epoch. Batches of the training loader are dealt on demand, each once an
    epoch; ``limit_train_batches`` counts those of all processes. Epochs begin and end for all processes together, and
    evaluations and checkpoints happen in between, with one model that nobody changes. ``trainer.global_step`` is then
    the number of steps of all processes, and within an epoch it counts on by those of this process. Learning-rate
    schedulers of interval ``"step"`` follow the steps of all processes. Evaluation and its metrics are those of
    Lightning's ``DDPStrategy``. Values that ``self.log(..., sync_dist=True)`` logs at a step are those of this process
    alone; those of an epoch are means over the processes.

    The module needs automatic optimization and one optimizer. `dadplug.HogwildStrategy` is the strategy for the one of
    Lightning's two packages that is in use.

    Args:
        state: ``"shared"``: one state of the optimizer; ``"own"``: each process has its own, see `dadplug.Hogwild`.
        arguments: ``threads`` of each process; by default the cores are divided among the processes; ``timeout``, in
            seconds, after which a silent process counts as lost where processes exchange metrics; arguments of
            ``DDPStrategy``, as in `DADStrategy`.

    Attributes:
        options: the options.
        hogwild: the `Hogwild` of the last fit; None before it, and with one process.

    Raises:
        ValueError: if an argument is wrong; the message lists the valid values.

    Example:
        >>> trainer = pl.Trainer(strategy="hogwild", accelerator="cpu", devices=2, max_epochs=2)
        >>> trainer.fit(module, loader)
    """

    _in_step_with_others = False

    @takes_keywords_of(StrategyArguments, HogwildOptions)
    def __init__(self, state: str = HogwildOptions.state, **arguments: Any) -> None:
        super().__init__(HogwildOptions, {"state": state} | arguments)
        self._limit: int | float = 1.0
        self._loader: HogwildLoader | None = None
        self._schedules: Schedules | None = None
        self._first_step = 0  # that of the trainer, which may have resumed
        self._preparing = False
        self._new_loader = False
        self._batches = 0  # of this process in this epoch
        self._in_epoch = False

    @property
    def _deals(self) -> bool:
        return True

    # Start and end

    def setup(self, trainer: Any) -> None:
        fits = trainer.state.fn == "fit" and self._transport is not None
        self.hogwild, self._preparing, self._new_loader = None, fits, False
        if fits:
            self._check_devices()
            check_trainer(trainer, self._layer_sync)
        super().setup(trainer)
        self._preparing = False

    def _check_devices(self) -> None:
        device = self.root_device
        refuse(
            (
                device.type != "cpu",
                f"Hogwild! shares the memory of CPU processes, and this trainer uses {device}: pass "
                'accelerator="cpu", or take DADStrategy or DDPStrategy for GPUs',
            )
        )

    def _build_exchange(self, model: nn.Module, scaled: bool) -> None:
        """Check what is trained; nothing is exchanged, and memory is shared when the training loader is asked for."""
        if self._transport is not None:
            check_training(model, self._one_optimizer(), self.lr_scheduler_configs, scaled, self.options.state)
            self._schedules = Schedules(model, self.lr_scheduler_configs)
            self._prepare_loops(self._trainer)

    def _prepare_loops(self, trainer: Any) -> None:
        """Have the processes meet after the batches of an epoch and before a validation, for the time of this run."""
        loop = trainer.fit_loop.epoch_loop
        for owner, function in ((loop, self._run_epoch), (loop.val_loop, self._run_validation)):
            owner.run = functools.partial(function, owner.run)
            self._run.callback(delattr, owner, "run")
        trainer.fit_loop._combined_loader = None  # of a request for the number of steps, by configure_optimizers
        self._limit = trainer.limit_train_batches
        if self._limit:  # applied to the batches of all processes
            trainer.limit_train_batches = 1.0
            self._run.callback(setattr, trainer, "limit_train_batches", self._limit)

    def _begin(self) -> None:
        """Share the memory of model and optimizer; all processes call it at the same time."""
        state, threads = self.options.state, self.options.threads
        self.hogwild = Hogwild(self.lightning_module, self.optimizers[0], state=state, threads=threads)
        self._first_step = self._trainer.global_step

    def on_train_end(self) -> None:
        if self.hogwild is not None:
            self.hogwild.finish()
        super().on_train_end()

    def teardown(self) -> None:
        self._end_hogwild()
        self._loader = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Post the exit reason to the other processes, so that none waits for this one."""
        self._end_hogwild(describe(exception))
        super().on_exception(exception)

    # Training

    def _wrap_train_loader(self, dataloader: Any, transport: Transport) -> Any:
        """Have the batches of the training loader dealt."""
        if self._preparing:
            return dataloader
        if self._new_loader:
            raise ValueError("Hogwild! deals the batches of one training loader: put the data sets into one")
        batches = count_batches(dataloader, self._limit, self.world_size)
        if self.hogwild is None:
            self._begin()
        assert self.hogwild is not None
        self._new_loader = True
        self._loader = HogwildLoader(dataloader, self.hogwild, ahead=1, limit=batches)
        return self._loader

    def _run_epoch(self, run: Callable[[Any], None], data_fetcher: Any) -> None:
        """Run the batches of an epoch, and wait for the other processes."""
        if self.hogwild is not None:
            with self.hogwild.paused():  # no process trains while another one is in on_train_start
                pass
        self._new_loader, self._batches, self._in_epoch = False, 0, True
        try:
            run(data_fetcher)
        finally:
            self._in_epoch = False
        if self._batches and not data_fetcher.done and not self._trainer.should_stop:
            raise RuntimeError(
                "on_train_batch_start returned -1, which leaves out the rest of an epoch in this process alone: use "
                "limit_train_batches, or set trainer.should_stop"
            )
        self._settle()

    def _run_validation(self, run: Callable[[], Any]) -> Any:
        """Run a validation after all processes have finished the epoch."""
        if self._in_epoch:
            self._settle()
        return run()

    def _settle(self) -> None:
        """Wait until all processes have finished the epoch, and count their steps."""
        trainer, hogwild = self._trainer, self.hogwild
        if hogwild is None or self._loader is None or self._schedules is None:
            return
        self._loader.finish()
        if trainer.should_stop:
            hogwild.stop_epoch()
        with hogwild.paused():
            steps = hogwild.steps
        assert self._transport is not None
        trainer.should_stop = any(self._transport.gather_objects(trainer.should_stop))
        count = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        count.ready = count.completed = self._first_step + steps
        self._schedules.catch_up(steps)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        super().on_train_batch_start(batch, batch_idx)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; the learning rate of the step behind it is that of the steps of all processes so far."""
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._schedules is not None and self.hogwild is not None and self.hogwild.running:
            self._schedules.catch_up(self.hogwild.steps)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._schedules is not None:
            self._schedules.count()
        return output

    # Collectives, which need all processes

    @property
    def _alone(self) -> bool:
        return self._in_epoch and self.hogwild is not None and bool(self._trainer.training) and not self._interrupted

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the processes; within an epoch return it, since the others are at other steps."""
        if self._alone:
            warnings.warn(
                "with Hogwild! the processes are at different steps: sync_dist=True has no effect on values of a step",
                stacklevel=2,
            )
        return super().reduce(tensor, group, reduce_op)

    # Checkpoints

    def _add_states(self, checkpoint: dict[str, Any]) -> None:
        """Add the optimizer's state of every process to a checkpoint, if each has its own."""
        if self._in_fit and (own := self.own_state()) is not None:
            assert self._transport is not None
            checkpoint["dadplug"] = self._transport.gather_objects(own)


def check_trainer(trainer: Any, layer_sync: Any) -> None:
    """Check the settings of a trainer; all processes find the same.

    Args:
        trainer: the trainer.
        layer_sync: what ``Trainer(sync_batchnorm=True)`` has asked for, or None.

    Raises:
        ValueError: for a setting that processes which do not train in step cannot follow.
    """
    own = "with Hogwild! each process takes its own steps"
    refuse(
        (trainer.max_steps != -1, f"{own}; max_steps and fast_dev_run count steps of one process: use max_epochs"),
        (trainer.min_steps is not None, f"{own}; min_steps counts steps of one process: use min_epochs"),
        (trainer.val_check_interval != 1.0, f"{own}; val_check_interval must be 1.0: they validate together"),
        (trainer.check_val_every_n_epoch is None, f"{own}; check_val_every_n_epoch must be a number"),
        (
            layer_sync is not None,
            f"{own}; sync_batchnorm is for processes in step; running statistics are shared anyway",
        ),
    )
    for callback in trainer.callbacks:
        in_steps = getattr(callback, "_every_n_train_steps", 0) or getattr(callback, "_train_time_interval", None)
        refuse(
            (
                in_steps,
                f"{own}, and {type(callback).__name__} would write checkpoints while others write theirs: leave "
                "every_n_train_steps and train_time_interval out, so that it writes after epochs",
            ),
            (
                getattr(callback, "_interval", None) == "step" and callback.time_remaining() is not None,
                f"{own}, and max_time asks in each of them whether all stop: use the callback Timer(duration, "
                'interval="epoch")',
            ),
        )


def check_training(
    module: nn.Module, optimizer: torch.optim.Optimizer, configs: list[Any], scaled: bool, state: str
) -> None:
    """Check what is to be trained; all processes find the same.

    Args:
        module: the LightningModule.
        optimizer: its optimizer.
        configs: Lightning's settings of the learning-rate schedulers.
        scaled: whether the precision has a GradScaler.
        state: as in `Hogwild`.

    Raises:
        ValueError: for what Hogwild! cannot train.
    """
    refuse((scaled, "Hogwild! has no part in a GradScaler: use precision 'bf16-mixed' or '32-true'"))
    check_optimizer(optimizer, module, state)
    check_model(module, [optimizer])
    by_steps = [config for config in configs if config.interval == "step"]
    refuse(
        (
            any(config.frequency != 1 or config.reduce_on_plateau for config in by_steps),
            "with Hogwild! a learning-rate scheduler of interval 'step' follows the steps of all processes and needs "
            "frequency 1, and may not be ReduceLROnPlateau",
        )
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
