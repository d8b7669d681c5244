"""Byte streams between sites over a hub: order, back-pressure, short outages, and the end of a site or the hub."""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cutting_relay import CuttingRelay
from running_hub import running_hub, until

from dadplug.errors import SiteError
from dadplug.hub import peer_stream
from dadplug.hub.tunnel import Tunnel

SECONDS = 60.0


class Meeting:
    """An exchange of objects between threads of this process."""

    def __init__(self, count: int) -> None:
        self._barrier, self._items = threading.Barrier(count), {}

    def at(self, rank: int):
        def exchange(item):
            self._items[rank] = item
            self._barrier.wait(SECONDS)
            found = [self._items[each] for each in sorted(self._items)]
            self._barrier.wait(SECONDS)
            return found

        return exchange


class Sites:
    """Tunnels of several sites in one process."""

    def __init__(self, hub, names: str, address=None) -> None:
        self.tunnels = [Tunnel(hub.kit(name), address) for name in names]
        for each in self.tunnels:
            each.start(SECONDS)

    def open(self) -> list[dict[int, socket.socket]]:
        """Open a channel; return the sockets of each site."""
        meeting = Meeting(len(self.tunnels))

        def at(rank):
            exchange = meeting.at(rank)
            found = self.tunnels[rank].open(exchange)
            exchange(None)
            return found

        with ThreadPoolExecutor(len(self.tunnels)) as pool:
            return list(pool.map(at, range(len(self.tunnels))))

    def close(self) -> None:
        for each in self.tunnels:
            each.close()


@pytest.fixture
def three(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        sites = Sites(hub, "abc")
        yield sites
        sites.close()


@pytest.fixture
def cut(tmp_path):
    """Two sites behind a relay, and the relay."""
    with running_hub(tmp_path / "kits") as hub, CuttingRelay(hub.address) as relay:
        sites = Sites(hub, "ab", relay.address)
        yield sites, relay
        sites.close()


def send(to: socket.socket, content: bytes, seed: int = 0) -> None:
    """Send in parts of random sizes, as a program without threads does, one buffer or several at a time."""
    chance = random.Random(seed)
    rest = memoryview(content)
    deadline = time.monotonic() + SECONDS
    while rest:
        size = chance.choice((1, 40, 3000, 70_000, 500_000))
        parts = [rest[:size], rest[size : 2 * size]]
        try:
            count = to.sendmsg(parts) if chance.random() < 0.5 else to.send(parts[0])
        except BlockingIOError:
            select.select([], [to], [], 1)
            assert time.monotonic() < deadline
            continue
        rest = rest[count:]


def receive(of: socket.socket, size: int) -> bytes:
    content = bytearray()
    deadline = time.monotonic() + SECONDS
    while len(content) < size:
        assert time.monotonic() < deadline, f"{len(content)} of {size} bytes"
        if select.select([of], [], [], 1)[0]:
            part = of.recv(1 << 16)
            if not part:
                break
            content += part
    return bytes(content)


def exchange_all(sockets: list[dict[int, socket.socket]], size: int, seed: int = 0) -> None:
    """Send random bytes between each pair of sites, at once in both directions, and compare them."""
    content = {
        (rank, peer): random.Random(f"{seed}{rank}{peer}").randbytes(size)
        for rank, at in enumerate(sockets)
        for peer in at
    }
    with ThreadPoolExecutor(2 * len(content)) as pool:
        sent = [pool.submit(send, sockets[rank][peer], content[rank, peer], rank) for rank, peer in content]
        came = {(rank, peer): pool.submit(receive, sockets[peer][rank], size) for rank, peer in content}
        for each in sent:
            each.result()
        for pair, each in came.items():
            assert each.result() == content[pair], f"from {pair[0]} to {pair[1]}"


def at_end(of: socket.socket) -> bool:
    """Wait until something arrives; return whether it is the end of the stream."""
    assert select.select([of], [], [], SECONDS)[0]
    return of.recv(100) == b""


def test_bytes_arrive_in_order_between_all_pairs(three):
    exchange_all(three.open(), 1_000_000)


def test_several_channels_do_not_mix(three):
    three.tunnels[1]._next = 7  # a manager that failed at this site only
    first, second = three.open(), three.open()
    first[0][1].send(b"one")
    second[0][1].send(b"two")
    assert receive(second[1][0], 3) == b"two"
    assert receive(first[1][0], 3) == b"one"
    exchange_all(first, 100_000, 1)
    for at in first:
        for each in at.values():
            each.close()
    exchange_all(second, 100_000, 2)


def test_a_program_that_does_not_read_holds_up_only_its_own_stream(three, monkeypatch):
    sockets = three.open()
    full = sockets[0][1]
    content = random.Random(0).randbytes(12_000_000)
    sent, blocked = 0, time.monotonic()
    while sent <= peer_stream.WINDOW // 2 or time.monotonic() - blocked < 1:
        try:
            sent += full.send(memoryview(content)[sent : sent + 1_000_000])
            blocked = time.monotonic()
        except BlockingIOError:
            select.select([], [full], [], 0.1)
    assert peer_stream.WINDOW // 2 < sent < 2 * peer_stream.WINDOW
    exchange_all([{2: sockets[0][2]}, {}, {0: sockets[2][0]}], 1_000_000)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(send, full, content[sent:])
        assert receive(sockets[1][0], len(content)) == content
        rest.result()


def test_a_blocked_stream_does_not_keep_the_thread_busy(three, monkeypatch):
    sockets = three.open()
    waits = []
    plain = Tunnel._wait
    monkeypatch.setattr(Tunnel, "_wait", lambda self, seconds: waits.append(self) or plain(self, seconds))
    until(lambda: not select.select([], [sockets[0][1]], [], 0.5)[1] or not sockets[0][1].send(bytes(1_000_000)))

    def rests() -> bool:
        waits.clear()
        time.sleep(0.5)
        return len(waits) < 25  # pings

    until(rests)


@pytest.mark.parametrize("seed", range(3))
def test_short_outages_lose_nothing(cut, seed):
    sites, relay = cut
    sockets = sites.open()
    chance = random.Random(seed)
    for number in range(6):
        before = relay.cuts
        relay.cut_after(chance.randrange(2), chance.choice((1, 40, 5_000, 700_000)))
        exchange_all(sockets, 1_000_000, 100 * seed + number)
        assert relay.cuts > before


def test_what_is_sent_during_an_outage_arrives_after_it(cut):
    sites, relay = cut
    sockets = sites.open()
    relay.refuse = True
    relay.cut()
    until(lambda: all(each.outage for each in sites.tunnels))
    for each in (b"ping", b"pong"):
        assert sockets[0][1].send(each) == 4
    assert not select.select([sockets[1][0]], [], [], 0.2)[0]
    relay.refuse = False
    assert receive(sockets[1][0], 8) == b"pingpong"


def test_the_end_of_a_stream_comes_after_its_bytes(three):
    sockets = three.open()
    content = bytes(range(256)) * 8000
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(receive, sockets[1][0], len(content) + 1)
        send(sockets[0][1], content)
        sockets[0][1].close()
        assert came.result() == content
    assert at_end(sockets[1][0])
    sockets[1][0].close()
    exchange_all([{2: sockets[0][2]}, {}, {0: sockets[2][0]}], 10_000)
    until(lambda: all(len(each._streams) < 2 for each in three.tunnels[:2]))


def test_the_end_of_a_tunnel_ends_the_streams_of_others(three):
    sockets = three.open()
    sockets[0][1].send(b"the last words")
    three.tunnels[0].close()
    assert receive(sockets[1][0], 100) == b"the last words"
    assert at_end(sockets[2][0])
    exchange_all([{}, {2: sockets[1][2]}, {1: sockets[2][1]}], 100_000)
    with pytest.raises(SiteError, match="has closed its connection"):
        three.tunnels[0].open(lambda item: [item])


def test_a_site_that_does_not_come_back_ends_its_streams(tmp_path):
    with running_hub(tmp_path / "kits", grace=0.3) as hub, CuttingRelay(hub.address) as relay:
        sites = Sites(hub, "a", relay.address)
        sites.tunnels += Sites(hub, "b").tunnels
        sockets = sites.open()
        relay.refuse = True
        relay.cut()
        assert at_end(sockets[1][0])
        relay.refuse = False
        assert at_end(sockets[0][1])
        with pytest.raises(SiteError, match="given this site up"):
            sites.tunnels[0].check()
        sites.close()


def test_the_end_of_the_hub_ends_all_streams(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        sites = Sites(hub, "ab")
        sockets = sites.open()
    for rank in range(2):
        assert at_end(sockets[rank][1 - rank])
        with pytest.raises(SiteError, match=r"the hub at 127.0.0.1"):
            sites.tunnels[rank].check()
        with pytest.raises(OSError):  # noqa: PT011
            sockets[rank][1 - rank].send(b"too late")
    sites.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_closes_its_copies_and_disturbs_nothing(three):
    sockets = three.open()
    opened = [each._connection.fileno() for each in three.tunnels]
    opened += [stream.local.fileno() for each in three.tunnels for stream in each._streams.values()]
    assert all(map(is_open, opened))
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        for at in sockets:
            for each in at.values():
                each.close()
        os.write(writer, bytes([sum(map(is_open, opened))]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 1) == b"\0"
    os.close(reader)
    os.close(writer)
    exchange_all(sockets, 100_000)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
