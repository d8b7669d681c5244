"""Common part of the Catalyst runners for training between sites: engine, callbacks, loaders, metrics, checkpoints."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from catalyst.callbacks.scheduler import SchedulerCallback
from catalyst.core.callback import Callback, ICheckpointCallback, ISchedulerCallback
from catalyst.core.misc import get_original_callback
from catalyst.engines.torch import CPUEngine, GPUEngine
from catalyst.runners.supervised import SupervisedRunner
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...errors import MismatchError
from ...exchange import Transport, connect
from ...exchange.transport import Requirements
from ...model_sync.samples import batches_before, takes_part
from ..position import batches_from
from .engine import SiteEngine
from .fixes import accumulation_steps, adapt, load_model, load_runner
from .loaders import begin_epoch
from .metrics import merge_metrics
from .patches import OLDER_NAMES
from .runner_arguments import RunnerArguments
from .shared_checkpoint import shared_checkpoint


class BaseRunner(SupervisedRunner):
    """Catalyst runner that trains one model between sites; the base of those for a family of exchange.

    It connects the sites, divides data, merges metrics, and puts the state of every site into checkpoints. A subclass
    builds the exchange in `_build_exchange`.

    Args:
        model: model to train, or None if `train` gets it.
        criterion: loss, or None.
        optimizer: optimizer of the model, or None.
        options: options of the exchange, with a ``timeout`` in seconds.
        arguments: arguments of all runners.

    Attributes:
        options: the options of the exchange.
        reduction: the exchange of the last training, with its traffic.
        steps: number of steps of the current loader, the same on all sites in training.
        micro_step: number of the current step.
        undivided: loaders as they were given, before their data were divided, by name.
    """

    engine: SiteEngine
    reduction: Any
    need_early_stop: bool
    loggers: dict[str, Any]

    def __init__(self, model: Any, criterion: Any, optimizer: Any, options: Any, arguments: RunnerArguments) -> None:
        super().__init__(
            model=model,
            input_key=arguments.input_key,
            output_key=arguments.output_key,
            target_key=arguments.target_key,
            loss_key=arguments.loss_key,
        )
        self.options = options
        self._given = {"model": model, "criterion": criterion, "optimizer": optimizer}
        self._split_data = arguments.split_data
        self._process_group = arguments.process_group
        self._states: tuple[int, list[Any]] | None = None
        self._loader_samples = 0
        self.undivided: Mapping[str, Any] = {}
        self.steps = 0
        self.micro_step = 0
        self._own_steps = 0
        self._accumulation = 1
        # Until the end of train(): its callbacks are built as its arguments, before it runs.
        OLDER_NAMES.open()
        self._close_older_names = weakref.finalize(self, OLDER_NAMES.close)

    # The exchange

    @property
    def _requirements(self) -> Requirements | None:
        """Requirements of training to go on without a site that leaves; None where all must stay."""
        return None

    @property
    def _joins(self) -> bool:
        """Whether this site joins others in mid-training, up to the end of its first step."""
        return False

    def _build_exchange(self, model: torch.nn.Module, scaled: bool) -> Any:
        """Build what the sites exchange in training.

        Args:
            model: the model.
            scaled: whether a GradScaler looks for Inf in gradients.
        """
        raise NotImplementedError

    def take_part(self) -> None:
        """Take part in the other sites' step if this site has skipped its batch, without a backward pass."""

    def step_optimizer(self, optimizer: Any) -> None:
        """Step an optimizer with the agreed gradients."""
        optimizer.step()

    # What the user calls

    def train(self, *, loaders: Any, cpu: bool = False, fp16: bool = False, **settings: Any) -> None:
        """Train as `SupervisedRunner.train` does; all sites call it with the same settings.

        Args:
            loaders: loaders by name, as in `SupervisedRunner`.
            cpu: whether to use the CPU even if there is a GPU.
            fp16: whether to train in half precision.
            settings: all other arguments of `SupervisedRunner.train`. Model, criterion and optimizer default to those
                of the constructor. ``resume`` is the path of a checkpoint on site 0, of a whole training or of a model;
                ``engine`` determines device and precision.

        Raises:
            ValueError: if there is no model, or the engine is not a CPUEngine or GPUEngine.
            SiteError: if a site exits or does not answer in time.
            MismatchError: if models, options or loaders differ between sites.
        """
        self._connect()
        for name, value in self._given.items():
            if settings.get(name) is None:
                settings[name] = value
        if settings["model"] is None:
            raise ValueError(f"there is no model: give one to {type(self).__name__} or to train()")
        settings["engine"] = self._site_engine(settings.get("engine"), cpu, fp16)
        try:
            with warnings.catch_warnings():
                # Catalyst's metrics read the loss while it still has its graph.
                warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad=True to a scalar")
                super().train(loaders=loaders, **settings)
        finally:
            self._states = None
            self._close_older_names()

    def _connect(self) -> None:
        """Connect to the other sites by the environment, unless they are connected."""
        connect(timeout=self.options.timeout)

    def predict_loader(
        self, *, loader: Any, engine: Any = None, cpu: bool = False, fp16: bool = False, **rest: Any
    ) -> Any:
        """Predict as `SupervisedRunner.predict_loader` does, on this site for the whole of its loader."""
        return super().predict_loader(
            loader=loader, engine=engine or self._site_engine(None, cpu, fp16, split_data=False), **rest
        )

    def _site_engine(self, engine: Any, cpu: bool, fp16: bool, split_data: bool | str | None = None) -> SiteEngine:
        precision = "fp16" if fp16 else "no"
        if isinstance(engine, (CPUEngine, GPUEngine, SiteEngine)):
            cpu, precision = engine.device.type == "cpu", str(engine.mixed_precision)
        elif engine is not None:
            raise ValueError(
                f"{type(self).__name__} speaks with the other sites itself and cannot use {type(engine).__name__}: "
                "leave engine out, or pass a CPUEngine or GPUEngine"
            )
        return SiteEngine(
            cpu=cpu,
            mixed_precision=precision,
            timeout=self.options.timeout,
            split_data=self._split_data if split_data is None else split_data,
            process_group=self._process_group,
            requirements=self._requirements,
            open_with=self._open_with,
        )

    def _open_with(self, open_first: Callable[[], Transport]) -> Transport:
        """Open the transport for everything but gradients, by a function that opens the usual one."""
        return open_first()

    def _run(self) -> None:
        with self._engine.running():
            super()._run()

    # Setting up

    def get_callbacks(self) -> OrderedDict[str, Callback]:
        """Return the callbacks, stock ones replaced by their fixed versions."""
        callbacks: OrderedDict[str, Callback] = super().get_callbacks()
        found = [get_original_callback(callback) for callback in callbacks.values()]
        # Catalyst tests for a base class that torch's schedulers have not had since 2.0, and never steps them.
        if isinstance(self._scheduler, (LRScheduler, ReduceLROnPlateau)) and not any(
            isinstance(callback, ISchedulerCallback) for callback in found
        ):
            keys = {"loader_key": self._valid_loader, "metric_key": self._valid_metric}
            callbacks["_scheduler"] = SchedulerCallback(**(keys if None not in keys.values() else {}))
        # Checkpoints have the order of schedulers: before them they would hold the last epoch's learning rate.
        last = [name for name, callback in callbacks.items() if isinstance(callback, ICheckpointCallback)]
        for name in last:
            callbacks.move_to_end(name)
        for name, callback in callbacks.items():
            callbacks[name] = adapt(callback)
        self._accumulation = accumulation_steps(found)
        return callbacks

    def _setup_loaders(self) -> None:
        self.engine.seed = self.seed
        self.engine.loader_samples = lambda: self._loader_samples
        loaders = self.undivided = self.get_loaders()
        names = [*self.engine.transport.gather_present(list(loaders)).values()]
        if any(other != names[0] for other in names):
            raise MismatchError(f"the sites do not have the same loaders: {'; '.join(map(str, names))}")
        self.loaders = {name: self.engine.prepare_data_loader(loader, name=name) for name, loader in loaders.items()}

    def undivided_loader(self, name: str) -> tuple[Any, int]:
        """Return a loader as it was given, before its data were divided, and the number of sites that share them.

        Args:
            name: name of the loader.

        Raises:
            ValueError: if each site has data of its own, or gradients are accumulated.
        """
        if self._accumulation != 1:
            raise ValueError("a batch that follows goodput needs training without accumulation of gradients")
        if self.engine.splits[name] is None and self.engine.transport.world_size > 1:
            raise ValueError(
                f"each site has data of its own in loader {name!r}: their batches can follow goodput in a loop of your "
                "own, by dadplug.AdaptiveDataLoader(source=...)"
            )
        return self.undivided[name], self.engine.transport.world_size

    def _setup_components(self) -> None:
        super()._setup_components()
        model = self.model if isinstance(self.model, torch.nn.Module) else torch.nn.ModuleDict(self.model)
        if any(name.startswith("train") for name in self.loaders) and self.optimizer is not None:
            self.reduction = self._build_exchange(model, getattr(self.engine, "scaler", None) is not None)
            self.engine.reduction = self.reduction
        if self._resume is not None and not self._joins:
            checkpoint = self.load_shared(self._resume)
            (load_runner if "epoch_step" in checkpoint else load_model)(self, checkpoint)

    # The loop

    def on_loader_start(self, runner: Any) -> None:
        """Compute the number of steps with the other sites, and set the samplers' epoch."""
        super().on_loader_start(runner)
        self._loader_samples = 0
        self.micro_step = 0
        self._own_steps = len(self.loader)
        self.steps = begin_epoch(self.loader, self.loader_key, self.epoch_step, self.engine.transport)

    def on_batch_start(self, runner: Any) -> None:
        """Count the samples of this site."""
        super().on_batch_start(runner)
        self._loader_samples += self.batch_size

    def _run_loader(self) -> None:
        """Run a loader; in training all sites take as many steps as the site with the most batches.

        A site with fewer batches participates without data in some steps, which are spread over the epoch.
        """
        if not self.is_train_loader or self.engine.reduction is None:
            super()._run_loader()
            return
        with torch.set_grad_enabled(True):
            first = self.micro_step
            batches = self._batches_from(batches_before(first, self._own_steps, self.steps))
            step = first
            while step < self.steps:
                self.micro_step = step
                if self._stops_before_step():
                    break
                batch = next(batches, None) if takes_part(step, self._own_steps, self.steps) else None
                step += 1
                self._follow_length()
                if batch is None:
                    self._idle()
                else:
                    self.batch = batch
                    self._run_event("on_batch_start")
                    self._train_batch()
                    self._run_event("on_batch_end")
                if self._stops_after_step():
                    break
            else:
                if self._changes_batches:
                    next(batches, None)  # the loader ends the last step

    def _batches_from(self, first: int) -> Iterator[Any]:
        """Return the batches of the training loader from one on."""
        return batches_from(self.loader, first)

    @property
    def _changes_batches(self) -> bool:
        return getattr(self.loader, "max_batch_size", None) is not None

    def _follow_length(self) -> None:
        """Take over the number of steps from a loader whose batch changes in mid-epoch, at all sites alike."""
        if self._changes_batches:
            self.steps = self._own_steps = len(self.loader)

    def _stops_before_step(self) -> bool:
        """Return whether all sites stop before the step that is due; a request of this site may be passed on."""
        return False

    def _stops_after_step(self) -> bool:
        """Return whether all sites stop after the step that they have taken."""
        return False

    def _train_batch(self) -> None:
        self.handle_batch(batch=self.batch)

    def _idle(self) -> None:
        """Participate in a step without data."""
        raise NotImplementedError

    def clip_gradients(self, function: Callable[[Any], Any]) -> Any:
        """Clip the agreed gradients by a function of the parameters; return what it returns."""
        return function(self.reduction.model.parameters())

    @property
    def update_due(self) -> bool:
        """Whether the gradients of this batch complete an update, at the end of an accumulation or of the epoch."""
        return (self.micro_step + 1) % self._accumulation == 0 or self.micro_step + 1 >= self.steps

    @property
    def micro_batches(self) -> int:
        """Number of batches of this site that the update of this batch accumulates."""
        first = self.micro_step - self.micro_step % self._accumulation
        after = min(first + self._accumulation, self.steps)
        own, steps = self._own_steps, self.steps
        return max(1, batches_before(after, own, steps) - batches_before(first, own, steps))

    def on_loader_end(self, runner: Any) -> None:
        """Merge the metrics of all sites, and average running statistics before an evaluation uses them."""
        own = {name: float(value) for name, value in self.loader_metrics.items()}
        by_site = self.engine.transport.gather_present((own, self._loader_samples))
        self.loader_metrics.update(merge_metrics([*by_site.values()]))
        if self.engine.sites:
            self.loader_metrics["sites"] = float(len(by_site))
        if self.is_train_loader and self.engine.reduction is not None:
            self._end_training()
        super().on_loader_end(runner)

    def _end_training(self) -> None:
        """Make what may differ between the sites' models equal, after a training loader."""

    def on_epoch_end(self, runner: Any) -> None:
        """Stop all sites if one of them asks for it."""
        super().on_epoch_end(runner)
        self.need_early_stop = any(self.engine.transport.gather_present(self.need_early_stop).values())

    # Checkpoints

    def reduction_states(self) -> list[Any]:
        """Gather the states of all sites by rank, None for absent sites, once an epoch; all sites must call it."""
        if self._states is None or self._states[0] != self.epoch_step:
            self._states = (self.epoch_step, self.engine.transport.gather_objects(self.own_state()))
        return self._states[1]

    def own_state(self) -> Any:
        """Return the state of this site's exchange."""
        return self.reduction.state_dict()

    def load_states(self, states: list[Any]) -> None:
        """Restore this site's state from those of all sites, as `reduction_states` returned them."""
        self.reduction.load_states(states)

    def checkpoint_parts(self, *, saving: bool) -> dict[str, Any]:
        """Return the objects whose states a checkpoint holds, by Catalyst's names.

        Args:
            saving: whether the objects' states are read (then all sites must call it) or loaded.
        """
        model = self.model if isinstance(self.model, dict) else self.engine.unwrap_model(self.model)
        rest = {"criterion": self.criterion, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {"model": model} | rest

    def load_shared(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint of the first site that is present on all sites; see `shared_checkpoint`."""
        return shared_checkpoint(path, self.engine.transport)
