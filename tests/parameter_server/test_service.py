"""The service of a trainer's sequencer: when a site returns, and what waits for it."""

from __future__ import annotations

import socket
import time

from dadplug.exchange import Traffic, codec
from dadplug.parameter_server.dealer import OwnDealer
from dadplug.parameter_server.rules import Rules
from dadplug.parameter_server.sequencer import Sequencer
from dadplug.parameter_server.service import SequencerService
from dadplug.parameter_server.streams import Frame, Kind, _Stream

SECONDS = 60.0


class Peer:
    """One site's end of a connection to the service."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, self.theirs = socket.socketpair()
        self.stream = _Stream(ours, 1 << 16)
        self.frames: list[Frame] = []

    def send(self, kind: Kind, **fields) -> None:
        self.stream.send(Frame(kind, self.rank, **fields))

    def kinds(self) -> list[Kind]:
        self.frames += [each for each in self.stream.read() if each.kind is not Kind.ALIVE]
        return [each.kind for each in self.frames]

    def wait_for(self, kind: Kind) -> Frame:
        """Take the first frame of a kind."""
        deadline = time.monotonic() + SECONDS
        while kind not in self.kinds():
            assert time.monotonic() < deadline, (kind, self.frames)
            time.sleep(0.005)
        number = self.kinds().index(kind)
        found = self.frames[number]
        del self.frames[number]
        return found

    def over(self) -> bool:
        """Return whether the next decision ends the phase."""
        return codec.decode(self.wait_for(Kind.DECISION).body)[3]


def test_a_site_of_a_trainer_returns_in_a_phase_of_steps_which_waits_for_it():
    first, second, back = Peer(0), Peer(1), Peer(1)
    sequencer, dealer = Sequencer([0, 1], Rules(4, 1, "keep")), OwnDealer([0, 1])
    sockets = {0: first.theirs, 1: second.theirs}
    service = SequencerService(sockets, [0, 1], sequencer, dealer, 1 << 16, SECONDS, Traffic(), 0, in_trainer=True)
    try:
        second.send(Kind.TRAINS)
        second.send(Kind.CONTRIBUTION, samples=2, body=b"gradient")
        second.send(Kind.BYE, body=b"it was killed")
        assert not first.over()
        assert first.wait_for(Kind.LEFT).body == b"it was killed"
        first.send(Kind.FINISH, body=b"first")
        assert first.over()
        service.admit(1, back.theirs)
        first.send(Kind.FINISH, body=b"metrics")  # an exchange between phases, which does not wait for the site
        assert first.over()
        assert Kind.SNAPSHOT not in first.kinds()
        first.send(Kind.TRAINS)
        first.send(Kind.CONTRIBUTION, base=1, reached=1, samples=2, body=b"gradient")
        first.send(Kind.FINISH, body=b"second")
        assert first.wait_for(Kind.RETURNED).site == 1
        assert first.wait_for(Kind.SNAPSHOT).number == 1
        assert not first.over()
        first.send(Kind.SNAPSHOT, number=1, body=b"state")
        assert back.wait_for(Kind.CONTRIBUTION).body == b"gradient"
        back.send(Kind.READY)
        assert back.wait_for(Kind.READY).number == 1  # the one of before counts
        assert sequencer.awaited == [1]
        back.send(Kind.CONTRIBUTION, number=1, base=2, reached=2, samples=2, body=b"its own")
        assert not first.over()
        back.send(Kind.FINISH, body=b"third")
        assert first.over()
        assert back.wait_for(Kind.DECISION) is not None
    finally:
        for each in (first, second, back):
            each.stream.socket.close()
        service.close()
