"""Catalyst's runners, one for each way to train."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

from catalyst.callbacks.scheduler import SchedulerCallback
from catalyst.core.callback import CallbackOrder, ICheckpointCallback
from catalyst.core.misc import get_original_callback
from torch import nn

from ..adapm import AdaModel
from ..exchange.status import describe
from ..hogwild import Hogwild
from ..hogwild.training import HogwildOptions
from ..local_steps import LocalOptions, LocalSGD
from ..local_steps.options import Schedule
from ..options import Options
from ..parameter_server import ParameterServer, ServerOptions
from ..reduction import GradientReduction
from ..support.loaders import check_loader
from ..support.refusals import refuse
from ..support.signature import takes_keywords_of
from ._catalyst.engine import plain
from ._catalyst.fixes import FixedBackward, FixedOptimizer
from ._catalyst.fixes import clip as clip_by
from ._catalyst.runner import BaseRunner, RunnerArguments
from .exchanges import LocalSteps, ReturnFile, ServerSteps, SharedMemorySteps, SynchronousSteps
from .loaders import NO_ACCUMULATION, HogwildLoader, ServerLoader
from .management import LookaheadLoader, ManagedEmbeddings, Management, Stub, clip


class DistributedRunner(SynchronousSteps, BaseRunner):
    """Catalyst runner that trains one model between sites; a drop-in replacement for `SupervisedRunner`.

    Every site runs the same script. The sites are connected by `dadplug.connect`, by torchrun's environment, or by an
    existing process group; without any of them the runner trains as a single site. Stock callbacks, loggers and
    progress bars work as for one process: metrics of a loader are those of all sites together, and only site 0 prints
    and writes files.

    With ``min_sites``, over a hub, training goes on without a site that leaves. Metrics, early stopping and checkpoints
    are then those of the sites that are present, the first of which prints, and each of them writes the checkpoints. Of
    a data set that is split, the share of an absent site is left out; it is drawn anew for each epoch. A site that has
    left returns if its program is started again: it goes on at the batch of the epoch that the others are at.

    Args:
        model: model to train; may be passed to `train` instead.
        criterion: loss, the mean over the samples of its batch; may be passed to `train` instead.
        optimizer: optimizer of the model; may be passed to `train` instead.
        mode: name of a method, such as ``"dsgd"``, ``"dad"`` or ``"rankdad"``.
        fused: whether optimizer steps are those of `GradientReduction.apply`, which do not form the agreed gradients of
            factored weights: ``.grad`` of these stays None. Clipping by ``torch.nn.utils.clip_grad_norm_`` includes
            them. Where callbacks, precision or the optimizer need the gradients, they are formed, and the plan says
            why.
        arguments: options of the gradient reduction, with the names and defaults of `dadplug.options.Options`;
            ``input_key``, ``output_key``, ``target_key`` and ``loss_key`` as in `SupervisedRunner`;
            ``split_data``, True: all sites' loaders hold the same data set, which is split over the sites; False: each
            site has data of its own; ``"auto"``: split those loaders that hold the same data set on all sites;
            ``process_group`` of the sites, the default group if None.

    Attributes:
        options: the options of the gradient reduction.
        reduction: the `GradientReduction` of the last training, with its plan and traffic.

    Raises:
        ValueError: if a mode or an option is unknown; the message lists the valid ones.

    Example:
        >>> runner = DistributedRunner(mode="rankdad", rank=4)
        >>> runner.train(model=model, criterion=criterion, optimizer=optimizer, loaders=loaders, num_epochs=5)
        >>> print(runner.reduction.plan)
    """

    reduction: GradientReduction

    @takes_keywords_of(RunnerArguments, Options)
    def __init__(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        mode: str = "rankdad",
        *,
        fused: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(model, criterion, optimizer, Options, {"mode": mode} | arguments)
        self._agreed_before = 0
        self._most_exchanges = 0  # of a batch of this site
        self._wants_fused = fused

    def _reason_against_fusing(self) -> str:
        may_leave = self.options.min_sites is not None
        return super()._reason_against_fusing() or "sites may leave, by min_sites" * may_leave

    # The loop

    def _stops_before_step(self) -> bool:
        self._agreed_before = self.reduction.step
        if self.need_early_stop:
            self.need_early_stop = False
            self._idle(stop=True)
            return True
        return False

    def _stops_after_step(self) -> bool:
        self._most_exchanges = max(self._most_exchanges, self.reduction.step - self._agreed_before)
        return self.reduction.stopped

    def _idle(self, stop: bool = False) -> None:
        """Participate in a step without data; only callbacks that follow backward and change the model are called."""
        refuse(
            (
                not stop and self._most_exchanges > max(1, len(self.exchanging)),
                f"this site has fewer batches than others, and a batch of handle_batch() has {self._most_exchanges} "
                "backward passes that exchange gradients: give all sites equally many batches, or put all of them but "
                "one into `with runner.reduction.no_sync():`",
            )
        )
        if stop or self.update_due:
            self._exchange_without_data(stop)
        else:
            with self.reduction.no_sync():
                self.reduction.idle()
        for callback in self.callbacks.values():
            changes_model = CallbackOrder.Backward < callback.order <= CallbackOrder.Scheduler
            if changes_model and not isinstance(get_original_callback(callback), ICheckpointCallback):
                callback.on_batch_end(self)

    def _exchange_without_data(self, stop: bool = False) -> None:
        """Participate in the exchanges of a step that are left, and clip as the callbacks of the other sites do."""
        made = self.reduction.step - self._agreed_before
        for callback in [*self.exchanging, *[None] * (not self.exchanging)][made:]:
            self.reduction.idle(stop=stop)
            self.engine.end_step()
            if callback is not None:
                clip_by(callback.grad_clip_fn, self)

    def take_part(self) -> None:
        """Participate in the other sites' step if this site has skipped its batch, without a backward pass."""
        self._exchange_without_data()


class LocalSGDRunner(LocalSteps, BaseRunner):
    """Catalyst runner for local steps (local SGD, DiLoCo); a drop-in replacement for `SupervisedRunner`.

    Sites train alone for ``every`` steps and then agree on their parameters. After each training loader they agree, so
    that evaluations and checkpoints are those of one model. Everything else is as in `DistributedRunner`: the sites'
    connection, data, metrics and files. Callbacks that stop training stop it at the end of an epoch. With
    ``min_sites``, over a hub, sites may leave and return, as with `DistributedRunner`.

    With ``fused=True`` clipping by ``torch.nn.utils.clip_grad_norm_`` includes gradients that are not formed. Where
    callbacks or precision need gradients, they are formed, and ``reduction.remarks`` says why.

    Args:
        model: model to train; may be passed to `train` instead.
        criterion: loss, the mean over the samples of its batch; may be passed to `train` instead.
        optimizer: optimizer of the model; may be passed to `train` instead.
        every: steps between two agreements, or a function of the number of steps so far that returns them.
        arguments: options of the local steps, with the names and defaults of `dadplug.local_steps.LocalOptions`, and
            the other arguments of `DistributedRunner`.

    Attributes:
        options: the options of the local steps, also as `local_options`.
        reduction: the `LocalSGD` of the last training, with its traffic.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones.

    Example:
        >>> runner = LocalSGDRunner(every=64, wire="int8")
        >>> runner.train(model=model, criterion=criterion, optimizer=optimizer, loaders=loaders, num_epochs=5)
        >>> print(runner.reduction.traffic.total_bytes_sent)
    """

    reduction: LocalSGD

    @takes_keywords_of(RunnerArguments, LocalOptions)
    def __init__(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        every: int | Schedule = LocalOptions.every,
        **arguments: Any,
    ) -> None:
        super().__init__(model, criterion, optimizer, LocalOptions, {"every": every} | arguments)
        self._wants_fused = self.options.fused

    def step_optimizer(self, optimizer: Any) -> None:
        """Step the optimizer, and agree with the other sites if it is time."""
        with self.reduction.stepping():
            super().step_optimizer(optimizer)
        self.engine.end_step()


class ParameterServerRunner(ServerSteps, BaseRunner):
    """Catalyst runner for asynchronous steps; a drop-in replacement for `SupervisedRunner`.

    Each site sends its gradients and applies those of all sites in the order of one log; none waits for another one's
    batch. After each training loader the sites wait for each other, so that evaluations and checkpoints are those of
    one model. Clipping functions get the merged gradient of each commit, on all sites. Everything else is as in
    `DistributedRunner`: the sites' connection, data, metrics and files. Callbacks that stop training stop it at the end
    of an epoch. If a site is lost, the next step of each other one raises a `SiteError` that names it.

    With ``deal="shared"`` the batches of training loaders are handed out on demand, each once an epoch. Every site
    counts as many steps as there are batches, and those that others make are without data.

    With ``return_file`` training goes on without a lost site; without a hub, not without site 0. Metrics are those of
    the sites that are present, and each of them writes the checkpoints. A process that is started in place of a lost
    one finds the file, and returns: it takes over model, optimizer, scheduler and the place in the epoch from another
    site, and goes on in the midst of an epoch. Such a process must not call `dadplug.connect`.

    Args:
        model: model to train; may be passed to `train` instead.
        criterion: loss, the mean over the samples of its batch; may be passed to `train` instead.
        optimizer: optimizer of the model; may be passed to `train` instead.
        mode: ``"dsgd"``, ``"dad"`` or ``"rankdad"``: how gradients are encoded.
        return_file: path of a file of this site, which exists while a training is under way, and holds a secret. Where
            it is given, at all sites, lost sites are not waited for, and return.
        arguments: options of the server, with the names and defaults of `dadplug.parameter_server.ServerOptions`, and
            the other arguments of `DistributedRunner`.

    Attributes:
        options: the options of the server, also as `server_options`.
        reduction: the `ParameterServer` of the last training, with its version and traffic.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones.

    Example:
        >>> runner = ParameterServerRunner(mode="rankdad", rank=8, staleness=8)
        >>> runner.train(model=model, criterion=criterion, optimizer=optimizer, loaders=loaders, num_epochs=5)
        >>> print(runner.reduction.traffic.total_bytes_sent)
    """

    reduction: ParameterServer

    @takes_keywords_of(RunnerArguments, ServerOptions)
    def __init__(
        self,
        model: Any = None,
        criterion: Any = None,
        optimizer: Any = None,
        mode: str = ServerOptions.mode,
        *,
        return_file: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(model, criterion, optimizer, ServerOptions, {"mode": mode} | arguments)
        self._clip: Callable[[Any], Any] | None = None
        self._file = ReturnFile(return_file)

    def _run(self) -> None:
        try:
            super()._run()
            self._file.remove()
        finally:
            self._remove_hook()

    def _setup_loaders(self) -> None:
        """Have the batches of the training loaders dealt with ``deal="shared"``; the other loaders are split."""
        super()._setup_loaders()
        self.dealt.clear()
        if self.options.deal != "shared" or self.engine.num_processes == 1:
            return
        for name, loader in self._shared_loaders("deal='shared'").items():
            self.loaders[name] = self.engine.on_device(ServerLoader(loader, lambda: self.reduction, pads=False))
            self.dealt.add(name)

    def _setup_callbacks(self) -> None:
        super()._setup_callbacks()
        if self.options.deal == "shared" and self._accumulation != 1:
            raise ValueError(NO_ACCUMULATION)
        for callback in map(get_original_callback, self.callbacks.values()):  # a commit may precede the first batch
            if isinstance(callback, (FixedBackward, FixedOptimizer)) and callback.grad_clip_fn is not None:
                self._clip = callback.grad_clip_fn

    def _build_exchange(self, model: nn.Module, scaled: bool) -> ParameterServer:
        refuse(
            (
                scaled,
                "a parameter server cannot train with a GradScaler, whose scale each site changes on its own: use "
                "bf16, which needs none",
            )
        )
        self._clip = None
        return super()._build_exchange(model, scaled)

    def _connect(self) -> None:
        if self._file.rank is None:
            super()._connect()

    def _idle(self) -> None:
        if self.update_due:
            self.step_optimizer()

    def clip_gradients(self, function: Callable[[Any], Any]) -> None:
        """Clip the merged gradient of each commit from now on by a function of the parameters."""
        self._clip = function

    def _before_commit(self, *_: Any) -> None:
        if self._clip is not None:
            self._clip(self.reduction.model.parameters())

    def step_optimizer(self, optimizer: Any = None) -> None:
        """Send this site's gradient, and make the optimizer's steps of the commits that have arrived."""
        self.reduction.step()
        self._end_server_step()

    def _run_loader(self) -> None:
        """Run a loader; after training wait until all sites hold one model, before callbacks exchange metrics."""
        super()._run_loader()
        if self.is_train_loader and self.engine.reduction is not None:
            self.reduction.finish()


class HogwildRunner(SharedMemorySteps, BaseRunner):
    """Catalyst runner for Hogwild!: processes of one machine train one model in shared memory; for `SupervisedRunner`.

    Every process runs the same script, as started by torchrun. No process waits for another within a training loader,
    whose batches are dealt on demand, each once an epoch. After it all processes wait, so that evaluations and
    checkpoints hold one model, which no process changes meanwhile. The other loaders are split over the processes.
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

    loader_batch_len: int

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
            self._end_hogwild(describe(error))
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
        refuse(
            (
                self.engine.device.type != "cpu" or scaled,
                "Hogwild! shares the memory of CPU processes: pass cpu=True and no fp16, or take DistributedRunner for "
                "GPUs",
            )
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
        super()._run_loader()
        if self.is_train_loader and self.hogwild is not None:
            self.loader.finish()
            with self.hogwild.paused():
                pass

    def _turns(self) -> Iterator[Any]:
        """Yield the batches that this process is dealt, in a group for each update."""
        batches = iter(self.loader)
        while group := list(itertools.islice(batches, self._accumulation)):
            if self.need_early_stop:
                self.need_early_stop = False
                if self.hogwild is not None:
                    self.hogwild.stop_epoch()
                return
            self._group = len(group)
            for self._place, batch in enumerate(group):
                yield batch

    @property
    def update_due(self) -> bool:
        """Whether the gradients of this batch complete an update."""
        return self._place + 1 == self._group

    @property
    def micro_batches(self) -> int:
        """Number of batches that the update of this batch accumulates."""
        return self._group


class _DealtLoader(HogwildLoader):
    """Loader whose length is the number of batches of all processes."""

    def __len__(self) -> int:
        return len(self._loader)


class AdaPMRunner(ManagedEmbeddings, DistributedRunner):
    """Catalyst runner for models whose embedding rows are spread over the sites (AdaPM); replaces `SupervisedRunner`.

    While `train` runs, the rows of the model's nn.Embedding and nn.EmbeddingBag layers are managed as by
    `dadplug.adapm.AdaModel`, train loaders are read ahead as by `dadplug.adapm.AdaDataLoader`, and all other parameters
    are trained as by `DistributedRunner`. Other loaders read rows and write none. Checkpoints hold whole tables and the
    state of their optimizer under the names of the plain model. After the training the model is a plain model again.

    Args:
        model: model to train; may be passed to `train` instead, as in `DistributedRunner`.
        criterion: loss, the mean over the samples of its batch; may be passed to `train` instead.
        optimizer: optimizer that can update single rows, see `dadplug.adapm.AdaModel`; or an argument of `train`.
        mode: method for all parameters that are not managed, see `dadplug.GradientReduction`.
        intent: function from a batch to the ids that it looks up, by the names of weights, such as
            ``lambda batch: {"words.weight": batch[0]}``; ``"auto"`` finds them by a forward pass of shapes through
            `handle_batch`; None for no lookahead.
        lookahead: number of batches that are announced in advance.
        reduce: ``"mean"`` or ``"sum"`` of the sites' gradients of rows, see `dadplug.adapm.AdaModel`.
        technique: effect of intents, see `dadplug.adapm.ParameterManager`.
        interval: minimum time between two rounds of synchronisation, in seconds.
        backend: ``"builtin"`` or ``"adapm"``, see `dadplug.adapm.ParameterManager`.
        arguments: all other arguments of `DistributedRunner`.

    Attributes:
        managed: the `AdaModel` of the running training, with its tables and traffic; None outside of a training.
        reduction: the `GradientReduction` of the other parameters.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones.

    Example:
        >>> runner = AdaPMRunner(lookahead=8)
        >>> runner.train(model=model, criterion=criterion, optimizer=optimizer, loaders=loaders, num_epochs=5)
    """

    @takes_keywords_of(Management, DistributedRunner.__init__)
    def __init__(
        self, model: Any = None, criterion: Any = None, optimizer: Any = None, mode: str = "dsgd", **arguments: Any
    ) -> None:
        super().__init__(model, criterion, optimizer, mode, **self._split(RunnerArguments, mode, arguments))
        self._gathered: tuple[int, dict[str, Any]] | None = None

    # Start and end

    def _build_reduction(self, model: nn.Module, settings: dict[str, Any]) -> GradientReduction | None:
        refuse(
            (
                getattr(self.engine, "scaler", None) is not None,
                "managed rows have no part in a GradScaler: leave fp16 out, or use mixed precision bf16",
            ),
            (isinstance(self.model, dict), "AdaPMRunner trains one model: put several into one nn.Module"),
        )
        reduction = super()._build_reduction(model, settings)
        if self.managed is not None and self._reads_ahead(self.engine.num_processes):
            for name, loader in self.loaders.items():
                if name.startswith("train"):
                    self.loaders[name] = _Lookahead(loader, self.managed, self._management, self)
        return reduction

    def train(self, **settings: Any) -> None:
        """Train as `DistributedRunner.train` does; all sites call it with the same settings."""
        try:
            super().train(**settings)
        finally:
            self._give_back(interrupted=True)  # what has ended well has done so before

    def on_experiment_end(self, runner: Any) -> None:
        """Restore the model's whole weights."""
        self._give_back(interrupted=False)
        super().on_experiment_end(runner)

    def _give_back(self, interrupted: bool) -> None:
        self._gathered = None
        super()._give_back(interrupted)

    # The loop

    def on_loader_start(self, runner: Any) -> None:
        """Synchronise the tables of all sites before an evaluation."""
        super().on_loader_start(runner)
        if self.managed is not None and not self.is_train_loader:
            self.managed.manager.wait_sync(everywhere=True)

    def _train_batch(self) -> None:
        if self.managed is None or not isinstance(self.loader, _Lookahead):
            super()._train_batch()
            return
        with self.loader.watch():
            super()._train_batch()

    def clip_gradients(self, function: Callable[[Any], Any]) -> Any:
        """Clip the agreed gradients, including those of all sites' rows."""
        return super().clip_gradients(function) if self.managed is None else clip(self.managed, function)

    # Checkpoints

    def checkpoint_parts(self, *, saving: bool) -> dict[str, Any]:
        """Return the objects whose states a checkpoint holds, with whole tables and the state of their optimizer."""
        parts = super().checkpoint_parts(saving=saving)
        managed = self.managed
        if managed is None:
            return parts
        if not saving:
            load_optimizer = functools.partial(managed.load_optimizer_state_dict, self._owner)
            load: dict[str, Callable[[Any], Any]] = {"model": managed.load_state_dict, "optimizer": load_optimizer}
            return self._with(
                parts, {name: SimpleNamespace(load_state_dict=function) for name, function in load.items()}
            )
        if self._gathered is None or self._gathered[0] != self.epoch_step:
            whole = {"model": managed.state_dict(), "optimizer": managed.optimizer_state_dict(self._owner)}
            self._gathered = self.epoch_step, whole if self.engine.is_main_process else {}  # site 0 writes
        states = self._gathered[1].items()
        return self._with(
            parts, {name: SimpleNamespace(state_dict=lambda state=state: state) for name, state in states}
        )

    def _with(self, parts: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Replace the parts of the plain model by those of the managed model."""
        if isinstance(self.optimizer, dict) and "optimizer" in own:
            given = self.optimizer.items()
            rows = own["optimizer"]
            own["optimizer"] = {key: rows if plain(each) is self._owner else each for key, each in given}
        return parts | own

    def on_epoch_end(self, runner: Any) -> None:
        """Drop the states that the epoch's checkpoints have gathered."""
        self._gathered = None
        super().on_epoch_end(runner)


class _Lookahead(LookaheadLoader):
    """`LookaheadLoader` that calls a copy of the model as a runner does."""

    def __init__(self, loader: Any, model: AdaModel, management: Management, runner: AdaPMRunner) -> None:
        super().__init__(loader, model, management, owner="AdaPMRunner", step="handle_batch")
        self._runner = runner

    def _step(self, model: Any, batch: Any) -> None:
        stub: Any = copy.copy(self._runner)
        for name, value in vars(stub).items():  # methods that the runner has chosen, as for input_key
            if isinstance(value, MethodType) and value.__self__ is self._runner:
                setattr(stub, name, MethodType(value.__func__, stub))
        stub.model, stub.engine, stub.optimizer, stub.scheduler = model, Stub(), Stub(), Stub()
        stub.batch_metrics = {}
        stub.batch = stub._process_batch(batch)
        stub.handle_batch(batch=stub.batch)
