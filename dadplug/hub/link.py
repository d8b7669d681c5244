"""Link of a site to its hub, over which training exchanges messages with the other sites.

Messages are matched by sender and exchange. The number of an exchange is that of its channel, an index of the transport
or process group in the order in which a site makes them, and its number there; all sites make theirs in one order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from ..errors import DroppedError, FrameError, MismatchError, SiteError
from ..exchange.failure_reports import ENDED, add_announcer, remove_announcer
from ..logs import get_logger
from .actions import Accept, Drop, Grow, Join, Pause, Start
from .actions import Resume as Resumption
from .connection import KERNEL_BYTES
from .continued_link import ContinuedLink
from .frames import SHORT_PIECE_BYTES, Head, Kind, Leave
from .inbox import Incoming
from .kits import Kit
from .link_sealing import AGREEMENT, LinkSealing
from .rounds import Rounds

DEFAULT_TIMEOUT = 300.0  # seconds
CHANNEL_BITS = 24  # of the number of an exchange, below those of its channel
_NOTICE_SECONDS = 5.0  # after which a site prints for which sites it waits
_log = get_logger(__name__)
_POLL_SECONDS = 0.02  # the thread of the connection may read what another one waits for
_LONGEST_REASON = 1000  # characters
_ENDED = "its program has ended"


class HubLink(ContinuedLink):
    """Link of one site. Made by `open`.

    Attributes:
        sealing: encryption of messages for the other sites, so that the hub cannot read them.
    """

    def __init__(self, kit: Kit, channel: str, address: tuple[str, int] | None = None) -> None:
        super().__init__(kit, channel, address)
        self.sealing = LinkSealing(kit)
        if self.sealing.required:
            self._frames.seal = self.sealing.frames
        self._choose_piece_bytes()
        self._pause = ""
        self._channels = 0
        self.rounds = Rounds(self)

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
            channel: the channel, see `dadplug.hub.frames.Hello`; only "training" waits.
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
        """Bytes that have arrived before somebody expects them."""
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
        new = message.names[self.world_size :]
        if not new:
            return
        self.extend(message.names)
        self.rounds.grow(message.step)
        self._choose_piece_bytes()
        _log.info("the project has new sites: %s; %d in all", ", ".join(new), self.world_size)

    def tick(self) -> None:
        self.sealing.check_kit()

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
            tag: their tag, see `dadplug.hub.frames.Head`.
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
        """Forget what sites have sent up to a step, and nobody expects. To be called with the lock held."""
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
