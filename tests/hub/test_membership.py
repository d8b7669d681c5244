"""Each rule of the hub's membership, on short histories written by hand."""

import pytest

from dadplug.hub.server.membership import Membership, Phase
from dadplug.hub.wire.messages import (
    Accept,
    Close,
    Drop,
    Join,
    Pause,
    Position,
    Resume,
    RoundKind,
    Rules,
    SendState,
    Skip,
    Start,
    StartTerms,
)

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


def ends(membership, step, now, *slots):
    """Let some sites end a step; return what follows the last one."""
    return [membership.end(slot, step, now) for slot in slots][-1]


def kinds(actions, *types):
    return [action for action in actions if isinstance(action, types)]


def joining(**rules):
    """A hub of three sites at step 2, of which c waits for a's state."""
    membership = hub(3, **rules)
    membership.close(2, "killed", 0.0)
    close_steps(membership, 2)
    assert kinds(membership.dial(2, 0.0), SendState) == [SendState(0, 2, 2, 1)]
    return membership


def passing(membership, until):
    """Let time pass, in half seconds; return the actions."""
    return [action for half in range(int(2 * until)) for action in membership.tick(half / 2)]


# Each rule of the hub's membership, on short histories written by hand


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"min_sites": 0}, "at least one site"),
        ({"min_sites": 1, "late": "never"}, "choose 'wait' or 'skip'"),
        ({"min_sites": 1, "patience": 1.0}, "patience=1.0"),
        ({"min_sites": 1, "site_timeout": 0.0}, "site_timeout=0.0"),
    ],
)
def test_rules_out_of_range_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        Rules(**rules)


def test_rules_have_to_fit_the_roster():
    with pytest.raises(ValueError, match="min_sites=3, but the roster has 2 sites"):
        Membership(["a", "b"], Rules(3), LIFE, 0.0)


# The start.


def starting(sites, after_ms, count=5):
    membership = hub(count, start=False)
    membership.start = StartTerms(sites, after_ms)
    return membership


def test_training_starts_without_sites_that_do_not_come_in_time():
    membership = starting(3, 60_000)
    membership.dial(1, 0.0)
    reason = "waiting for a, c, d; 3 sites are enough to start"
    assert kinds(membership.dial(4, 10.0), Pause) == [Pause((0, 2, 3), reason)]
    reason = "waiting for a, d; training starts without them 60 s after 3 sites were connected"
    assert kinds(membership.dial(2, 20.0), Pause) == [Pause((0, 3), reason)]
    assert not membership.tick(79.9)
    assert membership.tick(80.0) == [
        Start(Position(LIFE, 0), (0, 3)),
        *(Join(slot, 1) for slot in (1, 2, 4)),
        Resume(1),
    ]
    assert close_steps(membership, 2, 80.0) == 80.0
    assert kinds(membership.dial(0, 90.0), Accept, SendState) == [
        Accept(0, Position(LIFE, 2), True),
        SendState(1, 0, 2, 1),
    ]


def test_the_time_begins_anew_where_too_few_sites_are_left():
    membership = starting(2, 5000, count=3)
    membership.dial(0, 0.0)
    membership.dial(1, 0.0)
    membership.close(0, "killed", 4.0)
    membership.dial(0, 4.5)
    assert not membership.tick(9.0)
    assert kinds(membership.tick(9.5), Start) == [Start(Position(LIFE, 0), (2,))]


def test_a_run_of_another_hub_goes_on_with_the_sites_that_hold_its_last_step():
    membership = hub(3, start=False, min_sites=2)
    assert membership.go_on(5, [0, 2], 0.0) == []
    assert (membership.position, membership.participants) == (Position(LIFE, 5), [0, 2])
    assert ends(membership, 6, 0.0, 2, 0) == [Close(6, (0, 2))]
    paused = hub(3, start=False, min_sites=2).go_on(5, [1], 0.0)
    assert paused == [Pause((0, 2), "2 sites are needed and 1 is connected: waiting for a, c")]


# Steps.


@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_end_of_a_wrong_step_drops_the_site(step):
    membership = hub(2)
    close_steps(membership, 1)
    assert kinds(membership.end(0, step, 0.0), Drop) == [
        Drop(0, 2, f"it has ended step {step}, which it does not take part in")
    ]


# Returning and joining.


def test_another_member_sends_the_state_if_its_sender_is_lost():
    membership = joining()
    assert kinds(membership.close(0, "gone", 0.0), SendState) == [SendState(1, 2, 2, 2)]


def test_if_all_holders_are_lost_the_joiners_wait_for_one():
    membership = joining()
    membership.close(0, "gone", 0.0)
    assert kinds(membership.close(1, "gone", 0.0), Pause) == [
        Pause((0, 1), "no connected site holds step 2: waiting for a, b")
    ]


def test_a_state_of_another_history_drops_the_joiner():
    membership = joining()
    (drop,) = kinds(membership.joined(2, Position(LIFE - 1, 2), 0.0), Drop)
    assert drop.slot == 2


# Too few sites.


def test_what_has_begun_is_ended_by_fewer_sites_than_are_needed_to_begin():
    membership = hub(2, min_sites=2)
    close_steps(membership, 1)
    membership.round = RoundKind.FURTHER
    membership.end(0, 2, 0.0)
    actions = membership.close(1, "gone", 0.0)
    assert [each.contributors for each in kinds(actions, Close)] == [(0,)]
    assert membership.round is RoundKind.FIRST
    membership.end(0, 3, 0.0)
    assert membership.open_step == 3


def test_a_pause_says_that_a_site_receives_a_large_state():
    membership = joining(progress_timeout=60.0)
    ends(membership, 3, 0.0, 0, 1)
    assert kinds(membership.tick(1.0), Close)
    for slot in (0, 1):
        membership.round = RoundKind.COLLECTIVE
        membership.end(slot, 4, 1.0)
    membership.sites[2].progressed = 4.5
    assert not kinds(membership.tick(4.5), Pause)  # seconds
    assert kinds(membership.tick(5.0), Pause) == [Pause((), "c joins, and receives the state of the training")]
    membership.sites[2].progressed = 50.0  # parts of the state have arrived
    assert membership.tick(54.5) == []
    assert kinds(membership.joined(2, Position(LIFE, 2), 54.5), Resume)
    assert kinds(membership.end(2, 3, 55.0), Close) == []
    assert kinds(membership.end(2, 4, 55.0), Close) == [Close(4, (0, 1, 2))]


def test_others_go_on_while_a_state_is_under_way_until_the_site_has_nearly_caught_up():
    membership = joining()
    assert ends(membership, 3, 3.0, 0, 1) == []
    assert membership.tick(3.9) == []  # a small state may arrive in this time
    assert membership.tick(4.0) == [Skip(2, 3, False), Close(3, (0, 1))]
    for step in range(4, 11):
        assert kinds(ends(membership, step, 7.0, 0, 1), Skip, Close) == [Skip(2, step, False), Close(step, (0, 1))]
    assert membership.sites[2].lags(membership.step)
    assert membership.joined(2, Position(LIFE, 2), 8.0) == []
    assert membership.sites[2].behind(membership.step)
    assert kinds(ends(membership, 11, 8.0, 0, 1), Close) == [Close(11, (0, 1))]
    for step in range(3, 10):
        membership.end(2, step, 9.0)
    assert ends(membership, 12, 9.0, 0, 1) == []  # it is behind by two rounds
    membership.end(2, 10, 9.0)
    membership.end(2, 11, 9.0)
    assert kinds(membership.end(2, 12, 9.0), Close) == [Close(12, (0, 1, 2))]
    assert ends(membership, 13, 9.0, 0, 1) == []  # as for every other member


def test_others_wait_for_a_site_that_does_not_catch_up():
    membership = joining()
    ends(membership, 3, 0.0, 0, 1)
    membership.tick(1.0)
    for step in range(4, 8):
        ends(membership, step, 1.0, 0, 1)
    membership.joined(2, Position(LIFE, 2), 2.0)  # 5 rounds behind
    last = 7 + 5 + 2
    for step in range(8, last + 1):
        assert kinds(ends(membership, step, 3.0, 0, 1), Close)
    assert ends(membership, last + 1, 3.0, 0, 1) == []
    for step in range(3, last + 1):
        membership.end(2, step, 4.0)
    assert kinds(membership.end(2, last + 1, 4.0), Close) == [Close(last + 1, (0, 1, 2))]


def test_a_site_for_which_too_much_waits_is_waited_for():
    membership = joining()
    ends(membership, 3, 0.0, 0, 1)
    membership.tick(1.0)
    assert not membership.sites[0].hold()
    assert membership.sites[2].hold()
    assert ends(membership, 4, 1.0, 0, 1) == []
    assert not kinds(passing(membership, 6.5), Close)
    membership.joined(2, Position(LIFE, 2), 7.0)
    membership.end(2, 3, 7.0)
    assert kinds(membership.end(2, 4, 7.0), Close) == [Close(4, (0, 1, 2))]


def test_a_site_cannot_hold_a_state_of_before_it_joined_or_of_a_later_step():
    for step in (1, 3):
        membership = joining()
        assert kinds(membership.joined(2, Position(LIFE, step), 0.0), Drop)


# The hub's membership as time passes: hanging and late sites


def test_a_site_that_is_alive_but_does_not_get_on_is_dropped_once_others_wait():
    membership = hub(2, progress_timeout=60.0)
    assert passing(membership, 300.0) == []  # nobody waits
    membership.end(0, 1, 300.0)
    actions = passing(membership, 360.5)
    assert kinds(actions, Drop) == [Drop(1, 1, "alive, but has not ended step 1 for 60 s")]
    assert kinds(actions, Close) == [Close(1, (0,))]


def test_progress_extends_the_time_of_a_slow_site():
    membership = hub(2, progress_timeout=60.0)
    membership.end(0, 1, 0.0)
    membership.sites[1].progressed = 50.0
    assert passing(membership, 109.5) == []
    assert kinds(membership.tick(110.0), Drop)


def test_a_joiner_without_a_state_is_dropped_after_the_progress_timeout_of_its_sender():
    membership = joining(progress_timeout=60.0)
    membership.sites[0].progressed = 40.0  # parts of the state
    assert not kinds(passing(membership, 99.5), Drop)
    assert kinds(membership.tick(100.0), Drop) == [Drop(2, 3, "alive, but has not received its state for 60 s")]


def late(**rules):
    """A hub that skips late members, after 10 steps of one second; a and b have ended step 11 at second 11."""
    membership = hub(3, late="skip", patience=3.0, **rules)
    now = close_steps(membership, 10, seconds=1.0)
    return membership, ends(membership, 11, now + 1.0, 0, 1)


def test_skip_closes_the_step_without_a_late_member_which_stays():
    membership, actions = late()
    assert actions == []
    assert membership.tick(12.9) == []  # it has three medians after the last step
    assert membership.tick(13.0) == [Skip(2, 11), Close(11, (0, 1))]
    assert membership.sites[2].behind(membership.step)
    assert membership.end(2, 11, 13.5) == []  # too late, and no fault
    assert membership.participants == [0, 1, 2]
    now = close_steps(membership, 1, now=14.0)
    assert membership.step == 12
    assert now == 14.0


def test_without_patience_a_member_is_late_after_the_site_timeout():
    membership = hub(2, late="skip", patience=0.0, site_timeout=5.0)
    assert membership.end(0, 1, 20.0) == []
    assert membership.tick(24.9) == []
    actions = membership.tick(25.0)
    assert kinds(actions, Close) == [Close(1, (0,))]
    assert membership.end(0, 2, 26.0) != []  # not awaited until it has ended a step
    membership.end(1, 1, 27.0)
    membership.end(1, 2, 27.0)
    assert membership.end(0, 3, 28.0) == []
    assert kinds(membership.end(1, 3, 30.0), Close) == [Close(3, (0, 1))]


def test_a_joiner_is_late_from_its_state_on():
    membership, _ = late()
    membership.close(2, "killed", 11.0)
    membership.dial(2, 11.0)
    ends(membership, 12, 11.0, 0, 1)
    assert membership.sites[2].phase is Phase.JOINING
    assert membership.tick(11.9) == []
    membership.joined(2, Position(LIFE, 11), 11.9)
    assert membership.tick(14.8) == []  # its time begins with its state
    assert kinds(membership.tick(14.9), Skip) == [Skip(2, 12)]


def test_nobody_is_late_where_all_are():
    membership = hub(3, late="skip", patience=3.0)
    now = close_steps(membership, 10, seconds=1.0)
    assert membership.end(0, 11, now + 60.0) == []  # an evaluation, say
    assert membership.end(1, 11, now + 61.0) == []
    assert membership.tick(now + 61.9) == []
    assert kinds(membership.end(2, 11, now + 61.9), Close) == [Close(11, (0, 1, 2))]


@pytest.mark.parametrize("needed", [2, 3])
def test_a_further_round_can_be_missed_while_enough_sites_have_ended_it(needed):
    membership = hub(3, min_sites=needed, late="skip", patience=3.0, progress_timeout=100.0)
    now = close_steps(membership, 10, seconds=1.0)
    for slot in (0, 1):
        membership.round = RoundKind.FURTHER
        membership.end(slot, 11, now + 0.5)
    assert kinds(membership.tick(now + 2.9), Skip, Close) == []
    expected = [Skip(2, 11), Close(11, (0, 1))] if needed == 2 else []
    assert kinds(membership.tick(now + 3.1), Skip, Close) == expected


def test_a_step_without_data_waits_for_the_late_site_that_has_some():
    membership = hub(3, late="skip")
    now = close_steps(membership, 10, seconds=1.0)
    membership.end(0, 11, now + 1.0, idle=True)
    membership.end(1, 11, now + 1.0, idle=True)
    assert kinds(passing(membership, now + 60.0), Skip, Close) == []
    assert kinds(membership.end(2, 11, now + 60.0), Close)


def test_a_donor_that_is_held_up_is_replaced_by_a_site_that_can_answer():
    membership = joining(site_timeout=8.0, progress_timeout=100.0)
    assert kinds(passing(membership, 20.0), SendState) == []  # none has ended the open step
    membership.end(1, 3, 20.0)
    assert kinds(membership.tick(20.5), SendState) == [SendState(1, 2, 2, 2)]
    membership.end(0, 3, 21.0)
    assert kinds(membership.tick(28.0), Close, SendState) == [Close(3, (0, 1))]  # it has twice the time
    membership.sites[2].receive(28.0)  # a part of the state
    assert kinds(membership.tick(35.5), SendState) == []
    actions = membership.tick(36.5)
    assert kinds(actions, SendState) == [SendState(0, 2, 3, 3)]
    assert [each.number for each in kinds(actions, SendState)] == [3]
    assert kinds(membership.joined(2, membership.position, 37.0), Drop) == []
    assert kinds(passing(membership, 60.0), SendState) == []


def test_no_other_donor_is_asked_while_a_site_loads_its_state():
    membership = joining(site_timeout=8.0, progress_timeout=100.0)
    ends(membership, 3, 0.0, 0, 1)
    membership.sites[2].receive(3.0, complete=True)
    assert kinds(passing(membership, 60.0), SendState) == []
    assert kinds(membership.close(0, "killed", 60.0), SendState) == [SendState(1, 2, 3, 2)]
    assert kinds(membership.tick(65.0), SendState) == []  # no other member is there


def test_a_site_that_is_behind_gives_no_state():
    membership, _ = late()
    membership.tick(13.0)
    for slot in (0, 1):
        membership.close(slot, "killed", 13.5)
    assert kinds(membership.dial(0, 14.0), SendState) == []
    assert kinds(membership.end(2, 11, 15.0), SendState) == [SendState(2, 0, 11, 1)]


def test_a_member_that_is_ever_further_behind_is_dropped():
    membership, _ = late(max_lag=2)
    membership.tick(13.0)
    actions = ends(membership, 12, 14.0, 0, 1)
    assert kinds(actions, Close) == [Close(12, (0, 1))]
    assert kinds(actions, Drop) == [Drop(2, 13, "late: it is 2 steps behind")]
