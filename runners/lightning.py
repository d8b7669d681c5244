"""The strategies for the package `lightning`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from ._lightning import strategy_class


def __getattr__(name: str) -> Any:
    return strategy_class(name, DDPStrategy, __name__)
