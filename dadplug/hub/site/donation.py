"""States of sites on their way to those that join, paced so that they delay the messages of training little.

A state shares the lines of both sites with training, which goes on meanwhile. So it is sent in small parts, of which
few are on the way at a time: the site that joins reports each part, and the delay of the reports shows whether parts
wait for one another. The number of parts on the way rises as long as they do not, and falls when they do. The idea is
that of LEDBAT, RFC 6817.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from ...errors import SealingError
from ..secure.epochs import DIGEST_BYTES
from ..wire.messages import Arrived, Head, Kind, SendState

PART_BYTES = 1 << 15  # 26 ms at 10 Mbit/s, by which a message of training is delayed
ANNOUNCED = struct.Struct(f"<QQ{DIGEST_BYTES}s")  # size of a state, its step, and the digest of the rounds until then
_FIRST_WINDOW, _MOST_WINDOW = 2, 128  # parts
_WAIT, _WAIT_SHARE = 0.01, 0.25  # seconds for which a part may wait for others; and share of the shortest delay


class Donation:
    """Parts of one state: what `ANNOUNCED` packs, and then the content.

    Args:
        request: the request for it.
        step: the closed step that it is of.
        digest: digest of the rounds until then.
        content: the state.

    Attributes:
        request: see above.
        step: see above.
        window: number of parts that may be on the way.
    """

    def __init__(self, request: SendState, step: int, digest: bytes, content: bytes) -> None:
        self.request, self.step = request, step
        self.window = _FIRST_WINDOW
        self._announced = ANNOUNCED.pack(len(content), step, digest)
        self._content = memoryview(content)
        self._count = 1 - (-len(content) // PART_BYTES)
        self._next = 0
        self._sent: dict[int, float] = {}  # when the parts on the way were sent, by number
        self._shortest = float("inf")  # seconds until the report of a part

    @property
    def complete(self) -> bool:
        """Whether all parts have arrived."""
        return self._next == self._count and not self._sent

    def due(self, now: float) -> Iterator[tuple[int, memoryview]]:
        """Yield the parts to be sent now, with their numbers; each of them once."""
        while self._next < self._count and len(self._sent) < self.window:
            number, self._next = self._next, self._next + 1
            self._sent[number] = now
            begin = (number - 1) * PART_BYTES
            yield number, self._content[begin : begin + PART_BYTES] if number else memoryview(self._announced)

    def arrived(self, number: int, now: float) -> None:
        """Take the report that a part has arrived; one of a part that is not on the way is ignored.

        Args:
            number: number of the part.
            now: the time, in seconds.
        """
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        delay = now - sent
        self._shortest = min(self._shortest, delay)
        waits = delay - self._shortest > max(_WAIT, _WAIT_SHARE * self._shortest)
        self.window = max(1, self.window - 1) if waits else min(_MOST_WINDOW, self.window + 1)


class StateRequests:
    """Requests of the hub, of which a later one replaces those before it for the same site. Threads may share it.

    Args:
        rank: slot of this site.
        send: sends a message, whose head it takes, too.

    Attributes:
        awaits: whether this site waits for a state.
        own: the request whose answer this site gets; None where there is none.
        donations: states of this site that are on their way, by the slot of the site that joins.
    """

    def __init__(self, rank: int, send: Callable[[Head, memoryview], None]) -> None:
        self._rank, self._send = rank, send
        self._lock = threading.Lock()
        self._due: deque[SendState] = deque()
        self.awaits = False
        self.own: SendState | None = None
        self.donations: dict[int, Donation] = {}

    def clear(self) -> None:
        """Forget all requests: they were those of another hub."""
        self._due.clear()
        self.donations.clear()
        self.own = None

    def take(self, request: SendState) -> None:
        """Take a request."""
        self.withdraw(request.joiner)
        if request.donor == self._rank:
            self._due.append(request)
        elif request.joiner == self._rank:
            self.own = request

    def withdraw(self, joiner: int) -> None:
        """Answer no request for a site any more."""
        with self._lock:
            self._due = deque(each for each in self._due if each.joiner != joiner)
            self.donations.pop(joiner, None)

    def leave(self, slot: int) -> None:
        """Record that a site has left."""
        self.withdraw(slot)
        if self.own is not None and slot == self.own.donor:
            self.own = None

    def next(self, step: int) -> SendState | None:
        """Return a request that is due in a step, once; None if there is none."""
        with self._lock:
            return self._due.popleft() if self._due and self._due[0].step < step else None

    def is_outdated(self, head: Head) -> bool:
        """Return whether a frame is part of a state that this site does not wait for."""
        if head.kind is not Kind.STATE:
            return False
        own = self.own if self.awaits else None
        return own is None or (own.donor, own.number) != (head.slot, head.tag)

    # States of this site; to be called with the link's lock held

    def donate(self, request: SendState, step: int, digest: bytes, content: bytes) -> None:
        """Begin to send a state of this site; arguments as of `Donation`."""
        donation = self.donations[request.joiner] = Donation(request, step, digest, content)
        self._send_due(donation)

    def take_arrived(self, message: Arrived) -> None:
        """Take a joiner's report on a part of this site's state."""
        donation = self.donations.get(message.slot)
        if donation is None or donation.request.number != message.number:
            return
        donation.arrived(message.part, time.monotonic())
        if donation.complete:
            del self.donations[message.slot]
        self._send_due(donation)

    def _send_due(self, donation: Donation) -> None:
        joiner, number = donation.request.joiner, donation.request.number
        try:
            for part, content in donation.due(time.monotonic()):
                self._send(Head(Kind.STATE, joiner, donation.step, part, tag=number), content)
        except SealingError:  # this site has refused it as a member: it gets no state from here
            self.withdraw(joiner)
