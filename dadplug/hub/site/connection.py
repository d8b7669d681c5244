"""Connection of a site to the hub, whose frames survive the loss of the TCP connection under them.

The thread that sends writes as much as the kernel takes, and the thread that waits reads. A thread of its own sees to
the rest: it pings, connects again when the connection is lost, and moves what the kernel has no room for. While nothing
is left to move it waits for the end of the connection only, so that arriving payloads wake up no thread while backward
computes.
"""

from __future__ import annotations

import secrets
import select
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from ...errors import (
    FrameError,
    KitError,
    MismatchError,
    ProxyError,
    RefusedError,
    SealingError,
    SiteError,
    TryAgainError,
)
from ...exchange.framing import WakePipe
from ...exchange.handshake import Deadline, close_in_children
from ...support.logs import Troubles, get_logger, span
from ..pki.kits import Kit
from ..pki.project import Roster
from ..pki.proxies import target
from ..secure import tls
from ..secure.secure_socket import LocalDoor, SecureSocket, open_door, site_bucket
from ..wire.messages import (
    ALL_SITES,
    FRESH,
    VERSION,
    Head,
    Hello,
    Kind,
    Leave,
    Position,
    Refuse,
    Welcome,
    own_release,
    pack_control,
    read_control,
)
from ..wire.streams import DIAL_SECONDS, HUB_TIMEOUT, FrameReceiver, NumberedFrames, Stream, next_pause


def introduce(
    connection: SecureSocket,
    kit: Kit,
    hello: Hello,
    address: tuple[str, int],
    seconds: float,
    door: LocalDoor | None = None,
) -> Welcome:
    """Send the first message, and return the hub's answer.

    Args:
        connection: the connection, which the hub has accepted.
        kit: kit of this site.
        hello: the message.
        address: host and port of the hub, for messages.
        seconds: time for the answer.
        door: where a hub in this machine gives its answer.

    Raises:
        RefusedError: if the hub refuses this site for good.
        OSError: if the connection is lost, or the hub may accept this site later.
        FrameError: if the hub sends something that is no answer.
    """
    connection.sendall(pack_control(hello, kit.slot))
    answer = _read_answer(connection, door, len(kit.roster.sites), seconds)
    if isinstance(answer, Hello):  # of an earlier version
        raise RefusedError(
            f"the hub at {target(*address)} speaks version {answer.version} of the protocol or an older one, this site "
            f"version {VERSION}: upgrade the hub (the hub goes first, then the sites)"
        )
    if isinstance(answer, Refuse):
        if answer.retry:
            raise TryAgainError(f"it refuses this site at present: {answer.reason}")
        raise RefusedError(f"the hub at {target(*address)} refuses {kit.name}: {answer.reason}")
    if not isinstance(answer, Welcome):
        raise FrameError(f"{type(answer).__name__} where an answer to Hello is due")
    return answer


def _read_answer(connection: SecureSocket, door: LocalDoor | None, world_size: int, seconds: float) -> object:
    def room(head: Head) -> memoryview:
        if head.kind is not Kind.CONTROL:
            raise FrameError(f"a {head.kind.name} frame where an answer to Hello is due")
        return memoryview(bytearray(head.length))

    receiver = FrameReceiver(connection, room)
    deadline, timeout = time.monotonic() + seconds, connection.gettimeout()
    connection.settimeout(0.0)
    while receiver.receive() is None:
        ends: list[SecureSocket | LocalDoor] = [connection] if door is None else [connection, door]
        ready = select.select(ends, [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            raise TimeoutError(f"it has not answered for {seconds:g} s")
        if door in ready and door is not None and (local := door.admit()) is not None:
            connection.continue_over(local)
            door = None
    connection.settimeout(timeout)
    return read_control(bytes(receiver.body), world_size)


_log = get_logger(__name__)
_PING_SECONDS, _SHORTEST_SILENCE = 1.0, 2.0  # the hub pings every second, too
KERNEL_BYTES = 1 << 20  # that the kernel is assumed to buffer
_HELD_BYTES = 1 << 16  # that wait for the next message, at most: a line that is idle meanwhile loses more with more
_POLL_SECONDS = 0.02  # the thread of the connection may read what another one waits for
_LONGEST_REASON = 1000  # characters
_of_runs: dict[Path, float] = {}  # by folder of the kit, seconds after which a hub that is away is given up
_LOST = select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)


class HubConnection(ABC):
    """Connection of one channel.

    Args:
        kit: kit of this site.
        channel: the channel, see `dadplug.hub.wire.messages.Hello`.
        address: host and port of the hub; None for those of the kit.

    Attributes:
        rank: slot of this site.
        names: names of the sites, by slot.
        frames: frames in both directions; to be used with the lock held.
        left: whether this site has told the hub that it leaves.
        outage: reason of the present loss of the connection; empty while there is one.
    """

    batch_seconds = 0.001  # between two reads of the thread, so that it does not wake up for each packet
    pauses = False  # whether the hub lets all sites wait, so that no time counts
    outlasts_outages = False  # whether no time counts while the hub is away
    start_terms = ALL_SITES  # when the run may start without all sites

    def __init__(self, kit: Kit, channel: str, address: tuple[str, int] | None = None) -> None:
        self.kit = kit
        self.rank = kit.slot
        self.names = list(kit.roster.sites)
        self.world_size = len(self.names)
        self.address = address or kit.roster.address()
        self._follows_roster = address is None
        self._turn = 0  # number of failed attempts to connect
        self.lock = threading.Lock()  # of everything below; OpenSSL's objects are not made for two threads
        self._channel = channel
        self._instance = secrets.randbits(62)
        self._connection: SecureSocket | None = None
        self._parting: SecureSocket | None = None  # one that has been given up, which the thread closes
        self._troubles = Troubles(_log)  # that the user is told of
        self.frames = NumberedFrames(self.rank, self._complete)
        self._failure: Exception | None = None
        self.outage = ""  # reason of the present loss of the connection
        self._lost_at = self._heard = 0.0
        self._silence = HUB_TIMEOUT  # without a byte, while a thread waits, after which the connection is given up
        self._waiting = 0  # threads in `waiting`
        self.left = self._closed = False
        self._pipe = WakePipe()
        self._thread: threading.Thread | None = None
        close_in_children(self)

    # What a channel does with what arrives; called with the lock held.

    @abstractmethod
    def room(self, head: Head) -> memoryview:
        """Return room for the body of a frame that is arriving, of any kind but CONTROL and PING.

        The frame may be lost before its end, and then comes again from its beginning.

        Raises:
            FrameError: to refuse the frame, which ends the connection for good.
            MismatchError: the same, where the sites run different programs.
        """

    @abstractmethod
    def complete(self, head: Head, body: memoryview) -> None:
        """Take a frame that is complete; errors as in `room`."""

    def control(self, message: object) -> None:  # noqa: B027  (not every channel gets announcements)
        """Take an announcement of the hub."""

    def tick(self) -> None:  # noqa: B027
        """Do what has to be done about every second, with the lock held; a SiteError ends the connection."""

    @property
    def position(self) -> Position:
        """The last step that this site has closed, for a hub that has been restarted."""
        return FRESH

    def begin_anew(self) -> None:
        """Begin a new stream with a hub that does not know the present one; raise RefusedError if that cannot be."""
        raise RefusedError(f"{self.hub} has been restarted, or has given this site up: {self.outage}")

    def start(self, timeout: float) -> None:
        """Try to connect until the hub answers.

        Args:
            timeout: seconds.

        Raises:
            RefusedError: if the hub refuses this site.
            SiteError: if it cannot be reached in time.
        """
        self._redial(lambda: timeout, time.monotonic(), (OSError, FrameError))
        self._thread = threading.Thread(target=self._run, name=f"dadplug-hub-{self._channel}", daemon=True)
        self._thread.start()

    @property
    def hub(self) -> str:
        """Name of the hub."""
        return f"the hub at {target(*self.address)}"

    @property
    def hub_state(self) -> str:
        """Reason why nothing arrives from the hub; empty if it does."""
        if self.outage:
            return f"{self.hub} cannot be reached: {self.outage}"
        silent = time.monotonic() - self._heard
        return f"{self.hub} has been silent for {silent:.1f} s" if silent > _SHORTEST_SILENCE else ""

    @property
    def is_away(self) -> bool:
        """Whether there is no connection to the hub at present, and it is waited for."""
        return self._connection is None and not self.closed

    @property
    def silent_seconds(self) -> float:
        """Seconds since this machine has got something from the hub, read or not; 0 where the system does not tell."""
        with self.lock:
            return 0.0 if self._connection is None else self._connection.silent_seconds

    @property
    def hub_timeout(self) -> float:
        """Seconds after which a hub that is away is given up: those of the kit, if it states them, or of the run."""
        stated = self.kit.policy.hub_timeout
        return stated if stated is not None else _of_runs.get(self.kit.folder, HUB_TIMEOUT)

    def wait_for_hub(self, seconds: float, unless_known: bool = False) -> None:
        """Let all connections by this kit wait for a hub that is away, unless the kit states for how long.

        Args:
            seconds: time after which it is given up.
            unless_known: whether a time that was given before stays.
        """
        if not (unless_known and self.kit.folder in _of_runs):
            _of_runs[self.kit.folder] = seconds

    def forget_hub_timeout(self) -> None:
        """Forget the time that the run has given: the run is over."""
        _of_runs.pop(self.kit.folder, None)

    @property
    def closed(self) -> bool:
        """Whether the connection has been closed, or has failed."""
        return self._closed or self._failure is not None

    def check(self) -> None:
        """Raise the error with which the connection has failed, if it has.

        Raises:
            SiteError: if this site or its hub is lost, or the connection has been closed.
            MismatchError: if the sites run different programs.
        """
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from None  # the chain is in the log
        if self._closed:
            raise SiteError(f"this process has closed its connection to {self.hub}")

    def fail(self, error: Exception) -> None:
        """Give the connection up, and tell the hub why; every later use raises the error. The lock is to be held."""
        if self._failure is None and self._connection is not None and not self.left:
            reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
            self.frames.send(pack_control(Leave(reason), self.rank))
            with suppress(OSError):
                self.frames.flush()
            self._parting, self._connection = self._connection, None
        self._failure = self._failure or error
        _log.debug("the connection to %s has failed", self.hub, exc_info=error)
        self._disconnect()
        self._pipe.wake()

    def leave(self, reason: str) -> None:
        """Tell the hub why this site leaves, and close the connection; the first reason counts.

        Args:
            reason: the reason, which the other sites get; empty where training is complete.
        """
        if self.left or self.closed:
            return
        self.left = True
        with suppress(SiteError):  # the hub has ended meanwhile
            self.post_control(Leave(reason[:_LONGEST_REASON]))
        HubConnection.close(self)

    def close(self, seconds: float = 1.0) -> None:
        """Send what is left, in `seconds` at most, and close the connection. May be called twice."""
        if self._pipe.fileno() < 0:
            return
        deadline = Deadline(seconds)
        while not (self.closed or deadline.over):
            with self.lock:
                self.transfer()
                if self._connection is not None and self.frames.idle:
                    break
            time.sleep(0.002)
        with self.lock:
            connection, self._connection, self._closed = self._connection, None, True
        self._pipe.wake()
        if connection is not None:
            tls.end(connection, max(0.05, deadline.left))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close the sockets at once, also in a forked child, where another thread may have held the lock."""
        self._closed = True
        self._disconnect()
        self._pipe.close()

    # Frames

    def post(self, head: Head, content: memoryview | bytes, soon: bool = False) -> None:
        """Send a message, cut into frames; return at once. The content is copied.

        Args:
            head: head of the frames, without offset and length.
            content: the message, of bytes; if empty, it is sent as one frame of a kind without a body.
            soon: whether it may wait for the next message or ping, with which it is sent; what waits stays small.

        Raises:
            SiteError: if the connection has been given up.
        """
        with self.lock:
            self.check()
            self.frames.send_message(head, content)
            if not soon or self.frames.queue.unsent_bytes > _HELD_BYTES:
                self.flush()
            behind = self.frames.blocked
        if behind and not self._waiting:
            self._pipe.wake()

    def post_control(self, message: object) -> None:
        """Send a control message."""
        with self.lock:
            self.check()
            self.frames.send(pack_control(message, self.rank))
            self.flush()

    def converse(self, missing: Callable[[], int], seconds: float, any_frame: bool = False) -> bool:
        """Send and receive until nothing is missing.

        Args:
            missing: returns how many bytes have to arrive before this thread can go on: 1 if that is not known, and 0
                at the end. It may raise an error to end the wait.
            seconds: time after which to end the wait. It begins anew when the number changes, the hub pauses, or is
                away, if this connection outlasts that.
            any_frame: whether it begins anew with every frame that passes in either direction, too.

        Returns:
            Whether nothing is missing.

        Raises:
            SiteError: if the connection has been given up.
        """
        deadline, before = Deadline(seconds), (-1, 0)
        with self.waiting():
            while True:
                with self.lock:
                    self.transfer()
                left = missing()
                if not left:
                    return True
                self.check()
                passed = self.frames.received + self.frames.queue.acknowledged
                state = left, passed * any_frame
                if state != before or self.pauses or (self.is_away and self.outlasts_outages):
                    deadline, before = Deadline(seconds), state
                if deadline.over:
                    return False
                self._attend(left)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Keep the thread of the connection from what this thread does meanwhile, by `transfer`."""
        with self.lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self.lock:
                self._waiting -= 1
                behind = self.frames.blocked or self.expects() > KERNEL_BYTES
            if behind and not self._waiting:
                self._pipe.wake()

    def _attend(self, nbytes: int) -> None:
        """Wait for a short time until something can be sent, or so many bytes received."""
        with self.lock:
            self._end_silence()
            connection = self._connection
            held = 0.0 if connection is None else connection.held
            events = select.POLLIN | select.POLLOUT * (self.frames.blocked and not held)
            self.frames.expect(nbytes)
        if connection is None:
            time.sleep(min(_POLL_SECONDS, max(0.005, 0.01 * (time.monotonic() - self._lost_at))))
            return
        poll = select.poll()
        with suppress(OSError, ValueError):  # closed meanwhile
            poll.register(connection, events)
            poll.poll(1e3 * (min(held, _POLL_SECONDS) if held else _POLL_SECONDS))

    def _end_silence(self) -> None:
        """Give the TCP connection up if nothing has arrived for too long."""
        if self._connection is not None and time.monotonic() - self._heard > self._silence:
            self._lose(TimeoutError(f"nothing has arrived for {self._silence:g} s"))

    def transfer(self) -> None:
        """Send and receive what is possible at the moment. To be called with the lock held."""
        self.flush()
        if self._connection is None:
            return
        try:
            if self.frames.receive():
                self._heard = time.monotonic()
        except OSError as error:
            self._lose(error)
        except (MismatchError, SealingError) as error:
            self.fail(error)
        except FrameError as error:
            self.fail(SiteError(f"{self.hub} does not speak the protocol of this version: {error}"))
        self.flush()  # an acknowledgement

    def has_delivered(self) -> bool:
        """Send and receive what is possible at the moment; return whether the hub has received all that was sent."""
        with self.lock:
            self.transfer()
            connection, unsent = self._connection, self.frames.blocked or self.frames.queue.unsent_bytes
            return connection is not None and not unsent and connection.has_delivered

    def _complete(self, head: Head, body: memoryview) -> None:
        if head.kind is Kind.CONTROL:
            self.control(read_control(bytes(body), self.world_size))
        else:
            self.complete(head, body)

    def _room(self, head: Head) -> memoryview:
        if head.slot >= self.world_size:
            raise FrameError(f"a frame of slot {head.slot}: there are {self.world_size} sites")
        return memoryview(bytearray(head.length)) if head.kind is Kind.CONTROL else self.room(head)

    def flush(self) -> None:
        """Send what the kernel has room for. To be called with the lock held."""
        if self._connection is None:
            return
        try:
            self.frames.flush()
        except OSError as error:
            self._lose(error)

    # Loss and return of the connection

    def _lose(self, error: OSError) -> None:
        """Record that the connection is lost; the thread connects again."""
        self.outage, self._lost_at = tls.explain(error), time.monotonic()
        self._closed = self._closed or (self.left and self.frames.idle)
        if self._channel == "training" and not (self.left or self._closed):
            self._troubles.begin(self.hub, f"the connection to {self.hub} is lost: {self.outage}; connecting again")
        self._disconnect()
        self._pipe.wake()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self.frames.detach()
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def _dial(self, seconds: float) -> None:
        """Connect once, and go on where the last connection was lost.

        Args:
            seconds: time for each part.

        Raises:
            RefusedError: if the hub refuses this site for good.
            OSError: if the hub cannot be reached, or may accept this site later.
            FrameError: if the hub sends something that is no answer.
        """
        hello = Hello(
            VERSION,
            self._instance,
            self.position,
            self._channel,
            received=self.frames.received,
            release=own_release(),
            sites=self.world_size,
            start=self.start_terms,
        )
        try:
            connection = tls.dial(self.kit, seconds, self.address, self._turn)
        except ProxyError as error:
            if error.lasting and self._thread is None:  # later on, a proxy may be in repair
                raise RefusedError(str(error)) from None
            raise
        except RefusedError as error:
            if error.lasting or self._thread is None:
                raise
            raise ConnectionError(str(error)) from error  # the machine of the hub may be in repair, or its name
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with ExitStack() as opened:
                door = None if self.kit.policy.encrypt_local else open_door(connection)
                if door is not None:
                    opened.enter_context(door)
                    hello = replace(hello, mark=door.mark, place=door.place, secret=door.secret)
                welcome = introduce(connection, self.kit, hello, self.address, seconds, door)
            with self.lock:
                if self._closed:
                    raise OSError("closed")
                self._install(connection, welcome)
        except BaseException:
            connection.close()
            raise

    def _install(self, connection: SecureSocket, welcome: Welcome) -> None:
        if self._thread is not None and not welcome.resumed:
            self.begin_anew()
        self.frames.queue.resume(welcome.received)
        self.frames.take_over(Stream(connection), self._room)
        # A dead link is left before the hub gives this site up.
        self._silence = max(_SHORTEST_SILENCE, welcome.timeout_ms / 2e3)
        connection.give_up_after(self._silence)
        connection.limit = site_bucket(str(self.kit.folder), self.kit.policy.rate_limit)
        self._heard = time.monotonic()
        self._connection, self.outage = connection, ""
        self._troubles.end(self.hub, f"{self.hub} is connected again")
        self.flush()

    # The thread

    def _run(self) -> None:
        try:
            self._maintain()
        except Exception as error:  # no thread would connect again
            what = f"the connection to {self.hub} has failed: {type(error).__name__}: {error}"
            with self.lock:
                self.fail(error if isinstance(error, SiteError) else SiteError(what))
        if self._parting is not None:
            tls.end(self._parting)

    def _maintain(self) -> None:
        """Ping, connect again, and move what the kernel has no room for."""
        ping = Deadline(_PING_SECONDS)
        while not self.closed:
            connection = self._connection
            if connection is None:
                self._redial(lambda: self.hub_timeout, self._lost_at, (OSError,))
                continue
            held = connection.held  # bytes wait for the cap of the rate
            ready = self._poll(min(held, ping.left) if held else ping.left)
            with self.lock:
                if self._connection is None:
                    continue
                self.serve(ready)
                if held and not self._waiting:
                    self.flush()
                if ping.over:
                    ping = Deadline(_PING_SECONDS)
                    self._troubles.remind()
                    self.tick()
                    self.frames.ping()
                    self.flush()
            if ready.get(connection.fileno(), 0) & select.POLLIN:
                time.sleep(self.batch_seconds)

    def serve(self, ready: dict[int, int]) -> None:
        """Do what the thread has to do when descriptors of `watched` are ready; called with the lock held."""
        assert self._connection is not None
        events = ready.get(self._connection.fileno(), 0)
        if events & _LOST or (events and not self._waiting):
            self.transfer()

    def watched(self) -> dict[int, int]:
        """Return the events that the thread waits for, by descriptor; called with the lock held."""
        assert self._connection is not None
        events = getattr(select, "POLLRDHUP", 0)
        if not self._waiting:
            events |= select.POLLOUT * (self.frames.blocked and not self._connection.held)
            events |= select.POLLIN * (self.expects() > KERNEL_BYTES)
            self.frames.expect(1)
        return {self._connection.fileno(): events}

    def _poll(self, seconds: float) -> dict[int, int]:
        """Wait for what the thread has to do; return the events by descriptor."""
        poll = select.poll()
        with self.lock:
            if self._connection is None:
                return {}
            for descriptor, events in self.watched().items():
                poll.register(descriptor, events)
            poll.register(self._pipe, select.POLLIN)
        ready = dict(poll.poll(1e3 * seconds))
        if ready.pop(self._pipe.fileno(), 0):
            self._pipe.clear()
        return ready

    def expects(self) -> int:
        """Return how many bytes are expected."""
        return 0

    def _redial(self, seconds: Callable[[], float], since: float, errors: tuple[type[Exception], ...]) -> None:
        """Try to connect until the hub answers, or this connection is closed.

        Args:
            seconds: returns the time after which the hub is given up.
            since: when it has begun.
            errors: errors after which to connect again.

        Raises:
            SiteError: if the hub cannot be reached in time, or refuses this site.
        """
        printed = False
        while not self.closed:
            left = since + seconds() - time.monotonic()
            try:
                self._dial(min(DIAL_SECONDS, max(0.1, left)))
                return
            except errors as error:
                now = time.monotonic()
                pause = next_pause(now - since)
                if now + pause > since + seconds():
                    _log.debug("%s cannot be reached", self.hub, exc_info=error)
                    raise SiteError(f"{self.hub} cannot be reached for {seconds():g} s: {error}") from None
                self.outage = tls.explain(error)
                self._turn += 1
                self._follow_roster()
                if isinstance(error, TryAgainError):
                    if not printed:
                        print(f"dadplug: {self.hub}: {error}", file=sys.stderr, flush=True)
                    printed = True
                elif self._thread is None or self._channel == "training":
                    limit = span(seconds())
                    what = f"{self.hub} cannot be reached: {self.outage}; connecting again, for {limit} at most"
                    self._troubles.begin(self.hub, what)
                    self._troubles.remind()
            self._sleep(pause)

    def _follow_roster(self) -> None:
        """Go by the address of the hub in the kit, whose roster may be a newer one: the hub may have moved."""
        if not self._follows_roster:
            return
        try:
            roster = Roster.load(self.kit.folder)
        except (KitError, OSError):  # it is being replaced
            return
        if roster.project == self.kit.roster.project and (address := roster.address()) != self.address:
            _log.warning("the kit names another address of the hub: %s:%d, in place of %s", *address, self.hub)
            self.address = address

    def _sleep(self, seconds: float) -> None:
        """Wait, or until this connection is closed."""
        deadline = Deadline(seconds)
        while not (self.closed or deadline.over):
            with suppress(OSError, ValueError):  # closed meanwhile
                if select.select([self._pipe], [], [], deadline.left)[0]:
                    self._pipe.clear()
