"""Sealed training with late sites, hubs that restart, local steps, checkpoints and donors that are lost."""

import hashlib
import time
from pathlib import Path

import elastic_local
import pytest
from fleet import ENDED, Fleet, MortalHub, idles, presence, same_bits
from running_hub import TestSite, together, until
from sealed_sites import sealed_hub

from dadplug.exchange.rounds import Requirements
from dadplug.hub.wire.messages import Drop, Exclude, Join, KeyMessage, Kind, RoundKind

MEDIAN = 8  # first step of which the median is known, with some more


# Late sites


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
def test_a_late_site_misses_steps_and_another_one_returns_meanwhile(tmp_path, mode):
    with Fleet(tmp_path, sealed_hub(tmp_path), mode=mode, late="skip", pause=0.03) as fleet:
        fleet.start("a")
        fleet.start("b", leave=MEDIAN + 4, how="sent")
        late = {"late_steps": [MEDIAN, MEDIAN + 1, MEDIAN + 6], "late_in": "backward", "bucket_mb": None}
        fleet.start("c", other=str(tmp_path / "a"), **late)
        fleet.end("b", -9)
        fleet.start("b")
        fleet.hub.await_line("b joins", ENDED)
        fleet.hub.await_line("c takes part again", ENDED)
        lines, present = fleet.finish("abc", 30)
    assert 2 not in present[MEDIAN]
    assert any(1 not in each for each in present.values())
    if mode == "dad":  # in others the memory of the late site stays, and that of the new process begins anew
        same_bits(lines, idles(tmp_path / "idle", "abc", present, mode=mode))


# A hub that is killed and started again


@pytest.mark.parametrize(("count", "sealed"), [(1, True), (3, True), (5, True), (2, False), (4, False)])
def test_a_hub_is_killed_while_a_site_joins(tmp_path, count, sealed):
    """After so many frames: of the welcomes, the state, the end of the round, and those of the next one."""
    hub = MortalHub(tmp_path / "run", "abc", ("joining", count), sealed)
    with Fleet(tmp_path / "run", hub, mode="dad", site_timeout=5.0, pause=0.08) as fleet:
        fleet.start("ab")
        fleet.lose("c", leave=3)
        assert hub.process.wait(ENDED) == -9, fleet.state()
        hub.start()
        fleet.await_more("c", 3, "a")
        lines, present = fleet.finish("abc", 10)
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode="dad"))


def test_a_hub_is_killed_while_a_site_has_a_state_and_lacks_a_key(tmp_path):
    """The state from before does not count, and the next one arrives before all keys do."""
    hub = MortalHub(tmp_path / "run", "abc", sealed=True)
    with Fleet(tmp_path / "run", hub, mode="dad", site_timeout=5.0, pause=0.08) as fleet:
        fleet.start("a")
        fleet.start("b", how="welcomes late")
        fleet.lose("c", leave=3)
        hub.await_line("a is asked for its state, for c", ENDED)
        time.sleep(0.5)
        hub.restart()
        fleet.await_more("c", 3, "a")
        lines, present = fleet.finish("abc", 10)
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode="dad"))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_hub_is_killed_while_a_site_restores_its_state(tmp_path, sealed):
    """The others go on before the site is admitted again, so that its state has become outdated."""
    hub = MortalHub(tmp_path / "run", "abc", sealed=sealed)
    with Fleet(tmp_path / "run", hub, mode="dad", site_timeout=5.0, pause=0.08) as fleet:
        fleet.start("ab")
        fleet.start("c", leave=3)
        fleet.end("c", -9)
        fleet.start("c", how="restores")
        until((tmp_path / "run" / "c" / "restored").exists, fleet.state, ENDED)
        fleet.freeze("c")
        hub.restart()
        fleet.await_more("a", 3)
        fleet.thaw("c")
        fleet.await_joins("c", 2)
        (tmp_path / "run" / "c" / "goes on").touch()
        fleet.await_more("c", 3, "a")
        lines, present = fleet.finish("abc", 10)
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode="dad"))


# Local steps


@pytest.mark.parametrize("options", [{}, {"overlap": True, "late": "skip"}, {"density": 0.5, "wire": "int2"}])
def test_local_steps_go_on_while_a_site_is_killed_and_the_hub_restarts(tmp_path, options):
    hub, options = MortalHub(tmp_path, "abc", sealed=True), {"site_timeout": 5.0} | options
    with Fleet(tmp_path, hub, elastic_local.__file__, key="agreement", options=options, pause=0.03) as fleet:
        fleet.start("ab")
        fleet.start("c", leave=10)
        fleet.end("c", -9)
        fleet.await_step("a", 4)
        fleet.start("c")
        fleet.await_step("c", 6)
        hub.restart()
        fleet.await_more("b", 3, "a")
        elastic_local.ends(fleet, "abc")
    present = presence(fleet.lines("a"))
    assert [0, 1] in present.values()
    assert present[max(present)] == [0, 1, 2]


# Checkpoints: all sites end, and start again with what they have saved


def trains_in_parts(folder: Path, parts: list[int], sealed: bool, **settings: object) -> dict[int, dict]:
    """Train in some parts, each with new processes over the same hub; return the lines of the first site."""
    with Fleet(folder, sealed_hub(folder, sealed=sealed), steps=24, **settings) as fleet:
        for saves in parts:
            for name in "abc":
                fleet.start(name, saves=saves, resumes=str(folder / f"{name}.pt"))
            fleet.end("abc")
        return fleet.equal("abc")[0]


@pytest.mark.parametrize("min_sites", [1, None])
def test_all_sites_restart_from_checkpoints(tmp_path, min_sites):
    whole = trains_in_parts(tmp_path / "whole", [-1], False, mode="rankdad", min_sites=min_sites)
    parts = trains_in_parts(tmp_path / "parts", [7, 15, -1], True, mode="rankdad", min_sites=min_sites)
    assert len(parts) == len(whole) == 24
    same_bits(whole, parts)


# Donors


@pytest.mark.parametrize("how", ["donates", "sends", "stops"])
def test_another_site_gives_its_state_if_one_is_lost(tmp_path, how):
    """It is lost when it is asked, or with half of its state sent."""
    with Fleet(tmp_path, sealed_hub(tmp_path), mode="dad", pause=0.1, site_timeout=3.0) as fleet:
        fleet.start("a", how=how)  # of members that have been asked equally often, the first one is asked
        fleet.start("b")
        fleet.lose("c", leave=3)
        fleet.hub.await_line("a has left", ENDED)
        fleet.await_more("c", 2, "b")
        if how == "stops":
            fleet.thaw("a")  # it joins again in its process
        else:
            fleet.end("a", -9)
            fleet.start("a")
        fleet.await_joins("a", 1)
        fleet.await_more("a", 2, "b")
        lines, present = fleet.finish("bac", 8)
    assert [1, 2] in present.values()
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode="dad"))


# Sealed training: a site that another one refuses

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


def test_one_site_cannot_end_another_one_in_a_project_that_is_not_sealed(hub_of_three):
    a, b = two_members(hub_of_three)
    joiner(hub_of_three, [a, b])
    b.control(Exclude(2, "so be it"))
    hub_of_three.await_line("b refuses c, which takes part already: so be it")
    assert {slot for _, slot in hub_of_three.hub.relay.sessions} == {0, 1, 2}
