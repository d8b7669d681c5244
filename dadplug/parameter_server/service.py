"""Service of the sequencer: receives contributions, passes them on to the other sites, and sends them the log.

It runs at site 0, or at the hub: there one sequencer runs for each parameter server, to which each site opens a stream.
Sites start and return in the same way at both, see `SequencerHost`.
"""

from __future__ import annotations

import hmac
import math
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, encode
from msgspec.structs import replace

from ..errors import MessageError, SequenceError, escaped
from ..exchange import Traffic
from ..exchange.handshake import listen, read_exactly, write_all
from ..support.refusals import refuse
from ..support.structs import LONGEST_TEXT, Decoded, Slot, Slots, Texts, decode
from .dealing import DEALS, Answer, OwnDealer, SharedDealer
from .sequencer import Rules, Sequencer
from .streams import HUB, Frame, FrameKind, FrameLoop

VERSION = 3  # of the messages between a site and the service, and of the frames that follow them
KEY_CHARACTERS = 32
MEMORY = 1 << 30  # bytes of a sequencer's messages at the hub
MOST_NAMES = 1 << 24  # bytes
_HEAD = struct.Struct("<4sI")
_MAGIC = b"DSEQ"
_MOST = 1 << 16  # bytes of a message
_MOST_OF_UNKNOWN = 256  # the same where the process at the other end is not known yet
_MOST_SEQUENCERS = 8
_HELLO_SECONDS = 10.0  # for the first message of a site
_MOST_EVENTS = 1000  # that are kept
_START_SECONDS = 60.0  # for the other sites, if the settings of the first one are not valid


Seconds = Annotated[float, Meta(gt=0, le=86400)]


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a sequencer, the same at all sites.

    Attributes:
        workers: ranks of the sites that contribute, in ascending order; the others receive the log.
        rules: the rules.
        deal: option of that name.
        in_trainer: whether a site that returns waits until others have begun the steps of a phase; this phase does not
            end without it.
        limit: bytes of the largest message.
        site_timeout: seconds of silence after which a site counts as lost.
        timeout: seconds that the start may take.
    """

    workers: Annotated[Slots, Meta(min_length=1)]
    rules: Rules
    deal: Annotated[str, Meta(pattern=rf"\A({'|'.join(DEALS)})\Z")]
    in_trainer: bool
    limit: Annotated[int, Meta(gt=0, le=1 << 40)]
    site_timeout: Seconds
    timeout: Seconds


class Greeting(Struct, frozen=True):
    """First message of a site to the service.

    Attributes:
        version: `VERSION` of the site.
        key: name of the parameter server, which only its sites have.
        settings: the settings, encoded; empty if the site returns.
        rank: the site, if it returns; a hub takes the one in its certificate.
    """

    version: int
    key: Annotated[str, Meta(min_length=KEY_CHARACTERS, max_length=KEY_CHARACTERS)]
    settings: bytes = b""
    rank: Slot = 0


class Verdict(Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to a `Greeting`.

    Attributes:
        problem: why the site cannot take part; empty if it can.
        names: names of the sites, by rank; none if it cannot.
    """

    problem: str
    names: Texts = ()


_SETTINGS, _GREETINGS, VERDICTS = Decoder(Settings), Decoder(Greeting), Decoder(Verdict)


def check_settings(found: bytes, world_size: int) -> Settings:
    """Return settings that were received, with types and ranges of all fields checked.

    Args:
        found: the settings, encoded.
        world_size: number of sites.

    Raises:
        MessageError: if one of them is not valid.
    """
    settings = decode(_SETTINGS, found, "message with the settings of a sequencer", MessageError)
    workers = settings.workers
    if list(workers) != sorted(set(workers)) or workers[-1] >= world_size or settings.rules.quorum > len(workers):
        raise MessageError(f"the settings of a sequencer are out of range: {settings}")
    return settings


def write_message(connected: socket.socket, message: object) -> None:
    """Send a message.

    Args:
        connected: a socket with a timeout.
        message: a struct.
    """
    body = encode(message)
    write_all(connected, _HEAD.pack(_MAGIC, len(body)) + body)


def read_message(connected: socket.socket, decoder: Decoder[Decoded], most: int = _MOST) -> Decoded:
    """Receive a message, which is not trusted.

    Args:
        connected: a socket with a timeout.
        decoder: decoder of messages of its kind.
        most: largest size in bytes.

    Raises:
        MessageError: if it is none.
        OSError: if none arrives in time.
    """
    magic, size = _HEAD.unpack(read_exactly(connected, _HEAD.size))
    if magic != _MAGIC or size > most:
        raise MessageError("what arrives is no message of a sequencer's service")
    return decode(decoder, read_exactly(connected, size), "message of a sequencer's service", MessageError)


class StateRequest(NamedTuple):
    """Request for a state.

    Attributes:
        number: its number among all requests, from 1.
        donor: the site that is asked.
        since: time of the request.
        patience: seconds until another site is asked.
    """

    number: int
    donor: int
    since: float
    patience: float


class Donors:
    """Requests for the state of present sites.

    A site that is asked answers its requests in order, at different places of its log. An answer is of use only if it
    belongs to the last request for its receiver: the log that the receiver gets begins there. A site whose program is
    held up does not answer: after some time another one is asked, and each time the next one after twice that time.

    Args:
        choose: returns the site that is to be asked among some, in ascending order.
        patience: seconds until a first request is overdue.
    """

    def __init__(self, choose: Callable[[list[int]], int], patience: float) -> None:
        self._choose, self._patience = choose, patience
        self._requests: dict[int, StateRequest] = {}  # unanswered ones, by receiver
        self._returning: set[int] = set()  # sites that have no state yet
        self._count = 0

    def ask(self, receiver: int, present: Iterable[int], now: float) -> StateRequest | None:
        """Return the request for the state of a site that is chosen; None if there is none.

        Args:
            receiver: the site that returns.
            present: the connected sites.
            now: the time.
        """
        self._returning.add(receiver)
        last = self._requests.pop(receiver, None)
        able = sorted(set(present) - self._returning)
        if not able:
            return None
        self._count += 1
        donor = self._choose([each for each in able if last is None or each != last.donor] or able)
        patience = self._patience if last is None else 2 * last.patience
        self._requests[receiver] = StateRequest(self._count, donor, now, patience)
        return self._requests[receiver]

    def overdue(self, now: float, present: Iterable[int], sends: Callable[[int], bool]) -> list[int]:
        """Return the receivers for which another site is to be asked.

        Args:
            now: the time.
            present: the connected sites.
            sends: returns whether a part of a site's state has arrived.
        """
        able = set(present) - self._returning
        late = [receiver for receiver, each in self._requests.items() if now > each.since + each.patience]
        return [receiver for receiver in late if able - {donor := self._requests[receiver].donor} and not sends(donor)]

    def answer(self, donor: int, receiver: int, number: int) -> bool:
        """Record an answer to the request of a number; return whether it is to be passed on to its receiver.

        Raises:
            ValueError: if the site was not asked.
        """
        if not 0 < number <= self._count:
            raise ValueError("it has sent its state, and was not asked for it")
        request = self._requests.get(receiver)
        valid = request is not None and (request.donor, request.number) == (donor, number)
        if valid:
            del self._requests[receiver]
        return valid

    def ready(self, site: int) -> None:
        """Record that a site that has returned has loaded the state.

        Raises:
            ValueError: if it has not returned.
        """
        if site not in self._returning:
            raise ValueError("it has not returned")
        self._returning.discard(site)

    def leave(self, site: int) -> list[int]:
        """Record that a site has left; return the sites that wait for its state."""
        self._returning.discard(site)
        self._requests.pop(site, None)
        return [receiver for receiver, each in self._requests.items() if each.donor == site]


class SequencerService(FrameLoop):
    """Sequencer with a connection to each site, in a thread of its own.

    A contribution is passed on as soon as all of it is here, before it is committed; then only the decision is missing
    at the other sites. A contribution of which a part is here when its site leaves is dropped.

    Args:
        sockets: connected sockets, by rank of the site at the other end.
        settings: the settings.
        traffic: meter of sent bytes.
        own: rank of the site that has the sequencer, which sends its state to sites that return; `HUB` where the hub
            has it: the first site that contributes does then.
        memory: bytes that messages may take here; beyond it the sites with the most of them are dropped.
        on_end: called once all sites have left.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        settings: Settings,
        traffic: Traffic,
        own: int,
        memory: float = math.inf,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        limit, silence = settings.limit, settings.site_timeout
        super().__init__("dadplug-sequencer", sockets, limit, silence, traffic, own, memory)
        workers, shared = settings.workers, settings.deal == "shared"
        self._sequencer = Sequencer(workers, settings.rules, balanced=not shared)
        self._dealer = SharedDealer(workers, settings.in_trainer) if shared else OwnDealer(workers)
        self._contributors = set(workers)
        self._connected = set(sockets)
        self._donors = Donors(self._choose_donor, silence / 2 if own == HUB else math.inf)
        self._on_end = on_end
        self._resumed_at: int | None = None  # epochs of the checkpoint that the sites have loaded
        self._in_trainer = settings.in_trainer
        self._trains = False  # whether a site has begun the steps of the phase; of interest in trainers
        self._waiting: list[int] = []  # sites that are to return in the next phase of steps
        self._open: dict[tuple[int, int], Frame] = {}  # contributions that are not decided on
        self._ends: dict[int, Frame] = {}  # of sites that have ended the phase
        self._left: dict[int, Frame] = {}
        self.start()

    # Calls of the thread

    def heartbeat(self) -> bytes:
        return encode(self._sequencer.awaited)

    def on_frames(self, frames: list[tuple[int, Frame]]) -> None:
        self._sequencer.advance(time.monotonic())
        for site, frame in frames:
            if site not in self._connected:
                continue
            try:
                self._handle(site, frame)
            except ValueError as error:
                self._leave(site, f"the sequencer has refused it: {error}")
        self._decide()

    def on_lost(self, site: int, error: Exception) -> None:
        self._leave(site, str(error))
        self._decide()

    def on_due(self) -> float | None:
        """Make a commit that has waited for others long enough; return the time until which the next one waits."""
        for receiver in self._donors.overdue(time.monotonic(), self._connected, self._sends_state):
            self._send_state(receiver)
        due = self._sequencer.due
        if due is not None and (now := time.monotonic()) >= due:
            self._sequencer.advance(now)
            self._decide()
        return self._sequencer.due

    def on_adopted(self, site: int) -> None:
        """Let a site return now, or in the next phase of steps."""
        if site not in self._contributors:
            self.network.drop(site)
            return
        self._waiting.append(site)
        if self._trains or not self._in_trainer:
            self._admit_waiting()

    def held_bytes(self) -> int:
        """Return the bytes of the messages that are kept for sites that return."""
        return sum(len(frame.body) for frame in [*self._open.values(), *self._ends.values()])

    # Messages

    def _handle(self, site: int, frame: Frame) -> None:
        number = frame.number
        match frame.kind:
            case FrameKind.ALIVE:
                pass
            case FrameKind.BYE:
                self._leave(site, escaped(bytes(frame.body[:LONGEST_TEXT]).decode(errors="replace")))
            case FrameKind.SNAPSHOT:
                if self._donors.answer(site, number, frame.base) and number in self._connected:
                    self.post(number, frame)
            case FrameKind.EPOCHS:
                self._resume(number)
            case _ if site not in self._contributors or frame.site != site:
                raise SequenceError(f"site {site} has sent a {frame.kind.name} of site {frame.site}")
            case FrameKind.CONTRIBUTION:
                self._sequencer.contribute(site, number, frame.base, frame.reached, frame.samples)
                self._open[site, number] = frame
                self._send_all(frame, besides=site)
                self._answer(site, self._dealer.use(site, frame.used))
            case FrameKind.FINISH:
                self._sequencer.finish(site)
                self._ends[site] = frame
                self._send_all(frame, besides=site)
                self._answer(site, self._dealer.finish(site))
            case FrameKind.REACHED:
                self._sequencer.reach(site, frame.reached)
            case FrameKind.READY:
                self._donors.ready(site)
                self.post(site, Frame(FrameKind.READY, site, self._join(site)))
            case FrameKind.TRAINS:
                self._admit_waiting()
            case _:
                self._deal(site, frame)

    def _resume(self, epochs: int) -> None:
        """Go on with the number of epochs in the checkpoint that a site has loaded."""
        if self._resumed_at is None and not self._dealer.epochs:
            self._resumed_at = self._dealer.epochs = epochs
        elif epochs != self._resumed_at:
            raise SequenceError(f"it has loaded a checkpoint of epoch {epochs}, and other sites go on with another one")

    def _deal(self, site: int, frame: Frame) -> None:
        """Pass a message to the dealer."""
        match frame.kind:
            case FrameKind.BEGIN:
                if frame.samples:
                    self._sequencer.declare(site, frame.samples)
                self._answer(site, self._dealer.begin(site, frame.number, frame.used))
                if self._in_trainer:
                    self._admit_waiting()
            case FrameKind.DRAW:
                self._answer(site, self._dealer.draw(site, bool(frame.used)))
            case FrameKind.USED:
                self._answer(site, self._dealer.use(site, frame.used))
            case FrameKind.PASSED:
                self._answer(site, self._dealer.passed(site, frame.number))
            case FrameKind.ORDER:
                self._dealer.order(frame.number, bytes(frame.body))
            case _:
                raise SequenceError(f"a site sends no {frame.kind.name}")

    def _answer(self, asking: int, answers: list[Answer]) -> None:
        """Send the dealer's answers to a message of one site, which is idle if its own depends on other sites."""
        if self._dealer.makes_wait(asking):
            self._sequencer.idle(asking)
        for site, deal, number, resumes in answers:
            if resumes:
                self._sequencer.resume(site)
            self.post(site, Frame(FrameKind.DEAL, site, number, used=deal))

    def _decide(self) -> None:
        while (decision := self._sequencer.decide()) is not None:
            self._send_all(Frame(FrameKind.DECISION, number=self._dealer.epochs, body=encode(decision)))
            for key in decision.keys:
                del self._open[key]
            if decision.over:
                self._ends.clear()
                self._trains = False
                self._dealer.end_phase(self._sequencer.present)

    def _send_all(self, frame: Frame, besides: int | None = None) -> None:
        for peer in list(self._connected):
            if peer != besides:
                self.post(peer, frame)

    # Sites that leave and return

    def _leave(self, site: int, reason: str) -> None:
        if site in self._waiting:
            self._waiting.remove(site)
        if site not in self._connected:
            return
        self._left[site] = Frame(FrameKind.LEFT, site, body=reason.encode())
        self._send_all(self._left[site])  # to that site, too, if it can be reached
        self._connected.discard(site)
        self.network.drop(site)
        if site in self._contributors:
            self._sequencer.leave(site)
            self._answer(site, self._dealer.finish(site))
        for receiver in self._donors.leave(site):
            self._send_state(receiver)
        if not self._connected:
            for each in self._waiting:
                self.network.drop(each)
            self._waiting.clear()
            on_end, self._on_end = self._on_end, lambda: None
            on_end()

    def _admit_waiting(self) -> None:
        """Begin the return of the sites that wait for it, if they can take part in the present phase."""
        self._trains = True
        while self._waiting and (self._dealer.has_for_another or not self._in_trainer):
            site = self._waiting.pop(0)
            if self._in_trainer:  # the phase has to wait for it
                self._join(site)
                self._sequencer.idle(site)
            self._left.pop(site, None)
            self._send_all(Frame(FrameKind.RETURNED, site))
            self._connected.add(site)
            self._send_state(site)

    def _join(self, site: int) -> int:
        """Make a site one that contributes; return the number of its next contribution."""
        self._dealer.join(site)
        return self._sequencer.join(site)

    def _send_state(self, site: int) -> None:
        """Let a site that returns begin with the present place of the log, and with the state of another one there."""
        request = self._donors.ask(site, self._connected, time.monotonic())
        if request is None:
            self._leave(site, "it has returned, and no other site is left whose state it could take over")
            return
        self.post(site, Frame(FrameKind.RETURNED, site))
        for frame in [*self._open.values(), *self._ends.values(), *self._left.values()]:
            self.post(site, frame)
        self.post(request.donor, Frame(FrameKind.SNAPSHOT, request.donor, site, request.number))

    def _sends_state(self, site: int) -> bool:
        frame = self.arriving(site)
        return frame is not None and frame.kind is FrameKind.SNAPSHOT

    def _choose_donor(self, able: list[int]) -> int:
        if self._own != HUB:
            return self._own
        awaited = self._sequencer.awaited  # others wait for them, so that they may be slow to answer
        return min(able, key=lambda site: (site not in self._contributors, site in awaited, site))


class _Start:
    """Start of one sequencer, for which sites come in one by one.

    Args:
        first: the first site.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.settings: dict[int, Settings] = {}  # by rank; sites without valid ones have none
        self.sockets: dict[int, socket.socket] = {}
        self.problem = ""


class SequencerHost:
    """Service that runs sequencers, at a hub (`dadplug.hub.server.session.StreamService`) or at a site.

    The first message on a stream names the parameter server by a key that only its sites have. If it is a start, the
    sequencer starts once each site has sent one with the same settings; otherwise all sites get the same error. If it
    is a return, the stream replaces that of a lost process of the same site. At a hub, a site's rank is what its
    certificate says. A sequencer ends with the last site that leaves. Types and ranges of all that a site sends are
    checked.

    Args:
        names: names of the sites, by rank.
        memory: bytes that the messages of one sequencer may take.
        own: rank of the site that has the sequencers; `HUB` where a hub has them.
        traffic: meter of the bytes that sequencers send; by default one of its own for each.
    """

    def __init__(
        self, names: Sequence[str], memory: float = MEMORY, own: int = HUB, traffic: Traffic | None = None
    ) -> None:
        self._names = tuple(names)
        self._memory, self._own, self._traffic = memory, own, traffic
        self._place = "the hub" if own == HUB else f"site {own}"
        self._listener: socket.socket | None = None
        self._changed = threading.Condition()
        self._starts: dict[str, _Start] = {}
        self._running: dict[str, SequencerService] = {}
        self._events: deque[str] = deque(maxlen=_MOST_EVENTS)
        self._closed = False

    def accept(self, slot: int | None, connected: socket.socket) -> None:
        """Take a stream that a site has opened; return at once.

        Args:
            slot: rank of the site; None for a process that has to show by the key that it is one, and returns.
            connected: the stream.
        """
        threading.Thread(target=self._greet, args=(slot, connected), name="dadplug-start", daemon=True).start()

    def listen(self) -> str:
        """Take sites that return on a port from now on; return its ``HOST:PORT``, or nothing where none can listen."""
        self._listener = listen()
        if self._listener is None:
            return ""
        threading.Thread(target=self._listen, args=(self._listener,), name="dadplug-returning", daemon=True).start()
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def _listen(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                self.accept(None, listener.accept()[0])

    def service(self, key: str) -> SequencerService:
        """Return the service of a sequencer that has started."""
        with self._changed:
            return self._running[key]

    def begin(self, names: Sequence[str]) -> None:
        """Take the names of the sites of the next run, by rank."""
        with self._changed:
            self._names = tuple(names)

    def hold(self, held: bool) -> None:
        """Let no silence of sites count while none can be heard, or they are on their way back."""
        for service in list(self._running.values()):
            service.network.held = held

    def events(self) -> Iterator[str]:
        """Yield what has happened since the last call."""
        while self._events:
            yield self._events.popleft()

    def close(self) -> None:
        """End all sequencers: the hub ends, or the site leaves, and the streams are closed."""
        with self._changed:
            self._closed = True
            services = [*self._running.values()]
            self._changed.notify_all()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
            self._listener.close()
        for service in services:
            service.close()

    def _greet(self, slot: int | None, connected: socket.socket) -> None:
        known = slot is not None
        name = "a process" if slot is None else self._names[slot]
        try:
            connected.settimeout(_HELLO_SECONDS)
            greeting = read_message(connected, _GREETINGS, _MOST if known else _MOST_OF_UNKNOWN)
            if greeting.version != VERSION:
                raise MessageError(
                    f"this site speaks version {greeting.version} of the protocol of parameter servers, {self._place} "
                    f"version {VERSION}: upgrade one"
                )
            rank = greeting.rank if slot is None else slot
            if greeting.settings and known:
                self._take(rank, greeting.key, greeting.settings, connected)
            else:
                self._take_back(rank, greeting.key, connected)
        except MessageError as error:
            self._refuse([connected], str(error), f"{name}: no sequencer: {error}")
        except OSError:
            connected.close()
        except Exception as error:  # a fault while one site is served ends its stream
            for line in traceback.format_exception(error):
                self._events.append(f"fault of the hub: {name}: {line.rstrip()}")
            connected.close()

    def _take_back(self, rank: int, key: str, connected: socket.socket) -> None:
        """Take a site that returns."""
        with self._changed:
            same = (each for known, each in self._running.items() if hmac.compare_digest(known.encode(), key.encode()))
            service = next(same, None)
        if service is None or rank >= len(self._names):
            raise MessageError(f"there is no such training at {self._place}, it may have ended")
        write_message(connected, Verdict("", self._names))
        self._events.append(f"{self._names[rank]} returns to its parameter server")
        service.adopt(rank, connected)

    def _take(self, slot: int, key: str, settings: bytes, connected: socket.socket) -> None:
        """Take a site that starts; the first one waits for the others, and starts the sequencer."""
        with self._changed:
            start = self._starts.get(key)
            if start is None:
                refuse(
                    (key in self._running, "this parameter server has been started before"),
                    (
                        len(self._running) + len(self._starts) >= _MOST_SEQUENCERS,
                        f"the hub serves {_MOST_SEQUENCERS} parameter servers already: it takes no more",
                    ),
                    error=MessageError,
                )
                start = self._starts[key] = _Start(slot)
            if slot in start.sockets:
                raise MessageError("this site takes part already")
            start.sockets[slot] = connected
            try:
                start.settings[slot] = check_settings(settings, len(self._names))
            except MessageError as error:
                start.problem = start.problem or f"{self._names[slot]}: {error}"
            self._changed.notify_all()
            if start.first != slot:
                return
            seconds = start.settings[slot].timeout if slot in start.settings else _START_SECONDS
            self._changed.wait_for(lambda: self._closed or len(start.sockets) == len(self._names), seconds)
            del self._starts[key]
            missing = [name for rank, name in enumerate(self._names) if rank not in start.sockets]
            if missing:
                start.problem = f"{', '.join(missing)} has not started the parameter server within {seconds:g} s"
            start.problem = start.problem or self._difference(start.settings)
            if not start.problem:
                self._running[key] = self._begin(key, start)
        if start.problem:
            self._refuse(start.sockets.values(), start.problem, f"no sequencer: {start.problem}")

    def _begin(self, key: str, start: _Start) -> SequencerService:
        for connected in start.sockets.values():
            with suppress(OSError):  # the service finds out that the site is lost
                write_message(connected, Verdict("", self._names))
        settings = start.settings[start.first]
        names = ", ".join(self._names[rank] for rank in settings.workers)
        self._events.append(f"a sequencer orders the contributions of {names}")
        settings = replace(settings, limit=min(settings.limit, self._memory))
        traffic = self._traffic or Traffic()
        return SequencerService(start.sockets, settings, traffic, self._own, self._memory, lambda: self._end(key))

    def _difference(self, settings: dict[int, Settings]) -> str:
        """Return the first setting in which two sites differ; empty if none does."""
        (first, one), *others = sorted(settings.items())
        for rank, other in others:
            for field in Settings.__struct_fields__:
                here, there = getattr(one, field), getattr(other, field)
                if here != there:
                    found = f"{field} is {here} at {self._names[first]}, and {there} at {self._names[rank]}"
                    return f"the sites start a parameter server with different settings: {found}"
        return ""

    def _end(self, key: str) -> None:
        """Remove a sequencer, all of whose sites have left; called in its thread."""
        with self._changed:
            service = self._running.pop(key)
        self._events.append("a sequencer has ended: all of its sites have left")
        service.close()

    def _refuse(self, sockets: Iterable[socket.socket], problem: str, event: str) -> None:
        """Send sites the reason why there is no sequencer, and close their streams."""
        self._events.append(event)
        for connected in sockets:
            with suppress(OSError):
                write_message(connected, Verdict(problem[:LONGEST_TEXT]))
            connected.close()
