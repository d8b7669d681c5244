"""The hub's membership as time passes: silent, hanging and late sites."""

from __future__ import annotations

from membership_hub import LIFE, close_steps, dial, hub, joining, kinds, pinging

from dadplug.hub.server.membership import Phase
from dadplug.hub.wire.messages import FRESH, Close, Drop, Position, Redo, RoundKind, SendState, Skip


def test_a_silent_site_is_dropped_after_the_site_timeout():
    membership = hub(2, site_timeout=10.0)
    membership.heard(0, 4.0)
    assert membership.deadline() == 10.0
    assert membership.tick(9.9) == []
    assert kinds(membership.tick(10.0), Drop) == [Drop(1, 1, "silent for 10 s")]
    assert membership.deadline() == 14.0


def test_a_site_that_is_alive_but_does_not_get_on_is_dropped_once_others_wait():
    membership = hub(2, progress_timeout=60.0)
    assert pinging(membership, 300.0, [0, 1]) == []  # nobody waits
    membership.end(0, 1, 300.0)
    actions = pinging(membership, 360.5, [0, 1])
    assert kinds(actions, Drop) == [Drop(1, 1, "alive, but has not ended step 1 for 60 s")]
    assert kinds(actions, Close) == [Close(1, (0,), 1)]


def test_progress_extends_the_time_of_a_slow_site():
    membership = hub(2, progress_timeout=60.0)
    membership.end(0, 1, 0.0)
    pinging(membership, 50.0, [0, 1])
    membership.heard(1, 50.0, progress=True)
    assert pinging(membership, 109.0, [0, 1]) == []


def test_a_joiner_without_a_state_is_dropped_after_the_progress_timeout_of_its_sender():
    membership = joining(progress_timeout=60.0)
    pinging(membership, 40.0, [0, 1, 2])
    membership.heard(0, 40.0, progress=True)  # parts of the state
    assert pinging(membership, 99.0, [0, 1, 2]) == []
    drops = kinds(pinging(membership, 101.0, [0, 1, 2]), Drop)
    assert drops == [Drop(2, 3, "alive, but has not received its state for 60 s")]


def test_wait_waits_for_a_late_member():
    membership = hub(2, late="wait")
    now = close_steps(membership, 10, seconds=1.0)
    membership.end(0, 11, now)
    assert pinging(membership, now + 100.0, [0, 1]) == []


def late(**rules):
    """A hub that skips late members, after 10 steps of one second; a and b have ended step 11 at second 11."""
    membership = hub(3, late="skip", patience=3.0, **rules)
    now = close_steps(membership, 10, seconds=1.0)
    membership.end(0, 11, now + 1.0)
    return membership, membership.end(1, 11, now + 1.0)


def test_skip_closes_the_step_without_a_late_member_which_stays():
    membership, actions = late()
    assert actions == []
    assert membership.deadline() == 13.0  # three medians after the last step
    assert membership.tick(12.9) == []
    assert membership.tick(13.0) == [Skip(2, 11), Redo(11, 1, (0, 1)), Close(11, (0, 1), 1)]
    assert membership.behind(2)
    assert membership.end(2, 11, 13.5) == []  # too late, and no fault
    assert membership.participants == [0, 1, 2]
    now = close_steps(membership, 1, now=14.0)
    assert membership.step == 12
    assert now == 14.0


def test_skip_keeps_min_sites():
    membership, _ = late(min_sites=3)
    assert kinds(pinging(membership, 40.0, [0, 1, 2]), Close, Skip) == []


def test_skip_does_not_skip_before_the_median_is_known():
    membership = hub(2, late="skip")
    now = close_steps(membership, 4, seconds=1.0)
    membership.end(0, 5, now)
    assert kinds(pinging(membership, now + 100.0, [0, 1]), Skip) == []


def test_a_joiner_is_not_skipped():
    membership = joining(late="skip")
    membership.joined(2, Position(LIFE, 2), 0.0)
    now = close_steps(membership, 10, seconds=1.0)
    membership.close(2, "killed", now)
    now = close_steps(membership, 1, now=now, seconds=1.0)
    dial(membership, 2, FRESH, now=now, instance=60)
    now = close_steps(membership, 1, now=now, seconds=1.0)
    assert membership.phase(2) is Phase.JOINING
    membership.end(0, membership.open_step, now)
    membership.end(1, membership.open_step, now)
    assert kinds(pinging(membership, now + 100.0, [0, 1, 2]), Skip) == []
    membership.joined(2, Position(LIFE, membership.step), now + 100.0)
    assert membership.deadline() == now + 103.0  # its time begins with its state


def test_a_site_that_has_missed_a_step_is_waited_for_once_it_gets_on():
    membership, _ = late()
    membership.tick(13.0)
    membership.end(0, 12, 14.0)
    assert kinds(membership.end(1, 12, 14.0), Skip, Close) == [Skip(2, 12), Close(12, (0, 1), 1)]  # at once
    membership.end(2, 11, 14.5)
    membership.end(0, 13, 15.0)
    assert membership.end(1, 13, 15.0) == []
    assert membership.deadline() == 17.0
    membership.end(2, 12, 15.5)
    assert kinds(membership.end(2, 13, 16.0), Close) == [Close(13, (0, 1, 2), 0)]


def test_nobody_is_late_where_all_are():
    membership = hub(3, late="skip", patience=3.0, site_timeout=100.0)
    now = close_steps(membership, 10, seconds=1.0)
    assert membership.end(0, 11, now + 60.0) == []  # an evaluation, say
    assert membership.deadline() == now + 62.0
    assert membership.end(1, 11, now + 61.0) == []
    assert kinds(membership.end(2, 11, now + 61.5), Close) == [Close(11, (0, 1, 2), 0)]


def test_only_the_first_round_of_a_step_can_be_missed():
    for kind in (RoundKind.COLLECTIVE, RoundKind.FURTHER):
        membership = hub(3, late="skip", progress_timeout=100.0)
        now = close_steps(membership, 10, seconds=1.0)
        for slot in (0, 1):
            membership.round = kind
            membership.end(slot, 11, now + 1.0)
        assert kinds(pinging(membership, now + 60.0, [0, 1, 2]), Skip, Close) == []
        assert kinds(membership.end(2, 11, now + 60.0), Close) == [Close(11, (0, 1, 2), 0)]


def test_a_further_round_goes_on_without_a_site_that_has_missed_the_first_one():
    membership, _ = late()
    membership.tick(13.0)
    for slot in (0, 1):
        membership.round = RoundKind.FURTHER
        actions = membership.end(slot, 12, 13.1)
    assert kinds(actions, Skip, Close) == [Skip(2, 12), Close(12, (0, 1), 1)]
    for slot in (0, 1):
        membership.round = RoundKind.COLLECTIVE
        actions = membership.end(slot, 13, 13.2)
    assert kinds(pinging(membership, 60.0, [0, 1, 2]), Close) == []
    for step in (11, 12, 13):
        actions = membership.end(2, step, 60.0)
    assert kinds(actions, Close) == [Close(13, (0, 1, 2), 0)]


def test_a_step_without_data_waits_for_the_late_site_that_has_some():
    membership = hub(3, late="skip")
    now = close_steps(membership, 10, seconds=1.0)
    membership.end(0, 11, now + 1.0, idle=True)
    membership.end(1, 11, now + 1.0, idle=True)
    assert kinds(pinging(membership, now + 60.0, [0, 1, 2]), Skip, Close) == []
    assert kinds(membership.end(2, 11, now + 60.0), Close)


def test_a_site_that_is_behind_gives_no_state():
    membership, _ = late()
    membership.tick(13.0)
    for slot in (0, 1):
        membership.close(slot, "killed", 13.5)
    assert kinds(dial(membership, 0, FRESH, now=14.0, instance=60), SendState) == []
    assert kinds(membership.admit(14.0), SendState) == []
    assert kinds(membership.end(2, 11, 15.0), SendState) == [SendState(2, 0, 11)]


def test_a_member_that_is_ever_further_behind_is_dropped():
    membership, _ = late(max_lag=2)
    membership.tick(13.0)
    membership.end(0, 12, 14.0)
    actions = membership.end(1, 12, 14.0)
    assert kinds(actions, Close) == [Close(12, (0, 1), 1)]
    assert kinds(actions, Drop) == [Drop(2, 13, "late: it is 2 steps behind")]
