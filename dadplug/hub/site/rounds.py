"""Rounds of a site's link: their ends, the announcements of who takes part, and the state of a site that joins."""

from __future__ import annotations

import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...errors import DroppedError, MismatchError, SiteError
from ...exchange.transport import Requirements
from ..wire.frames import Head, Kind
from ..wire.messages import IDLE, Accept, Close, Drop, Join, Joined, Pause, Position, RoundKind, SendState, Start
from ..wire.messages import Resume as Resumption

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
        early_bytes: bytes that have not been expected so far.
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
            MismatchError: if it does not fit what is expected, or too much has arrived that is not expected.
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
        """Forget what a site has sent and was not expected.

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
        """Return whether something of a site has arrived that is not expected."""
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


_POLL_SECONDS = 0.02
_SIZE = struct.Struct("<Q")
_SIZE_EXCHANGE, _STATE_EXCHANGE = 0, 1  # numbers of the two messages of a state


class Link(Protocol):
    """The part of `dadplug.hub.site.link.HubLink` that rounds need."""

    rank: int
    world_size: int
    step: int
    gone: dict[int, str]

    @property
    def lock(self) -> AbstractContextManager[Any]: ...

    def name(self, slot: int) -> str: ...

    def fail(self, error: Exception) -> None: ...

    def post(self, head: Head, content: bytes) -> None: ...

    def post_control(self, message: object) -> None: ...

    def send(self, exchange: int, content: memoryview, kind: Kind, tag: int, slot: int | None) -> None: ...

    def expect(self, slot: int, exchange: int, buffer: memoryview, kind: Kind) -> Incoming: ...

    def cancel(self, incoming: Sequence[Incoming]) -> None: ...

    def cancel_all(self, slots: Iterable[int]) -> None: ...

    def forget(self, slots: Iterable[int], step: int) -> None: ...

    def waiting(self) -> AbstractContextManager[None]: ...

    def transfer(self) -> None: ...

    def check(self) -> None: ...

    def attend(self, seconds: float) -> None: ...

    def join_again(self) -> None: ...


class RoundClient:
    """Part of a site in the rounds of its link.

    A site that is late ends a round which has been closed without it, and those that have been closed since, one after
    the other: `closed` is ahead of the link's step then. It has got all that the others have sent in them.

    Args:
        link: the link.

    Attributes:
        elastic: whether training goes on without a site that leaves.
        joins: whether this site joins in mid-training, and has to be sent a state.
        skips: whether late sites miss a step.
        closed: number of the last round that has been closed.
        absent: slots of the sites that are not part of the last round that this site has ended, the same at all sites.
        joined: slots of the sites that have joined in the open round.
        listens: whether this site is one of them.
        requirements: the requirements of the run; None where all sites have to stay.
        rejoins: whether a site that the hub has dropped joins again in its process.
        first: number of the first round of the last training step that this site has begun to end.
        dropped: reason why the hub has dropped this site, until it joins again; empty while it takes part.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.elastic = self.joins = self.skips = False
        self.closed = 0
        self.absent: frozenset[int] = frozenset()
        self._absent: dict[int, frozenset[int]] = {}  # the same, by round that has been closed and not ended here
        self.joined: set[int] = set()
        self.listens = False
        self.requirements: Requirements | None = None
        self.rejoins = True
        self.first = 0
        self._sizes: list[tuple[int, int]] = []  # rounds in which the run has grown, and the number of sites since
        self.dropped = ""
        self._requests: deque[SendState] = deque()
        self._donor: int | None = None
        self._position: Position | None = None  # at which this site joins
        self._pause = ""
        self._fresh = False  # whether this site has joined and not ended a round since

    def begin(self, requirements: Requirements) -> None:
        """Begin rounds; all sites call it with the same requirements."""
        with self._link.lock:
            if not self.elastic and not self.joins:
                self.closed = self._link.step - 1
                self.joined.clear()  # at the start
            self.elastic, self.skips, self.requirements = True, requirements.skips, requirements
        self._link.post_control(requirements)

    def grow(self, number: int) -> None:
        """Record that the run has grown to the sites that the link knows. To be called with the link's lock held.

        Args:
            number: number of the round that was open.
        """
        self._sizes.append((number, self._link.world_size))

    @property
    def size(self) -> int:
        """Number of sites from the end of the present training step on; 0 if the run has not grown."""
        return max((size for number, size in self._sizes if number <= self.first), default=0)

    @property
    def behind(self) -> bool:
        """Whether the open round of this site has been closed already."""
        return self.elastic and not self.joins and self.closed >= self._link.step

    def lacks(self, slot: int) -> bool:
        """Return whether a site is not part of the open round of this site, as far as it is known."""
        return slot in self._absent.get(self._link.step, ())

    def begin_anew(self) -> None:
        """Begin anew with a hub that does not know this site. To be called with the link's lock held."""
        self._requests.clear()
        self._donor = None
        self._say("")
        if self.joins:
            self._position = None

    # Announcements of the hub, taken with the link's lock held

    def take(self, message: object) -> None:
        """Take an announcement."""
        link = self._link
        if isinstance(message, Accept) and message.needs_state:
            self.joins = self.elastic = True
            if message.position is not None:  # this site is admitted
                self._position, self.closed = message.position, message.position.step
                self.joined.clear()
                link.gone.clear()  # those that are absent are announced next
                link.step = self.closed + 1
        elif isinstance(message, Start) and (self.joins or self.dropped):
            link.fail(SiteError("the run that this site was to join has ended"))
        elif isinstance(message, Join):
            link.gone.pop(message.slot, None)
            self.joined.add(message.slot)
        elif isinstance(message, Drop):
            self.joined.discard(message.slot)
            if message.slot == self._donor:
                self._donor = None
        elif isinstance(message, Close) and self.elastic and message.step > self.closed:
            absent = frozenset(range(link.world_size)) - frozenset(message.contributors) | self.joined
            self.joined.clear()
            self.listens = False
            self.closed, self._absent[message.step] = message.step, absent
            if message.step == link.step:
                link.cancel_all(absent)  # what they send from now on belongs to later rounds
        elif isinstance(message, SendState) and message.donor == link.rank:
            self._requests.append(message)
        elif isinstance(message, SendState) and message.joiner == link.rank:
            self._donor = message.donor
        elif isinstance(message, Pause) and self.elastic:
            self._say(message.reason)
        elif isinstance(message, Resumption) and self.elastic:
            self._say("")

    def _say(self, reason: str) -> None:
        if reason or self._pause:
            print(f"dadplug: {f'training pauses: {reason}' if reason else 'training goes on'}", file=sys.stderr)
        self._pause = reason

    # Rounds

    def end(
        self,
        timeout: float,
        answer: Callable[[], bytes] | None,
        kind: RoundKind = RoundKind.COLLECTIVE,
        idle: bool = False,
    ) -> frozenset[int]:
        """End this site's part of the open round, and wait until all others have ended theirs, left, or are late.

        Args:
            timeout: seconds after which the round should be closed, pauses apart.
            answer: returns this site's state for one that joins; None where the round admits none.
            kind: kind of the round.
            idle: whether this site contributes nothing.

        Returns:
            The slots of the sites that are not among the contributors.

        Raises:
            SiteError: if the hub or this site is given up, or the round is not closed in time.
            RuntimeError: if this site has just joined, in a step that the others have begun.
        """
        link = self._link
        number = link.step
        if self._fresh and answer is None:
            raise RuntimeError(
                "this site has joined in mid-training, while the others are in synchronize(): it may not exchange "
                "anything before it has called synchronize() itself"
            )
        self._fresh = False
        link.post(Head(Kind.END, link.rank, number, exchange=kind | IDLE * idle), b"")

        def over() -> bool:
            while self._requests and answer is not None and self._requests[0].step < number:
                request = self._requests.popleft()
                if request.step == number - 1:  # otherwise the joiner has left since
                    self._send_state(request, answer)
            return number in self._absent

        what = f"step {number} has not been closed for {timeout:g} s, though the hub is connected"
        self._wait_until(over, timeout, f"{what}: another site is stopped or busy")
        with link.lock:
            self.absent = self._absent.pop(number)
            link.step = number + 1
            link.forget(self.absent, number)
        return self.absent

    def gather(self, exchange: int, buffers: Mapping[int, memoryview], timeout: float) -> frozenset[int]:
        """Gather messages in a round of its own.

        Args:
            exchange: number of the exchange.
            buffers: this site's message and room for those of the others, of bytes, by slot.
            timeout: seconds after which the round should be closed.

        Returns:
            The slots of the sites that are absent, whose messages do not count.

        Raises:
            SiteError: as in `end`, or if this site is to join in mid-training.
            RuntimeError: as in `end`.
            MismatchError: if a site that is present has sent no such message.
        """
        link = self._link
        if self.joins:
            raise SiteError(
                "this site joins in mid-training, and can take part in nothing before it has built its reduction"
            )
        others = [(slot, buffer) for slot, buffer in buffers.items() if slot != link.rank and len(buffer)]
        incoming = [link.expect(slot, exchange, buffer, Kind.PAYLOAD) for slot, buffer in others]
        link.send(exchange, buffers[link.rank], Kind.PAYLOAD, 0, None)
        absent = self.end(timeout, None)
        missing = [each for each in incoming if not each.done]
        link.cancel(missing)
        for each in missing:
            if each.key[1] not in absent:
                raise MismatchError(
                    f"{link.name(each.key[1])} is not at the same collective: all sites must run the same program"
                )
        return absent

    def wait_for(self, incoming: Sequence[Incoming], number: int, timeout: float) -> set[int]:
        """Wait until messages have arrived, or cannot arrive any more.

        Args:
            incoming: the messages.
            number: the round that they belong to.
            timeout: seconds after which they should have arrived, pauses apart.

        Returns:
            The senders of those that have not arrived, and are expected no longer.

        Raises:
            SiteError: if the hub or this site is given up, or a site is silent.
        """
        link = self._link

        def over() -> bool:
            return self.closed >= number or all(each.done or each.key[1] in link.gone for each in incoming)

        what = f"a site has sent nothing in step {number} for {timeout:g} s, though the hub is connected to it"
        self._wait_until(over, timeout, what)
        missing = [each for each in incoming if not each.done]
        link.cancel(missing)
        return {each.key[1] for each in missing}

    def _wait_until(self, over: Callable[[], bool], timeout: float, failure: str, dropped: bool = False) -> None:
        """Exchange messages until a condition holds, or this site is dropped, unless it is known that it has been."""
        link = self._link
        deadline = time.monotonic() + timeout
        with link.waiting():
            while True:
                with link.lock:
                    link.transfer()
                if over():
                    return
                link.check()
                if self.dropped and not dropped:
                    raise DroppedError(f"the hub has dropped this site: {self.dropped}")
                if self._pause:
                    deadline = time.monotonic() + timeout
                if time.monotonic() > deadline:
                    raise SiteError(failure)
                link.attend(_POLL_SECONDS)

    # State of a site that joins

    def _send_state(self, request: SendState, answer: Callable[[], bytes]) -> None:
        content = answer()
        for exchange, part in ((_SIZE_EXCHANGE, _SIZE.pack(len(content))), (_STATE_EXCHANGE, content)):
            self._link.send(exchange, memoryview(part), Kind.STATE, 0, request.joiner)

    def receive_state(self, timeout: float, most: int) -> bytes:
        """Receive the state of another site, of so many bytes at most; from the beginning where it leaves meanwhile.

        Raises:
            SiteError: if none arrives in time.
        """
        while True:
            self._wait_until(lambda: self._donor is not None, timeout, "no site has sent its state")
            donor = self._donor
            size = self._receive_part(donor, _SIZE_EXCHANGE, _SIZE.size, timeout)
            if size is None:
                continue
            (nbytes,) = _SIZE.unpack(size)
            if nbytes > most:
                raise SiteError(
                    f"{self._link.name(donor or 0)} announces a state of {nbytes} bytes, where this site's model "
                    f"allows {most}: do all sites train the same model?"
                )
            state = self._receive_part(donor, _STATE_EXCHANGE, nbytes, timeout)
            if state is not None:
                return state

    def _receive_part(self, donor: int | None, exchange: int, nbytes: int, timeout: float) -> bytes | None:
        """Receive a part of a state; None if the donor has left."""
        if donor is None:
            return None
        buffer = memoryview(bytearray(nbytes))
        incoming = self._link.expect(donor, exchange, buffer, Kind.STATE)
        name = self._link.name(donor)
        self._wait_until(lambda: incoming.done or self._donor != donor, timeout, f"the state of {name} has not arrived")
        if incoming.done:
            return bytes(buffer)
        self._link.cancel([incoming])
        return None

    def confirm(self) -> None:
        """Tell the hub that this site has the state, and takes part.

        Raises:
            SiteError: if the hub has been restarted meanwhile.
        """
        with self._link.lock:
            position, self._position = self._position, None
            if position is None:
                raise SiteError("the hub has been restarted while this site joined: start this site again")
            self.joins, self._fresh, self.listens = False, True, True
        self._link.post_control(Joined(position))

    def rejoin(self, timeout: float) -> None:
        """Join again after the hub has dropped this site: wait until it is connected, and forget the open step.

        Args:
            timeout: seconds to wait for the hub.

        Raises:
            SiteError: if the hub does not let this site join in time.
        """
        print(f"dadplug: the hub has dropped this site: {self.dropped}; it joins again", file=sys.stderr, flush=True)
        self._wait_until(lambda: self.joins, timeout, "the hub does not let this site join again", dropped=True)
        with self._link.lock:
            self.dropped = ""
            self._fresh = False
            self._absent.clear()
            self._link.join_again()
