"""Room for the messages that a site expects, and those that arrive before somebody expects them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..errors import MismatchError
from .frames import Head, Kind

MAX_EARLY_BYTES = 1 << 30

_Key = tuple[Kind, int, int]  # kind, slot of the sender, number of the exchange


class Incoming:
    """Message that is expected.

    Attributes:
        key: kind, slot of the sender and number of the exchange of its frames.
        buffer: room for it, of bytes.
        received: bytes that have arrived.
        done: whether all have.
    """

    __slots__ = ("buffer", "done", "key", "received")

    def __init__(self, key: _Key, buffer: memoryview) -> None:
        self.key = key
        self.buffer = buffer
        self.received = 0
        self.done = not len(buffer)

    def count(self, nbytes: int) -> None:
        """Count bytes as received."""
        self.received += nbytes
        self.done = self.received == len(self.buffer)


class Inbox:
    """Messages by kind, sender and exchange, first in first out. Not to be used by two threads at once.

    Args:
        names: names of the sites by slot, for messages.
        rank: slot of this site.
        limit: bytes of early messages that are kept, at most.

    Attributes:
        expected_bytes: bytes that are expected and have not arrived.
        early_bytes: bytes that nobody has expected so far.
    """

    def __init__(self, names: Sequence[str], rank: int, limit: int = MAX_EARLY_BYTES) -> None:
        self._names = list(names)
        self._rank = rank
        self._limit = limit
        self._expected: dict[_Key, deque[Incoming]] = {}
        self._early: dict[_Key, deque[tuple[Head, memoryview]]] = {}
        self._target: Incoming | None = None  # of the frame that is arriving
        self.expected_bytes = self.early_bytes = 0

    def extend(self, names: Sequence[str]) -> None:
        """Take the names of all sites, since there are further ones."""
        self._names = list(names)

    def expect(self, key: tuple[Kind, int, int], buffer: memoryview) -> Incoming:
        """Expect a message.

        Args:
            key: kind, slot of the sender and number of the exchange.
            buffer: room for it; nothing arrives where it is empty.

        Raises:
            MismatchError: if what has arrived does not fit.
        """
        incoming = Incoming(key, buffer)
        self.expected_bytes += len(buffer)
        early = self._early.get(key)
        while early and not incoming.done:
            head, piece = early.popleft()
            self.early_bytes -= len(piece)
            self._fill(incoming, head.offset, piece)
        if early is not None and not early:
            del self._early[key]
        if not incoming.done:
            self._expected.setdefault(key, deque()).append(incoming)
        return incoming

    def room(self, head: Head) -> memoryview:
        """Return room for the body of a frame that is arriving; a frame that was lost before its end is forgotten.

        Raises:
            MismatchError: if it does not fit what is expected, or too much has arrived that nobody expects.
        """
        expected = self._expected.get(_key(head))
        if expected:
            self._target = expected[0]
            return self._part(expected[0], head.offset, head.length)
        self._target = None
        if self.early_bytes + head.length > self._limit:
            raise MismatchError(
                f"{self.early_bytes >> 20} MB have arrived at {self._name(self._rank)} that belong to no exchange "
                f"which it has begun, most recently from {self._name(head.slot)}: do all sites run the same program?"
            )
        return memoryview(bytearray(head.length))

    def complete(self, head: Head, body: memoryview) -> None:
        """Take a frame that has arrived in the room which `room` has returned.

        Raises:
            MismatchError: if it does not fit what has been expected meanwhile.
        """
        key = _key(head)
        if self._target is not None:
            self._target.count(head.length)
            self.expected_bytes -= head.length
            self._release(self._target)
        elif expected := self._expected.get(key):  # since its first bytes have arrived
            self._fill(expected[0], head.offset, body)
            self._release(expected[0])
        else:
            self._early.setdefault(key, deque()).append((head, body))
            self.early_bytes += len(body)

    def cancel(self, incoming: Incoming) -> None:
        """Expect a message no longer."""
        expected = self._expected.get(incoming.key, deque())
        if incoming in expected:
            self.expected_bytes -= len(incoming.buffer) - incoming.received
            expected.remove(incoming)
            if not expected:
                del self._expected[incoming.key]
        if self._target is incoming:
            self._target = None

    def cancel_all(self, slot: int) -> None:
        """Expect the payloads of a site no longer."""
        for key in [key for key in self._expected if key[:2] == (Kind.PAYLOAD, slot)]:
            for incoming in list(self._expected[key]):
                self.cancel(incoming)

    def forget(self, slot: int, first: int = 0, last: int = 1 << 63) -> None:
        """Forget what a site has sent and nobody has expected.

        Args:
            slot: the site.
            first: the first step whose messages are forgotten.
            last: the last one.
        """
        for key in [key for key in self._early if key[1] == slot]:
            early = self._early.pop(key)
            kept = deque(each for each in early if not first <= each[0].step <= last)
            self.early_bytes -= sum(len(piece) for _, piece in early) - sum(len(piece) for _, piece in kept)
            if kept:
                self._early[key] = kept

    def clear(self) -> None:
        """Forget everything, also what is expected."""
        self._expected.clear()
        self._early.clear()
        self._target = None
        self.expected_bytes = self.early_bytes = 0

    def early_of(self, slot: int) -> bool:
        """Return whether something of a site has arrived that nobody expects."""
        return any(key[1] == slot for key in self._early)

    def _release(self, incoming: Incoming) -> None:
        """Remove a message that is complete from those that are expected."""
        if not incoming.done:
            return
        expected = self._expected[incoming.key]
        expected.popleft()
        if not expected:
            del self._expected[incoming.key]

    def _fill(self, incoming: Incoming, offset: int, piece: memoryview) -> None:
        self._part(incoming, offset, len(piece))[:] = piece
        incoming.count(len(piece))
        self.expected_bytes -= len(piece)

    def _part(self, incoming: Incoming, offset: int, length: int) -> memoryview:
        if offset != incoming.received or offset + length > len(incoming.buffer):
            kind, slot, _ = incoming.key
            sender = "the hub" if kind is Kind.SUM else self._name(slot)
            raise MismatchError(
                f"{sender} sends {self._name(self._rank)} another message than it expects, one of "
                f"{len(incoming.buffer)} bytes: every site must call synchronize() equally often, with the same "
                "model; a site that has run out of data calls idle()"
            )
        return incoming.buffer[offset : offset + length]

    def _name(self, slot: int) -> str:
        return f"site {slot} ({self._names[slot]})"


def _key(head: Head) -> _Key:
    return head.kind, head.slot, head.exchange
