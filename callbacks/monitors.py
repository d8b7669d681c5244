"""What the monitors measure, whatever the trainer."""

from __future__ import annotations

import time
from collections import defaultdict

from dadplug import GradientReduction


class Means:
    """Running means by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, values: dict[str, float]) -> None:
        """Takes one value each."""
        for name, value in values.items():
            self._sums[name] += value
            self._counts[name] += 1

    def take(self) -> dict[str, float]:
        """Returns the means, and starts anew."""
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        self._sums.clear()
        self._counts.clear()
        return means


class BatchClock:
    """Times batches: waiting for data, the model's work, waiting for other sites, and all of it."""

    def __init__(self) -> None:
        self._ended = self._began = time.perf_counter()

    def start(self) -> None:
        """Begins a loader."""
        self._ended = time.perf_counter()

    def begin_batch(self) -> None:
        """Marks that a batch is there."""
        self._began = time.perf_counter()

    def end_batch(self, samples: int, exchange: float) -> dict[str, float]:
        """Marks that a batch is done with.

        Args:
            samples: samples of the batch, at this site.
            exchange: seconds of it that this site waited for others.

        Returns:
            Times in seconds, and samples a second at this site.
        """
        now = time.perf_counter()
        data, work, whole = self._began - self._ended, now - self._began, now - self._ended
        self._ended = now
        return {
            "_timer/data_time": data,
            "_timer/model_time": work - exchange,
            "_timer/exchange_time": exchange,
            "_timer/batch_time": whole,
            "_timer/_fps": samples / max(whole, 1e-9),
        }


def traffic_values(reduction: GradientReduction) -> dict[str, float]:
    """Describes the last step's traffic of this site: megabytes, and how many times fewer than dense."""
    traffic = reduction.traffic
    return {"traffic/mb": traffic.bytes_sent / 1e6, "traffic/ratio": traffic.ratio}


def rank_values(reduction: GradientReduction) -> dict[str, float]:
    """Describes how well this site's gradients were compressed in the last step, by layer."""
    values: dict[str, float] = {}
    for name, quality in reduction.quality.items():
        layer = name.removesuffix(".weight")
        values[f"rank/{layer}"] = float(quality.effective_rank)
        values[f"residual/{layer}"] = quality.residual
    return values
