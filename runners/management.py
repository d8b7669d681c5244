"""Managed embeddings in any trainer: options, and the life of the managed model during a training."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..options import Options
from ..signature import check_choice, split_keywords, unknown_option

if TYPE_CHECKING:
    from ..adapm import AdaModel


@dataclass(frozen=True)
class Management:
    """Options of managed embeddings, the same in all trainers.

    Args:
        intent: function from a batch to ids by the names of weights; ``"auto"`` finds them; None for no lookahead.
        lookahead: number of batches that are announced in advance.
        reduce: ``"mean"`` or ``"sum"`` of the sites' gradients of rows.
        technique: effect of intents, see `dadplug.adapm.ParameterManager`.
        interval: minimum time between two rounds of synchronisation, in seconds.
        backend: name of the engine that holds the tables.

    Raises:
        ValueError: if an option is out of range or unknown.
    """

    intent: str | Callable[[Any], Any] | None = "auto"
    lookahead: int = 16
    reduce: str = "mean"
    technique: str = "all"
    interval: float = 0.002
    backend: str = "builtin"

    def __post_init__(self) -> None:
        from ..adapm.backends import BACKENDS
        from ..adapm.engine import TECHNIQUES

        BACKENDS[self.backend]  # or an error
        if self.intent is not None and self.intent != "auto" and not callable(self.intent):
            raise ValueError(f"intent must be 'auto', a function from a batch to its ids, or None, got {self.intent!r}")
        if self.lookahead < 1:
            raise ValueError(f"lookahead must be at least 1, got {self.lookahead}")
        for name, choices in (("reduce", ("mean", "sum")), ("technique", TECHNIQUES)):
            check_choice(name, getattr(self, name), choices)
        if self.interval < 0:
            raise ValueError(f"interval must be at least 0, got {self.interval}")

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the options."""
        return [field.name for field in fields(cls)]

    @classmethod
    def split(cls, arguments: dict[str, Any]) -> tuple[Management, dict[str, Any]]:
        """Build the options from those arguments that are theirs; return them and the other arguments."""
        own, others = split_keywords(cls, arguments)
        return cls(**own), others

    def manage(self, owner: str, model: nn.Module, optimizer: Any, options: dict[str, Any]) -> AdaModel:
        """Move a model's embeddings into tables; all sites must call it.

        Args:
            owner: name of the user's runner or strategy, for messages.
            model: model with the embeddings.
            optimizer: optimizer of the embeddings.
            options: options of `AdaModel` for all other parameters.
        """
        from ..adapm import AdaModel, ParameterManager

        manager = ParameterManager(
            backend=self.backend,
            technique=self.technique,
            timeout=options["timeout"],
            interval=self.interval,
            process_group=options.get("process_group"),
        )
        try:
            managed = AdaModel(model, optimizer, manager, reduce=self.reduce, **options)
        except BaseException as error:
            manager.abandon(f"{type(error).__name__}: {error}")
            raise
        if not managed.managed:
            warnings.warn(
                f"{owner} found no embedding to manage: those of float32 are that are in an optimizer and that nothing "
                "but nn.Embedding and nn.EmbeddingBag uses. All parameters are agreed on by the reduction",
                stacklevel=3,
            )
        return managed


def check_names(given: Iterable[str]) -> None:
    """Check that options belong to managed embeddings or to the reduction of the other parameters.

    Raises:
        ValueError: if one does not; the message lists the valid ones.
    """
    names = ["mode", *Management.names(), *(name for name in Options.names() if name != "mode")]
    for name in given:
        if name not in names:
            raise unknown_option(name, names)


def embeddings_of(owner: str, model: nn.Module, optimizers: list[Any]) -> Any:
    """Return the optimizer of a model's embeddings; the first optimizer if none has any.

    Raises:
        ValueError: if there is no optimizer, or several have embeddings.
    """
    from ..adapm.model import find_layers

    if not optimizers:
        raise ValueError(f"{owner} needs an optimizer")
    owners = [optimizer for optimizer in optimizers if find_layers(model, optimizer)]
    if len(owners) > 1:
        raise ValueError(f"{owner} needs all embeddings in one optimizer, and several have some")
    return owners[0] if owners else optimizers[0]


def give_back(managed: AdaModel, optimizer: Any, interrupted: bool) -> None:
    """Turn a managed model into a plain one again; all sites must call it, except after an error.

    Args:
        managed: managed model.
        optimizer: optimizer of its embeddings.
        interrupted: whether other sites may have exited, and their rows with them.
    """
    if interrupted:
        managed.close()
        managed.manager.abandon("its training ended with an error")
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
