"""Service of the sequencer: receives contributions, passes them on to the other sites, and sends them the log."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from ..errors import SequenceError
from ..exchange import Traffic, codec
from .dealer import Answer, Dealer
from .donors import Donors
from .frames import Frame, Kind
from .holder import HUB
from .sequencer import Decision, Sequencer
from .streams import StreamThread

if TYPE_CHECKING:
    from .returning import Listener


class SequencerService:
    """Sequencer with a connection to each site, in a thread of its own.

    A contribution is passed on as soon as all of it is here, before it is committed; then only the decision is missing
    at the other sites. A contribution of which a part is here when its site leaves is dropped.

    Args:
        sockets: connected sockets, by rank of the site at the other end.
        contributors: ranks of the sites that contribute; the others receive the log.
        sequencer: the sequencer of these.
        dealer: the dealer of their data.
        limit: bytes of the largest contribution.
        timeout: seconds of silence after which a site counts as lost.
        traffic: meter of sent bytes.
        own: rank of the site that has the sequencer, which sends its state to sites that return; `HUB` where the hub
            has it: the first site that contributes does then.
        in_trainer: whether a site that returns waits until others have begun the steps of a phase; this phase does not
            end without it.
        memory: bytes that messages may take here; beyond it the sites with the most of them are dropped.
        on_end: called once all sites have left.

    Attributes:
        listener: the socket for sites that return, which is closed with the service.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        contributors: Collection[int],
        sequencer: Sequencer,
        dealer: Dealer,
        limit: int,
        timeout: float,
        traffic: Traffic,
        own: int,
        in_trainer: bool = False,
        memory: float = math.inf,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._sequencer = sequencer
        self._dealer = dealer
        self._contributors = set(contributors)
        self._connected = set(sockets)
        self._donors = Donors(self._choose_donor)
        self._own = own
        self._on_end, self._ended = on_end, False
        self._resumed_at: int | None = None  # epochs of the checkpoint that the sites have loaded
        self._in_trainer = in_trainer
        self._trains = False  # whether a site has begun the steps of the phase; of interest in trainers
        self._waiting: list[int] = []  # sites that are to return in the next phase of steps
        self.listener: Listener | None = None
        self._open: dict[tuple[int, int], Frame] = {}  # contributions that are not decided on
        self._ends: dict[int, Frame] = {}  # of sites that have ended the phase
        self._left: dict[int, Frame] = {}
        self._thread = StreamThread(
            "dadplug-sequencer",
            sockets,
            limit,
            timeout,
            traffic,
            own,
            self._on_frames,
            self._on_lost,
            self._awaited,
            self._on_adopted,
            self._on_due,
            memory,
            self._held_bytes,
        )
        self._thread.start()

    def admit(self, site: int, connected: socket.socket) -> None:
        """Take over the connection of a site that returns; called in any thread."""
        self._thread.adopt(site, connected)

    def is_blocked(self) -> bool:
        """Return whether a frame for each of the other sites still waits to be sent. May be called from any thread."""
        return self._thread.all_blocked(besides=self._own)

    def close(self) -> None:
        """Close the connections after sending the last frames."""
        if self.listener is not None:
            self.listener.close()
        self._thread.close()

    def _awaited(self) -> bytes:
        return codec.encode(self._sequencer.awaited)

    def _on_frames(self, frames: list[tuple[int, Frame]]) -> None:
        self._sequencer.advance(time.monotonic())
        for site, frame in frames:
            if site not in self._connected:
                continue
            try:
                self._handle(site, frame)
            except ValueError as error:
                self._leave(site, f"the sequencer has refused it: {error}")
        self._decide()

    def _handle(self, site: int, frame: Frame) -> None:
        if frame.kind is Kind.ALIVE:
            return
        if frame.kind is Kind.BYE:
            self._leave(site, frame.body.decode(errors="replace"))
            return
        if frame.kind is Kind.SNAPSHOT:
            if self._donors.answer(site, frame.number) and frame.number in self._connected:
                self._thread.send(frame.number, frame)
            return
        if frame.kind is Kind.EPOCHS:
            self._resume(frame.number)
            return
        if site not in self._contributors or frame.site != site:
            raise SequenceError(f"site {site} has sent a {frame.kind.name} of site {frame.site}")
        if frame.kind in (Kind.CONTRIBUTION, Kind.FINISH):
            if frame.kind is Kind.CONTRIBUTION:
                self._sequencer.contribute(site, frame.number, frame.base, frame.reached, frame.samples)
            else:
                self._sequencer.finish(site)
            self._send_all(frame, besides=site)
            contributes = frame.kind is Kind.CONTRIBUTION
            if contributes:
                self._open[site, frame.number] = frame
            else:
                self._ends[site] = frame
            self._answer(self._dealer.use(site, frame.used) if contributes else self._dealer.finish(site))
        elif frame.kind is Kind.REACHED:
            self._sequencer.reach(site, frame.reached)
        elif frame.kind is Kind.READY:
            self._donors.ready(site)
            self._thread.send(site, Frame(Kind.READY, site, self._join(site)))
        elif frame.kind is Kind.TRAINS:
            self._admit_waiting()
        else:
            self._answer(self._deal(site, frame))
            if frame.kind is Kind.BEGIN and self._in_trainer:
                self._admit_waiting()

    def _resume(self, epochs: int) -> None:
        """Go on with the number of epochs in the checkpoint that a site has loaded."""
        if self._resumed_at is None and not self._dealer.epochs:
            self._resumed_at = self._dealer.epochs = epochs
        elif epochs != self._resumed_at:
            raise SequenceError(f"it has loaded a checkpoint of epoch {epochs}, and other sites go on with another one")

    def _deal(self, site: int, frame: Frame) -> list[Answer]:
        """Pass a message to the dealer; return its answers."""
        if frame.kind in (Kind.BEGIN, Kind.DRAW):
            if frame.kind is Kind.DRAW:
                answers = self._dealer.draw(site, bool(frame.used))
            else:
                if frame.samples:
                    self._sequencer.declare(site, frame.samples)
                answers = self._dealer.begin(site, frame.number, frame.used)
            if self._dealer.makes_wait(site):
                self._sequencer.idle(site)
            return answers
        if frame.kind is Kind.USED:
            return self._dealer.use(site, frame.used)
        if frame.kind is Kind.PASSED:
            return self._dealer.passed(site, frame.number)
        if frame.kind is Kind.ORDER:
            self._dealer.order(frame.number, bytes(frame.body))
            return []
        raise SequenceError(f"a site sends no {frame.kind.name}")

    def _answer(self, answers: list[Answer]) -> None:
        for site, deal, number, resumes in answers:
            if resumes:
                self._sequencer.resume(site)
            self._thread.send(site, Frame(Kind.DEAL, site, number, used=deal))

    def _decide(self) -> None:
        while (decision := self._sequencer.decide()) is not None:
            self._send_all(Frame(Kind.DECISION, number=self._dealer.epochs, body=pack(decision)))
            for key in [*decision.dropped, *((entry.site, entry.number) for entry in decision.entries)]:
                del self._open[key]
            if decision.over:
                self._ends.clear()
                self._trains = False
                self._dealer.end_phase(self._sequencer.present)

    def _on_due(self) -> float | None:
        """Make a commit that has waited for others long enough; return the time until which the next one waits."""
        due = self._sequencer.due
        if due is not None and (now := time.monotonic()) >= due:
            self._sequencer.advance(now)
            self._decide()
        return self._sequencer.due

    def _on_lost(self, site: int, error: Exception) -> None:
        self._leave(site, str(error))
        self._decide()

    def _leave(self, site: int, reason: str) -> None:
        if site in self._waiting:
            self._waiting.remove(site)
        if site in self._connected:
            self._left[site] = Frame(Kind.LEFT, site, body=reason.encode())
            self._send_all(self._left[site])  # to that site, too, if it can be reached
            self._connected.discard(site)
            self._thread.drop(site)
            if site in self._contributors:
                self._sequencer.leave(site)
                self._answer(self._dealer.leave(site))
            for receiver in self._donors.leave(site):
                self._send_state(receiver)
            if not self._connected and not self._ended:
                self._ended = True
                for each in self._waiting:
                    self._thread.drop(each)
                self._waiting.clear()
                self._on_end()

    def _on_adopted(self, site: int) -> None:
        """Send a site that returns what is open; the state that the log up to here makes follows."""
        if site not in self._contributors:
            self._thread.drop(site)
            return
        self._waiting.append(site)
        if self._trains or not self._in_trainer:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Begin the return of the sites that wait for it, if they can take part in the present phase."""
        self._trains = True
        while self._waiting and (self._dealer.has_for_another or not self._in_trainer):
            self._begin_return(self._waiting.pop(0))

    def _join(self, site: int) -> int:
        """Make a site one that contributes; return the number of its next contribution."""
        self._dealer.join(site)
        return self._sequencer.join(site)

    def _begin_return(self, site: int) -> None:
        if self._in_trainer:  # the phase has to wait for it
            self._join(site)
            self._sequencer.idle(site)
        self._left.pop(site, None)
        self._send_all(Frame(Kind.RETURNED, site))
        self._connected.add(site)
        self._send_state(site)

    def _send_state(self, site: int) -> None:
        """Let a site that returns begin with the present place of the log, and with the state of another one there."""
        donor = self._donors.ask(site, self._connected)
        if donor is None:
            self._leave(site, "it has returned, and no other site is left whose state it could take over")
            return
        self._thread.send(site, Frame(Kind.RETURNED, site))
        for frame in [*self._open.values(), *self._ends.values(), *self._left.values()]:
            self._thread.send(site, frame)
        self._thread.send(donor, Frame(Kind.SNAPSHOT, donor, site))

    def _choose_donor(self, able: list[int]) -> int:
        if self._own != HUB:
            return self._own
        awaited = self._sequencer.awaited  # others wait for them, so that they may be slow to answer
        return min(able, key=lambda site: (site not in self._contributors, site in awaited, site))

    def _held_bytes(self) -> int:
        """Return the bytes of the messages that are kept for sites that return."""
        return sum(len(frame.body) for frame in [*self._open.values(), *self._ends.values()])

    def _send_all(self, frame: Frame, besides: int | None = None) -> None:
        for peer in list(self._connected):
            if peer != besides:
                self._thread.send(peer, frame)


def pack(decision: Decision) -> bytes:
    """Return a decision as bytes, for `unpack`."""
    return codec.encode((decision.version, [tuple(each) for each in decision.entries], decision.dropped, decision.over))
