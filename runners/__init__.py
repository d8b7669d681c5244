"""Runners and strategies, which plug dadplug into a trainer; the trainer is imported on first access to its runner.

A trainer may be changed here without reading the ways to train, whose common part is `exchanges`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ._catalyst import from_catalyst
from ._lightning import needs_lightning, packages_in_use, strategy_base
from ._lightning import register_strategies as register_strategies
from .ways import RUNNERS, STRATEGIES

if TYPE_CHECKING:
    from ._lightning.adapm import AdaPMStrategyBase as AdaPMStrategy
    from ._lightning.hogwild import HogwildStrategyBase as HogwildStrategy
    from ._lightning.strategies import DADStrategyBase as DADStrategy
    from ._lightning.strategies import LocalSGDStrategyBase as LocalSGDStrategy
    from ._lightning.strategies import ParameterServerStrategyBase as ParameterServerStrategy
    from .catalyst import AdaPMRunner, DistributedRunner, HogwildRunner, LocalSGDRunner, ParameterServerRunner

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
    if name in STRATEGIES:
        single = len(packages_in_use()) == 1
        return getattr(needs_lightning(name, __name__), name) if single else _StrategyFactory(name)
    if name not in RUNNERS:
        raise AttributeError(f"module 'dadplug.runners' has no attribute {name!r}")
    return from_catalyst(name, f"{__name__}.catalyst")


class _StrategyFactory:
    """Factory of strategies for the package of Lightning that is in use when it is called or subclassed.

    It stands for the class as long as the package is not known: both are installed, and the program has imported
    neither. If it has imported both, a call raises an error, and so does a class statement.

    Args:
        name: name of the strategy.
    """

    def __init__(self, name: str) -> None:
        self._base = strategy_base(name)
        self.__name__ = self.__qualname__ = name
        self.__doc__ = self._base.__doc__
        self.__signature__ = inspect.signature(self._base)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._chosen()(*args, **kwargs)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        return (self._chosen(),)

    def __instancecheck__(self, strategy: object) -> bool:
        return isinstance(strategy, self._base)

    def _chosen(self) -> Any:
        return getattr(needs_lightning(self.__name__, __name__), self.__name__)
