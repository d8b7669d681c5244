"""Work handles of the hub's process group: collectives in progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange.worker_threads import WorkerThreads

_FUTURES = "futures"  # name of a worker thread


class HubWork(dist.Work):
    """Collective in progress.

    Args:
        wait: function of a timeout in seconds that waits for what has to arrive.
        finish: function that writes the results, once it has arrived.
        tensors: the results.
        seconds: timeout of the collective.
        threads: threads that complete futures.
    """

    def __init__(
        self,
        wait: Callable[[float], object],
        finish: Callable[[], object],
        tensors: Sequence[Tensor],
        seconds: float,
        threads: WorkerThreads,
    ) -> None:
        super().__init__()
        self._wait = wait
        self._finish = finish
        self._tensors = list(tensors)
        self._seconds = seconds
        self._threads = threads
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective.

        Args:
            timeout: time to wait at most; none or 0 for that of the collective.

        Raises:
            SiteError: if a site is gone or silent.
        """
        with self._lock:
            if not self._over:
                try:
                    self._wait((timeout.total_seconds() if timeout else 0.0) or self._seconds)
                    self._finish()
                except BaseException as error:
                    self._error = error
                finally:
                    self._over = True
            if self._error is not None:
                raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the results, which another thread completes."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
            except BaseException as error:
                # Its waiters get a copy: torch tells the message of a RuntimeError only.
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                future.set_result(self._tensors)

        self._threads.submit((_FUTURES, complete))
        return future

    def is_completed(self) -> bool:
        return self._over

    def is_success(self) -> bool:
        return self._over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors
