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
    from .hogwild_runner import HogwildRunner
    from .local_sgd_runner import LocalSGDRunner
    from .parameter_server_runner import ParameterServerRunner
    from .pytorch_lightning import (
        AdaPMStrategy,
        DADStrategy,
        HogwildStrategy,
        LocalSGDStrategy,
        ParameterServerStrategy,
    )

_RUNNERS = {
    "AdaPMRunner": "adapm_runner",
    "DistributedRunner": "distributed_runner",
    "HogwildRunner": "hogwild_runner",
    "LocalSGDRunner": "local_sgd_runner",
    "ParameterServerRunner": "parameter_server_runner",
}
_STRATEGIES = {
    "AdaPMStrategy": "adapm_strategy",
    "DADStrategy": "dad_strategy",
    "HogwildStrategy": "hogwild_strategy",
    "LocalSGDStrategy": "local_sgd_strategy",
    "ParameterServerStrategy": "parameter_server_strategy",
}

__all__ = [
    "AdaPMRunner",
    "AdaPMStrategy",
    "DADStrategy",
    "DistributedRunner",
    "HogwildRunner",
    "HogwildStrategy",
    "LocalSGDRunner",
    "LocalSGDStrategy",
    "ParameterServerRunner",
    "ParameterServerStrategy",
]


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
    """Return the strategy for the package of Lightning in use, or a factory that chooses the package when called."""
    if len(packages_in_use()) == 1:
        return getattr(needs_lightning(name, __name__), name)
    base = getattr(importlib.import_module(f".{_STRATEGIES[name]}", __name__), f"{name}Base")
    return _StrategyFactory(name, base)


class _StrategyFactory:
    """Factory of strategies for the package of Lightning that is in use when it is called.

    It stands for the class as long as the package is not known: both are installed, and the program has imported
    neither. If it has imported both, a call raises an error.

    Args:
        name: name of the strategy.
        base: base class of the strategy for each package.
    """

    def __init__(self, name: str, base: type) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = base.__doc__
        self.__signature__ = inspect.signature(base)
        self._base = base

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(needs_lightning(self.__name__, __name__), self.__name__)(*args, **kwargs)

    def __instancecheck__(self, strategy: object) -> bool:
        return isinstance(strategy, self._base)
