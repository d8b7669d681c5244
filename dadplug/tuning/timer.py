"""Timer of tasks, by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from .task import Config, Task

_SHORTEST = 0.01  # seconds of a sample; shorter work is repeated within it, since an interrupt takes a millisecond


class Timer:
    """Function that measures a configuration's seconds by the clock.

    The first measurement of a configuration prepares it and calls it once or twice before: kernels are compiled, and
    memory is touched.

    Args:
        samples: samples of a measurement, whose median counts.
        clock: returns the time in seconds.
    """

    def __init__(self, samples: int = 5, clock: Callable[[], float] = time.perf_counter) -> None:
        self._samples = samples
        self._clock = clock
        self._calls: dict[tuple[int, Config], tuple[Callable[[], object], int]] = {}

    def __call__(self, task: Task, config: Config) -> float:
        """Return the seconds of the task's work."""
        return self.sample(task, config, self._samples)

    def once(self, task: Task, config: Config) -> float:
        """Return the seconds of one sample, for comparisons in pairs."""
        return self.sample(task, config, 1)

    def sample(self, task: Task, config: Config, count: int) -> float:
        """Return the median of some samples."""
        call, repeats = self._prepared(task, config)
        times = []
        for _ in range(count):
            start = self._clock()
            for _ in range(repeats):
                call()
            times.append((self._clock() - start) / repeats)
        return statistics.median(times)

    def _prepared(self, task: Task, config: Config) -> tuple[Callable[[], object], int]:
        key = id(task), config
        if key not in self._calls:
            call = task.prepare(config)
            call()
            start = self._clock()
            call()
            took = self._clock() - start
            self._calls[key] = call, min(1000, max(1, round(_SHORTEST / took))) if took > 0 else 1
        return self._calls[key]
