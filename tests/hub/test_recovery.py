"""Recovery of a run at a restarted hub, by what sites report that a test plays."""

import time

import pytest
from fleet import ENDED, Fleet, MortalHub, no_step_is_lost
from hub_sites import TIMEOUT, linked_by, together, transports
from msgspec.structs import replace
from running_hub import TestSite, running_hub, until

from dadplug.errors import SiteError
from dadplug.exchange.rounds import Requirements
from dadplug.hub.server import run
from dadplug.hub.site.tunnel import check_tunnel, tunnel_of
from dadplug.hub.torch import HubStore
from dadplug.hub.wire.messages import (
    Close,
    Continue,
    Drop,
    Join,
    Kind,
    Pause,
    Position,
    Repeat,
    RoundKind,
    RunReport,
    read_control,
)
from dadplug.support.structs import MOST_MS

LIFE, STEP = 77, 5  # of the hub before
BEFORE, LAST = Position(LIFE, STEP - 1), Position(LIFE, STEP)


def report(position: Position, before: Position, min_sites: int = 1) -> RunReport:
    """Return the report of a site that has got every frame."""
    everyone, counts = (0, 1, 2), (0, 0, 0)
    required = Requirements(min_sites, 500, False, 200)
    return RunReport(LIFE, position, before, everyone, (), (), counts, counts, False, required)


def returned(hub, name: str, position: Position, before: Position) -> TestSite:
    """Return a site that has dialled the new hub, and reported."""
    site = TestSite(hub.kit(name), hub.address, position=position)
    site.control(report(position, before))
    return site


def test_a_round_whose_only_witness_is_lost_during_its_repetition_is_open_again(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b", "c"), site_timeout=20.0) as hub:
        a = returned(hub, "a", LAST, BEFORE)
        b, c = (returned(hub, name, BEFORE, Position(LIFE, STEP - 2)) for name in "bc")
        for site in (a, b, c):
            assert site.action(Repeat).position == LAST
        a.leave("its program was stopped")
        hub.await_line("a has left")
        for site in (b, c):
            site.send(Kind.END, step=STEP)  # the repetition
        for site in (b, c):
            assert site.action(Continue).position == BEFORE
            assert site.action(Drop).slot == 0
            site.send(Kind.END, step=STEP)
        for site in (b, c):
            close = site.action(Close)
            assert (close.step, close.contributors) == (STEP, (1, 2))


@pytest.mark.parametrize("min_sites", [1, 0])
def test_a_hub_that_is_stopped_while_it_recovers_a_run_ends_only_one_of_all_sites(tmp_path, min_sites):
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        site = TestSite(hub.kit("a"), hub.address, position=LAST)
        site.control(report(LAST, BEFORE, min_sites))
        hub.await_line("paused: the hub has been restarted: waiting for b, c")
        hub.hub.stop("maintenance", may_return=True)
        told = site.action(Pause, Drop)
        until(lambda: site.pump() or site.lost is not None)
        rest = [read_control(frame.body, 3) for frame in site.taken if frame.head.kind is Kind.CONTROL]
    reason = "the hub has ended: maintenance; waiting for it to be started again"
    assert [told, *rest] == ([Pause((), reason)] if min_sites else [Drop(0, 0, "the hub ends: maintenance")])


@pytest.mark.parametrize("min_sites", [1, 0])
def test_a_site_is_awaited_for_as_long_as_the_others_say_after_a_long_outage(tmp_path, min_sites):
    with running_hub(tmp_path / "kits", ("a", "b", "c"), site_timeout=20.0) as hub:
        sites = []
        for name in "ab":
            sites.append(TestSite(hub.kit(name), hub.address, position=LAST))
            sites[-1].control(replace(report(LAST, BEFORE, min_sites), return_ms=4000))
        hub.await_line("waiting for c")
        began = time.monotonic()
        while time.monotonic() < began + 2.0:  # longer than a site may be silent in this run
            for site in sites:
                site.ping()
            time.sleep(0.1)
        c = TestSite(hub.kit("c"), hub.address, position=LAST)
        c.control(replace(report(LAST, BEFORE, min_sites), return_ms=4000))
        for site in (*sites, c):
            assert site.action(Continue).position == LAST


def test_a_site_that_joins_after_a_restart_is_told_who_joins_in_the_same_round(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b", "c"), site_timeout=20.0) as hub:
        needs = Requirements(1, 20_000)
        a, b = (TestSite(hub.kit(name), hub.address, position=LAST) for name in "ab")
        c = TestSite(hub.kit("c"), hub.address)
        for site, listens in ((a, False), (b, True)):
            site.control(replace(report(LAST, BEFORE), listens=listens, required=needs))
        assert a.action(Continue).position == LAST
        c.control(needs)
        a.send(Kind.END, step=STEP + 1, exchange=RoundKind.FIRST)
        assert [c.action(Join) for _ in range(2)] == [Join(1, STEP + 1), Join(2, STEP + 1)]


# A member that reports what is not so: the run goes on after the round that most sites report


def lie(far: int, **fields) -> RunReport:
    """Return a report of site c that is so many rounds ahead of the others."""
    position, before = Position(LIFE, STEP + far), Position(LIFE, STEP + far - 1)
    return replace(report(position, before), **fields)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "lies",
    [
        lie(1000),
        lie(1000, gone=(0, 1)),
        lie(1, contributors=(2,), gone=(0, 1)),
        lie(1, contributors=(0, 1, 2), gone=(0, 1)),
        lie(0, gone=(0, 1)),
        lie(0, position=Position(LIFE + 1, STEP), gone=(0, 1)),
    ],
    ids=["ahead", "alone", "alone by one round", "alone with others", "alone at the same round", "another life"],
)
def test_a_member_that_reports_another_run_takes_over_none(tmp_path, lies, first):
    with running_hub(tmp_path / "kits", ("a", "b", "c"), site_timeout=20.0) as hub:

        def connect(name):
            site = TestSite(hub.kit(name), hub.address, position=lies.position if name == "c" else LAST)
            site.control(replace(lies, required=Requirements(1, 0)) if name == "c" else report(LAST, BEFORE, 2))
            return site

        sites = {}
        for name in "cab" if first else "abc":
            sites[name] = connect(name)
            if name == "c" and first:
                hub.await_line("paused: the hub has been restarted: waiting for a, b")
                time.sleep(0.5)  # longer than it states that others need
        for name in "ab":
            assert sites[name].action(Continue).position == LAST
            assert sites[name].action(Drop) == Drop(2, STEP + 1, "it has not reconnected since the hub was restarted")
            sites[name].send(Kind.END, step=STEP + 1)
        for name in "ab":
            assert sites[name].action(Close) == Close(STEP + 1, (0, 1))
        assert hub.hub.relay.run.rules.min_sites == 2


def test_a_site_is_not_awaited_for_as_long_as_a_member_states(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ALL_BACK_SECONDS", 3.0)
    with running_hub(tmp_path / "kits", ("a", "b", "c", "d"), site_timeout=20.0) as hub:
        counts = {"contributors": (0, 1, 2, 3), "received": (0,) * 4, "arrived": (0,) * 4}
        sites = [TestSite(hub.kit(name), hub.address, position=LAST) for name in "abc"]
        for site in sites[:2]:
            site.control(replace(report(LAST, BEFORE), **counts))
        forever = Requirements(1, MOST_MS)
        sites[2].control(replace(report(LAST, BEFORE), **counts, return_ms=MOST_MS, required=forever))
        for site in sites:
            assert site.action(Continue).position == LAST


def test_few_sites_go_on_after_the_time_in_which_all_can_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "ALL_BACK_SECONDS", 2.0)
    with running_hub(tmp_path / "kits", ("a", "b", "c"), site_timeout=20.0) as hub:
        begin = time.monotonic()
        site = TestSite(hub.kit("c"), hub.address, position=LAST)
        site.control(lie(0, gone=(0, 1)))
        assert site.action(Continue).position == LAST
        assert time.monotonic() > begin + 1.5


# Training that goes on over a hub that is killed and started again: the same bits as with one hub


@pytest.mark.parametrize(
    ("mode", "names", "min_sites", "points"),
    [
        ("rankdad", "abc", 3, [("frame", 61), ("close", 5), ("frame", 1)]),
        ("dad", "ab", 1, [("close", 4), ("frame", 22)]),
        ("dsgd", "abc", None, [("frame", 40), ("close", 2), ("frame", 7)]),
    ],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_hub_that_is_killed_anywhere_costs_no_step(tmp_path, mode, names, min_sites, points, sealed):
    hub = MortalHub(tmp_path / "run", names, points[0], sealed)
    with Fleet(tmp_path / "run", hub, mode=mode, min_sites=min_sites, keeps=1 if min_sites else 0) as fleet:
        fleet.start(names)
        for point in (*points[1:], ()):
            assert hub.process.wait(ENDED) == -9, fleet.state()
            hub.start(*point)
        fleet.stop(5, max(names, key=lambda name: max(fleet.lines(name), default=0)))
        fleet.end(names)
    no_step_is_lost(fleet, tmp_path / "reference", names, mode=mode)


# Connections beside that of training over a hub that is killed and started again: they end with an error


RESTARTED = "has been restarted"


def test_the_store_and_the_messages_of_parameters_end_and_training_goes_on(tmp_path):
    with MortalHub(tmp_path, "ab") as hub, linked_by(hub.kits, "ab") as links:
        sites = transports(links)
        stores = [HubStore(link.kit, TIMEOUT) for link in links]
        stores[0].set("key", b"value")
        assert stores[1].get("key") == b"value"
        streams = together(lambda rank: sites[rank].open_streams(TIMEOUT)[1 - rank])
        pass_on(*streams)
        tunnels = [tunnel_of(link, TIMEOUT) for link in links]
        hub.restart()
        assert together(lambda rank: sites[rank].gather_objects(rank)) == [[0, 1]] * 2
        for store in stores:
            with pytest.raises(SiteError, match=RESTARTED):
                store.get("key")
        for link, tunnel in zip(links, tunnels, strict=True):
            until(lambda tunnel=tunnel: tunnel.closed)
            with pytest.raises(SiteError, match=RESTARTED):
                check_tunnel(link)
        assert [receive(stream) for stream in streams] == [b"", b""]  # their ends
        pass_on(*together(lambda rank: sites[rank].open_streams(TIMEOUT)[1 - rank]))  # over the new hub
        others = [HubStore(link.kit, TIMEOUT) for link in links]
        others[0].set("key", b"new")
        assert others[1].get("key") == b"new"
        for store in others:
            store.close()
        assert together(lambda rank: sites[rank].gather_objects(-rank)) == [[0, -1]] * 2


def receive(stream) -> bytes:
    stream.setblocking(True)
    stream.settimeout(TIMEOUT)
    return stream.recv(100)


def pass_on(first, second) -> None:
    """Send bytes from one end of a stream to the other."""
    first.send(b"a row")
    assert receive(second) == b"a row"
