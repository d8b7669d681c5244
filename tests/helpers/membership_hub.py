"""Hubs without a network for tests of membership, and shorthands for their events."""

from __future__ import annotations

from dadplug.hub.server.membership import Membership
from dadplug.hub.wire.messages import FRESH, Close, Rules, SendState

LIFE = 7


def hub(count=3, closed=None, start=True, **rules):
    """A hub of the sites a, b, …, all of which have dialled in unless `start` is false."""
    membership = Membership("abcdef"[:count], Rules(**({"min_sites": 1} | rules)), LIFE, 0.0, closed)
    for slot in range(count) if start else ():
        dial(membership, slot)
    return membership


def dial(membership, slot, position=FRESH, now=0.0, instance=None):
    return membership.dial("abcdef"[slot], slot if instance is None else instance, position, now)


def close_steps(membership, count, now=0.0, seconds=0.0, slots=None):
    """Close some steps; every participant ends them."""
    for _ in range(count):
        now += seconds
        for slot in membership.participants if slots is None else slots:
            actions = membership.end(slot, membership.open_step, now)
        assert kinds(actions, Close)
    return now


def kinds(actions, *types):
    return [action for action in actions if isinstance(action, types)]


def joining(**rules):
    """A hub of three sites at step 2, of which c waits for a's state."""
    membership = hub(3, **rules)
    membership.close(2, "killed", 0.0)
    close_steps(membership, 1)
    dial(membership, 2, FRESH, instance=50)
    membership.end(0, 2, 0.0)
    assert kinds(membership.end(1, 2, 0.0), SendState) == [SendState(0, 2, 2)]
    return membership


def pinging(membership, until, slots):
    """Let time pass, while some sites send pings; return the actions."""
    actions = []
    while (now := min(until, membership.deadline() or until)) < until:
        for slot in slots:
            membership.heard(slot, now)
        actions += membership.tick(now)
    return actions
