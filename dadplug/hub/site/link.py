"""Link of a site to its hub, over which training exchanges messages with the other sites.

Messages are matched by sender and exchange. The number of an exchange is that of its channel, an index of the transport
or process group in the order in which a site makes them, and its number there; all sites make theirs in one order.

Where sites may leave, messages belong to rounds. `RoundClient` ends them, and exchanges the states of sites that join.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ...errors import DroppedError, FrameError, MismatchError, SealingError, SiteError
from ...exchange import DEFAULT_TIMEOUT
from ...exchange.calls import ASK_SECONDS
from ...exchange.handshake import Deadline
from ...exchange.status import ENDED, add_announcer, remove_announcer
from ...exchange.transport import Requirements
from ...logs import get_logger
from ..pki.kits import Kit
from ..secure.epochs import AGREEMENT, LinkSealing
from ..wire.messages import (
    FRESH,
    IDLE,
    SHORT_PIECE_BYTES,
    Accept,
    Close,
    Continue,
    Drop,
    Grow,
    Head,
    Join,
    Joined,
    KeyMessage,
    Kind,
    Pause,
    Position,
    Repeat,
    Report,
    Resume,
    RoundKind,
    SendState,
    Start,
    pack_control,
)
from ..wire.streams import ELASTIC_HUB_TIMEOUT, return_seconds
from .calls import check_calls, mismatch
from .connection import KERNEL_BYTES, HubConnection
from .inbox import CHANNEL_BITS, Continuation, Inbox, Incoming, StateRequests

_NOTICE_SECONDS = 5.0  # after which a site prints for which sites it waits
_log = get_logger(__name__)
_ENDED = "its program has ended"
_SIZE = struct.Struct("<Q")
_SIZE_EXCHANGE, _STATE_EXCHANGE = 0, 1  # numbers of the two messages of a state


class HubLink(HubConnection):
    """Link of one site. Made by `open`.

    It outlives a hub that is restarted, or has given this site up. After `Hello` with its position, a site sends a
    `Report`. It sends no other messages until the hub lets the run go on, but keeps them. If the hub lets the site join
    instead, as one that has started again, all that belongs to the open step is forgotten, and `RoundClient` raises a
    `DroppedError` where the program waits for the step.

    Attributes:
        inbox: messages that arrive.
        sealing: encryption of messages for the other sites, so that the hub cannot read them.
        step: number of the open step.
        gone: reasons of the sites that are lost, by slot, in the order in which they were lost.
        rounds: rounds of the link.
    """

    def __init__(self, kit: Kit, address: tuple[str, int] | None = None) -> None:
        super().__init__(kit, "training", address)
        self.step = 1
        self.gone: dict[int, str] = {}
        self.inbox = Inbox(self.names, self.rank)
        self._started = False
        self._continuation = Continuation()
        self.sealing = LinkSealing(kit, self.names)
        if self.sealing.required:
            self._frames.seal = self.sealing.frames
        self._choose_piece_bytes()
        self._pause = ""
        self._channels = 0
        self.rounds = RoundClient(self)

    def _choose_piece_bytes(self) -> None:
        if self.world_size > 2 or self.kit.roster.hub_at is None:
            # Payloads take one line to the hub and another one from it, which is idle until the first piece is whole.
            # Smaller pieces cost processor time.
            self._frames.payload_bytes = SHORT_PIECE_BYTES

    @classmethod
    def open(cls, kit: Kit, timeout: float = DEFAULT_TIMEOUT, address: tuple[str, int] | None = None) -> HubLink:
        """Connect to the hub, and wait until training starts, for which all sites have to be there.

        Args:
            kit: kit of this site.
            timeout: seconds for all of it.
            address: host and port of the hub; None for those of the kit.

        Raises:
            KitError: if the kit's certificate is not valid at present.
            RefusedError: if the hub refuses this site.
            SealingError: if messages have to be sealed, and the sites cannot agree on keys.
            SiteError: if the hub cannot be reached, or a site does not come, in time.
        """
        kit.check_dates()
        deadline = Deadline(timeout)
        link = cls(kit, address)
        try:
            link.start(timeout)
            link._wait_for_start(deadline, timeout)
            if link.sealing.required and not link.rounds.joins:
                link.sealing.negotiate(kit, partial(link._swap, timeout))
            add_announcer(link._announce)
        except BaseException:
            link.close(0.2)
            raise
        return link

    def _wait_for_start(self, deadline: Deadline, timeout: float) -> None:
        while not self.converse(lambda: int(not self._started), min(_NOTICE_SECONDS, deadline.left)):
            state = self.hub_state or self._pause or f"{self.hub} has not said for whom it waits"
            if deadline.over:
                raise SiteError(f"training has not started within {timeout:g} s: {state}")
            print(f"dadplug: {state}", file=sys.stderr, flush=True)

    def _swap(self, timeout: float, exchange: int, own: bytes, nbytes: int) -> dict[int, bytes]:
        """Send a message to all other sites, and return theirs by slot."""
        found = {slot: bytearray(nbytes) for slot in range(self.world_size) if slot != self.rank}
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
        elif head.kind is not Kind.SUM or head.slot:
            raise FrameError(f"a {head.kind.name} frame of slot {head.slot} is not expected")
        void = head.kind is Kind.SUM and self.gone  # a sum that leaves out a lost site
        outdated = self._continuation.repeats(head) or self.rounds.states.is_outdated(head)
        if outdated or self.sealing.covers(head) or void:
            return memoryview(bytearray(head.length))
        return self.inbox.room(head)

    def complete(self, head: Head, body: memoryview) -> None:
        if head.kind not in (Kind.PAYLOAD, Kind.SUM, Kind.STATE):
            raise FrameError(f"a {head.kind.name} frame is not expected")
        void = self._continuation.repeats(head) or (head.kind is Kind.SUM and self.gone)
        if head.kind is not Kind.STATE:
            self._continuation.count(head)
        if void or (self.rounds.states.is_outdated(head) and not self.sealing.covers(head)):
            return
        if self.sealing.covers(head):
            for frame in self.sealing.open(head, body):
                self._take_opened(*frame)
        else:
            self.inbox.complete(head, body)

    def _take_opened(self, head: Head, content: bytes) -> None:
        if not self.rounds.states.is_outdated(head):
            body = self.inbox.room(head)
            body[:] = content
            self.inbox.complete(head, body)

    def _post_all(self, messages: Iterable[object]) -> None:
        """Send control messages. To be called with the lock held."""
        for message in messages:
            self._frames.send(pack_control(message, self.rank))

    def control(self, message: object) -> None:
        rounds = self.rounds
        match message:
            case Start(position=position):
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
                self._post_all(due)
                for pair in opened:
                    self._take_opened(*pair)
            case Join(slot=slot):
                self._troubles.end(slot, f"{self.name(slot)} is back")
                self.gone.pop(slot, None)
                rounds.joined.add(slot)
                self._take_member(message)
            case Drop():
                self._lose_site(message)
            case Accept(needs_state=True):
                self._be_accepted(message.position)
            case SendState():
                rounds.states.take(message)
                if message.joiner == self.rank:
                    self.inbox.forget_states()
            case Close():
                self.sealing.close(message.step, message.contributors)
                self._continuation.close(message, frozenset(rounds.joined))
                rounds.take_close(message)
            case Repeat():
                for frame in self._continuation.repeat(message):
                    self._frames.send(frame)
            case Continue():
                self._frames.release(self._continuation.go_on(message))

    def _take_member(self, message: Join) -> None:
        """Take the announcement of a site that joins, which may be this one."""
        if message.slot != self.rank:
            self._post_all(self.sealing.join(message.slot, message.step))
        elif self.rounds.joins:
            self.sealing.enter([slot for slot in range(self.world_size) if slot not in {self.rank, *self.gone}])

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
        self.names += new
        self.world_size = len(self.names)
        for slot in range(before, self.world_size):
            self.gone[slot] = "it has not joined yet"
        self.rounds.sizes.append((message.step, self.world_size))
        self._choose_piece_bytes()
        if self.rounds.joins and self.rounds.requirements is not None and not self.sealing.complete:
            self.rounds._ask()  # an offer names all sites
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
            self._continuation.forget(slot)
            if rounds.elastic:
                self.inbox.forget(slot, message.step)
        rounds.joined.discard(slot)
        rounds.states.leave(slot)

    def _be_accepted(self, position: Position | None) -> None:
        """Wait for the state of another site, at a position once this site is admitted."""
        if self._started and not self.rounds.joins:
            self._lose_place(f"its connection was lost ({self.outage or 'for too long'})", for_good=False)
        self._started = self.outlasts_outages = True
        self.rounds.joins = self.rounds.elastic = True
        if position is not None:
            self._begin(position)
            self.inbox.clear()  # of what a hub before has sent of the round in which this site was to join
            self.gone.clear()  # those that are absent are announced next
            self.step = position.step + 1
            self.rounds._position, self.rounds.closed = position, position.step
            self.rounds.joined.clear()
            self.rounds.states.own = None

    def tick(self) -> None:
        self._post_all(self.sealing.check_kit(self.rounds.elastic))

    # A hub that is restarted, or has given this site up

    def _begin(self, position: Position) -> None:
        """Begin at a position."""
        self._continuation = Continuation(position)
        self._frames.kept = self._continuation.kept
        if self.rounds.elastic:
            self._continuation.kept.limit = None  # every round is closed, so that two are kept at most

    @property
    def position(self) -> Position:
        fresh = self.rounds.joins or self.rounds.dropped or not self._started
        return FRESH if fresh else self._continuation.position

    def begin_anew(self) -> None:
        rounds, continuation = self.rounds, self._continuation
        takes_part = self.position != FRESH
        if self.left or (takes_part and continuation.position.step < continuation.kept.first):
            super().begin_anew()
        self._frames.begin_anew(held=takes_part or bool(rounds.dropped))
        rounds.states.clear()
        if rounds.joins:
            rounds._position = None
        self._set_pause("")
        if takes_part:
            self._frames.send(pack_control(self._report(), self.rank))
        elif rounds.joins and rounds.requirements is not None:
            rounds._ask()

    def _report(self) -> Report:
        rounds, found = self.rounds, self._continuation
        step = found.position.step
        required = rounds.requirements or Requirements(0, 0)
        return Report(
            found.run,
            *(found.position, found.before, found.contributors, found.joined),
            tuple(self.gone),
            *(found.counts(step, self.world_size), found.counts(step + 1, self.world_size)),
            rounds.listens,
            required.min_sites,
            required.timeout_ms,
            required.skips,
            required.patience_percent,
            round(1e3 * return_seconds(time.monotonic() - self._lost_at)),
        )

    def _lose_place(self, reason: str, for_good: bool) -> None:
        """Record that the hub has dropped this site, which may join again if the sites have agreed on that."""
        if for_good or not (self.rounds.elastic and self.rounds.rejoins):
            advice = "" if for_good else "; start its program again, and it joins the others"
            self.fail(SiteError(f"{self.hub} has given this site up: {reason}{advice * self.rounds.elastic}"))
            return
        self.rounds.dropped = self.rounds.dropped or reason
        self._frames.held, self._frames.kept = True, None

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
    ) -> None:
        """Send a message; return at once. The content is copied, and an empty one is not sent.

        Args:
            exchange: number of the exchange.
            content: the message, of bytes.
            kind: kind of its frames.
            tag: their tag, see `dadplug.hub.wire.messages.Head`.
            slot: slot of the receiver, for the kinds that name it.
            soon: whether it may wait for the next message, see `post`.

        Raises:
            SiteError: if the link has failed.
        """
        if len(content) and not (kind is Kind.PAYLOAD and self.rounds.behind):
            self.post(Head(kind, self.rank if slot is None else slot, self.step, exchange, tag=tag), content, soon)

    def expect(self, slot: int, exchange: int, buffer: memoryview, kind: Kind = Kind.PAYLOAD) -> Incoming:
        """Expect a message.

        Args:
            slot: the sender; 0 for a sum.
            exchange: number of the exchange.
            buffer: room for it, of bytes, which has to stay until it has arrived.
            kind: kind of its frames.

        Returns:
            The message, for `wait`.

        Raises:
            SiteError: if the link has failed.
            MismatchError: if the site has sent another message.
        """
        with self.lock:
            self.check()
            if kind is Kind.PAYLOAD and self.rounds.lacks(slot):
                return Incoming((kind, slot, exchange), buffer)
            try:
                return self.inbox.expect((kind, slot, exchange), buffer)
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
        """Return an error that names the site that was lost first; None if none is known to be lost."""
        for slot, reason in list(self.gone.items()):
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
        return self.inbox.expected_bytes + (2 * KERNEL_BYTES if self.rounds.skips or self._frames.held else 0)

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
        sizes: rounds in which the run has grown, and the number of sites since.
        first: number of the first round of the last training step that this site has begun to end.
        dropped: reason why the hub has dropped this site, until it joins again; empty while it takes part.
    """

    def __init__(self, link: HubLink) -> None:
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
        self.sizes: list[tuple[int, int]] = []
        self.dropped = ""
        self.states = StateRequests(link.rank)
        self._position: Position | None = None  # at which this site joins
        self._fresh = False  # whether this site has joined and not ended a round since

    def begin(self, requirements: Requirements) -> None:
        """Begin rounds; all sites call it with the same requirements."""
        link = self._link
        with link.lock:
            if not self.elastic and not self.joins:
                self.closed = link.step - 1
                self.joined.clear()  # at the start
            self.elastic, self.skips, self.requirements = True, requirements.skips, requirements
            link._continuation.kept.limit = None
            link.wait_for_hub(ELASTIC_HUB_TIMEOUT, unless_known=True)
            link.check()
            self._ask()
            link._flush_or_disconnect()

    def _ask(self) -> None:
        """State the requirements and, where this site is to join, that it can. To be called with the link's lock held.

        Where messages are sealed, the members are asked for their keys first.
        """
        self.states.awaits = self.joins
        offer = self._link.sealing.offer() if self.joins else None
        self._link._post_all([self.requirements] if offer is None else [offer, self.requirements])

    @property
    def size(self) -> int:
        """Number of sites from the end of the present training step on; 0 if the run has not grown."""
        return max((size for number, size in self.sizes if number <= self.first), default=0)

    @property
    def behind(self) -> bool:
        """Whether the open round of this site has been closed already."""
        return self.elastic and not self.joins and self.closed >= self._link.step

    def lacks(self, slot: int) -> bool:
        """Return whether a site is not part of the open round of this site, as far as it is known."""
        return slot in self._absent.get(self._link.step, ())

    def take_close(self, message: Close) -> None:
        """Take the announcement that a round has been closed. To be called with the link's lock held."""
        link = self._link
        if not self.elastic or message.step <= self.closed:
            return
        absent = frozenset(range(link.world_size)) - frozenset(message.contributors) | self.joined
        self.joined.clear()
        self.listens = False
        self.closed, self._absent[message.step] = message.step, absent
        if message.step == link.step:
            link.inbox.cancel_all(Kind.PAYLOAD, absent)  # what they send from now on belongs to later rounds

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
        link, number = self._link, self._link.step
        if self._fresh and answer is None:
            raise RuntimeError(
                "this site has joined in mid-training, while the others are in synchronize(): it may not exchange "
                "anything before it has called synchronize() itself"
            )
        self._fresh = False
        link.post(Head(Kind.END, link.rank, number, exchange=kind | IDLE * idle), b"")

        def over() -> bool:
            while answer is not None and (request := self.states.next(number)) is not None:
                if request.step == number - 1:  # otherwise the joiner has left since
                    self._send_state(request, answer)
            return number in self._absent

        what = f"step {number} has not been closed for {timeout:g} s, though the hub is connected"
        self._wait_until(over, timeout, f"{what}: another site is stopped or busy")
        with link.lock:
            self.absent = self._absent.pop(number)
            link.step = number + 1
            for slot in self.absent:
                link.inbox.forget(slot, last=number)
        return self.absent

    def gather(self, exchange: int, buffers: Sequence[memoryview], timeout: float) -> frozenset[int]:
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
        others = [(slot, buffer) for slot, buffer in enumerate(buffers) if slot != link.rank and len(buffer)]
        incoming = [link.expect(slot, exchange, buffer, Kind.PAYLOAD) for slot, buffer in others]
        link.send(exchange, buffers[link.rank], Kind.PAYLOAD, 0, None)
        absent = self.end(timeout, None)
        for each in link.cancel(incoming):
            if each.key[1] not in absent:
                raise mismatch(link)
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
        return {each.key[1] for each in link.cancel(incoming)}

    def _wait_until(self, over: Callable[[], bool], timeout: float, failure: str, dropped: bool = False) -> None:
        """Exchange messages until a condition holds, or this site is dropped, unless it is known that it has been."""
        patience = Deadline(min(ASK_SECONDS, timeout))

        def left() -> int:
            if over():
                return 0
            check_calls(self._link, patience)
            if self.dropped and not dropped:
                self._link.check()
                raise DroppedError(f"the hub has dropped this site: {self.dropped}")
            return 1

        if not self._link.converse(left, timeout, any_frame=True):  # large ones take long over a slow connection
            raise SiteError(failure)

    # State of a site that joins

    def _send_state(self, request: SendState, answer: Callable[[], bytes]) -> None:
        content = answer()
        for exchange, part in ((_SIZE_EXCHANGE, _SIZE.pack(len(content))), (_STATE_EXCHANGE, content)):
            try:
                self._link.send(exchange, memoryview(part), Kind.STATE, request.number, request.joiner)
            except SealingError:
                if request.joiner not in self._link.gone:
                    raise
                return  # it has left meanwhile, and has no keys any more

    def receive_state(self, timeout: float, most: int) -> bytes:
        """Receive the state of another site, of so many bytes at most; from the beginning where it leaves meanwhile.

        Raises:
            SiteError: if none arrives in time.
        """
        while True:
            self._wait_until(lambda: self.states.own is not None, timeout, "no site has sent its state")
            if (request := self.states.own) is None:
                continue
            if (size := self._receive_part(request, _SIZE_EXCHANGE, _SIZE.size, timeout)) is None:
                continue
            (nbytes,) = _SIZE.unpack(size)
            if nbytes > most:
                raise SiteError(
                    f"{self._link.name(request.donor)} announces a state of {nbytes} bytes, where this site's model "
                    f"allows {most}: do all sites train the same model?"
                )
            state = self._receive_part(request, _STATE_EXCHANGE, nbytes, timeout)
            with self._link.lock:
                self.states.awaits &= state is None or self.states.own is not request  # another hub sends a newer one
            if state is not None and not self.states.awaits:
                failure = "the keys of another site have not arrived: it is stopped or busy"
                self._wait_until(lambda: self._link.sealing.complete, timeout, failure)
                return state

    def _receive_part(self, request: SendState, exchange: int, nbytes: int, timeout: float) -> bytes | None:
        """Receive a part of a state; None if another one is to come."""
        buffer = memoryview(bytearray(nbytes))
        incoming = self._link.expect(request.donor, exchange, buffer, Kind.STATE)
        failure = f"the state of {self._link.name(request.donor)} has not arrived"
        self._wait_until(lambda: incoming.done or self.states.own is not request, timeout, failure)
        if incoming.done:
            return bytes(buffer)
        self._link.cancel([incoming])
        return None

    def confirm(self) -> bool:
        """Tell the hub that this site has the state, and takes part; False if the state is outdated.

        Others may have gone on since it arrived, if the hub was restarted or has dropped this site.
        """
        with self._link.lock:
            if (position := self._position) is None or self.states.awaits:
                return False
            self.joins, self._fresh, self.listens, self._position = False, True, True, None
        self._link.post_control(Joined(position))
        return True

    def rejoin(self, timeout: float) -> None:
        """Join again after the hub has dropped this site: wait until it is connected, and forget the open step.

        Args:
            timeout: seconds to wait for the hub.

        Raises:
            SiteError: if the hub does not let this site join in time.
        """
        print(f"dadplug: the hub has dropped this site: {self.dropped}; it joins again", file=sys.stderr, flush=True)
        self._wait_until(lambda: self.joins, timeout, "the hub does not let this site join again", dropped=True)
        link = self._link
        with link.lock:
            self.dropped, self._fresh = "", False
            self._absent.clear()
            link.inbox.clear()
            link.gone.clear()
            link._frames.release(())
