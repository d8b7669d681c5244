"""Cache of predictions before the queues, bounded in bytes; equal concurrent requests share one call of the model."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .popularity import PopularitySketch
from .ticket import Listener, Ticket

Key = tuple[str, int, bytes, str, tuple[int, ...]]
_OVERHEAD = 400  # bytes of an entry besides its numbers: key, array, dictionary
_BYTES_PER_COUNTER = 128  # of the limit; four rows of counters take up to a sixteenth of it
_PERIOD = 30  # requests for each entry, after which the counts of the keys are halved
_SHORTEST_PERIOD = 1000
_BODY_OVERHEAD = 300  # bytes of a request's digest and of what is known of it
_NUMBER = 32  # bytes of a float in a tuple
_MOST_BODIES = 16  # of one entry


def cache_key(name: str, version: int, digest: bytes, x: np.ndarray[Any, Any]) -> Key:
    """Return the key of a model's output: name and version of the model, digest, dtype and shape of the input."""
    return (name, version, digest, x.dtype.str, x.shape)


def digest_of(x: np.ndarray[Any, Any]) -> bytes:
    """Return the 256-bit BLAKE2 digest of an array's content; equal digests of different inputs cannot be made."""
    return hashlib.blake2b(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, digest_size=32).digest()


class KnownInput(NamedTuple):
    """Input of a request that was valid: what its keys need, without its numbers.

    Attributes:
        context: its context.
        digest: `digest_of` the input.
        dtype: its dtype.
        shape: its shape.
    """

    context: str
    digest: bytes
    dtype: str
    shape: tuple[int, ...]

    def key(self, name: str, version: int) -> Key:
        """Return the key of a model's output, as `cache_key` does."""
        return (name, version, self.digest, self.dtype, self.shape)


class Entry:
    """Output in the cache, and what is kept beside it for requests that are equal byte by byte.

    Attributes:
        output: the output.
        size: bytes of the entry.
        kept: what the task keeps of the output until feedback; None until a request was answered from the entry.
        text: the output as text, for servers; None until it was needed.
        bodies: digests of requests that are known to be this input.
    """

    __slots__ = ("bodies", "kept", "output", "size", "text")

    def __init__(self, output: np.ndarray[Any, Any], size: int) -> None:
        self.output, self.size = output, size
        self.kept: tuple[float, ...] | None = None
        self.text: bytes | None = None
        self.bodies: list[bytes] = []


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
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._bodies: dict[bytes, KnownInput] = {}
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
            entry = self._entries.get(key)
            self._record(key, entry is not None)
            if entry is not None:
                return entry.output, None
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

    def _record(self, key: Key, hit: bool) -> None:
        """Count a request of a key."""
        self._popularity.record(key[2], max(_SHORTEST_PERIOD, _PERIOD * len(self._entries)))
        if hit:
            self._entries.move_to_end(key)
            self.hits += 1

    def _put(self, key: Key, output: np.ndarray[Any, Any]) -> None:
        size = output.nbytes + _OVERHEAD
        if key not in self._entries and self._make_room(key, size):
            self._entries[key] = Entry(output, size)

    def _make_room(self, key: Key, size: int) -> bool:
        """Take bytes for a key, from entries that are asked less often; return whether it gets them."""
        displaced, needed = [], self.bytes + size - self.limit
        if size > self.limit:
            return False
        if needed > 0:
            requests = self._popularity.estimate(key[2])
            for oldest, other in self._entries.items():
                if needed <= 0:
                    break
                if self._popularity.estimate(oldest[2]) >= requests:
                    return False
                displaced.append(oldest)
                needed -= other.size
        for oldest in displaced:
            self._remove(oldest)
        self.bytes += size
        return True

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self.bytes -= entry.size
        for body in entry.bodies:
            del self._bodies[body]

    # Requests that are known by a digest of their bytes

    def known(self, body: bytes) -> KnownInput | None:
        """Return what is known of a request.

        Args:
            body: digest of all its bytes on which the answer depends.
        """
        return self._bodies.get(body)

    def learn(self, body: bytes, known: KnownInput, kept: Sequence[tuple[Key, tuple[float, ...]]]) -> None:
        """Remember that a request is a known input, as long as the first of its entries stays in the cache.

        Args:
            body: digest of the request.
            known: its input.
            kept: for each model that was asked, its key and what the task keeps of its output.
        """
        with self._lock:
            for key, values in kept:
                entry = self._entries.get(key)
                if entry is None:
                    return
                if entry.kept is None:
                    if not self._grow(key, entry, _NUMBER * len(values)):
                        return
                    entry.kept = values
            key = kept[0][0]
            entry = self._entries.get(key)  # it may have been displaced by another one
            if entry is None or body in self._bodies or not self._grow(key, entry, _BODY_OVERHEAD):
                return
            entry.bodies.append(body)
            self._bodies[body] = known
            if len(entry.bodies) > _MOST_BODIES:
                del self._bodies[entry.bodies.pop(0)]
                entry.size -= _BODY_OVERHEAD
                self.bytes -= _BODY_OVERHEAD

    def recall(self, keys: Sequence[Key]) -> list[Entry] | None:
        """Return the entries of a request, and count a hit for each; None, without counting, if one is missing.

        Args:
            keys: key for each model that is asked.
        """
        with self._lock:
            found = [entry for key in keys if (entry := self._entries.get(key)) is not None and entry.kept is not None]
            if len(found) < len(keys):
                return None
            for key in keys:
                self._record(key, True)
            return found

    def keep_text(self, key: Key, text: bytes) -> None:
        """Keep the text of an output beside it, if there is room.

        Args:
            key: the key.
            text: the text.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.text is None and self._grow(key, entry, len(text)):
                entry.text = text

    def _grow(self, key: Key, entry: Entry, size: int) -> bool:
        if not self._make_room(key, size):
            return False
        entry.size += size
        return True

    def remove_model(self, name: str) -> None:
        """Remove the entries of a model; requests of its former version can no longer be joined."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == name]:
                self._remove(key)
            for key in [key for key in self._open if key[0] == name]:
                del self._open[key]
