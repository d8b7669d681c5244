"""Sites that join in one round, one after the other: each of them knows which others have."""

from __future__ import annotations

from running_hub import TestSite, running_hub, together, until

from dadplug.exchange.requirements import Requirements
from dadplug.hub.actions import Accept, Close, Drop, Join, Position, Round, SendState
from dadplug.hub.frames import Joined, Kind


def test_a_site_is_told_of_those_that_have_joined_before_it_in_the_same_round(tmp_path):
    requirements = Requirements(1, 60_000)
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        a, b, c = together(hub, "abc")
        for site in (a, b, c):
            site.control(requirements)
        for site in (b, c):
            site.leave("it is away")
            assert a.action(Drop).slot == site.slot
        b, c = TestSite(hub.kit("b"), hub.address), TestSite(hub.kit("c"), hub.address)
        a.send(Kind.END, exchange=Round.FIRST)
        assert a.action(Close).contributors == (0,)
        b.control(requirements)
        until(lambda: hub.hub.relay.sessions["training", 1].ready)
        a.send(Kind.END, step=2, exchange=Round.FIRST)
        last = Position(hub.hub.relay.membership.life, 1)
        assert [b.action(Accept).position, b.action(Accept).position] == [None, last]
        assert b.action(Drop).slot == 2  # it has been away for longer
        assert b.action(Join).slot == 1
        c.control(requirements)  # while b has not got its state
        c.action(Accept)
        c.action(Accept)
        assert [c.action(Join).slot, c.action(Join).slot] == [1, 2]
        assert b.action(Join).slot == 2
        assert {a.action(SendState).joiner, a.action(SendState).joiner} == {1, 2}
        for site in (b, c):
            site.control(Joined(last))
            site.send(Kind.END, step=2, exchange=Round.FIRST)
        assert c.action(Close).contributors == (0, 1, 2)
