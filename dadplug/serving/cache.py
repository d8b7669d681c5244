"""Requests to one model, and the cache of their outputs; equal concurrent requests share one call of the model."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Key = tuple[str, int, bytes]  # name and version of the model, digest of the input
_OVERHEAD = 400  # bytes of an entry besides its numbers: key, array, dictionary
_BYTES_PER_COUNTER = 128  # of the limit; four rows of counters take up to a sixteenth of it
_PERIOD = 30  # requests for each entry, after which the counts of the keys are halved
_SHORTEST_PERIOD = 1000
_BODY_OVERHEAD = 300  # bytes of a request's digest and of what is known of it
_MOST_BODIES = 16  # of one entry

_ROWS = 4
_MOST_COUNTED = 255  # value at which a count stays
_HALVED = bytes(count // 2 for count in range(256))
_WIDEST = 1 << 20


class Result(NamedTuple):
    """Result of a request to one model: an output, or an error.

    Attributes:
        model: name of the model.
        output: the output, read-only; None after a failure.
        kept: what the task keeps of the output until feedback.
        error: the failure.
    """

    model: str
    output: Array | None = None
    kept: Any = None
    error: Exception | None = None


Listener = Callable[[Result], object]


class Ticket:
    """Request to a model.

    Args:
        key: key in the cache.
        x: the input, without the dimension of the batch.
        arrived: time of arrival in seconds of `time.monotonic`.
        deadline: time until which the answer is awaited.
        listeners: functions to call with the result, once.
    """

    __slots__ = ("arrived", "deadline", "key", "listeners", "x")

    def __init__(self, key: Key, x: Array, arrived: float, deadline: float, listeners: list[Listener]) -> None:
        self.key, self.x = key, x
        self.arrived, self.deadline, self.listeners = arrived, deadline, listeners


def digest_of(x: Array) -> bytes:
    """Return the 256-bit BLAKE2 digest of an array; equal digests of different inputs cannot be made."""
    found = hashlib.blake2b(f"{x.dtype.str}{x.shape}".encode(), digest_size=32)
    found.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return found.digest()


class PopularitySketch:
    """Approximate number of recent requests by key: a count-min sketch with aging, for admission by frequency.

    Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Trans. Storage 13, 2017. Counts
    are never too small, and halved now and then, so that keys that were popular once are forgotten.

    Args:
        width: number of counters in each of the four rows; rounded up to a power of two, from 256 to 2^20.
    """

    def __init__(self, width: int) -> None:
        self._mask = (1 << max(8, (min(width, _WIDEST) - 1).bit_length())) - 1
        self._rows = [bytearray(self._mask + 1) for _ in range(_ROWS)]
        self._recorded = 0

    def record(self, digest: bytes, period: int) -> None:
        """Count a request.

        Args:
            digest: digest of the key; its first 16 bytes are used.
            period: number of requests after which all counts are halved.
        """
        rows, places = self._rows, self._places(digest)
        counts = [row[place] for row, place in zip(rows, places, strict=True)]
        least = min(counts)
        if least < _MOST_COUNTED:  # only the smallest ones: the others are too large already
            for row, place, count in zip(rows, places, counts, strict=True):
                if count == least:
                    row[place] = least + 1
        self._recorded += 1
        if self._recorded >= period:
            self._recorded //= 2
            self._rows = [row.translate(_HALVED) for row in rows]

    def estimate(self, digest: bytes) -> int:
        """Return the approximate number of recent requests of a key.

        Args:
            digest: digest of the key.
        """
        return min(row[place] for row, place in zip(self._rows, self._places(digest), strict=True))

    def _places(self, digest: bytes) -> tuple[int, int, int, int]:
        bits, mask = int.from_bytes(digest[:16], "little"), self._mask
        return bits & mask, bits >> 32 & mask, bits >> 64 & mask, bits >> 96 & mask


class KnownInput(NamedTuple):
    """Input of a request that was valid, without its numbers.

    Attributes:
        context: its context.
        digest: `digest_of` the input.
    """

    context: str
    digest: bytes


class Entry:
    """Output in the cache, and what is kept beside it for requests that are equal byte by byte.

    Attributes:
        output: the output.
        kept: what the task keeps of the output until feedback.
        size: bytes of the entry.
        text: the output as text, for servers; None until it was needed.
        bodies: digests of requests that are known to be this input.
    """

    __slots__ = ("bodies", "kept", "output", "size", "text")

    def __init__(self, output: Array, kept: Any, size: int) -> None:
        self.output, self.kept, self.size = output, kept, size
        self.text: bytes | None = None
        self.bodies: list[bytes] = []


class PredictionCache:
    """Outputs of recent requests, and the requests that are being computed.

    A new entry takes the place of the least recently used ones if its key was requested more often than theirs, and is
    not kept otherwise (TinyLFU, see `PopularitySketch`). Failures are not kept.

    Args:
        limit: bytes of all entries; 0 for no entries, and no shared calls.

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

    def request(self, ticket: Ticket) -> Entry | Ticket | None:
        """Look up a request, join an equal one, or open it.

        Args:
            ticket: the request.

        Returns:
            The entry with its output; the ticket, if it has to be queued; None after joining.
        """
        if not self.limit:
            return ticket
        key = ticket.key
        with self._lock:
            entry = self._entries.get(key)
            self._record(key, entry is not None)
            if entry is not None:
                return entry
            other = self._open.get(key)
            if other is None:
                self.misses += 1
                self._open[key] = ticket
                return ticket
            other.listeners += ticket.listeners
            other.deadline = max(other.deadline, ticket.deadline)
            self.joined += 1
            return None

    def close(self, ticket: Ticket, output: Array | None, kept: Any, version: int) -> list[Listener]:
        """End an open request, and keep its output.

        Args:
            ticket: the request.
            output: the output; None after a failure.
            kept: what the task keeps of it until feedback.
            version: version of the model that computed it; an output of another version than the key's is not kept.

        Returns:
            The listeners to call.
        """
        key = ticket.key
        with self._lock:
            if self._open.get(key) is ticket:
                del self._open[key]
            if output is not None and version == key[1] and key not in self._entries:
                size = output.nbytes + _OVERHEAD
                if self._make_room(key, size):
                    self._entries[key] = Entry(output, kept, size)
            return ticket.listeners

    def _record(self, key: Key, hit: bool) -> None:
        """Count a request of a key."""
        self._popularity.record(key[2], max(_SHORTEST_PERIOD, _PERIOD * len(self._entries)))
        if hit:
            self._entries.move_to_end(key)
            self.hits += 1

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

    def remove_model(self, name: str) -> None:
        """Remove the entries of a model; requests of its former version can no longer be joined."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == name]:
                self._remove(key)
            for key in [key for key in self._open if key[0] == name]:
                del self._open[key]

    # Requests that are known by a digest of their bytes

    def known(self, body: bytes) -> KnownInput | None:
        """Return what is known of a request.

        Args:
            body: digest of all its bytes on which the answer depends.
        """
        return self._bodies.get(body)

    def learn(self, body: bytes, known: KnownInput, key: Key) -> None:
        """Remember that a request is a known input, as long as an entry stays in the cache.

        Args:
            body: digest of the request.
            known: its input.
            key: key of the entry.
        """
        with self._lock:
            entry = self._entries.get(key)
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
            found = [self._entries[key] for key in keys if key in self._entries]
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
