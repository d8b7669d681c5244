"""Messages that arrive at a site, matched with those that it expects; and what a restarted hub needs of them.

Sites exchange their places once they do not make the same calls, and so expect other messages than arrive.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any

from ...errors import MismatchError, SiteError, escaped
from ...exchange.calls import explain, own_place
from ...exchange.handshake import Deadline
from ..wire.messages import FRESH, Close, Continue, Head, Kind, Position, Repeat
from ..wire.streams import KeptFrames

CHANNEL_BITS = 24  # of the number of an exchange, below those of its channel
CALLS = 0  # number of the exchange of sites that do not make the same calls
MAX_EARLY_BYTES = 1 << 30
_PLACE_BYTES = 500

# Kind, slot of the sender, number of the exchange, and whether the message is for one site. Else a member could send
# each site a message of its own where one for all is expected, and the sites would go on with different numbers.
_Key = tuple[Kind, int, int, bool]


def key_of(head: Head) -> _Key:
    """Return the key of the message that a frame belongs to."""
    return head.kind, head.slot, head.exchange, head.to > 0


class Incoming:
    """Message that is expected.

    Attributes:
        key: see `key_of`.
        buffer: room for it, of bytes.
        received: bytes that have arrived.
        done: whether all have.
        spoilt: whether something else has arrived in its place, where that does not end the run.
    """

    __slots__ = ("buffer", "done", "key", "received", "spoilt")

    def __init__(self, key: _Key, buffer: memoryview) -> None:
        self.key = key
        self.buffer = buffer
        self.received = 0
        self.done = not len(buffer)
        self.spoilt = False

    def count(self, nbytes: int) -> None:
        """Count bytes as received."""
        self.received += nbytes
        self.done = self.received == len(self.buffer)


class Inbox:
    """Messages by kind, sender and exchange, first in first out. Not to be used by two threads at once.

    Args:
        names: names of the sites by slot, for messages; names of further sites may be appended.
        rank: slot of this site.
        limit: bytes of early messages that are kept, at most.

    Attributes:
        expected_bytes: bytes that are expected and have not arrived.
        early_bytes: bytes that have not been expected so far.
        last_step: returns the last step whose payloads are taken now, where steps are rounds that are closed; later
            ones wait. So what a site takes in a round does not depend on when frames arrive. None where all are taken,
            and a message that does not fit is an error.
    """

    def __init__(self, names: Sequence[str], rank: int, limit: int = MAX_EARLY_BYTES) -> None:
        self._names = names
        self._rank = rank
        self._limit = limit
        self._expected: dict[_Key, deque[Incoming]] = {}
        self._early: dict[_Key, deque[tuple[Head, memoryview]]] = {}
        self._target: Incoming | None = None  # of the frame that is arriving
        self.expected_bytes = self.early_bytes = 0
        self.last_step: Callable[[], int | None] = lambda: None

    def expect(self, key: _Key, buffer: memoryview) -> Incoming:
        """Expect a message.

        Args:
            key: see `key_of`.
            buffer: room for it; nothing arrives where it is empty.

        Raises:
            MismatchError: if what has arrived does not fit.
        """
        incoming = Incoming(key, buffer)
        self.expected_bytes += len(buffer)
        self._fill_early(incoming)
        if not incoming.done:
            self._expected.setdefault(key, deque()).append(incoming)
        return incoming

    def open_step(self) -> None:
        """Take what has arrived early of a step that is open from now on, and is expected already."""
        for key in self._early.keys() & self._expected.keys():
            for incoming in list(self._expected[key]):
                self._fill_early(incoming)
                self._release(incoming)

    def _fill_early(self, incoming: Incoming) -> None:
        early = self._early.get(incoming.key)
        while early and not incoming.done and self._takes(early[0][0]):
            head, piece = early.popleft()
            self.early_bytes -= len(piece)
            self._fill(incoming, head.offset, piece)
        if early is not None and not early:
            del self._early[incoming.key]

    def _takes(self, head: Head) -> bool:
        """Return whether a frame is of a step that is open, or over."""
        last = self.last_step()
        return last is None or head.kind is not Kind.PAYLOAD or head.step <= last

    def room(self, head: Head) -> memoryview:
        """Return room for the body of a frame that is arriving; a frame that was lost before its end is forgotten.

        Raises:
            MismatchError: if it does not fit what is expected, or too much has arrived that is not expected.
        """
        expected = self._expected.get(key_of(head))
        self._target = None
        if expected and self._takes(head):
            part = self._part(expected[0], head.offset, head.length)
            if part is None:
                return memoryview(bytearray(head.length))
            self._target = expected[0]
            return part
        if self.early_bytes + head.length > self._limit:
            senders = Counter({head.slot: head.length})
            for key, frames in self._early.items():
                senders[key[1]] += sum(len(piece) for _, piece in frames)
            ((most, _),) = senders.most_common(1)
            raise MismatchError(
                f"{self.early_bytes >> 20} MB have arrived at {self._name(self._rank)} that belong to no exchange "
                f"which it has begun, most of them from {self._name(most)}: do all sites run the same program?"
            )
        return memoryview(bytearray(head.length))

    def complete(self, head: Head, body: memoryview) -> None:
        """Take a frame that has arrived in the room which `room` has returned.

        Raises:
            MismatchError: if it does not fit what has been expected meanwhile.
        """
        key = key_of(head)
        if self._target is not None:
            self._target.count(head.length)
            self.expected_bytes -= head.length
            self._release(self._target)
        elif (expected := self._expected.get(key)) and self._takes(head):  # or its first bytes came before
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

    def cancel_all(self, kind: Kind, slots: Container[int]) -> None:
        """Expect the messages of a kind from some sites no longer."""
        for key in [key for key in self._expected if key[0] is kind and key[1] in slots]:
            for incoming in list(self._expected[key]):
                self.cancel(incoming)

    def forget(self, slot: int | None = None, first: int = 0, last: int = 1 << 63, channel: int | None = None) -> None:
        """Forget what sites have sent and was not expected, but for their calls.

        Args:
            slot: the site; None for all.
            first: the first step whose messages are forgotten.
            last: the last one.
            channel: first number of the exchanges that are forgotten; None for those of all channels.
        """
        for key in list(self._early):
            of = key[2] >> CHANNEL_BITS << CHANNEL_BITS
            if key[2] == CALLS or slot not in (None, key[1]) or channel not in (None, of):
                continue
            early = self._early.pop(key)
            kept = deque(each for each in early if not first <= each[0].step <= last)
            self.early_bytes -= sum(len(piece) for _, piece in early) - sum(len(piece) for _, piece in kept)
            if kept:
                self._early[key] = kept

    def forget_states(self) -> None:
        """Forget what has arrived of states, and what is expected of them."""
        self.cancel_all(Kind.STATE, range(len(self._names)))
        for key in [key for key in self._early if key[0] is Kind.STATE]:
            self.early_bytes -= sum(len(piece) for _, piece in self._early.pop(key))

    def clear(self) -> None:
        """Forget everything, also what is expected."""
        self._expected.clear()
        self._early.clear()
        self._target = None
        self.expected_bytes = self.early_bytes = 0

    def differs(self, slot: int, step: int) -> bool:
        """Return whether a site has begun another exchange than the one that is expected of it, or says that it has.

        All sites begin those of a channel in one order.

        Args:
            slot: the site.
            step: the open step.
        """
        begun = self.begun_by(slot, step)
        channels = {exchange >> CHANNEL_BITS for exchange in begun}
        expected = (key[2] for key in self._expected if key[:2] == (Kind.PAYLOAD, slot))
        return CALLS in begun or any(each >> CHANNEL_BITS in channels for each in expected)

    def begun_by(self, slot: int, step: int) -> set[int]:
        """Return the exchanges that a site has begun in a step, and this one has not."""
        early = [each for each in self._early.items() if each[0][:2] == (Kind.PAYLOAD, slot)]
        return {key[2] for key, frames in early if frames[0][0].step == step}

    @property
    def awaited(self) -> str:
        """Exchange that is waited for, in words."""
        numbers = [key[2] % (1 << CHANNEL_BITS) for key in self._expected]
        return f"exchange {min(numbers)}" if numbers else "the end"

    def place_of(self, slot: int) -> str:
        """Return the place that a site has sent since the sites' calls are not the same; empty if it has sent none."""
        frames = self._early.get((Kind.PAYLOAD, slot, CALLS, False), ())
        return escaped(b"".join(piece for _, piece in frames)[:_PLACE_BYTES].decode(errors="replace"))

    def _release(self, incoming: Incoming) -> None:
        """Remove a message that is complete from those that are expected."""
        if not incoming.done:
            return
        expected = self._expected[incoming.key]
        expected.popleft()
        if not expected:
            del self._expected[incoming.key]

    def _fill(self, incoming: Incoming, offset: int, piece: memoryview) -> None:
        if (part := self._part(incoming, offset, len(piece))) is not None:
            part[:] = piece
            incoming.count(len(piece))
            self.expected_bytes -= len(piece)

    def _part(self, incoming: Incoming, offset: int, length: int) -> memoryview | None:
        """Return the place of a piece in a message; None where it has none, and the run goes on."""
        kind, slot = incoming.key[:2]
        fits = offset == incoming.received and offset + length <= len(incoming.buffer)
        if kind is Kind.PAYLOAD and self.last_step() is not None:
            incoming.spoilt |= not fits
            if incoming.spoilt:
                return None
        elif not fits:
            sender = "the hub" if kind is Kind.SUM else self._name(slot)
            raise MismatchError(
                f"{sender} sends {self._name(self._rank)} another message than it expects, one of "
                f"{len(incoming.buffer)} bytes: every site must call synchronize() equally often, with the same "
                "model; a site that has run out of data calls idle()"
            )
        return incoming.buffer[offset : offset + length]

    def _name(self, slot: int) -> str:
        return f"site {slot} ({self._names[slot]})"


_PLACES_SECONDS = 1.5  # for the places of the other sites to arrive


def check_calls(link: Any, patience: Deadline) -> None:
    """Raise MismatchError if other sites make other calls than this one.

    Where sites may leave, and fewer than half of them do, the hub is asked to drop these instead.

    Args:
        link: the `HubLink` of this site.
        patience: when a wait is long enough for that.
    """
    if not patience.over:
        return
    with link.lock:
        differ = [slot for slot in range(link.world_size) if link.inbox.differs(slot, link.step)]
        few = link.rounds.elastic and 2 * len(differ) < link.world_size - len(link.gone)
    if differ and not few:
        raise mismatch(link)
    for slot in differ:
        link.rounds.accuse(slot, "it does not make the same calls as this site")


def mismatch(link: Any) -> MismatchError:
    """Return the error of sites that do not make the same calls, and exchange the places of the sites for it."""
    slots = range(link.world_size)
    with link.lock:
        own = f"{link.inbox.awaited} of round {link.step}, step {own_place.step}"
    with suppress(SiteError):  # the others may be gone
        link.send(CALLS, memoryview(own.encode()))
        link.converse(lambda: int(not any(map(link.inbox.place_of, slots))), _PLACES_SECONDS)
    present = [slot for slot in slots if slot not in link.gone]
    places = {slot: link.inbox.place_of(slot) or "an exchange that it does not state" for slot in present}
    places[link.rank] = own
    return MismatchError(explain(places, [*map(link.name, slots)]))


class Continuation:
    """Frames sent and numbers of frames received since the last closed round, and what the hub has announced of it.

    Frames of one sender arrive at all sites in the same order. So a site that counts them can tell those that arrive
    again from those that it lacks.

    Args:
        position: the last closed round.

    Attributes:
        kept: frames that this site has sent in the last closed round and since.
        run: number of the run; 0 before it has started.
        position: the last closed round.
        before: the one before it.
        contributors: slots of its contributors.
        joined: slots of those that have joined in it.
    """

    def __init__(self, position: Position = FRESH) -> None:
        self.kept = KeptFrames()
        self.run = self._life = position.life
        self.position, self.before = position, FRESH
        self.contributors: tuple[int, ...] = ()
        self.joined: tuple[int, ...] = ()
        self._counts: Counter[tuple[int, ...]] = Counter()  # of frames received, by `_key`
        self._repeated: Counter[tuple[int, ...]] = Counter()  # of those, how many are about to arrive again

    # Frames received

    def repeats(self, head: Head) -> bool:
        """Return whether a frame that is arriving has arrived before."""
        return bool(self._repeated) and self._repeated[_key(head)] > 0

    def count(self, head: Head) -> None:
        """Count a frame that has arrived."""
        key = _key(head)
        if self.repeats(head):
            self._repeated[key] -= 1
        else:
            self._counts[key] += 1

    def counts(self, step: int, world_size: int) -> tuple[int, ...]:
        """Return the number of payload frames of a step, by sender."""
        return tuple(self._counts[step, slot] for slot in range(world_size))

    def forget(self, slot: int) -> None:
        """Record that a site has left the open round."""
        for counts in (self._counts, self._repeated):
            for key in [key for key in counts if len(key) == 2 and key[1] == slot and key[0] > self.position.step]:
                del counts[key]

    # Announcements of the hub

    def close(self, message: Close, joined: frozenset[int]) -> None:
        """Record that a round has been closed.

        Args:
            message: the announcement.
            joined: slots of the sites that have joined in it.
        """
        if message.step <= self.position.step:
            return
        self.before = self.position
        self.position = Position(self._life, message.step)
        self.contributors, self.joined = tuple(message.contributors), tuple(sorted(joined))
        self.kept.forget_before(message.step)
        for counts in (self._counts, self._repeated):
            for key in [key for key in counts if key[0] < message.step]:
                del counts[key]

    def repeat(self, message: Repeat) -> list[bytes]:
        """Return the frames that the hub asks for."""
        step = message.position.step
        self._life = message.position.life  # by which the round was closed
        self._repeated = Counter({key: count for key, count in self._counts.items() if key[0] == step})
        return self.kept.frames(step, step)

    def go_on(self, message: Continue) -> list[bytes]:
        """Return the frames that are sent again over a new hub."""
        self._life = message.life
        self.position = max(self.position, message.position, key=lambda each: each.step)
        self._repeated = Counter({key: count for key, count in self._counts.items() if key[0] > message.position.step})
        return self.kept.frames(message.position.step + 1)


def _key(head: Head) -> tuple[int, ...]:
    """Return by what frames are counted: the sender, or the place of a piece of a sum."""
    return (head.step, head.slot) if head.kind is Kind.PAYLOAD else (head.step, 0, head.exchange, head.offset)
