"""The strategies for the package `pytorch_lightning`."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.strategies import DDPStrategy

from ._lightning import strategy_class


def __getattr__(name: str) -> Any:
    return strategy_class(name, DDPStrategy, __name__)
