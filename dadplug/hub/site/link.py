"""Link of a site to its hub, over which training exchanges messages with the other sites.

Messages are matched by sender and exchange. The number of an exchange is that of its channel, an index of the transport
or process group in the order in which a site makes them, and its number there; all sites make theirs in one order.

Where sites may leave, messages belong to rounds. `RoundClient` ends them, and exchanges the states of sites that join.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial

from ...errors import DroppedError, FrameError, MismatchError, SealingError, SiteError
from ...exchange import DEFAULT_TIMEOUT
from ...exchange.calls import ASK_SECONDS
from ...exchange.handshake import Deadline
from ...exchange.rounds import Requirements
from ...exchange.status import ENDED, add_announcer, remove_announcer
from ...support.logs import get_logger
from ..pki.kits import Kit
from ..secure.epochs import AGREEMENT, LinkSealing
from ..wire.messages import (
    ALL_SITES,
    FRESH,
    SHORT_PIECE_BYTES,
    Accept,
    Arrived,
    Close,
    Continue,
    Drop,
    Grow,
    Head,
    Join,
    KeyMessage,
    Kind,
    Pause,
    Position,
    Repeat,
    Resume,
    RunReport,
    SendState,
    Start,
    StartTerms,
    pack_control,
)
from ..wire.streams import return_seconds
from .connection import KERNEL_BYTES, HubConnection
from .inbox import CHANNEL_BITS, MAX_EARLY_BYTES, Continuation, Inbox, Incoming, check_calls
from .rounds import RoundClient

_NOTICE_SECONDS = 5.0  # after which a site prints for which sites it waits
_log = get_logger(__name__)
_ENDED = "its program has ended"
NEVER_CONNECTED = "it has never connected"
PROVISIONAL = Requirements(1, 10_000, provisional=True)  # at the set-up of a run that may start without all sites


class HubLink(HubConnection):
    """Link of one site. Made by `open`.

    It outlives a hub that is restarted, or has given this site up. After `Hello` with its position, a site sends a
    `RunReport`. It sends no other messages until the hub lets the run go on, but keeps them. If the hub lets the site
    join instead, as one that has started again, all that belongs to the open step is forgotten, and `RoundClient`
    raises a `DroppedError` where the program waits for the step.

    Attributes:
        inbox: messages that arrive.
        sealing: encryption of messages for the other sites, so that the hub cannot read them.
        step: number of the open step.
        gone: reasons of the sites that are lost, by slot, in the order in which they were lost.
        rounds: rounds of the link.
        continuation: what a hub that is restarted needs of the messages.
    """

    def __init__(self, kit: Kit, address: tuple[str, int] | None = None, start: StartTerms = ALL_SITES) -> None:
        super().__init__(kit, "training", address)
        self.start_terms = start
        self.step = 1
        self.gone: dict[int, str] = {}
        self.inbox = Inbox(self.names, self.rank)
        self._started = False
        self._first_sites: list[int] = []  # with which the run has started
        self.continuation = Continuation()
        self.sealing = LinkSealing(kit, self.names)
        if self.sealing.required:
            self.frames.seal = self.sealing.frames
        self._choose_piece_bytes()
        self._pause = ""
        self._channels = 0
        self.rounds = RoundClient(self)
        self.inbox.last_step = lambda: self.step if self.rounds.elastic else None

    def _choose_piece_bytes(self) -> None:
        if self.world_size > 2 or self.kit.roster.hub_at is None:
            # Payloads take one line to the hub and another one from it, which is idle until the first piece is whole.
            # Smaller pieces cost processor time.
            self.frames.payload_bytes = SHORT_PIECE_BYTES

    @classmethod
    def open(
        cls,
        kit: Kit,
        timeout: float = DEFAULT_TIMEOUT,
        address: tuple[str, int] | None = None,
        start: StartTerms = ALL_SITES,
    ) -> HubLink:
        """Connect to the hub, and wait until training starts.

        Args:
            kit: kit of this site.
            timeout: seconds for all of it.
            address: host and port of the hub; None for those of the kit.
            start: when it may start without all sites.

        Raises:
            KitError: if the kit's certificate is not valid at present.
            RefusedError: if the hub refuses this site.
            SealingError: if messages have to be sealed, and the sites cannot agree on keys.
            SiteError: if the hub cannot be reached, or a site does not come, in time.
        """
        kit.check_dates()
        deadline = Deadline(timeout)
        link = cls(kit, address, start)
        try:
            link.start(timeout)
            link._wait_for_start(deadline, timeout)
            if link.sealing.required and not link.rounds.joins:
                link.sealing.negotiate(kit, link._first_sites, partial(link._swap, timeout))
            add_announcer(link._announce)
        except BaseException:
            link.close(0.2)
            raise
        return link

    def _wait_for_start(self, deadline: Deadline, timeout: float) -> None:
        since = time.strftime("%H:%M:%S")
        while not self.converse(lambda: int(not self._started), min(_NOTICE_SECONDS, deadline.left)):
            state = self.hub_state or self._pause or f"{self.hub} has not said for whom it waits"
            if deadline.over:
                raise SiteError(f"training has not started within {timeout:g} s: {state}")
            print(f"dadplug: since {since}: {state}", file=sys.stderr, flush=True)

    def _swap(self, timeout: float, exchange: int, own: bytes, nbytes: int) -> dict[int, bytes]:
        """Send a message to all other sites with which the run starts, and return theirs by slot."""
        found = {slot: bytearray(nbytes) for slot in self._first_sites if slot != self.rank}
        incoming = [self.expect(slot, exchange, memoryview(buffer)) for slot, buffer in found.items()]
        self.send(exchange, memoryview(own))
        self.wait(incoming, timeout)
        return {slot: bytes(buffer) for slot, buffer in found.items()}

    def name(self, slot: int) -> str:
        """Return a site's name for messages."""
        return f"site {slot} ({self.names[slot]})"

    # Frames that arrive

    def room(self, head: Head) -> memoryview:
        if head.kind in (Kind.PAYLOAD, Kind.STATE):
            if head.slot == self.rank:
                raise FrameError("a frame of this site itself")
            if head.to not in (0, self.rank + 1):
                raise FrameError(f"a {head.kind.name} frame for slot {head.to - 1}")
        elif head.kind is not Kind.SUM or head.slot:
            raise FrameError(f"a {head.kind.name} frame of slot {head.slot} is not expected")
        void = head.kind is Kind.SUM and self.gone  # a sum that leaves out a lost site
        outdated = self.continuation.repeats(head) or self.rounds.states.is_outdated(head)
        if outdated or self.sealing.covers(head) or void:
            return memoryview(bytearray(head.length))
        return self.inbox.room(head)

    def complete(self, head: Head, body: memoryview) -> None:
        if head.kind is Kind.ELSEWHERE:
            if head.slot == self.rank or head.to in (0, self.rank + 1) or head.to > self.world_size:
                raise FrameError(f"a {head.kind.name} frame of slot {head.slot} for slot {head.to - 1}")
            head = head._replace(kind=Kind.PAYLOAD)
        if head.kind not in (Kind.PAYLOAD, Kind.SUM, Kind.STATE):
            raise FrameError(f"a {head.kind.name} frame is not expected")
        void = self.continuation.repeats(head) or (head.kind is Kind.SUM and self.gone)
        if head.kind is not Kind.STATE:
            self.continuation.count(head)
        if void:
            return
        if self.sealing.covers(head):
            try:
                opened = self.sealing.open(head, body)
            except SealingError as error:
                if not self.rounds.elastic:
                    raise
                self.rounds.refuse(error)
                return
            for frame in opened:
                self._take_opened(*frame)
        elif not self.rounds.states.is_outdated(head) and (len(body) or not head.to):
            self._take_message(head, body)

    def _take_message(self, head: Head, body: memoryview) -> None:
        if head.kind is Kind.PAYLOAD and not self.rounds.takes(head):
            return
        self.inbox.complete(head, body)

    def _take_opened(self, head: Head, content: bytes) -> None:
        if not self.rounds.states.is_outdated(head):
            body = self.inbox.room(head)
            body[:] = content
            self._take_message(head, body)

    def post_all(self, messages: Iterable[object]) -> None:
        """Send control messages. To be called with the lock held."""
        for message in messages:
            self.frames.send(pack_control(message, self.rank))

    def control(self, message: object) -> None:
        rounds = self.rounds
        match message:
            case Start(position=position):
                if self._started and not (rounds.joins or rounds.dropped):
                    raise FrameError("it starts a training that has begun: ask those who run the hub")
                self._start_without(message.absent)
                self._started = self.outlasts_outages = True
                self.step = position.step + 1
                self._begin(position)
                self._set_pause("")
                if rounds.joins or rounds.dropped:
                    self.fail(SiteError("the run that this site was to join has ended"))
            case Pause(reason=reason):
                self._set_pause(reason)
            case Resume():
                self._set_pause("")
            case Grow():
                self._grow(message)
            case KeyMessage():
                opened, due = self.sealing.take(message) if message.slot != self.rank else ([], [])
                self.post_all(due)
                for pair in opened:
                    self._take_opened(*pair)
            case Join(slot=slot):
                is_new = self.gone.pop(slot, "") == NEVER_CONNECTED
                self._troubles.end(slot, f"{self.name(slot)} {'has joined' if is_new else 'is back'}")
                rounds.joined.add(slot)
                if slot != self.rank:
                    self.post_all(self.sealing.join(slot, message.step))
                elif rounds.joins:
                    self.sealing.enter([each for each in range(self.world_size) if each not in {slot, *self.gone}])
            case Drop():
                self._lose_site(message)
            case Accept(needs_state=True):
                self._be_accepted(message.position)
            case Arrived():
                rounds.states.take_arrived(message)
            case SendState():
                rounds.states.take(message)
                if message.joiner == self.rank:
                    self.inbox.forget_states()
            case Close():
                self.sealing.close(message.step, message.contributors)
                self.continuation.close(message, frozenset(rounds.joined))
                rounds.take_close(message)
            case Repeat():
                for frame in self.continuation.repeat(message):
                    self.frames.send(frame)
            case Continue():
                self.frames.release(self.continuation.go_on(message))

    def _start_without(self, absent: Sequence[int]) -> None:
        """Take the sites without which training starts, if what this site states on the start allows that."""
        if absent and (self.rank in absent or not 0 < self.start_terms.sites <= self.world_size - len(absent)):
            names = ", ".join(map(self.name, absent))
            raise FrameError(f"it starts training without {names}, and this site states {self.start_terms}")
        self._first_sites = [slot for slot in range(self.world_size) if slot not in absent]
        self.gone.update(dict.fromkeys(absent, NEVER_CONNECTED))
        for slot in absent:
            self._troubles.begin(slot, f"training goes on without {self.name(slot)}, which has never connected")

    def _set_pause(self, reason: str) -> None:
        """Record why the hub lets all sites wait; empty where it does not any more."""
        if self.rounds.elastic and reason:
            self._troubles.begin("pause", f"training pauses: {reason}", changes=True)
        elif self.rounds.elastic:
            self._troubles.end("pause", "training goes on")
        self._pause = reason
        self.pauses = self.rounds.elastic and bool(reason)

    def _grow(self, message: Grow) -> None:
        """Take the names of all sites, if there are further ones."""
        before, new = self.world_size, message.names[self.world_size :]
        if not new:
            return
        if list(message.names[:before]) != self.names:
            raise FrameError("it names other sites than those that this site knows")
        if self.rounds.elastic and not self.rounds.joins and message.step <= self.rounds.closed:
            raise FrameError(f"it announces new sites in round {message.step}, which is closed")
        self.names += new
        self.world_size = len(self.names)
        for slot in range(before, self.world_size):
            self.gone[slot] = "it has not joined yet"
        self.rounds.sizes.append((message.step, self.world_size))
        self._choose_piece_bytes()
        if self.rounds.joins and self.rounds.requirements is not None and not self.sealing.complete:
            self.rounds.ask()  # an offer names all sites
        _log.info("the project has new sites: %s; %d in all", ", ".join(new), self.world_size)

    def _lose_site(self, message: Drop) -> None:
        slot, reason, rounds = message.slot, message.reason, self.rounds
        if slot == self.rank:
            if not self.left:
                self._lose_place(reason or _ENDED, for_good=not message.step)
        elif self._started:
            self.gone.setdefault(slot, reason or _ENDED)
            self.sealing.leave(slot)
            if reason:
                self._troubles.begin(slot, f"{self.name(slot)} is lost: {reason}")
            self.continuation.forget(slot)
            if rounds.elastic:
                self.inbox.forget(slot, message.step)
        rounds.leave(slot)

    def _be_accepted(self, position: Position | None) -> None:
        """Wait for the state of another site, at a position once this site is admitted."""
        if self._started and not self.rounds.joins:
            self._lose_place(f"its connection was lost ({self.outage or 'for too long'})", for_good=False)
        self._started = self.outlasts_outages = True
        self.rounds.await_state(position)
        if position is not None:
            self._begin(position)
            self.inbox.clear()  # of what a hub before has sent of the round in which this site was to join
            self.gone.clear()  # those that are absent are announced next
            self.step = position.step + 1

    def tick(self) -> None:
        self.post_all(self.sealing.check_kit(self.rounds.elastic))

    # A hub that is restarted, or has given this site up

    def _begin(self, position: Position) -> None:
        """Begin at a position."""
        self.continuation = Continuation(position)
        self.frames.kept = self.continuation.kept
        if self.rounds.elastic:
            self.continuation.kept.limit = None  # every round is closed, so that two are kept at most

    @property
    def position(self) -> Position:
        fresh = self.rounds.joins or self.rounds.dropped or not self._started
        return FRESH if fresh else self.continuation.position

    def begin_anew(self) -> None:
        rounds, continuation = self.rounds, self.continuation
        takes_part = self.position != FRESH
        if self.left or (takes_part and continuation.position.step < continuation.kept.first):
            super().begin_anew()
        self.frames.begin_anew(held=takes_part or bool(rounds.dropped))
        self._set_pause("")
        if takes_part:
            self.frames.send(pack_control(self._report(), self.rank))
        rounds.begin_anew()

    def _report(self) -> RunReport:
        rounds, found = self.rounds, self.continuation
        step = found.position.step
        return RunReport(
            found.run,
            *(found.position, found.before, found.contributors, found.joined),
            tuple(self.gone),
            *(found.counts(step, self.world_size), found.counts(step + 1, self.world_size)),
            rounds.listens,
            rounds.requirements or (PROVISIONAL if self.start_terms.sites else Requirements(0, 0)),
            round(1e3 * return_seconds(time.monotonic() - self._lost_at)),
        )

    def _lose_place(self, reason: str, for_good: bool) -> None:
        """Record that the hub has dropped this site, which may join again if the sites have agreed on that."""
        if for_good or not (self.rounds.elastic and self.rounds.rejoins):
            advice = "" if for_good else "; start its program again, and it joins the others"
            self.fail(SiteError(f"{self.hub} has given this site up: {reason}{advice * self.rounds.elastic}"))
            return
        self.rounds.dropped = self.rounds.dropped or reason
        self.frames.held, self.frames.kept = True, None

    # Messages

    def new_channel(self) -> int:
        """Return the first number of the exchanges of a new channel; all sites must make theirs in one order."""
        first = self._channels << CHANNEL_BITS
        if first >= AGREEMENT:
            raise RuntimeError(f"more than {self._channels} channels have been opened")
        self._channels += 1
        return first

    def send(
        self,
        exchange: int,
        content: memoryview,
        kind: Kind = Kind.PAYLOAD,
        tag: int = 0,
        slot: int | None = None,
        soon: bool = False,
        to: int = 0,
    ) -> None:
        """Send a message; return at once. The content is copied, and an empty one is not sent.

        Args:
            exchange: number of the exchange.
            content: the message, of bytes.
            kind: kind of its frames.
            tag: their tag, see `dadplug.hub.wire.messages.Head`.
            slot: slot of the receiver, for the kinds that name it.
            soon: whether it may wait for the next message, see `post`.
            to: 1 more than the slot of the only site that a payload is for; 0 for all.

        Raises:
            SiteError: if the link has failed.
            MismatchError: if the hub has given the sites different information.
        """
        if kind is Kind.PAYLOAD:
            tag = self.rounds.mark()
        self.rounds.check()
        if len(content) and not (kind is Kind.PAYLOAD and self.rounds.behind):
            sender = self.rank if slot is None else slot
            self.post(Head(kind, sender, self.step, exchange, tag=tag, to=to), content, soon)

    def expect(
        self, slot: int, exchange: int, buffer: memoryview, kind: Kind = Kind.PAYLOAD, alone: bool = False
    ) -> Incoming:
        """Expect a message.

        Args:
            slot: the sender; 0 for a sum.
            exchange: number of the exchange.
            buffer: room for it, of bytes, which has to stay until it has arrived.
            kind: kind of its frames.
            alone: whether it is for this site alone; it is not taken from a message for all, nor the other way round.

        Returns:
            The message, for `wait`.

        Raises:
            SiteError: if the link has failed.
            MismatchError: if the site has sent another message.
        """
        with self.lock:
            self.check()
            if kind is Kind.PAYLOAD and self.rounds.lacks(slot):
                return Incoming((kind, slot, exchange, alone), buffer)
            try:
                return self.inbox.expect((kind, slot, exchange, alone), buffer)
            except MismatchError as error:
                self.fail(error)
                raise

    def wait(self, incoming: Sequence[Incoming], timeout: float) -> None:
        """Wait until messages have arrived. After an error that is not the link's own, it may be called again.

        Args:
            incoming: the messages.
            timeout: seconds without anything of them after which their senders count as lost.

        Raises:
            SiteError: if a site or the hub is lost or silent.
            MismatchError: if the sites do not run the same program.
        """
        missing = [message for message in incoming if not message.done]
        patience = Deadline(min(ASK_SECONDS, timeout))

        def left() -> int:
            missing[:] = [message for message in missing if not message.done]
            if missing:
                self._check_gone(missing)
                check_calls(self, patience)
            return sum(len(message.buffer) - message.received for message in missing)

        if missing and not self.converse(left, timeout):
            self._raise_silence(missing, timeout)

    def cancel(self, incoming: Sequence[Incoming]) -> list[Incoming]:
        """Expect messages no longer; return those that have not arrived."""
        missing = [message for message in incoming if not message.done]
        with self.lock:
            for message in missing:
                self.inbox.cancel(message)
        return missing

    def _check_gone(self, missing: Sequence[Incoming]) -> None:
        """Raise an error if a message will never arrive, which names the site that was lost first."""
        self.check()
        self.rounds.check()
        if self.rounds.dropped:
            raise DroppedError(self.rounds.dropped)
        found = self.first_lost()
        if found and any(message.key[0] is Kind.SUM or message.key[1] in self.gone for message in missing):
            raise found

    def await_loss(self, seconds: float) -> SiteError | None:
        """Wait until the hub announces that a site is lost.

        Args:
            seconds: time to wait, at most.

        Returns:
            An error that names the site; None if the hub announces nothing in time.

        Raises:
            SiteError: if the link has failed.
        """
        self.converse(lambda: int(not self.gone), seconds)
        return self.first_lost()

    def first_lost(self) -> SiteError | None:
        """Return an error that names the site that was lost first, else one that has never connected, or None."""
        gone = dict(self.gone)
        lost = {slot: reason for slot, reason in gone.items() if reason != NEVER_CONNECTED}
        for slot, reason in (lost or gone).items():
            return SiteError(f"{self.name(slot)} is gone: {reason}")
        return None

    def _raise_silence(self, missing: Sequence[Incoming], timeout: float) -> None:
        if state := self.hub_state:
            raise SiteError(f"nothing has arrived for {timeout:g} s: {state}")
        slots = sorted({message.key[1] for message in missing if message.key[0] is Kind.PAYLOAD})
        names = ", ".join(map(self.name, slots)) or "one of the other sites"
        raise SiteError(
            f"{names} {'have' if len(slots) > 1 else 'has'} not answered for {timeout:g} s, though the hub is "
            "connected to it: it is stopped or busy. A site that may be this slow needs a larger timeout="
        )

    def expects(self) -> int:
        # A site that is late must not leave in the hub's queue what the others go on to send, and one that is held has
        # to read the word of a new hub before it waits for others.
        reads = self.frames.held or (self.rounds.reads and self.inbox.early_bytes < MAX_EARLY_BYTES // 2)
        return self.inbox.expected_bytes + (2 * KERNEL_BYTES if reads else 0)

    # Steps, and the end

    def end_step(self) -> None:
        """Tell the hub that this site's part of the open step is over; no site waits for that."""
        self.post(Head(Kind.END, self.rank, self.step), b"", soon=True)
        self.step += 1

    def _announce(self, reason: str, keep: bool) -> None:
        """Take this process's exit reason."""
        self.leave("" if reason == ENDED else reason)  # a later reason finds the link closed

    def close(self, seconds: float = 1.0) -> None:
        """Leave, unless that has been done, and close the link. May be called twice."""
        remove_announcer(self._announce)
        self.forget_hub_timeout()
        self.leave("")
        super().close(seconds)
