"""The strategies for the package `lightning`."""

from lightning.pytorch.strategies import DDPStrategy

from ._lightning import strategies_over

__getattr__ = strategies_over(DDPStrategy, __name__)
