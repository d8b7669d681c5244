"""Record of the last two rounds, by which a site goes on with its run over a hub that has been restarted.

See `dadplug.hub.recovery` for the protocol.
"""

from __future__ import annotations

from collections import Counter

from .actions import FRESH, Close, Position
from .frames import Head, Kind
from .restart_messages import Continue, Repeat

LIMIT = 1 << 28  # bytes of frames that are kept
_KEPT = (Kind.PAYLOAD, Kind.SUMMAND, Kind.END)


class KeptFrames:
    """Frames that a site has sent, by step.

    Args:
        limit: bytes that are kept; beyond it the frames of all steps so far are forgotten.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._frames: dict[int, list[bytes]] = {}
        self._nbytes = 0
        self._first = 0  # step from which on all frames are kept

    def append(self, head: Head, frame: bytes) -> None:
        """Keep a frame, if it is of a kind that may have to be sent again."""
        if head.kind not in _KEPT or head.step < self._first:
            return
        self._frames.setdefault(head.step, []).append(frame)
        self._nbytes += len(frame)
        if self._nbytes > self._limit:
            self._first = head.step + 1
            self.forget_before(self._first)

    def forget_before(self, step: int) -> None:
        """Forget the frames of all steps before one."""
        for each in [each for each in self._frames if each < step]:
            self._nbytes -= sum(map(len, self._frames.pop(each)))

    def complete(self, step: int) -> bool:
        """Return whether all frames from a step on are kept."""
        return step >= self._first

    def frames(self, first: int, last: int | None = None) -> list[bytes]:
        """Return the frames of some steps, in the order in which they were sent.

        Args:
            first: the first step.
            last: the last one; None for all.
        """
        steps = sorted(each for each in self._frames if first <= each <= (each if last is None else last))
        return [frame for step in steps for frame in self._frames[step]]


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
        """Take note that a site has left the open round."""
        for counts in (self._counts, self._repeated):
            for key in [key for key in counts if len(key) == 2 and key[1] == slot and key[0] > self.position.step]:
                del counts[key]

    # Announcements of the hub

    def close(self, message: Close, joined: frozenset[int]) -> None:
        """Take note that a round has been closed.

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
