"""The parameter manager's connections: checked messages, refused connections, a deadline for every wait."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time

import numpy as np
import pytest
import support
import torch
from simulation import Simulation

from dadplug import SiteError
from dadplug.adapm import ParameterManager, messages
from dadplug.adapm.backends import Done
from dadplug.adapm.messages import HEAD_SIZE, MOST_BYTES, Head, Kind, Message, most_keys
from dadplug.adapm.network import Connection, Network
from dadplug.errors import ProtocolError
from dadplug.exchange import Traffic, handshake
from dadplug.exchange.handshake import connect_sites

WIDTHS = [4]


def head(kind, table=0, origin=0, keys=0, rows=0, request=0, extra=0):
    return struct.pack("<B3xHhIIqq", kind, table, origin, keys, rows, request, extra)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (head(99), "unknown kind 99"),
        (head(Kind.PUSH, table=1, keys=1, rows=1), "for table 1, which this site does not have"),
        (head(Kind.PUSH, origin=3, keys=1, rows=1), "of site 3, and there are 3"),
        (head(Kind.PUSH, origin=-1, keys=1, rows=1), "of site -1"),
        (head(Kind.PUSH, keys=2**32 - 1, rows=2**32 - 1), "4294967295 keys"),
        (head(Kind.PUSH, keys=most_keys(4) + 1, rows=most_keys(4) + 1), "PUSH of"),
        (head(Kind.PUSH, keys=2, rows=1), "2 keys and 1 rows"),
        (head(Kind.PULL, keys=2, rows=1), "2 keys and 1 rows"),
        (head(Kind.SYNC, keys=2, rows=3), "2 keys and 3 rows"),
        (head(Kind.PULL), "0 keys"),
    ],
)
def test_a_head_that_no_site_sends_is_refused_before_memory_is_taken(wrong, message):
    with pytest.raises(ProtocolError, match=message):
        Head(wrong, 0, WIDTHS, 3)


@pytest.mark.parametrize("kind", list(Kind))
def test_messages_come_as_they_were_sent(kind):
    types = messages.ARRAYS[kind]
    rows = 3 if kind in (Kind.SYNC, Kind.SYNCED) else 5  # of five keys
    arrays = [
        np.arange(rows * 4, dtype=each).reshape(rows, 4) if each.kind == "f" else np.arange(5, dtype=each) + number
        for number, each in enumerate(types)
    ]
    sent = b"".join(bytes(buffer) for buffer in Message(kind, 0, 2, 7, 9, arrays).encode())
    read = Head(sent, 0, WIDTHS, 3)
    assert HEAD_SIZE + read.nbytes == len(sent) <= MOST_BYTES
    came = read.message(np.frombuffer(bytearray(sent), np.uint8, read.nbytes, HEAD_SIZE))
    assert (came.kind, came.table, came.origin, came.request, came.extra) == (kind, 0, 2, 7, 9)
    assert len(came.arrays) == len(arrays)
    for array, other in zip(arrays, came.arrays):
        np.testing.assert_array_equal(array, other)
        assert other.flags.aligned


@pytest.fixture
def pair():
    """Two ends of a connection."""
    made = socket.socketpair()
    for each in made:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    ends = [Connection(rank, each, lambda buffer, at: Head(buffer, at, WIDTHS, 2)) for rank, each in enumerate(made)]
    yield ends
    for each in ends:
        each.close()


def test_a_send_that_the_kernel_has_no_room_for_returns_at_once_and_arrives_whole(pair):
    first, second = pair
    keys = np.arange(50_000)
    values = np.random.default_rng(0).normal(size=(50_000, 4)).astype(np.float32)
    several = [Message(Kind.PUSH, 0, 0, number, 0, [keys + number, values + number]) for number in range(3)]
    several.insert(1, Message(Kind.BARRIER, 0, 0, 5))
    for message in several:
        assert not first.send(message.encode())
    assert first.blocked
    came = []
    while len(came) < 4:
        first.flush()
        second.read(came)
    assert [message.request for _, message in came] == [0, 5, 1, 2]
    for sent, (sender, got) in zip(several, came):
        assert sender == 1
        for array, other in zip(sent.arrays, got.arrays):
            np.testing.assert_array_equal(array, other)
    assert not first.blocked


def test_bytes_that_are_no_message_are_an_error(pair):
    pair[0].send([b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n"])
    with pytest.raises(ProtocolError):
        pair[1].read([])


class Meeting:
    """An exchange of objects between threads of this process."""

    def __init__(self, count):
        self.items = [None] * count
        self.gate = threading.Barrier(count)

    def at(self, rank, also=None):
        def exchange(item):
            if also is not None and isinstance(item, tuple):
                also(item)
            self.items[rank] = item
            self.gate.wait(200)
            items = list(self.items)
            self.gate.wait(200)
            return items

        return exchange


def together(count, work):
    outcomes = [None] * count

    def run(rank):
        try:
            outcomes[rank] = work(rank)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return outcomes


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_sites_of_one_machine_meet_on_it_alone_and_refuse_intruders(platform, monkeypatch, caplog):
    """They use Unix sockets without files on Linux, and loopback elsewhere."""
    if platform == "linux" and sys.platform != "linux":
        pytest.skip("Linux alone has names of Unix sockets without files")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(handshake, "own_addresses", lambda: ["0.0.0.0"])  # would be of a machine with other machines
    meeting, places, intruders = Meeting(2), [], []

    def intrude(place):
        host, port, _, name = place
        places.append(host or name)
        if platform == "linux":
            intruder = socket.socket(socket.AF_UNIX)
            intruder.connect(name)
        else:
            intruder = socket.create_connection((host, port))
        intruder.sendall(struct.pack("<16sI", b"0" * 16, 1))
        intruders.append(intruder)

    def work(rank):
        return connect_sites(rank, meeting.at(rank, intrude if rank == 0 else None), 20, "site {}".format)

    first, second = together(2, work)
    if platform == "linux":
        assert places[0].startswith(b"\0dadplug-")
    else:
        assert places == ["127.0.0.1"]
    first[1].sendall(b"hello")
    assert second[0].recv(5) == b"hello"
    assert intruders[0].recv(1) == b""  # closed
    assert "refused 1 connections" in caplog.text
    for each in (first[1], second[0], *intruders):
        each.close()


def test_a_site_that_does_not_come_is_named_within_the_timeout():
    meeting = Meeting(2)

    def work(rank):
        if rank == 0:
            return connect_sites(0, meeting.at(0), 0.5, "site {}".format)
        exchange = meeting.at(1)
        exchange(handshake.own_node())
        exchange(("127.0.0.1", 1, b"0" * 16, b""))

    first, _ = together(2, work)
    assert isinstance(first, SiteError)
    assert "for a connection from site 1" in str(first)


def networks(timeout):
    meeting = Meeting(2)

    def connect(rank):
        sockets = connect_sites(rank, meeting.at(rank), timeout, "site {}".format)
        return Network(sockets, timeout, Traffic(), WIDTHS)

    return together(2, connect)


def receive(site):
    messages, lost = site.read(site.poll(0.05))
    return [each for each in messages if each[1].kind is not Kind.ALIVE], lost | site.send_heartbeats()


def test_a_silent_site_is_lost_and_signs_of_life_keep_a_quiet_one():
    first, second = networks(1.0)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        for site in (first, second):
            assert receive(site) == ([], {})
    lost = {}
    deadline = time.monotonic() + 20
    while not lost and time.monotonic() < deadline:  # the second is silent from now on
        lost = receive(first)[1]
    assert list(lost) == [1]
    assert isinstance(lost[1], TimeoutError)
    assert first.silent == 1
    for site in (first, second):
        site.close()


def test_a_forked_child_lets_connections_go():
    first, second = networks(60.0)
    ended, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    first.close()
    deadline, lost = time.monotonic() + 30, {}
    while not lost and time.monotonic() < deadline:
        lost = receive(second)[1]
    os.close(end)
    os.waitpid(child, 0)
    os.close(ended)
    second.close()
    assert list(lost) == [0]  # although a child of it lived


BAD = [
    Message(Kind.PUSH, 0, 1, 0, 0, [np.array([23]), np.ones((1, 3), np.float32)]),
    Message(Kind.PULL, 0, 1, 0, 0, [np.array([-1]), np.zeros(1, np.int32)]),
    Message(Kind.PULLED, 0, 1, 99, 0, [np.zeros(1, np.int32), np.ones((1, 3), np.float32)]),
    Message(Kind.PULLED, 0, 1, 1, 0, [np.array([7], np.int32), np.ones((1, 3), np.float32)]),
    Message(Kind.PULLED, 0, 1, 1, 0, [np.array([-1], np.int32), np.ones((1, 3), np.float32)]),
    Message(Kind.PULLED, 0, 1, 1, 0, [np.zeros(2, np.int32), np.ones((2, 3), np.float32)]),
    Message(Kind.APPLIED, 0, 1, 1, 1),
    Message(Kind.REPLICA, 0, 1, 1, 0, [np.array([0]), np.zeros(1, np.int32), np.ones((1, 3), np.float32)]),
    Message(
        Kind.SYNC, 0, 1, 1, 0, [np.array([0]), np.zeros(1, np.int32), np.ones(1, np.int8), np.ones((0, 3), np.float32)]
    ),
    Message(
        Kind.SYNCED,
        0,
        1,
        1,
        0,
        [np.array([0]), np.ones(1, np.int8), np.zeros(1, np.int32), np.ones((0, 3), np.float32)],
    ),
]


@pytest.mark.parametrize("message", BAD, ids=lambda message: message.kind.name)
def test_contents_that_do_not_fit_change_nothing(message):
    simulation = Simulation(2, "all", 0)
    engine = simulation.engines[0]
    engine.push(0, np.array([0, 2]), np.ones((2, 3), np.float32))
    out = np.zeros((1, 3), np.float32)
    request = engine.pull(0, np.array([1]), out)
    values = engine.owned(0)[1]
    with pytest.raises(ProtocolError):
        engine.receive(1, message)
    assert not out.any()
    np.testing.assert_array_equal(engine.owned(0)[1], values)
    while simulation.on_the_way:
        simulation.deliver()
    assert request.is_set()


@pytest.mark.parametrize("seed", range(3))
def test_calls_with_more_keys_than_a_message_may_have_are_exact(monkeypatch, seed):
    monkeypatch.setattr(messages, "MOST_BYTES", 100)
    simulation = Simulation(3, "all", seed)
    for _ in range(200):
        simulation.step()
    assert most_keys(3) == 2
    assert all(message.arrays[0].shape[0] <= 2 for _, _, message in simulation.on_the_way if message.arrays)
    simulation.check()


def hears_a_wrong_message(fails):
    with ParameterManager(timeout=200) as manager:
        table = manager.table("t", 2, rows=10)
        table.pull(torch.arange(10))
        manager.barrier()
        if manager.rank == fails:
            wrong = Message(Kind.PULLED, 0, fails, 12345, 0, [np.zeros(1, np.int32), np.ones((1, 2), np.float32)])
            manager._backend._send(1 - fails, wrong)
        try:
            manager.barrier()
            while True:
                table.pull(torch.arange(10))
        except SiteError as error:
            message = str(error)
        manager.close()
        manager.barrier = lambda: None
        return message


def test_a_site_that_sends_what_no_site_sends_is_named():
    first, second = support.sites(2).run(hears_a_wrong_message, 1)
    assert "site 1 (" in first
    assert "sent an invalid message: PULLED for 1 keys that this site has not asked for" in first
    assert "site 0 (" in second


def receives_in_the_worker(_):
    with ParameterManager(timeout=200) as manager:
        table = manager.table("t", 2, rows=10)
        table.set(torch.arange(manager.rank, 10, 2), torch.full((5, 2), float(manager.rank + 1)))
        manager.barrier()
        receive, receivers = manager._backend.engine.receive, []

        def noting(sender, message):
            if message.kind is Kind.PULLED:
                receivers.append(threading.current_thread())
            receive(sender, message)

        manager._backend.engine.receive = noting
        expected = torch.tensor([1.0, 2.0]).repeat(5).reshape(10, 1).expand(10, 2)
        exact = all(torch.equal(table.pull(torch.arange(10)), expected) for _ in range(200))
        manager.barrier()
        return exact, threading.current_thread() in receivers


def test_the_worker_that_waits_receives_the_answer_itself():
    if hasattr(select, "epoll"):
        assert support.sites(2).run(receives_in_the_worker, None) == [(True, True)] * 2


def is_interrupted(_):
    with ParameterManager(timeout=200) as manager:
        table = manager.table("t", 2, rows=10)
        manager.barrier()
        poll, polls = manager._backend._network.poll, []

        def interrupted(timeout):
            if threading.current_thread() is threading.main_thread() and not polls:
                polls.append(timeout)
                raise KeyboardInterrupt
            return poll(timeout)

        manager._backend._network.poll = interrupted
        raised = False
        for _ in range(200):
            try:
                table.pull(torch.arange(10))
            except KeyboardInterrupt:
                raised = True
                break
        table.push(torch.arange(10), torch.ones(10, 2))
        manager.wait_sync(everywhere=True)
        return raised, table.pull(torch.arange(10)).unique().tolist()


def test_a_worker_that_is_interrupted_while_it_receives_leaves_the_manager_usable():
    if hasattr(select, "epoll"):
        assert support.sites(2).run(is_interrupted, None) == [(True, [2.0])] * 2


def test_done_ends_all_waits_and_stays():
    done = Done()
    assert not done.is_set()
    assert not done.wait(0.01)
    outcomes = []
    threads = [threading.Thread(target=lambda: outcomes.append(done.wait(200))) for _ in range(3)]
    for thread in threads:
        thread.start()
    done.set()
    done.set()
    for thread in threads:
        thread.join(200)
    assert outcomes == [True] * 3
    assert done.is_set()
    assert done.wait(0)
