"""The strategies for the package `lightning`."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from .adapm_strategy import AdaPMStrategyBase
from .dad_strategy import DADStrategyBase
from .hogwild_strategy import HogwildStrategyBase
from .local_sgd_strategy import LocalSGDStrategyBase
from .parameter_server_strategy import ParameterServerStrategyBase


class DADStrategy(DADStrategyBase, DDPStrategy):  # noqa: D101  (documented in its base)
    __doc__ = DADStrategyBase.__doc__


class AdaPMStrategy(AdaPMStrategyBase, DDPStrategy):  # noqa: D101  (documented in its base)
    __doc__ = AdaPMStrategyBase.__doc__


class LocalSGDStrategy(LocalSGDStrategyBase, DDPStrategy):  # noqa: D101  (documented in its base)
    __doc__ = LocalSGDStrategyBase.__doc__


class ParameterServerStrategy(ParameterServerStrategyBase, DDPStrategy):  # noqa: D101  (documented in its base)
    __doc__ = ParameterServerStrategyBase.__doc__


class HogwildStrategy(HogwildStrategyBase, DDPStrategy):  # noqa: D101  (documented in its base)
    __doc__ = HogwildStrategyBase.__doc__
