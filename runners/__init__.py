"""Runners and strategies, which plug dadplug into a trainer; the trainer is imported on first access to its runner."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from ._lightning.registration import needs_lightning, packages_in_use
from ._lightning.registration import register_strategies as register_strategies

if TYPE_CHECKING:
    from .adapm_runner import AdaPMRunner
    from .distributed_runner import DistributedRunner
    from .pytorch_lightning import AdaPMStrategy, DADStrategy

_RUNNERS = {"AdaPMRunner": "adapm_runner", "DistributedRunner": "distributed_runner"}
_STRATEGIES = {"AdaPMStrategy": "adapm_strategy", "DADStrategy": "dad_strategy"}

__all__ = ["AdaPMRunner", "AdaPMStrategy", "DADStrategy", "DistributedRunner"]


def __getattr__(name: str) -> Any:
    if name in _STRATEGIES:
        return _strategy(name)
    if name not in _RUNNERS:
        raise AttributeError(f"module 'dadplug.runners' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{_RUNNERS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("catalyst", "accelerate"):
            raise ImportError(
                f"{name} needs Catalyst, which is not installed: pip install 'dadplug[catalyst]' "
                "(with pip below 24.1, since newer ones refuse Catalyst's metadata)"
            ) from error
        raise


def _strategy(name: str) -> Any:
    """Return the strategy for the package of Lightning in use, or a factory that chooses the package when called.

    The package is not known yet if both are installed and the program has imported neither. If it has imported both,
    the factory raises an error.
    """
    if len(packages_in_use()) == 1:
        return getattr(needs_lightning(name, __name__), name)
    base = getattr(importlib.import_module(f".{_STRATEGIES[name]}", __name__), f"{name}Base")

    def build(*args: Any, **kwargs: Any) -> Any:
        return getattr(needs_lightning(name, __name__), name)(*args, **kwargs)

    factory: Any = build
    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = base.__doc__
    factory.__signature__ = inspect.signature(base)
    return factory
