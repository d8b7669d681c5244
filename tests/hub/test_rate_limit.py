"""Caps of the rate, in the site's sending path and in the hub's; the figures are those of benchmarks/rate_limit.py."""

import threading
import time
from typing import NamedTuple

import pytest
from frame_parts import Reader
from running_hub import TIMEOUT, close_step, exchange, running_hub, together, until

from dadplug.errors import RefusedError
from dadplug.exchange import codec
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import secure_socket, tls
from dadplug.hub.secure.secure_socket import TokenBucket, site_bucket
from dadplug.hub.server import acceptor
from dadplug.hub.site import connection as connections
from dadplug.hub.site.link import HubLink
from dadplug.hub.wire.messages import OLDEST_VERSION, VERSION, Head, Kind, pack_refusal_before_9


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(secure_socket.time, "monotonic", lambda: self.now)


def test_a_bucket_grants_its_rate(monkeypatch):
    clock, bucket = Clock(monkeypatch), TokenBucket(8.0)
    granted = 0
    for _ in range(1000):
        granted += bucket.take(1 << 20)
        clock.now += 0.01
    network = granted * 1500 / 1448
    assert 0.99 * 10e6 < network < 1.01 * 10e6
    clock.now += 1000.0
    assert bucket.take(1 << 30) < 60_000  # a pause is no credit


def test_a_bucket_grants_whole_segments_and_says_when(monkeypatch):
    clock, bucket = Clock(monkeypatch), TokenBucket(1.0)
    bucket.take(1 << 20)
    assert bucket.take(5000) == 0
    assert bucket.take(0) == 0
    wait = bucket.delay()
    assert 0 < wait < 0.1
    clock.now += wait
    assert bucket.take(5000) == 5000
    bucket.give_back(5000)
    assert bucket.take(5000) == 5000
    with pytest.raises(ValueError, match="it has to be positive, in Mbit/s"):
        TokenBucket(0)


def test_connections_of_a_kit_share_a_bucket():
    assert site_bucket("kits/a", None) is None
    assert site_bucket("kits/a", 5.0) is site_bucket("kits/a", 5.0)
    assert site_bucket("kits/a", 5.0) is not site_bucket("kits/b", 5.0)


def test_the_hub_sends_no_faster_than_its_limit(tmp_path):
    """The bytes of a message take as long as the limit says, at least; then all goes on."""
    with running_hub(tmp_path / "kits", rate_limit=20.0, encrypt_local=True) as hub:
        sites = together(hub)
        begin = time.monotonic()
        sites[0].send(Kind.PAYLOAD, bytes(1_500_000))
        assert sites[1].message(1_500_000) == bytes(1_500_000)
        took = time.monotonic() - begin
        assert 8 * 1_400_000 / took < 20e6
        exchange(sites[1], sites[0])
        close_step(sites)


def test_a_site_sends_no_faster_than_its_policy_says(tmp_path, monkeypatch):
    with running_hub(tmp_path / "kits", encrypt_local=True) as hub:
        (tmp_path / "kits" / "a" / "policy.toml").write_text("rate_limit = 20\n")
        taken = []
        real = TokenBucket.take
        monkeypatch.setattr(TokenBucket, "take", lambda self, n: taken.append(real(self, n)) or taken[-1])
        links = [HubLink(Kit.load(tmp_path / "kits" / name), hub.address) for name in "ab"]
        starts = [threading.Thread(target=each.start, args=(TIMEOUT,)) for each in links]
        for each in starts:
            each.start()
        for each in starts:
            each.join()
        begin = time.monotonic()
        links[0].post(Head(Kind.PAYLOAD, 0, step=1), bytes(1_500_000))
        until(lambda: sum(taken) > 1_500_000)
        assert 8 * 1_400_000 / (time.monotonic() - begin) < 20e6
        assert 0 in taken
        for each in links:
            each.close()


# Versions of the protocol


class RefuseBefore9(NamedTuple):
    """`Refuse` of versions 8 and before, which the codec decodes."""

    name: str
    reason: str
    retry: bool


def test_a_site_of_before_0_4_is_told_to_upgrade(hub):
    RefuseBefore9.__module__, RefuseBefore9.__qualname__ = "dadplug.hub.actions", "Refuse"
    codec.register(RefuseBefore9)
    body = codec.encode((8, 77, (0, 0), "training"))  # begins as its Hello does
    with tls.dial(hub.kit("a"), TIMEOUT, hub.address) as connection:
        connection.sendall(Head(Kind.CONTROL, 0, length=len(body)).pack() + body)
        answer = codec.decode(Reader(connection).next().body)
    assert (type(answer), answer.name, answer.retry) == (RefuseBefore9, "a", False)
    assert (
        f"speaks version 8 of the protocol, the hub serves versions {OLDEST_VERSION} to {VERSION}: upgrade this site"
        in answer.reason
    )


def test_a_hub_of_before_0_4_is_to_be_upgraded(hub, monkeypatch):
    monkeypatch.setattr(acceptor, "pack_control", lambda refusal, slot: pack_refusal_before_9(refusal))
    monkeypatch.setattr(connections, "VERSION", VERSION + 1)
    with pytest.raises(RefusedError, match=r"speaks version 8 of the protocol or an older one, .*: upgrade the hub"):
        HubLink.open(hub.kit("a"), TIMEOUT, hub.address)
