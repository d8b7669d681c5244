"""Sites in the hub's machine: they go on without encryption after both ends have proved who they are."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor

import hub_kits
import pytest
import torch
from cutting_relay import CuttingRelay
from hub_sites import open_link, together, transports
from running_hub import TestSite, running_hub, until
from support import free_port

from dadplug.hub import loopback, server, tls
from dadplug.hub.actions import FRESH
from dadplug.hub.dialing import dial_hub
from dadplug.hub.frames import VERSION, FrameError, Hello
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


def test_a_lost_connection_goes_on_without_encryption(tmp_path):
    with running_hub(tmp_path / "kits") as hub:
        links = together(lambda rank: open_link(hub.kits, "ab"[rank]), 2)
        first = links[0]._connection
        first._socket.shutdown(socket.SHUT_RDWR)
        until(lambda: links[0]._connection not in (None, first))
        assert encrypted(links) == [False, False]
        train(links)
        for link in links:
            link.close()


def test_a_mark_of_another_machine_or_connection_is_not_accepted(tmp_path, monkeypatch):
    with running_hub(tmp_path / "kits", sites=("a", "b", "c")) as hub:
        for name, mark in zip("abc", ("", "0" * 64, "not ASCII: é"), strict=True):
            site = TestSite(hub.kit(name), hub.address, mark=mark)
            assert not site.answer.plain
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


def test_a_site_refuses_a_hub_that_stops_to_encrypt_without_its_offer(tmp_path, monkeypatch):
    make(tmp_path, policy=STRICT)
    monkeypatch.setattr(server, "is_local", lambda connection, mark: True)
    with running_hub(tmp_path / "kits") as hub, pytest.raises(FrameError, match="which this site has not offered"):
        dial_hub(hub.kit("a"), Hello(VERSION, 1, FRESH, "check"), hub.address, 10)


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


def test_bytes_that_arrive_with_the_last_encrypted_ones_are_taken_and_divided_anywhere(tmp_path):
    hub, site = secure_pair(tmp_path)
    chance = random.Random(0)
    contents = [chance.randbytes(chance.choice([1, 31, 32, 5_000, 60_000])) for _ in range(40)]
    hub.setblocking(False)
    site.setblocking(False)
    hub.stop_encrypting(after_next=True)
    hub.write(b"last")
    for content in contents:
        hub.write(content)
    assert not hub.flush()  # more than the kernel takes
    buffer = memoryview(bytearray(4))
    assert site.recv_into(buffer) == 4
    assert bytes(buffer) == b"last"
    site.stop_encrypting()
    assert not hub.encrypts
    assert not site.encrypts
    expected, found = b"".join(contents), b""
    while len(found) < len(expected):
        hub.flush()
        room = memoryview(bytearray(chance.choice([1, 32, 4_000, 100_000])))
        while count := site.recv_into(room):
            found += room[:count]
    assert found == expected
    assert hub.flush()
    hub.close()
    assert site.recv_into(buffer) == 0
    site.close()
