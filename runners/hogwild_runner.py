"""Catalyst's runner for Hogwild!."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from catalyst.callbacks.scheduler import SchedulerCallback
from catalyst.core.misc import get_original_callback
from torch import nn

from ..exchange.status import describe
from ..hogwild import Hogwild
from ..hogwild.training import HogwildOptions
from ..loaders import check_loader
from ..signature import takes_keywords_of
from ._catalyst.runner import BaseRunner, RunnerArguments
from .loaders import HogwildLoader


class HogwildRunner(BaseRunner):
    """Catalyst runner for Hogwild!: processes of one machine train one model in shared memory; for `SupervisedRunner`.

    Every process runs the same script, as started by torchrun. No process waits for another within a training loader,
    whose batches are dealt on demand, each once an epoch. After it all processes wait, so that evaluations and
    checkpoints are those of one model that nobody changes. Data of the other loaders are split over the processes.
    Everything else is as in `DistributedRunner`: metrics of a loader are those of all processes together, and only
    process 0 prints and writes files.

    Args:
        model: model to train; may be passed to `train` instead.
        criterion: loss; may be passed to `train` instead.
        optimizer: optimizer of the model; may be passed to `train` instead.
        state: ``"shared"``: one state of the optimizer; ``"own"``: each process has its own, see `dadplug.Hogwild`.
        arguments: ``threads`` of each process; by default the cores are divided among the processes; ``timeout``, in
            seconds, after which a silent process counts as lost where processes exchange metrics; ``input_key``,
            ``output_key``, ``target_key`` and ``loss_key`` as in `SupervisedRunner`; ``split_data`` as in
            `DistributedRunner`, for loaders other than those of training; ``process_group`` for their metrics.

    Attributes:
        options: the options.
        hogwild: the `Hogwild` of the last training; None before it, and with one process.

    Raises:
        ValueError: if an argument is wrong; the message lists the valid values.

    Example:
        >>> runner = HogwildRunner()
        >>> runner.train(model=model, criterion=criterion, optimizer=optimizer, loaders=loaders, num_epochs=5)
    """

    hogwild: Hogwild | None = None
    loader_batch_len: int

    options: HogwildOptions

    @takes_keywords_of(HogwildOptions, RunnerArguments)
    def __init__(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        state: str = HogwildOptions.state,
        **arguments: Any,
    ) -> None:
        super().__init__(model, criterion, optimizer, HogwildOptions, {"state": state} | arguments)
        self._place, self._group = 0, 1  # of the batch among those of an update, and their number

    # Start and end

    def train(self, **settings: Any) -> None:
        """Train as `DistributedRunner.train` does; all processes call it with the same settings.

        Args:
            settings: as in `DistributedRunner.train`.

        Raises:
            ProcessFailedError: if another process has raised an error or was killed.
        """
        self.hogwild = None
        try:
            super().train(**settings)
        except BaseException as error:
            if self.hogwild is not None and self.hogwild.running:
                self.hogwild.abort(describe(error))
            raise

    def _setup_loaders(self) -> None:
        """Leave the training loaders as they were given, since their batches are dealt."""
        super()._setup_loaders()
        if self.engine.num_processes > 1:
            for name, loader in self._shared_loaders("Hogwild!").items():
                check_loader(loader)
                self.loaders[name] = loader

    def _build_exchange(self, model: nn.Module, scaled: bool) -> None:
        """Share the memory of model and optimizer; nothing is exchanged."""
        if self.engine.num_processes == 1:
            return
        if self.engine.device.type != "cpu" or scaled:
            raise ValueError(
                "Hogwild! shares the memory of CPU processes: pass cpu=True and no fp16, or take DistributedRunner for "
                "GPUs"
            )
        state, threads = self.options.state, self.options.threads
        self.hogwild = Hogwild(model, self._optimizers, state=state, threads=threads)

    def _setup_callbacks(self) -> None:
        super()._setup_callbacks()
        if self.hogwild is None:
            return
        for callback in map(get_original_callback, self.callbacks.values()):
            if isinstance(callback, SchedulerCallback) and callback.mode == "batch":
                raise ValueError(
                    "with Hogwild! each process takes its own steps, and a scheduler of mode 'batch' would follow "
                    'those of one process: use SchedulerCallback(mode="epoch")'
                )
        for name in self._shared_loaders("Hogwild!"):
            self.loaders[name] = _DealtLoader(self.loaders[name], self.hogwild, ahead=self._accumulation - 1)

    def on_experiment_end(self, runner: Any) -> None:
        """Give the model memory of its own."""
        if self.hogwild is not None:
            self.hogwild.finish()
        super().on_experiment_end(runner)

    # The loop

    def on_loader_start(self, runner: Any) -> None:
        """Estimate the number of this process's batches, for progress bars."""
        super().on_loader_start(runner)
        if self.is_train_loader and self.hogwild is not None:
            self.loader_batch_len = -(-self.loader_batch_len // self.hogwild.processes)

    def _run_loader(self) -> None:
        """Run a loader; a training loader ends for all processes together."""
        if not self.is_train_loader:
            super()._run_loader()
            return
        with torch.set_grad_enabled(True):
            batches = iter(self.loader)
            while group := list(itertools.islice(batches, self._accumulation)):
                if self.need_early_stop:
                    self.need_early_stop = False
                    if self.hogwild is not None:
                        self.hogwild.stop_epoch()
                    break
                self._group = len(group)
                for self._place, self.batch in enumerate(group):
                    self._run_event("on_batch_start")
                    self._train_batch()
                    self._run_event("on_batch_end")
        if self.hogwild is not None:
            self.loader.finish()
            with self.hogwild.paused():
                pass

    @property
    def update_due(self) -> bool:
        """Whether the gradients of this batch complete an update."""
        return self._place + 1 == self._group

    @property
    def micro_batches(self) -> int:
        """Number of batches that the update of this batch accumulates."""
        return self._group

    def clip_gradients(self, function: Callable[[Any], Any]) -> Any:
        """Clip the gradients of this process by a function of the parameters; return what it returns."""
        model = self.model if isinstance(self.model, nn.Module) else nn.ModuleDict(self.model)
        return function(model.parameters())

    # Checkpoints

    def own_state(self) -> Any:
        """Return the state of this process's optimizer, if each process has its own."""
        if self.hogwild is None or self.options.state == "shared":
            return None
        return [optimizer.state_dict() for optimizer in self.hogwild.optimizers]

    def load_states(self, states: list[Any]) -> None:
        """Restore the state of this process's optimizer from those of all processes."""
        rank = self.engine.process_index
        if self.hogwild is None or rank >= len(states) or not isinstance(states[rank], list):
            return
        for optimizer, state in zip(self.hogwild.optimizers, states[rank], strict=True):
            optimizer.load_state_dict(state)


class _DealtLoader(HogwildLoader):
    """Loader whose length is the number of batches of all processes."""

    def __len__(self) -> int:
        return len(self._loader)
