"""Catalyst's runner for embeddings whose rows are spread over the sites (AdaPM)."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from ..adapm import AdaModel
from ..reduction import GradientReduction
from ..support.signature import takes_keywords_of
from ._catalyst.engine import plain
from ._catalyst.runner import RunnerArguments
from .distributed_runner import DistributedRunner
from .management import LookaheadLoader, Management, Stub, clip, embeddings_of, give_back


class AdaPMRunner(DistributedRunner):
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

    managed: AdaModel | None = None

    @takes_keywords_of(Management, DistributedRunner.__init__)
    def __init__(
        self, model: Any = None, criterion: Any = None, optimizer: Any = None, mode: str = "dsgd", **arguments: Any
    ) -> None:
        self._management, others = Management.split("AdaPMRunner", RunnerArguments, mode, arguments)
        super().__init__(model, criterion, optimizer, mode, **others)
        self._owner: Any = None
        self._gathered: tuple[int, dict[str, Any]] | None = None

    # Start and end

    def _build_reduction(self, model: nn.Module, settings: dict[str, Any]) -> GradientReduction:
        if getattr(self.engine, "scaler", None) is not None:
            raise ValueError("managed rows have no part in a GradScaler: leave fp16 out, or use mixed precision bf16")
        if isinstance(self.model, dict):
            raise ValueError("AdaPMRunner trains one model: put several into one nn.Module")
        self._owner = embeddings_of("AdaPMRunner", model, self._optimizers)
        self.managed = self._management.manage("AdaPMRunner", model, self._owner, settings | {"always_reduce": True})
        if self.managed.managed and self._management.intent is not None and self.engine.num_processes > 1:
            for name, loader in self.loaders.items():
                if name.startswith("train"):
                    self.loaders[name] = _Lookahead(loader, self.managed, self._management, self)
        assert self.managed.reduction is not None
        return self.managed.reduction

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
        managed, self.managed, self._gathered = self.managed, None, None
        if managed is not None:
            give_back(managed, self._owner, interrupted)

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
            return self._with(parts, {name: _Part(load=function) for name, function in load.items()})
        if self._gathered is None or self._gathered[0] != self.epoch_step:
            whole = {"model": managed.state_dict(), "optimizer": managed.optimizer_state_dict(self._owner)}
            self._gathered = self.epoch_step, whole if self.engine.is_main_process else {}  # site 0 writes
        return self._with(parts, {name: _Part(state) for name, state in self._gathered[1].items()})

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
            if isinstance(value, types.MethodType) and value.__self__ is self._runner:
                setattr(stub, name, types.MethodType(value.__func__, stub))
        stub.model, stub.engine, stub.optimizer, stub.scheduler = model, Stub(), Stub(), Stub()
        stub.batch_metrics = {}
        stub.batch = stub._process_batch(batch)
        stub.handle_batch(batch=stub.batch)


class _Part:
    """Part of a checkpoint that has its state from, or passes it to, another object."""

    def __init__(self, state: Any = None, load: Callable[[Any], Any] | None = None) -> None:
        self._state, self._load = state, load

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        assert self._load is not None
        self._load(state)
