"""Connections to the hub that are refused: the reason is known at both ends, and members go on."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from datetime import timedelta

import hub_kits
import pytest
from running_hub import TIMEOUT, TestSite, running_hub, together, until

from dadplug.errors import RefusedError
from dadplug.hub import Project
from dadplug.hub.pki import provision
from dadplug.hub.pki.certificates import current_time
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import tls
from dadplug.hub.server import acceptor as pending
from dadplug.hub.server import acceptor as reception
from dadplug.hub.wire.frames import Kind
from dadplug.hub.wire.messages import VERSION, Close, Drop, Refuse, Start


@pytest.fixture
def kits(tmp_path):
    return hub_kits.make(tmp_path / "kits")


@pytest.fixture
def serve(kits):
    """Run a hub with these kits, as they are at that time."""
    return lambda **settings: running_hub(kits, listen=("127.0.0.1", 0), **settings)


def refused(hub, kit: Kit, here: str, there: str) -> None:
    """Check that a site is refused, with the reason that it gets and that in the hub's journal."""
    with pytest.raises(RefusedError, match=here):
        TestSite(kit, hub.address)
    hub.await_line(there)


def test_a_site_of_another_authority_is_refused(kits, serve, tmp_path, monkeypatch):
    others = hub_kits.make(tmp_path / "others")
    with serve() as hub:
        refused(hub, Kit.load(others / "a"), "signed by another authority", "the other end's kit is of another")
        context = tls.site_context(Kit.load(kits / "a"))
        context.load_cert_chain(others / "a" / "certificate.pem", others / "a" / "key.pem")
        monkeypatch.setattr(tls, "site_context", lambda kit: context)
        refused(hub, Kit.load(kits / "a"), "the other end's kit is of another authority", "signed by another authority")


def test_an_expired_site_is_refused(kits, serve):
    provision.renew(kits, "a", days=5, now=current_time() - timedelta(days=10))
    with serve() as hub:
        refused(hub, Kit.load(kits / "a"), "expired by the other end's clock", "expired by this end's clock")


def test_a_site_that_the_roster_lacks_is_refused(kits, serve):
    roster = (kits / "hub" / "roster.json").read_bytes()
    provision.provision(Project.parse(hub_kits.PROJECT | {"sites": ["a", "b", "c"]}), kits)
    (kits / "hub" / "roster.json").write_bytes(roster)
    with serve() as hub:
        reason = "c is not a site of study by the hub's roster"
        refused(hub, Kit.load(kits / "c"), f"refuses c: {reason}", reason)


def test_tls_1_2_is_refused(kits, serve, monkeypatch):
    context = tls.site_context(Kit.load(kits / "a"))
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    monkeypatch.setattr(tls, "site_context", lambda kit: context)
    with serve() as hub:
        refused(hub, Kit.load(kits / "a"), "requires another version of TLS", "does not speak TLS 1.3")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n", "speaks HTTP, not TLS"),
        (bytes([255]) * 100_000, "does not speak TLS"),
        (b"", "has not finished the handshake in time"),
        (b"\x16\x03\x01", "has not finished the handshake in time"),
    ],
    ids=["http", "bytes", "silent", "half"],
)
def test_plain_tcp_is_refused_and_its_connection_closed(serve, monkeypatch, sent, reason):
    monkeypatch.setattr(pending, "HANDSHAKE_SECONDS", 0.3)
    with serve() as hub, socket.create_connection(hub.address, TIMEOUT) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            while connection.recv(4096):
                pass
        hub.await_line(reason)


def test_a_site_that_does_not_say_hello_is_refused(kits, serve, monkeypatch):
    monkeypatch.setattr(pending, "HANDSHAKE_SECONDS", 1.0)  # enough for TLS on a busy machine
    with serve() as hub:
        with tls.dial(Kit.load(kits / "a"), TIMEOUT, hub.address) as connection:
            assert connection.recv(100) == b""
        hub.await_line("has not finished the handshake in time")


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"version": VERSION + 1}, f"speaks version {VERSION + 1} of the protocol, the hub version {VERSION}"),
        ({"channel": "gossip"}, "unknown channel 'gossip'"),
        ({"instance": -1}, "field instance of a control message Hello is out of range"),
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
    """500 connections: garbage, half handshakes and silent ones, while steps go on and a site dials again."""
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
        assert hub.hub.relay.membership.step == step
        assert sum("refused" in line for line in hub.log) <= 15


def test_a_site_gets_in_though_all_places_are_taken(kits, serve, monkeypatch):
    monkeypatch.setattr(pending, "HANDSHAKE_SECONDS", 60.0)
    with serve() as hub:
        silent = [socket.create_connection(hub.address, TIMEOUT) for _ in range(reception.MAX_PENDING)]
        until(lambda: len(hub.hub.acceptor._pending) == reception.MAX_PENDING)
        a, b = together(hub)
        assert a.answer.min_sites == b.answer.min_sites == 2
        assert len(hub.hub.acceptor._pending) <= reception.MAX_PENDING
        for connection in silent:
            connection.close()


def test_a_site_whose_certificate_is_revoked_is_dropped_and_refused(kits, serve):
    with serve() as hub:
        a, b = together(hub)
        provision.revoke(kits, "a")
        if not (kits / "hub" / "revoked.pem").samefile(kits / "authority" / "revoked.pem"):
            (kits / "hub" / "revoked.pem").write_bytes((kits / "authority" / "revoked.pem").read_bytes())
        for site in (a, b):
            assert site.action(Drop) == Drop(0, 1, "its certificate has been revoked")
        refused(hub, hub.kit("a"), "this kit's certificate has been revoked", "certificate has been revoked (")
        provision.renew(kits, "a", with_key=True)
        b.leave()
        for site in together(hub):
            assert site.answer.min_sites == 2


def test_a_damaged_revocation_list_leaves_the_old_one_in_use(kits, serve):
    with serve() as hub:
        (kits / "hub" / "revoked.pem").write_bytes(b"damaged")
        hub.await_line("the kit has changed, and a part of it is not used")
        for site in [TestSite(hub.kit(name), hub.address) for name in "ab"]:
            assert site.action(Start).position.step == 0
