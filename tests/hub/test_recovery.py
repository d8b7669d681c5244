"""Recovery of a run at a restarted hub, by what sites report that a test plays."""

from __future__ import annotations

from running_hub import TestSite, running_hub

from dadplug.hub.wire.frames import Kind
from dadplug.hub.wire.messages import Close, Continue, Drop, Position, Repeat, Report

LIFE, STEP = 77, 5  # of the hub before
BEFORE, LAST = Position(LIFE, STEP - 1), Position(LIFE, STEP)


def report(position: Position, before: Position, min_sites: int = 1) -> Report:
    """Return the report of a site that has got every frame."""
    everyone, counts = (0, 1, 2), (0, 0, 0)
    return Report(LIFE, position, before, everyone, (), (), counts, counts, False, min_sites, 500, False, 200)


def returned(hub, name: str, position: Position, before: Position) -> TestSite:
    """Return a site that has dialled the new hub, and reported."""
    site = TestSite(hub.kit(name), hub.address, position=position)
    site.control(report(position, before))
    return site


def test_a_round_whose_only_witness_is_lost_during_its_repetition_is_open_again(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b", "c"), {"site_timeout": 20.0}) as hub:
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
