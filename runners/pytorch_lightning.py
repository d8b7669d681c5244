"""The strategies for the package `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy

from . import adapm_strategy, dad_strategy


class DADStrategy(dad_strategy.DADStrategy, DDPStrategy):
    """`dadplug.runners.dad_strategy.DADStrategy` for this package."""


class AdaPMStrategy(adapm_strategy.AdaPMStrategy, DDPStrategy):
    """`dadplug.runners.adapm_strategy.AdaPMStrategy` for this package."""
