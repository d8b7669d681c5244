"""Sealed training that goes on while sites leave and return: the same bits as with a site that is idle."""

import hashlib

import pytest
from fleet import ENDED, Fleet, idles, same_bits
from running_hub import TestSite, add_site, running_hub, together, until
from sealed_sites import sealed_hub

from dadplug.exchange.rounds import Requirements
from dadplug.hub.wire.messages import Drop, Exclude, Join, KeyMessage, Kind, RoundKind


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
def test_a_site_that_is_killed_and_returns_counts_as_an_idle_one(tmp_path, mode):
    with Fleet(tmp_path, sealed_hub(tmp_path), mode=mode, pause=0.01) as fleet:
        fleet.start("ab")
        fleet.lose("c", leave=3, how="late")
        fleet.hub.await_line("c joins", ENDED)
        lines, present = fleet.finish("abc", 40)
    assert [0, 1] in present.values()
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode=mode))


@pytest.mark.parametrize("pause", [0.02, 1.0])
def test_a_site_that_is_new_counts_as_one_that_was_idle(tmp_path, pause):
    """With long steps the site joins in the round in which the run grows."""
    with Fleet(tmp_path, sealed_hub(tmp_path, ("a", "b")), mode="dad", pause=pause, meets=True) as fleet:
        fleet.start("ab")
        fleet.await_step("a", 3)
        add_site(fleet.hub, "abc", hub_at=None, sealed=True)
        fleet.start("c")
        fleet.hub.await_line("c joins", ENDED)
        lines, present = fleet.finish("abc", 20 if pause < 1 else 4)
    assert present[3] == [0, 1]
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode="dad", meets=True))


# A site that another one refuses

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
