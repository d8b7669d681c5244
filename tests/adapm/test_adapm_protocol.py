"""The protocol: sums that stay exact in any order of messages, checked messages, and a deadline for every wait."""

import os
import random
import select
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import support
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dadplug import SiteError
from dadplug.adapm import ParameterManager, messages
from dadplug.adapm.backends import Done
from dadplug.adapm.builtin import open_network
from dadplug.adapm.engine import TECHNIQUES, Engine
from dadplug.adapm.kernels import SAME, VALUE
from dadplug.adapm.messages import HEAD_SIZE, MOST_BYTES, Head, Message, MessageKind, most_keys
from dadplug.adapm.store import Constant, Store
from dadplug.errors import ProtocolError
from dadplug.exchange import handshake
from dadplug.exchange.handshake import connect_sites
from dadplug.exchange.network import MessageStream


@settings(max_examples=60, deadline=None)
@given(
    sites=st.integers(2, 4),
    technique=st.sampled_from(sorted(TECHNIQUES)),
    seed=st.integers(0, 10**9),
    steps=st.integers(1, 600),
)
def test_sums_are_exact_whatever_the_order_of_messages(sites, technique, seed, steps):
    simulation = Simulation(sites, technique, seed)
    for _ in range(steps):
        simulation.step()
    simulation.check()


@settings(max_examples=30, deadline=None)
@given(sites=st.integers(2, 4), seed=st.integers(0, 10**9))
def test_what_is_set_follows_own_pushes_and_is_seen_at_once(sites, seed):
    simulation = Simulation(sites, "all", seed)
    for _ in range(8):
        for _ in range(40):
            simulation.step(pulls=False)
        rank = simulation.random.randrange(sites)
        keys = np.unique(simulation.some_keys())
        values = np.full((keys.shape[0], WIDTH), 1000.0 * simulation.random.randrange(1, 9), np.float32)
        simulation.flush()  # what other sites push at the same time would come before or after
        simulation.flush()
        while not (outcome := simulation.engines[rank].set(0, keys, values))[0]:
            simulation.flush()
        for engine in simulation.engines:
            run_round(engine)
        while outcome[1] is not None and not outcome[1].is_set():
            simulation.deliver()
        np.testing.assert_array_equal(simulation.pull(rank, keys), values)
        simulation.expected[keys] = values
        simulation.own[:, keys] = 0
    simulation.check()


def deliver_all(simulation):
    while simulation.on_the_way:
        simulation.deliver()


def settled(simulation, rounds=6):
    for _ in range(rounds):
        for engine in simulation.engines:
            run_round(engine)
        deliver_all(simulation)


def owner_of(simulation, key):
    owners = [rank for rank, engine in enumerate(simulation.engines) if key in engine.owned(0)[0]]
    assert len(owners) <= 1
    return owners[0] if owners else None


def test_a_key_wanted_by_one_site_moves_there_and_stays():
    simulation = Simulation(3, "all", 0)
    key = np.array([4], np.int64)  # at home at site 1
    simulation.engines[2].intend(0, key, 0, 5)
    settled(simulation)
    assert owner_of(simulation, 4) == 2
    simulation.engines[2].clock = 9
    settled(simulation)
    assert owner_of(simulation, 4) == 2
    assert not simulation.engines[2].stores[0].replicas


def test_a_key_wanted_by_several_is_replicated_and_the_last_one_keeps_it():
    simulation = Simulation(3, "all", 0)
    key = np.array([4], np.int64)
    for rank in range(3):
        simulation.engines[rank].intend(0, key, 0, 5 if rank < 2 else 50)
    settled(simulation)
    assert owner_of(simulation, 4) == 1
    assert [engine.stores[0].replicas for engine in simulation.engines] == [1, 0, 1]
    simulation.engines[2].push(0, key, np.ones((1, WIDTH), np.float32))
    settled(simulation, 2)
    found = np.empty((1, WIDTH), np.float32)
    assert simulation.engines[0].pull(0, key, found) is None
    assert (found == 1).all()
    for engine in simulation.engines:
        engine.clock = 10
    settled(simulation)
    assert owner_of(simulation, 4) == 2
    assert not any(engine.stores[0].replicas for engine in simulation.engines)


def test_intents_far_ahead_wait():
    simulation = Simulation(2, "all", 0)
    engine = simulation.engines[0]
    engine.intend(0, np.array([1], np.int64), 1000, 1001)
    settled(simulation)
    assert owner_of(simulation, 1) is None
    engine.clock = 995
    settled(simulation)
    assert owner_of(simulation, 1) == 0


def test_a_replica_that_nobody_changes_is_not_sent_again():
    simulation = Simulation(2, "replication_only", 0)
    simulation.engines[0].intend(0, np.array([1, 3], np.int64), 0, 50)
    settled(simulation)
    simulation.engines[1].push(0, np.array([3], np.int64), np.ones((1, WIDTH), np.float32))
    run_round(simulation.engines[0])
    simulation.deliver()
    ((_, _, answer),) = simulation.on_the_way
    keys, codes, _, values = answer.arrays
    assert dict(zip(keys.tolist(), codes.tolist(), strict=True)) == {1: SAME, 3: VALUE}
    assert values.shape == (1, WIDTH)


def test_intents_are_acted_on_while_a_round_is_under_way():
    simulation = Simulation(2, "all", 0)
    first, second = simulation.engines
    second.intend(0, np.array([1], np.int64), 0, 50)
    second.pull(0, np.array([1], np.int64), np.empty((1, WIDTH), np.float32))
    first.intend(0, np.array([1], np.int64), 0, 50)
    settled(simulation)
    first.synchronise()
    assert not first.sync_over
    first.intend(0, np.array([3], np.int64), 0, 50)
    first.act()
    kinds = {message.kind.name for _, _, message in simulation.on_the_way}
    assert kinds == {"SYNC", "INTENT"}
    deliver_all(simulation)
    assert not first._open_rounds
    assert first.sync_over
    assert owner_of(simulation, 3) == 0


WIDTHS = [4]


def head(kind, table=0, origin=0, keys=0, rows=0, request=0, extra=0):
    return struct.pack("<B3xHhIIqq", kind, table, origin, keys, rows, request, extra)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (head(99), "unknown kind 99"),
        (head(MessageKind.PUSH, table=1, keys=1, rows=1), "for table 1, which this site does not have"),
        (head(MessageKind.PUSH, origin=3, keys=1, rows=1), "of site 3, and there are 3"),
        (head(MessageKind.PUSH, origin=-1, keys=1, rows=1), "of site -1"),
        (head(MessageKind.PUSH, keys=2**32 - 1, rows=2**32 - 1), "4294967295 keys"),
        (head(MessageKind.PUSH, keys=most_keys(4) + 1, rows=most_keys(4) + 1), "PUSH of"),
        (head(MessageKind.PUSH, keys=2, rows=1), "2 keys and 1 rows"),
        (head(MessageKind.PULL, keys=2, rows=1), "2 keys and 1 rows"),
        (head(MessageKind.SYNC, keys=2, rows=3), "2 keys and 3 rows"),
        (head(MessageKind.PULL), "0 keys"),
    ],
)
def test_a_head_that_no_site_sends_is_refused_before_memory_is_taken(wrong, message):
    with pytest.raises(ProtocolError, match=message):
        Head(wrong, 0, WIDTHS, 3)


@pytest.mark.parametrize("kind", list(MessageKind))
def test_messages_come_as_they_were_sent(kind):
    types = messages.ARRAYS[kind]
    rows = 3 if kind in (MessageKind.SYNC, MessageKind.SYNCED) else 5  # of five keys
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
    ends = [
        MessageStream(rank, each, HEAD_SIZE, lambda buffer, at: Head(buffer, at, WIDTHS, 2))
        for rank, each in enumerate(made)
    ]
    yield ends
    for each in ends:
        each.close()


def test_a_send_that_the_kernel_has_no_room_for_returns_at_once_and_arrives_whole(pair):
    first, second = pair
    keys = np.arange(50_000)
    values = np.random.default_rng(0).normal(size=(50_000, 4)).astype(np.float32)
    several = [Message(MessageKind.PUSH, 0, 0, number, 0, [keys + number, values + number]) for number in range(3)]
    several.insert(1, Message(MessageKind.BARRIER, 0, 0, 5))
    for message in several:
        assert not first.outgoing.send(message.encode())
    assert first.outgoing.blocked
    came = []
    while len(came) < 4:
        first.outgoing.flush()
        second.read(came)
    assert [message.request for _, message in came] == [0, 5, 1, 2]
    for sent, (sender, got) in zip(several, came):
        assert sender == 1
        for array, other in zip(sent.arrays, got.arrays):
            np.testing.assert_array_equal(array, other)
    assert not first.outgoing.blocked


class Meeting:
    """An exchange of objects between threads of this process."""

    def __init__(self, count):
        self.items = [None] * count
        self.gate = threading.Barrier(count)

    def at(self, rank, also=None):
        def exchange(item, *_):
            if also is not None and isinstance(item, tuple):
                also(item)
            self.items[rank] = item
            self.gate.wait(200)
            items = list(self.items)
            self.gate.wait(200)
            return items

        return exchange


def together(count, work):
    """Call a function with each rank in a thread of its own; return results and errors."""
    with ThreadPoolExecutor(count) as pool:
        calls = [pool.submit(work, rank) for rank in range(count)]
    return [call.exception() or call.result() for call in calls]


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
        return open_network(sockets, timeout, WIDTHS)

    return together(2, connect)


def receive(site):
    messages, lost = site.read(site.poll(0.05))
    return [each for each in messages if each[1].kind is not MessageKind.ALIVE], lost | site.send_heartbeats()


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
    Message(MessageKind.PUSH, 0, 1, 0, 0, [np.array([23]), np.ones((1, 3), np.float32)]),
    Message(MessageKind.PULL, 0, 1, 0, 0, [np.array([-1]), np.zeros(1, np.int32)]),
    Message(MessageKind.PULLED, 0, 1, 99, 0, [np.zeros(1, np.int32), np.ones((1, 3), np.float32)]),
    Message(MessageKind.PULLED, 0, 1, 1, 0, [np.array([7], np.int32), np.ones((1, 3), np.float32)]),
    Message(MessageKind.PULLED, 0, 1, 1, 0, [np.array([-1], np.int32), np.ones((1, 3), np.float32)]),
    Message(MessageKind.PULLED, 0, 1, 1, 0, [np.zeros(2, np.int32), np.ones((2, 3), np.float32)]),
    Message(MessageKind.APPLIED, 0, 1, 1, 1),
    Message(MessageKind.REPLICA, 0, 1, 1, 0, [np.array([0]), np.zeros(1, np.int32), np.ones((1, 3), np.float32)]),
    Message(
        MessageKind.SYNC,
        0,
        1,
        1,
        0,
        [np.array([0]), np.zeros(1, np.int32), np.ones(1, np.int8), np.ones((0, 3), np.float32)],
    ),
    Message(
        MessageKind.SYNCED,
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
    deliver_all(simulation)
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
            wrong = Message(
                MessageKind.PULLED, 0, fails, 12345, 0, [np.zeros(1, np.int32), np.ones((1, 2), np.float32)]
            )
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
            if message.kind is MessageKind.PULLED:
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
    with ThreadPoolExecutor(3) as pool:
        outcomes = [pool.submit(done.wait, 200) for _ in range(3)]
        done.set()
        done.set()
    assert [each.result() for each in outcomes] == [True] * 3
    assert done.is_set()
    assert done.wait(0)


# A simulation of sites whose messages arrive in any order


KEYS, WIDTH = 23, 3


def run_round(engine: Engine) -> None:
    """Act on the intents that are due, and begin a synchronisation round."""
    engine.act()
    engine.synchronise()


class Simulation:
    """Sites and what is on its way between them, delivered in random order."""

    def __init__(self, sites: int, technique: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.on_the_way: list = []
        self.engines = [Engine(rank, sites, technique, self._sender(rank)) for rank in range(sites)]
        for engine in self.engines:
            engine.add_store(Store(WIDTH, KEYS, Constant(), 4))
        self.expected = np.zeros((KEYS, WIDTH), np.float32)
        self.own = np.zeros((sites, KEYS, WIDTH), np.float32)  # what each site has pushed

    def _sender(self, rank):
        return lambda target, message: self.on_the_way.append((rank, target, message))

    def deliver(self) -> None:
        """Deliver one of the messages that are on their way."""
        sender, target, message = self.on_the_way.pop(self.random.randrange(len(self.on_the_way)))
        self.engines[target].receive(sender, message)

    def some_keys(self) -> np.ndarray:
        return np.array([self.random.randrange(KEYS) for _ in range(self.random.randrange(1, 6))], np.int64)

    def push(self, rank: int) -> None:
        keys = self.some_keys()
        deltas = np.array([[self.random.randrange(1, 9) for _ in range(WIDTH)] for _ in keys], np.float32)
        np.add.at(self.expected, keys, deltas)
        np.add.at(self.own[rank], keys, deltas)
        self.engines[rank].push(0, keys, deltas)

    def pull(self, rank: int, keys: np.ndarray) -> np.ndarray:
        out = np.full((keys.shape[0], WIDTH), np.nan, np.float32)
        request = self.engines[rank].pull(0, keys, out)
        while request is not None and not request.is_set():
            self.deliver()
        return out

    def flush(self) -> None:
        flushes = [engine.begin_flush() for engine in self.engines]
        pending = list(zip(self.engines, flushes, strict=True))
        for _ in range(10_000):
            pending = [(engine, flush) for engine, flush in pending if not engine.flushed(flush)]
            if not pending:
                return
            if self.on_the_way:
                self.deliver()
            if self.random.random() < 0.2:
                run_round(self.random.choice(self.engines))
            elif not self.on_the_way:
                for engine in self.engines:
                    run_round(engine)
        raise AssertionError("the flush does not end")

    def step(self, pulls: bool = True) -> None:
        rank = self.random.randrange(len(self.engines))
        engine = self.engines[rank]
        action = self.random.random()
        if action < 0.25:
            self.push(rank)
        elif action < 0.35 and pulls:
            keys = self.some_keys()
            own = self.own[rank][keys].copy()
            found = self.pull(rank, keys)
            assert (found >= own).all(), "a site does not see its own pushes"
            assert (found <= self.expected[keys]).all(), "something has been added twice"
        elif action < 0.5:
            start = engine.clock + self.random.randrange(0, 30)
            engine.intend(0, self.some_keys(), start, start + self.random.randrange(1, 10))
        elif action < 0.6:
            engine.clock += 1
        elif action < 0.66:
            engine.act()
        elif action < 0.72:
            engine.synchronise()
        elif self.on_the_way:
            self.deliver()

    def check(self) -> None:
        """After a flush everywhere, each site sees all sums, and each key has one owner."""
        self.flush()
        self.flush()
        while self.on_the_way:
            self.deliver()
        assert not any(engine._open_rounds for engine in self.engines)
        owners = [engine.owned(0)[0] for engine in self.engines]
        together = np.concatenate(owners)
        assert len(set(together.tolist())) == len(together)
        for rank in range(len(self.engines)):
            np.testing.assert_array_equal(self.pull(rank, np.arange(KEYS)), self.expected)


# A member that sends any messages: no other site crashes, and nothing but a ProtocolError names it


def crafted(chance: random.Random, numbers: np.random.Generator) -> bytes:
    """Return a message whose sizes fit, with any content."""
    kind = chance.choice([each for each in MessageKind if messages.ARRAYS[each] or each is MessageKind.APPLIED])
    count, arrays = chance.randrange(1, 5), []
    for dtype in messages.ARRAYS[kind]:
        if dtype is messages._VALUES:
            partly = kind in messages._PARTLY
            flagged = (
                np.count_nonzero(arrays[2] & 1 if kind is MessageKind.SYNC else arrays[1] == VALUE) if partly else count
            )
            arrays.append(numbers.standard_normal((flagged, 4)).astype(np.float32))
            continue
        limits = np.iinfo(dtype)
        likely, most = numbers.integers(0, 5 if dtype.itemsize == 1 else 50, count), [0, 63, limits.max, limits.min]
        arrays.append((likely if chance.random() < 0.8 else numbers.choice(most, count)).astype(dtype))
    request = chance.choice([0, 1, 2, 3, chance.randrange(60), -5])
    message = Message(kind, 0, chance.randrange(3), request, chance.choice([0, 1, -1]), arrays)
    return b"".join(map(bytes, message.encode()))


def act(engine: Engine, chance: random.Random, numbers: np.random.Generator) -> None:
    """Let a site use some keys."""
    keys = np.unique(numbers.integers(0, 50, 5))
    block = np.ones((len(keys), 4), np.float32)
    match chance.randrange(5):
        case 0:
            engine.pull(0, keys, block)
        case 1:
            engine.push(0, keys, block)
        case 2:
            engine.intend(0, keys, engine.clock, engine.clock + 3)
            engine.act()
        case 3:
            engine.synchronise()
        case 4:
            engine.clock += 1


@pytest.mark.parametrize("seed", range(8))
def test_any_messages_of_a_member_are_taken_or_refused(seed):
    chance, numbers, taken = random.Random(seed), np.random.default_rng(seed), 0
    queue: list[tuple[int, int, Message]] = []
    engines = []
    for rank in range(2):
        engines.append(Engine(rank, 3, "all", lambda to, message, rank=rank: queue.append((rank, to, message))))
        engines[rank].add_store(Store(4, 50, Constant(1.0), 16, None))
    for _ in range(60):
        with suppress(ProtocolError):
            act(chance.choice(engines), chance, numbers)
            for sender, to, message in queue[:100]:
                if to < 2:
                    engines[to].receive(sender, message)
        queue.clear()
        body = crafted(chance, numbers)
        with suppress(ProtocolError):
            chance.choice(engines).receive(2, Head(body, 0, [4], 3).message(bytearray(body[HEAD_SIZE:])))
            taken += 1
    assert taken > 5
