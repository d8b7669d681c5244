"""Caps of the rate, in the site's sending path and in the hub's; the figures are those of benchmarks/rate_limit.py."""

import threading
import time

import pytest
from running_hub import TIMEOUT, TestSite, close_step, exchange, running_hub, together, until

from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import secure_socket
from dadplug.hub.secure.secure_socket import TokenBucket, site_bucket
from dadplug.hub.site.link import HubLink
from dadplug.hub.wire.messages import OLDEST_VERSION, VERSION, Head, Kind, Refuse, Start


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


def test_a_hub_serves_sites_of_the_version_before(hub):
    assert OLDEST_VERSION == VERSION - 1
    sites = [TestSite(hub.kit(name), hub.address, version=VERSION - older) for older, name in enumerate("ab")]
    for site in sites:
        site.action(Start)
    assert [each.version for each in hub.hub.relay.sessions.values()] == [VERSION, VERSION - 1]
    exchange(*sites)
    exchange(*reversed(sites))
    close_step(sites)


@pytest.mark.parametrize(("version", "first"), [(OLDEST_VERSION - 1, "this site"), (VERSION + 1, "the hub")])
def test_other_versions_are_told_which_side_to_upgrade(hub, version, first):
    site = TestSite(hub.kit("a"), hub.address, version=version)
    assert isinstance(site.answer, Refuse)
    assert f"speaks version {version} of the protocol, the hub version 8 and with sites also 7" in site.answer.reason
    assert f"upgrade {first} (the hub goes first, then the sites)" in site.answer.reason
    assert not site.answer.retry
