"""State of a site on its way to one that joins, paced so that it delays the messages of training little.

It shares the lines of both sites with training, which goes on meanwhile. So it is sent in small parts, of which few are
on the way at a time: the site that joins reports each part, and the delay of the reports shows whether parts wait for
one another. The number of parts on the way rises as long as they do not, and falls when they do. The idea is that of
LEDBAT, RFC 6817.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..secure.epochs import DIGEST_BYTES
from ..wire.messages import SendState

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
