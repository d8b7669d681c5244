"""Byte streams between each pair of sites over one connection to the hub, for the parameter manager.

The thread that writes to a stream encrypts and sends the bytes itself, as long as the connection takes them. What it
does not take goes into the stream's local socket, whose buffer is bounded, so that a program is held up as by a TCP
connection. A thread of the tunnel sends that, and passes on what arrives: one switch between threads for a message.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...errors import FrameError, SiteError
from ...exchange.fields import check_all
from ...exchange.handshake import Deadline
from ...exchange.restrictions import impose_restrictions
from ...exchange.transport import StreamToHub
from ..pki.kits import Kit
from ..pki.project import KitRestrictions
from ..secure.sealing import Keys, Opener, Sealer
from ..wire.messages import Drop, Head, Kind
from ..wire.streams import HUB_SLOT, PeerStream, Tag, pieces
from .connection import HubConnection
from .link import HubLink

_MOST_KEPT = 32 << 20  # bytes that the hub has not acknowledged, beyond which streams are held up
_NONCE_BYTES = 16
_LATER = 1 << 31  # bit of the channels of streams to the hub, which a site opens by itself


class TunnelSocket(socket.socket):
    """A program's end of a stream: a local socket whose bytes leave at once where the connection takes them.

    Args:
        tunnel: the tunnel.
        stream: the stream.

    Attributes:
        stream: the stream.
    """

    def __init__(self, tunnel: Tunnel, stream: PeerStream) -> None:
        super().__init__(fileno=stream.program.detach())
        self.setblocking(False)
        self._tunnel, self.stream = tunnel, stream

    @property
    def is_away(self) -> bool:
        """Whether the hub cannot be reached at present, and is waited for."""
        return self._tunnel.is_away

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send bytes, without blocking; the flags are ignored."""
        return self._tunnel.write(self, [data])

    def sendmsg(self, buffers: Iterable[Any], /, *_: Any) -> int:
        """Send buffers, without blocking; further arguments are ignored."""
        return self._tunnel.write(self, list(buffers))

    def close(self) -> None:
        """Close the program's end; the other site reads the end of the stream after all bytes."""
        self._tunnel.finish(self.stream)
        super().close()


class Tunnel(HubConnection):
    """Connection to the hub that carries the streams. Its thread reads what arrives.

    Args:
        kit: kit of this site.
        address: host and port of the hub; None for those of the kit.
        keys: secrets of the sites, where the kit requires sealed messages.

    Raises:
        ValueError: if it does, and there are none.
    """

    batch_seconds = 0.0

    def __init__(self, kit: Kit, address: tuple[str, int] | None = None, keys: Keys | None = None) -> None:
        if kit.roster.sealed != (keys is not None):
            raise ValueError("keys are needed where the kit requires sealed messages, and only there")
        super().__init__(kit, "parameters", address)
        self._keys = keys
        self._streams: dict[tuple[int, int], PeerStream] = {}  # by channel and slot
        self._reached: set[PeerStream] = set()  # by messages that have just arrived
        self._next = 0
        self._process = os.getpid()

    def open(self, exchange: Callable[..., list[Any]]) -> dict[int, socket.socket]:
        """Open a stream to each other site; all sites must call it together.

        Args:
            exchange: `Transport.gather_objects`. All sites must call it once more before they send anything.

        Returns:
            Non-blocking sockets by rank.

        Raises:
            MismatchError: if a site has sent something else.
            SiteError: if the connection has been given up, or a site is lost.
        """
        self.check()
        found = exchange((self._next, os.urandom(_NONCE_BYTES)), tuple[int, bytes], "channel of streams")
        for slot, (number, nonce) in enumerate(found):
            check_all("channel of streams", f"site {slot} ({self.names[slot]})", [number, len(nonce)], 0, _LATER - 1)
        channel = max(number for number, _ in found)
        self._next = channel + 1
        context = b"".join(nonce for _, nonce in found)  # that no other channel has
        opened: dict[int, socket.socket] = {}
        with self.lock:
            for slot in range(self.world_size):
                if slot != self.rank:
                    keys = None if self._keys is None else self._keys.pair(slot, context)
                    opened[slot] = self._begin(channel, slot, keys)
        self._pipe.wake()
        return opened

    def dial_hub(self) -> StreamToHub:
        """Open a stream to the hub itself."""
        with self.lock:
            self.check()
            opened = self._begin(_LATER | int.from_bytes(os.urandom(4), "little"), HUB_SLOT)
        self._pipe.wake()
        return StreamToHub(opened, self.hub, str(self.kit.folder.resolve()), self.check)

    def _begin(self, channel: int, slot: int, keys: tuple[Sealer, Opener] | None = None) -> TunnelSocket:
        stream = self._streams[channel, slot] = PeerStream(channel, slot, self.frames, _MOST_KEPT, keys)
        return TunnelSocket(self, stream)

    def write(self, program: TunnelSocket, buffers: Sequence[Any]) -> int:
        """Send bytes of a stream, or leave them to the thread.

        Args:
            program: the program's end of the stream.
            buffers: the bytes.

        Returns:
            The number of bytes that were taken.

        Raises:
            BlockingIOError: if there is no room; the local socket shows when there is.
            OSError: if the stream is closed.
        """
        stream = program.stream
        with self.lock:
            room = 0 if stream.spilled or self.closed else stream.sendable
            if not room:
                count = socket.socket.sendmsg(program, buffers)
                stream.spilled += count
                return count
            before = stream.sent
            for parts in pieces(buffers, room):
                stream.send(Tag.DATA, parts)
            count = stream.sent - before
            self.flush()
            behind = self.frames.blocked
        if behind:
            self._pipe.wake()
        return count

    def finish(self, stream: PeerStream) -> None:
        """Tell the other site that a stream ends, unless the thread has to send something before."""
        if os.getpid() != self._process:
            return  # in a forked child, where the lock may be held for good
        with self.lock:
            if not stream.spilled and not self.closed and (stream.channel, stream.slot) in self._streams:
                stream.end_program()
                self.flush()
        self._pipe.wake()

    def close(self, seconds: float = 1.0) -> None:
        """Send what is left, and close the connection and all streams. May be called twice.

        Args:
            seconds: time for the rest, at most.
        """
        deadline = Deadline(seconds)
        while not (self.closed or deadline.over) and any(each.spilled for each in list(self._streams.values())):
            time.sleep(0.002)
        self.leave("")
        super().close(seconds)

    def close_descriptors(self) -> None:
        """Close all sockets at once, also in a forked child."""
        super().close_descriptors()
        for stream in list(self._streams.values()):
            stream.close()

    # What arrives

    def _room(self, head: Head) -> memoryview:
        return self.room(head) if head.slot == HUB_SLOT else super()._room(head)

    def room(self, head: Head) -> memoryview:
        if head.kind is not Kind.MESSAGE or head.slot == self.rank:
            raise FrameError(f"a {head.kind.name} frame of slot {head.slot} on the channel for parameters")
        return memoryview(bytearray(head.length))

    def complete(self, head: Head, body: memoryview) -> None:
        """Take a frame; those of a stream that is closed here are of no use."""
        stream = self._streams.get((head.exchange, head.slot))
        if stream is None:
            return
        stream.take(head, body)
        self._reached.add(stream)

    def control(self, message: object) -> None:
        """Take an announcement: of all sites, those that are lost matter."""
        if not isinstance(message, Drop) or self.left:
            return
        if message.slot == self.rank:
            self.fail(SiteError(f"{self.hub} has given this site up: {message.reason}"))
        for stream in self._streams.values():
            if stream.slot == message.slot:
                stream.end()
                self._reached.add(stream)

    def _remove(self, stream: PeerStream) -> None:
        self._streams.pop((stream.channel, stream.slot), None)
        self._reached.discard(stream)
        stream.close()

    # The thread

    def _run(self) -> None:
        super()._run()
        with self.lock:
            for stream in list(self._streams.values()):
                self._remove(stream)

    def tick(self) -> None:
        self._end_silence()

    def expects(self) -> int:
        return _MOST_KEPT  # always: no other thread reads

    def watched(self) -> dict[int, int]:
        found = super().watched()
        for stream in self._streams.values():
            events = select.POLLOUT * bool(stream.incoming) + select.POLLIN * (stream.sendable > 0)
            if events:  # otherwise the end of the socket would end every wait
                found[stream.local.fileno()] = events
        return found

    def serve(self, ready: dict[int, int]) -> None:
        """Receive, and serve the streams that have become ready, or that messages have arrived for."""
        self.transfer()
        for stream in list(self._streams.values()):
            events = ready.get(stream.local.fileno(), 0)
            passes_on = stream in self._reached or bool(events & select.POLLOUT)
            if stream.serve(passes_on, bool(events & ~select.POLLOUT or stream.spilled)):
                self._remove(stream)
        self._reached.clear()
        self.flush()


_tunnels: weakref.WeakKeyDictionary[HubLink, Tunnel] = weakref.WeakKeyDictionary()
_alone: list[Tunnel] = []  # of processes that take part in no run
_opening = threading.Lock()


def tunnel_of(link: HubLink, timeout: float) -> Tunnel:
    """Return the tunnel beside a site's training connection; it connects when first asked for.

    Args:
        link: the training connection.
        timeout: seconds to connect.

    Raises:
        RefusedError: if the hub refuses this site.
        SiteError: if the hub cannot be reached in time.
    """
    with _opening:
        tunnel = _tunnels.get(link)
        if tunnel is None or tunnel.closed:
            tunnel = Tunnel(link.kit, link.address, link.sealing.keys)
            tunnel.start(timeout)
            _tunnels[link] = tunnel
        return tunnel


def _open_alone(kit: Kit, timeout: float) -> Tunnel:
    """Return the tunnel of a process that takes part in no run, as one that replaces a lost site; see `tunnel_of`."""
    with _opening:
        for tunnel in _alone:
            if tunnel.kit.certificate == kit.certificate and not tunnel.closed:
                return tunnel
        tunnel = Tunnel(kit)
        tunnel.start(timeout)
        _alone.append(tunnel)
        return tunnel


def dial_kit(folder: str, timeout: float) -> tuple[int, StreamToHub]:
    """Open a stream to the hub of a kit, whose restrictions are put into force; see `dadplug.exchange.dialers`.

    Returns:
        The rank of the kit's site, and the stream.
    """
    kit = Kit.load(folder)
    kit.check_dates()
    impose_restrictions(KitRestrictions(kit.policy, kit.roster))
    tunnel = _open_alone(kit, timeout)
    return tunnel.rank, tunnel.dial_hub()


def check_tunnel(link: HubLink) -> None:
    """Raise the error with which the tunnel beside a training connection has failed, if it has.

    Raises:
        SiteError: see `dadplug.hub.site.connection.HubConnection.check`.
    """
    tunnel = _tunnels.get(link)
    if tunnel is not None:
        tunnel.check()


@atexit.register  # before any transport, whose last messages go first therefore
def _close_at_exit() -> None:
    for tunnel in [*_tunnels.values(), *_alone]:
        tunnel.close()
