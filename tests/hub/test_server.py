"""The hub over loopback: sites that connect, frames that are passed on, sites that leave."""

import contextlib
import os
import socket
import threading
import time
from contextlib import suppress

import hub_kits
import pytest
from running_hub import TIMEOUT, TestSite, close_step, exchange, running_hub, together, until
from support import refuses

from dadplug.errors import KitError, SiteError
from dadplug.exchange import Traffic
from dadplug.exchange.rounds import Requirements, Spent
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import tls
from dadplug.hub.server import acceptor, relay, session
from dadplug.hub.server.hub import Hub
from dadplug.hub.server.relay import Relay
from dadplug.hub.server.session import HubStream, Session
from dadplug.hub.site.tunnel import Tunnel
from dadplug.hub.wire.messages import (
    OLDEST_VERSION,
    PIECE_BYTES,
    VERSION,
    Close,
    Drop,
    Head,
    Join,
    Kind,
    Pause,
    Refuse,
    RoundKind,
    Start,
    Welcome,
    pack_control,
)
from dadplug.parameter_server import streams
from dadplug.parameter_server.service import SequencerHost


def test_the_first_bytes_of_a_message_arrive_before_its_last_ones_are_sent(hub):
    a, b = together(hub)
    content = os.urandom(3 * PIECE_BYTES)
    a.send(Kind.PAYLOAD, content, wait=False)
    kept = [a.queue._kept.pop() for _ in range(2)]
    a.queue.unsent_bytes -= sum(map(len, kept))
    until(lambda: a.pump() or not a.queue.unsent_bytes)
    assert b.take(Kind.PAYLOAD).body == content[:PIECE_BYTES]
    for frame in reversed(kept):
        a.queue.append(frame)
    until(lambda: a.pump() or not a.queue.unsent_bytes)
    assert b.message(2 * PIECE_BYTES) == content[PIECE_BYTES:]


def test_a_step_closes_once_all_sites_have_ended_it(hub):
    a, b = together(hub)
    a.send(Kind.END)
    a.send(Kind.PAYLOAD, b"of the second step", step=2)
    a.send(Kind.END, step=2)  # nothing of b was needed
    assert b.message(18) == b"of the second step"
    assert hub.hub.relay.run.membership.step == 0
    b.send(Kind.END)
    for site in (a, b):
        assert site.action(Close) == Close(1, (0, 1))
    b.send(Kind.END, step=2)
    for site in (a, b):
        assert site.action(Close) == Close(2, (0, 1))


def test_frames_of_steps_that_are_closed_end_the_connection_with_a_reason(hub):
    a, b = together(hub)
    close_step([a, b])
    a.send(Kind.PAYLOAD, b"late")
    for site in (a, b):
        drop = site.action(Drop)
        assert drop.slot == 0
        assert "a PAYLOAD frame of step 1, which is not open" in drop.reason


@pytest.mark.parametrize("steps", [0, 1])
def test_a_second_run_starts_on_the_same_hub_once_the_first_has_ended(hub, steps):
    a, b = together(hub)
    close_step([a, b] * steps)
    a.leave()
    assert b.action(Drop) == Drop(0, 1 + steps, "")
    a = TestSite(hub.kit("a"), hub.address)
    assert a.action(Pause) == Pause((1,), "waiting for b to leave the last run")
    assert hub.hub.relay.run.membership.step == steps
    b.leave()
    b.action(Drop)
    b = TestSite(hub.kit("b"), hub.address)
    for site in (a, b):
        assert site.action(Start).position.step == 0
    exchange(a, b)


def test_a_name_used_twice_is_refused_with_the_reason_on_both_ends(hub):
    a, _ = together(hub)
    second = TestSite(hub.kit("a"), hub.address)
    assert isinstance(second.answer, Refuse)
    assert second.answer.reason.startswith("another process is connected as site 'a'; if it is dead, this one takes")
    assert second.answer.retry
    until(lambda: a.ping() or second.dial() or not second.answer.retry)  # the first process shows that it is alive
    assert second.answer.reason == "another process is connected as site 'a'"
    hub.await_line("a: another process is connected as site 'a'")
    a.pump()
    assert hub.hub.relay.sessions["training", 0].stream is not None


def test_a_new_process_takes_the_place_of_one_whose_connection_is_lost_at_once(hub):
    a, b = together(hub)
    a.cut()
    hub.await_line("connection to a (training) lost")
    assert isinstance(TestSite(hub.kit("a"), hub.address).answer, Welcome)
    assert b.action(Drop) == Drop(0, 1, "another process has connected as this site")


def test_the_kit_of_a_site_and_foreign_addresses_are_refused(tmp_path):
    kits, service = hub_kits.make(tmp_path / "kits", hub="192.0.2.1:8470"), SequencerHost("ab")
    refuses(
        (lambda: Hub(Kit.load(kits / "a"), service=service), "is the kit of the site a"),
        (
            lambda: Hub(Kit.load(kits / "hub"), service=service),
            r"cannot listen at 192.0.2.1:8470: .*--listen HOST:PORT",
        ),
        (
            lambda: Hub(Kit.load(kits / "hub"), listen=("192.0.2.1", 0), service=service),
            r"cannot listen at 192.0.2.1:0: [^;]*$",
        ),
        error=KitError,
    )


# Flow of frames through the hub: back-pressure, messages between two sites, the store


PIECE = 1 << 16
FULL = 4 * PIECE
COPIES = 4  # 26 MB: more than the buffers of the operating system, which grow to 14 MB


@pytest.fixture
def small_queues(monkeypatch):
    monkeypatch.setattr(session, "FULL_BYTES", FULL)
    monkeypatch.setattr(relay, "FULL_BYTES", FULL)


def largest(size, *sites: TestSite) -> int:
    """Let sites send for a while, and return the largest size of a queue."""
    found = 0
    for _ in range(100):
        for site in sites:
            site.pump()
        time.sleep(0.002)
        found = max(found, size())
    return found


def test_a_site_that_does_not_read_holds_up_those_that_send_to_it(small_queues, hub):
    a, b = together(hub)
    b.stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
    content = os.urandom(100 * PIECE)
    for _ in range(COPIES):
        a.send(Kind.PAYLOAD, content, wait=False)
    queue = hub.hub.relay.sessions["training", 1].queue
    until(lambda: a.pump() or hub.hub.relay.sessions["training", 1].full)
    assert FULL < largest(lambda: queue.unsent_bytes, a) < FULL + 8 * PIECE
    assert a.queue.unsent_bytes > 0
    b.others = [a]
    for _ in range(COPIES):
        assert b.message(len(content)) == content
    assert len(hub.hub.relay.sessions) == 2


def test_the_memory_for_a_site_whose_connection_is_lost_is_bounded(small_queues, hub):
    a, b = together(hub)
    b.cut()
    content = os.urandom(200 * PIECE)
    a.send(Kind.PAYLOAD, content, wait=False)
    queue = hub.hub.relay.sessions["training", 1].queue
    until(lambda: a.pump() or queue.nbytes > FULL)
    assert largest(lambda: queue.nbytes, a) < FULL + 8 * PIECE
    b.dial()
    b.others = [a]
    assert b.message(len(content)) == content


def test_both_sites_get_on_though_both_queues_are_full(small_queues, hub):
    a, b = together(hub)
    content = os.urandom(150 * PIECE)
    for site in (a, b):
        site.send(Kind.PAYLOAD, content, wait=False)
    a.others, b.others = [b], [a]
    for site in (a, b):
        assert site.message(len(content)) == content


def test_the_memory_for_sites_that_do_not_acknowledge_is_bounded(monkeypatch, hub):
    monkeypatch.setattr(session, "KEPT_BYTES", FULL)
    a, b = together(hub)
    a.send(Kind.PAYLOAD, os.urandom(50 * PIECE), wait=False)
    queue = hub.hub.relay.sessions["training", 1].queue
    until(lambda: a.pump() or b.pump() or queue.nbytes > FULL)
    assert largest(lambda: queue.nbytes, a, b) < FULL + 8 * PIECE
    until(lambda: a.pump() or b.ping() or sum(len(each.body) for each in b.taken) >= 50 * PIECE)


def test_a_site_that_is_held_up_does_not_count_as_silent(small_queues, tmp_path):
    with running_hub(tmp_path / "held", site_timeout=1.0) as hub:
        a, b = together(hub)
        b.stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        a.send(Kind.PAYLOAD, bytes(200 * PIECE), wait=False)
        until(lambda: a.pump() or hub.hub.relay.sessions["training", 1].full)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            b.stream.notes.append(Head(Kind.PING, b.slot, step=0).pack())
            b.stream.flush(b.queue)
            time.sleep(0.05)
        assert ("training", 0) in hub.hub.relay.sessions


def test_messages_go_to_one_site_even_before_it_has_opened_the_channel(hub_of_three):
    together(hub_of_three, "abc")
    a = TestSite(hub_of_three.kit("a"), hub_of_three.address, "parameters")
    a.send(Kind.MESSAGE, b"to c", slot=2, exchange=4)
    a.send(Kind.MESSAGE, b"to b", slot=1)
    b, c = (TestSite(hub_of_three.kit(name), hub_of_three.address, "parameters") for name in "bc")
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


# Connections to the hub that are refused: the reason is known at both ends, and members go on


@pytest.fixture
def serve(kits):
    """Run a hub with these kits, as they are at that time."""
    return lambda **settings: running_hub(kits, listen=("127.0.0.1", 0), **settings)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n", "speaks HTTP, not TLS"),
        (b"\x00\x01\x02 garbage that is longer than a record's header", "does not speak TLS"),
        (bytes([255]) * 100_000, "does not speak TLS"),
        (b"", "has not finished the handshake in time"),
        (b"\x16\x03\x01", "has not finished the handshake in time"),
    ],
    ids=["http", "text", "bytes", "silent", "half"],
)
def test_plain_tcp_is_refused_and_its_connection_closed(serve, monkeypatch, sent, reason):
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 0.3)
    with serve() as hub, socket.create_connection(hub.address, TIMEOUT) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            while piece := connection.recv(4096):
                received += piece
        assert len(received) < 100  # nothing, or an alert of TLS
        hub.await_line(reason)


def test_a_site_that_does_not_say_hello_is_refused(kits, serve, monkeypatch):
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 1.0)  # enough for TLS on a busy machine
    with serve() as hub:
        with tls.dial(Kit.load(kits / "a"), TIMEOUT, hub.address) as connection:
            assert connection.recv(100) == b""
        hub.await_line("has not finished the handshake in time")


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (
            {"version": VERSION + 1},
            f"speaks version {VERSION + 1} of the protocol, the hub serves versions {OLDEST_VERSION} to {VERSION}: "
            "upgrade the hub (the hub goes first, then the sites)",
        ),
        ({"channel": "gossip"}, "unknown channel 'gossip'"),
        ({"instance": -1}, "damaged control message: Expected `int` >= 0 - at `$.instance`"),
    ],
)
def test_a_wrong_hello_is_refused_with_the_reason(kits, serve, hello, reason):
    with serve() as hub:
        site = TestSite(Kit.load(kits / "a"), hub.address, **hello)
        assert isinstance(site.answer, Refuse)
        assert reason in site.answer.reason
        assert not site.answer.retry
        hub.await_line(reason)


def test_frames_before_the_answer_are_refused(kits, serve):
    with serve() as hub, tls.dial(Kit.load(kits / "a"), TIMEOUT, hub.address) as connection:
        connection.sendall(b"x" * 32)
        hub.await_line("a: these bytes are not the beginning of a frame")


def test_many_unknown_connections_do_not_disturb_members(serve):
    """500 connections: garbage, half handshakes and silent ones, while steps go on and a site connects again."""
    with serve() as hub:
        a, b = together(hub)
        crowd: list[socket.socket] = []

        def disturb() -> None:
            for number in range(500):
                connection = socket.create_connection(hub.address, TIMEOUT)
                crowd.append(connection)
                with contextlib.suppress(OSError):
                    connection.sendall((b"", os.urandom(300), b"\x16\x03\x01\x02\x00")[number % 3])

        thread = threading.Thread(target=disturb)
        thread.start()
        step = 0
        while thread.is_alive() or step < 20:
            step += 1
            content = os.urandom(100_000)
            for site in (a, b):
                site.send(Kind.PAYLOAD, content, step=step)
                site.send(Kind.END, step=step)
            if step == 5:
                a.cut()
                a.dial()
                assert a.answer.resumed
            for site in (a, b):
                assert site.message(len(content)) == content
                assert site.action(Close).contributors == (0, 1)
        thread.join()
        for connection in crowd:
            connection.close()
        until(lambda: hub.hub.acceptor.refused >= 300 and not hub.hub.acceptor._pending)
        assert hub.hub.relay.run.membership.step == step
        assert sum("refused" in line for line in hub.log) <= 15


@pytest.mark.parametrize("kind", ["ping", "control"])
def test_a_member_that_floods_the_hub_is_read_slowly(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(session, "_SPARE_RATE", 0.0)
    frame = Head(Kind.PING, 2).pack() if kind == "ping" else pack_control(Spent(1.0, 1e-5), 2)
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        a, b, c = sites = together(hub, "abc")
        a.others = b.others = [c]
        for step in (1, 2):
            for site in sites:
                site.send(Kind.END, step=step)
            for site in (a, b):
                assert site.action(Close).step == step
            if step == 1:
                for _ in range(20_000):
                    c.queue.append(frame)
                until(lambda: c.pump() or hub.hub.relay.sessions["training", 2].floods)
                monkeypatch.setattr(session, "_SPARE_RATE", 1e9)


def test_a_site_sends_nothing_before_it_has_its_state(hub_of_three):
    a, b, c = together(hub_of_three, "abc")
    for site in (a, b, c):
        site.control(Requirements(1, 60_000))
    c.leave("it comes again")
    hub_of_three.await_line("c has left: it comes again")
    c = TestSite(hub_of_three.kit("c"), hub_of_three.address)
    c.control(Requirements(1, 60_000))
    for site in (a, b):
        site.send(Kind.END, exchange=RoundKind.FIRST)
    assert c.action(Join).slot == 2
    c.send(Kind.PAYLOAD, b"of no step", exchange=1)
    hub_of_three.await_line("c has left: a PAYLOAD frame before it has received its state")
    for site in (a, b):
        assert site.action(Close).contributors == (0, 1)


def test_handshakes_take_a_share_of_the_time_while_members_train(serve, monkeypatch):
    monkeypatch.setattr(acceptor, "_SHARE", 0.0)
    monkeypatch.setattr(acceptor, "_MOST_SECONDS", 0.0)
    with serve() as hub:
        a, b = together(hub)
        with socket.create_connection(hub.address, TIMEOUT) as unknown:
            until(lambda: hub.hub.acceptor._pauses)
            unknown.sendall(b"\x16\x03\x01\x02\x00")
            exchange(a, b)
            a.cut()
            a.dial()  # others may wait for this one
            assert a.answer.resumed
            exchange(a, b)


def test_many_connections_of_one_host_push_out_no_other(serve, monkeypatch):
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 60.0)
    with serve() as hub, contextlib.ExitStack() as stack:
        for number in range(acceptor.MAX_PENDING + 5):
            source = ("127.0.0.1" if number else "127.0.0.2", 0)
            crowd = stack.enter_context(socket.create_connection(hub.address, TIMEOUT, source))
            crowd.sendall(b"\x16\x03\x01\x02\x00")
            until(lambda number=number: sum(hub.hub.acceptor._by_host().values()) + hub.hub.acceptor.refused > number)
            until(lambda: not any(each.silent for each in hub.hub.acceptor._pending))
        assert hub.hub.acceptor.refused == 5
        assert hub.hub.acceptor._by_host()["127.0.0.2"] == 1


def test_a_site_gets_in_though_all_places_are_taken(kits, serve, monkeypatch):
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", 60.0)
    with serve() as hub:
        silent = [socket.create_connection(hub.address, TIMEOUT) for _ in range(acceptor.MAX_PENDING)]
        until(lambda: len(hub.hub.acceptor._pending) == acceptor.MAX_PENDING)
        a, b = together(hub)
        assert a.answer.min_sites == b.answer.min_sites == 2
        assert len(hub.hub.acceptor._pending) <= acceptor.MAX_PENDING
        for connection in silent:
            connection.close()


def test_a_damaged_revocation_list_leaves_the_old_one_in_use(kits, serve):
    with serve() as hub:
        (kits / "hub" / "revoked.pem").write_bytes(b"damaged")
        assert "http" not in hub.await_line("revoked.pem is not a revocation list")
        for site in [TestSite(hub.kit(name), hub.address) for name in "ab"]:
            assert site.action(Start).position.step == 0


# Faults while one session is served, which end that session, and nothing else


SECONDS = 60.0


def _fails(condition):
    """Return a function that wraps a method: it raises an error that nobody expects, where a condition holds."""

    def wrap(method):
        def failing(self, *arguments):
            if condition(self, *arguments):
                raise ZeroDivisionError("of the test")
            return method(self, *arguments)

        return failing

    return wrap


@pytest.mark.parametrize(
    ("owner", "method", "condition"),
    [
        (Relay, "_serve", lambda relay, session, request: True),
        (Session, "receive", lambda session, now: session.channel == "store"),
        (Session, "tick", lambda session, now: session.channel == "store"),
        (Session, "flush", lambda session: session.channel == "store" and session.queue.nbytes),
    ],
)
def test_a_fault_ends_one_session_with_a_traceback_in_the_journal(tmp_path, monkeypatch, owner, method, condition):
    monkeypatch.setattr(owner, method, _fails(condition)(getattr(owner, method)))
    with running_hub(tmp_path / "kits") as hub:
        a, b = together(hub)
        store = TestSite(hub.kit("a"), hub.address, "store")
        if method in ("_serve", "flush"):
            store.send(Kind.MESSAGE, b"?", wait=False)
            store.pump()
        if method != "flush":
            assert "ZeroDivisionError: of the test" in store.action(Drop).reason
        hub.await_line("fault of the hub: a (store) cannot be served: ZeroDivisionError: of the test")
        hub.await_line("Traceback (most recent call last):")
        exchange(a, b)


def test_a_fault_while_a_site_is_accepted_ends_its_connection(tmp_path, monkeypatch):
    failing = _fails(lambda session, stream, *rest: session.channel == "store")
    monkeypatch.setattr(Session, "attach", failing(Session.attach))
    with running_hub(tmp_path / "kits") as hub:
        a, b = together(hub)

        def dial() -> None:
            with suppress(AssertionError):  # it is never accepted
                TestSite(hub.kit("a"), hub.address, "store")

        thread = threading.Thread(target=dial, daemon=True)
        thread.start()
        hub.await_line("fault of the hub: a (store) cannot be accepted: ZeroDivisionError")
        exchange(a, b)


def test_a_fault_of_a_stream_at_the_hub_ends_the_session_of_its_site(tmp_path, monkeypatch):
    monkeypatch.setattr(HubStream, "serve", _fails(lambda *_: True)(HubStream.serve))
    with running_hub(tmp_path / "kits") as hub:
        a, b = together(hub)
        tunnel = Tunnel(hub.kit("a"), hub.address)
        tunnel.start(SECONDS)
        opened = tunnel.dial_hub().connected
        opened.send(b"no key")
        opened.close()
        hub.await_line("fault of the hub: a (parameters) cannot be served: ZeroDivisionError")
        exchange(a, b)
        tunnel.close()


def test_a_fault_in_the_thread_of_a_tunnel_ends_its_streams_with_the_reason(hub, monkeypatch):
    tunnel = Tunnel(hub.kit("a"), hub.address)
    tunnel.start(SECONDS)
    opened = tunnel.dial_hub().connected
    monkeypatch.setattr(tunnel, "serve", _fails(lambda *_: True)(Tunnel.serve))
    tunnel._pipe.wake()
    opened.setblocking(True)
    opened.settimeout(SECONDS)
    assert opened.recv(1) == b""
    with pytest.raises(SiteError, match="ZeroDivisionError"):
        tunnel.check()
    tunnel.close()


def test_a_fault_of_one_stream_of_a_parameter_server_loses_one_site(monkeypatch):
    pairs = [socket.socketpair() for _ in range(2)]
    lost, found = threading.Event(), []
    read = streams._Stream.read

    def reading(stream, messages):
        if stream.peer == 0:
            raise ZeroDivisionError("of the test")
        read(stream, messages)

    monkeypatch.setattr(streams._Stream, "read", reading)

    class Loop(streams.FrameLoop):
        def on_lost(self, peer, error):
            found.append((peer, type(error)))
            lost.set()

    thread = Loop("test", {rank: pair[0] for rank, pair in enumerate(pairs)}, 1000, SECONDS, Traffic(), 2)
    thread.start()
    pairs[0][1].send(b"x")
    assert lost.wait(SECONDS)
    assert found == [(0, ZeroDivisionError)]
    assert thread._thread.is_alive()
    for pair in pairs:
        pair[1].close()
    thread.close()
