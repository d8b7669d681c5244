"""Commits that wait for contributions which are expected soon."""

from __future__ import annotations

import socket
import time

import pytest

from dadplug.exchange import Traffic, codec
from dadplug.parameter_server.dealer import OwnDealer
from dadplug.parameter_server.rules import Rules, make_rules
from dadplug.parameter_server.sequencer import Decision, Sequencer
from dadplug.parameter_server.service import SequencerService
from dadplug.parameter_server.streams import Frame, Kind, _Stream


def run(periods: dict[int, float], rules: Rules, until: float, stops: float = 1e9) -> list[tuple[float, Decision]]:
    """Let sites contribute at fixed periods, and return the commits with their times; site 1 is silent after a time.

    A site takes over a commit at once, and its next gradient is computed at the version that it has then.
    """
    sequencer, commits, now = Sequencer(periods, rules), [], 0.0
    base, counts = dict.fromkeys(periods, 0), dict.fromkeys(periods, 0)
    at = {site: period * (1 + 0.3 * site) for site, period in periods.items()}
    while True:
        site = min(at, key=at.__getitem__)
        due = sequencer.due
        now = at[site] if due is None else min(at[site], due)
        if now > until:
            return commits
        sequencer.advance(now)
        if now == at[site]:
            at[site] = 1e9 if site == 1 and now > stops else now + periods[site]
            sequencer.contribute(site, counts[site], base[site], sequencer.version, 4)
            counts[site] += 1
            base[site] = sequencer.version
        while (decision := sequencer.decide()) is not None:
            commits.append((now, decision))


def test_sites_of_equal_speed_commit_together_and_no_gradient_is_more_than_one_version_late():
    commits = [decision for _, decision in run({0: 1.0, 1: 1.1}, Rules(8, 1, "keep", 0.75), 60.0)][5:]
    joint = sum(len(decision.entries) == 2 for decision in commits)
    assert joint >= 0.8 * len(commits)
    assert max(decision.version - 1 - entry.base for decision in commits for entry in decision.entries) <= 2
    alone = run({0: 1.0, 1: 1.1}, Rules(8, 1, "keep"), 60.0)
    assert all(len(decision.entries) == 1 for _, decision in alone)


def test_a_slow_site_delays_commits_of_a_fast_one_by_a_part_of_a_step_and_only_when_it_is_due():
    commits = run({0: 1.0, 1: 4.3}, Rules(8, 1, "keep", 0.75), 100.0)
    delays = [now - (1 + entry.number) for now, decision in commits for entry in decision.entries if entry.site == 0]
    assert max(delays) <= 0.75 + 1e-9
    assert sum(delay > 1e-9 for delay in delays) <= len(delays) / 3
    assert any(len(decision.entries) == 2 for _, decision in commits)


def test_a_site_that_has_become_slow_is_not_waited_for():
    commits = run({0: 1.0, 1: 1.0}, Rules(50, 1, "keep", 0.75), 40.0, stops=20.0)
    late = [now - (1 + entry.number) for now, each in commits for entry in each.entries if entry.site == 0 and now > 24]
    assert late
    assert max(late) == pytest.approx(0.0)


def test_synchronous_steps_and_those_of_some_sites_do_not_wait():
    sequencer = Sequencer(range(2), Rules(0, 1, "drop", 0.75))
    for number in range(4):
        for site in range(2):
            sequencer.advance(number + 0.3 * site)
            sequencer.contribute(site, number, sequencer._sites[site].reached, sequencer.version, 4)
            sequencer.reach(site, sequencer.version)
            assert sequencer.decide() is not None
            assert sequencer.due is None


def test_the_service_makes_a_commit_that_has_waited_long_enough():
    pairs = [socket.socketpair() for _ in range(2)]
    streams = [_Stream(ours, 1 << 16) for ours, _ in pairs]
    sequencer = Sequencer([0, 1], Rules(8, 1, "keep", 1.0))
    sockets = {rank: theirs for rank, (_, theirs) in enumerate(pairs)}
    service = SequencerService(sockets, [0, 1], sequencer, OwnDealer([0, 1]), 1 << 16, 600.0, Traffic(), 0)
    try:
        for number in range(3):
            for rank, stream in enumerate(streams):
                stream.send(Frame(Kind.CONTRIBUTION, rank, number, samples=4, body=b"gradient"))
            time.sleep(0.3)
        streams[0].send(Frame(Kind.CONTRIBUTION, 0, 3, samples=4, body=b"gradient"))  # site 1 sends nothing more
        deadline = time.monotonic() + 60
        committed: set[int] = set()
        while committed != {0, 1, 2, 3}:
            assert time.monotonic() < deadline, committed
            committed |= own_commits(streams[0])
            time.sleep(0.01)
    finally:
        for ours, _ in pairs:
            ours.close()
        service.close()


def own_commits(stream: _Stream) -> set[int]:
    """Return the numbers of the contributions of site 0 in the decisions that have arrived."""
    decisions = [codec.decode(frame.body) for frame in stream.read() if frame.kind is Kind.DECISION]
    return {number for _, entries, _, _ in decisions for site, number, *_ in entries if site == 0}


@pytest.mark.parametrize("gather", [-0.1, 1.5, "1", True, None])
def test_the_part_of_a_step_is_a_number_from_0_to_1(gather):
    with pytest.raises(ValueError, match="gather must be a number from 0 to 1"):
        make_rules(8, 1, "scale", gather)
