"""One model behind its queue: a thread that takes batches, computes them and restarts a backend that fails."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from ..errors import BackendFailedError, InputError, LoadError, ModelError, ServingError, UnavailableError
from ..logs import get_logger
from .backends import Array, Backend
from .batch_limit import BatchLimit, measured_latency
from .cache import PredictionCache, cache_key
from .metrics import Metrics
from .request_queue import RequestQueue
from .ticket import Listener, Result, Ticket

_log = get_logger("dadplug.serving")
_FIRST_PAUSE = 0.1  # seconds before a process that failed to start is started again; doubled up to
_LONGEST_PAUSE = 10.0
_MOST_SHAPES = 64


class ServedModel:
    """A model with its queue, its batch size and its backend.

    Args:
        name: name of the model.
        backend: computes its batches; started by `start`.
        cache: the cache; None without one.
        metrics: where batches and restarts are counted.
        limit: the limit of its batch size.
        most_waiting: largest number of requests in the queue.

    Attributes:
        version: number of the times that the model was loaded.
        restarts: number of restarts after a failure.
        ready: whether the backend can compute.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        cache: PredictionCache | None,
        metrics: Metrics,
        limit: BatchLimit,
        most_waiting: int,
    ) -> None:
        self.name, self.backend, self.limit = name, backend, limit
        self.version, self.restarts, self.ready = 1, 0, False
        self._cache, self._metrics = cache, metrics
        self.queue = RequestQueue(name, most_waiting)
        self._replacement: Backend | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"dadplug-serving-{name}", daemon=True)
        self._shapes: set[tuple[int, ...]] = set()  # of inputs that the model has answered
        self._taken = 0.0  # when the last batch was taken

    def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            LoadError: if it cannot be loaded.
        """
        self.backend.start()
        self.ready = True
        self._thread.start()

    def request(self, x: Array, digest: bytes, arrived: float, deadline: float, listener: Listener) -> bool:
        """Ask for the output of an input; the listener is called once, perhaps before this returns.

        Args:
            x: the input, of the schema.
            digest: digest of its content, for the cache.
            arrived: time of its arrival.
            deadline: time until which an answer is awaited.
            listener: called with the result.

        Returns:
            Whether the output was in the cache.
        """
        if self._cache is None:
            self._enqueue(Ticket(x, arrived, deadline, None, [listener]))
            return False
        key = cache_key(self.name, self.version, digest, x)
        output, ticket = self._cache.request(
            key, deadline, listener, lambda: Ticket(x, arrived, deadline, key, [listener])
        )
        self._metrics.lookup(ticket is None)
        if output is not None:
            listener(Result(self.name, output, None))
        elif ticket is not None:
            self._enqueue(ticket)
        return output is not None

    def replace(self, backend: Backend) -> None:
        """Use another backend, which has been started, from the next batch on."""
        former, self._replacement = self._replacement, backend
        if former is not None:
            former.stop()
        self.queue.wake()

    def stop(self) -> None:
        """End the thread and the backend; requests that wait fail."""
        self._stopping.set()
        self.queue.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)
        self.backend.stop()

    def _enqueue(self, ticket: Ticket) -> None:
        try:
            if self._stopping.is_set():
                raise UnavailableError("the server is stopping")
            self.queue.put(ticket)
        except UnavailableError as error:
            self._close(ticket, None, error)

    # In the thread of the queue

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self.queue.wait()
            self._exchange()
            while not self._stopping.is_set():
                now = time.monotonic()
                batch, expired = self.queue.take(self.limit.size, now)
                for ticket in expired:
                    self._close(ticket, None, UnavailableError(f"model {self.name!r} did not answer in time"))
                if not batch:
                    break
                previous, self._taken = self._taken, now
                self._answer(batch, previous)
                self.queue.poll()
                self._exchange()
        for ticket in self.queue.expired():
            self._close(ticket, None, UnavailableError("the server is stopping"))

    def _exchange(self) -> None:
        """Go over to the backend of a reload, if there is one."""
        replacement, self._replacement = self._replacement, None
        if replacement is None:
            return
        former, self.backend = self.backend, replacement
        self._begin_version()
        former.stop()
        _log.info("model %r is now version %d", self.name, self.version)

    def _begin_version(self) -> None:
        """Void the entries in the cache: the file may have changed since they were computed."""
        self.version += 1
        if self._cache is not None:
            self._cache.remove_model(self.name)

    def _answer(self, batch: list[Ticket], previous: float) -> None:
        started = time.monotonic()
        try:
            failed = self._compute(batch)
        except BackendFailedError as error:
            _log.error("model %r failed and is restarted: %s", self.name, error)
            for ticket in batch:
                if ticket.listeners:
                    self._close(ticket, None, UnavailableError(f"model {self.name!r} failed: {error}"))
            self._restart()
            return
        done = time.monotonic()
        if not failed:
            self.limit.record(len(batch), measured_latency(batch[0].arrived, previous, done))
        self._metrics.batch(self.name, len(batch), done - started)

    def _compute(self, batch: list[Ticket]) -> bool:
        """Answer a batch, in halves if the model refuses it, so that only the input at fault fails.

        Returns:
            Whether a request failed.
        """
        try:
            outputs = self.backend.run(np.stack([ticket.x for ticket in batch]))
        except (ModelError, InputError) as error:
            if len(batch) == 1:
                self._close(batch[0], None, self._explained(error, batch[0]))
            else:
                middle = len(batch) // 2
                self._compute(batch[:middle])
                self._compute(batch[middle:])
            return True
        if len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(batch[0].x.shape)
        for ticket, output in zip(batch, outputs, strict=True):
            # A copy: a view would keep the whole batch in memory as long as one row is in the cache.
            self._close(ticket, np.array(output), None)
        return False

    def _explained(self, error: ServingError, ticket: Ticket) -> ServingError:
        """Return the error for an input: one of a shape that the model has never answered is the input's fault."""
        if isinstance(error, InputError) or ticket.x.shape in self._shapes:
            return error
        return InputError(f"the model does not answer inputs of shape {ticket.x.shape}: {error}")

    def _close(self, ticket: Ticket, output: Array | None, error: ServingError | None) -> None:
        if output is not None:
            output.flags.writeable = False  # it may be in the cache and with several clients
        if self._cache is None:
            listeners = ticket.listeners
        else:
            listeners = self._cache.close(ticket, output, self.version)
        ticket.listeners = []
        result = Result(self.name, output, error)
        for listener in listeners:
            try:
                listener(result)
            except Exception:
                _log.exception("a listener of model %r failed", self.name)

    def _restart(self) -> None:
        self.ready = False
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            self._exchange()
            try:
                self.backend.start()
            except (LoadError, BackendFailedError) as error:
                _log.error("model %r cannot be started: %s; again in %.1f s", self.name, error, pause)
                for ticket in self.queue.expired(time.monotonic()):
                    self._close(ticket, None, UnavailableError(f"model {self.name!r} is being restarted"))
                self._stopping.wait(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
                continue
            self._begin_version()
            self.ready = True
            self.restarts += 1
            self._metrics.restart(self.name)
            _log.warning("model %r runs again, process %s", self.name, self.backend.pid)
            return

    def status(self) -> dict[str, Any]:
        """Return the state of the model as plain values."""
        return {
            "ready": self.ready,
            "version": self.version,
            "restarts": self.restarts,
            "last_good": self.backend.last_good,
            "pid": self.backend.pid,
            "waiting": len(self.queue),
            "batch_limit": round(self.limit.value, 2),
        }
