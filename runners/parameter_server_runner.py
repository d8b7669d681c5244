"""Catalyst's runner for asynchronous steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import MismatchError
from ..parameter_server import ParameterServer, ServerOptions
from ..signature import split_keywords, takes_keywords_of
from ._catalyst.base_runner import BaseRunner, RunnerArguments
from .server_loader import NO_ACCUMULATION, ServerLoader


class ParameterServerRunner(BaseRunner):
    """Catalyst runner for asynchronous steps; a drop-in replacement for `SupervisedRunner`.

    Each site sends its gradients and applies those of all sites in the order of one log; none waits for another one's
    batch. After each training loader the sites wait for each other, so that evaluations and checkpoints are those of
    one model. Clipping functions get the merged gradient of each commit, on all sites. Everything else is as in
    `DistributedRunner`: the sites' connection, data, metrics and files. Callbacks that stop training stop it at the end
    of an epoch. If a site is lost, the next step of each other one raises a `SiteError` that names it.

    With ``deal="shared"`` the batches of training loaders are handed out on demand, each once an epoch. Every site
    counts as many steps as there are batches, and those that others make are without data.

    Args:
        model: model to train; may be passed to `train` instead.
        criterion: loss, the mean over the samples of its batch; may be passed to `train` instead.
        optimizer: optimizer of the model; may be passed to `train` instead.
        mode: ``"dsgd"``, ``"dad"`` or ``"rankdad"``: how gradients are encoded.
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
        **arguments: Any,
    ) -> None:
        given, options = split_keywords(RunnerArguments, arguments)
        checked = ServerOptions.create(mode=mode, **options)
        super().__init__(model, criterion, optimizer, checked, RunnerArguments(**given))
        self._clip: Callable[[Any], Any] | None = None
        self._hook: Any = None

    def _run(self) -> None:
        try:
            super()._run()
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
        if self.options.deal != "shared" or self.engine.num_processes == 1:
            return
        for name in [name for name in self.loaders if name.startswith("train")]:
            if self.engine.splits[name] is None:
                raise MismatchError(
                    f"the sites have different data sets in loader {name!r}: deal='shared' deals the batches of one"
                )
            dealt = ServerLoader(self._undivided[name], lambda: self.reduction, pads=False)
            self.loaders[name] = self.engine.on_device(dealt)

    def _setup_callbacks(self) -> None:
        super()._setup_callbacks()
        if self.options.deal == "shared" and self._accumulation != 1:
            raise ValueError(NO_ACCUMULATION)

    def _build_exchange(self, model: torch.nn.Module, scaled: bool) -> ParameterServer:
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ValueError("a parameter server needs one optimizer; DistributedRunner takes several")
        if scaled:
            raise ValueError(
                "a parameter server cannot train with a GradScaler, whose scale each site changes on its own: use "
                "bf16, which needs none"
            )
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        self._clip = None
        self._hook = optimizer.register_step_pre_hook(self._before_commit)
        return ParameterServer(model, optimizer, process_group=self._process_group, **vars(self.options))

    def _idle(self) -> None:
        if self.update_due:
            self.reduction.step()

    def clip_gradients(self, function: Callable[[Any], Any]) -> None:
        """Clip the merged gradient of each commit from now on by a function of the parameters."""
        self._clip = function

    def _before_commit(self, *_: Any) -> None:
        if self._clip is not None:
            self._clip(self.reduction.model.parameters())

    def step_optimizer(self, optimizer: Any) -> None:
        """Send this site's gradient, and make the optimizer's steps of the commits that have arrived."""
        self.reduction.step()
        self.reduction.require_all()

    def _run_loader(self) -> None:
        """Run a loader; after training wait until all sites hold one model, before callbacks exchange metrics."""
        super()._run_loader()
        if self.is_train_loader and self.engine.reduction is not None:
            self.reduction.finish()
