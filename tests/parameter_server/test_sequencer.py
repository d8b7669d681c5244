"""The sequencer and the dealers of data, by random histories: delays, kills, returns, several phases."""

import tracemalloc
from collections import deque

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_log import keys
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from dadplug.errors import SequenceError
from dadplug.parameter_server.connect import ServerOptions
from dadplug.parameter_server.dealing import Answer, OwnDealer, SharedDealer, draw_order
from dadplug.parameter_server.sequencer import LATE, Decision, Entry, Rules, Sequencer
from dadplug.parameter_server.streams import Deal


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


# The dealers of data, by random histories: every batch once an epoch, whoever is slow, leaves, or stops early


class DealerWorld:
    """Sites that take batches in any order of events, some of which leave, return, or end an epoch early."""

    def __init__(self, count: int, batches: int, reserves: bool) -> None:
        self.dealer, self.batches = SharedDealer(range(count), reserves), batches
        self.here, self.finished = set(range(count)), set()
        self.state = dict.fromkeys(range(count), "before")  # or: beginning, drawing, waiting
        self.passes = dict.fromkeys(range(count), 0)
        self.has: dict[int, list[int]] = {site: [] for site in range(count)}
        self.epoch = dict.fromkeys(range(count), 0)
        self.epochs: list[list[int]] = []  # batches that have been used, by epoch
        self.cut: set[int] = set()  # epochs that all sites have ended early

    def take(self, answers: list[Answer]) -> None:
        for site, deal, number, _ in answers:
            assert site in self.here
            if deal is Deal.EPOCH:
                self.state[site] = "drawing"
                self.epoch[site] = number
                self.epochs += [[] for _ in range(number + 1 - len(self.epochs))]
            elif deal is Deal.BATCH:
                self.state[site] = "drawing"
                self.has[site].append(number)
            elif deal is Deal.OVER:
                assert self.state[site] in ("waiting", "beginning")
                self.state[site] = "before"

    def act(self, site: int, action: int) -> None:
        if site not in self.here:
            if action == 0:
                self.here.add(site)
                self.dealer.join(site)
                self.state[site], self.passes[site] = "before", 0
            return
        if site in self.finished:
            return
        state = self.state[site]
        if state == "before":
            if action == 1:
                self.finish(site)
            else:
                self.begin(site)
        elif state == "drawing" and action < 6:
            self.take(self.dealer.draw(site, False))
        elif state == "drawing" and action < 12:
            if self.has[site]:
                self.use(site)
            else:
                self.state[site] = "waiting"
                self.take(self.dealer.draw(site, True))
        elif action == 12 and len(self.here) > 1:
            self.here.discard(site)
            self.has[site] = []
            self.take(self.dealer.finish(site))
            self.end_phase()
        elif action == 13 and state == "drawing":
            self.finish(site)

    def begin(self, site: int) -> None:
        self.state[site] = "beginning"
        self.passes[site] += 1
        self.has[site] = []
        self.take(self.dealer.begin(site, self.passes[site] - 1, self.batches))

    def use(self, site: int) -> None:
        self.epochs[self.epoch[site]].append(self.has[site].pop(0))
        self.take(self.dealer.use(site, 1))

    def finish(self, site: int) -> None:
        self.finished.add(site)
        self.has[site] = []
        self.take(self.dealer.finish(site))
        self.end_phase()

    def end_phase(self) -> None:
        if self.finished >= self.here:
            self.cut.add(len(self.epochs) - 1)
            self.dealer.end_phase(self.here)
            self.finished.clear()
            self.state = dict.fromkeys(self.state, "before")
            self.passes = dict.fromkeys(self.passes, 0)

    def drain(self) -> None:
        """Let all sites go on to the end of an epoch, and finish."""
        for turn in range(40 * (self.batches + 4)):
            for site in sorted(self.here - self.finished):
                if self.state[site] == "before" and self.passes[site] >= max(self.passes.values()):
                    self.finish(site)
                else:
                    asks = 2 if self.dealer._left and turn % 2 else 11  # in the end, every site waits for an answer
                    self.act(site, 7 if self.has[site] else asks)
            if not self.finished and set(self.state.values()) == {"before"} and not any(self.passes.values()):
                return
        raise AssertionError(f"sites wait for ever: {self.state}")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 13)), max_size=200),
)
@example(2, 2, True, [(0, 0), (0, 0), (0, 6), (0, 6), (1, 0), (1, 0), (1, 6), (0, 0)])
def test_every_batch_is_used_once_an_epoch(count, batches, reserves, history):
    world = DealerWorld(count, batches, reserves)
    for number, action in history:
        world.act(number % count, action)
    world.drain()
    for number, used in enumerate(world.epochs):
        assert len(set(used)) == len(used)
        if number not in world.cut:
            assert sorted(used) == list(range(batches))


def test_a_number_of_batches_from_a_site_takes_no_memory():
    tracemalloc.start()
    try:
        dealer = SharedDealer(range(2))
        for site in (0, 1):
            assert dealer.begin(site, 0, 1 << 20) == [Answer(site, Deal.EPOCH, 0, True)]
        assert [dealer.draw(site, True)[0].number for site in (0, 1, 0)] == [0, 1, 2]
        dealer.finish(0)
        assert [dealer.draw(1, True)[0].number for _ in range(3)] == [0, 2, 3]
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_a_batch_is_kept_for_each_site_that_has_had_none():
    dealer = SharedDealer(range(3), reserves=True)
    assert not dealer.has_for_another
    dealer.begin(0, 0, 4)
    assert dealer.has_for_another
    assert [dealer.draw(0, False)[0].deal for _ in range(3)] == [Deal.BATCH, Deal.BATCH, Deal.NONE]
    assert not dealer.has_for_another
    dealer.use(0, 2)
    assert dealer.draw(0, True) == []
    dealer.begin(1, 0, 4)
    assert dealer.draw(1, False) == [Answer(1, Deal.BATCH, 2)]
    assert dealer.draw(1, False) == [Answer(1, Deal.NONE)]
    assert dealer.finish(2) == [Answer(0, Deal.BATCH, 3, True)]  # it needs none


def test_an_epoch_waits_for_batches_that_a_site_has_and_deals_them_again():
    dealer = SharedDealer(range(3))
    assert dealer.begin(0, 0, 2) == [Answer(0, Deal.EPOCH, 0, True)]
    dealer.begin(1, 0, 2)
    assert dealer.draw(0, False) == [Answer(0, Deal.BATCH, 0)]
    assert dealer.draw(1, False) == [Answer(1, Deal.BATCH, 1)]
    assert dealer.draw(0, False) == [Answer(0, Deal.NONE)]
    assert dealer.use(0, 1) == []
    assert dealer.draw(0, True) == []
    assert dealer.makes_wait(0)
    assert dealer.finish(1) == [Answer(0, Deal.BATCH, 1, True)]
    assert dealer.use(0, 1) == []
    assert dealer.draw(0, True) == [Answer(0, Deal.OVER, 0, True)]
    assert dealer.begin(2, 0, 2) == [Answer(2, Deal.EPOCH, 0, True)]  # late: there is nothing left for it
    assert dealer.draw(2, True) == [Answer(2, Deal.OVER, 0, True)]
    assert dealer.begin(0, 1, 2) == [Answer(0, Deal.EPOCH, 1, True)]
    dealer.order(1, b"a")
    for wrong in (lambda: dealer.begin(2, 1, 3), lambda: dealer.order(1, b"b"), lambda: dealer.use(0, 1)):
        with pytest.raises(ValueError, match=r"batches"):
            wrong()


def test_a_site_that_asks_twice_and_leaves_is_dealt_nothing():
    dealer = SharedDealer(range(3))
    for site in range(3):
        dealer.begin(site, 0, 2)
    assert [answer.deal for site in (0, 1) for answer in dealer.draw(site, False)] == [Deal.BATCH] * 2
    assert dealer.draw(2, True) == dealer.draw(2, True) == dealer.finish(2) == []
    assert dealer.use(0, 1) == dealer.draw(0, True) == []
    assert dealer.finish(1) == [Answer(0, Deal.BATCH, 1, True)]


def test_epochs_of_own_data_end_when_every_site_has_passed_over_its_own():
    dealer = OwnDealer(range(3))
    for site in range(3):
        assert dealer.begin(site, 0, 0) == []
    assert dealer.passed(0, 0) == dealer.passed(1, 0) == dealer.passed(0, 0) == []
    assert dealer.finish(2) == [Answer(0, Deal.OVER, 0), Answer(1, Deal.OVER, 0)]
    dealer.join(2)
    assert dealer.begin(2, 0, 0) == [Answer(2, Deal.OVER, 0)]
    dealer.begin(0, 1, 0)
    assert dealer.passed(0, 1) == dealer.finish(1) == []
    assert dealer.finish(2) == [Answer(0, Deal.OVER, 1)]
    dealer.finish(0)
    dealer.end_phase((0, 1, 2))
    dealer.begin(1, 0, 0)
    assert dealer.passed(1, 0) == []


SPEEDS = st.lists(st.integers(1, 9), min_size=2, max_size=4)


@settings(max_examples=30, deadline=None)
@given(SPEEDS, SPEEDS, st.sampled_from(("scale", "keep")), st.randoms(use_true_random=False))
def test_summed_step_sizes_are_the_shares_of_the_data_whatever_the_speeds(speeds, data, late, random):
    count = min(len(speeds), len(data))
    sequencer = Sequencer(range(count), Rules(3, 1 + count // 3, late), balanced=True)
    for site in range(count):
        sequencer.declare(site, data[site])
    numbers, bases, spent, total = [0] * count, [0] * count, [0.0] * count, 0.0
    for _ in range(50):
        site = random.choices(range(count), speeds[:count])[0]
        recent = sequencer.version - bases[site] < 2 and len(sequencer._sites[site].pending) <= 3
        if site in sequencer.awaited or recent:
            samples = random.randint(1, 5)
            sequencer.contribute(site, numbers[site], bases[site], sequencer.version, samples)
            numbers[site] += 1
            bases[site] = sequencer.version
        while (decision := sequencer.decide()) is not None:
            before, entries = decision.version - 1, decision.entries
            rule = [1 / (1 + before - entry.base) if late == "scale" else 1.0 for entry in entries]
            samples = sum(entry.samples for entry in entries)
            total += sum(entry.samples * each for entry, each in zip(entries, rule, strict=True)) / samples
            for entry in entries:  # its part of the step: the learning rate's factor times its weight in the mean
                spent[entry.site] += entry.samples * entry.scale / samples
            for committed in {entry.site for entry in entries}:
                assert spent[committed] == pytest.approx(total * data[committed] / sum(data[:count]))
    assert sequencer.version > 0


def test_what_a_site_states_of_its_data_and_samples_counts_for_a_bounded_part():
    sequencer = Sequencer([0, 1, 2], Rules(0, 3, "keep"), balanced=True)
    for site, data in enumerate((10, 20, 10**12)):
        sequencer.declare(site, data)
        sequencer.contribute(site, 0, 0, 0, samples=8 if site < 2 else 1 << 40)
    entries = sequencer.decide().entries
    assert [entry.samples for entry in entries] == [8, 8, 64 * 8]
    total = sum(entry.samples for entry in entries)
    shares = [entry.samples * entry.scale / total for entry in entries]
    assert shares == pytest.approx([each / (10 + 20 + 64 * 20) for each in (10, 20, 64 * 20)])


def test_sites_without_declared_data_are_waited_for_or_refused():
    sequencer = Sequencer(range(2), Rules(2, 1, "keep"), balanced=True)
    sequencer.declare(0, 10)
    sequencer.contribute(0, 0, 0, 0, 4)
    assert sequencer.decide() is None
    assert sequencer.awaited == [1]
    with pytest.raises(SequenceError, match=r"loaders of server.loader"):
        sequencer.contribute(1, 0, 0, 0, 4)
    sequencer.declare(1, 30)
    assert [entry.scale for entry in sequencer.decide().entries] == [0.25]


def test_the_order_of_batches_is_that_of_seed_and_epoch():
    own = RandomSampler(range(20), generator=torch.Generator().manual_seed(4))
    for loader in (
        DataLoader(range(20), 3, shuffle=True),
        DataLoader(range(20), batch_sampler=BatchSampler(own, 3, False)),
    ):
        first = draw_order(loader, 0, 1)
        list(loader)
        assert draw_order(loader, 0, 1) == first
        assert sorted(index for batch in first for index in batch) == list(range(20))
        assert draw_order(loader, 0, 2) != first != draw_order(loader, 1, 1)
