"""Rounds of a site's link: their ends, by which the sites agree on who takes part, and states of sites that join."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import DadplugError, DroppedError, MismatchError, SiteError
from ...exchange.calls import ASK_SECONDS
from ...exchange.fields import NUMBER
from ...exchange.handshake import Deadline
from ...exchange.rounds import Requirements
from ...support.logs import get_logger
from ...support.refusals import refuse
from ...support.structs import MOST_MS
from ..wire.messages import IDLE, Arrived, Close, Exclude, Head, Joined, Kind, Position, Receiving, RoundKind, SendState
from ..wire.streams import ELASTIC_HUB_TIMEOUT
from .donation import ANNOUNCED, PART_BYTES, StateRequests
from .history import RoundHistory
from .inbox import CALLS, Incoming, check_calls, mismatch

_REPORT_SECONDS, _REPORT_SHARE = 5.0, 0.02  # between reports on a state that arrives; and of the time so far
_log = get_logger(__name__)


class RoundClient:
    """Part of a site in the rounds of its link.

    A site that is late ends a round which has been closed without it, and those that have been closed since, one after
    the other: `closed` is ahead of the link's step then. It has got all that the others have sent in them. So does a
    site that has joined: the others have gone on while its state was on its way.

    Args:
        link: the link, a `HubLink`.

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
        history: digest of the rounds so far.
        refusal: error with which this site ends, since it does not accept what the hub says to it or to others.
        sizes: rounds in which the run has grown, and the number of sites since.
        first: number of the first round of the last training step that this site has begun to end.
        dropped: reason why the hub has dropped this site, until it joins again; empty while it takes part.
    """

    def __init__(self, link: Any) -> None:
        self._link = link
        self.elastic = self.joins = self.skips = False
        self.closed = 0
        self.absent: frozenset[int] = frozenset()
        # The same, the contributors and those that have joined, by round that has been closed and not ended here.
        self._closes: dict[int, tuple[frozenset[int], set[int], set[int]]] = {}
        self._accused: set[int] = set()  # sites that the hub has been asked to drop
        self.joined: set[int] = set()
        # Sites that have contributed since they have joined, or since this one has: without them no round is closed.
        self._settled: set[int] = set()
        self.listens = False
        self.requirements: Requirements | None = None
        self.rejoins = True
        self.first = 0
        self.sizes: list[tuple[int, int]] = []
        self.dropped = ""
        self.history = RoundHistory()
        self.refusal: DadplugError | None = None
        self.states = StateRequests(link.rank, link.frames.send_message)
        self._position: Position | None = None  # at which this site joins
        self._fresh = False  # whether this site has joined and not ended a round since

    def begin(self, requirements: Requirements) -> None:
        """Begin rounds; all sites call it with the same requirements. The hub gets those that are not provisional."""
        link = self._link
        with link.lock:
            if not self.elastic and not self.joins:
                self.closed = link.step - 1
                self.joined.clear()  # at the start
                self._settled = {*range(link.world_size)} - link.gone.keys()
                self.history.begin(self.closed, link.sealing.first_digest)
            self.elastic, self.skips, self.requirements = True, requirements.skips, requirements
            link.continuation.kept.limit = None
            link.wait_for_hub(ELASTIC_HUB_TIMEOUT, unless_known=True)
            link.check()
            if not requirements.provisional:
                self.ask()
                link.flush()

    def ask(self) -> None:
        """State the requirements and, where this site is to join, that it can. To be called with the link's lock held.

        Where messages are sealed, the members are asked for their keys first.
        """
        self.states.awaits = self.joins
        offer = self._link.sealing.offer() if self.joins else None
        self._link.post_all([self.requirements] if offer is None else [offer, self.requirements])

    def await_state(self, position: Position | None) -> None:
        """Wait for the state of another site. To be called with the link's lock held.

        Args:
            position: where this site joins; None before it is admitted.
        """
        self.joins = self.elastic = True
        if position is not None:
            self._position, self.closed = position, position.step
            self.joined.clear()
            self.states.own = None
            self.history.forget()
            self._settled.clear()
            self._closes.clear()

    def begin_anew(self) -> None:
        """Begin with a hub that does not know the present stream. To be called with the link's lock held."""
        self.states.clear()
        if self.joins:
            self._position = None
            if self.requirements is not None:
                self.ask()

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
        return slot in self._closes.get(self._link.step, ((),))[0]

    def leave(self, slot: int) -> None:
        """Forget a site that has left. To be called with the link's lock held."""
        self._settled.discard(slot)
        self.joined.discard(slot)
        self.states.leave(slot)

    def take_close(self, message: Close) -> None:
        """Take the announcement that a round has been closed. To be called with the link's lock held."""
        link = self._link
        if not self.elastic or message.step <= self.closed:
            return
        present, contributors = {*range(link.world_size)} - link.gone.keys(), {*message.contributors}
        absent = frozenset(range(link.world_size)) - contributors | self.joined
        self.closed, self._closes[message.step] = message.step, (absent, contributors, {*self.joined})
        self._accused -= self.joined
        self._settled &= present
        # A member may not join either, by which the hub would leave it out of each round.
        omitted = set() if self.skips else self._settled - contributors | self._settled & self.joined
        self._settled = (self._settled | contributors) - self.joined
        self.joined.clear()
        self.listens = False
        if message.step == link.step:
            link.inbox.cancel_all(Kind.PAYLOAD, absent)  # what they send from now on belongs to later rounds
        if strange := contributors - present or omitted:
            names = ", ".join(link.name(slot) for slot in sorted(strange))
            how = "with what has left:" if strange & link.gone.keys() else "without what is present:"
            self._refuse_close(f"{link.hub} has closed round {message.step} {how} {names}")

    # What the hub says

    def takes(self, head: Head) -> bool:
        """Compare the digest of a payload's sender with that of this site. To be called with the link's lock held.

        Returns:
            Whether the payload counts; not one of a round that is not open yet, which no site can send.
        """
        if self.elastic and head.step > self.closed + 1:
            return False
        self.history.compare(head.slot, head.step, head.tag)
        self._check_history()
        return True

    def check(self) -> None:
        """Raise MismatchError if this site does not accept what the hub says, or has said to another site."""
        if self.refusal is not None:
            raise type(self.refusal)(*self.refusal.args)

    def _check_history(self) -> None:
        if self.history.differs is not None:
            slot, step = self.history.differs
            link = self._link
            self._refuse_close(
                f"{link.name(slot)} and {link.name(link.rank)} got different information from {link.hub} about the "
                f"rounds before round {step}: which sites have taken part, left or joined, or what one of them has sent"
            )

    def _refuse_close(self, reason: str) -> None:
        at_fault = "The run ends, since the sites' weights would differ: the hub, or who controls it, is at fault"
        self.refuse(MismatchError(f"{reason}. {at_fault}"))

    def mark(self) -> int:
        """Return the tag of this site's frames of the open round; those of the rounds before have been read then."""
        with self._link.lock:
            self.history.finish()
            self._check_history()
            return self.history.mark(self._link.step)

    def refuse(self, error: DadplugError) -> None:
        """Refuse to go on, and let the others find that out. To be called with the link's lock held."""
        link = self._link
        if self.refusal is not None:
            return
        self.refusal = error
        if not self.joins and link.sealing.has_keys:  # no site has the mark of this frame, so that the others end, too
            self.history.finish()
            step = max(self.history.open_step, self.closed + 1)
            mark = self.history.other_mark(step)
            link.frames.send_message(Head(Kind.PAYLOAD, link.rank, step, CALLS, tag=mark), b"\0")

    # Rounds

    def end(
        self,
        timeout: float,
        answer: Callable[[], bytes] | None,
        kind: RoundKind = RoundKind.COLLECTIVE,
        idle: bool = False,
        counted: Sequence[Incoming] = (),
    ) -> frozenset[int]:
        """End this site's part of the open round, and wait until all others have ended theirs, left, or are late.

        Args:
            timeout: seconds after which the round should be closed, pauses apart.
            answer: returns this site's state for one that joins; None where the round admits none.
            kind: kind of the round.
            idle: whether this site contributes nothing.
            counted: messages that count in this round: what has not arrived when it is closed is not taken from what
                the sender sends in the next one.

        Returns:
            The slots of the sites that are not among the contributors.

        Raises:
            SiteError: if the hub or this site is given up, or the round is not closed in time.
            MismatchError: if the hub has given the sites different information, or impossible information.
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
                self._send_state(request, number - 1, answer())
            return number in self._closes

        self._wait_for_close(over, counted, number, timeout)
        with link.lock:
            self.check()
            contributors = self._close(number, counted)
        count, needed = len(contributors), self.requirements.min_sites if self.requirements else 0
        if kind is RoundKind.FIRST and count < needed:
            raise MismatchError(
                f"{link.hub} has closed round {number} with {count} sites, and this run needs {needed}: the hub, or "
                "who controls it, is at fault"
            )
        return self.absent

    def _wait_for_close(
        self, over: Callable[[], bool], counted: Sequence[Incoming], number: int, timeout: float
    ) -> None:
        """Wait until the hub has closed a round."""
        what = f"step {number} has not been closed for {timeout:g} s, though the hub is connected"
        self._wait_or_accuse(over, counted, number, timeout, f"{what}: another site is stopped or busy")

    def _close(self, number: int, counted: Sequence[Incoming]) -> set[int]:
        """Take the close of a round, and open the next one; return the contributors. The link's lock is held."""
        link = self._link
        self.absent, contributors, joined = self._closes.pop(number)
        self.history.close(number, contributors, joined)
        self._check_history()
        for each in counted:
            if not each.done:
                link.inbox.cancel(each)
        link.step = number + 1
        for slot in self.absent:
            link.inbox.forget(slot, last=number)
        link.inbox.open_step()
        return contributors

    @property
    def apart(self) -> set[int]:
        """Slots of the sites of the last round that this site has ended which do not know that they were left out."""
        return {slot for slot, step in self.history.apart if step == self._link.step - 1}

    def leave_out(self, slot: int, reason: str) -> None:
        """Leave a site out of the last round, since what it has sent is invalid; all sites find the same.

        The hub drops the site once most of the others ask for that; it may join again.

        Args:
            slot: the site.
            reason: what it has sent.
        """
        link = self._link
        with link.lock:
            self.history.leave_out(slot)
        self.accuse(slot, reason)

    def accuse(self, slot: int, reason: str) -> None:
        """Ask the hub to drop a site, once until it joins again."""
        link = self._link
        if slot not in self._accused and slot != link.rank:
            self._accused.add(slot)
            _log.warning("this step goes on without %s, which the hub is asked to drop: %s", link.name(slot), reason)
            link.post_control(Exclude(slot, reason))

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
            MismatchError: if half of the sites that are present have sent no such message; fewer are left out.
        """
        link = self._link
        if self.joins:
            raise SiteError(
                "this site joins in mid-training, and can take part in nothing before it has built its reduction"
            )
        others = [(slot, buffer) for slot, buffer in enumerate(buffers) if slot != link.rank and len(buffer)]
        incoming = [link.expect(slot, exchange, buffer, Kind.PAYLOAD) for slot, buffer in others]
        link.send(exchange, buffers[link.rank], Kind.PAYLOAD, 0, None)
        absent = self.end(timeout, None, counted=incoming)
        lacking = {each.key[1] for each in link.cancel(incoming)} - absent
        if lacking and 2 * len(lacking) >= link.world_size - len(absent):
            raise mismatch(link)
        for slot in lacking:
            self.leave_out(slot, "it has ended a collective without its part, or with another one")
        return absent | lacking

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
            settled = (each.done or each.spoilt or each.key[1] in link.gone for each in incoming)
            return self.closed >= number or all(settled)

        self._wait_or_accuse(over, incoming, number, timeout)
        return {each.key[1] for each in link.cancel(incoming)}

    def _wait_or_accuse(
        self, over: Callable[[], bool], incoming: Sequence[Incoming], number: int, timeout: float, failure: str = ""
    ) -> None:
        """Wait until a condition holds; after the timeout, once more, without the sites that have sent nothing.

        Args:
            over: the condition.
            incoming: the messages of the round.
            number: number of the round.
            timeout: the timeout.
            failure: text of the error where all have sent theirs.
        """
        if self._wait_until(over, timeout):
            return
        gone, name = self._link.gone, self._link.name
        silent = {each.key[1] for each in incoming if not (each.done or each.spoilt or each.key[1] in gone)}
        if not silent:
            raise SiteError(failure)
        what = f"has sent nothing in step {number} for {timeout:g} s, though the hub is connected to it"
        for slot in sorted(silent):
            self.accuse(slot, f"it {what}")
        self._wait_until(over, timeout, f"{', '.join(map(name, sorted(silent)))} {what}")

    def _wait_until(self, over: Callable[[], bool], timeout: float, failure: str = "", dropped: bool = False) -> bool:
        """Exchange messages until a condition holds, or this site is dropped, unless it is known that it has been.

        Args:
            over: the condition.
            timeout: seconds without a frame after which the wait ends.
            failure: text of the error if the condition does not hold in time; empty to return that.
            dropped: whether it is known that this site has been dropped.

        Returns:
            Whether it holds.
        """
        patience = Deadline(min(ASK_SECONDS, timeout))

        def left() -> int:
            self.check()
            if over():
                return 0
            check_calls(self._link, patience)
            if self.dropped and not dropped:
                self._link.check()
                raise DroppedError(f"the hub has dropped this site: {self.dropped}")
            return 1

        holds: bool = self._link.converse(
            left, timeout, any_frame=True
        )  # large frames take long over a slow connection
        if failure and not holds:
            raise SiteError(failure)
        return holds

    # State of a site that joins

    def _send_state(self, request: SendState, step: int, content: bytes) -> None:
        """Begin to send the state of this site after a step to one that joins."""
        link = self._link
        with link.lock:
            if request.joiner in link.gone:
                return
            self.states.donate(request, step, self.history.after(step), content)
            link.flush()

    @property
    def reads(self) -> bool:
        """Whether what arrives is to be read without delay, though the program waits for nothing."""
        return self.skips or self.joins or self.behind or bool(self.states.donations)

    def receive_state(self, timeout: float, most: int) -> bytearray:
        """Receive the state of another site, of so many bytes at most; from the beginning where it leaves meanwhile.

        Raises:
            SiteError: if none arrives in time.
        """
        while True:
            self._wait_until(lambda: self.states.own is not None, timeout, "no site has sent its state")
            if (request := self.states.own) is None:
                continue
            announced = memoryview(bytearray(ANNOUNCED.size))
            if not self._receive_part(request, 0, announced, timeout):
                continue
            nbytes, step, digest = ANNOUNCED.unpack(announced)
            donor = self._link.name(request.donor)
            refuse(
                (
                    nbytes > most,
                    f"{donor} announces a state of {nbytes} bytes, where this site's model allows {most}: do all sites "
                    "train the same model?",
                ),
                (
                    not request.step <= step <= NUMBER,
                    f"{donor} announces a state of step {step}, and was asked for one of {request.step}",
                ),
                error=SiteError,
            )
            content = bytearray(nbytes)
            done = self._receive_parts(request, memoryview(content), timeout)
            with self._link.lock:
                self.states.awaits &= not done or self.states.own is not request  # another hub sends a newer one
            if not done or self.states.awaits:
                continue
            self._link.post_control(Receiving(nbytes, nbytes, 0))
            failure = "the keys of another site have not arrived: it is stopped or busy"
            self._wait_until(lambda: self._link.sealing.complete or self.states.awaits, timeout, failure)
            with self._link.lock:
                if self.states.awaits:  # another hub has been dialled meanwhile, which does not know this state
                    continue
                self._begin_after(step, digest)
                self._check_history()
            return content

    def _begin_after(self, step: int, digest: bytes) -> None:
        """Go on after a closed step: this site has its state. To be called with the link's lock held."""
        link = self._link
        link.step, self.closed = step + 1, max(self.closed, step)
        self._closes = {number: close for number, close in self._closes.items() if number > step}
        link.inbox.forget(last=step)
        self.history.begin(step, digest)
        if self._position is not None:
            self._position = self._position._replace(step=step)

    def _receive_parts(self, request: SendState, content: memoryview, timeout: float) -> bool:
        """Receive a state, and report to the user and the hub how much has arrived; return whether it is complete."""
        nbytes, began = len(content), time.monotonic()
        due = began + _REPORT_SECONDS
        for begin in range(0, nbytes, PART_BYTES):
            part = content[begin : begin + PART_BYTES]
            if not self._receive_part(request, 1 + begin // PART_BYTES, part, timeout):
                return False
            received, now = begin + len(part), time.monotonic()
            if now >= due:
                due = now + max(_REPORT_SECONDS, _REPORT_SHARE * (now - began))
                left = (nbytes - received) * (now - began) / received
                found = Receiving(received, nbytes, min(round(1e3 * left), MOST_MS))
                print(f"dadplug: {found}", file=sys.stderr, flush=True)
                self._link.post_control(found)
        return True

    def _receive_part(self, request: SendState, number: int, buffer: memoryview, timeout: float) -> bool:
        """Receive a part of a state, and report it to the donor; return whether it is not void meanwhile."""
        incoming = self._link.expect(request.donor, number, buffer, Kind.STATE)
        failure = f"the state of {self._link.name(request.donor)} has not arrived"
        self._wait_until(lambda: incoming.done or self.states.own is not request, timeout, failure)
        if not incoming.done:
            self._link.cancel([incoming])
            return False
        self._link.post_control(Arrived(request.donor, request.number, number))
        return True

    def confirm(self) -> bool:
        """Tell the hub that this site has the state, and takes part; False if the state is outdated.

        Others may have gone on since it arrived, if the hub was restarted or has dropped this site.
        """
        with self._link.lock:
            if (position := self._position) is None or self.states.awaits:
                return False
            self.joins, self._fresh, self._position = False, True, None
            self.listens = self._link.rank in self.joined  # else the others count on it from its first round on
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
            self._closes.clear()
            link.inbox.clear()
            link.gone.clear()
            link.frames.release(())
