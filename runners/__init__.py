"""What plugs into a trainer. A trainer is imported when its runner is first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._lightning.registration import needs_lightning, packages_in_use
from ._lightning.registration import register_strategies as register_strategies

if TYPE_CHECKING:
    from .adapm_runner import AdaPMRunner
    from .adapm_strategy import AdaPMStrategy
    from .dad_strategy import DADStrategy
    from .distributed_runner import DistributedRunner

_TRAINERS = {
    "AdaPMRunner": "adapm_runner",
    "AdaPMStrategy": "adapm_strategy",
    "DADStrategy": "dad_strategy",
    "DistributedRunner": "distributed_runner",
}
_STRATEGIES = ("AdaPMStrategy", "DADStrategy")

__all__ = ["AdaPMRunner", "AdaPMStrategy", "DADStrategy", "DistributedRunner"]


def __getattr__(name: str) -> Any:
    if name not in _TRAINERS:
        raise AttributeError(f"module 'dadplug.runners' has no attribute {name!r}")
    if name in _STRATEGIES and len(packages_in_use()) == 1:
        return getattr(needs_lightning(name, __name__), name)  # a class that LightningCLI knows for a strategy
    try:
        return getattr(importlib.import_module(f".{_TRAINERS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("catalyst", "accelerate"):
            raise ImportError(
                f"{name} needs Catalyst, which is not installed: pip install 'dadplug[catalyst]' "
                "(with pip below 24.1, since newer ones refuse Catalyst's metadata)"
            ) from error
        raise
