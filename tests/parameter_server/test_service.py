"""The service of a trainer's sequencer: when a site returns, and what waits for it."""

import contextlib
import re
import socket
import threading
import time

import msgspec
import pytest
from support import until

from dadplug import MismatchError
from dadplug.errors import MessageError
from dadplug.exchange import Traffic
from dadplug.parameter_server.connect import ReturnedSites
from dadplug.parameter_server.sequencer import Decision, Rules
from dadplug.parameter_server.service import (
    VERDICTS,
    VERSION,
    Donors,
    Greeting,
    SequencerHost,
    SequencerService,
    Settings,
    Verdict,
    check_settings,
    read_message,
    write_message,
)
from dadplug.parameter_server.streams import HUB, Frame, FrameKind, Log, _Stream

SECONDS = 60.0


class Peer:
    """One site's end of a connection to the service."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, self.theirs = socket.socketpair()
        self.stream = _Stream(rank, ours, 1 << 16)
        self.frames: list[Frame] = []

    def send(self, kind: FrameKind, **fields) -> None:
        self.stream.outgoing.send(Frame(kind, self.rank, **fields).encode())

    def kinds(self) -> list[FrameKind]:
        arrived = []
        self.stream.read(arrived)
        self.frames += [each for _, each in arrived if each.kind is not FrameKind.ALIVE]
        return [each.kind for each in self.frames]

    def wait_for(self, kind: FrameKind) -> Frame:
        """Take the first frame of a kind."""
        until(lambda: kind in self.kinds(), lambda: (kind, self.frames))
        number = self.kinds().index(kind)
        found = self.frames[number]
        del self.frames[number]
        return found

    def over(self) -> bool:
        """Return whether the next decision ends the phase."""
        return msgspec.msgpack.decode(self.wait_for(FrameKind.DECISION).body, type=Decision).over


@pytest.fixture
def serve():
    """Function that starts a service, by default as at the hub, without a site of its own."""
    with contextlib.ExitStack() as stack:

        def start(peers: list[Peer], own=HUB, staleness=100, gather=0.0, in_trainer=False, silence=SECONDS, **options):
            ranks = tuple(each.rank for each in peers)
            settings = Settings(
                ranks, Rules(staleness, 1, "keep", gather), "own", in_trainer, 1 << 16, silence, SECONDS
            )
            sockets = {each.rank: each.theirs for each in peers}
            service = SequencerService(sockets, settings, Traffic(), own, **options)
            stack.callback(service.close)
            return service

        yield start


@pytest.fixture
def peer(serve):
    """Function that makes a site's end of a connection, which is closed before the service."""
    with contextlib.ExitStack() as stack:

        def make(rank: int) -> Peer:
            made = Peer(rank)
            stack.enter_context(made.stream.socket)
            return made

        yield make


def test_a_site_of_a_trainer_returns_in_a_phase_of_steps_which_waits_for_it(serve, peer):
    first, second, back = peer(0), peer(1), peer(1)
    service = serve([first, second], own=0, staleness=4, in_trainer=True)
    second.send(FrameKind.TRAINS)
    second.send(FrameKind.CONTRIBUTION, samples=2, body=b"gradient")
    second.send(FrameKind.BYE, body=b"it was killed")
    assert not first.over()
    assert first.wait_for(FrameKind.LEFT).body == b"it was killed"
    first.send(FrameKind.FINISH, body=b"first")
    assert first.over()
    service.adopt(1, back.theirs)
    first.send(FrameKind.FINISH, body=b"metrics")  # an exchange between phases, which does not wait for the site
    assert first.over()
    assert FrameKind.SNAPSHOT not in first.kinds()
    first.send(FrameKind.TRAINS)
    first.send(FrameKind.CONTRIBUTION, base=1, reached=1, samples=2, body=b"gradient")
    first.send(FrameKind.FINISH, body=b"second")
    assert first.wait_for(FrameKind.RETURNED).site == 1
    assert first.wait_for(FrameKind.SNAPSHOT).number == 1
    assert not first.over()
    first.send(FrameKind.SNAPSHOT, number=1, base=1, body=b"state")
    assert back.wait_for(FrameKind.CONTRIBUTION).body == b"gradient"
    back.send(FrameKind.READY)
    assert back.wait_for(FrameKind.READY).number == 1  # the one of before counts
    assert service._sequencer.awaited == [1]
    back.send(FrameKind.CONTRIBUTION, number=1, base=2, reached=2, samples=2, body=b"its own")
    assert not first.over()
    back.send(FrameKind.FINISH, body=b"third")
    assert first.over()
    assert back.wait_for(FrameKind.DECISION) is not None


def site_returns(serve, peer, contributions=0, **options):
    """Let the last of three sites be lost and return; return the others and it, once the first is asked for a state."""
    peers, back = [peer(rank) for rank in range(3)], peer(2)
    first, second, third = peers
    service = serve(peers, **options)
    for number in range(contributions):
        third.send(FrameKind.CONTRIBUTION, number=number, samples=1, body=b"gradient")
    third.send(FrameKind.BYE, body=b"it was killed")
    assert first.wait_for(FrameKind.LEFT).site == 2
    service.adopt(2, back.theirs)
    assert first.wait_for(FrameKind.SNAPSHOT).number == 2
    assert back.wait_for(FrameKind.RETURNED).site == 2
    return first, second, back


def test_another_site_is_asked_for_its_state_if_the_first_one_is_lost(serve, peer):
    ended = threading.Event()
    first, second, back = site_returns(serve, peer, contributions=1, on_end=ended.set)
    first.send(FrameKind.BYE, body=b"it was killed, too")
    assert second.wait_for(FrameKind.SNAPSHOT)[2:4] == (2, 2)  # the second request, for site 2
    assert back.wait_for(FrameKind.RETURNED).site == 2  # its log begins anew, after the loss
    second.send(FrameKind.SNAPSHOT, number=2, base=2, body=b"state")
    assert back.wait_for(FrameKind.SNAPSHOT).body == b"state"
    back.send(FrameKind.READY)
    assert back.wait_for(FrameKind.READY).number == 1
    second.send(FrameKind.SNAPSHOT, number=2, base=3, body=b"not asked for")
    while (left := back.wait_for(FrameKind.LEFT)).site == 0:  # before its log began anew, and in it
        pass
    assert b"was not asked for it" in left.body
    assert not ended.is_set()
    back.send(FrameKind.BYE)
    assert ended.wait(SECONDS)


def test_another_site_is_asked_for_its_state_if_the_first_one_does_not_answer(serve, peer):
    first, second, back = site_returns(serve, peer, silence=4.0)

    def asked() -> bool:
        for each in (first, second, back):  # the program of the first one is held up, and its heart beats
            each.send(FrameKind.ALIVE)
        return FrameKind.SNAPSHOT in second.kinds()

    until(asked)
    assert back.wait_for(FrameKind.RETURNED).site == 2  # its log begins anew
    second.send(FrameKind.SNAPSHOT, number=2, base=2, body=b"state")
    first.send(FrameKind.SNAPSHOT, number=2, base=1, body=b"late state")
    assert back.wait_for(FrameKind.SNAPSHOT).body == b"state"
    back.send(FrameKind.READY)
    assert back.wait_for(FrameKind.READY).number == 0
    assert [each.body for each in back.frames if each.kind is FrameKind.SNAPSHOT] == []
    assert [each.site for each in second.frames if each.kind is FrameKind.LEFT] == [2]


def asked(donors, receiver, present, now=0.0):
    """Return number and donor of a request."""
    return donors.ask(receiver, present, now)[:2]


def test_a_late_answer_to_an_earlier_request_is_of_no_use():
    donors = Donors(min, 10.0)
    assert asked(donors, 2, [0, 1, 2]) == (1, 0)
    assert donors.leave(2) == []
    assert asked(donors, 2, [0, 1, 2]) == (2, 0)
    assert not donors.answer(0, 2, 1)  # the log of the second process begins later
    assert not donors.answer(1, 2, 2)  # of another site
    assert donors.answer(0, 2, 2)
    assert not donors.answer(0, 2, 2)
    assert donors.ask(1, [1, 2], 0.0) is None  # site 2 has not loaded its state
    donors.ready(2)
    assert asked(donors, 1, [1, 2]) == (3, 2)
    assert donors.leave(2) == [1]
    for number in (0, 4):
        with pytest.raises(ValueError, match="was not asked for it"):
            donors.answer(0, 1, number)


def test_requests_are_overdue_after_longer_and_longer_times():
    donors, present, sending = Donors(min, 10.0), [0, 1, 2], set()
    assert asked(donors, 2, present, 100.0) == (1, 0)

    def overdue(now):
        return donors.overdue(now, present, sending.__contains__)

    assert overdue(110.0) == []
    assert overdue(110.1) == [2]
    sending.add(0)  # a part of its state has arrived
    assert overdue(200.0) == []
    sending.clear()
    assert asked(donors, 2, present, 200.0) == (2, 1)
    assert overdue(219.0) == []
    assert overdue(220.1) == [2]
    assert asked(donors, 2, present, 220.1) == (3, 0)
    assert not donors.answer(0, 2, 1)
    assert overdue(261.0) == [2]
    assert donors.overdue(261.0, [0, 2], sending.__contains__) == []  # there is no other one
    assert donors.answer(0, 2, 3)
    assert overdue(1000.0) == []


def test_the_port_of_a_site_takes_those_that_return_with_the_key():
    key, settings = "k" * 32, Settings((0, 1), Rules(1, 1, "keep"), "own", False, 1 << 16, SECONDS, SECONDS)
    host = SequencerHost(["a", "b"], own=0)
    host_address = host.listen().split(":")
    pairs = [socket.socketpair() for _ in range(2)]

    def answer(connected: socket.socket, *greeting, **fields) -> Verdict:
        connected.settimeout(SECONDS)
        write_message(connected, Greeting(VERSION, *greeting, **fields))
        return read_message(connected, VERDICTS)

    def dial(*greeting, **fields) -> tuple[str, tuple[str, ...]]:
        with socket.create_connection((host_address[0], int(host_address[1]))) as connected:
            verdict = answer(connected, *greeting, **fields)
            return verdict.problem, verdict.names

    with contextlib.ExitStack() as stack:
        stack.callback(host.close)
        for each in pairs:
            stack.enter_context(each[0])
        for rank, (ours, theirs) in enumerate(pairs):
            host.accept(rank, theirs)
            write_message(ours, Greeting(VERSION, key, msgspec.msgpack.encode(settings)))
        for ours, _ in pairs:
            assert read_message(ours, VERDICTS).names == ("a", "b")
        assert host.service(key) is not None
        none = "there is no such training at site 0, it may have ended", ()
        assert dial("x" * 32, rank=1) == none
        assert dial("x" * 32, msgspec.msgpack.encode(settings), 1) == none  # no unknown process starts one
        assert dial(key, rank=2) == none
        assert dial(key, rank=1) == ("", ("a", "b"))
        with socket.create_connection((host_address[0], int(host_address[1]))) as connected:
            connected.sendall(b"DSEQ" + bytes([0, 2, 0, 0]))  # of 512 bytes
            assert "is no message" in read_message(connected, VERDICTS).problem


def test_beyond_the_memory_the_site_that_does_not_read_is_dropped(serve, peer):
    first, second = peer(0), peer(1)
    serve([first, second], memory=1 << 18)
    for number in range(40):
        first.send(FrameKind.CONTRIBUTION, number=number, samples=1, body=bytes(60000))

    def dropped() -> bool:
        first.stream.outgoing.flush()
        return FrameKind.LEFT in first.kinds()

    until(dropped)
    left = first.wait_for(FrameKind.LEFT)
    assert left.site == 1
    assert b"and messages take more than 262144" in left.body


def test_a_site_that_sends_more_than_it_may_leaves_alone(serve, peer):
    """Nothing is committed without the other site; what has arrived would take its memory, too."""
    first, second = peer(0), peer(1)
    service = serve([first, second], staleness=2, memory=1 << 23)
    for number in range(30):
        first.send(FrameKind.CONTRIBUTION, number=number, samples=1, body=bytes(60000))

    def refused() -> bool:
        first.stream.outgoing.flush()
        return FrameKind.LEFT in second.kinds()

    until(refused)
    left = second.wait_for(FrameKind.LEFT)
    assert (left.site, b"follows 11 that are not committed" in left.body) == (0, True)
    second.send(FrameKind.FINISH)
    assert not second.over()  # a commit of what it has sent before
    assert service._connected == {1}


def test_a_site_that_has_not_returned_cannot_say_that_it_has(serve, peer):
    peers = [peer(0), peer(1)]
    serve(peers)
    peers[0].send(FrameKind.READY)
    left = peers[1].wait_for(FrameKind.LEFT)
    assert (left.site, b"it has not returned" in left.body) == (0, True)


def test_a_site_that_there_is_not_is_refused():
    ours, theirs = socket.socketpair()
    sites = ReturnedSites(1, ["a", "b"])
    log = Log(ours, sites, 1 << 16, SECONDS, SECONDS, Traffic())
    with theirs:
        theirs.sendall(b"".join(Frame(FrameKind.LEFT, 2).encode()))
        with pytest.raises(MismatchError, match="has sent a LEFT that does not fit: there is no site 2"):
            log.wait()
        assert not log.left
    log.leave("")


def test_the_site_with_the_sequencer_knows_that_nothing_gets_through_to_the_others(serve, peer):
    first, _, third = peers = [peer(rank) for rank in range(3)]
    service = serve(peers, own=0)
    ours, theirs = socket.socketpair()
    log = Log(ours, ReturnedSites(0, ["a"]), 1 << 16, SECONDS, SECONDS, Traffic(), delayed=service.blocks_others)

    def is_blocked(*readers: Peer) -> bool:
        first.stream.outgoing.flush()
        for reader in readers:
            reader.kinds()
        return log.blocked

    assert not log.blocked
    for number in range(40):
        first.send(FrameKind.CONTRIBUTION, number=number, samples=1, body=bytes(60000))
    until(lambda: is_blocked(first))
    until(lambda: not is_blocked(first, third))  # it is of use to one of them
    theirs.close()
    log.leave("")


def test_the_service_makes_a_commit_that_has_waited_long_enough(serve, peer):
    peers = [peer(0), peer(1)]
    serve(peers, own=0, staleness=8, gather=1.0)
    for number in range(3):
        for each in peers:
            each.send(FrameKind.CONTRIBUTION, number=number, samples=4, body=b"gradient")
        time.sleep(0.3)
    peers[0].send(FrameKind.CONTRIBUTION, number=3, samples=4, body=b"gradient")  # site 1 sends nothing more
    committed: set[int] = set()
    while committed != {0, 1, 2, 3}:
        _, entries, *_ = msgspec.msgpack.decode(peers[0].wait_for(FrameKind.DECISION).body)
        committed |= {number for site, number, *_ in entries if site == 0}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"workers": ()}, "`$.workers`"),
        ({"workers": (0, 1 << 16)}, "`$.workers[1]`"),
        ({"workers": (0, True)}, "`$.workers[1]`"),
        ({"workers": (1, 0)}, "out of range"),
        ({"workers": (0, 0)}, "out of range"),
        ({"workers": (0, 3)}, "out of range"),
        ({"rules": Rules(1, 3, "keep")}, "out of range"),
        ({"rules": Rules(-1, 1, "keep")}, "`$.rules[0]`"),
        ({"rules": Rules(1, 0, "keep")}, "`$.rules[1]`"),
        ({"rules": Rules(1, 1, "keep\n")}, "`$.rules[2]`"),
        ({"rules": Rules(1, 1, "keep", 1.5)}, "`$.rules[3]`"),
        ({"deal": "all"}, "`$.deal`"),
        ({"in_trainer": 1}, "`$.in_trainer`"),
        ({"limit": 0}, "`$.limit`"),
        ({"limit": (1 << 40) + 1}, "`$.limit`"),
        ({"timeout": 0.0}, "`$.timeout`"),
        ({"site_timeout": float("nan")}, "`$.site_timeout`"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_settings_out_of_range_are_refused(change, field):
    fields = msgspec.structs.asdict(Settings((0, 1), Rules(1, 1, "keep"), "own", False, 1 << 16, 10.0, 60.0))
    assert check_settings(msgspec.msgpack.encode(fields), 3).workers == (0, 1)
    with pytest.raises(MessageError, match=re.escape(field)):
        check_settings(msgspec.msgpack.encode(fields | change), 3)
