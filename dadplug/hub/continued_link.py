"""Link whose site goes on with its run over a hub that does not know it: restarted, or having given the site up."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SiteError
from ..exchange.transport import Requirements
from .actions import FRESH, Close, Position
from .connection import HubConnection
from .continuation import Continuation
from .frames import pack_control
from .inbox import Inbox
from .kits import Kit
from .restart_messages import Continue, Repeat, Report
from .rounds import Rounds


class ContinuedLink(HubConnection):
    """Connection of the channel "training", of which a new hub is told what it has to know.

    After `Hello` with its position, a site sends a `Report`. It sends no other messages until the hub lets the run go
    on, but keeps them. If the hub lets the site join instead, as one that has started again, all that belongs to the
    open step is forgotten, and `Rounds` raises a `DroppedError` where the program waits for the step.

    Attributes:
        step: number of the open step.
        gone: reasons of the sites that are lost, by slot, in the order in which they were lost.
        rounds: rounds of the link.
    """

    rounds: Rounds

    def __init__(self, kit: Kit, channel: str, address: tuple[str, int] | None = None) -> None:
        super().__init__(kit, channel, address)
        self.step = 1
        self.gone: dict[int, str] = {}
        self._inbox = Inbox(self.names, self.rank)
        self._started = False
        self._continuation = Continuation(self.world_size)

    def extend(self, names: Sequence[str]) -> None:
        before = self.world_size
        super().extend(names)
        self._inbox.extend(names)
        self._continuation.extend(len(names))
        for slot in range(before, len(names)):
            self.gone[slot] = "it has not joined yet"

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
        """Take note that the hub has dropped this site, which may join again if the sites have agreed on that."""
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
