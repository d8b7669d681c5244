"""Hubs without a network for tests of membership, and shorthands for their events."""

from __future__ import annotations

from dadplug.hub.server.membership import Membership
from dadplug.hub.wire.messages import Close, Rules, SendState

LIFE = 7


def hub(count=3, start=True, **rules):
    """A hub of the sites a, b, …, all of which have connected unless `start` is false."""
    membership = Membership("abcdef"[:count], Rules(**({"min_sites": 1} | rules)), LIFE, 0.0)
    for slot in range(count) if start else ():
        membership.dial(slot, 0.0)
    return membership


def close_steps(membership, count, now=0.0, seconds=0.0):
    """Close some steps; every participant ends them."""
    for _ in range(count):
        now += seconds
        for slot in membership.participants:
            actions = membership.end(slot, membership.open_step, now)
        assert kinds(actions, Close)
    return now


def kinds(actions, *types):
    return [action for action in actions if isinstance(action, types)]


def joining(**rules):
    """A hub of three sites at step 2, of which c waits for a's state."""
    membership = hub(3, **rules)
    membership.close(2, "killed", 0.0)
    close_steps(membership, 2)
    assert kinds(membership.dial(2, 0.0), SendState) == [SendState(0, 2, 2)]
    return membership


def passing(membership, until):
    """Let time pass, in half seconds; return the actions."""
    return [action for half in range(int(2 * until)) for action in membership.tick(half / 2)]
