"""What a site tells at once: a hub that it cannot reach, sites that are lost and back, names that do not resolve."""

from __future__ import annotations

import logging
import socket
import threading

import hub_kits
import pytest
from cutting_relay import CuttingRelay
from running_hub import TestSite, running_hub, until

from dadplug import logs
from dadplug.errors import SiteError
from dadplug.exchange import rendezvous
from dadplug.hub.pki.kits import Kit
from dadplug.hub.site.link import HubLink


@pytest.fixture
def unresolved(monkeypatch):
    def fail(*arguments, **settings):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)


def test_troubles_are_told_at_once_and_again_at_growing_intervals(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    troubles = logs.Troubles(logging.getLogger("dadplug.test"))
    troubles.begin("hub", "the hub is lost")
    for second in range(40):
        now[0] = 100.0 + second
        troubles.begin("hub", "the hub is lost")
        troubles.remind()
    troubles.end("hub", "the hub is back")
    troubles.end("hub", "the hub is back")
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "the hub is lost",
        "for 5 s: the hub is lost",
        "for 15 s: the hub is lost",
        "for 35 s: the hub is lost",
        "the hub is back, after 39 s",
    ]


def test_a_hub_whose_name_does_not_resolve_is_named_as_such(tmp_path, unresolved, caplog):
    kit = Kit.load(hub_kits.make(tmp_path / "kits") / "a")
    with pytest.raises(SiteError, match=r"the DNS name hub\.example\.org does not resolve"):
        HubLink.open(kit, timeout=0.3)
    assert "the DNS name hub.example.org does not resolve" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_point_whose_name_does_not_resolve_is_named_as_such(unresolved, rank):
    with pytest.raises(SiteError, match=r"the DNS name site0\.example\.org does not resolve") as found:
        rendezvous._open_store("site0.example.org", 29500, rank, 0.2, "site")
    assert "did not reach" not in str(found.value)


def test_a_site_tells_that_the_hub_and_another_site_are_lost(tmp_path, caplog):
    with running_hub(tmp_path / "kits") as hub, CuttingRelay(hub.address) as relay:
        other = []
        thread = threading.Thread(target=lambda: other.append(TestSite(hub.kit("b"), hub.address)))
        thread.start()
        link = HubLink.open(hub.kit("a"), timeout=60.0, address=relay.address)
        thread.join()
        relay.cut()
        until(lambda: "is lost" in caplog.text and "dialing again" in caplog.text)
        until(lambda: "is connected again, after" in caplog.text)
        other[0].leave("no data")
        assert link.await_loss(60.0) is not None
        assert "site 1 (b) is lost: no data" in caplog.text
        link.close()
