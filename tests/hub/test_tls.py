"""Handshakes between hub and site over loopback: who is accepted, and the reason at both ends for who is not."""

import contextlib
import os
import pickle
import random
import re
import socket
import ssl
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import hub_kits
import hub_sites
import pytest
import torch
from cutting_relay import CuttingRelay
from hub_kits import TIMEOUT, dial, meet
from hub_sites import linked, together, transports
from running_hub import TestSite, running_hub, until
from support import free_port

from dadplug.errors import RefusedError
from dadplug.exchange import handshake
from dadplug.hub import Project
from dadplug.hub.pki import provision
from dadplug.hub.pki.kits import Kit, current_time
from dadplug.hub.secure import secure_socket, tls
from dadplug.hub.secure.secure_socket import SecureSocket, _Records
from dadplug.hub.site import connection as dialing


def refused(result, reason: str) -> None:
    """Check that an end was refused, with a reason."""
    assert isinstance(result, RefusedError), repr(result)
    assert re.search(reason, str(result)), str(result)


def refuse(hub: Path, site: Path, there: str, here: str) -> None:
    """Check that two ends with these kits refuse each other, with a reason at the hub and one at the site."""
    found = meet(Kit.load(hub), dial(Kit.load(site)))
    refused(found[0], there)
    refused(found[1], here)


@contextlib.contextmanager
def accepted(hub: Path, site: Path, client=None):
    """Check that a hub accepts a site; yield both ends of their connection."""
    (connection, name), own = meet(Kit.load(hub), client or dial(Kit.load(site)))
    with connection, own:
        assert name == site.name
        yield connection, own


def test_a_site_is_accepted_by_the_name_in_its_certificate(kits):
    for name in ("b", "a"):
        with accepted(kits / "hub", kits / name) as (connection, own):
            assert own.tls.version() == connection.tls.version() == "TLSv1.3"
            connection.sendall(b"payload")
            assert own.recv(100) == b"payload"
            own.sendall(b"answer")
            assert connection.recv(100) == b"answer"


def test_no_session_can_be_resumed(kits):
    with accepted(kits / "hub", kits / "a") as (connection, own):
        connection.sendall(b"x")
        assert own.recv(1) == b"x"  # tickets would have come before
        session = own.tls.session
        assert not session or not session.has_ticket


def test_a_hub_of_another_authority_is_refused_by_the_site(kits, tmp_path):
    for entries in ({}, {"name": "other"}):
        others = hub_kits.make(tmp_path / f"others{len(entries)}", **entries)
        refuse(others / "hub", kits / "a", "the other end's kit is of another authority", "signed by another authority")


def test_a_site_of_another_authority_is_refused_by_the_hub(kits, tmp_path, monkeypatch):
    """The site trusts the hub, and shows a certificate of another authority."""
    others = hub_kits.make(tmp_path / "others")
    context = tls.site_context(Kit.load(kits / "a"))
    context.load_cert_chain(others / "a" / "certificate.pem", others / "a" / "key.pem")
    monkeypatch.setattr(tls, "site_context", lambda kit: context)
    refuse(kits / "hub", kits / "a", "signed by another authority", "the other end's kit is of another authority")


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
    refuse(kits / "hub", kits / "a", there, here)


def test_a_clock_that_is_slow_by_half_an_hour_does_no_harm(kits):
    fast = hub_kits.make(kits.parent / "fast", current_time() + timedelta(minutes=30))
    with accepted(fast / "hub", fast / "a"):
        pass


def test_a_revoked_site_is_refused_and_others_are_not(kits):
    provision.revoke(kits, "a")
    there, here = "the other end's certificate has been revoked", "this kit's certificate has been revoked"
    refuse(kits / "hub", kits / "a", there, here)
    with accepted(kits / "hub", kits / "b"):
        provision.renew(kits, "a", with_key=True)
    with accepted(kits / "hub", kits / "a"):
        pass


def test_a_site_that_connected_before_its_revocation_is_found_by_its_serial_number(kits):
    with accepted(kits / "hub", kits / "a") as (connection, _):
        assert tls.peer_site(connection, Kit.load(kits / "hub")) == "a"
        provision.revoke(kits, "a")
        with pytest.raises(RefusedError, match="the certificate of a has been revoked"):
            tls.peer_site(connection, Kit.load(kits / "hub"))


def test_a_revoked_hub_is_refused_by_sites_that_have_the_list(kits):
    provision.revoke(kits, "hub")
    (kits / "a" / "revoked.pem").write_bytes((kits / "authority" / "revoked.pem").read_bytes())
    there, here = "this kit's certificate has been revoked", "the other end's certificate has been revoked"
    refuse(kits / "hub", kits / "a", there, here)


def test_a_site_that_the_hubs_roster_lacks_is_refused(kits):
    roster = (kits / "hub" / "roster.json").read_bytes()
    provision.provision(Project.parse(hub_kits.PROJECT | {"sites": ["a", "b", "c"]}), kits)
    (kits / "hub" / "roster.json").write_bytes(roster)
    reason = "c is not a site of study by the hub's roster"
    refuse(kits / "hub", kits / "c", reason, rf"the hub at 127.0.0.1:\d+ refuses c: {reason}")


def test_a_kit_is_for_one_role(kits):
    there, here = "the other end's certificate is for the other role", "this kit's certificate is for the other role"
    refuse(kits / "hub", kits / "hub", there, here)
    there = "this kit's certificate is (for the other role|not accepted)"
    refuse(kits / "b", kits / "a", there, "certificate (is for the other role|does not have the address)")


@pytest.mark.parametrize(
    ("names", "host", "reason"),
    [
        ({"hub": "127.0.0.1:8470", "hub_names": []}, "localhost", "host name that the site connects to"),
        ({"hub": "localhost:8470", "hub_names": []}, "127.0.0.1", "address that the site connects to"),
    ],
)
def test_the_hub_must_have_the_name_that_the_site_connects_to(tmp_path, names, host, reason):
    kits = hub_kits.make(tmp_path / "kits", **names)
    kit = Kit.load(kits / "a")

    def client(address):
        return tls.dial(kit, TIMEOUT, (host, address[1]))

    hub, site = meet(Kit.load(kits / "hub"), client)
    refused(site, f"does not have the {reason}")
    refused(hub, "does not have the name that the other end connects to")
    provision.renew(kits, "hub", hub_names=(host,))
    with accepted(kits / "hub", kits / "a", client):
        pass


def test_tls_1_2_is_refused(kits, monkeypatch):
    context = tls.site_context(Kit.load(kits / "a"))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    monkeypatch.setattr(tls, "site_context", lambda kit: context)
    there, here = "the other end does not speak TLS 1.3", "the other end requires another version of TLS"
    refuse(kits / "hub", kits / "a", there, here)


def test_a_client_without_a_certificate_is_refused(kits, monkeypatch):
    context = ssl.create_default_context(cafile=kits / "a" / "ca.pem")
    monkeypatch.setattr(tls, "site_context", lambda kit: context)
    refuse(kits / "hub", kits / "a", "the other end has no certificate", "the other end requires a certificate")


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
    for reason, expected in (("\x1b[2Jno\nway", r"refuses a: \\x1b\[2Jno\\nway$"), ("x" * 5000, "x{1000}$")):
        monkeypatch.setattr(tls, "peer_site", lambda connection, kit, reason=reason: raises(RefusedError(reason)))
        hub, site = meet(Kit.load(kits / "hub"), dial(Kit.load(kits / "a")))
        assert str(hub) == reason.replace("\x1b", r"\x1b")
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
    with accepted(kits / "hub", kits / "a"):
        pass


# Boundaries of TLS records, by which a socket becomes readable when enough has arrived, and not before


BESIDE = 22  # bytes of a record beside its content


def record(content: int) -> bytes:
    return b"\x17\x03\x03" + (content + BESIDE - 5).to_bytes(2, "big") + bytes(content + BESIDE - 5)


def test_the_end_of_a_record_is_known_wherever_its_bytes_are_divided():
    chance = random.Random(0)
    contents = [chance.choice([1, 2, 700, 16384]) for _ in range(60)]
    stream = b"".join(map(record, contents))
    ends = [0]
    for content in contents:
        ends.append(ends[-1] + content + BESIDE)
    records, position = _Records(), 0
    while position < len(stream):
        count = min(len(stream) - position, chance.choice([1, 3, 4, 5, 6, 800, 40000]))
        records.count(memoryview(stream[position : position + count]))
        position += count
        last = max(number for number, end in enumerate(ends) if end <= position)
        begun = position - ends[last]
        if begun < 5:  # the head is incomplete, and the length unknown
            assert (records.missing, len(records.head)) == (0, begun)
            assert records.bytes_for(1) == 1
            continue
        assert (records.missing, records.content) == (ends[last + 1] - position, contents[last])
        assert records.bytes_for(1) == records.bytes_for(contents[last]) == records.missing


def test_what_has_to_arrive_is_known_to_the_byte_where_records_are_full():
    stream = record(16384) * 2 + record(100)
    for cut in (0, 3, 5, 16406, 16409, 20000):
        records = _Records()
        records.count(memoryview(stream[:cut]))
        decrypted = 16384 * (cut >= 16406)
        assert records.bytes_for(2 * 16384 + 100 - decrypted) == len(stream) - cut


# Reading of whole messages in one time


class Trickle:
    """Connection of which a byte arrives at each second of a clock of its own."""

    def __init__(self, timeout: float | None) -> None:
        self.now, self.timeout = 0.0, timeout
        self.monotonic = lambda: self.now

    def recv(self, size: int) -> bytes:
        if self.timeout is not None and self.timeout < 1.0:
            raise TimeoutError("timed out")
        self.now += 1.0
        return b"x"

    def gettimeout(self) -> float | None:
        return self.timeout

    def settimeout(self, seconds: float | None) -> None:
        self.timeout = seconds


@pytest.mark.parametrize("timeout", [5.0, 5.5, None])
def test_the_timeout_is_for_the_whole_message(timeout, monkeypatch):
    connected = Trickle(timeout)
    monkeypatch.setattr(handshake, "time", connected)
    assert handshake.read_exactly(connected, 5) == b"xxxxx"
    assert connected.timeout == timeout
    with contextlib.nullcontext() if timeout is None else pytest.raises(TimeoutError):
        handshake.read_exactly(connected, 6)
    assert connected.timeout == timeout
    assert connected.now == (11.0 if timeout is None else 10.0)


# Sites in the hub's machine: they go on without encryption after both ends have proved who they are


linux_only = pytest.mark.skipif("sys.platform != 'linux'", reason="only Linux tells what a process shares with another")
STRICT = {"a": {"encrypt_local": True}}


def make(folder, **entries) -> None:
    entries = {"hub_names": [], "sites": ["a", "b"], "hub_at": "a", **entries}
    hub_kits.make(folder / "kits", hub=f"127.0.0.1:{free_port()}", **entries)


def encrypted(links) -> list[bool]:
    return [link._connection._replaced is None for link in links]


def train(links) -> None:
    """Exchange payloads, and check them."""
    gathers = [each.gather([200_000, 3], torch.float32) for each in transports(links)]
    for number in range(3):
        for rank, gather in enumerate(gathers):
            gather.payload.fill_(number + rank)
            gather.launch()
        for found in together(lambda rank: gathers[rank].wait(), 2):
            assert [set(payload.tolist()) for payload in found] == [{number}, {number + 1.0}]


@linux_only
@pytest.mark.parametrize(
    ("policy", "settings", "expected"),
    [({}, {}, [False, False]), (STRICT, {}, [True, False]), ({}, {"encrypt_local": True}, [True, True])],
    ids=["allowed", "forbidden by a site", "forbidden by the hub"],
)
def test_sites_in_the_hubs_machine_do_not_encrypt_unless_somebody_requires_it(tmp_path, policy, settings, expected):
    make(tmp_path, policy=policy)
    with running_hub(tmp_path / "kits", **settings) as hub, linked(hub) as links:
        assert encrypted(links) == expected
        train(links)
        assert encrypted(links) == expected


@linux_only
def test_a_connection_over_a_relay_is_encrypted_though_all_are_in_one_machine(tmp_path):
    with (
        running_hub(tmp_path / "kits") as hub,
        CuttingRelay(hub.address) as relay,
        linked(hub, 2, (relay.address, hub.address)) as links,
    ):
        assert encrypted(links) == [True, False]
        train(links)


@linux_only
def test_connections_that_are_lost_at_any_time_go_on_without_encryption(tmp_path):
    chance = random.Random(0)
    with hub_sites.links(tmp_path) as links:
        for _ in range(10):
            first = links[0]._connection
            timer = threading.Timer(chance.random() * 0.01, first._socket.shutdown, [socket.SHUT_RDWR])
            timer.start()
            train(links)
            timer.join()
            until(lambda first=first: links[0]._connection not in (None, first))
            assert encrypted(links) == [False, False]


def packets(port: int, seconds: float) -> tuple[socket.socket, list[bytes]]:
    """Return what the loopback interface carries from or to a port, as it is captured by a thread, and its socket."""
    capture = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    capture.bind(("lo", 0))
    capture.settimeout(seconds)
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            while True:
                packet = capture.recv(1 << 17)
                if port in struct.unpack("!HH", packet[34:38]):
                    found.append(packet)

    threading.Thread(target=read, daemon=True).start()
    return capture, found


@linux_only
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may capture packets")
def test_no_message_of_a_local_site_is_seen_on_the_loopback_interface(tmp_path):
    sentinel = torch.tensor([3.0303e33, -7.0707e-7]).repeat(500)
    with running_hub(tmp_path / "kits") as hub:
        capture, found = packets(hub.address[1], 20)
        with linked(hub) as links:
            assert encrypted(links) == [False, False]
            gathers = [each.gather([1000, 1000], torch.float32) for each in transports(links)]
            for gather in gathers:
                gather.payload.copy_(sentinel)
                gather.launch()
            for payloads in together(lambda rank: gathers[rank].wait(), 2):
                assert all(torch.equal(each, sentinel) for each in payloads)
        capture.close()
    assert found  # the handshakes
    assert not any(sentinel[:4].numpy().tobytes() in packet for packet in found)


@linux_only
def test_a_mark_of_another_machine_or_connection_is_not_accepted(tmp_path, monkeypatch):
    with running_hub(tmp_path / "kits", sites=("a", "b", "c")) as hub:
        for name, mark in zip("abc", ("", "0" * 64, "not ASCII: é"), strict=True):
            with secure_socket.LocalDoor(mark) as door:
                site = TestSite(hub.kit(name), hub.address, mark=mark, place=door.place, secret=door.secret)
                assert site.answer  # over TLS
                assert door.admit() is None
                site.close()
    secure = SecureSocket.__new__(SecureSocket)
    monkeypatch.setattr(SecureSocket, "addresses", lambda self: (("127.0.0.1", 5), ("127.0.0.1", 8)))
    dialled = secure_socket.connection_mark(secure, dialled=True)
    monkeypatch.setattr(SecureSocket, "addresses", lambda self: (("127.0.0.1", 8), ("127.0.0.1", 5)))
    assert secure_socket.is_local(secure, dialled)
    monkeypatch.setattr(secure_socket.os, "readlink", lambda path: "net:[1]")  # another network namespace
    assert not secure_socket.is_local(secure, dialled)
    monkeypatch.undo()
    monkeypatch.setattr(SecureSocket, "addresses", lambda self: (("127.0.0.1", 8), ("127.0.0.1", 6)))
    assert not secure_socket.is_local(secure, dialled)
    assert not secure_socket.is_local(secure, "")


@linux_only
def test_others_who_dial_a_sites_unix_socket_are_not_taken_for_the_hub():
    door = secure_socket.LocalDoor("mark")
    with contextlib.closing(door):
        others = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each, content in zip(others, (b"0", b"1" * 32, door.secret[:31].encode()), strict=True):
            each.connect(f"\0dadplug-{door.place}")
            each.send(content)
        assert door.admit() is None
        hub = socket.socket(socket.AF_UNIX)
        hub.connect(f"\0dadplug-{door.place}")
        hub.send(door.secret.encode())
        taken = door.admit()
        assert taken is not None
        hub.send(b"more")
        assert taken.recv(8) == b"more"
        for each in (*others, hub, taken):
            each.close()


@linux_only
def test_a_site_whose_unix_socket_cannot_be_dialled_encrypts(tmp_path, monkeypatch):
    def elsewhere(connection):
        door = secure_socket.open_door(connection)
        door.place = "0" * 32
        return door

    monkeypatch.setattr(dialing, "open_door", elsewhere)
    with hub_sites.links(tmp_path) as links:
        assert encrypted(links) == [True, True]
        train(links)


def secure_pair(folder) -> tuple[SecureSocket, SecureSocket]:
    """Return two ends of a connection after the handshake."""
    hub_kits.make(folder / "kits")
    ends = socket.socketpair()
    for each in ends:
        each.settimeout(30)
    with ThreadPoolExecutor(1) as pool:
        context = tls.hub_context(Kit.load(folder / "kits" / "hub"))
        hub = SecureSocket(ends[0], context, server_side=True)
        done = pool.submit(hub.do_handshake)
        context = tls.site_context(Kit.load(folder / "kits" / "a"))
        context.check_hostname = False
        site = SecureSocket(ends[1], context)
        site.do_handshake()
        done.result()
    return hub, site


@linux_only
def test_bytes_over_a_unix_socket_are_divided_anywhere(tmp_path):
    ends = secure_pair(tmp_path)
    hub, site = ends
    chance = random.Random(0)
    contents = [chance.randbytes(chance.choice([1, 31, 32, 5_000, 60_000])) for _ in range(300)]
    for end, local in zip(ends, socket.socketpair(), strict=True):
        end.settimeout(0.0)
        end.continue_over(local)
        assert end._replaced is not None
    for content in contents:
        hub.write(content)
    assert not hub.flush()  # more than the kernel takes
    expected, found = b"".join(contents), bytearray()
    while len(found) < len(expected):
        hub.flush()
        room = memoryview(bytearray(chance.choice([1, 32, 4_000, 100_000])))
        for _ in range(10):  # byte by byte, what has arrived would take seconds
            if not (count := site.recv_into(room)):
                break
            found += room[:count]
    assert found == expected
    assert hub.flush()
    hub.close()
    ends_with = [site.recv_into(memoryview(bytearray(4))) for _ in range(2)]
    assert ends_with[-1] == 0
    site.close()
