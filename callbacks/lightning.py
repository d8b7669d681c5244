"""The callbacks for the package `lightning`."""

import functools

from lightning.pytorch.callbacks import Callback

from ._lightning import build_adapters, by_environment

BatchTimer, TrafficMonitor, PrivacyMonitor, RankMonitor, RankSchedule, ReplicaCheck, AdaptiveBatchSize = build_adapters(
    Callback, __name__
)
factory = functools.partial(by_environment, __name__)  # an entry point
