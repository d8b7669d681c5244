"""Accelerate's `Accelerator` with dadplug's modes in place of the reduction of torch's DistributedDataParallel.

`Accelerator` is a subclass. `use` turns an accelerator that another library has made, such as that of transformers'
Trainer, into one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .ddp import DistributedDataParallel
from .options import Options
from .signature import split_keywords, takes_keywords_of

try:
    import accelerate
except ImportError as error:
    raise ImportError(
        'dadplug.accelerate needs accelerate: pip install accelerate, or install dadplug with the extra "accelerate"'
    ) from error


class Accelerator(accelerate.Accelerator):
    """An accelerator whose `prepare` wraps models in `dadplug.DistributedDataParallel`.

    Args:
        mode: name of a method, as in `dadplug.GradientReduction`.
        keywords: options, see `dadplug.options.Options`, and the keywords of accelerate's class.

    Example:
        >>> accelerator = dadplug.accelerate.Accelerator(cpu=True, mode="rankdad")
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    _options: dict[str, Any]
    _wrapped: list[DistributedDataParallel]

    @takes_keywords_of(Options)
    def __init__(self, *args: Any, mode: str = "rankdad", **keywords: Any) -> None:
        options, rest = split_keywords(Options, keywords)
        super().__init__(*args, **rest)
        self._begin({"mode": mode} | options)

    def _begin(self, options: dict[str, Any]) -> None:
        """Wrap the models that are prepared from now on."""
        Options.create(**options)
        self._options = options
        self._wrapped = []

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place a model on its device, and wrap it in `dadplug.DistributedDataParallel` if it is to be trained.

        Args:
            model: the model.
            device_placement: whether to move it to the accelerator's device; as the accelerator does by default.
            evaluation_mode: whether the model is used without being trained, and not wrapped.
        """
        if any(model is each for each in self._wrapped):
            return model
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation_mode or not trained or getattr(model, "_is_accelerate_prepared", False):
            evaluated: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
            return evaluated
        placed = super().prepare_model(model, device_placement, evaluation_mode=True)
        for each in (model, placed):  # which are not what `prepare` returns
            vars(each).pop("_is_accelerate_prepared", None)
        wrapped = DistributedDataParallel(placed, **self._options)
        vars(wrapped)["_is_accelerate_prepared"] = True
        self._wrapped.append(wrapped)
        return wrapped

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate a model's gradients: the next backward pass outside of the block synchronizes all of them.

        Args:
            model: a prepared model.
        """
        if isinstance(model, DistributedDataParallel):  # also in one process, where accelerate's does nothing
            with model.no_sync():
                yield
        else:
            with super().no_sync(model):
                yield


def use(accelerator: accelerate.Accelerator, mode: str = "rankdad", **options: Any) -> None:
    """Let an accelerator that exists wrap the models that it prepares from now on in dadplug's class.

    Args:
        accelerator: the accelerator, of accelerate's class or a subclass of it.
        mode: name of a method, as in `dadplug.GradientReduction`.
        options: the other options, see `dadplug.options.Options`.
    """
    kind = type(accelerator)
    own = Accelerator if kind is accelerate.Accelerator else type(kind.__name__, (Accelerator, kind), {})
    accelerator.__class__ = own
    accelerator._begin({"mode": mode} | options)
