"""Cache of predictions before the queues, bounded in bytes; equal concurrent requests share one call of the model."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from .popularity import PopularitySketch
from .ticket import Listener, Ticket

Key = tuple[str, int, bytes, str, tuple[int, ...]]
_OVERHEAD = 400  # bytes of an entry besides its numbers: key, array, dictionary
_BYTES_PER_COUNTER = 128  # of the limit; four rows of counters take up to a sixteenth of it
_PERIOD = 30  # requests for each entry, after which the counts of the keys are halved
_SHORTEST_PERIOD = 1000


def cache_key(name: str, version: int, digest: bytes, x: np.ndarray[Any, Any]) -> Key:
    """Return the key of a model's output: name and version of the model, digest, dtype and shape of the input."""
    return (name, version, digest, x.dtype.str, x.shape)


def digest_of(x: np.ndarray[Any, Any]) -> bytes:
    """Return the 256-bit BLAKE2 digest of an array's content; equal digests of different inputs cannot be made."""
    return hashlib.blake2b(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, digest_size=32).digest()


class PredictionCache:
    """Outputs of recent requests, and the requests that are being computed.

    A new entry takes the place of the least recently used ones if its key was requested more often than theirs, and is
    not kept otherwise (TinyLFU, see `popularity`). Failures are not kept.

    Args:
        limit: bytes of all entries.

    Attributes:
        bytes: bytes of the entries.
        hits: requests answered from an entry.
        joined: requests that waited for an equal one.
        misses: requests that called the model.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = self.hits = self.joined = self.misses = 0
        self._entries: OrderedDict[Key, np.ndarray[Any, Any]] = OrderedDict()
        self._open: dict[Key, Ticket] = {}
        self._popularity = PopularitySketch(limit // _BYTES_PER_COUNTER)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def request(
        self, key: Key, deadline: float, listener: Listener, create: Callable[[], Ticket]
    ) -> tuple[np.ndarray[Any, Any] | None, Ticket | None]:
        """Look up a request, join an equal one, or open it.

        Args:
            key: the key.
            deadline: time until which the answer is awaited.
            listener: called with the result, unless it is returned.
            create: creates the ticket of a request that has to be computed.

        Returns:
            The output, if there is an entry; the ticket, if it has to be queued; neither after joining.
        """
        with self._lock:
            self._popularity.record(key[2], max(_SHORTEST_PERIOD, _PERIOD * len(self._entries)))
            output = self._entries.get(key)
            if output is not None:
                self._entries.move_to_end(key)
                self.hits += 1
                return output, None
            ticket = self._open.get(key)
            if ticket is not None:
                ticket.listeners.append(listener)
                ticket.deadline = max(ticket.deadline, deadline)
                self.joined += 1
                return None, None
            self.misses += 1
            ticket = self._open[key] = create()
            return None, ticket

    def close(self, ticket: Ticket, output: np.ndarray[Any, Any] | None, version: int) -> list[Listener]:
        """End an open request, and keep its output.

        Args:
            ticket: the ticket of the request.
            output: the output; None after a failure.
            version: version of the model that computed it; an output of another version than the key's is not kept.

        Returns:
            The listeners to call.
        """
        key = ticket.key
        with self._lock:
            if key is not None:
                if self._open.get(key) is ticket:
                    del self._open[key]
                if output is not None and version == key[1]:
                    self._put(key, output)
            return ticket.listeners

    def _put(self, key: Key, output: np.ndarray[Any, Any]) -> None:
        size = output.nbytes + _OVERHEAD
        if size > self.limit or key in self._entries:
            return
        displaced, needed = [], self.bytes + size - self.limit
        if needed > 0:
            requests = self._popularity.estimate(key[2])
            for oldest, other in self._entries.items():
                if needed <= 0:
                    break
                if self._popularity.estimate(oldest[2]) >= requests:
                    return
                displaced.append(oldest)
                needed -= other.nbytes + _OVERHEAD
        for oldest in displaced:
            self.bytes -= self._entries.pop(oldest).nbytes + _OVERHEAD
        self._entries[key] = output
        self.bytes += size

    def remove_model(self, name: str) -> None:
        """Remove the entries of a model; requests of its former version can no longer be joined."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == name]:
                self.bytes -= self._entries.pop(key).nbytes + _OVERHEAD
            for key in [key for key in self._open if key[0] == name]:
                del self._open[key]
