"""Base of the Catalyst runners: engine, loaders, the loop, fused steps, checkpoints, sites that leave and return."""

from __future__ import annotations

import functools
import hashlib
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from catalyst.callbacks.scheduler import SchedulerCallback
from catalyst.core.callback import Callback, ICheckpointCallback, ISchedulerCallback
from catalyst.core.misc import get_original_callback
from catalyst.engines.torch import CPUEngine, GPUEngine
from catalyst.runners.supervised import SupervisedRunner
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...errors import MismatchError
from ...exchange import Transport, connect
from ...exchange.fields import checked
from ...exchange.restrictions import METRICS, declared
from ...step.model_sync.private import (
    keeping_private,
    private_parameters,
    private_path,
    private_state,
    shared_part,
)
from ...step.model_sync.replicated_model import load_joined
from ...step.model_sync.samples import batches_before, takes_part
from ...support.files import load_tensors
from ...support.refusals import refuse
from ...support.signature import split_keywords
from ..exchanges import Exchange, plain_states
from ..joining import TrainerState
from ..loaders import batches_from, check_split_data
from ..patches import METRICS_KIND, merge_metrics, metrics_by_site
from .engine import SiteEngine, begin_epoch, plain, save_whole
from .fixes import (
    OLDER_NAMES,
    FixedBackward,
    FixedOptimizer,
    accumulation_steps,
    adapt,
    exchanging_callbacks,
    fused_callbacks,
    load_model,
    load_runner,
)

_AS_IN_SUPERVISED = {"help": "as in `SupervisedRunner`"}
_SPLIT = {
    "help": "True: all sites' loaders hold the same data set, which is split over the sites; False: each site has data "
    'of its own; ``"auto"``: split those loaders that hold the same data set on all sites'
}
_GROUP = {"help": "process group of the sites; the default group if None"}


@dataclass(frozen=True)
class RunnerArguments:
    """Arguments that every runner has beside model, criterion, optimizer and its own options.

    Raises:
        ValueError: if `split_data` is neither True, False nor ``"auto"``.
    """

    input_key: Any = field(default="features", metadata=_AS_IN_SUPERVISED)
    output_key: Any = field(default="logits", metadata=_AS_IN_SUPERVISED)
    target_key: str = field(default="targets", metadata=_AS_IN_SUPERVISED)
    loss_key: str = field(default="loss", metadata=_AS_IN_SUPERVISED)
    split_data: bool | str = field(default="auto", metadata=_SPLIT)
    process_group: dist.ProcessGroup | None = field(default=None, metadata=_GROUP)

    def __post_init__(self) -> None:
        check_split_data(self.split_data)


_COUNTERS = ("batch_step", "sample_step")


class ElasticTraining(TrainerState):
    """One training in which sites leave and return."""

    _kinds = {
        "epoch": int,
        "loader": str,
        "steps": int,
        "micro_step": int,
        "splits": dict[str, Any],
        "metrics": dict[str, dict[str, Any]],
        "counters": dict[str, int],
    }

    def _parts(self) -> dict[str, Any]:
        names = ("criterion", "optimizer", "scheduler") if self._sends_optimizer else ("criterion", "scheduler")
        return {name: getattr(self._trainer, name) for name in names}

    def _progress(self) -> dict[str, Any]:
        runner = self._trainer
        return {
            "epoch": runner.epoch_step,
            "loader": runner.loader_key,
            "steps": runner.steps,
            "micro_step": runner.micro_step,
            "splits": runner.engine.splits,
            "metrics": {name: dict(values) for name, values in runner.epoch_metrics.items() if name in runner.loaders},
            "counters": {name: getattr(runner, name) for name in _COUNTERS},
        }

    def restore(self) -> None:
        """Restore the state of another site, if this one joins."""
        if self.joined is not None:
            load_joined(self._training, self._restore, self.joined)

    def _restore(self, state: dict[str, Any]) -> None:
        runner = self._trainer
        self.restore_parts()
        for name in _COUNTERS:
            setattr(runner, name, state["counters"][name])
        runner.epoch_step = state["epoch"] - 1  # the epoch begins once more here
        for name in [
            name for name in runner.loaders if name not in runner.dealt
        ]:  # split over the sites as at the others
            loader, known = runner.undivided[name], state["splits"][name]
            runner.loaders[name] = runner.engine.prepare_data_loader(loader, name=name, known=known)


class BaseRunner(Exchange, SupervisedRunner):
    """Catalyst runner that trains one model between sites; the base of those for each way to train.

    It connects the sites, divides data, merges metrics, takes fused steps, and puts the state of every site into
    checkpoints. A way is a subclass, which derives from one of `dadplug.runners.exchanges` first.

    Args:
        model: model to train, or None if `train` gets it.
        criterion: loss, or None.
        optimizer: optimizer of the model, or None.
        kind: class of the exchange's options, see `Exchange`.
        keywords: those options, and arguments of all runners, see `RunnerArguments`.

    Attributes:
        options: the options of the exchange.
        reduction: the exchange of the last training, with its traffic.
        steps: number of steps of the current loader, the same on all sites in training.
        micro_step: number of the current step.
        undivided: loaders as they were given, before their data were divided, by name.
        dealt: names of the loaders whose batches are dealt.
        exchanging: the backward callbacks that exchange gradients when an update is due.
    """

    engine: SiteEngine
    reduction: Any
    need_early_stop: bool
    loggers: dict[str, Any]
    _elastic: ElasticTraining | None = None
    _trained: torch.nn.Module
    _trains = False  # whether there are a training loader and an optimizer
    _fused: list[FixedOptimizer] | None = None  # callbacks that take fused steps; None if steps are not fused

    def __init__(
        self, model: Any, criterion: Any, optimizer: Any, kind: type[Any], keywords: Mapping[str, Any]
    ) -> None:
        given, own = split_keywords(RunnerArguments, keywords)
        self.options = kind.create(**own)
        settings = vars(RunnerArguments(**given)).copy()
        self._split_data, self._process_group = settings.pop("split_data"), settings.pop("process_group")
        super().__init__(model=model, **settings)
        self._given = {"model": model, "criterion": criterion, "optimizer": optimizer}
        self._states: tuple[int, list[Any]] | None = None
        self.undivided: Mapping[str, Any] = {}
        self.dealt: set[str] = set()
        self.exchanging: list[FixedBackward] = []
        self.steps = 0
        self.micro_step = 0
        self._own_steps = 0
        self._accumulation = 1
        # Until the end of train(): its callbacks are built as its arguments, before it runs.
        OLDER_NAMES.open()
        self._close_older_names = weakref.finalize(self, OLDER_NAMES.close)

    # The exchange

    @property
    def _transport(self) -> Transport:
        return self.engine.transport

    @property
    def _joined(self) -> dict[str, Any] | None:
        """State of the other sites that this one joins in mid-training, up to the end of its first step; else None."""
        return None if self._elastic is None or not self._transport.rounds.joins else self._elastic.joined

    def _end_step(self) -> None:
        self.engine.end_step()

    def take_part(self) -> None:
        """Take part in the other sites' step if this site has skipped its batch, without a backward pass."""

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, as torch has them."""
        given = list(self.optimizer.values()) if isinstance(self.optimizer, dict) else [self.optimizer]
        return [plain(optimizer) for optimizer in given]

    def _one_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer; raise ValueError if there are several."""
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ValueError(f"{type(self).__name__} needs one optimizer; DistributedRunner takes several")
        return plain(self.optimizer)

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
            self._open_transport(torch.device("cpu")),
            cpu=cpu,
            mixed_precision=precision,
            split_data=self._split_data if split_data is None else split_data,
        )

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
        loaders = self.undivided = self.get_loaders()
        every = self._transport.gather_present(list(loaders))
        names = [*checked(every, list[str], "list of loaders", self._transport).values()]
        if any(other != names[0] for other in names):
            raise MismatchError(f"the sites do not have the same loaders: {'; '.join(map(str, names))}")
        self.loaders = {name: self.engine.prepare_data_loader(loader, name=name) for name, loader in loaders.items()}

    def _shared_loaders(self, dealer: str) -> dict[str, Any]:
        """Return the training loaders as they were given, since their batches are dealt.

        Args:
            dealer: what deals them, for the message.

        Raises:
            MismatchError: if the sites have different data sets in one.
        """
        loaders = {name: loader for name, loader in self.undivided.items() if name.startswith("train")}
        for name in loaders:
            if self.engine.splits[name] is None:
                raise MismatchError(
                    f"the sites have different data sets in loader {name!r}: {dealer} deals the batches of one"
                )
        return loaders

    def undivided_loader(self, name: str) -> tuple[Any, int]:
        """Return a loader as it was given, before its data were divided, and the number of sites that share them.

        Args:
            name: name of the loader.

        Raises:
            ValueError: if each site has data of its own, or gradients are accumulated.
        """
        refuse(
            (self._accumulation != 1, "a batch that follows goodput needs training without accumulation of gradients"),
            (
                self.engine.splits[name] is None and self._transport.world_size > 1,
                f"each site has data of its own in loader {name!r}: their batches can follow goodput in a loop of your "
                "own, by dadplug.AdaptiveDataLoader(source=...)",
            ),
        )
        return self.undivided[name], self._transport.world_size

    def _setup_components(self) -> None:
        super()._setup_components()
        model = self.model if isinstance(self.model, torch.nn.Module) else torch.nn.ModuleDict(self.model)
        self._trains = any(name.startswith("train") for name in self.loaders) and self.optimizer is not None
        if self._trains:
            self.engine.steps_in_backward = self._steps_in_backward
            state = ElasticTraining(self, self._transport, self._sends_optimizer)
            self._elastic = state if self._transport.rounds.elastic else None
            scaled = getattr(self.engine, "scaler", None) is not None
            self._trained = model
            self.reduction = self.engine.reduction = self._exchange = self._build_exchange(model, scaled)
        if self._resume is not None and self._joined is None:
            checkpoint = self.load_shared(self._resume)
            with self.keeping_private(self._resume):
                (load_runner if "epoch_step" in checkpoint else load_model)(self, checkpoint)

    def on_experiment_start(self, runner: Any) -> None:
        """Restore the state of the other sites, if this one joins them in mid-training."""
        super().on_experiment_start(runner)
        if self._elastic is not None:
            self._elastic.restore()

    # Fused steps

    def _reason_against_fusing(self) -> str:
        """Return why steps cannot be fused whatever the callbacks are; empty if they can."""
        return "" if getattr(self.engine, "scaler", None) is None else "a GradScaler scales the loss"

    def _setup_callbacks(self) -> None:
        super()._setup_callbacks()
        private = getattr(self.options, "privacy", None) is not None
        self.exchanging = exchanging_callbacks(self.callbacks.values(), private=private)
        self._fused = None
        if self._wants_fused and self.engine.reduction is not None:
            stepping, reason = fused_callbacks(self.callbacks.values())
            several = "several backward callbacks exchange gradients" * (len(self.exchanging) > 1)
            reason = self._reason_against_fusing() or several or reason
            if reason:
                self.reduction.stop_fusing(reason)
            else:
                self._fused = stepping

    def fused_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose next steps are fused; let the exchange show their weights once."""
        found = [plain(callback.optimizer) for callback in self._fused or ()]
        if found and not self.reduction.remarks:
            self.reduction.remark_on(found)
        return found

    def clip_gradients(self, function: Callable[[Any], Any]) -> Any:
        """Clip the agreed gradients by a function of the parameters, held ones among them; return what it returns."""
        weights = self._trained.parameters()
        if self._fused is None or not self.reduction.holds:
            own = private_parameters(self.reduction.shared) if self._private else {}
            if own:  # by a norm of their own, so that the others stay the same at all sites
                function(own.values())
                weights = self.reduction.shared.parameters()
            return function(weights)
        assert isinstance(function, functools.partial)  # as `fused_callbacks` has accepted it
        return self.reduction.clip_held(weights, **function.keywords)

    def step_optimizer(self, optimizer: Any) -> None:
        """Step an optimizer with the agreed gradients, held ones among them."""
        if self._fused is not None and self.reduction.holds:
            self.reduction.apply_held(plain(optimizer), optimizer.step)
        else:
            optimizer.step()

    # The loop

    def on_epoch_start(self, runner: Any) -> None:
        """Open the loggers if the site that has printed so far is gone."""
        super().on_epoch_start(runner)
        if self.engine.is_main_process and not self.loggers and self._transport.rounds.elastic:
            self.loggers = self.get_loggers()

    def _run_epoch(self) -> None:
        loaders = self.loaders
        if (state := self._joined) is not None:  # others have gone through the loaders before this one
            self.loaders = dict([*loaders.items()][[*loaders].index(state["loader"]) :])
            self.epoch_metrics.update(state["metrics"])
        try:
            super()._run_epoch()
        finally:
            self.loaders = loaders

    def on_loader_start(self, runner: Any) -> None:
        """Compute the number of steps with the other sites, or take over that of the sites that this one joins."""
        super().on_loader_start(runner)
        self.engine.loader_samples = 0
        self.micro_step = 0
        self._own_steps = len(self.loader)
        self.steps = begin_epoch(self.loader, self.loader_key, self.epoch_step, self._transport)
        if (state := self._joined) is not None:
            self.steps, self.micro_step = state["steps"], state["micro_step"]
            self._own_steps = min(self._own_steps, self.steps)

    def on_batch_start(self, runner: Any) -> None:
        """Count the samples of this site."""
        super().on_batch_start(runner)
        self.engine.loader_samples += self.batch_size

    def _run_loader(self) -> None:
        """Run a loader; in training all sites take as many steps as the site with the most batches.

        A site with fewer batches participates without data in some steps, which are spread over the epoch.
        """
        if not self.is_train_loader or not self._trains:
            super()._run_loader()
            return
        with torch.set_grad_enabled(True):
            for batch in self._turns():
                if batch is None:
                    self._idle()
                else:
                    self.batch = batch
                    self._run_event("on_batch_start")
                    self._train_batch()
                    self._run_event("on_batch_end")

    def _turns(self) -> Iterator[Any]:
        """Yield this site's batch for each step with the other sites; None where it has none."""
        first, dealt = self.micro_step, self.loader_key in self.dealt
        batches = batches_from(self.loader, 0 if dealt else batches_before(first, self._own_steps, self.steps))
        step = first
        while step < self.steps:
            self.micro_step = step
            if self._stops_before_step():
                return
            batch = next(batches, None) if takes_part(step, self._own_steps, self.steps) else None
            step += 1
            if self._changes_batches:  # in mid-epoch, at all sites alike
                self.steps = self._own_steps = len(self.loader)
            yield batch
            if self._stops_after_step():
                return
        if self._changes_batches:
            next(batches, None)  # the loader ends the last step

    @property
    def _changes_batches(self) -> bool:
        return getattr(self.loader, "max_batch_size", None) is not None

    def _stops_before_step(self) -> bool:
        """Return whether all sites stop before the step that is due; a request of this site may be passed on."""
        return False

    def _stops_after_step(self) -> bool:
        """Return whether all sites stop after the step that they have taken."""
        return False

    def _train_batch(self) -> None:
        counts = getattr(self.options, "weighting", "") == "samples"
        with self.reduction.samples(self.batch_size) if counts else nullcontext():
            self.handle_batch(batch=self.batch)

    def _idle(self) -> None:
        """Participate in a step without data."""
        if self.update_due:
            self.reduction.idle()
            self._end_step()

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
        own = {name: float(value) for name, value in self.loader_metrics.items()} | self.engine.own_metrics
        self.engine.own_metrics.clear()
        with declared(METRICS):
            every = self._transport.gather_present((own, self.engine.loader_samples))
        by_site = checked(every, METRICS_KIND, "list of metrics", self._transport)
        self.loader_metrics.update(merge_metrics([*by_site.values()]))
        if self.engine.sites:
            self.loader_metrics["sites"] = float(len(by_site))
        if self.engine.sites and not self.is_train_loader:
            self.loader_metrics.update(metrics_by_site(by_site, self._transport.sites))
        if self.is_train_loader and self.engine.reduction is not None:
            self._make_equal()
        super().on_loader_end(runner)

    def on_epoch_end(self, runner: Any) -> None:
        """Stop all sites if one of them asks for it."""
        super().on_epoch_end(runner)
        every = self._transport.gather_present(bool(self.need_early_stop))
        self.need_early_stop = any(checked(every, bool, "wish to stop", self._transport).values())

    # Checkpoints

    def reduction_states(self) -> list[Any]:
        """Gather the states of all sites by rank, None for absent sites, once an epoch; all sites must call it."""
        if self._states is None or self._states[0] != self.epoch_step:
            self._states = (self.epoch_step, plain_states(self._transport.gather_objects(self.own_state())))
        return self._states[1]

    def checkpoint_parts(self, *, saving: bool) -> dict[str, Any]:
        """Return the objects whose states a checkpoint holds, by Catalyst's names.

        Args:
            saving: whether the objects' states are read (then all sites must call it) or loaded.
        """
        model = self.model if isinstance(self.model, dict) else self.engine.unwrap_model(self.model)
        rest = {"criterion": self.criterion, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {"model": model} | rest

    def save_private(self, path: str | Path) -> None:
        """Write the private layers of this site beside a checkpoint, which has those of the site that writes it."""
        if self._private:
            save_whole(private_state(*self._own_parts), private_path(path, self.engine.process_index))

    @property
    def _own_parts(self) -> tuple[torch.nn.Module, list[Any]]:
        """The shared part of the model, and the optimizers in training."""
        model = self.model if isinstance(self.model, torch.nn.Module) else torch.nn.ModuleDict(self.model)
        return shared_part(self.engine.unwrap_model(model), self._private), self._optimizers if self._trains else []

    def keeping_private(self, path: str | Path) -> AbstractContextManager[None]:
        """Return a context in which a checkpoint is loaded without the private layers of the site that wrote it."""
        own = Path(private_path(path, self.engine.process_index))
        if not self._private:
            return nullcontext()
        return keeping_private(*self._own_parts, lambda: load_tensors(own, str(own)) if own.is_file() else None)

    def load_shared(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint of the first site that is present on all sites; all sites must call it.

        Args:
            path: path of the file at that site.

        Raises:
            FileNotFoundError: on all sites, if that site does not have the file.
            ValueError: on all sites, if the file is damaged.
        """
        content = Path(path).read_bytes() if Path(path).is_file() else None
        own = None if content is None else hashlib.sha256(content).hexdigest()
        digests = checked(self._transport.gather_present(own), str | None, "digest", self._transport)
        first = next(iter(digests))
        if digests[first] is None:
            source = self._transport.sites[first]
            raise FileNotFoundError(f"checkpoint {path} is not at {source}, from which all sites load it")
        if any(digest != digests[first] for digest in digests.values()):
            if self._private:
                raise MismatchError(
                    f"checkpoint {path} is not the same at all sites, and with private= it is not sent, as it has "
                    "private layers of a site: copy it to all sites before"
                )
            content = self._transport.broadcast_bytes(content or b"")
        checkpoint: dict[str, Any] = load_tensors(content or b"", f"checkpoint {path}")
        return checkpoint
