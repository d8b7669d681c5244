"""Handshakes between hub and site over loopback: who is accepted, and the reason at both ends for who is not."""

from __future__ import annotations

import pickle
import re
import socket
import ssl
import threading
from datetime import timedelta

import hub_kits
import pytest
from hub_kits import TIMEOUT, dial, meet

from dadplug.errors import RefusedError
from dadplug.hub import Project, provision, tls
from dadplug.hub.certificates import current_time
from dadplug.hub.kits import Kit


@pytest.fixture
def kits(tmp_path):
    return hub_kits.make(tmp_path / "kits")


def refused(result, reason: str) -> None:
    """Check that an end was refused, with a reason."""
    assert isinstance(result, RefusedError), repr(result)
    assert re.search(reason, str(result)), str(result)


def test_a_site_is_accepted_by_the_name_in_its_certificate(kits):
    for name in ("b", "a"):
        (connection, site), own = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / name)))
        with connection, own:
            assert site == name
            assert own.version() == connection.version() == "TLSv1.3"
            connection.sendall(b"payload")
            assert own.recv(100) == b"payload"
            own.sendall(b"answer")
            assert connection.recv(100) == b"answer"


def test_no_session_can_be_resumed(kits):
    (connection, _), own = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    with connection, own:
        connection.sendall(b"x")
        assert own.recv(1) == b"x"  # tickets would have come before
        assert not own.session or not own.session.has_ticket


def test_a_hub_of_another_authority_is_refused_by_the_site(kits, tmp_path):
    for entries in ({}, {"name": "other"}):
        others = hub_kits.make(tmp_path / f"others{len(entries)}", **entries)
        hub, site = meet(Kit.load(others / "hub"), dial(Kit.load(kits / "a")))
        refused(site, "signed by another authority")
        refused(hub, "the other end's kit is of another authority")


def test_a_site_of_another_authority_is_refused_by_the_hub(kits, tmp_path, monkeypatch):
    """The site trusts the hub, and shows a certificate of another authority."""
    others = hub_kits.make(tmp_path / "others")
    context = tls.site_context(Kit.load(kits / "a"))
    context.load_cert_chain(others / "a" / "certificate.pem", others / "a" / "key.pem")
    monkeypatch.setattr(tls, "site_context", lambda kit: context)
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    refused(hub, "signed by another authority")
    refused(site, "the other end's kit is of another authority")


@pytest.mark.parametrize(
    ("member", "shift", "there", "here"),
    [
        ("a", -10, "expired by this end's clock", "expired by the other end's clock"),
        ("a", 10, "not valid yet by this end's clock", "not valid yet"),
        ("hub", -10, "expired by the other end's clock", "expired by this end's clock"),
        ("hub", 10, "not valid yet", "not valid yet by this end's clock"),
    ],
)
def test_a_certificate_is_accepted_between_its_dates_only(kits, member, shift, there, here):
    provision.renew(kits, member, days=5, now=current_time() + timedelta(days=shift))
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    refused(hub, there)
    refused(site, here)


def test_a_clock_that_is_slow_by_half_an_hour_does_no_harm(kits):
    now = current_time() + timedelta(minutes=30)
    hub_kits.make(kits.parent / "fast", now)
    hub, site = meet(Kit.load(kits.parent / "fast" / "hub"), dial(Kit.load(kits.parent / "fast" / "a")))
    with hub[0], site:
        assert hub[1] == "a"


def test_a_revoked_site_is_refused_and_others_are_not(kits):
    provision.revoke(kits, "a")
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    refused(hub, "the other end's certificate has been revoked")
    refused(site, "this kit's certificate has been revoked")
    (connection, name), own = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "b")))
    with connection, own:
        assert name == "b"
    provision.renew(kits, "a", with_key=True)
    (connection, name), own = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    with connection, own:
        assert name == "a"


def test_a_site_that_connected_before_its_revocation_is_found_by_its_serial_number(kits):
    (connection, _), own = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    with connection, own:
        assert tls.peer_site(connection, Kit.load(kits / "hub")) == "a"
        provision.revoke(kits, "a")
        with pytest.raises(RefusedError, match="the certificate of a has been revoked"):
            tls.peer_site(connection, Kit.load(kits / "hub"))


def test_a_revoked_hub_is_refused_by_sites_that_have_the_list(kits):
    provision.revoke(kits, "hub")
    (kits / "a" / "revoked.pem").write_bytes((kits / "authority" / "revoked.pem").read_bytes())
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    refused(hub, "this kit's certificate has been revoked")
    refused(site, "the other end's certificate has been revoked")


def test_a_site_that_the_hubs_roster_lacks_is_refused(kits):
    roster = (kits / "hub" / "roster.json").read_bytes()
    provision.provision(Project.parse(hub_kits.PROJECT | {"sites": ["a", "b", "c"]}), kits)
    (kits / "hub" / "roster.json").write_bytes(roster)
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "c")))
    refused(hub, "c is not a site of study by the hub's roster")
    refused(site, r"the hub at 127.0.0.1:\d+ refuses c: c is not a site of study by the hub's roster")


def test_a_kit_is_for_one_role(kits):
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "hub")))
    refused(hub, "the other end's certificate is for the other role")
    refused(site, "this kit's certificate is for the other role")
    hub, site = meet(Kit.load(kits / "b"), dial(Kit.load(kits / "a")))
    refused(hub, "this kit's certificate is (for the other role|not accepted)")
    refused(site, "certificate (is for the other role|does not have the address)")


@pytest.mark.parametrize(
    ("names", "dialed", "reason"),
    [
        ({"hub": "127.0.0.1:8470", "hub_names": []}, "localhost", "does not have the host name that was dialed"),
        ({"hub": "localhost:8470", "hub_names": []}, "127.0.0.1", "does not have the address that was dialed"),
    ],
)
def test_the_hub_must_have_the_name_that_was_dialed(tmp_path, names, dialed, reason):
    kits = hub_kits.make(tmp_path / "kits", **names)
    kit = Kit.load(kits / "a")
    hub, site = meet(Kit.load(kits / "hub"), lambda address: tls.dial(kit, TIMEOUT, (dialed, address[1])))
    refused(site, reason)
    refused(hub, "does not have the name that the other end has dialed")
    provision.renew(kits, "hub", hub_names=(dialed,))
    (connection, name), own = meet(Kit.load(kits / "hub"), lambda address: tls.dial(kit, TIMEOUT, (dialed, address[1])))
    with connection, own:
        assert name == "a"


def test_tls_1_2_is_refused(kits, monkeypatch):
    context = tls.site_context(Kit.load(kits / "a"))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    monkeypatch.setattr(tls, "site_context", lambda kit: context)
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    refused(hub, "the other end does not speak TLS 1.3")
    refused(site, "the other end requires another version of TLS")


def test_a_client_without_a_certificate_is_refused(kits, monkeypatch):
    context = ssl.create_default_context(cafile=kits / "a" / "ca.pem")
    monkeypatch.setattr(tls, "site_context", lambda kit: context)
    hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    refused(hub, "the other end has no certificate")
    refused(site, "the other end requires a certificate")


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n", "speaks HTTP, not TLS"),
        (b"\x00\x01\x02 garbage that is longer than a record's header", "does not speak TLS"),
        (bytes([255]) * 100_000, "does not speak TLS"),
        (b"", "has not finished the TLS handshake"),
        (b"\x16\x03\x01", "has not finished the TLS handshake"),
    ],
    ids=["http", "text", "bytes", "silent", "half"],
)
def test_plain_tcp_is_refused_by_the_hub_and_its_connection_closed(kits, sent, reason):
    def client(address):
        with socket.create_connection(address, TIMEOUT) as connection:
            connection.sendall(sent)
            received = b""
            while piece := connection.recv(4096):
                received += piece
            return received

    seconds = 0.3 if "not finished" in reason else TIMEOUT
    hub, answer = meet(Kit.load(kits / "hub"), client, timeout=seconds)
    refused(hub, reason)
    assert isinstance(answer, ConnectionError) or len(answer) < 100  # nothing, or an alert of TLS


@pytest.mark.parametrize(
    ("greeting", "error", "reason"),
    [
        (b"220 mail.example.org ready\r\n", RefusedError, "does not speak TLS"),
        (b"", ConnectionError, "closed the connection"),
        (None, TimeoutError, "has not answered within"),
    ],
    ids=["mail", "closes", "silent"],
)
def test_a_site_refuses_a_server_that_is_no_hub(kits, greeting, error, reason):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        done = threading.Event()

        def serve():
            with server.accept()[0] as connection:
                if greeting is not None:
                    connection.recv(4096)
                    connection.sendall(greeting)
                    connection.shutdown(socket.SHUT_WR)
                done.wait(TIMEOUT)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(error, match=reason):
            tls.dial(Kit.load(kits / "a"), 0.5 if greeting is None else TIMEOUT, server.getsockname())
        done.set()
        thread.join(TIMEOUT)


def test_a_reason_from_the_network_is_bounded_and_printable(kits, monkeypatch):
    for reason, expected in (("\x1b[2Jno\nway", r"refuses a: \?\[2Jno\?way$"), ("x" * 5000, "x{1000}$")):
        monkeypatch.setattr(tls, "peer_site", lambda connection, kit, reason=reason: raises(RefusedError(reason)))
        hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
        assert str(hub) == reason
        refused(site, expected)
    monkeypatch.setattr(tls, "refusal", lambda reason: (60_000).to_bytes(2, "big") + bytes(60_000))
    _, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    refused(site, "the other end is no hub of dadplug")


def raises(error: Exception) -> None:
    raise error


def test_nothing_is_unpickled(kits, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("something is unpickled")

    monkeypatch.setattr(pickle, "loads", forbidden)
    monkeypatch.setattr(pickle, "load", forbidden)
    monkeypatch.setattr(pickle, "Unpickler", forbidden)
    (connection, site), own = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
    with connection, own:
        assert site == "a"
