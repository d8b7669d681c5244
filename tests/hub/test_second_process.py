"""A second process of a site, whose first one may be dead without the hub knowing."""

from __future__ import annotations

from types import SimpleNamespace

from dadplug.exchange.requirements import Requirements
from dadplug.hub.actions import FRESH, Refuse, Rules
from dadplug.hub.frames import VERSION, Hello, Welcome
from dadplug.hub.journal import Journal
from dadplug.hub.relay import Relay


def relay_of(*names: str) -> Relay:
    """Return a relay whose sites have dialled in, with numbers from 1 as their processes."""
    relay = Relay(names, Rules(min_sites=len(names), site_timeout=4.0), 1, 0.0, Journal(lambda line: None))
    for number, name in enumerate(names, 1):
        session, answer = relay.greet(name, Hello(VERSION, number, FRESH, "training", release="1.0"), 0, 0.0)
        assert isinstance(answer, Welcome)
        session.stream = SimpleNamespace(notes=[])
    return relay


def test_it_waits_until_the_first_one_is_silent_for_long_enough():
    relay, second = relay_of("a", "b"), Hello(VERSION, 9, FRESH, "training")
    session, answer = relay.greet("a", second, 0, 1.0)
    reason = "another process is connected as site 'a'; if it is dead, this one takes its place in 3.0 s"
    assert (session, answer) == (None, Refuse("a", reason, True))
    relay.sessions["training", 0].heard = 1.2  # what it had sent before
    relay.membership.heard(0, 1.2)
    relay.tick(3.0)
    assert relay.greet("a", second, 0, 3.0)[1].retry
    relay.tick(5.3)
    assert isinstance(relay.greet("a", second, 0, 5.3)[1], Welcome)


def test_it_is_refused_once_the_first_one_has_shown_that_it_is_alive():
    relay, second = relay_of("a", "b"), Hello(VERSION, 9, FRESH, "training")
    assert relay.greet("a", second, 0, 1.0)[1].retry
    relay.sessions["training", 0].heard = 1.9
    assert relay.greet("a", second, 0, 2.0)[1] == Refuse("a", "another process is connected as site 'a'", False)


def test_a_site_of_another_version_cannot_join():
    relay = relay_of("a", "b")
    relay.run.require(Requirements(1, 4000), relay.membership)
    relay.drop(relay.sessions["training", 0], "it was killed", 1.0)
    answer = relay.greet("a", Hello(VERSION, 9, FRESH, "training", release="1.1"), 0, 2.0)[1]
    reason = "this site has dadplug 1.1, and b, which trains already, 1.0: all sites need the same version"
    assert answer == Refuse("a", reason, False)
    assert isinstance(relay.greet("a", Hello(VERSION, 9, FRESH, "training", release="1.0"), 0, 2.0)[1], Welcome)


def test_a_lost_connection_is_awaited_for_longer_while_one_is_in_its_handshake():
    relay = relay_of("a", "b")
    relay.run.require(Requirements(1, 4000), relay.membership)
    relay.sessions["training", 1].detach("cut", 1.0)
    relay.tick(1.19)
    relay.tick(1.3, dials=True)
    assert ("training", 1) in relay.sessions
    relay.tick(1.41, dials=True)
    assert ("training", 1) not in relay.sessions
    relay.sessions["training", 0].detach("cut", 2.0)
    relay.tick(2.21)
    assert ("training", 0) not in relay.sessions
