"""Threads that carry messages on as they come, so that a main thread may be in the middle of backward."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue


class Job:
    """Steps that follow one another, each on a lane.

    Attributes:
        error: what a step raised; the further ones are left out then.
    """

    def __init__(self, steps: Sequence[tuple[str, Callable[[], None]]]) -> None:
        self.error: BaseException | None = None
        self._steps = list(steps)
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether all is done, or has failed."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits until all is done, so long at most; says whether it is.

        Raises:
            BaseException: what a step raised.
        """
        over = self._over.wait(seconds)
        if self.error is not None:
            raise self.error
        return over

    def run_next(self) -> str | None:
        """Runs a step; returns the lane of the next one, None at the end."""
        try:
            self._steps.pop(0)[1]()
        except BaseException as error:
            self.error = error
            self._steps.clear()
        if self._steps:
            return self._steps[0][0]
        self._over.set()
        return None

    @property
    def first(self) -> str:
        """The lane of the first step."""
        return self._steps[0][0]


class Lanes:
    """A thread for each kind of step, started when first used; each takes its jobs in the order in which they came."""

    def __init__(self) -> None:
        self._queues: dict[str, SimpleQueue[Job | None]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, *steps: tuple[str, Callable[[], None]]) -> Job:
        """Starts a job of steps, each given with the name of its lane."""
        job = Job(steps)
        self._put(job.first, job)
        return job

    def _put(self, lane: str, job: Job) -> None:
        with self._lock:
            if lane not in self._queues:
                self._queues[lane] = SimpleQueue()
                self._threads.append(
                    threading.Thread(target=self._work, args=(lane,), name=f"dadplug-{lane}", daemon=True)
                )
                self._threads[-1].start()
        self._queues[lane].put(job)

    def _work(self, lane: str) -> None:
        queue = self._queues[lane]
        while (job := queue.get()) is not None:
            following = job.run_next()
            if following is not None:
                self._put(following, job)
            del job  # it holds the transport, which goes when nobody uses it

    def close(self, seconds: float) -> bool:
        """Ends the threads once they have done what they have; says whether they have ended within so long."""
        for queue in self._queues.values():
            queue.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
