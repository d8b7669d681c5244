"""Byte streams of sites to the hub itself, as those between two sites, see `dadplug.hub.wire.streams`.

The other end of each is a local socket of a service, which runs in threads of its own. Memory is bounded: a site may
have so many streams, and each of them holds the window of either direction at most.
"""

from __future__ import annotations

import itertools
import selectors
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ...errors import FrameError
from ..secure.sealing import OPEN_BYTES
from ..wire.messages import Head
from ..wire.streams import HUB_SLOT, PeerStream, Tag
from .session import Session

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
