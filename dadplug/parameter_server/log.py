"""The log as one site sees it: contributions that it sends, and commits that arrive."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import MismatchError, SiteError
from ..exchange import Traffic, codec
from ..exchange.handshake import Deadline
from ..exchange.status import PeerNames
from .sequencer import Decision, Entry
from .streams import Deal, Frame, FrameLoop, Kind

_LOOK_SECONDS = 1.0  # between two looks whether the hub is away
HUB = -1  # in place of a rank: the hub


class Holder(NamedTuple):
    """Place that has the sequencer: a site or the hub.

    Attributes:
        rank: rank of the site; `HUB` for the hub.
        name: its name.
        lost: converts the error of the connection to it into one that says what was lost.
    """

    rank: int
    name: str
    lost: Callable[[Exception], SiteError]

    @classmethod
    def at_site(cls, sites: PeerNames, rank: int, timeout: float) -> Holder:
        """Return the holder that is a site.

        Args:
            sites: the sites by name.
            rank: the site.
            timeout: seconds that a wait may take.
        """

        def lost(error: Exception) -> SiteError:
            found = sites.lost(error, timeout, rank)
            return SiteError(f"{found} (it has the sequencer, without which training cannot go on)")

        return cls(rank, sites[rank], lost)

    @classmethod
    def at_hub(cls, name: str, check: Callable[[], None]) -> Holder:
        """Return the holder that is the hub.

        Args:
            name: name of the hub.
            check: raises the error with which the connection to the hub has failed, if it has.
        """

        def lost(error: Exception) -> SiteError:
            try:
                check()
                found = f"{name} has ended the connection to its sequencer: {error}"
            except SiteError as failure:
                found = str(failure)
            return SiteError(
                f"{found} (the hub has the log of this training; if the hub was restarted, the log is lost: start all "
                "sites again from their last checkpoint)"
            )

        return cls(HUB, name, lost)


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


class Log(FrameLoop):
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
        delayed: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__("dadplug-log", {holder.rank: connected}, limit, silence, traffic, sites.rank)
        self.left: dict[int, str] = {}
        self.losses: list[tuple[int, str]] = []
        self.outstanding = 0
        self.deals: deque[Frame] = deque()
        self.snapshot: bytes | bytearray | None = None
        self.first: int | None = None if returns else 0
        self.epochs = 0
        self.over = -1
        self._epochs = 0  # that this site has begun in the phase
        self._holder = holder
        self._sites = sites
        self._timeout = timeout
        self._delayed = delayed
        self._count = 0  # contributions of this site
        self._awaited: list[int] = []  # by the sequencer
        self._bodies: dict[tuple[int, int], bytes | bytearray] = {}
        self._ended: dict[int, bytes | bytearray] = {}  # what sites have sent at the end of the phase
        self._commits: deque[Commit] = deque()
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self.start()

    # This site's messages

    @property
    def blocked(self) -> bool:
        """Whether this site's last contribution has not left yet."""
        return self.is_blocked(self._holder.rank) or self._delayed()

    def send(
        self,
        kind: Kind,
        number: int = 0,
        *,
        base: int = 0,
        reached: int = 0,
        samples: int = 0,
        used: int = 0,
        body: bytes = b"",
    ) -> None:
        """Send a message; for its fields see `Kind` and `Frame`."""
        self.post(self._holder.rank, Frame(kind, self._own, number, base, reached, samples, used, body))

    def contribute(self, base: int, reached: int, samples: int, used: int, body: bytes) -> None:
        """Send a contribution.

        Args:
            base: version that it was computed at.
            reached: version at which this site goes on.
            samples: samples that it stands for.
            used: number of dealt batches that it stands for.
            body: its content.
        """
        with self._changed:
            number, self._count = self._count, self._count + 1
            self._bodies[self._own, number] = body
            self.outstanding += 1
        self.send(Kind.CONTRIBUTION, number, base=base, reached=reached, samples=samples, used=used, body=body)

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
            self._ended[self._own] = body
        self.send(Kind.FINISH, body=body)

    def leave(self, reason: str) -> None:
        """Send that this site leaves, and close the connection. May be called twice."""
        self.send(Kind.BYE, body=reason.encode())
        self.close()

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
            if not commits:
                self._raise_failure()
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
        deadline = Deadline(self._timeout)
        with self._traffic.waiting(), self._changed:
            while not (entries and self._commits) and not until():
                self._raise_failure()
                if deadline.over:
                    names = ", ".join(self._sites[site] for site in self._awaited if site != self._own)
                    raise SiteError(
                        f"no contribution has been committed for {self._timeout:g} s: the sequencer waits for "
                        f"{names or self._holder.name}"
                    )
                if self.is_away:  # no time counts
                    deadline = Deadline(self._timeout)
                self._changed.wait(min(deadline.left, _LOOK_SECONDS))

    def _raise_failure(self) -> None:
        """Raise the error by which the sequencer is lost, if there is one."""
        if isinstance(self._error, TimeoutError):
            raise SiteError(f"{self._holder.name}, which has the sequencer, does not answer: {self._error}")
        if self._error is not None and not isinstance(self._error, (SiteError, MismatchError)):
            self._error = self._holder.lost(self._error)
        if self._error is not None:
            raise self._error

    def on_lost(self, peer: int, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def on_frames(self, frames: list[tuple[int, Frame]]) -> None:
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
        match frame.kind:
            case Kind.CONTRIBUTION:
                self._bodies[frame.site, frame.number] = frame.body
            case Kind.FINISH:
                self._ended[frame.site] = frame.body
            case Kind.DECISION:
                self.epochs = frame.number
                self._append(frame.body)
            case Kind.DEAL:
                self.deals.append(frame)
                if frame.used == Deal.OVER:
                    self.over = max(self.over, frame.number)
            case Kind.SNAPSHOT if frame.body:
                self.snapshot = frame.body
            case Kind.SNAPSHOT:
                self._commits.append(Commit(Decision(0), (), {}, frame.number))
            case Kind.READY:
                self.first = self._count = frame.number
            case Kind.RETURNED if frame.site == self._own:  # the log of this site begins here
                for each in (self._commits, self._bodies, self._ended, self.left, self.losses):
                    each.clear()
            case Kind.RETURNED:
                self.left.pop(frame.site, None)
            case Kind.ALIVE:
                self._awaited = [site for site in codec.decode(frame.body) if 0 <= site < len(self._sites)]
            case Kind.LEFT:
                reason = frame.body.decode(errors="replace")
                self.left[frame.site] = reason
                if frame.site == self._own:
                    self._error = SiteError(f"the sequencer goes on without this site: {reason}")
                else:
                    self.losses.append((frame.site, reason))

    def _append(self, body: bytes | bytearray) -> None:
        version, entries, dropped, over = codec.decode(body)
        decision = Decision(int(version), tuple(Entry(*each) for each in entries), dropped, bool(over))
        bodies = tuple(self._bodies.pop(key) for key in decision.keys)[: len(decision.entries)]
        if self.first is not None:
            self.outstanding -= sum(site == self._own and number >= self.first for site, number in decision.keys)
        ended: dict[int, bytes | bytearray] = {}
        if decision.over:
            ended, self._ended = dict(sorted(self._ended.items())), {}
            self.over, self._epochs = -1, 0
        self._commits.append(Commit(decision, bodies, ended))
