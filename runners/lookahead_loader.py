"""The loader that `AdaPMStrategy` puts around a train loader: intents, and a look at whether they were right."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dadplug.adapm import AdaDataLoader, AdaModel, IntentError
from dadplug.adapm.loader import Ids

_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")
# What needs a trainer and looks up nothing.
_SILENT = ("log", "log_dict", "print", "manual_backward", "clip_gradients", "toggle_optimizer", "untoggle_optimizer")


class LookaheadLoader(AdaDataLoader):
    """An `AdaDataLoader` of Lightning's batches.

    Where automatic intent cannot see a batch's ids, it says so once, and rows are pulled when they are used.

    Args:
        loader: the train loader.
        model: the managed Lightning module.
        intent: as for `AdaDataLoader`.
        lookahead: as for `AdaDataLoader`.
        trainer: Lightning's trainer.
    """

    def __init__(
        self, loader: Any, model: AdaModel, intent: str | Callable[[Any], Ids], lookahead: int, trainer: Any
    ) -> None:
        super().__init__(loader, model, intent=intent, forward=self._step, lookahead=lookahead)
        try:
            len(loader)
            self._held = 0
        except (TypeError, NotImplementedError):
            self._held = 1  # Lightning holds a batch of such a loader, to know which is the last
        self._trainer = trainer
        self._prepared: Any = None
        self._number = 0
        self._told: dict[int, Ids] = {}
        self._warned = False

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # a position that is ahead of training's
            raise AttributeError(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "worker_init_fn":
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)

    def announce(self, batch: Any, clock: int, number: int) -> None:
        self._number = number
        try:
            ids = self.ids(batch)
        except IntentError as error:
            if callable(self._intent):
                raise
            text = str(error).replace("Give AdaDataLoader intent=", "Give AdaPMStrategy intent=")
            self._warn(f"{text}. Until then rows are pulled when they are used, which is right, and slower")
            return
        self._told[clock] = ids
        self.model.intent(ids, clock, clock + 1 + self._held)

    def compare(self, skip: dict[str, int]) -> None:
        """Looks whether what a training step has looked up was announced; says so once where it was not.

        Args:
            skip: number of lookups by weight that are of steps before.
        """
        clock = self.model.manager.current_clock
        now = [self._told[at] for at in range(clock - self._held, clock + 1) if at in self._told]
        for old in [at for at in self._told if at < clock - self._held]:
            del self._told[old]
        if self._warned or not now:
            return
        for name, weight in self.model.managed.items():
            told = [ids[name].reshape(-1).long().cpu() for ids in now if name in ids]
            announced = torch.cat(told).unique() if told else torch.empty(0, dtype=torch.long)
            for keys in weight.lookups[skip.get(name, 0) :]:
                if missed := int((~torch.isin(keys, announced)).sum()):
                    whose = "the function intent" if callable(self._intent) else "automatic intent"
                    self._warn(
                        f"{whose} has not seen {missed} of {keys.numel()} rows of {name} that training_step looked up. "
                        "They were pulled when they were used, which is right, and slower. Give AdaPMStrategy intent=, "
                        "a function from a batch to all its ids by weight"
                    )
                    return

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=2)

    def _step(self, module: Any, batch: Any) -> None:
        """Calls the copy of the module as Lightning calls the module."""
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
    """Silences what a training step does in a copy of the module besides lookups."""
    for name in _SILENT:
        setattr(module, name, _nothing)
    if not module.automatic_optimization:
        module.optimizers = functools.partial(_idle, optimizers)
        module.lr_schedulers = functools.partial(_idle, schedules)
    metrics = sys.modules.get("torchmetrics")
    for child in module.modules():
        if metrics is not None and isinstance(child, metrics.Metric):
            child.forward = child.update = child.compute = _scalar


def _is_users(item: Any, name: str) -> bool:
    module = str(getattr(getattr(type(item), name, None), "__module__", ""))
    return module.split(".")[0] not in ("lightning", "pytorch_lightning")


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _idle(count: int, *args: Any, **kwargs: Any) -> Any:
    return _Idle() if count == 1 else [_Idle() for _ in range(count)] or None


def _scalar(*args: Any, **kwargs: Any) -> Tensor:
    return torch.empty((), device="meta")


class _Idle:
    """Stands for an optimizer or a schedule in a module that steps them itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def lookups(model: AdaModel) -> dict[str, int]:
    """Counts the lookups since the last step by weight."""
    return {name: len(weight.lookups) for name, weight in model.managed.items()}


def embeddings_of(module: nn.Module, optimizers: list[Any]) -> Any:
    """Finds the optimizer that has the module's embeddings; the first where none has.

    Raises:
        ValueError: if there is no optimizer, or several have embeddings.
    """
    from dadplug.adapm.layers import find_layers

    if not optimizers:
        raise ValueError("AdaPMStrategy needs an optimizer from configure_optimizers")
    owners = [optimizer for optimizer in optimizers if find_layers(module, optimizer)]
    if len(owners) > 1:
        raise ValueError("AdaPMStrategy needs all embeddings in one optimizer, and several have some")
    return owners[0] if owners else optimizers[0]
