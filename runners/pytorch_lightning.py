"""The strategies for the package `pytorch_lightning`."""

from pytorch_lightning.strategies import DDPStrategy

from ._lightning import strategies_over

__getattr__ = strategies_over(DDPStrategy, __name__)
