"""Lightning's strategies for gradients and parameters that sites exchange, for either of Lightning's packages.

Neither of these is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import PrivacyError
from ...exchange import Transport
from ...local_steps import LocalOptions, LocalSGD
from ...local_steps.options import Schedule
from ...options import Options
from ...parameter_server import ParameterServer, ServerOptions
from ...reduction import GradientReduction
from ...step.model_sync.samples import batches_before
from ...support.refusals import refuse
from ...support.signature import takes_keywords_of
from ..exchanges import LocalSteps, ReturnFile, ServerSteps, SynchronousSteps
from ..loaders import NO_ACCUMULATION, ServerLoader
from .strategy import HubStrategy, SiteEnvironment, SiteStrategy, StrategyArguments

_MEETS_TOO_EARLY = (
    "with deal='shared' the sites meet at the end of an epoch only: no evaluations, checkpoints or collectives in the "
    "middle of one"
)


class DADStrategyBase(SynchronousSteps, HubStrategy):
    """Lightning strategy that trains one model between sites; for ``Trainer(strategy=)``.

    Processes, samplers, metrics and evaluation are those of Lightning's ``DDPStrategy``. Gradients are agreed on at the
    end of each backward pass (the last one, with accumulation), before any hook, clipping or optimizer reads them.

    If the sites are connected already, by `dadplug.connect`, Lightning starts no processes: pass ``devices=1``. Sites
    may have different numbers of batches: a site with fewer repeats a batch with weight zero in some steps.

    With ``min_sites``, over a hub, training goes on without a site that leaves, and the site returns if its program is
    started again: it goes on at the batch of the epoch that the others are at, with their states of model, optimizer,
    schedules and callbacks. Metrics and collectives are those of the sites that are present. The first of them prints
    and logs, and each of them writes the checkpoints.

    `dadplug.DADStrategy` is the strategy for the one of Lightning's two packages that is in use;
    `dadplug.runners.lightning.DADStrategy` and `dadplug.runners.pytorch_lightning.DADStrategy` are those for a given
    package.

    Args:
        mode: name of a method, such as ``"dsgd"``, ``"dad"`` or ``"rankdad"``.
        fused: whether optimizer steps are those of `GradientReduction.apply`, which do not form the agreed gradients of
            factored weights: ``.grad`` of these stays None. The trainer's clipping by norm includes them. Where hooks,
            precision or the optimizer need the gradients, they are formed, and the plan says why.
        arguments: options of the gradient reduction, with the names and defaults of `dadplug.options.Options`, and
            arguments of ``DDPStrategy``: ``accelerator``, ``parallel_devices``, ``cluster_environment``,
            ``checkpoint_io``, ``precision_plugin``, ``process_group_backend``, ``start_method``.

    Attributes:
        options: the options of the gradient reduction.
        reduction: the `GradientReduction` of the last fit, with its plan and traffic; None before it.

    Raises:
        ValueError: if the mode, an option or its value is unknown; the message lists the valid ones. If there is no hub
            with ``min_sites``.
        RuntimeError: if both of Lightning's packages are imported and the strategy is not that of a given package.

    Example:
        >>> trainer = pl.Trainer(strategy=DADStrategy(mode="rankdad"), accelerator="cpu", devices=2)
        >>> trainer.fit(module, loader)
        >>> print(trainer.strategy.reduction.plan)
    """

    reduction: GradientReduction | None = None
    _attribute = "reduction"
    _needs_optimizers = False
    _saves_alone = True

    @takes_keywords_of(StrategyArguments, Options)
    def __init__(self, mode: str = "rankdad", *, fused: bool = False, **arguments: Any) -> None:
        super().__init__(Options, {"mode": mode} | arguments)
        self._wants_fused = fused

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run backward, and synchronize the gradients before any hook reads them.

        With `privacy` the loss is not divided by the number of micro-batches: the gradients of samples are clipped, and
        their sum is divided by the expected batch, which is that of all micro-batches.
        """
        module = self.lightning_module
        if self.options.privacy is not None and module.automatic_optimization:
            closure_loss = closure_loss * module.trainer.accumulate_grad_batches
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step an optimizer; one that uses the loss gets the mean over sites, so that all sites decide alike."""
        if self._transport is not None and isinstance(getattr(optimizer, "_optimizer", optimizer), torch.optim.LBFGS):
            closure = self._with_mean_loss(closure)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _with_mean_loss(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self.options.privacy is not None:
            raise PrivacyError("LBFGS decides by losses, which sites would share: take another optimizer with privacy")

        def agreed() -> Any:
            loss = closure()
            assert self._transport is not None
            assert self.reduction is not None
            value = None if loss is None else float(loss)
            own = value, self.reduction.share or 0.0
            losses = self._transport.gather_objects(own, tuple[float | None, float], "loss")
            if any(value is None for value, _ in losses):
                return loss
            return torch.as_tensor(sum(value * share for value, share in losses), dtype=loss.dtype, device=loss.device)

        return agreed


class LocalSGDStrategyBase(LocalSteps, HubStrategy):
    """Lightning strategy for local steps (local SGD, DiLoCo); for ``Trainer(strategy=)``, also as ``"localsgd"``.

    Sites train alone for ``every`` steps and then agree on their parameters; ``"diloco"`` has DiLoCo's outer optimizer.
    Before an evaluation, in checkpoints and at the end of a fit the sites agree, so that they hold one model there.
    Processes, samplers, metrics and evaluation are those of Lightning's ``DDPStrategy``. Sites may have different
    numbers of batches: a site with fewer takes no step in some of the others' steps. The module needs automatic
    optimization and one optimizer. With ``fused=True``, ``gradient_clip_val`` by norm includes gradients that are not
    formed; where hooks, precision or clipping by value need gradients, they are formed, and ``local.remarks`` says why.

    With ``min_sites``, over a hub, training goes on without a site that leaves, and the site returns if its program is
    started again, as with `DADStrategy`: it goes on at the batch of the epoch that the others are at, with the agreed
    model, and the states of optimizer, schedules and callbacks of one of them.

    `dadplug.LocalSGDStrategy` is the strategy for the one of Lightning's two packages that is in use.

    Args:
        every: steps between two agreements, or a function of the number of steps so far that returns them.
        arguments: options of the local steps, with the names and defaults of `dadplug.local_steps.LocalOptions`, and
            arguments of ``DDPStrategy``, as in `DADStrategy`.

    Attributes:
        options: the options of the local steps, also as `local_options`.
        local: the `LocalSGD` of the last fit, with its traffic; None before it.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones. If there is no hub with
            ``min_sites``.

    Example:
        >>> trainer = pl.Trainer(strategy=LocalSGDStrategy(every=64, wire="int8"), accelerator="cpu", devices=2)
        >>> trainer.fit(module, loader)
        >>> print(trainer.strategy.local.traffic.total_bytes_sent)
    """

    local: LocalSGD | None = None
    _attribute = "local"

    @takes_keywords_of(StrategyArguments, LocalOptions)
    def __init__(self, every: int | Schedule = LocalOptions.every, **arguments: Any) -> None:
        super().__init__(LocalOptions, {"every": every} | arguments)
        self._wants_fused = self.options.fused
        self._has_trained = False  # since the last step of the optimizer

    def _samples_of(self, batch: Any) -> AbstractContextManager[Any]:
        context = super()._samples_of(batch)
        self._has_trained |= not self._weightless
        return context

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step the optimizer, and agree with the other sites if it is time."""
        if self.local is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        trains, self._has_trained = self._has_trained or self._has_batch, False
        if trains or self.local.synchronous:
            with self.local.stepping():
                output = super().optimizer_step(optimizer, closure, model, **kwargs)
        else:  # a batch that this site has had before, as its loader repeats it
            output = closure()
            self.local.idle()
        self._end_step()
        self._has_trained = False
        return output

    def on_train_end(self) -> None:
        self._agree()
        super().on_train_end()


class ReturnedEnvironment(SiteEnvironment):
    """Cluster environment of a site that returns into a training, and has no process group with the others.

    Args:
        rank: this site.
        world_size: number of sites.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank, self._world_size = rank, world_size

    def begin(self) -> None:
        """Start a process group of this process alone, without which metrics would not ask for the other sites'."""
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def world_size(self) -> int:
        return self._world_size

    def global_rank(self) -> int:
        return self._rank


class ParameterServerStrategyBase(ServerSteps, SiteStrategy):
    """Lightning strategy for asynchronous steps; for ``Trainer(strategy=)``, also as ``"parameter_server"``.

    Each site sends its gradients and applies those of all sites in the order of one log; none waits for another one's
    batch. Before an evaluation, for a checkpoint and at the end of a fit the sites wait for each other, and hold one
    model then. Clipping and ``on_before_optimizer_step`` get the merged gradient of each commit, on all sites. Sites
    may have different numbers of batches: a site with fewer skips some of the others' steps, at no cost. If a site is
    lost, the next step of each other one raises a `SiteError` that names it. The module
    needs automatic optimization and one optimizer, and no loss scale (``precision="16-mixed"``).

    With ``deal="shared"`` the batches of the training loader are handed out on demand, each once an epoch. Every site
    has as many steps as there are batches, and skips those that others make. Sites meet at the end of epochs only then.

    With ``return_file`` training goes on without a lost site; without a hub, not without site 0. Metrics and
    collectives are those of the sites that are present. A process that is started in place of a lost one finds the
    file, and returns: it takes over model, optimizer, schedules, callbacks and the place in the epoch from another
    site, and goes on in the midst of an epoch. Such a process must not call `dadplug.connect`.

    Within ``training_step`` a metric that is logged with ``sync_dist=True`` is this site's own; over an epoch it is
    that of all sites. Other collectives there are an error, since the sites are not at the same batch.

    `dadplug.ParameterServerStrategy` is the strategy for the one of Lightning's two packages that is in use.

    Args:
        mode: ``"dsgd"``, ``"dad"`` or ``"rankdad"``: how gradients are encoded.
        return_file: path of a file of this site, which exists while a fit is under way, and holds a secret. Where it is
            given, at all sites, lost sites are not waited for, and return.
        arguments: options of the server, with the names and defaults of `dadplug.parameter_server.ServerOptions`, and
            arguments of ``DDPStrategy``, as in `DADStrategy`.

    Attributes:
        options: the options of the server, also as `server_options`.
        server: the `ParameterServer` of the last fit, with its version and traffic; None before it.

    Raises:
        ValueError: if an option or its value is unknown; the message lists the valid ones.

    Example:
        >>> strategy = ParameterServerStrategy(mode="rankdad", rank=8, staleness=8)
        >>> trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2)
        >>> trainer.fit(module, loader)
        >>> print(trainer.strategy.server.traffic.total_bytes_sent)
    """

    server: ParameterServer | None = None
    _attribute = "server"
    _in_step_with_others = False

    @takes_keywords_of(StrategyArguments, ServerOptions)
    def __init__(
        self, mode: str = ServerOptions.mode, *, return_file: str | Path | None = None, **arguments: Any
    ) -> None:
        self._file = ReturnFile(return_file)
        if self._file.rank is not None:
            arguments["cluster_environment"] = ReturnedEnvironment(self._file.rank, len(self._file.names))
        super().__init__(ServerOptions, {"mode": mode} | arguments)
        self._dealt: ServerLoader | None = None
        self._in_step = False
        self._has_stepped = False  # since the sites held one model

    # Start and end

    def setup_environment(self) -> None:
        if isinstance(self.cluster_environment, ReturnedEnvironment):
            self.cluster_environment.begin()
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            self._check(trainer)
            self._dealt = None
        super().setup(trainer)

    def _check(self, trainer: Any) -> None:
        """Raise ValueError for a setting of the trainer that cannot be used."""
        refuse(
            (
                getattr(self.precision_plugin, "scaler", None) is not None,
                "a parameter server cannot train with a GradScaler, whose scale each site changes on its own: use "
                "precision='bf16-mixed', which needs none",
            ),
            (self._deals and trainer.accumulate_grad_batches != 1, NO_ACCUMULATION),
            (self._deals and trainer.val_check_interval != 1.0, _MEETS_TOO_EARLY),
        )

    def _set_up_exchange(self) -> None:
        self._run.callback(self._remove_hook)
        super()._set_up_exchange()

    @property
    def _deals(self) -> bool:
        return self.options.deal == "shared" and self._transport is not None

    def _wrap_train_loader(self, dataloader: Any, transport: Transport) -> Any:
        """Have the batches of the training loader dealt, or match the lengths of all sites' loaders."""
        if not self._deals:
            return super()._wrap_train_loader(dataloader, transport)
        if self._dealt is not None and self._dealt.unused:
            raise ValueError("deal='shared' deals the batches of one training loader: put the data sets into one")
        first = int if self._elastic is None else self._elastic.first_batch
        self._dealt = ServerLoader(dataloader, lambda: self._exchange, True, first)
        return self._dealt

    def _before_commit(self, optimizer: Any, *_: Any) -> None:
        """Call the hooks and the clipping that precede a step of the optimizer, with a commit's merged gradient."""
        self.precision_plugin._after_closure(self.lightning_module, optimizer)

    def _replace_clipping(self) -> None:
        """Do nothing: no step of the optimizer has gradients of shared and of private layers, to be clipped apart."""

    # Training

    @property
    def _has_batch(self) -> bool:
        return super()._has_batch if self._dealt is None else self._dealt.deals

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, unless this site has no batch in this step."""
        self._skipped = not self._has_batch
        if self._skipped:
            return self._no_loss()
        with self._in_step_alone():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; the gradient of an update is the mean over the batches that this site has in it."""
        return super().backward(closure_loss * self._batches_per_own(), optimizer, *args, **kwargs)

    def _batches_per_own(self) -> float:
        """Return the batches of the current update over those of this site; Lightning divides by the former."""
        trainer = self._trainer
        count: int = trainer.accumulate_grad_batches
        if self._steps is None or count == 1 or self._skipped:
            return 1.0
        own, steps = self._steps
        first: int = trainer.fit_loop.epoch_loop.batch_idx // count * count
        after = min(first + count, steps)
        return (after - first) / (batches_before(after, own, steps) - batches_before(first, own, steps))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Send this site's gradient, and make the optimizer's steps of the commits that have arrived."""
        if self.server is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        output = closure()
        self._has_stepped = True
        with self._in_step_alone():
            self._exchange.step()
        self._end_server_step()
        if self._trainer.is_last_batch:  # before metrics of the epoch, which need all sites
            self._agree()
        return output

    @contextmanager
    def _in_step_alone(self) -> Iterator[None]:
        """Return a context in which this site is alone, since the others are at other steps."""
        before, self._in_step = self._in_step, self._trainer.state.fn == "fit"
        try:
            yield
        finally:
            self._in_step = before

    @property
    def _alone(self) -> bool:
        return self._in_step

    def _begin_collective(self, name: str) -> None:
        super()._begin_collective(name)
        self._agree()

    def _make_equal(self) -> None:
        """Wait until all sites have made the steps so far, and hold one model: the end of a phase.

        It precedes every collective: a site in a collective applies no commits, and slower ones could not go on until
        they reach it.
        """
        if self._has_stepped:
            refuse((self._meets_too_early, _MEETS_TOO_EARLY))
            self._has_stepped = False
            with self._in_step_alone():
                self._exchange.finish()

    @property
    def _meets_too_early(self) -> bool:
        """Whether training goes on and batches of the epoch are dealt, which would be left out after the phase."""
        trainer = self._trainer
        if self._dealt is None or not self._dealt.running or trainer.is_last_batch or trainer.should_stop:
            return False
        return not trainer.fit_loop.epoch_loop._is_training_done

    def _gather_states(self, own: Any) -> list[Any]:
        if self._elastic is None or self._transport is None:
            return super()._gather_states(own)
        return self._transport.gather_objects(own)

    def on_train_end(self) -> None:
        self._agree()
        if self._elastic is not None:
            self._file.remove()
        super().on_train_end()
