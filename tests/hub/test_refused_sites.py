"""Sealed training: a site that another one refuses."""

import hashlib

from running_hub import TestSite, running_hub, together, until
from sealed_sites import sealed_hub

from dadplug.exchange.rounds import Requirements
from dadplug.hub.wire.messages import Drop, Exclude, Join, KeyMessage, Kind, RoundKind

OFFER = b"Ooffer"
WELCOME = b"W" + hashlib.sha256(b"offer").digest() + b"welcome"


def joiner(hub, members: list[TestSite]) -> TestSite:
    """Let site c, which has left, join again; return it once the members know."""
    c = TestSite(hub.kit("c"), hub.address)
    c.control(KeyMessage(2, OFFER))
    c.control(Requirements(1, 60_000))
    until(lambda: hub.hub.relay.sessions["training", 2].ready)
    for site in members:
        site.send(Kind.END, exchange=RoundKind.FIRST)
    for site in members:
        assert site.action(Join).slot == 2
    return c


def two_members(hub) -> list[TestSite]:
    """Return sites a and b of an elastic run, which site c has left."""
    sites = together(hub, "abc")
    for site in sites:
        site.control(Requirements(1, 60_000))
    sites[2].leave("it is away")
    assert {site.action(Drop).slot for site in sites[:2]} == {2}
    return sites[:2]


def test_a_member_ends_a_site_that_it_has_not_welcomed(tmp_path):
    with sealed_hub(tmp_path) as hub:
        a, b = two_members(hub)
        joiner(hub, [a, b])
        a.control(KeyMessage(2, WELCOME))
        b.control(Exclude(2, "its offer is damaged"))
        assert a.action(Drop).reason == "b refuses it: its offer is damaged"


def test_a_member_cannot_end_a_site_that_it_has_welcomed_or_started_with(tmp_path):
    with sealed_hub(tmp_path) as hub:
        a, b = two_members(hub)
        c = joiner(hub, [a, b])
        a.control(KeyMessage(2, WELCOME))
        for slot in (1, 2):
            for _ in range(2):
                a.control(Exclude(slot, "so be it"))
            hub.await_line(f"a refuses {'abc'[slot]}, which takes part already: so be it")
        c.control(Exclude(0, "it is older"))
        hub.await_line("c refuses a, which takes part already: it is older")
        assert sum("so be it" in line for line in hub.log) == 2  # each once
        assert {slot for _, slot in hub.hub.relay.sessions} == {0, 1, 2}
        b.control(KeyMessage(2, b"W" + bytes(32) + b"welcome"))  # of an offer before, which is not passed on
        b.control(KeyMessage(2, WELCOME))
        assert c.action(KeyMessage).slot == 2  # its own offer
        assert [c.action(KeyMessage) for _ in range(2)] == [KeyMessage(slot, WELCOME) for slot in (0, 1)]


def test_one_site_cannot_end_another_one_in_a_project_that_is_not_sealed(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        a, b = two_members(hub)
        joiner(hub, [a, b])
        b.control(Exclude(2, "so be it"))
        hub.await_line("b refuses c, which takes part already: so be it")
        assert {slot for _, slot in hub.hub.relay.sessions} == {0, 1, 2}
