"""Each rule of the hub's membership, on short histories written by hand."""

from __future__ import annotations

import pytest
from membership_hub import LIFE, close_steps, dial, hub, joining, kinds, pinging

from dadplug.hub.server.membership import Membership, Phase
from dadplug.hub.wire.messages import (
    FRESH,
    Accept,
    Close,
    Drop,
    Join,
    Pause,
    Position,
    Redo,
    Refuse,
    Replay,
    Resume,
    RoundKind,
    Rules,
    SendState,
    Skip,
    Start,
)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"min_sites": 0}, "at least one site"),
        ({"min_sites": 1, "late": "never"}, "choose 'wait' or 'skip'"),
        ({"min_sites": 1, "patience": 1.0}, "patience=1.0"),
        ({"min_sites": 1, "site_timeout": 0.0}, "site_timeout=0.0"),
        ({"min_sites": 1, "start_timeout": -1.0}, "start_timeout=-1.0"),
    ],
)
def test_rules_out_of_range_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        Rules(**rules)


def test_rules_have_to_fit_the_roster():
    with pytest.raises(ValueError, match="min_sites=3, but the roster has 2 sites"):
        Membership(["a", "b"], Rules(3), LIFE, 0.0)
    with pytest.raises(ValueError, match="used twice"):
        Membership(["a", "a"], Rules(1), LIFE, 0.0)


# The start.


def test_training_starts_once_all_sites_are_here():
    membership = hub(2, start=False)
    first = dial(membership, 1)
    assert first == [Accept(1, None, False, 1), Pause((0,), "waiting for a")]
    second = dial(membership, 0)
    assert kinds(second, Start) == [Start(Position(LIFE, 0), (0, 1))]
    assert kinds(second, Join) == [Join(0, 1, 1), Join(1, 1, 1)]
    assert kinds(second, Resume) == [Resume(1)]
    assert not kinds(second, SendState)
    assert membership.participants == [0, 1]


def test_training_starts_without_a_missing_site_after_the_start_timeout():
    membership = hub(3, start=False, min_sites=2, start_timeout=8.0)
    dial(membership, 0, now=1.0)
    assert not membership.started
    dial(membership, 1, now=2.0)
    assert membership.deadline() == 8.0
    assert not kinds(membership.tick(7.9), Start)
    assert kinds(membership.tick(8.0), Start) == [Start(Position(LIFE, 0), (0, 1))]


def test_the_highest_closed_step_wins_where_the_hub_has_no_log():
    membership = hub(3, start=False)
    dial(membership, 0, Position(5, 9))
    dial(membership, 1, Position(5, 10))
    actions = dial(membership, 2, FRESH)
    assert kinds(actions, Start) == [Start(Position(LIFE, 10), (1,))]
    assert kinds(actions, SendState) == [SendState(1, 0, 10), SendState(1, 2, 10)]


def test_equal_steps_of_different_lives_are_different_steps():
    membership = hub(3, start=False)
    dial(membership, 0, Position(5, 9))
    dial(membership, 1, Position(6, 9))
    actions = dial(membership, 2, Position(5, 9))
    assert kinds(actions, Start)[0].holders == (0, 2)
    assert kinds(actions, SendState) == [SendState(0, 1, 9)]


def test_with_a_log_a_site_behind_waits_for_one_that_holds_the_last_step():
    membership = hub(2, closed=Position(LIFE, 10), start=False)
    actions = dial(membership, 0, Position(LIFE, 9))
    assert kinds(actions, Pause) == [Pause((1,), "no connected site holds step 10: waiting for b")]
    assert not kinds(actions, Start)
    actions = dial(membership, 1, Position(LIFE, 10))
    assert kinds(actions, SendState) == [SendState(1, 0, 10)]
    assert kinds(actions, Resume) == [Resume(11)]


def test_if_no_site_of_the_roster_holds_the_last_step_an_older_one_begins_a_new_life():
    membership = hub(2)
    close_steps(membership, 3)
    membership.close(0, "killed", 0.0)
    membership.close(1, "killed", 0.0)
    assert not kinds(dial(membership, 0, FRESH, instance=10), Start)
    actions = dial(membership, 1, Position(1, 2), instance=11)
    assert kinds(actions, Start) == [Start(Position(LIFE + 1, 2), (1,))]
    assert kinds(actions, SendState) == [SendState(1, 0, 2)]


# Dialling in.


def test_a_site_that_is_not_in_the_roster_is_refused():
    assert hub(2).dial("z", 0, FRESH, 0.0) == [Refuse("z", "site 'z' is not in the hub's roster", False)]


def test_a_name_is_refused_while_another_process_uses_it():
    membership = hub(2)
    (refusal,) = dial(membership, 1, instance=99)
    assert isinstance(refusal, Refuse)
    assert refusal.retry
    assert "another process is connected as site 'b'" in refusal.reason
    assert membership.participants == [0, 1]


def test_a_process_may_dial_again_before_its_old_connection_is_found_closed():
    membership = hub(2)
    close_steps(membership, 1)
    actions = dial(membership, 1, Position(LIFE, 1))
    assert actions[0] == Drop(1, 2, "its process has dialled again")
    assert kinds(actions, Accept) == [Accept(1, Position(LIFE, 1), False, 2)]
    assert membership.phase(1) is Phase.WAITING


def test_a_claim_of_a_step_that_the_hub_has_not_closed_is_refused():
    membership = hub(2)
    membership.close(1, "gone", 0.0)
    (refusal,) = dial(membership, 1, Position(LIFE, 5))
    assert "claims to have closed step 5, the hub is at step 0" in refusal.reason


# Steps.


def test_a_step_closes_once_all_have_ended_it():
    membership = hub(3)
    assert membership.end(2, 1, 0.0) == []
    assert membership.end(0, 1, 0.0) == []
    assert membership.end(1, 1, 0.0) == [Close(1, (0, 1, 2), 0)]
    assert membership.open_step == 2


@pytest.mark.parametrize("step", [0, 1, 3])
def test_an_end_of_a_wrong_step_drops_the_site(step):
    membership = hub(2)
    close_steps(membership, 1)
    assert kinds(membership.end(0, step, 0.0), Drop) == [
        Drop(0, 2, f"it has ended step {step}, which it does not take part in")
    ]


def test_frames_count_for_the_open_step_of_a_member_only():
    membership = hub(2)
    close_steps(membership, 1)
    assert [membership.accepts(0, step) for step in (1, 2, 3)] == [False, True, False]
    membership.close(1, "gone", 0.0)
    dial(membership, 1, FRESH)
    assert not membership.accepts(1, 2)


def test_survivors_close_the_step_of_a_lost_site_and_its_sums_are_redone():
    membership = hub(3)
    membership.end(0, 1, 0.0)
    membership.end(1, 1, 0.0)
    assert membership.close(2, "connection reset", 0.0) == [
        Drop(2, 1, "connection reset"),
        Redo(1, 1, (0, 1)),
        Close(1, (0, 1), 1),
    ]


def test_a_lost_site_does_not_contribute_even_if_it_has_ended_the_step():
    membership = hub(3)
    membership.end(2, 1, 0.0)
    membership.close(2, "gone", 0.0)
    membership.end(0, 1, 0.0)
    assert kinds(membership.end(1, 1, 0.0), Close) == [Close(1, (0, 1), 1)]


def test_attempts_are_counted_anew_in_each_step():
    membership = hub(3)
    membership.close(2, "gone", 0.0)
    close_steps(membership, 1)
    membership.end(0, 2, 0.0)
    assert membership.end(1, 2, 0.0) == [Close(2, (0, 1), 0)]


# Returning and joining.


def test_a_short_outage_is_replayed_and_the_site_takes_part_from_the_next_boundary():
    membership = hub(3)
    close_steps(membership, 2)
    membership.close(2, "gone", 0.0)
    close_steps(membership, 2)
    assert dial(membership, 2, Position(LIFE, 2)) == [Accept(2, Position(LIFE, 4), False, 2), Replay(2, 3)]
    assert membership.participants == [0, 1]
    membership.end(0, 5, 0.0)
    assert membership.end(1, 5, 0.0) == [Close(5, (0, 1), 0), Join(2, 6, 2)]
    assert membership.participants == [0, 1, 2]


@pytest.mark.parametrize("why", ["kept", "forgotten"])
def test_after_a_long_outage_a_member_sends_its_state_at_the_boundary(why):
    membership = hub(3, kept_steps=4 if why == "kept" else 100)
    membership.close(2, "gone", 0.0)
    close_steps(membership, 5)
    if why == "forgotten":
        membership.forget(1)
    assert dial(membership, 2, Position(LIFE, 0)) == [Accept(2, Position(LIFE, 5), True, 2)]
    membership.end(0, 6, 0.0)
    assert membership.end(1, 6, 0.0) == [
        Close(6, (0, 1), 0),
        Join(2, 7, 2),
        Replay(2, 7),
        SendState(0, 2, 6),
    ]
    assert membership.phase(2) is Phase.JOINING


def test_a_restarted_process_gets_the_state_even_if_all_frames_are_kept():
    membership = hub(2)
    close_steps(membership, 2)
    membership.close(1, "killed", 0.0)
    assert dial(membership, 1, FRESH, instance=50)[0] == Accept(1, Position(LIFE, 2), True, 2)


def test_the_step_waits_for_a_joiner_to_have_its_state_and_to_end():
    membership = joining()
    membership.end(0, 3, 0.0)
    assert membership.end(1, 3, 0.0) == []
    assert membership.joined(2, Position(LIFE, 2), 0.0) == []
    assert membership.end(2, 3, 0.0) == [Close(3, (0, 1, 2), 0)]


def test_another_member_sends_the_state_if_its_sender_is_lost():
    membership = joining()
    assert kinds(membership.close(0, "gone", 0.0), SendState) == [SendState(1, 2, 2)]


def test_a_joiner_that_is_lost_holds_nobody_up():
    membership = joining()
    membership.end(0, 3, 0.0)
    membership.end(1, 3, 0.0)
    assert kinds(membership.close(2, "gone", 0.0), Close) == [Close(3, (0, 1), 1)]


def test_if_all_holders_are_lost_the_joiners_wait_for_one():
    membership = joining()
    membership.close(0, "gone", 0.0)
    assert kinds(membership.close(1, "gone", 0.0), Pause) == [
        Pause((0, 1), "no connected site holds step 2: waiting for a, b")
    ]
    actions = dial(membership, 1, Position(LIFE, 2))
    assert kinds(actions, SendState) == [SendState(1, 2, 2)]
    assert kinds(actions, Resume) == [Resume(3)]


def test_a_state_of_another_history_drops_the_joiner():
    membership = joining()
    (drop,) = kinds(membership.joined(2, Position(LIFE - 1, 2), 0.0), Drop)
    assert drop.slot == 2


# Too few sites.


def test_below_min_sites_training_pauses_until_a_site_returns_into_the_open_step():
    membership = hub(2, min_sites=2)
    close_steps(membership, 3)
    membership.end(0, 4, 0.0)
    actions = membership.close(1, "gone", 0.0)
    assert kinds(actions, Pause) == [Pause((1,), "2 sites are needed and 1 is connected: waiting for b")]
    assert not kinds(actions, Close)
    actions = dial(membership, 1, Position(LIFE, 3), now=1.0)
    assert kinds(actions, Join, Redo, Resume) == [Join(1, 4, 2), Redo(4, 2, (0, 1)), Resume(4)]
    assert kinds(membership.end(1, 4, 1.0), Close) == [Close(4, (0, 1), 2)]


def test_nobody_waits_once_the_last_site_has_left():
    membership = hub(2, min_sites=1)
    assert not kinds(membership.close(0, "", 0.0) + membership.close(1, "", 0.0), Pause)


def test_a_pause_lasts_as_long_as_sites_are_missing():
    membership = hub(3, min_sites=3)
    membership.close(1, "gone", 0.0)
    (pause,) = kinds(membership.close(2, "gone", 0.0), Pause)
    assert pause.waiting_for == (1, 2)
    actions = dial(membership, 1, Position(LIFE, 0))
    assert kinds(actions, Pause)[0].waiting_for == (2,)
    assert not kinds(actions, Resume)
    assert kinds(dial(membership, 2, Position(LIFE, 0)), Resume)


def test_a_waiting_site_can_be_admitted_to_the_open_step():
    membership = hub(3, min_sites=1)
    close_steps(membership, 2)
    membership.close(2, "gone", 0.0)
    membership.end(0, 3, 0.0)
    membership.dial("c", 77, FRESH, 0.0)
    actions = membership.admit(0.0)
    assert kinds(actions, Join) == [Join(2, 3, 2)]
    assert kinds(actions, SendState) == [SendState(0, 2, 2)]
    assert kinds(membership.end(1, 3, 0.0), Close) == []  # the joiner is waited for
    membership.joined(2, Position(membership.life, 2), 0.0)
    assert kinds(membership.end(2, 3, 0.0), Close) == [Close(3, (0, 1, 2), 1)]


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


def test_rules_can_be_replaced_by_those_that_fit():
    membership = hub(2, min_sites=2)
    close_steps(membership, 1)
    membership.replace_rules(Rules(min_sites=1))
    membership.end(0, 2, 0.0)
    assert kinds(membership.close(1, "gone", 0.0), Close)
    with pytest.raises(ValueError, match="min_sites=3, but the roster has 2 sites"):
        membership.replace_rules(Rules(min_sites=3))


# The hub's membership as time passes: silent, hanging and late sites


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
