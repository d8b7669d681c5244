"""Flow of frames through the hub: back-pressure, messages between two sites, the store."""

from __future__ import annotations

import os
import socket
import time

import pytest
from cutting_relay import CuttingRelay
from running_hub import TestSite, running_hub, together, until

from dadplug.exchange import codec
from dadplug.hub.server import relay as early_messages
from dadplug.hub.server import session
from dadplug.hub.server.store import Reply, Request
from dadplug.hub.wire.frames import Head, Kind
from dadplug.hub.wire.messages import Close, Drop, Start, read_control

PIECE = 1 << 16
FULL = 4 * PIECE
COPIES = 4  # 26 MB: more than the buffers of the operating system, which grow to 14 MB


@pytest.fixture
def hub(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        yield hub


@pytest.fixture
def small_queues(monkeypatch):
    monkeypatch.setattr(session, "FULL_BYTES", FULL)
    monkeypatch.setattr(early_messages, "FULL_BYTES", FULL)


def test_a_site_that_does_not_read_holds_up_those_that_send_to_it(small_queues, hub):
    a, b = together(hub)
    b.stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
    content = os.urandom(100 * PIECE)
    for _ in range(COPIES):
        a.send(Kind.PAYLOAD, content, wait=False)
    queue = hub.hub.relay.sessions["training", 1].queue
    until(lambda: a.pump() or hub.hub.relay.sessions["training", 1].full)
    largest = 0
    for _ in range(100):
        a.pump()
        time.sleep(0.002)
        largest = max(largest, queue.unsent_bytes)
    assert FULL < largest < FULL + 8 * PIECE
    assert a.queue.unsent_bytes > 0
    for _ in range(COPIES):
        got = b""
        while len(got) < len(content):
            a.pump()
            got += b.take(Kind.PAYLOAD).body
        assert got == content
    assert len(hub.hub.relay.sessions) == 2


def test_the_memory_for_a_site_whose_connection_is_lost_is_bounded(small_queues, hub):
    a, b = together(hub)
    b.cut()
    content = os.urandom(200 * PIECE)
    a.send(Kind.PAYLOAD, content, wait=False)
    queue = hub.hub.relay.sessions["training", 1].queue
    until(lambda: a.pump() or queue.nbytes > FULL)
    for _ in range(100):
        a.pump()
        time.sleep(0.002)
    assert queue.nbytes < FULL + 8 * PIECE
    b.dial()
    got = b""
    while len(got) < len(content):
        a.pump()
        got += b.take(Kind.PAYLOAD).body
    assert got == content


def test_both_sites_get_on_though_both_queues_are_full(small_queues, hub):
    a, b = together(hub)
    content = os.urandom(150 * PIECE)
    for site in (a, b):
        site.send(Kind.PAYLOAD, content, wait=False)
    got = [b"", b""]
    while any(len(each) < len(content) for each in got):
        for number, site in enumerate((a, b)):
            site.pump()
            got[number] += b"".join(frame.body for frame in site.taken if frame.head.kind is Kind.PAYLOAD)
            site.taken.clear()
    assert got == [content, content]


def test_the_memory_for_sites_that_do_not_acknowledge_is_bounded(monkeypatch, hub):
    monkeypatch.setattr(session, "KEPT_BYTES", FULL)
    a, b = together(hub)
    a.send(Kind.PAYLOAD, os.urandom(50 * PIECE), wait=False)
    queue = hub.hub.relay.sessions["training", 1].queue
    until(lambda: a.pump() or b.pump() or queue.nbytes > FULL)
    for _ in range(100):
        a.pump()
        b.pump()
        time.sleep(0.001)
    assert queue.nbytes < FULL + 8 * PIECE
    until(lambda: a.pump() or b.ping() or sum(len(each.body) for each in b.taken) >= 50 * PIECE)


def test_a_site_that_is_held_up_does_not_count_as_silent(small_queues, tmp_path):
    with running_hub(tmp_path / "held", rules={"site_timeout": 1.0}) as hub:
        a, b = together(hub)
        b.stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        a.send(Kind.PAYLOAD, bytes(200 * PIECE), wait=False)
        until(lambda: a.pump() or hub.hub.relay.sessions["training", 1].full)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            b.stream.notes.append(b.stream.notes[0] if b.stream.notes else _ping(b))
            b.stream.flush(b.queue)
            time.sleep(0.05)
        assert ("training", 0) in hub.hub.relay.sessions


def _ping(site: TestSite) -> bytes:
    return Head(Kind.PING, site.slot, step=0).pack()


def test_messages_go_to_one_site_even_before_it_has_opened_the_channel(tmp_path):
    with running_hub(tmp_path / "kits", sites=("a", "b", "c")) as hub:
        together(hub, "abc")
        a = TestSite(hub.kit("a"), hub.address, "parameters")
        a.send(Kind.MESSAGE, b"to c", slot=2, exchange=4)
        a.send(Kind.MESSAGE, b"to b", slot=1)
        b, c = (TestSite(hub.kit(name), hub.address, "parameters") for name in "bc")
        found = c.take(Kind.MESSAGE)
        assert (found.head.slot, found.head.exchange, found.body) == (0, 4, b"to c")
        assert b.take(Kind.MESSAGE).body == b"to b"
        c.send(Kind.MESSAGE, bytes(100_000), slot=0)
        assert len(a.message(100_000, Kind.MESSAGE)) == 100_000
        c.cut()
        a.send(Kind.MESSAGE, b"again", slot=2)
        c.dial()
        assert c.take(Kind.MESSAGE).body == b"again"


def test_too_many_messages_to_a_site_without_the_channel_end_the_connection(small_queues, hub):
    together(hub)
    a = TestSite(hub.kit("a"), hub.address, "parameters")
    a.send(Kind.MESSAGE, bytes(6 * PIECE), slot=1)
    assert "b has not opened the channel that" in a.action(Drop).reason


@pytest.mark.parametrize(
    ("channel", "kind", "slot", "reason"),
    [
        ("training", Kind.MESSAGE, 1, "a MESSAGE frame on the channel 'training'"),
        ("training", Kind.PAYLOAD, 1, "a PAYLOAD frame of slot 1, this site has slot 0"),
        ("training", Kind.SUM, 0, "a SUM frame on the channel 'training'"),
        ("parameters", Kind.PAYLOAD, 0, "a PAYLOAD frame on the channel 'parameters'"),
        ("parameters", Kind.MESSAGE, 2, "a MESSAGE frame to slot 2 of 2"),
        ("parameters", Kind.MESSAGE, 0, "a MESSAGE frame to slot 0 of 2"),
    ],
)
def test_frames_that_a_site_may_not_send_end_its_session_with_the_reason(hub, channel, kind, slot, reason):
    sites = together(hub)
    site = sites[0] if channel == "training" else TestSite(hub.kit("a"), hub.address, channel)
    site.send(kind, b"content", slot=slot)
    assert reason in site.action(Drop).reason


def test_the_store_answers_requests(hub):
    a, b = (TestSite(hub.kit(name), hub.address, "store") for name in "ab")
    b.send(Kind.MESSAGE, codec.encode(Request(1, "get", ("key",))))
    a.send(Kind.MESSAGE, codec.encode(Request(1, "set", ("key",), (b"value",))))
    assert codec.decode(a.take(Kind.MESSAGE).body) == Reply(1)
    assert codec.decode(b.take(Kind.MESSAGE).body) == Reply(1, (b"value",))
    a.send(Kind.MESSAGE, b"no request")
    assert "damaged" in a.action(Drop).reason


def test_a_connection_that_is_cut_at_any_byte_loses_and_doubles_nothing(hub):
    """A relay cuts the connection of a, in the handshake, in heads, in bodies and between frames."""
    cuts = [(0, 1), (1, 500), *((number % 2, each) for number, each in enumerate(range(1500, 5000, 97)))]
    cuts += [(number % 2, each) for number, each in enumerate(range(PIECE, 3 * PIECE, 9973))]
    count = len(cuts)
    b = TestSite(hub.kit("b"), hub.address)
    with CuttingRelay(hub.address) as relay:
        relay.cut_after(*cuts.pop(0))
        a = TestSite(hub.kit("a"), relay.address)
        a.redials = True
        for site in (a, b):
            site.action(Start)
        step = 0
        while relay.cuts < count:
            step += 1
            assert step < 10 * count, "the relay does not cut"
            if cuts and relay.cuts == count - len(cuts):
                relay.cut_after(*cuts.pop(0))
            exchange_while_cut(a, b, step)
    assert hub.hub.relay.membership.step == step


def exchange_while_cut(a: TestSite, b: TestSite, step: int) -> None:
    """Exchange payloads and close a step; a dials again whenever its connection is lost."""
    contents = {site.slot: os.urandom(3 * PIECE + 17) for site in (a, b)}
    for site in (a, b):
        site.send(Kind.PAYLOAD, contents[site.slot], wait=False, step=step)
        site.send(Kind.END, wait=False, step=step)
    got = {a: b"", b: b""}
    closed: set[TestSite] = set()
    while len(closed) < 2:
        for site in (a, b):
            site.ping()
            if site.lost is not None:
                assert site is a
                site.dial()
                assert site.answer.resumed
            for frame in site.taken:
                if frame.head.kind is Kind.PAYLOAD:
                    assert frame.head.offset == len(got[site])
                    assert site not in closed
                    got[site] += frame.body
                elif (action := read_control(frame.body, 2)) == Close(step, (0, 1), 0):
                    closed.add(site)
                else:
                    assert not isinstance(action, Drop), action
            site.taken.clear()
        time.sleep(0.001)
    assert got == {a: contents[1], b: contents[0]}
