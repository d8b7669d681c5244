"""Lightning's strategy for asynchronous steps, for either of Lightning's packages, neither of which it imports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..exchange import Transport
from ..parameter_server import ParameterServer, ServerOptions
from ..step.model_sync.samples import batches_before
from ..support.signature import takes_keywords_of
from ._lightning.elastic import ElasticFit
from ._lightning.strategy import SiteEnvironment, SiteStrategy, StrategyArguments
from .loaders import NO_ACCUMULATION, ServerLoader
from .return_file import ReturnFile

_MEETS_TOO_EARLY = (
    "with deal='shared' the sites meet at the end of an epoch only: no evaluations, checkpoints or collectives in the "
    "middle of one"
)


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


class ServerFit(ElasticFit):
    """One fit, whose state is that of a step of site 0. The optimizer's state is part of the server's."""

    option = "return_file"
    sends_optimizers = False


class ParameterServerStrategyBase(SiteStrategy):
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

    options: ServerOptions
    server: ParameterServer | None = None
    _elastic_class = ServerFit
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

    @property
    def server_options(self) -> ServerOptions:
        """The options of the server."""
        return self.options

    # Start and end

    def setup_environment(self) -> None:
        if isinstance(self.cluster_environment, ReturnedEnvironment):
            self.cluster_environment.begin()
        super().setup_environment()

    def _open_transport(self) -> Transport:
        return self._file.open_transport(self.root_device, self.options.timeout, super()._open_transport)

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            self._check(trainer)
            self._dealt = None
        super().setup(trainer)

    def _check(self, trainer: Any) -> None:
        """Raise ValueError for a setting of the trainer that cannot be used."""
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "a parameter server cannot train with a GradScaler, whose scale each site changes on its own: use "
                "precision='bf16-mixed', which needs none"
            )
        if self._deals and trainer.accumulate_grad_batches != 1:
            raise ValueError(NO_ACCUMULATION)
        if self._deals and trainer.val_check_interval != 1.0:
            raise ValueError(_MEETS_TOO_EARLY)

    def _build(self) -> None:
        self._check_one_optimizer()
        (optimizer,) = self.optimizers
        self._run.callback(optimizer.register_step_pre_hook(self._before_commit).remove)
        arguments = self._transport, self._elastic, self.lightning_module, optimizer
        self.server = self._exchange = self._file.build(*arguments, **vars(self.options))
        self._load_states()

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
            self.server.step()
        if self._elastic is None:
            self.server.require_all()
        else:
            self._elastic.end_step()
        if self._trainer.is_last_batch:  # before metrics of the epoch, which need all sites
            self._make_equal()
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
        self._make_equal()

    def _make_equal(self) -> None:
        """Wait until all sites have made the steps so far, and hold one model: the end of a phase.

        It precedes every collective: a site in a collective applies no commits, and slower ones could not go on until
        they reach it.
        """
        if self._has_stepped and self._in_fit and self.server is not None:
            if self._meets_too_early:
                raise ValueError(_MEETS_TOO_EARLY)
            self._has_stepped = False
            with self._in_step_alone():
                self.server.finish()

    @property
    def _meets_too_early(self) -> bool:
        """Whether training goes on and batches of the epoch are dealt, which would be left out after the phase."""
        trainer = self._trainer
        if self._dealt is None or not self._dealt.running or trainer.is_last_batch or trainer.should_stop:
            return False
        return not trainer.fit_loop.epoch_loop._is_training_done

    # Checkpoints

    def _add_states(self, checkpoint: dict[str, Any]) -> None:
        if not self._in_fit:  # after an error, contributions that are in transit would not arrive
            return
        if self._elastic is None or self._transport is None:
            super()._add_states(checkpoint)
        else:
            checkpoint["dadplug"] = self._transport.gather_objects(self._own_state())

    def on_train_end(self) -> None:
        self._make_equal()
        if self._elastic is not None:
            self._file.remove()
        super().on_train_end()
