"""Sites in the hub's machine: they go on without encryption after both ends have proved who they are."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import hub_kits
import pytest
import torch
from cutting_relay import CuttingRelay
from hub_sites import open_link, together, transports
from running_hub import TestSite, running_hub, until
from support import free_port

from dadplug.hub import dialing, loopback, tls
from dadplug.hub.kits import Kit
from dadplug.hub.secure_socket import SecureSocket

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="only Linux tells what a process shares with another")
STRICT = {"a": {"encrypt_local": True}}


def make(folder, **entries) -> None:
    entries = {"hub_names": [], "sites": ["a", "b"], "hub_at": "a", **entries}
    hub_kits.make(folder / "kits", hub=f"127.0.0.1:{free_port()}", **entries)


def encrypted(links) -> list[bool]:
    return [link._connection.encrypts for link in links]


def train(links) -> None:
    """Exchange payloads, and check them."""
    gathers = [each.gather([200_000, 3], torch.float32) for each in transports(links)]
    for number in range(3):
        for rank, gather in enumerate(gathers):
            gather.payload.fill_(number + rank)
            gather.launch()
        for found in together(lambda rank: gathers[rank].wait(), 2):
            assert [set(payload.tolist()) for payload in found] == [{number}, {number + 1.0}]


@pytest.mark.parametrize(
    ("policy", "settings", "expected"),
    [({}, {}, [False, False]), (STRICT, {}, [True, False]), ({}, {"encrypt_local": True}, [True, True])],
    ids=["allowed", "forbidden by a site", "forbidden by the hub"],
)
def test_sites_in_the_hubs_machine_do_not_encrypt_unless_somebody_requires_it(tmp_path, policy, settings, expected):
    make(tmp_path, policy=policy)
    with running_hub(tmp_path / "kits", **settings) as hub:
        links = together(lambda rank: open_link(hub.kits, "ab"[rank]), 2)
        assert encrypted(links) == expected
        train(links)
        assert encrypted(links) == expected
        for link in links:
            link.close()


def test_a_connection_over_a_relay_is_encrypted_though_all_are_in_one_machine(tmp_path):
    with running_hub(tmp_path / "kits") as hub, CuttingRelay(hub.address) as relay:
        links = together(lambda rank: open_link(hub.kits, "ab"[rank], (relay.address, hub.address)[rank]), 2)
        assert encrypted(links) == [True, False]
        train(links)
        for link in links:
            link.close()


def test_connections_that_are_lost_at_any_time_go_on_without_encryption(tmp_path):
    chance = random.Random(0)
    with running_hub(tmp_path / "kits") as hub:
        links = together(lambda rank: open_link(hub.kits, "ab"[rank]), 2)
        for _ in range(10):
            first = links[0]._connection
            timer = threading.Timer(chance.random() * 0.01, first._socket.shutdown, [socket.SHUT_RDWR])
            timer.start()
            train(links)
            timer.join()
            until(lambda first=first: links[0]._connection not in (None, first))
            assert encrypted(links) == [False, False]
        for link in links:
            link.close()


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


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may capture packets")
def test_no_message_of_a_local_site_is_seen_on_the_loopback_interface(tmp_path):
    sentinel = torch.tensor([3.0303e33, -7.0707e-7]).repeat(500)
    with running_hub(tmp_path / "kits") as hub:
        capture, found = packets(hub.address[1], 20)
        links = together(lambda rank: open_link(hub.kits, "ab"[rank]), 2)
        assert encrypted(links) == [False, False]
        gathers = [each.gather([1000, 1000], torch.float32) for each in transports(links)]
        for gather in gathers:
            gather.payload.copy_(sentinel)
            gather.launch()
        for payloads in together(lambda rank: gathers[rank].wait(), 2):
            assert all(torch.equal(each, sentinel) for each in payloads)
        for link in links:
            link.close()
        capture.close()
    assert found  # the handshakes
    assert not any(sentinel[:4].numpy().tobytes() in packet for packet in found)


def test_a_mark_of_another_machine_or_connection_is_not_accepted(tmp_path, monkeypatch):
    with running_hub(tmp_path / "kits", sites=("a", "b", "c")) as hub:
        for name, mark in zip("abc", ("", "0" * 64, "not ASCII: é"), strict=True):
            with contextlib.closing(loopback.LocalDoor(mark)) as door:
                site = TestSite(hub.kit(name), hub.address, mark=mark, place=door.place, secret=door.secret)
                assert site.answer  # over TLS
                assert door.accept() is None
                site.close()
    secure = SecureSocket.__new__(SecureSocket)
    monkeypatch.setattr(SecureSocket, "addresses", lambda self: (("127.0.0.1", 5), ("127.0.0.1", 8)))
    dialled = loopback.connection_mark(secure, dialled=True)
    monkeypatch.setattr(SecureSocket, "addresses", lambda self: (("127.0.0.1", 8), ("127.0.0.1", 5)))
    assert loopback.is_local(secure, dialled)
    monkeypatch.setattr(loopback.os, "readlink", lambda path: "net:[1]")  # another network namespace
    assert not loopback.is_local(secure, dialled)
    monkeypatch.undo()
    monkeypatch.setattr(SecureSocket, "addresses", lambda self: (("127.0.0.1", 8), ("127.0.0.1", 6)))
    assert not loopback.is_local(secure, dialled)
    assert not loopback.is_local(secure, "")


def test_others_who_dial_a_sites_unix_socket_are_not_taken_for_the_hub():
    door = loopback.LocalDoor("mark")
    with contextlib.closing(door):
        others = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each, content in zip(others, (b"0", b"1" * 32, door.secret[:31].encode()), strict=True):
            each.connect(f"\0dadplug-{door.place}")
            each.send(content)
        assert door.accept() is None
        hub = socket.socket(socket.AF_UNIX)
        hub.connect(f"\0dadplug-{door.place}")
        hub.send(door.secret.encode())
        taken = door.accept()
        assert taken is not None
        hub.send(b"more")
        assert taken.recv(8) == b"more"
        for each in (*others, hub, taken):
            each.close()


def test_a_site_whose_unix_socket_cannot_be_dialled_encrypts(tmp_path, monkeypatch):
    def elsewhere(connection):
        door = loopback.open_door(connection)
        door.place = "0" * 32
        return door

    monkeypatch.setattr(dialing, "open_door", elsewhere)
    with running_hub(tmp_path / "kits") as hub:
        links = together(lambda rank: open_link(hub.kits, "ab"[rank]), 2)
        assert encrypted(links) == [True, True]
        train(links)
        for link in links:
            link.close()


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


def test_bytes_over_a_unix_socket_are_divided_anywhere(tmp_path):
    ends = secure_pair(tmp_path)
    hub, site = ends
    chance = random.Random(0)
    contents = [chance.randbytes(chance.choice([1, 31, 32, 5_000, 60_000])) for _ in range(300)]
    for end, local in zip(ends, socket.socketpair(), strict=True):
        end.setblocking(False)
        end.continue_over(local)
        assert not end.encrypts
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
