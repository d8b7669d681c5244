"""Run of a training: its sites, their membership, the sums of the hub, and what it keeps of the open round."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from ...errors import FrameError
from ...exchange.transport import Requirements
from ..wire.messages import (
    DTYPES,
    IDLE,
    Accept,
    Action,
    Close,
    Drop,
    Head,
    Join,
    Kind,
    Pause,
    Resume,
    RoundKind,
    Rules,
    Skip,
)
from ..wire.streams import PackedFrame
from .journal import Journal
from .membership import Membership, Phase

LIMIT = 512 << 20  # bytes that a late site may leave to be received


class MissedSteps:
    """Training steps of a run, and those that members have missed.

    Steps are numbered from 0, as `GradientReduction.step` numbers them in a run that begins at 0.

    Args:
        names: names of the sites, by slot.
        journal: the journal.

    Attributes:
        counts: number of steps that each site has missed as a member, by slot.
    """

    def __init__(self, names: Sequence[str], journal: Journal) -> None:
        self._names, self._journal = names, journal
        self.counts = [0] * len(names)
        self._step = 0
        self._first: dict[int, int] = {}  # the first step that a late site has missed, by slot
        self._backlog: dict[int, int] = {}  # bytes that have been sent to it since

    def extend(self, names: Sequence[str]) -> None:
        """Take the names of all sites, since there are further ones."""
        self.counts += [0] * (len(names) - len(self._names))
        self._names = names

    def take(self, action: Action, kind: RoundKind, nbytes: int) -> None:
        """Take an action of the membership.

        Args:
            action: the action.
            kind: kind of the open round.
            nbytes: bytes of its payloads.
        """
        if isinstance(action, Skip):
            self._backlog[action.slot] = self._backlog.get(action.slot, 0) + nbytes
            if kind is RoundKind.FIRST:
                self._skip(action.slot)
        elif isinstance(action, Drop):
            self._end(action.slot, "has left")
        elif isinstance(action, Close) and kind is RoundKind.FIRST:
            for slot in action.contributors:
                self._end(slot, "takes part again")
            self._step += 1

    def _skip(self, slot: int) -> None:
        self.counts[slot] += 1
        if slot not in self._first:
            self._first[slot] = self._step
            self._journal.write(f"{self._names[slot]} is late: training goes on without it from step {self._step} on")

    def _end(self, slot: int, what: str) -> None:
        self._backlog.pop(slot, None)
        first = self._first.pop(slot, None)
        if first is not None:
            steps = f"step {first}" if first == self._step - 1 else f"steps {first} to {self._step - 1}"
            self._journal.write(f"{self._names[slot]} {what}: it has missed {steps}")

    def overdue(self) -> list[int]:
        """Return the slots of late sites for which too much waits."""
        return [slot for slot, nbytes in self._backlog.items() if nbytes > LIMIT]


_Pieces = dict[int, deque[tuple[Head, memoryview]]]  # of equal exchange and offset, by slot

SUMS_LIMIT = 256 << 20  # bytes that wait for other sites' pieces, above which sites that are ahead are not read


class Sums:
    """Pieces of sums that wait for those of other sites; they are added up as soon as all have arrived.

    They are added in the order of slots, so that the result does not depend on the order of arrival. Elements of 16
    bits are added in 32 bits and rounded once. Pieces belong together by exchange and offset, the first ones of all
    sites, then the second ones, and so on.

    Args:
        world_size: number of sites.
        limit: bytes that may wait.

    Attributes:
        nbytes: bytes that wait, by slot.
    """

    def __init__(self, world_size: int, limit: int = SUMS_LIMIT) -> None:
        self.nbytes = [0] * world_size
        self._limit = limit
        self._waiting: dict[tuple[int, int], _Pieces] = {}  # by exchange and offset

    def extend(self, world_size: int) -> None:
        """Take the number of all sites, since there are further ones."""
        self.nbytes += [0] * (world_size - len(self.nbytes))

    def add(self, head: Head, body: memoryview, slots: Sequence[int]) -> bytes | None:
        """Take a piece.

        Args:
            head: its head.
            body: its body.
            slots: slots of the sites whose pieces count, in ascending order.

        Returns:
            The frame of the sum, if all its pieces are here.

        Raises:
            FrameError: if the piece does not fit those of other sites, or too much waits.
        """
        dtype = DTYPES.get(head.tag)
        if dtype is None:
            raise FrameError(f"summands have an unknown type of elements, number {head.tag}")
        if len(body) % dtype.itemsize or head.offset % dtype.itemsize:
            raise FrameError(f"{len(body)} bytes at byte {head.offset} are no summands of type {dtype}")
        if sum(self.nbytes) > 2 * self._limit:
            raise FrameError(f"more than {2 * self._limit} bytes of summands wait for those of other sites")
        key = head.exchange, head.offset
        pieces = self._waiting.setdefault(key, {})
        pieces.setdefault(head.slot, deque()).append((head, body))
        self.nbytes[head.slot] += len(body)
        if not all(slot in pieces for slot in slots):
            return None
        found = [pieces[slot].popleft() for slot in slots]
        for slot, (_, each) in zip(slots, found):
            self.nbytes[slot] -= len(each)
            if not pieces[slot]:
                del pieces[slot]
        if not pieces:
            del self._waiting[key]
        first = found[0][0]
        for other, each in found:
            if (other.tag, len(each)) != (first.tag, len(found[0][1])):
                raise FrameError(
                    f"its summands of exchange {head.exchange} differ in size or type from those of other sites: the "
                    "sites do not run the same program"
                )
        total = add([each for _, each in found], dtype)
        return first._replace(kind=Kind.SUM, slot=0, tag=0).pack() + total

    @property
    def full(self) -> bool:
        """Whether sites that are ahead are not to be read."""
        return sum(self.nbytes) > self._limit

    def is_ahead(self, slot: int) -> bool:
        """Return whether a site is not to be read, since too much of it waits for others."""
        return self.full and self.nbytes[slot] > min(self.nbytes)


def add(summands: Sequence[bytes | memoryview], dtype: torch.dtype) -> bytes:
    """Return a sum.

    Args:
        summands: arrays of equal sizes, at least one.
        dtype: type of their elements.
    """
    if dtype in (torch.bfloat16, torch.float16):
        total = _widen(summands[0], dtype)
        for each in summands[1:]:
            total += _widen(each, dtype)
        return torch.from_numpy(total).to(dtype).view(torch.int16).numpy().tobytes()
    kind = np.dtype(str(dtype).removeprefix("torch."))
    with np.errstate(all="ignore"):  # infinities are the sites' business
        result = np.frombuffer(summands[0], kind).copy()
        for each in summands[1:]:
            result += np.frombuffer(each, kind)
    return result.tobytes()


def _widen(content: bytes | memoryview, dtype: torch.dtype) -> np.ndarray:
    """Return elements of 16 bits as a new array of 32 bits."""
    if dtype == torch.float16:
        return np.frombuffer(content, np.float16).astype(np.float32)
    return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)


_LIMIT = 1 << 30  # bytes


class OpenRound:
    """Frames that all sites are sent in a round, with their senders.

    Args:
        limit: bytes that are kept at most.

    Attributes:
        nbytes: bytes of all frames of the round.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._frames: list[tuple[int, PackedFrame]] = []
        self.nbytes = 0

    @property
    def complete(self) -> bool:
        """Whether all frames of the round have been kept."""
        return self.nbytes <= self._limit

    def append(self, slot: int, frame: PackedFrame) -> None:
        """Keep a frame of a site."""
        self.nbytes += len(frame)
        if self.complete:
            self._frames.append((slot, frame))
        else:
            self._frames.clear()

    def forget(self, slot: int) -> None:
        """Forget the frames of a site that has left."""
        self._frames = [each for each in self._frames if each[0] != slot]

    def clear(self) -> None:
        """Begin a round."""
        self._frames.clear()
        self.nbytes = 0

    def frames(self) -> Iterator[PackedFrame]:
        """Yield the frames, in the order in which they were sent."""
        return (frame for _, frame in self._frames)


SHORT_GRACE = 0.2  # seconds for which a site may connect again where others wait for it
_ABSENT = "it was absent when this site joined"
_HANDSHAKE = 2  # times as long where a connection is in its handshake, which may be that of the site


class Run:
    """One run, by the rules of the hub, which the sites may replace once it has started.

    Args:
        names: names of the sites, by slot.
        site_timeout: seconds of silence after which a site counts as lost.
        life: number of the run's history, see `Membership`.
        now: the time, in seconds.
        journal: log of who comes and goes.

    Attributes:
        names: names of the sites, by slot.
        rules: the rules that hold.
        membership: the membership.
        round: frames of the open round; kept only while the run is elastic.
        missed: training steps that late sites have missed.
        sums: summands that wait for those of other sites.
        ahead: ENDs of later steps than the open one, by slot.
        pause: for whom training waits; empty while it goes on.
        ending: whether a site has left without which the run ends; sites that connect wait for the next one.

    Raises:
        ValueError: if the timeout is out of range.
    """

    def __init__(self, names: Sequence[str], site_timeout: float, life: int, now: float, journal: Journal) -> None:
        self.names = tuple(names)
        self.rules = Rules(len(names), site_timeout=site_timeout)
        self.membership = Membership(names, self.rules, life, now)
        self.round = OpenRound()
        self.missed = MissedSteps(names, journal)
        self.sums = Sums(len(names))
        self.ahead: defaultdict[int, deque[int]] = defaultdict(deque)
        self.pause = ""
        self.ending = False
        # Announcements of the sites that have joined in the open round, which one that joins after them has missed.
        self._joined: dict[int, Join] = {}
        self._kind = RoundKind.COLLECTIVE  # of the open round, once a site has ended it
        self._required: Requirements | None = None

    @property
    def elastic(self) -> bool:
        """Whether the run goes on without a site that leaves."""
        return self._required is not None

    @property
    def may_grow(self) -> bool:
        """Whether sites that are new in the roster can join in the run, which goes on without some sites."""
        return self.elastic and self.membership.started and not self.ending

    @property
    def admits(self) -> bool:
        """Whether sites may join in the open round."""
        return self._kind is RoundKind.FIRST and self.round.complete

    def require(self, requirements: Requirements) -> None:
        """Take what the sites require.

        Args:
            requirements: the requirements.

        Raises:
            FrameError: if other sites have required something else, or it cannot be met.
        """
        if self._required is None:
            self._joined.clear()  # at the start
        elif self._required != requirements:
            raise FrameError(f"it requires {requirements}, and another site {self._required}")
        try:
            rules = replace(
                self.rules,
                min_sites=requirements.min_sites,
                site_timeout=requirements.timeout_ms / 1e3,
                late="skip" if requirements.skips else "wait",
                patience=requirements.patience_percent / 100,
            )
            self.membership.replace_rules(rules)
        except ValueError as error:
            raise FrameError(str(error)) from error
        self._required, self.rules = requirements, rules

    def given_up(self) -> list[tuple[int, str]]:
        """Return the slots of the sites that cannot go on, and why."""
        if not self.elastic:
            return []
        late = [(slot, f"late: more than {LIMIT >> 20} MB wait for it") for slot in self.missed.overdue()]
        orphans = [(slot, "no site is left that holds the state of the training") for slot in orphaned(self.membership)]
        return late + orphans

    def begin_ending(self, head: Head) -> bool:
        """Record the kind of the open round, which the first site that ends it gives.

        Args:
            head: head of the site's END.

        Returns:
            Whether the site contributes nothing.

        Raises:
            FrameError: if it says something unknown.
        """
        if self.elastic and head.step == self.membership.open_step:
            try:
                self.membership.round = self._kind = RoundKind(head.exchange & ~IDLE)
            except ValueError as error:
                raise FrameError(f"it ends a round of an unknown kind, number {head.exchange}") from error
        return bool(head.exchange & IDLE)

    def grace(self, seconds: float, dials: bool) -> float:
        """Return for how long a lost connection is awaited: shortly, where others wait for it.

        Args:
            seconds: the time where all sites must stay.
            dials: whether a connection is in its handshake.
        """
        return min(seconds, SHORT_GRACE * (_HANDSHAKE if dials else 1)) if self.elastic else seconds

    def take(self, action: Action) -> None:
        """Take an action of the membership."""
        self.missed.take(action, self._kind, self.round.nbytes)
        if isinstance(action, Close):
            self.round.clear()
            self._joined.clear()
            self._kind = RoundKind.COLLECTIVE
        elif isinstance(action, Join):
            self._joined[action.slot] = action
        elif isinstance(action, Drop):
            self._joined.pop(action.slot, None)
            self.ahead[action.slot].clear()
            self.round.forget(action.slot)
        elif isinstance(action, Pause):
            self.pause = action.reason
        elif isinstance(action, Resume):
            self.pause = ""

    def earlier(self, accept: Accept) -> list[Action]:
        """Return the announcements that a site which joins has missed: who is absent, and who joins as well."""
        if not accept.needs_state:
            return []
        others = set(range(len(self.names))) - {accept.slot, *self.membership.participants}
        gone: list[Action] = [Drop(slot, self.membership.open_step, _ABSENT) for slot in sorted(others)]
        return [*gone, *self._joined.values()]

    def grow(self, names: Sequence[str]) -> None:
        """Go on with further sites. What the sites require of this run stays.

        Args:
            names: names of all sites; those that are known keep theirs.
        """
        self.membership.append(names[len(self.names) :])
        self.missed.extend(names)
        self.sums.extend(len(names))
        self.names = tuple(names)


def orphaned(membership: Membership) -> list[int]:
    """Return the slots of the sites that wait for a state which no member is left to send."""
    participants = membership.participants
    return [] if any(membership.phase(slot) is Phase.MEMBER for slot in participants) else participants
