"""Faults while one session is served, which end that session, and nothing else."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest
from running_hub import TestSite, running_hub, together

from dadplug.errors import SiteError
from dadplug.exchange import Traffic
from dadplug.hub.server.relay import Relay
from dadplug.hub.server.session import Session
from dadplug.hub.server.streams import HubStreams
from dadplug.hub.site.tunnel import Tunnel
from dadplug.hub.wire.frames import Kind
from dadplug.hub.wire.messages import Drop
from dadplug.hub.wire.streams import HUB_SLOT
from dadplug.parameter_server import streams

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
        a.send(Kind.PAYLOAD, b"still here")
        assert b.message(10) == b"still here"


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
        a.send(Kind.PAYLOAD, b"still here")
        assert b.message(10) == b"still here"


def test_a_fault_of_a_stream_at_the_hub_ends_the_session_of_its_site(tmp_path, monkeypatch):
    monkeypatch.setattr(HubStreams, "_send", _fails(lambda *_: True)(HubStreams._send))
    with running_hub(tmp_path / "kits") as hub:
        a, b = together(hub)
        tunnel = Tunnel(hub.kit("a"), hub.address)
        tunnel.start(SECONDS)
        opened = tunnel.dial(HUB_SLOT)
        opened.send(b"no key")
        opened.close()
        hub.await_line("fault of the hub: a (parameters) cannot be served: ZeroDivisionError")
        a.send(Kind.PAYLOAD, b"still here")
        assert b.message(10) == b"still here"
        tunnel.close()


def test_a_fault_in_the_thread_of_a_tunnel_ends_its_streams_with_the_reason(tmp_path, monkeypatch):
    with running_hub(tmp_path / "kits") as hub:
        tunnel = Tunnel(hub.kit("a"), hub.address)
        tunnel.start(SECONDS)
        opened = tunnel.dial(1)
        monkeypatch.setattr(tunnel, "_serve", _fails(lambda *_: True)(Tunnel._serve))
        tunnel._wake()
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

    def reading(stream):
        if stream.socket is pairs[0][0]:
            raise ZeroDivisionError("of the test")
        return read(stream)

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
