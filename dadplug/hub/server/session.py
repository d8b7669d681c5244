"""Sessions of the hub: one channel of one site, which survives the loss of its connection.

**Byte streams of sites to the hub itself** are as those between two sites, see `dadplug.hub.wire.streams`. The other
end of each is a local socket of a service, which runs in threads of its own. Memory is bounded: a site may have so many
streams, and each of them holds the window of either direction at most.
"""

from __future__ import annotations

import itertools
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

from ...errors import FrameError, RefusedError, TryAgainError
from ..check import CheckHandler
from ..secure.sealing import OPEN_BYTES
from ..wire.messages import (
    HEAD_BYTES,
    OLDEST_VERSION,
    VERSION,
    Head,
    Hello,
    Kind,
    Receiving,
    Welcome,
    pack_control,
    wire_of,
)
from ..wire.streams import HUB_SLOT, NumberedStream, PackedFrame, PeerStream, Stream, Tag

FULL_BYTES = 8 << 20  # unsent bytes of a queue at which those who fill it are no longer read
KEPT_BYTES = 64 << 20  # the same for bytes that have not been acknowledged
PING_SECONDS = 1.0
_ALLOWED = {  # kinds of frames that a site may send, by channel
    "training": (Kind.PAYLOAD, Kind.SUMMAND, Kind.END, Kind.STATE, Kind.CONTROL, Kind.PING),
    "parameters": (Kind.MESSAGE, Kind.CONTROL, Kind.PING),
    "store": (Kind.MESSAGE, Kind.CONTROL, Kind.PING),
    "check": (Kind.PAYLOAD, Kind.CONTROL, Kind.PING),
}
_TO_SLOT = (Kind.STATE, Kind.MESSAGE)  # kinds whose slot names the receiver
_ALIVE_SECONDS = 0.5  # after a second process has connected; what the first one has sent before may arrive until then
_TURN_BYTES, _TURN_FRAMES = 1 << 18, 256  # received in a turn
# Frames that training does not wait for, such as pings: a site that sends more is read more slowly. Sites send a few a
# second. The numbers are those a second, at once, and at once on a new connection.
_SPARE_RATE, _MOST_SPARE, _FIRST_SPARE = 250.0, 1000.0, 100.0


Received = tuple[Head, memoryview, PackedFrame]
"""Frame that has been received: its head, its body, and both as they have arrived."""


class Session(NumberedStream):
    """One channel of one site.

    Args:
        slot: slot of the site.
        name: its name.
        hello: its first message.
        serial: serial number of its certificate.
        world_size: number of sites.
        now: the time, in seconds.

    Attributes:
        name: its name.
        channel: the channel, see `Hello`.
        instance: random number of the site's process.
        waits: whether the site waits for the end of a run that it is not part of, or to join in it.
        ready: whether it can join, since it has made its model.
        offer: its message to all members about keys, where it is to join and messages are sealed.
        awaits: slots of the members that it joins, without those that have sent it their keys.
        refused_by: instances of the sites that have asked the hub to end it.
        requests: numbers of the requests for a state that were made for it.
        parts: frames of states that it was sent, and has not reported yet.
        receiving: its last report on the state that it receives; None without one.
        reached: number of frames that it had acknowledged at the last tick.
        state_end: number of frames up to the last part of a state that it was sent.
        recovers: whether it took part in a run when it connected.
        serial: serial number of its certificate.
        release: version of dadplug at the site, see `dadplug.hub.wire.messages.own_release`.
        sites: number of sites that it knows, with which it can train.
        start: when its run may start without all sites, as it states.
        world_size: number of sites of the project.
        check: the hub's part in a check of the site, on the channel for it.
        expires: end of its certificate, once it is known.
        rival: another process that has connected as the same site last: its random number, and the time.
        due: whether something in the queue is to be sent now; the rest may wait for it.
        full: whether so much is waiting to be sent that those who send to this site are no longer read.
        created: time at which the site connected.
        heard: time at which bytes arrived.
        progress: steps that the site has ended, and messages of the step after them that it has begun.
        progressed: time at which a frame other than a ping arrived.
        lost: time at which the connection was lost, and the reason.
        excused: time before which the site is not given up, since it may come back from an outage of the hub.
        ended: time at which the session has ended; its last frames may still have to be sent. None before.
        spare: frames that training does not wait for, which may be read before time passes.
        bytes_in: bytes received.
        bytes_out: bytes sent; those that were lost with a connection count again.
    """

    def __init__(self, slot: int, name: str, hello: Hello, serial: int, world_size: int, now: float) -> None:
        super().__init__(slot)
        self.name, self.serial = name, serial
        self.channel, self.instance = hello.channel, hello.instance
        self.release = hello.release
        self.rival = 0, now
        self.waits = self.ready = False
        self.offer = b""
        self.awaits: set[int] = set()
        self.refused_by: set[int] = set()
        self.requests: set[int] = set()
        self.parts = 0
        self.receiving: Receiving | None = None
        self.reached = self.state_end = 0
        self.recovers = hello.channel == "training" and hello.position.life > 0
        self.sites, self.start = hello.sites, hello.start
        self.expires: datetime | None = None
        self.due = self.full = False
        self.created = self.heard = self.progressed = now
        self.progress = 0, 0
        self.lost = now, ""
        self.excused = 0.0
        self.ended: float | None = None
        self.bytes_in = self.bytes_out = 0
        self.world_size = world_size
        self.check = CheckHandler(slot)
        self._packed = bytearray()  # the frame that is arriving
        self._pinged = self._ticked = now
        self.spare = _FIRST_SPARE

    def attach(self, stream: Stream, welcome: Welcome, now: float) -> None:
        """Take a new connection, and answer the site's `Hello`.

        Args:
            stream: the connection.
            welcome: the answer.
            now: the time, in seconds.
        """
        self.take_over(stream, self._room)
        stream.notes.append(pack_control(welcome, self.slot))
        self.heard = self._pinged = now

    def lose(self, reason: str, now: float) -> Stream | None:
        """Record that the connection is lost, and return it.

        Args:
            reason: the reason.
            now: the time, in seconds.
        """
        self.lost = now, reason
        return self.detach()

    def send(self, frame: PackedFrame, soon: bool = False) -> None:
        """Append a frame to the queue.

        Args:
            frame: the frame.
            soon: whether it may wait for the next frame or tick, unless another frame waits so.
        """
        self.due |= not soon or self.queue.unsent_bytes > 0
        super().send(frame)

    def receive(self, now: float) -> tuple[list[Received], bool]:
        """Receive frames.

        Args:
            now: the time, in seconds.

        Returns:
            The frames that are complete, without pings; and whether there may be more.

        Raises:
            OSError: if the connection is lost.
            FrameError: if the site does not keep to the protocol.
        """
        assert self.stream is not None
        receiver, before = self._receiver, self._receiver.nbytes
        frames: list[Received] = []
        count, more = 0, True
        while more and receiver.nbytes - before < _TURN_BYTES and count < _TURN_FRAMES:
            count += 1
            acknowledged = self.queue.acknowledged
            try:
                head = self.next_frame()
            except OSError:
                if frames:
                    break  # the error comes again
                raise
            if head is None:
                more = False
            elif head.kind is Kind.PING:
                if self.queue.acknowledged == acknowledged:  # of no use
                    self.spare -= 1
            else:
                packed = self._packed if head.length else bytes(receiver.head_bytes)
                frames.append((head, receiver.body, packed))
        if nbytes := receiver.nbytes - before:
            self.heard = now
            self.bytes_in += nbytes
            self.count(nbytes)
        if not more:
            self.stream.connection.expect(max(1, receiver.missing))
        return frames, more

    def take_state(self, donor: int, head: Head, body: memoryview) -> bool:
        """Send a part of a donor's state, unless another process of the site was to get it; return whether it was sent.

        Args:
            donor: slot of the donor.
            head: head of the donor's frame.
            body: its body.
        """
        if self.waits or head.tag not in self.requests:
            return False
        self.parts += 1
        self.send(b"".join((head._replace(slot=donor).pack(), body)))
        self.state_end = self.queue.count
        return True

    def report_part(self) -> None:
        """Take the site's report on a part of a state, which training needs unless the site was not sent the part."""
        if self.parts:
            self.parts, self.spare = self.parts - 1, self.spare + 1

    @property
    def floods(self) -> bool:
        """Whether it has sent so many frames that training does not wait for that it is not read for a while."""
        return self.spare < 0

    @property
    def partial(self) -> bool:
        """Whether the beginning of a frame has arrived."""
        return self.stream is not None and (self._receiver.missing > 0 or self.stream.connection.partial)

    def record(self, head: Head, now: float) -> None:
        """Record a frame of a step, for `progress`.

        Args:
            head: its head.
            now: the time, in seconds.
        """
        self.progressed = now
        if head.kind is Kind.END:
            self.progress = head.step, 0
        elif not head.offset:
            self.progress = self.progress[0], self.progress[1] + 1

    def flush(self) -> None:
        """Send what the connection takes.

        Raises:
            OSError: if the connection is lost.
        """
        assert self.stream is not None
        before = self.queue.unsent_bytes
        try:
            self.blocked = not self.stream.flush(self.queue)
            self.due = self.blocked
        finally:
            self.bytes_out += before - self.queue.unsent_bytes

    @property
    def waiting(self) -> bool:
        """Whether there is something to be sent."""
        return self.due or bool(self.stream and self.stream.notes)

    def update_full(self) -> None:
        """Compute `full`; it stays until half of the bytes are sent."""
        share = 2 if self.full else 1
        self.full = self.queue.unsent_bytes * share > FULL_BYTES or self.queue.nbytes * share > KEPT_BYTES

    def tick(self, now: float) -> None:
        """Send what has waited, and a ping, which is an acknowledgement as well, if the last one was a while ago."""
        self.spare = min(_MOST_SPARE, self.spare + (now - self._ticked) * _SPARE_RATE)
        self._ticked = now
        self.due |= self.queue.unsent_bytes > 0
        if now >= self._pinged + PING_SECONDS:
            self.ping()
            self._pinged = now

    def _room(self, head: Head) -> memoryview:
        """Return room for the body of a frame that is arriving."""
        self._check(head)
        self._packed = bytearray(HEAD_BYTES + head.length)
        self._packed[:HEAD_BYTES] = self._receiver.head_bytes
        return memoryview(self._packed)[HEAD_BYTES:]

    def _check(self, head: Head) -> None:
        if head.kind not in _ALLOWED[self.channel]:
            raise FrameError(f"a {head.kind.name} frame on the channel {self.channel!r}")
        if head.kind in _TO_SLOT and self.channel != "store":
            to_hub = head.slot == HUB_SLOT and self.channel == "parameters"
            if not to_hub and (head.slot >= self.world_size or head.slot == self.slot):
                raise FrameError(f"a {head.kind.name} frame to slot {head.slot} of {self.world_size}")
        elif head.slot != self.slot:
            raise FrameError(f"a {head.kind.name} frame of slot {head.slot}, this site has slot {self.slot}")
        if head.to and (head.to > self.world_size or head.to == self.slot + 1):
            raise FrameError(f"a {head.kind.name} frame for slot {head.to - 1} of {self.world_size} alone")


class Sessions(dict[tuple[str, int], Session]):
    """Sessions of all sites, by channel and slot."""

    def of(self, channel: str) -> list[Session]:
        """Return the sessions of a channel."""
        return [each for each in self.values() if each.channel == channel]

    @property
    def training(self) -> list[Session]:
        """Sessions of the sites of the present run."""
        return [each for each in self.of("training") if not each.waits]

    def announce(self, message: Any, soon: bool = False) -> None:
        """Send a message to the sites of the present run; see `Session.send`."""
        frame = pack_control(message, 0)
        for session in self.training:
            session.send(frame, soon)


def pass_payload(sender: Session, head: Head, packed: PackedFrame, receivers: Iterable[Session]) -> PackedFrame:
    """Send a payload to sites; if it is for one site alone, the others get a frame in its place.

    Args:
        sender: the site that has sent it, which gets nothing.
        head: head of its frame.
        packed: the frame.
        receivers: sites that take part.

    Returns:
        The frame for sites that the payload is not for alone.
    """
    others = head.elsewhere if head.to else packed
    for other in receivers:
        if other is not sender:
            other.send(packed if head.to == other.slot + 1 else others)
    return others


def check_hello(hello: Hello) -> None:
    """Check a site's first message.

    Raises:
        RefusedError: if the site speaks another version of the protocol, or wants an unknown channel.
    """
    if not OLDEST_VERSION <= hello.version <= VERSION:
        first = "the hub" if hello.version > VERSION else "this site"
        raise RefusedError(
            f"this site speaks version {hello.version} of the protocol, the hub serves versions "
            f"{OLDEST_VERSION} to {VERSION}: upgrade {first} (the hub goes first, then the sites)"
        )
    if hello.channel not in _ALLOWED:
        raise RefusedError(f"unknown channel {hello.channel!r}")


def refuse_second(session: Session, instance: int, site_timeout: float, now: float) -> NoReturn:
    """Refuse a second process of a site; for good once the first one has shown that it is alive.

    Args:
        session: the session of the first process.
        instance: random number of the second process, which connects again until it is accepted or refused.
        site_timeout: seconds of silence after which the first one counts as lost.
        now: the time, in seconds.
    """
    if session.rival[0] != instance:
        session.rival = instance, now
    reason = f"another process is connected as site {session.name!r}"
    if session.heard > session.rival[1] + _ALIVE_SECONDS:
        raise RefusedError(reason)
    left = max(0.0, session.heard + site_timeout - now)
    raise TryAgainError(f"{reason}; if it is dead, this one takes its place in {left:.1f} s")


def check_release(session: Session, peers: Sequence[Session]) -> None:
    """Raise RefusedError if a site that joins has a release which cannot train with those of others that train."""
    for other in peers:
        if wire_of(other.release) != wire_of(session.release):
            raise RefusedError(
                f"this site has dadplug {session.release}, and {other.name}, which trains already, "
                f"{other.release}: all sites need the same number after the slash"
            )


def check_start(session: Session, peers: Sequence[Session]) -> None:
    """Compare when a site lets its run start with what the other sites of the run state.

    Args:
        session: the site.
        peers: the others.

    Raises:
        RefusedError: if it differs, or does not fit the roster.
    """
    if session.start.sites > session.sites:
        raise RefusedError(f"{session.start}, but the roster has {session.sites} sites")
    for other in peers:
        if other.start != session.start:
            raise RefusedError(
                f"{session.name} states {session.start}, and {other.name} {other.start}: all sites need the same"
            )


_MOST_STREAMS = 32  # of a site
_MOST_KEPT = 16 << 20  # bytes that a site has not acknowledged, beyond which streams to it are held up
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class StreamService(Protocol):
    """Service at the hub that sites open streams to."""

    def accept(self, slot: int, connected: socket.socket) -> None:
        """Take a stream that the site of a slot has opened; must not block."""

    def begin(self, names: Sequence[str]) -> None:
        """Take the names of the sites of the next run, by slot, where they differ from those before."""

    def hold(self, held: bool) -> None:
        """Let no silence of sites count while none can be heard, or they are on their way back."""

    def events(self) -> Iterator[str]:
        """Yield what has happened since the last call, for the journal."""

    def close(self) -> None:
        """End the service: the hub ends."""


class NoService:
    """Service of a hub that has none: each stream ends at once."""

    def accept(self, slot: int, connected: socket.socket) -> None:
        """End a stream."""
        connected.close()

    def begin(self, names: Sequence[str]) -> None:
        """Take the names of the sites of the next run, for nothing."""

    def hold(self, held: bool) -> None:
        """Take whether silence counts, for nothing."""

    def events(self) -> Iterator[str]:
        """Return that nothing has happened."""
        return iter(())

    def close(self) -> None:
        """End the service."""


class HubStream(PeerStream):
    """The hub's end of a stream. After the end of the session, what the service still writes is read and dropped.

    Args:
        session: session of the site.
        channel: number of the stream, which the site has chosen.

    Attributes:
        session: session of the site.
        mask: events that the hub's selector waits for.
    """

    def __init__(self, session: Session, channel: int) -> None:
        super().__init__(channel, HUB_SLOT, session, _MOST_KEPT)
        self.session = session
        self.mask = 0

    @property
    def sendable(self) -> int:
        return super().sendable if self.session.ended is None else OPEN_BYTES

    def send(self, tag: Tag, parts: Sequence[Any]) -> None:
        if self.session.ended is None:
            super().send(tag, parts)


class HubStreams:
    """Streams of all sites to the hub.

    Args:
        selector: the hub's selector, with which the streams' local sockets are registered.
        service: the service.
    """

    def __init__(self, selector: selectors.BaseSelector, service: StreamService) -> None:
        self.service = service
        self._selector = selector
        self._streams: dict[tuple[int, int], HubStream] = {}  # by slot and channel
        self._reached: set[HubStream] = set()  # by messages that have just arrived
        self._freed = itertools.count(-1, -1)  # numbers of streams whose session has ended

    def take(self, session: Session, head: Head, body: memoryview) -> None:
        """Take a message of a site; those of a stream that is closed here are of no use.

        Raises:
            FrameError: if the site does not keep to the protocol, or opens too many streams.
        """
        stream = self._streams.get((session.slot, head.exchange))
        if stream is None:
            if head.tag != Tag.DATA or head.offset:
                return
            stream = self._begin(session, head.exchange)
        stream.take(head, body)
        self._reached.add(stream)

    def _begin(self, session: Session, channel: int) -> HubStream:
        if sum(slot == session.slot for slot, _ in self._streams) >= _MOST_STREAMS:
            raise FrameError(f"more than {_MOST_STREAMS} streams to the hub")
        stream = self._streams[session.slot, channel] = HubStream(session, channel)
        self.service.accept(session.slot, stream.program)
        return stream

    def end(self, session: Session) -> None:
        """End the streams of a session, which has ended: the service reads the end after what has arrived."""
        for (slot, channel), stream in list(self._streams.items()):
            if stream.session is session:
                stream.end()
                self._reached.add(stream)
                # The site's next session may choose the same number.
                self._streams[slot, next(self._freed)] = self._streams.pop((slot, channel))

    def serve(self, ready: Mapping[HubStream, int], fail: Callable[[Session, Exception], None]) -> None:
        """Serve the streams whose sockets are ready, or that messages have arrived for.

        Args:
            ready: events of the sockets that are ready.
            fail: takes the session and the error of a stream that cannot be served, which is closed.
        """
        if not ready and not self._reached:
            return
        failed: list[tuple[Session, Exception]] = []
        for key in [key for key, each in self._streams.items() if each in ready or each in self._reached]:
            stream = self._streams[key]
            events = ready.get(stream, 0)
            try:
                over = stream.serve(stream in self._reached or bool(events & _WRITE), bool(events & _READ))
            except Exception as error:
                failed.append((stream.session, error))
                over = True
            if over:
                self._remove(key)
        self._reached.clear()
        for session, fault in failed:
            fail(session, fault)

    def _remove(self, key: tuple[int, int]) -> None:
        stream = self._streams.pop(key)
        if stream.mask:
            self._selector.unregister(stream.local)
        stream.close()

    def update(self) -> None:
        """Register what each socket waits for."""
        for stream in self._streams.values():
            wanted = _WRITE * bool(stream.incoming) | _READ * (stream.sendable > 0)
            if wanted != stream.mask:
                watch(self._selector, stream.local, stream.mask, wanted, stream)
                stream.mask = wanted

    def close(self) -> None:
        """Close all streams."""
        for key in list(self._streams):
            self._remove(key)


def watch(selector: selectors.BaseSelector, connection: Any, before: int, events: int, data: object) -> None:
    """Let a selector wait for other events of a connection than before.

    Args:
        selector: the selector.
        connection: the connection.
        before: the events that it waits for now; 0 where the connection is not registered.
        events: other ones; 0 for none.
        data: what the selector returns with them.
    """
    if not before:
        selector.register(connection, events, data)
    elif events:
        selector.modify(connection, events, data)
    else:
        selector.unregister(connection)
