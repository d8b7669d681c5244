"""The log as one site sees it: contributions that it sends, and commits that arrive."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import MismatchError, SiteError
from ..exchange import Traffic, codec
from ..exchange.failure_reports import PeerNames
from .dealer import Deal
from .frames import Frame, Kind
from .holder import Holder
from .sequencer import Decision, Entry
from .streams import StreamThread


class Commit(NamedTuple):
    """Entry of the log with the contributions that it commits.

    Attributes:
        decision: the entry.
        bodies: the contributions' content, in the entry's order.
        ended: if the phase is over, what each site has sent at its end, by rank in ascending order; else empty.
        asks: rank of a site that returns, which needs this site's state at this place of the log; None without one.
    """

    decision: Decision
    bodies: tuple[bytes | bytearray, ...]
    ended: dict[int, bytes | bytearray]
    asks: int | None = None


class Log:
    """Connection of one site to the sequencer.

    Args:
        connected: the socket.
        holder: the site or hub at which the sequencer is.
        sites: the sites by name.
        limit: bytes of the largest contribution.
        silence: seconds of silence after which the sequencer counts as lost.
        timeout: seconds that a wait may take.
        traffic: meter of sent bytes.
        returns: whether this site returns into a training.
        delayed: returns whether the sequencer has not passed on what it has, where it is at this site.

    Attributes:
        left: by rank, the reason why a site has left, in the order in which they did.
        losses: sites that have left and their reasons, of which the program has not been warned.
        outstanding: number of this site's contributions that are neither committed nor dropped.
        deals: answers of the dealer that have arrived.
        snapshot: state of another site, if this one returns and has got it.
        first: number of this site's first contribution; None if it returns and the number has not arrived.
        epochs: number of epochs of the data that have begun since the start of the training, at the end of a phase.
        over: number of the last epoch of the phase that is over at all sites; -1 if none is.
    """

    def __init__(
        self,
        connected: socket.socket,
        holder: Holder,
        sites: PeerNames,
        limit: int,
        silence: float,
        timeout: float,
        traffic: Traffic,
        returns: bool = False,
        delayed: Callable[[], bool] | None = None,
    ) -> None:
        self.left: dict[int, str] = {}
        self.losses: list[tuple[int, str]] = []
        self.outstanding = 0
        self.deals: deque[Frame] = deque()
        self.snapshot: bytes | bytearray | None = None
        self.first: int | None = None if returns else 0
        self.epochs = 0
        self.over = -1
        self._epochs = 0  # that this site has begun in the phase
        self._holder, self._sequencer = holder, holder.rank
        self._sites = sites
        self._timeout = timeout
        self._traffic = traffic
        self._delayed = delayed
        self._count = 0  # contributions of this site
        self._awaited: list[int] = []  # by the sequencer
        self._bodies: dict[tuple[int, int], bytes | bytearray] = {}
        self._ended: dict[int, bytes | bytearray] = {}  # what sites have sent at the end of the phase
        self._commits: deque[Commit] = deque()
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._thread = StreamThread(
            "dadplug-log", {holder.rank: connected}, limit, silence, traffic, sites.rank, self._on_frames, self._on_lost
        )
        self._thread.start()

    # This site's messages

    @property
    def blocked(self) -> bool:
        """Whether this site's last contribution has not left yet."""
        return self._thread.blocked(self._sequencer) or (self._delayed is not None and self._delayed())

    def contribute(self, base: int, reached: int, samples: int, used: int, body: bytes) -> None:
        """Send a contribution.

        Args:
            base: version that it was computed at.
            reached: version at which this site goes on.
            samples: samples that it stands for.
            used: number of dealt batches that it stands for.
            body: its content.
        """
        rank = self._sites.rank
        with self._changed:
            number, self._count = self._count, self._count + 1
            self._bodies[rank, number] = body
            self.outstanding += 1
        self._thread.send(self._sequencer, Frame(Kind.CONTRIBUTION, rank, number, base, reached, samples, used, body))

    def reach(self, version: int) -> None:
        """Send the version at which this site goes on."""
        self._thread.send(self._sequencer, Frame(Kind.REACHED, self._sites.rank, reached=version))

    def send(self, kind: Kind, number: int = 0, *, samples: int = 0, used: int = 0, body: bytes = b"") -> None:
        """Send a message of the kinds that concern data; for the arguments see `Kind`."""
        frame = Frame(kind, self._sites.rank, number, samples=samples, used=used, body=body)
        self._thread.send(self._sequencer, frame)

    def begin_epoch(self, *, samples: int = 0, used: int = 0) -> int:
        """Send that this site begins an epoch; return its number in the phase.

        Args:
            samples: what the site's share of the step size is proportional to; 0 if that is not given.
            used: number of batches that are dealt in the epoch.
        """
        number, self._epochs = self._epochs, self._epochs + 1
        self.deals.clear()
        self.send(Kind.BEGIN, number, samples=samples, used=used)
        return number

    def finish(self, body: bytes) -> None:
        """Send that this site has no further contribution in this phase.

        Args:
            body: what the other sites need at the end of the phase.
        """
        with self._changed:
            self._ended[self._sites.rank] = body
        self._thread.send(self._sequencer, Frame(Kind.FINISH, self._sites.rank, body=body))

    def leave(self, reason: str) -> None:
        """Send that this site leaves, and close the connection. May be called twice."""
        self._thread.send(self._sequencer, Frame(Kind.BYE, self._sites.rank, body=reason.encode()))
        self._thread.close()

    # What arrives

    def take(self) -> list[Commit]:
        """Return the entries that have arrived since the last call, up to the end of a phase.

        What follows the end of a phase is left for further calls: other sites may have begun the next one.

        Raises:
            SiteError: if the sequencer is lost, and nothing is left to take.
        """
        with self._changed:
            commits: list[Commit] = []
            while self._commits and not (commits and commits[-1].decision.over):
                commits.append(self._commits.popleft())
            if not commits and self._error is not None:
                raise self._failure()
            return commits

    def wait(self, until: Callable[[], bool] = lambda: False, *, entries: bool = True) -> None:
        """Wait until an entry has arrived.

        Args:
            until: ends the wait, too, once it holds; called with the log's lock held.
            entries: whether an entry ends it.

        Raises:
            SiteError: if the sequencer is lost, or nothing arrives within the timeout; the message names the sites that
                the sequencer waits for.
        """
        deadline = time.monotonic() + self._timeout
        with self._traffic.waiting(), self._changed:
            while not (entries and self._commits) and not until():
                if self._error is not None:
                    raise self._failure()
                left = deadline - time.monotonic()
                if left <= 0:
                    names = ", ".join(self._sites[site] for site in self._awaited if site != self._sites.rank)
                    raise SiteError(
                        f"no contribution has been committed for {self._timeout:g} s: the sequencer waits for "
                        f"{names or self._holder.name}"
                    )
                self._changed.wait(left)

    def _failure(self) -> Exception:
        error = self._error
        assert error is not None
        if isinstance(error, (SiteError, MismatchError)):
            return error
        if isinstance(error, TimeoutError):
            return SiteError(f"{self._holder.name}, which has the sequencer, does not answer: {error}")
        self._error = self._holder.lost(error)
        return self._error

    def _on_lost(self, _: int, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _on_frames(self, frames: list[tuple[int, Frame]]) -> None:
        with self._changed:
            for _, frame in frames:
                try:
                    self._handle(frame)
                except (KeyError, TypeError, ValueError) as error:
                    self._error = MismatchError(
                        f"{self._holder.name}, which has the sequencer, has sent a {frame.kind.name} that "
                        f"does not fit: {error}"
                    )
            self._changed.notify_all()

    def _handle(self, frame: Frame) -> None:
        if frame.site >= len(self._sites):
            raise ValueError(f"there is no site {frame.site}")
        if frame.kind is Kind.CONTRIBUTION:
            self._bodies[frame.site, frame.number] = frame.body
        elif frame.kind is Kind.FINISH:
            self._ended[frame.site] = frame.body
        elif frame.kind is Kind.DECISION:
            self.epochs = frame.number
            self._append(frame.body)
        elif frame.kind is Kind.DEAL:
            self.deals.append(frame)
            if frame.used == Deal.OVER:
                self.over = max(self.over, frame.number)
        elif frame.kind is Kind.SNAPSHOT and frame.body:
            self.snapshot = frame.body
        elif frame.kind is Kind.SNAPSHOT:
            self._commits.append(Commit(Decision(0), (), {}, frame.number))
        elif frame.kind is Kind.READY:
            self.first = self._count = frame.number
        elif frame.kind is Kind.RETURNED and frame.site == self._sites.rank:  # the log of this site begins here
            for each in (self._commits, self._bodies, self._ended, self.left):
                each.clear()
            self.losses.clear()
        elif frame.kind is Kind.RETURNED:
            self.left.pop(frame.site, None)
        elif frame.kind is Kind.ALIVE:
            self._awaited = [site for site in codec.decode(frame.body) if 0 <= site < len(self._sites)]
        elif frame.kind is Kind.LEFT:
            reason = frame.body.decode(errors="replace")
            self.left[frame.site] = reason
            if frame.site != self._sites.rank:
                self.losses.append((frame.site, reason))
            else:
                self._error = SiteError(f"the sequencer goes on without this site: {reason}")

    def _append(self, body: bytes | bytearray) -> None:
        version, entries, dropped, over = codec.decode(body)
        decision = Decision(int(version), tuple(Entry(*each) for each in entries), dropped, bool(over))
        for key in dropped:
            del self._bodies[key]
        bodies = tuple(self._bodies.pop((each.site, each.number)) for each in decision.entries)
        own = self._sites.rank
        keys = [*((entry.site, entry.number) for entry in decision.entries), *dropped]
        self.outstanding -= sum(
            site == own and self.first is not None and number >= self.first for site, number in keys
        )
        ended: dict[int, bytes | bytearray] = {}
        if decision.over:
            ended, self._ended = dict(sorted(self._ended.items())), {}
            self.over, self._epochs = -1, 0
        self._commits.append(Commit(decision, bodies, ended))
