"""Streams of frames, the thread that sends and receives them, and the log as one site sees it."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

from msgspec.msgpack import Decoder

from ..errors import MismatchError, SiteError, StreamError, escaped
from ..exchange import Traffic
from ..exchange.calls import ASK_SECONDS
from ..exchange.handshake import Deadline
from ..exchange.network import MessageStream, Network
from ..exchange.status import PeerNames
from ..exchange.transport import StreamToHub
from ..support.logs import get_logger
from ..support.structs import LONGEST_TEXT, Slots, decode
from .sequencer import Decision

_log = get_logger(__name__)
_DECISIONS, _AWAITED = Decoder(Decision), Decoder(Slots)


class FrameKind(IntEnum):
    """Kinds of frames."""

    CONTRIBUTION = 1
    """A contribution: from its site to the sequencer, and on to the other sites."""
    REACHED = 2
    """The version that a site goes on at."""
    FINISH = 3
    """A site has no further contribution in this phase; with its buffers, which are passed on."""
    DECISION = 4
    """An entry of the log; `number` is that of the epochs that have begun since the start of the training."""
    LEFT = 5
    """A site has left; the body is the reason."""
    ALIVE = 6
    """Heartbeat; that of the sequencer names the sites that it waits for."""
    BYE = 7
    """A site closes its connection; the body is the reason."""
    BEGIN = 8
    """A site begins an epoch: its number in the phase; its samples; the batches in `used`."""
    ORDER = 9
    """A digest of the order of the batches of an epoch at a site; `number` is the epoch since the start."""
    DRAW = 10
    """A site asks for a batch; `used` is 1 if it waits until there is one."""
    USED = 11
    """A site has used batches without a contribution."""
    PASSED = 12
    """A site has passed over all of its data."""
    DEAL = 13
    """Answer of the dealer; its kind is in `used`."""
    RETURNED = 14
    """A site is back; to that site: the place of the log that its state will belong to."""
    SNAPSHOT = 15
    """The state of a site, for one that returns, whose rank is `number`; without a body the request for it.

    `base` is the number of the request."""
    READY = 16
    """A site that returns has loaded the state; in the answer, `number` is that of its next contribution."""
    TRAINS = 17
    """A site has begun the steps of a phase, within which sites of a trainer may return."""
    EPOCHS = 18
    """A site has loaded a checkpoint; `number` is that of the epochs before it."""


class Deal(IntEnum):
    """Kinds of the dealer's answers."""

    EPOCH = 1
    """An epoch begins; its number since the start of the training."""
    BATCH = 2
    """Number of a batch in the epoch's order."""
    NONE = 3
    """There is no batch at present."""
    OVER = 4
    """The epoch is over; its number in the phase."""


class Frame(NamedTuple):
    """Message between a site and the sequencer.

    Attributes:
        kind: its kind.
        site: the site that it is from, or about.
        number: number of the contribution among those of its site.
        base: version that it was computed at.
        reached: version that the site goes on at.
        samples: samples that it stands for.
        used: number of dealt batches that it stands for.
        body: further content.
    """

    kind: FrameKind
    site: int = 0
    number: int = 0
    base: int = 0
    reached: int = 0
    samples: int = 0
    used: int = 0
    body: bytes | bytearray = b""

    def encode(self) -> list[bytes | bytearray]:
        """Return the frame as consecutive buffers."""
        head = _HEAD.pack(*self[:-1], len(self.body))
        return [head, self.body] if self.body else [head]


_HEAD = struct.Struct("<BxHxxxxQQQQQQ")  # kind, site, number, base, reached, samples, used, bytes of the body
_LARGEST = 1 << 62  # number in a head, so that the next one can be sent
_WAKE = 1 << 15  # bytes of a body at which the thread wakes up; without it, at each packet
_UNSENT = 1 << 17  # bytes that the kernel holds unsent: more would hide that contributions do not get away
_CLOSE_SECONDS = 5.0  # to send the last frames, and for the other end to close


class _FrameHead:
    """Head of a frame.

    Args:
        buffer: at least the bytes of a head, from `offset` on.
        offset: position of the head in the buffer.
        limit: bytes of the largest body.

    Attributes:
        frame: the frame, without its body.
        nbytes: bytes of the body.

    Raises:
        StreamError: if it is none.
    """

    def __init__(self, buffer: Any, offset: int, limit: int) -> None:
        kind, *fields, self.nbytes = _HEAD.unpack_from(buffer, offset)
        if kind not in FrameKind._value2member_map_ or self.nbytes > limit:
            raise StreamError(f"a frame of kind {kind} with {self.nbytes} bytes: at most {limit} are possible")
        if max(fields) > _LARGEST:
            raise StreamError(f"a frame of kind {kind} with a number above {_LARGEST}")
        self.frame = Frame(FrameKind(kind), *fields)

    def message(self, body: bytearray) -> Frame:
        """Return the frame with its body."""
        return self.frame._replace(body=body)


class _Stream(MessageStream[_FrameHead]):
    """Frames over one socket.

    Args:
        peer: rank of the site at the other end.
        connected: the socket.
        limit: bytes of the largest body.
    """

    def __init__(self, peer: int, connected: socket.socket, limit: int) -> None:
        super().__init__(peer, connected, _HEAD.size, lambda buffer, offset: _FrameHead(buffer, offset, limit))
        _limit_unsent(connected)
        self._wakes_at = 1

    @property
    def nbytes(self) -> int:
        """Bytes of messages that are to be sent, or of which a part has arrived."""
        arrived = 0 if self.partial is None else self.partial[0].nbytes - self.missing.nbytes
        return arrived + self.outgoing.nbytes

    def read(self, messages: list[tuple[int, Any]]) -> None:
        """Read the frames that have arrived, and wake up next when a part of a body is there that is worth it."""
        super().read(messages)
        count = 1 if self.partial is None else min(_WAKE, self.missing.nbytes)
        if count != self._wakes_at and self.socket.family in (socket.AF_INET, socket.AF_INET6):
            self._wakes_at = count
            with suppress(OSError):  # where the system has no such option
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def _limit_unsent(connected: socket.socket) -> None:
    """Let the kernel hold few bytes that have not left; those that are on their way over a long link do not count."""
    if connected.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
            return
    with suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT)


class FrameLoop:
    """Loop in a thread of its own that sends and receives the frames of some connections, and sends heartbeats.

    The methods ``on_...``, `heartbeat` and `held_bytes` are called in the thread, one at a time. `post` and `adopt` may
    be called from any thread. A subclass calls `start` once it is complete.

    Args:
        name: name of the thread.
        sockets: connected sockets by rank of the site at the other end.
        limit: bytes of the largest body.
        silence: seconds of silence after which a connection counts as lost.
        traffic: meter of sent bytes.
        own: rank of this site: what is sent to it stays in the process, and is not counted.
        memory: bytes that messages may take; beyond it the connections with the most of them are given up.

    Attributes:
        network: the connections.
    """

    def __init__(
        self,
        name: str,
        sockets: Mapping[int, socket.socket],
        limit: int,
        silence: float,
        traffic: Traffic,
        own: int,
        memory: float = math.inf,
    ) -> None:
        self._traffic = traffic
        self._own = own
        self._memory = memory
        self._limit = limit
        self._adopted: deque[tuple[int, socket.socket]] = deque()
        streams = [_Stream(peer, connected, limit) for peer, connected in sockets.items()]
        self.network = Network(streams, silence, lambda: Frame(FrameKind.ALIVE, body=self.heartbeat()).encode())
        self._stopping = self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # What a subclass does

    def on_frames(self, frames: list[tuple[int, Frame]]) -> None:
        """Take the frames that have arrived, as pairs of rank and frame."""

    def on_lost(self, peer: int, error: Exception) -> None:
        """Take the rank and the error of a connection that is lost."""

    def on_adopted(self, peer: int) -> None:
        """Take the rank of a site whose new connection replaces a lost one."""

    def on_due(self) -> float | None:
        """Do what is due; return the `time.monotonic` at which to call it again, or None. Called before each wait."""
        return None

    def heartbeat(self) -> bytes:
        """Return the body of a heartbeat."""
        return b""

    def held_bytes(self) -> int:
        """Return the bytes of messages that the subclass keeps."""
        return 0

    # Connections

    def start(self) -> None:
        """Begin to send and receive."""
        self._thread.start()

    def post(self, peer: int, frame: Frame) -> None:
        """Send a frame to a site without blocking; nothing happens if the connection is lost."""
        count = self.network.send(peer, frame.encode())
        if peer != self._own:
            self._traffic.add(count)

    def adopt(self, peer: int, connected: socket.socket) -> None:
        """Take over a new connection to a site; may be called from any thread."""
        self._adopted.append((peer, connected))
        self.network.wake()
        if self._stopped:
            self._close_adopted()

    def _close_adopted(self) -> None:
        """Close connections that come after the end."""
        while self._adopted:
            self._adopted.popleft()[1].close()

    def _take_adopted(self) -> None:
        while self._adopted:
            peer, connected = self._adopted.popleft()
            if peer in self.network.streams:
                self._lose({peer: ConnectionError("it has connected anew")})
            self.network.add(_Stream(peer, connected, self._limit))
            self.on_adopted(peer)

    def is_blocked(self, peer: int) -> bool:
        """Return whether a frame to a site has not left yet."""
        stream = self.network.streams.get(peer)
        return stream is not None and stream.outgoing.blocked

    @property
    def is_away(self) -> bool:
        """Whether connections go over a hub that cannot be reached at present, and is waited for."""
        return any(stream.is_away for stream in list(self.network.streams.values()))

    def arriving(self, peer: int) -> Frame | None:
        """Return the frame of a site whose head has arrived, and a part of its body at most."""
        stream = self.network.streams.get(peer)
        return None if stream is None or stream.partial is None else stream.partial[0].frame

    def blocks_others(self) -> bool:
        """Return whether a frame for each of the other sites still waits to be sent; False if there are none."""
        others = [stream.outgoing.blocked for peer, stream in list(self.network.streams.items()) if peer != self._own]
        return bool(others) and all(others)

    def close(self) -> None:
        """Close all connections after sending the last frames. May be called twice."""
        self._stopping = True
        self.network.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _CLOSE_SECONDS)

    def _run(self) -> None:
        network = self.network
        try:
            self._serve()
        except Exception:  # close all connections, since waiting peers would block
            _log.exception("the thread %s has failed", self._thread.name)
            for peer in list(network.streams):
                with suppress(Exception):
                    network.drop(peer)
        with suppress(Exception):
            network.shut_down(time.monotonic() + _CLOSE_SECONDS)
        self._stopped = True
        self._close_adopted()
        for peer in list(network.streams):
            network.drop(peer)
        network.close()

    def _serve(self) -> None:
        network = self.network
        while not self._stopping:
            due = self.on_due()
            network.wait(math.inf if due is None else due - time.monotonic())
            arrived, lost = network.read(network.poll(0.0))
            if arrived:
                self.on_frames(arrived)
            if self._memory < math.inf:
                lost |= self._free_memory()
            self._lose(lost)
            self._take_adopted()
            self._lose(network.send_heartbeats())

    def _lose(self, lost: Mapping[int, Exception]) -> None:
        """Close connections that are lost, for the reasons given."""
        for peer in lost:
            self.network.drop(peer)
        for peer, error in lost.items():
            self.on_lost(peer, error)

    def _free_memory(self) -> dict[int, Exception]:
        """Return errors of the connections with the most bytes, without which the rest are within the limit."""
        lost: dict[int, Exception] = {}
        held = {peer: stream.nbytes for peer, stream in self.network.streams.items()}
        while held and sum(held.values()) + self.held_bytes() > self._memory:
            peer = max(held, key=lambda each: held[each])
            reason = f"{held.pop(peer)} bytes wait for it or came from it, and messages take more than {self._memory:g}"
            lost[peer] = MemoryError(reason)
        return lost


# The log as one site sees it: contributions that it sends, and commits that arrive

_LOOK_SECONDS = 1.0  # between two looks whether the hub is away
HUB = -1  # in place of a rank: the hub


class Commit(NamedTuple):
    """Entry of the log with the contributions that it commits.

    Attributes:
        decision: the entry.
        bodies: the contributions' content, in the entry's order.
        ended: if the phase is over, what each site has sent at its end, by rank in ascending order; else empty.
        asks: request for this site's state at this place of the log, for a site that returns; None without one.
    """

    decision: Decision
    bodies: tuple[bytes | bytearray, ...]
    ended: dict[int, bytes | bytearray]
    asks: Frame | None = None


class Log(FrameLoop):
    """Connection of one site to the sequencer.

    Args:
        connected: the socket.
        sites: the sites by name.
        limit: bytes of the largest contribution.
        silence: seconds of silence after which the sequencer counts as lost.
        timeout: seconds that a wait may take.
        traffic: meter of sent bytes.
        hub: this site's stream to the hub, where the hub has the sequencer; None where site 0 has it.
        returns: whether this site returns into a training.
        delayed: returns whether the sequencer has not passed on what it has, where it is at this site.

    Attributes:
        left: by rank, the reason why a site has left, in the order in which they did.
        losses: sites that have left and their reasons, of which the program has not been warned.
        outstanding: number of this site's contributions that are neither committed nor dropped.
        deals: answers of the dealer that have arrived.
        snapshot: state of another site, if this one returns and has got it.
        first: number of this site's first contribution; None if it returns and the number has not arrived.
        epochs: number of epochs of the data that have begun since the start of the training, at the end of a phase.
        over: number of the last epoch of the phase that is over at all sites; -1 if none is.
    """

    def __init__(
        self,
        connected: socket.socket,
        sites: PeerNames,
        limit: int,
        silence: float,
        timeout: float,
        traffic: Traffic,
        hub: StreamToHub | None = None,
        returns: bool = False,
        delayed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._peer = 0 if hub is None else HUB
        super().__init__("dadplug-log", {self._peer: connected}, limit, silence, traffic, sites.rank)
        self.left: dict[int, str] = {}
        self.losses: list[tuple[int, str]] = []
        self.outstanding = 0
        self.deals: deque[Frame] = deque()
        self.snapshot: bytes | bytearray | None = None
        self.first: int | None = None if returns else 0
        self.epochs = 0
        self.over = -1
        self._epochs = 0  # that this site has begun in the phase
        self._hub, self._sites = hub, sites
        self._name = sites[0] if hub is None else hub.hub  # of the place that has the sequencer
        self._timeout = timeout
        self._delayed = delayed
        self._count = 0  # contributions of this site
        self._awaited: list[int] = []  # by the sequencer
        self._bodies: dict[tuple[int, int], bytes | bytearray] = {}
        self._ended: dict[int, bytes | bytearray] = {}  # what sites have sent at the end of the phase
        self._commits: deque[Commit] = deque()
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self.start()

    # This site's messages

    @property
    def blocked(self) -> bool:
        """Whether this site's last contribution has not left yet."""
        return self.is_blocked(self._peer) or self._delayed()

    def send(
        self,
        kind: FrameKind,
        number: int = 0,
        *,
        base: int = 0,
        reached: int = 0,
        samples: int = 0,
        used: int = 0,
        body: bytes = b"",
    ) -> None:
        """Send a message; for its fields see `FrameKind` and `Frame`."""
        self.post(self._peer, Frame(kind, self._own, number, base, reached, samples, used, body))

    def contribute(self, base: int, reached: int, samples: int, used: int, body: bytes) -> None:
        """Send a contribution.

        Args:
            base: version that it was computed at.
            reached: version at which this site goes on.
            samples: samples that it stands for.
            used: number of dealt batches that it stands for.
            body: its content.
        """
        with self._changed:
            number, self._count = self._count, self._count + 1
            self._bodies[self._own, number] = body
            self.outstanding += 1
        self.send(FrameKind.CONTRIBUTION, number, base=base, reached=reached, samples=samples, used=used, body=body)

    def begin_epoch(self, *, samples: int = 0, used: int = 0) -> int:
        """Send that this site begins an epoch; return its number in the phase.

        Args:
            samples: what the site's share of the step size is proportional to; 0 if that is not given.
            used: number of batches that are dealt in the epoch.
        """
        number, self._epochs = self._epochs, self._epochs + 1
        self.deals.clear()
        self.send(FrameKind.BEGIN, number, samples=samples, used=used)
        return number

    def finish(self, body: bytes) -> None:
        """Send that this site has no further contribution in this phase.

        Args:
            body: what the other sites need at the end of the phase.
        """
        with self._changed:
            self._ended[self._own] = body
        self.send(FrameKind.FINISH, body=body)

    def leave(self, reason: str) -> None:
        """Send that this site leaves, and close the connection. May be called twice."""
        self.send(FrameKind.BYE, body=reason.encode())
        self.close()

    # What arrives

    def take(self) -> list[Commit]:
        """Return the entries that have arrived since the last call, up to the end of a phase.

        What follows the end of a phase is left for further calls: other sites may have begun the next one.

        Raises:
            SiteError: if the sequencer is lost, and nothing is left to take.
        """
        with self._changed:
            commits: list[Commit] = []
            while self._commits and not (commits and commits[-1].decision.over):
                commits.append(self._commits.popleft())
            if not commits:
                self._raise_failure()
            return commits

    def wait(self, until: Callable[[], bool] = lambda: False, *, entries: bool = True) -> None:
        """Wait until an entry has arrived.

        Args:
            until: ends the wait, too, once it holds; called with the log's lock held.
            entries: whether an entry ends it.

        Raises:
            SiteError: if the sequencer is lost, or nothing arrives within the timeout; the message names the sites that
                the sequencer waits for.
        """
        deadline, patience = Deadline(self._timeout), Deadline(ASK_SECONDS)
        with self._traffic.waiting(), self._changed:
            while not (entries and self._commits) and not until():
                self._raise_failure()
                if patience.over:
                    self._sites.check_awaited(self._awaited)
                    patience = Deadline(ASK_SECONDS)
                if deadline.over:
                    names = ", ".join(self._sites[site] for site in self._awaited if site != self._own)
                    raise SiteError(
                        f"no contribution has been committed for {self._timeout:g} s: the sequencer waits for "
                        f"{names or self._name}"
                    )
                if self.is_away:  # no time counts
                    deadline = Deadline(self._timeout)
                self._changed.wait(min(deadline.left, _LOOK_SECONDS))

    def _raise_failure(self) -> None:
        """Raise the error by which the sequencer is lost, if there is one."""
        if isinstance(self._error, TimeoutError):
            raise SiteError(f"{self._name}, which has the sequencer, does not answer: {self._error}")
        if self._error is not None and not isinstance(self._error, (SiteError, MismatchError)):
            self._error = self._lost(self._error)
        if self._error is not None:
            raise self._error

    def _lost(self, error: Exception) -> SiteError:
        """Return the error to raise for one of the connection to the sequencer."""
        if self._hub is None:
            found = self._sites.lost(error, self._timeout, self._peer)
            return SiteError(f"{found} (it has the sequencer, without which training cannot go on)")
        try:
            self._hub.check()
            text = f"{self._name} has ended the connection to its sequencer: {error}"
        except SiteError as failure:
            text = str(failure)
        return SiteError(
            f"{text} (the hub has the log of this training; if the hub was restarted, the log is lost: start all sites "
            "again from their last checkpoint)"
        )

    def on_lost(self, peer: int, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def on_frames(self, frames: list[tuple[int, Frame]]) -> None:
        with self._changed:
            for _, frame in frames:
                try:
                    self._handle(frame)
                except (KeyError, TypeError, ValueError) as error:
                    self._error = MismatchError(
                        f"{self._name}, which has the sequencer, has sent a {frame.kind.name} that "
                        f"does not fit: {error}"
                    )
            self._changed.notify_all()

    def _handle(self, frame: Frame) -> None:
        if frame.site >= len(self._sites):
            raise ValueError(f"there is no site {frame.site}")
        match frame.kind:
            case FrameKind.CONTRIBUTION:
                self._bodies[frame.site, frame.number] = frame.body
            case FrameKind.FINISH:
                self._ended[frame.site] = frame.body
            case FrameKind.DECISION:
                self.epochs = frame.number
                self._append(frame.body)
            case FrameKind.DEAL:
                self.deals.append(frame)
                if frame.used == Deal.OVER:
                    self.over = max(self.over, frame.number)
            case FrameKind.SNAPSHOT if frame.body:
                self.snapshot = frame.body
            case FrameKind.SNAPSHOT:
                self._commits.append(Commit(Decision(0), (), {}, frame))
            case FrameKind.READY:
                self.first = self._count = frame.number
            case FrameKind.RETURNED if frame.site == self._own:  # the log of this site begins here
                for each in (self._commits, self._bodies, self._ended, self.left, self.losses):
                    each.clear()
            case FrameKind.RETURNED:
                self.left.pop(frame.site, None)
            case FrameKind.ALIVE:
                self._awaited = [
                    site for site in decode(_AWAITED, frame.body, "heartbeat", ValueError) if site < len(self._sites)
                ]
            case FrameKind.LEFT:
                reason = escaped(bytes(frame.body[:LONGEST_TEXT]).decode(errors="replace"))
                self.left[frame.site] = reason
                if frame.site == self._own:
                    self._error = SiteError(f"the sequencer goes on without this site: {reason}")
                else:
                    self.losses.append((frame.site, reason))

    def _append(self, body: bytes | bytearray) -> None:
        decision = decode(_DECISIONS, body, "decision", ValueError)
        bodies = tuple(self._bodies.pop(key) for key in decision.keys)[: len(decision.entries)]
        if self.first is not None:
            self.outstanding -= sum(site == self._own and number >= self.first for site, number in decision.keys)
        ended: dict[int, bytes | bytearray] = {}
        if decision.over:
            ended, self._ended = dict(sorted(self._ended.items())), {}
            self.over, self._epochs = -1, 0
        self._commits.append(Commit(decision, bodies, ended))
