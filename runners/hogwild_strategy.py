"""Lightning's strategy for Hogwild!, for either of Lightning's packages, neither of which it imports."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..exchange.failure_reports import describe
from ..hogwild import Hogwild
from ..hogwild.training import HogwildOptions
from ..signature import split_keywords, takes_keywords_of
from ._lightning.hogwild_fit import Schedules, check_trainer, check_training, count_batches
from ._lightning.site_strategy import SiteStrategy, StrategyArguments
from .hogwild_loader import HogwildLoader


class HogwildStrategyBase(SiteStrategy):
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

    hogwild: Hogwild | None = None

    options: HogwildOptions

    @takes_keywords_of(StrategyArguments, HogwildOptions)
    def __init__(self, state: str = HogwildOptions.state, **arguments: Any) -> None:
        given, options = split_keywords(StrategyArguments, arguments)
        super().__init__(HogwildOptions.create(state=state, **options), given)
        self._limit: int | float = 1.0
        self._loader: HogwildLoader | None = None
        self._schedules: Schedules | None = None
        self._first_step = 0  # that of the trainer, which may have resumed
        self._preparing = False
        self._new_loader = False
        self._batches = 0  # of this process in this epoch
        self._in_epoch = False

    @property
    def _exchange(self) -> None:
        """Nothing is exchanged: the processes share memory."""

    # Start and end

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's samplers: batches of the whole data set in training, a share of it in evaluation."""
        trainer = self._trainer
        if trainer is not None and trainer.training:
            return {"num_replicas": 1, "rank": 0}
        return super().distributed_sampler_kwargs

    def configure_ddp(self) -> None:
        """Wrap nothing: memory is shared once there is an optimizer."""
        if self._transport is not None:
            self._transport.gather_objects(None)  # a process that has failed by now shares none

    def setup(self, trainer: Any) -> None:
        fits = trainer.state.fn == "fit" and self._transport is not None
        self.hogwild, self._preparing, self._new_loader = None, fits, False
        if fits:
            self._check_devices()
            check_trainer(trainer, self._layer_sync)
        super().setup(trainer)
        self._preparing = False
        if fits:
            module, configs = self.lightning_module, self.lr_scheduler_configs
            check_training(module, self.optimizers, configs, self.precision_plugin, self.options.state)
            self._schedules = Schedules(module, configs)
            self._prepare_loops(trainer)

    def _check_devices(self) -> None:
        if self.root_device.type != "cpu":
            raise ValueError(
                f"Hogwild! shares the memory of CPU processes, and this trainer uses {self.root_device}: pass "
                'accelerator="cpu", or take DADStrategy or DDPStrategy for GPUs'
            )

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
        if self.hogwild is not None and self.hogwild.running:
            self.hogwild.abort()
        self._loader = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Post the exit reason to the other processes, so that none waits for this one."""
        if self.hogwild is not None and self.hogwild.running:
            self.hogwild.abort(describe(exception))
        super().on_exception(exception)

    # Training

    def process_dataloader(self, dataloader: Any) -> Any:
        """Have the batches of the training loader dealt."""
        dataloader = super(SiteStrategy, self).process_dataloader(dataloader)
        trainer = self._trainer
        if trainer is None or not trainer.training or self._transport is None or self._preparing:
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

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._check_between_epochs("a barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._check_between_epochs("a broadcast")
        return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the processes; within an epoch return it, since the others are at other steps."""
        if not self._trains:
            return super().reduce(tensor, group, reduce_op)
        warnings.warn(
            "with Hogwild! the processes are at different steps: sync_dist=True has no effect on values of a step",
            stacklevel=2,
        )
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._check_between_epochs("a common decision")
        return super().reduce_boolean_decision(decision, all)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._check_between_epochs("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @property
    def _trains(self) -> bool:
        """Whether this process is within the batches of an epoch."""
        return self._in_epoch and self.hogwild is not None and bool(self._trainer.training) and not self._interrupted

    def _check_between_epochs(self, what: str) -> None:
        """Raise RuntimeError within the batches of an epoch, where other processes would never answer."""
        if self._trains:
            raise RuntimeError(
                f"{what} was called in training: with Hogwild! the processes are at different steps, and can wait for "
                "one another between epochs only, as in on_train_epoch_end or in validation"
            )

    def _share_sigterm(self) -> None:
        """Stop this process if it has got SIGTERM; the others stop since it is gone."""
        if self._trainer.received_sigterm:
            raise self._sigterm()

    # Checkpoints

    def _add_states(self, checkpoint: dict[str, Any]) -> None:
        """Add the optimizer's state of every process to a checkpoint, if each has its own."""
        if self.options.state == "own" and self._in_fit and self._transport is not None:
            checkpoint["dadplug"] = self._transport.gather_objects({"optimizer": self.optimizers[0].state_dict()})

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the state of this process's optimizer; that of process 0 if the checkpoint has no other."""
        states, self._states = self._states, None
        own = states[self.global_rank] if states is not None and self.global_rank < len(states) else None
        if self.options.state == "own" and own is not None and "optimizer" in own:
            checkpoint = dict(checkpoint) | {"optimizer_states": [own["optimizer"]]}
        super().load_optimizer_state_dict(checkpoint)
