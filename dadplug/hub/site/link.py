"""Link of a site to its hub, over which training exchanges messages with the other sites.

Messages are matched by sender and exchange. The number of an exchange is that of its channel, an index of the transport
or process group in the order in which a site makes them, and its number there; all sites make theirs in one order.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from ...errors import DroppedError, FrameError, MismatchError, SiteError
from ...exchange.failure_reports import ENDED, add_announcer, remove_announcer
from ...exchange.transport import Requirements
from ...logs import get_logger
from ..pki.kits import Kit
from ..secure.key_agreement import AGREEMENT, LinkSealing
from ..wire.frames import SHORT_PIECE_BYTES, Head, Kind
from ..wire.messages import (
    FRESH,
    Accept,
    Close,
    Continue,
    Drop,
    Grow,
    Join,
    Leave,
    Pause,
    Position,
    Repeat,
    Report,
    Start,
    pack_control,
)
from ..wire.messages import Resume as Resumption
from ..wire.streams import KeptFrames
from .connection import KERNEL_BYTES, HubConnection
from .rounds import Inbox, Incoming, RoundClient

DEFAULT_TIMEOUT = 300.0  # seconds
CHANNEL_BITS = 24  # of the number of an exchange, below those of its channel
_NOTICE_SECONDS = 5.0  # after which a site prints for which sites it waits
_log = get_logger(__name__)
_POLL_SECONDS = 0.02  # the thread of the connection may read what another one waits for
_LONGEST_REASON = 1000  # characters
_ENDED = "its program has ended"


class Continuation:
    """Frames sent and numbers of frames received since the last closed round, and what the hub has announced of it.

    Frames of one sender arrive at all sites in the same order. So a site that counts them can tell those that arrive
    again from those that it lacks.

    Args:
        world_size: number of sites.

    Attributes:
        kept: frames that this site has sent in the last closed round and since.
        run: number of the run; 0 before it has started.
        position: the last closed round.
        before: the one before it.
        contributors: slots of its contributors.
        joined: slots of those that have joined in it.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.begin(FRESH)

    def begin(self, position: Position) -> None:
        """Begin at a position, with nothing sent or received."""
        self.kept = KeptFrames()
        self.run = self._life = position.life
        self.position, self.before = position, FRESH
        self.contributors: tuple[int, ...] = ()
        self.joined: tuple[int, ...] = ()
        self._counts: Counter[tuple[int, ...]] = Counter()  # of frames received, by `_key`
        self._repeated: Counter[tuple[int, ...]] = Counter()  # of those, how many are about to arrive again

    def extend(self, world_size: int) -> None:
        """Take the number of all sites, since there are further ones."""
        self._world_size = world_size

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

    def counts(self, step: int) -> tuple[int, ...]:
        """Return the number of payload frames of a step, by sender."""
        return tuple(self._counts[step, slot] for slot in range(self._world_size))

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


class HubLink(HubConnection):
    """Link of one site. Made by `open`.

    It outlives a hub that is restarted, or has given this site up. After `Hello` with its position, a site sends a
    `Report`. It sends no other messages until the hub lets the run go on, but keeps them. If the hub lets the site join
    instead, as one that has started again, all that belongs to the open step is forgotten, and `RoundClient` raises a
    `DroppedError` where the program waits for the step.

    Attributes:
        sealing: encryption of messages for the other sites, so that the hub cannot read them.
        step: number of the open step.
        gone: reasons of the sites that are lost, by slot, in the order in which they were lost.
        rounds: rounds of the link.
    """

    def __init__(self, kit: Kit, channel: str, address: tuple[str, int] | None = None) -> None:
        super().__init__(kit, channel, address)
        self.step = 1
        self.gone: dict[int, str] = {}
        self._inbox = Inbox(self.names, self.rank)
        self._started = False
        self._continuation = Continuation(self.world_size)
        self.sealing = LinkSealing(kit)
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
    def open(
        cls,
        kit: Kit,
        channel: str = "training",
        timeout: float = DEFAULT_TIMEOUT,
        address: tuple[str, int] | None = None,
    ) -> HubLink:
        """Dial the hub, and wait until training starts, for which all sites have to be there.

        Args:
            kit: kit of this site.
            channel: the channel, see `dadplug.hub.wire.frames.Hello`; only "training" waits.
            timeout: seconds for all of it.
            address: host and port of the hub; None for those of the kit.

        Raises:
            KitError: if the kit's certificate is not valid at present.
            RefusedError: if the hub refuses this site.
            SealingError: if messages have to be sealed, and the sites cannot agree on keys.
            SiteError: if the hub cannot be reached, or a site does not come, in time.
        """
        kit.check_dates()
        deadline = time.monotonic() + timeout
        link = cls(kit, channel, address)
        try:
            link.start(timeout)
            if channel == "training":
                link._wait_for_start(deadline, timeout)
                if link.sealing.required:
                    link.sealing.negotiate(kit, partial(link._swap, timeout))
                add_announcer(link._announce)
        except BaseException:
            link.close(0.2)
            raise
        return link

    def _wait_for_start(self, deadline: float, timeout: float) -> None:
        notice = time.monotonic() + _NOTICE_SECONDS
        while True:
            with self.lock:
                self.transfer()
            self.check()
            if self._started:
                return
            state = self.hub_state or self._pause or f"{self.hub} has not said for whom it waits"
            if time.monotonic() > deadline:
                raise SiteError(f"training has not started within {timeout:g} s: {state}")
            if time.monotonic() > notice:
                notice += _NOTICE_SECONDS
                print(f"dadplug: {state}", file=sys.stderr, flush=True)
            self.attend(_POLL_SECONDS)

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

    @property
    def early_bytes(self) -> int:
        """Bytes that have arrived before they are expected."""
        return self._inbox.early_bytes

    # Frames that arrive

    def room(self, head: Head) -> memoryview:
        if head.kind in (Kind.PAYLOAD, Kind.STATE):
            if head.slot == self.rank:
                raise FrameError("a frame of this site itself")
        elif head.kind is not Kind.SUM or head.slot:
            raise FrameError(f"a {head.kind.name} frame of slot {head.slot} is not expected")
        if self.sealing.covers(head) or self._is_void(head) or self._continuation.repeats(head):
            return memoryview(bytearray(head.length))
        return self._inbox.room(head)

    def complete(self, head: Head, body: memoryview) -> None:
        if head.kind not in (Kind.PAYLOAD, Kind.SUM, Kind.STATE):
            raise FrameError(f"a {head.kind.name} frame is not expected")
        repeated = self._continuation.repeats(head)
        if head.kind is not Kind.STATE:
            self._continuation.count(head)
        if repeated or self._is_void(head):
            return
        if self.sealing.covers(head):
            head, content = self.sealing.open(head, body)
            body = self._inbox.room(head)
            body[:] = content
        self._inbox.complete(head, body)

    def _is_void(self, head: Head) -> bool:
        """Return whether a frame belongs to a sum that leaves out a lost site."""
        return head.kind is Kind.SUM and bool(self.gone)

    def control(self, message: object) -> None:
        if isinstance(message, Start):
            self._started, self.step = True, message.position.step + 1
            self._begin(message.position)
        elif isinstance(message, Pause):
            self._pause = message.reason
        elif isinstance(message, Resumption):
            self._pause = ""
        elif isinstance(message, Grow):
            self._grow(message)
        elif isinstance(message, Drop) and message.slot == self.rank and not self.left:
            self._lose_place(message.reason or _ENDED, for_good=not message.step)
        elif isinstance(message, Drop) and self._started and message.slot != self.rank:
            self.gone.setdefault(message.slot, message.reason or _ENDED)
            if message.reason:
                self._troubles.begin(message.slot, f"{self.name(message.slot)} is lost: {message.reason}")
            self._continuation.forget(message.slot)
            if self.rounds.elastic:
                self._inbox.forget(message.slot, message.step)
        elif isinstance(message, Accept) and message.needs_state:
            if self._started and not self.rounds.joins:
                self._lose_place(f"its connection was lost ({self.outage or 'for too long'})", for_good=False)
            self._started = True
            if message.position is not None:
                self._begin(message.position)
        else:
            if isinstance(message, Join):
                self._troubles.end(message.slot, f"{self.name(message.slot)} is back")
            self._continue(message)
        self.rounds.take(message)

    def _grow(self, message: Grow) -> None:
        before, new = self.world_size, message.names[self.world_size :]
        if not new:
            return
        self.extend(message.names)
        self._inbox.extend(message.names)
        self._continuation.extend(self.world_size)
        for slot in range(before, self.world_size):
            self.gone[slot] = "it has not joined yet"
        self.rounds.grow(message.step)
        self._choose_piece_bytes()
        _log.info("the project has new sites: %s; %d in all", ", ".join(new), self.world_size)

    def tick(self) -> None:
        self.sealing.check_kit()

    # A hub that is restarted, or has given this site up

    def _continue(self, message: object) -> None:
        """Take an announcement that matters after a restart of the hub."""
        if isinstance(message, Close):
            self._continuation.close(message, frozenset(self.rounds.joined))
        elif isinstance(message, Repeat):
            for frame in self._continuation.repeat(message):
                self._frames.append(frame)
        elif isinstance(message, Continue):
            self._frames.release(self._continuation.go_on(message))

    def _begin(self, position: Position) -> None:
        """Begin at a position."""
        self._continuation.begin(position)
        self._frames.kept = self._continuation.kept

    @property
    def position(self) -> Position:
        fresh = self.rounds.joins or self.rounds.dropped or not self._started
        return FRESH if fresh else self._continuation.position

    def begin_anew(self) -> None:
        rounds, continuation = self.rounds, self._continuation
        takes_part = self.position != FRESH
        if self.left or (takes_part and not continuation.kept.complete(continuation.position.step)):
            super().begin_anew()
        self._frames.begin_anew(held=takes_part or bool(rounds.dropped))
        rounds.begin_anew()
        if takes_part:
            self._frames.append(pack_control(self._report(), self.rank))
        elif rounds.joins and rounds.requirements is not None:
            self._frames.append(pack_control(rounds.requirements, self.rank))

    def _report(self) -> Report:
        rounds, found = self.rounds, self._continuation
        step = found.position.step
        required = rounds.requirements or Requirements(0, 0)
        return Report(
            found.run,
            *(found.position, found.before, found.contributors, found.joined),
            tuple(self.gone),
            *(found.counts(step), found.counts(step + 1)),
            rounds.listens,
            required.min_sites,
            required.timeout_ms,
            required.skips,
            required.patience_percent,
        )

    def _lose_place(self, reason: str, for_good: bool) -> None:
        """Record that the hub has dropped this site, which may join again if the sites have agreed on that."""
        if for_good or not (self.rounds.elastic and self.rounds.rejoins):
            advice = "" if for_good else "; start its program again, and it joins the others"
            self.fail(SiteError(f"{self.hub} has given this site up: {reason}{advice * self.rounds.elastic}"))
            return
        self.rounds.dropped = self.rounds.dropped or reason
        self._frames.held, self._frames.kept = True, None

    def join_again(self) -> None:
        """Forget all that belongs to the steps before this site was dropped. To be called with the lock held."""
        self._inbox.clear()
        self.gone.clear()
        self._frames.release(())

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
            tag: their tag, see `dadplug.hub.wire.frames.Head`.
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
                return self._inbox.expect((kind, slot, exchange), buffer)
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
        if not missing:
            return
        deadline, before = time.monotonic() + timeout, -1
        with self.waiting():
            while True:
                with self.lock:
                    self.transfer()
                missing = [message for message in missing if not message.done]
                if not missing:
                    break
                self._check_gone(missing)
                left = sum(len(message.buffer) - message.received for message in missing)
                now = time.monotonic()
                if left != before:
                    deadline, before = now + timeout, left
                if now > deadline:
                    self._raise_silence(missing, timeout)
                self.attend(_POLL_SECONDS, left)

    def cancel(self, incoming: Sequence[Incoming]) -> None:
        """Expect messages no longer."""
        with self.lock:
            for message in incoming:
                self._inbox.cancel(message)

    def cancel_all(self, slots: Iterable[int]) -> None:
        """Expect the payloads of sites no longer. To be called with the lock held."""
        for slot in slots:
            self._inbox.cancel_all(slot)

    def forget(self, slots: Iterable[int], step: int) -> None:
        """Forget what sites have sent up to a step, and is not expected. To be called with the lock held."""
        for slot in slots:
            self._inbox.forget(slot, last=step)

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
                behind = self._frames.blocked or self.expects() > KERNEL_BYTES
            if behind and not self._waiting:
                self._wake()

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
        deadline = time.monotonic() + seconds
        while not self.gone and time.monotonic() < deadline:
            with self.lock:
                self.transfer()
            if not self.gone:
                self.attend(_POLL_SECONDS)
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
        for slot in slots:
            if self._inbox.early_of(slot):
                raise MismatchError(
                    f"{self.name(slot)} and {self.name(self.rank)} are not at the same exchange: every site must call "
                    "synchronize() equally often, with the same model; a site that has run out of data calls idle()"
                )
        names = ", ".join(map(self.name, slots)) or "one of the other sites"
        raise SiteError(
            f"{names} {'have' if len(slots) > 1 else 'has'} not answered for {timeout:g} s, though the hub is "
            "connected to it: it is stopped or busy. A site that may be this slow needs a larger timeout="
        )

    def expects(self) -> int:
        # A site that is late must not leave in the hub's queue what the others go on to send, and one that is held has
        # to read the word of a new hub before it waits for others.
        return self._inbox.expected_bytes + (2 * KERNEL_BYTES if self.rounds.skips or self._frames.held else 0)

    # Steps, and the end

    def end_step(self) -> None:
        """Tell the hub that this site's part of the open step is over; no site waits for that."""
        self.post(Head(Kind.END, self.rank, self.step), b"", soon=True)
        self.step += 1

    def _announce(self, reason: str, keep: bool) -> None:
        """Take this process's exit reason."""
        self.leave("" if reason == ENDED else reason)  # a later reason finds the link closed

    def leave(self, reason: str) -> None:
        """Tell the hub why this site leaves, and close the link; the first reason counts.

        Args:
            reason: the reason, which the other sites get; empty where training is complete.
        """
        if self.left or self.closed:
            return
        self.left = True
        with suppress(SiteError):  # the hub has ended meanwhile
            self.post_control(Leave(reason[:_LONGEST_REASON]))
        super().close()

    def close(self, seconds: float = 1.0) -> None:
        """Leave, unless that has been done, and close the link. May be called twice."""
        remove_announcer(self._announce)
        self.leave("")
        super().close(seconds)


_current: HubLink | None = None


def current_link() -> HubLink | None:
    """Return the link of this process; None where it is not connected by a kit."""
    return _current


def set_current_link(link: HubLink | None) -> None:
    """Set the link of this process."""
    global _current
    _current = link
