"""Choice of the number of steps after which sparse deltas are applied, from the time in which they arrive.

Sites train better the sooner a mean counts, and wait where it has not arrived when it is due. Each site measures after
how many of its steps the deltas of a round have arrived, and states the median of its last rounds in its header. All
sites conclude the same from the headers of a round:

    least = the least that a site states            wanted = least + (least - 1) / 4, rounded up
    if least > delay + 1/4                          delay <- wanted, at most 2 delay
    if wanted <= 0.7 delay                          delay <- wanted, at least delay / 2

The least counts, since a site whose steps are faster waits for the others' deltas, however long the delay is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from ..exchange.fields import COUNT
from ..support.logs import get_logger
from ..support.signature import whole_number
from .header import Header
from .options import LocalOptions

_log = get_logger(__name__)

_LAST = 4  # agreements whose median is stated
_PARTS_OF_ROUND = 4  # of which deltas are taken to travel in one, before it is measured
_LATE = 25  # hundredths of a step by which deltas arrive after they are due, beyond which the delay grows


def next_delay(delay: int, travels: Sequence[int]) -> int:
    """Return the delay of the next agreement.

    Args:
        delay: the present delay in steps.
        travels: hundredths of its steps in which deltas have arrived, as each site states them; 0 if not measured.
    """
    least = min(travels, default=0)
    if not least:
        return delay
    wanted = -((100 - 5 * least) // 400)
    if least > 100 * delay + _LATE:
        return min(wanted, 2 * delay)
    return max(wanted, (delay + 1) // 2) if 10 * wanted <= 7 * delay else delay


class DelayChoice:
    """Delay of the deltas of local steps: that of the options, or one that all sites choose alike.

    Args:
        options: the options.
    """

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        given = options.delay is not None or options.round_seconds is not None
        self._chooses = options.density is not None and options.overlap and not given
        self.steps: int | None = None
        self._travels: deque[int] = deque(maxlen=_LAST)
        self.load(None)

    def load(self, steps: int | None) -> None:
        """Go on from the choice of a checkpoint or of another site.

        Args:
            steps: `steps` there.

        Raises:
            ValueError: if that is no number of steps.
        """
        whole_number(1, "or None", lambda value: value is None)("the chosen delay", steps)
        self.steps = steps if self._chooses else None
        self._travels.clear()
        self._unmeasured = self._options.fragments  # agreements in which kernels are compiled
        self._sent: float | None = None  # when the deltas in transit were sent, while it is measured
        self._taken = 0  # steps since then

    def at(self, step: int) -> int | None:
        """Return the number of steps after which what is sent at a step is applied; None: at the next agreement.

        Args:
            step: number of steps so far.

        Raises:
            ValueError: as `LocalOptions.interval`.
        """
        if not self._chooses:
            return self._options.delay
        return min(self.steps or max(1, self._options.interval(step) // _PARTS_OF_ROUND), self._most(step))

    def _most(self, step: int) -> int:
        return max(1, self._options.interval(step) // self._options.fragments - 1)

    @property
    def travel(self) -> int:
        """Hundredths of this site's steps in which deltas arrive; 0 if not measured."""
        return int(median(self._travels)) if self._travels else 0

    def launch(self) -> None:
        """Begin to measure, as deltas are sent."""
        measures = self._chooses and not self._unmeasured
        self._sent, self._taken = time.perf_counter() if measures else None, 0
        self._unmeasured = max(0, self._unmeasured - 1)

    def end_step(self, has_arrived: Callable[[], bool]) -> None:
        """Count a step of this site.

        Args:
            has_arrived: returns whether the deltas of all sites have arrived.
        """
        if self._sent is not None:
            self._taken += 1
            if has_arrived():
                self._record(0.0)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Count the time inside as that in which the deltas had not arrived yet, unless they had."""
        begun = time.perf_counter()
        yield
        if self._sent is not None and self._taken:
            self._record((time.perf_counter() - begun) / (begun - self._sent) * self._taken)
        self._sent = None

    def _record(self, further: float) -> None:
        self._travels.append(min(COUNT, int(100 * (self._taken + further))))
        self._sent = None

    def follow(self, headers: Collection[Header]) -> None:
        """Choose by the headers of an agreement, the same at all sites."""
        if not self._chooses or not headers:
            return
        last, travels = max(header.step for header in headers), [header.travel for header in headers]
        before = self.at(last)
        assert before is not None
        chosen = min(next_delay(before, travels), self._most(last))
        if chosen != before:
            self.steps = chosen
            arrival = min(travels) / 100
            _log.info("deltas are applied %d steps after they are sent, as they arrive after %.3g", chosen, arrival)
