"""The dealers of data, by random histories: every batch once an epoch, whoever is slow, leaves, or stops early."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from dadplug.errors import SequenceError
from dadplug.parameter_server.dealing import Answer, OwnDealer, SharedDealer, draw_order
from dadplug.parameter_server.sequencer import Rules, Sequencer
from dadplug.parameter_server.streams import Deal


class World:
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
    world = World(count, batches, reserves)
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
        if site in sequencer.awaited or sequencer.version - bases[site] < 2:
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
