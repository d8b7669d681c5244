"""Catalyst's runner for asynchronous steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..exchange import Transport
from ..parameter_server import ParameterServer, ServerOptions
from ..support.signature import takes_keywords_of
from ._catalyst.runner import BaseRunner, ElasticTraining, RunnerArguments
from .loaders import NO_ACCUMULATION, ServerLoader
from .return_file import ReturnFile


class ServerTraining(ElasticTraining):
    """One training with a parameter server, which sends the optimizer's state itself, and deals batches."""

    parts = ("criterion", "scheduler")

    def _prepare(self, name: str, split: str | None) -> Any:
        return self._runner.loaders[name] if name in self._runner.dealt else super()._prepare(name, split)


class ParameterServerRunner(BaseRunner):
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

    options: ServerOptions
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
        self._hook: Any = None
        self._file = ReturnFile(return_file)
        self.dealt: set[str] = set()  # names of the loaders whose batches are dealt

    def _run(self) -> None:
        try:
            super()._run()
            self._file.remove()
        finally:
            if self._hook is not None:
                self._hook.remove()

    @property
    def server_options(self) -> ServerOptions:
        """The options of the server."""
        return self.options

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

    def _build_exchange(self, model: torch.nn.Module, scaled: bool) -> ParameterServer:
        optimizer = self._one_optimizer()
        if scaled:
            raise ValueError(
                "a parameter server cannot train with a GradScaler, whose scale each site changes on its own: use "
                "bf16, which needs none"
            )
        self._clip = None
        self._hook = optimizer.register_step_pre_hook(self._before_commit)
        options = {"process_group": self._process_group} | vars(self.options)
        transport = self.engine.transport
        self._elastic = ServerTraining(self, transport) if transport.elastic else None
        return self._file.build(transport, self._elastic, model, optimizer, **options)

    def _connect(self) -> None:
        if self._file.rank is None:
            super()._connect()

    def _open_transport(self) -> Transport:
        return self._file.open_transport(torch.device("cpu"), self.options.timeout, super()._open_transport)

    def _batches_from(self, first: int) -> Iterator[Any]:
        return iter(self.loader) if self.loader_key in self.dealt else super()._batches_from(first)

    def _idle(self) -> None:
        if self.update_due:
            self._step()

    def clip_gradients(self, function: Callable[[Any], Any]) -> None:
        """Clip the merged gradient of each commit from now on by a function of the parameters."""
        self._clip = function

    def _before_commit(self, *_: Any) -> None:
        if self._clip is not None:
            self._clip(self.reduction.model.parameters())

    def step_optimizer(self, optimizer: Any) -> None:
        """Send this site's gradient, and make the optimizer's steps of the commits that have arrived."""
        self._step()

    def _step(self) -> None:
        self.reduction.step()
        if self._elastic is None:
            self.reduction.require_all()
        else:
            self.engine.end_step()

    def _run_loader(self) -> None:
        """Run a loader; after training wait until all sites hold one model, before callbacks exchange metrics."""
        super()._run_loader()
        if self.is_train_loader and self.engine.reduction is not None:
            self.reduction.finish()
