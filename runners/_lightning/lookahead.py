"""Loader that `AdaPMStrategy` wraps around Lightning's train loader."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from ...adapm import AdaModel, IntentError
from ...adapm.model import Ids
from ..lookahead_loader import LookaheadLoader
from ..management import Stub, nothing, shape_only

_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")
# Methods that need a trainer, and look up nothing.
_SILENT = ("log", "log_dict", "print", "manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer")


class LightningLookahead(LookaheadLoader):
    """`LookaheadLoader` that calls a copy of a module as Lightning does.

    Args:
        loader: train loader.
        model: managed Lightning module.
        intent: as for `AdaDataLoader`.
        lookahead: as for `AdaDataLoader`.
        trainer: Lightning's trainer.
    """

    def __init__(
        self, loader: Any, model: AdaModel, intent: str | Callable[[Any], Ids], lookahead: int, trainer: Any
    ) -> None:
        super().__init__(loader, model, intent, lookahead, owner="AdaPMStrategy", step="training_step")
        try:
            len(loader)
        except (TypeError, NotImplementedError):
            self._held = 1  # Lightning holds a batch of such a loader, to know which is the last
        self._trainer = trainer
        self._prepared: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # a position that is ahead of training's
            raise AttributeError(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "worker_init_fn":
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)

    def _step(self, module: Any, batch: Any) -> None:
        """Call the copy of the module as Lightning calls the module."""
        if self._prepared is not module:
            _prepare(module, len(self._trainer.optimizers), len(self._trainer.lr_scheduler_configs))
            self._prepared = module
        for hook in _HOOKS:
            if self._trainer.datamodule is not None and _is_users(self._trainer.datamodule, hook):
                raise IntentError(f"the data module has a hook {hook} of its own")
            batch = getattr(module, hook)(batch, 0)
        parameters = inspect.signature(module.training_step).parameters
        several = len(parameters) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
        module.training_step(*((batch, self._number) if several else (batch,)))


def _prepare(module: Any, optimizers: int, schedules: int) -> None:
    """Replace what a training step calls besides lookups by stubs, in a copy of the module."""
    for name in _SILENT:
        setattr(module, name, nothing)
    if not module.automatic_optimization:
        module.optimizers = functools.partial(_stubs, optimizers)
        module.lr_schedulers = functools.partial(_stubs, schedules)
    metrics = sys.modules.get("torchmetrics")
    for child in module.modules():
        if metrics is not None and isinstance(child, metrics.Metric):
            child.forward = child.update = child.compute = shape_only


def _is_users(item: Any, name: str) -> bool:
    module = str(getattr(getattr(type(item), name, None), "__module__", ""))
    return module.split(".")[0] not in ("lightning", "pytorch_lightning")


def _stubs(count: int, *args: Any, **kwargs: Any) -> Any:
    return Stub() if count == 1 else [Stub() for _ in range(count)] or None
