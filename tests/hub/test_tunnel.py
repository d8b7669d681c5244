"""Byte streams between sites over a hub: order, back-pressure, short outages, and the end of a site or the hub."""

import os
import random
import re
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import hub_sites
import pytest
import support
from cutting_relay import CuttingRelay
from hub_sites import TIMEOUT, link_all, receive, send, transports
from running_hub import TestSite, running_hub, together, until

from dadplug.adapm import backends
from dadplug.errors import SiteError
from dadplug.exchange import network
from dadplug.hub.server.session import HubStreams
from dadplug.hub.site import tunnel as tunnels
from dadplug.hub.site.tunnel import Tunnel
from dadplug.hub.wire import streams as peer_stream
from dadplug.hub.wire.messages import Drop, Head, Kind
from dadplug.hub.wire.streams import HUB_SLOT, Tag


class Sites:
    """Tunnels of several sites in one process."""

    def __init__(self, hub, names: str, address=None) -> None:
        self.tunnels = [Tunnel(hub.kit(name), address) for name in names]
        for each in self.tunnels:
            each.start(TIMEOUT)

    def open(self) -> list[dict[int, socket.socket]]:
        """Open a channel; return the sockets of each site."""
        barrier, items = threading.Barrier(len(self.tunnels)), {}

        def at(rank):
            def exchange(item, *_):
                items[rank] = item
                barrier.wait(TIMEOUT)
                found = [items[each] for each in sorted(items)]
                barrier.wait(TIMEOUT)
                return found

            found = self.tunnels[rank].open(exchange)
            exchange(None)
            return found

        return hub_sites.together(at, len(self.tunnels))

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
    assert select.select([of], [], [], TIMEOUT)[0]
    return of.recv(100) == b""


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
    plain = Tunnel._poll
    monkeypatch.setattr(Tunnel, "_poll", lambda self, seconds: waits.append(self) or plain(self, seconds))
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
        relay.cut(refuse=True)
        assert at_end(sockets[1][0])
        relay.refuse = False
        assert at_end(sockets[0][1])
        with pytest.raises(SiteError, match="given this site up"):
            sites.tunnels[0].check()
        sites.close()


def refuses_bytes(connected: socket.socket) -> bool:
    try:
        connected.send(b"too late")
    except OSError:
        return True
    return False


def test_the_end_of_the_hub_ends_all_streams(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        sites = Sites(hub, "ab")
        sockets = sites.open()
    for rank in range(2):
        assert at_end(sockets[rank][1 - rank])
        with pytest.raises(SiteError, match=r"the hub at 127.0.0.1"):
            sites.tunnels[rank].check()
        until(lambda rank=rank: refuses_bytes(sockets[rank][1 - rank]))  # its thread closes the stream a moment later
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


# Streams of sites to the hub itself


class Echo:
    """Service that sends back what arrives, in a thread for each stream, and counts the ends."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def accept(self, slot: int, connected: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(slot, connected), daemon=True).start()

    def _serve(self, slot: int, connected: socket.socket) -> None:
        with connected:
            connected.settimeout(TIMEOUT)
            while content := connected.recv(1 << 16):
                connected.sendall(content)
        self.ended.append(slot)

    def hold(self, held):
        pass

    def events(self) -> Iterator[str]:
        yield from ()

    def close(self) -> None:
        pass


def write(site: TestSite, content: bytes, channel: int = 1 << 31, **fields) -> None:
    site.send(Kind.MESSAGE, content, slot=HUB_SLOT, exchange=channel, step=0, **fields)


def test_a_stream_carries_more_than_its_window_in_both_directions(tmp_path):
    echo = Echo()
    with running_hub(tmp_path / "kits", service=echo) as hub:
        sites = Sites(hub, "ab")
        streams = [tunnel.dial_hub() for tunnel in sites.tunnels]
        assert {stream.hub for stream in streams} == {f"the hub at 127.0.0.1:{hub.address[1]}"}
        contents = [bytes([number + 1]) * (9 << 20) for number in range(2)]
        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(send, each.connected, content) for each, content in zip(streams, contents, strict=True)]
            came = [pool.submit(receive, each.connected, 9 << 20) for each in streams]
            assert [each.result() for each in came] == contents
            for stream, each in zip(streams, sent, strict=True):
                each.result()
                stream.connected.close()
        until(lambda: sorted(echo.ended) == [0, 1])
        sites.close()


def test_the_service_reads_the_end_when_a_site_is_lost(tmp_path):
    echo = Echo()
    with running_hub(tmp_path / "kits", service=echo, grace=0.2) as hub:
        first, second = together(hub, "ab", "parameters")
        write(first, b"hello")
        assert first.take(Kind.MESSAGE).body == b"hello"
        first.cut()
        until(lambda: second.pump() or echo.ended == [0])


def test_damaged_messages_and_too_many_streams_are_refused(hub):
    first, second = together(hub, "ab", "parameters")
    write(first, b"no message of a service")
    answer = first.take(Kind.MESSAGE)
    assert (answer.head.slot, answer.head.tag) == (HUB_SLOT, Tag.DATA)
    assert b"is no message of a sequencer's service" in answer.body
    assert first.take(Kind.MESSAGE).head.tag == Tag.END
    for channel in range(40):
        write(first, b"x", (1 << 31) + channel, wait=False)
    assert "more than 32 streams to the hub" in first.action(Drop).reason
    write(second, b"x", 1 << 31, tag=9)  # of a stream that has not begun
    write(second, b"x", 1 << 31)
    write(second, b"x", 1 << 31, tag=9)
    assert "unknown message 9 of a stream" in [second.action(Drop) for _ in range(2)][-1].reason


def test_streams_of_lost_sessions_are_closed_though_they_had_one_number():
    kept: list[socket.socket] = []  # that nobody reads or closes
    service = SimpleNamespace(accept=lambda slot, connected: kept.append(connected), close=lambda: None)
    with selectors.DefaultSelector() as selector:
        streams = HubStreams(selector, service)
        queue = SimpleNamespace(unsent_bytes=0, nbytes=0)
        for session in (SimpleNamespace(slot=0, queue=queue, ended=None) for _ in range(3)):
            streams.take(session, Head(Kind.MESSAGE, HUB_SLOT, 0, 1 << 31, 0, 5, Tag.DATA), memoryview(b"hello"))
            streams.update()
            session.ended = 0.0
            streams.end(session)
            streams.serve({}, _fail)
        assert len(selector.get_map()) == 3
        for each in kept:
            each.close()
        streams.serve({key.data: events for key, events in selector.select(TIMEOUT)}, _fail)
        assert not selector.get_map()
        streams.close()


def test_a_hub_without_a_service_ends_each_stream(tmp_path):
    with running_hub(tmp_path / "kits", service=None) as hub:
        first, _ = together(hub, "ab", "parameters")
        write(first, b"hello")
        assert first.take(Kind.MESSAGE).head.tag == Tag.END


def _fail(session, error):
    raise error


# The parameter manager over a hub: exact sums, without ports and in short outages


NAMES = ("a", "b", "c")
OPERATIONS = 120_000  # keys, at all sites together; fewer leave keys that are never pushed
STRESS = support.load(str(support.Path(__file__).parents[2] / "benchmarks" / "adapm_stress.py"))


@pytest.fixture
def run(monkeypatch):
    """Function that runs another one at each site of a group of links, in threads; returns the results by rank."""
    of_thread = threading.local()
    monkeypatch.setattr(backends, "open_transport", lambda *args: of_thread.transport)
    monkeypatch.setattr(network, "connect_sites", None)  # no site opens a port

    def at_all(links, function, *args):
        def at(rank):
            (of_thread.transport,) = transports([links[rank]])
            try:
                return function(*args)
            except Exception as error:
                return error

        return hub_sites.together(at, len(links))

    return at_all


def close(links):
    for link in links:
        with tunnels._opening:
            found = tunnels._tunnels.get(link)
        if found is not None:
            found.close()
        link.close(0.1)


def test_sums_are_exact_while_connections_are_cut(tmp_path, run):
    with running_hub(tmp_path / "kits", NAMES, grace=60.0) as hub, CuttingRelay(hub.address) as relay:
        links = link_all(hub, 3, [relay.address] * 3)
        over = threading.Event()

        def cut():
            number = 0
            while not over.wait(0.02 * (number + 1)):  # a new connection takes as long as thousands of keys
                if relay._cut_at is None:
                    number += 1
                    relay.cut_after(number % 2, 7919 * number % 50_000 + 1)

        cutting = threading.Thread(target=cut)
        cutting.start()
        results = run(links, STRESS.stress, OPERATIONS // 3, "all")
        over.set()
        cutting.join()
        cuts = relay.cuts
        close(links)
    assert all(isinstance(each, dict) for each in results), results
    assert cuts >= 6


# Programs with a parameter manager at sites with kits: no ports, and errors that name who is at fault


REGIONS = ("bavaria", "saxony", "tyrol")

HEAD = """
import os, signal, sys, time, torch, dadplug
from dadplug.adapm import ParameterManager
torch.set_num_threads(1)
dadplug.connect(kit=sys.argv[1], timeout=200)
"""
WORKS = """
with ParameterManager(timeout=200) as manager:
    table = manager.table("words", 4, rows=30)
    keys = torch.arange(30)
    table.push(keys, torch.ones(30, 4))
    manager.wait_sync(everywhere=True)
    assert (table.pull(keys) == 3).all()
    files = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    own = {os.readlink(each) for each in files if os.path.lexists(each)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}").readlines()[1:]]
    listening = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]
    connections = [line for line in lines if f"socket:[{line[9]}]" in own]
    print("ports:", len(listening), "connections:", len(connections))
    manager.barrier()
"""
ENDS = """
with ParameterManager(timeout=200) as manager:
    table = manager.table("words", 4, rows=30)
    manager.barrier()
    if manager.rank == 1:
        LAST
    while True:
        table.pull(torch.arange(30))
"""


def run_everywhere(folder: Path, program: str, **options):
    """Run a program at all sites; return what came of it, by rank."""
    script = folder / "site.py"
    script.write_text(HEAD + program)
    with running_hub(folder / "kits", REGIONS, **options) as hub:
        return support.run_programs([[str(script), str(hub.kits / name)] for name in REGIONS])


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc")
def test_sums_arrive_and_no_site_opens_a_port(tmp_path):
    for each in run_everywhere(tmp_path, WORKS):
        assert each.status == 0, each.errors
        ports, connections = map(int, re.findall(r"\d+", each.output))
        assert ports == 0
        assert 1 < connections <= 3  # all of them to the hub


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ('raise ValueError("the scanner is broken")', "ValueError: the scanner is broken"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its connection was lost"),
    ],
)
def test_the_others_name_the_site_that_has_gone(tmp_path, last, reason):
    first, _, third = run_everywhere(tmp_path, ENDS.replace("LAST", last), grace=0.5)
    for each in (first, third):
        assert each.status == 1
        last_line = each.errors.strip().splitlines()[-1]
        assert re.search(rf"SiteError: site 1 \(saxony\) is gone: {reason}", last_line), each.errors


def test_the_bindings_are_refused(tmp_path):
    program = """
import types
sys.modules["adapm"] = types.ModuleType("adapm")
try:
    ParameterManager(backend="adapm")
except ValueError as error:
    print(error)
"""
    for each in run_everywhere(tmp_path, program):
        assert each.status == 0, each.errors
        assert "which a hub does not carry" in each.output
