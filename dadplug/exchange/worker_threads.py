"""Worker threads that forward messages as they arrive, while the main thread computes the backward pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

Step = tuple[str, Callable[[], None]]
"""Name of a worker thread, and what it runs."""


class Job:
    """Steps that run one after the other, each on the worker thread that it names.

    Args:
        steps: the steps, at least one.

    Attributes:
        error: exception of a step; the steps after it are skipped.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.error: BaseException | None = None
        self._steps = list(steps)
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether all steps have ended, or one has failed."""
        return self._over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the job is over.

        Args:
            seconds: time to wait at most.

        Returns:
            Whether it is over.

        Raises:
            BaseException: the exception of a step.
        """
        over = self._over.wait(seconds)
        if self.error is not None:
            raise self.error
        return over

    def run_next(self) -> str | None:
        """Run a step; return the name of the worker thread of the next one, None at the end."""
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
        """Name of the worker thread of the first step."""
        return self._steps[0][0]


class WorkerThreads:
    """Threads by name, each started when first used, that run their jobs in the order of submission."""

    def __init__(self) -> None:
        self._queues: dict[str, SimpleQueue[Job | None]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, *steps: Step) -> Job:
        """Start a job.

        Args:
            steps: the steps, each with the name of its worker thread.
        """
        job = Job(steps)
        self._put(job.first, job)
        return job

    def _put(self, name: str, job: Job) -> None:
        with self._lock:
            if name not in self._queues:
                self._queues[name] = SimpleQueue()
                thread = threading.Thread(target=self._run, args=(name,), name=f"dadplug-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queues[name].put(job)

    def _run(self, name: str) -> None:
        queue = self._queues[name]
        while (job := queue.get()) is not None:
            following = job.run_next()
            if following is not None:
                self._put(following, job)
            del job  # it holds the transport, which is collected when nobody uses it

    def close(self, seconds: float) -> bool:
        """End the threads once they have run what has been submitted.

        Args:
            seconds: time to wait at most.

        Returns:
            Whether they have ended.
        """
        for queue in self._queues.values():
            queue.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
