"""The sequencer, by random histories: delays, reordering between sites, kills, returns, several phases."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_log import keys

from dadplug.errors import SequenceError
from dadplug.parameter_server.options import ServerOptions
from dadplug.parameter_server.sequencer import LATE, Decision, Entry, Rules, Sequencer


class SimulatedSite:
    """A site that follows the protocol of `ParameterServer.step`, with messages that take any time."""

    def __init__(self, rank: int, staleness: int) -> None:
        self.rank, self.staleness = rank, staleness
        self.version = self.base = self.count = self.outstanding = self.first = 0
        self.up: deque[tuple] = deque()
        self.down: deque[Decision] = deque()
        self.log: list[Decision] = []
        self.alive, self.waiting, self.finished = True, False, False

    def step(self) -> None:
        if self.alive and not self.waiting and not self.finished:
            self.up.append(("contribute", self.count, self.base, self.version, 1 + self.count % 3))
            self.count += 1
            self.outstanding += 1
            self.base = self.version
            self.waiting = self.outstanding > self.staleness

    def finish(self) -> None:
        if self.alive and not self.waiting and not self.finished:
            self.up.append(("finish",))
            self.finished = True

    def receive(self) -> None:
        if not self.down or not self.alive:
            return
        decision = self.down.popleft()
        self.log.append(decision)
        self.outstanding -= sum(site == self.rank and number >= self.first for site, number in decision.keys)
        self.version = decision.version
        if decision.over:
            assert self.finished
            self.finished, self.base = False, self.version
        if self.waiting and self.outstanding <= self.staleness:
            self.waiting, self.base = False, self.version
            if self.staleness:
                self.up.append(("reach", self.version))


class World:
    """Sites, a sequencer, and the log."""

    def __init__(self, count: int, rules: Rules) -> None:
        self.rules = rules
        self.sequencer = Sequencer(range(count), rules)
        self.sites = [SimulatedSite(rank, rules.staleness) for rank in range(count)]
        self.log: list[Decision] = []
        self.arrived: list[tuple[int, int]] = []
        self.now = 0.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.sequencer.advance(self.now)

    def deliver(self, site: SimulatedSite) -> None:
        if site.up and site.alive:
            kind, *values = site.up.popleft()
            if kind == "contribute":
                self.arrived.append((site.rank, values[0]))
            getattr(self.sequencer, kind)(site.rank, *values)
            self.decide()

    def wait_until_due(self) -> None:
        """Let the time pass for which a commit waits for contributions that are expected."""
        if self.sequencer.due is not None:
            assert self.sequencer.due > self.now
            self.pass_time(self.sequencer.due - self.now)
            self.decide()
            assert self.sequencer.due is None or self.sequencer.due > self.now

    def decide(self) -> None:
        while (decision := self.sequencer.decide()) is not None:
            self.check(decision)
            self.log.append(decision)
            for site in self.sites:
                site.down.append(decision)

    def check(self, decision: Decision) -> None:
        rules, before = self.rules, self.log[-1].version if self.log else 0
        assert decision.version == before + bool(decision.entries)
        for entry in decision.entries:
            age = before - entry.base
            assert 0 <= age <= rules.staleness
            assert entry.scale == (1 / (1 + age) if rules.late == "scale" else 1.0)
        assert rules.late == "drop" or not decision.dropped
        if decision.entries:
            working = {site.rank for site in self.sites if site.alive and not self.sequencer._sites[site.rank].finished}
            contributing = {entry.site for entry in decision.entries}
            assert len(contributing) >= min(rules.quorum, len(working | contributing))
            if not rules.staleness and rules.late != "drop":
                assert working <= contributing
        assert list(decision.entries) == sorted(decision.entries)

    def kill(self, site: SimulatedSite) -> None:
        if site.alive and sum(each.alive for each in self.sites) > 1:
            site.alive = False
            self.sequencer.leave(site.rank)
            self.decide()

    def bring_back(self, site: SimulatedSite) -> None:
        """Let a process take the place of one that was killed, with the log so far."""
        if not site.alive:
            site.__init__(site.rank, site.staleness)  # type: ignore[misc]
            site.first = site.count = self.sequencer.join(site.rank)
            site.version = site.base = self.sequencer.version
            site.log = list(self.log)
            self.decide()

    @property
    def idle(self) -> bool:
        """Whether a phase is over, and all sites know it."""
        busy = any(site.up or site.down or site.outstanding or site.finished for site in self.sites if site.alive)
        return bool(self.log) and self.log[-1].over and not busy

    def drain(self) -> None:
        """Let all sites finish, and deliver everything."""
        for _ in range(500):
            for site in self.sites:
                while site.down and site.alive:
                    site.receive()
            if self.idle:
                return
            for site in self.sites:
                site.finish()
                self.deliver(site)
            self.wait_until_due()
        raise AssertionError(f"sites wait for ever: the sequencer waits for {self.sequencer.awaited}")


RULES = st.builds(Rules, st.integers(0, 4), st.integers(1, 4), st.sampled_from(LATE), st.sampled_from((0.0, 0.5, 1.0)))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), RULES, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 15)), max_size=150))
def test_every_contribution_is_committed_exactly_once(count, rules, history):
    world = World(count, rules)
    for number, action in history:
        site = world.sites[number % count]
        world.pass_time(number / 3)
        if action == 13:
            world.wait_until_due()
        elif action < 5:
            site.step()
        elif action < 10:
            world.deliver(site)
        elif action < 13:
            site.receive()
        elif action == 14:
            site.finish()
        elif number == 3:
            (world.kill if site.alive else world.bring_back)(site)
    world.drain()
    assert sorted(key for decision in world.log for key in decision.keys) == sorted(world.arrived)
    for site in world.sites:
        own = [number for rank, number in keys(world.log) if rank == site.rank]
        assert own == sorted(own)
        if site.alive:  # nothing of it is lost, it has the whole log, and no phase is open
            assert sum(rank == site.rank for rank, _ in world.arrived) == site.count
            assert site.log == world.log
            assert world.log[-1].over


def test_a_site_that_returns_has_its_share_of_the_steps_again():
    sequencer = Sequencer(range(2), Rules(8, 1, "keep"), balanced=True)
    counts, sizes = [0, 0], [0.0, 0.0]

    def contribute(site: int) -> None:
        sequencer.contribute(site, counts[site], sequencer._sites[site].reached, sequencer.version, 4)
        counts[site] += 1
        for entry in sequencer.decide().entries:
            sizes[entry.site] += entry.scale
        sequencer.reach(0, sequencer.version)

    for site, data in ((0, 30), (1, 10)):
        sequencer.declare(site, data)
    contribute(0)
    contribute(1)
    sequencer.leave(1)
    for _ in range(5):
        contribute(0)
    assert sequencer.join(1) == counts[1] == 1
    before = list(sizes)
    for _ in range(4):  # three times as much data, at a fifth of the speed of the other site
        for _ in range(5):
            contribute(0)
        contribute(1)
        sequencer.reach(1, sequencer.version)
    contribute(0)
    assert sizes[0] - before[0] == pytest.approx(25 * 0.75)
    assert sizes[1] - before[1] == pytest.approx(24 * 0.25)


def test_contributions_that_wait_together_are_committed_together():
    sequencer = Sequencer(range(3), Rules(1, 2, "keep"))
    sequencer.contribute(0, 0, 0, 0, 4)
    assert sequencer.decide() is None
    assert sequencer.awaited == [1, 2]
    sequencer.contribute(2, 0, 0, 0, 6)
    assert sequencer.decide() == Decision(1, (Entry(0, 0, 0, 4, 1.0), Entry(2, 0, 0, 6, 1.0)))
    sequencer.contribute(0, 1, 0, 1, 4)
    sequencer.contribute(2, 1, 0, 1, 6)
    assert sequencer.decide() is None  # site 1 computes at version 0, and would be two versions behind
    assert sequencer.awaited == [1]
    sequencer.contribute(1, 0, 0, 1, 5)
    assert [entry.site for entry in sequencer.decide().entries] == [0, 1, 2]


def test_synchronous_steps_with_a_quorum_drop_the_slow():
    sequencer = Sequencer(range(2), Rules(0, 1, "drop"))
    sequencer.contribute(0, 0, 0, 0, 4)
    assert sequencer.decide().version == 1
    sequencer.contribute(1, 0, 0, 0, 4)
    assert sequencer.decide() == Decision(1, (), ((1, 0),))


@pytest.mark.parametrize(
    "message",
    [
        ("contribute", 1, 0, 0, 4),  # the first has number 0
        ("contribute", 0, 1, 1, 4),  # there is no version 1
        ("contribute", 0, 0, 1, 4),
        ("contribute", 0, 0, 0, 0),
        ("reach", 1),
    ],
)
def test_contradictions_are_refused_and_change_nothing(message):
    sequencer = Sequencer(range(2), Rules(2, 1, "scale"))
    with pytest.raises(SequenceError):
        getattr(sequencer, message[0])(0, *message[1:])
    sequencer.contribute(0, 0, 0, 0, 4)
    assert sequencer.decide().entries == (Entry(0, 0, 0, 4, 1.0),)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("staleness", (-1, 1.0, "8", True, None), "staleness must be a whole number of at least 0"),
        ("quorum", (0, -1, 1.5, False), "quorum must be a whole number of at least 1"),
        ("gather", (-0.1, 1.5, "1", True, None), "gather must be a number from 0 to 1"),
        ("late", ("wait",), "valid ones are 'scale', 'drop', 'keep'"),
        ("deal", ("mine",), "valid ones are 'own', 'shared'"),
        ("mode", ("edad", "powersgd", "topk", "auto", "none"), "valid modes of a parameter server are 'dsgd', 'dad'"),
    ],
)
def test_options_are_checked(name, values, message):
    for value in values:
        with pytest.raises(ValueError, match=message) as caught:
            ServerOptions(**{name: value})
        assert name != "mode" or value in str(caught.value)


# Commits that wait for contributions which are expected soon


def run_at_periods(
    periods: dict[int, float], rules: Rules, until: float, stops: float = 1e9
) -> list[tuple[float, Decision]]:
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
    commits = [decision for _, decision in run_at_periods({0: 1.0, 1: 1.1}, Rules(8, 1, "keep", 0.75), 60.0)][5:]
    joint = sum(len(decision.entries) == 2 for decision in commits)
    assert joint >= 0.8 * len(commits)
    assert max(decision.version - 1 - entry.base for decision in commits for entry in decision.entries) <= 2
    alone = run_at_periods({0: 1.0, 1: 1.1}, Rules(8, 1, "keep"), 60.0)
    assert all(len(decision.entries) == 1 for _, decision in alone)


def test_a_slow_site_delays_commits_of_a_fast_one_by_a_part_of_a_step_and_only_when_it_is_due():
    commits = run_at_periods({0: 1.0, 1: 4.3}, Rules(8, 1, "keep", 0.75), 100.0)
    delays = [now - (1 + entry.number) for now, decision in commits for entry in decision.entries if entry.site == 0]
    assert max(delays) <= 0.75 + 1e-9
    assert sum(delay > 1e-9 for delay in delays) <= len(delays) / 3
    assert any(len(decision.entries) == 2 for _, decision in commits)


def test_a_site_that_has_become_slow_is_not_waited_for():
    commits = run_at_periods({0: 1.0, 1: 1.0}, Rules(50, 1, "keep", 0.75), 40.0, stops=20.0)
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
