"""Managed embeddings in any trainer: options, the managed model during a training, and the loader that reads ahead."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..adapm import AdaDataLoader, AdaModel, IntentError, ParameterManager
from ..adapm.backends import BACKENDS
from ..adapm.engine import TECHNIQUES
from ..adapm.model import Ids, find_layers
from ..adapm.recorder import count_missing
from ..options import Options
from ..reduction import GradientReduction
from ..support.refusals import refuse
from ..support.signature import OptionSet, number, option, split_keywords, unknown_option, valid
from .exchanges import SynchronousSteps


def _check_backend(name: str, value: Any) -> None:
    BACKENDS[value]  # or an error


@dataclass(frozen=True)
class Management(OptionSet):
    """Options of managed embeddings, the same in all trainers.

    Raises:
        ValueError: if an option is out of range or unknown.
    """

    intent: str | Callable[[Any], Any] | None = option(  # noqa: RUF009
        "auto",
        "function from a batch to ids by the names of weights; auto finds them; None for no lookahead",
        valid(
            "'auto', a function from a batch to its ids, or None",
            lambda value: value is None or value == "auto" or callable(value),
        ),
    )
    lookahead: int = option(
        16, "number of batches that are announced in advance", number("at least 1", lambda value: value >= 1)
    )
    reduce: str = option("mean", "mean or sum of the sites' gradients of rows", choices=("mean", "sum"))
    technique: str = option("all", "effect of intents, see ParameterManager", choices=tuple(TECHNIQUES))
    interval: float = option(
        0.002,
        "minimum time between two rounds of synchronisation, in seconds",
        number("at least 0", lambda value: value >= 0),
    )
    backend: str = option("builtin", "engine that holds the tables", _check_backend)


class ManagedEmbeddings(SynchronousSteps):
    """Embeddings in tables that a parameter manager spreads over the sites; all else as in `SynchronousSteps`.

    Attributes:
        managed: the `AdaModel` of the running training, with its tables and traffic; None outside of a training.
    """

    managed: AdaModel | None = None
    _management: Management
    _owner: Any = None  # optimizer of the embeddings
    _optimizers: Any
    _always_reduces = True  # whether there is a reduction where all parameters are managed

    def _split(self, trainer: type, mode: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take the options of managed embeddings out of the arguments of a strategy or runner; check all names.

        Args:
            trainer: dataclass of the arguments that are no options.
            mode: method for the parameters that are not managed.
            arguments: the arguments.

        Raises:
            ValueError: if one is unknown or not valid; the message lists the valid ones.
        """
        own, others = split_keywords(Management, arguments)
        self._management, options = Management(**own), split_keywords(trainer, others)[1]
        names = ["mode", *Management.names(), *(name for name in Options.names() if name != "mode")]
        for name in options:
            if name not in names:
                raise unknown_option(name, names)
        Options(mode=mode, **options).check_all_stay(type(self).__name__)
        return others

    def _build_reduction(self, model: nn.Module, settings: dict[str, Any]) -> GradientReduction | None:
        """Move the model's embeddings into tables; all sites must call it.

        Raises:
            ValueError: if there is no optimizer, or several have embeddings.
        """
        name, choice = type(self).__name__, self._management
        owners = [optimizer for optimizer in self._optimizers if find_layers(model, optimizer)]
        refuse(
            (not self._optimizers, f"{name} needs an optimizer"),
            (len(owners) > 1, f"{name} needs all embeddings in one optimizer, and several have some"),
        )
        self._owner = owners[0] if owners else self._optimizers[0]
        manager = ParameterManager(
            backend=choice.backend,
            technique=choice.technique,
            timeout=settings["timeout"],
            interval=choice.interval,
            process_group=self._process_group,
        )
        settings["always_reduce"] = self._always_reduces
        try:
            self.managed = AdaModel(model, self._owner, manager, reduce=choice.reduce, **settings)
        except BaseException as error:
            manager.abandon(f"{type(error).__name__}: {error}")
            raise
        if not self.managed.managed:
            warnings.warn(
                f"{name} found no embedding to manage: those of float32 are that are in an optimizer and that nothing "
                "but nn.Embedding and nn.EmbeddingBag uses. All parameters are agreed on by the reduction",
                stacklevel=3,
            )
        return self.managed.reduction

    def _reads_ahead(self, sites: int) -> bool:
        """Return whether rows are to be announced before they are used."""
        found = self.managed is not None and bool(self.managed.managed)
        return found and self._management.intent is not None and sites > 1

    def _give_back(self, interrupted: bool) -> None:
        """Turn the managed model into a plain one again, see `give_back`."""
        managed, self.managed = self.managed, None
        if managed is not None:
            give_back(managed, self._owner, interrupted)


def give_back(managed: AdaModel, optimizer: Any, interrupted: bool) -> None:
    """Turn a managed model into a plain one again; all sites must call it, except after an error.

    Args:
        managed: managed model.
        optimizer: optimizer of its embeddings.
        interrupted: whether other sites may have exited, and their rows with them.
    """
    if interrupted:
        error = sys.exc_info()[1]
        managed.close()
        managed.manager.abandon("its training has ended" if error is None else f"{type(error).__name__}: {error}")
        return
    try:
        managed.unwrap(optimizer)
    except BaseException as error:
        managed.manager.abandon(f"{type(error).__name__}: {error}")
        raise
    managed.manager.close()


def clip(model: AdaModel, function: Callable[..., Any]) -> Any:
    """Clip a managed model's gradients by a function of parameters, such as a partial of `clip_grad_norm_`.

    Raises:
        RuntimeError: if it is another function than `torch.nn.utils.clip_grad_norm_`, and needs rows of other sites.
    """
    options: dict[str, Any] = {}
    called = function
    while isinstance(called, functools.partial):
        options, called = {**called.keywords, **options}, called.func
    if called is not nn.utils.clip_grad_norm_:
        return function(model.parameters())
    return model.clip_grad_norm_(options["max_norm"], options.get("norm_type", 2.0))


class LookaheadLoader(AdaDataLoader):
    """`AdaDataLoader` of a trainer's batches.

    If automatic intent cannot find a batch's ids, the loader warns once, and rows are pulled when they are used.

    Args:
        loader: train loader.
        model: managed model.
        management: options of the managed embeddings, with an intent.
        owner: name of the user's runner or strategy, for messages.
        step: name of the function that looks up ids, for messages.
    """

    def __init__(self, loader: Any, model: AdaModel, management: Management, *, owner: str, step: str) -> None:
        assert management.intent is not None
        super().__init__(loader, model, intent=management.intent, forward=self._step, lookahead=management.lookahead)
        self._owner, self._looks_up = owner, step
        self._held = 0
        self._number = 0
        self._announced: dict[int, Ids] = {}
        self._warned = False

    def _step(self, model: Any, batch: Any) -> None:
        """Call a copy of the model as the trainer calls the model."""
        raise NotImplementedError

    def announce(self, batch: Any, clock: int, number: int) -> None:
        self._number = number
        try:
            ids = self.ids(batch)
        except IntentError as error:
            if callable(self._intent):
                raise
            text = str(error).replace("Give AdaDataLoader intent=", f"Give {self._owner} intent=")
            self._warn(f"{text}. Until then rows are pulled when they are used, which is right, and slower")
            return
        self._announced[clock] = ids
        self.model.intent(ids, clock, clock + 1 + self._held)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Check in a context whether the lookups of a training step have been announced; warn once if not."""
        weights = self.model.managed.values()
        for weight in weights:
            weight.recorded = []
        try:
            yield
            self._compare()
        finally:
            for weight in weights:
                weight.recorded = None

    def _compare(self) -> None:
        clock = self.model.manager.current_clock
        now = [self._announced[at] for at in range(clock - self._held, clock + 1) if at in self._announced]
        for old in [at for at in self._announced if at < clock - self._held]:
            del self._announced[old]
        if self._warned or not now:
            return
        for name, weight in self.model.managed.items():
            parts = [ids[name].reshape(-1).long().cpu() for ids in now if name in ids]
            announced = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
            for keys in weight.recorded or ():
                if missed := count_missing(keys, announced):
                    whose = "the function intent" if callable(self._intent) else "automatic intent"
                    self._warn(
                        f"{whose} has not seen {missed} of {keys.numel()} rows of {name} that {self._looks_up} looked "
                        "up. They were pulled when they were used, which is right, and slower. Give "
                        f"{self._owner} intent=, a function from a batch to all its ids by weight"
                    )
                    return

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=2)


class Stub:
    """Stub of an optimizer, a schedule or an engine: all its methods do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def shape_only(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a scalar without a value, on torch's meta device."""
    return torch.empty((), device="meta")
