"""The model of goodput, its fit to measured steps, and the choice of the batch by it."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import refuses

from dadplug.adaptive.goodput import (
    BatchLimits,
    BatchSplit,
    ExchangeCosts,
    Measurement,
    Period,
    SiteCosts,
    StepModel,
    best_split,
    choose,
    combined,
    divide,
    efficiency,
    fit,
    goodput,
    initial_split,
    measured_limits,
)

costs = st.floats(0.0, 1.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(costs, costs, st.integers(1, 9), st.integers(9, 40)), min_size=1, max_size=5), st.data())
def test_a_batch_is_divided_so_that_the_slowest_ends_first(drawn, data):
    offsets, per_row, low, high = zip(*drawn, strict=True)
    bounds = list(zip(low, high, strict=True))
    batch = data.draw(st.integers(sum(low), sum(high)))
    sizes = divide(batch, offsets, per_row, bounds)
    assert sum(sizes) == batch
    assert all(least <= size <= most for size, (least, most) in zip(sizes, bounds, strict=True))

    def end(sizes):
        return max(offset + cost * size for offset, cost, size in zip(offsets, per_row, sizes, strict=True))

    slowest = max(range(len(sizes)), key=lambda site: offsets[site] + per_row[site] * sizes[site])
    for site in range(len(sizes)):  # no move of a sample from the slowest makes the end earlier
        moved = [size + (each == site) - (each == slowest) for each, size in enumerate(sizes)]
        if site != slowest and sizes[slowest] > low[slowest] and sizes[site] < high[site]:
            assert end(moved) >= end(sizes) * (1 - 1e-6) - 1e-9


def test_a_site_four_times_faster_gets_four_times_the_samples():
    assert divide(100, [0.0, 0.0], [1.0, 0.25], [(1, 1000)] * 2) == [20, 80]
    assert divide(100, [0.0, 0.0], [1.0, 0.25], [(30, 1000)] * 2) == [30, 70]
    assert divide(100, [10.0, 0.0], [1.0, 1.0], [(1, 1000)] * 2) == [45, 55]
    assert divide(9, [0.0] * 3, [0.0] * 3, [(1, 9)] * 3) != []


TRUE = StepModel(
    (SiteCosts(0.010, 1e-4, 2e-5, 1000.0, 100.0), SiteCosts(0.012, 4e-4, 2e-5, 1000.0, 100.0)),
    ExchangeCosts(0.004, 1e-6, 1.5),
)


def measured(
    split: BatchSplit,
    model: StepModel = TRUE,
    noise: float = 0.0,
    slower: Callable[[int, int], float] = lambda site, rows: 1.0,
    seed: int = 0,
) -> Period:
    """Return what sites measure whose steps take the time of a model.

    Args:
        split: samples of each site.
        model: the model.
        noise: standard deviation of the logarithms of the times.
        slower: for a site and its samples, its time of computing as a multiple of that of the model.
        seed: seed of the noise.
    """
    drawn = random.Random(f"{split} {seed}")
    compute = [
        site.compute(rows, split) * slower(rank, rows) * math.exp(drawn.gauss(0.0, noise))
        for rank, (site, rows) in enumerate(zip(model.sites, split.sizes, strict=True))
    ]
    sent = [site.sent(rows) for site, rows in zip(model.sites, split.sizes, strict=True)]
    last = max(compute) / split.micro_batches
    seconds = max(compute) - last + combined(last, model.link.exchange(max(sent)), model.link.overlap)
    return Period(split, tuple(Measurement(seconds, *each, 16) for each in zip(compute, sent, strict=True)))


SPLITS = [
    BatchSplit((16, 16)),
    BatchSplit((32, 32)),
    BatchSplit((96, 32)),
    BatchSplit((200, 56)),
    BatchSplit((60, 40), 2),
]
PAYLOADS = [(1000.0, 100.0)] * 2


def test_the_fit_predicts_batches_that_were_not_measured():
    model = fit([measured(split) for split in SPLITS], PAYLOADS)
    for split in (BatchSplit((64, 64)), BatchSplit((400, 100)), BatchSplit((500, 20)), BatchSplit((100, 100), 4)):
        assert model.seconds(split) == pytest.approx(TRUE.seconds(split), rel=0.05)


def test_a_fit_to_one_batch_reproduces_it_and_divides_by_speed():
    one = measured(BatchSplit((16, 16)))
    model = fit([one], PAYLOADS)
    assert model.seconds(one.split) == pytest.approx(one.sites[0].seconds, rel=1e-3)
    fast, slow = (each.compute for each in one.sites)
    assert best_split(100, 1, model, limits()).sizes[0] == pytest.approx(100 * slow / (fast + slow), abs=1)


def test_a_larger_batch_is_tried_before_its_time_is_known():
    one = measured(BatchSplit((16, 16)))
    model = fit([one], PAYLOADS)
    assert choose(model, one.split, [32], limits(), 20.0)[0].batch == 64
    assert choose(model, one.split, [32], limits(), 1.0)[0].batch == 32
    assert choose(model, one.split, [32, 64], limits(), 20.0)[0].batch == 32


def test_a_site_alone_is_fitted():
    alone = StepModel((SiteCosts(0.01, 1e-3),), ExchangeCosts(0.0, 0.0))
    model = fit([measured(BatchSplit((rows,)), alone) for rows in (8, 16)], [(0.0, 0.0)])
    assert model.seconds(BatchSplit((100,))) == pytest.approx(0.11, rel=0.01)


FIXED = (2e-3, 20e-3)


@pytest.mark.parametrize("fixed", FIXED)
@pytest.mark.parametrize("global_rows", [0.0, 1e-4])
def test_the_fit_recovers_shares_from_few_noisy_measurements(fixed, global_rows):
    """The first splits of a training: equal ones, whose samples and totals are collinear, then by speed."""
    sites = tuple(SiteCosts(fixed * slow, 4e-4 * slow, global_rows * slow) for slow in (1.0, 4.0))
    model = StepModel(sites, ExchangeCosts(2e-3, 0.0))
    splits = [BatchSplit((128, 128)), BatchSplit((409, 103)), BatchSplit((430, 82))]
    wanted = best_split(512, 1, model, limits()).sizes[1] / 512
    shares = []
    for seed in range(12):
        periods = [measured(each, model, 0.03, seed=seed) for each in splits]
        found = fit(periods, [(0.0, 0.0)] * 2)
        shares.append(best_split(512, 1, found, limits()).sizes[1] / 512)
    assert sum(shares) / len(shares) == pytest.approx(wanted, abs=0.02)
    assert all(share == pytest.approx(wanted, abs=0.05) for share in shares)


def test_costs_of_a_site_with_one_batch_follow_the_proportions_of_the_others():
    model = StepModel((SiteCosts(0.02, 1e-3), SiteCosts(0.04, 2e-3)), ExchangeCosts(0.0, 0.0))
    found = fit([measured(BatchSplit(sizes), model) for sizes in ((16, 16), (48, 16))], [(0.0, 0.0)] * 2)
    assert found.sites[1].fixed == pytest.approx(0.04, rel=0.1)
    assert found.sites[1].per_row == pytest.approx(2e-3, rel=0.1)


def test_no_share_becomes_small_without_measurements_near_to_it():
    periods = [measured(BatchSplit(sizes)) for sizes in ((64, 64), (96, 32))]
    within = measured_limits(fit(periods, PAYLOADS), limits())
    assert within.bounds == ((32, 384), (16, 256))
    assert measured_limits(TRUE, limits()) == limits()
    wrong = StepModel((SiteCosts(0.0, 1e-6), SiteCosts(0.0, 1e-2)), ExchangeCosts(0.0, 0.0))
    found = fit([measured(BatchSplit((64, 64)), wrong)], [(0.0, 0.0)] * 2)
    assert choose(found, BatchSplit((64, 64)), [128, 64], limits(), 5000.0)[0].sizes[1] == 32


def test_efficiency_is_that_of_pollux():
    assert efficiency(32, 100.0, 32) == 1.0
    assert efficiency(132, 100.0, 32) == pytest.approx(132 / 232)
    assert efficiency(1000, math.inf, 32) == 1.0


def limits(**changes) -> BatchLimits:
    return BatchLimits(**{"base_batch": 32, "max_batch": 1024, "bounds": ((1, 1024), (1, 1024))} | changes)


def train(
    model: StepModel,
    noise_scale: float,
    within: BatchLimits,
    decisions: int = 12,
    noise: float = 0.0,
    slower: Callable[[int, int, int], float] = lambda decision, site, rows: 1.0,
) -> list[BatchSplit]:
    """Return the splits of a training whose steps take the time of a model, from decision to decision.

    Args:
        model: the model.
        noise_scale: gradient noise scale.
        within: the limits.
        decisions: number of decisions.
        noise: standard deviation of the logarithms of measured times.
        slower: for a decision, a site and its samples, its time of computing as a multiple of that of the model.
    """
    present = initial_split(within)
    periods: dict[BatchSplit, Period] = {}
    taken = [present]
    for number in range(decisions):
        periods.pop(present, None)  # the present one is the last one
        periods[present] = measured(present, model, noise, lambda *each, number=number: slower(number, *each), number)
        found = fit(list(periods.values()), [(site.payload, site.payload_per_row) for site in model.sites])
        present, _ = choose(found, present, [each.batch for each in periods], within, noise_scale)
        taken.append(present)
    return taken


UNEQUAL = StepModel((SiteCosts(8e-3, 4e-4), SiteCosts(16e-3, 8e-4)), ExchangeCosts(3e-3, 0.0))


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_splits_that_measurements_refute_are_given_up(noise):
    """A site has three times the costs beyond a batch, such as that of its cache, which no fit of lines predicts."""

    def cliff(site: int, rows: int) -> float:
        return 3.0 if site == 0 and rows > 150 else 1.0

    def value(split: BatchSplit) -> float:
        seconds = measured(split, UNEQUAL, slower=cliff).sites[0].seconds
        return split.batch / seconds * efficiency(split.batch, 5000.0, 32)

    taken = train(UNEQUAL, 5000.0, limits(), 16, noise, lambda _, site, rows: cliff(site, rows))
    values = [value(each) for each in taken]
    assert min(values[3:]) < 0.5 * max(values)  # a batch beyond has been tried
    for number in range(3, len(values) - 1):  # a bad split is kept for no second decision
        assert values[number] > 0.7 * max(values[: number + 1]) or taken[number + 1] != taken[number]
    assert min(values[-4:]) > 0.85 * max(values)


def test_a_site_that_becomes_slower_gets_fewer_samples():
    def slower(decision: int, site: int, rows: int) -> float:
        return 4.0 if site == 1 and decision >= 6 else 1.0

    taken = train(UNEQUAL, 300.0, limits(), 12, 0.0, slower)
    assert taken[6].sizes[1] > 0.25 * taken[6].batch
    late = StepModel((UNEQUAL.sites[0], SiteCosts(64e-3, 32e-4)), UNEQUAL.link)
    best = max(
        goodput(late, BatchSplit((batch - rows, rows)), 300.0, 32)
        for batch in range(64, 300, 8)
        for rows in range(1, 32)
    )
    assert goodput(late, taken[-1], 300.0, 32) > 0.9 * best


@pytest.mark.parametrize("growing", [0.0, 2e3, 2e4])
@pytest.mark.parametrize("noise_scale", [20.0, 300.0, 5000.0])
def test_the_chosen_batch_reaches_nine_tenths_of_the_best_goodput(growing, noise_scale):
    within = limits()
    for slow, rate, overlap in itertools.product([1.0, 4.0], [1e-7, 8e-7], [1.0, 3.0]):
        sites = tuple(SiteCosts(8e-3, 8e-4 * each, 1e-5, 1e5, growing) for each in (1.0, slow))
        model = StepModel(sites, ExchangeCosts(5e-3, rate, overlap))
        taken = train(model, noise_scale, within)
        candidates = [best_split(batch, 1, model, within) for batch in (*range(32, 128, 4), *range(128, 1025, 32))]
        best = max(goodput(model, each, noise_scale, 32) for each in candidates)
        assert goodput(model, taken[-1], noise_scale, 32) >= 0.9 * best
        assert taken[-1] == taken[-2]  # no to and fro


def test_the_best_batch_depends_on_the_method():
    fast = SiteCosts(1e-3, 2e-5, 0.0, 1e6, 0.0)  # dsgd: gradients of 1 MB
    rows = SiteCosts(1e-3, 2e-5, 0.0, 1e3, 1e4)  # dad: 10 kB for each sample
    link = ExchangeCosts(1e-3, 8e-8)
    dense, factors = (train(StepModel((site, site), link), 500.0, limits())[-1].batch for site in (fast, rows))
    assert dense > 4 * factors


def test_shares_are_equal_where_bytes_grow_and_the_link_is_slow():
    sites = (SiteCosts(1e-3, 5e-5, 0.0, 1e3, 2e3), SiteCosts(1e-3, 2e-4, 0.0, 1e3, 2e3))
    slow, fast = (
        best_split(256, 1, StepModel(sites, ExchangeCosts(1e-3, each)), limits()).sizes for each in (1e-5, 0.0)
    )
    assert slow == (128, 128)
    assert fast == pytest.approx((208, 48), abs=8)


def test_the_split_stays_without_a_gain_of_five_percent_or_an_estimate_of_the_noise():
    present = BatchSplit((100, 100))
    model = StepModel((SiteCosts(0.0, 1e-3),) * 2, ExchangeCosts(0.0, 0.0))
    assert choose(model, present, [200, 100], limits(base_batch=200), 100.0)[0] == present
    assert choose(model, BatchSplit((102, 98)), [200, 100], limits(base_batch=200), 100.0)[0] == BatchSplit((102, 98))
    assert choose(model, BatchSplit((120, 80)), [200, 100], limits(base_batch=200), 100.0)[0] == present
    free = StepModel((SiteCosts(1.0, 1e-9),) * 2, ExchangeCosts(0.0, 0.0))
    assert choose(free, present, [200, 100], limits(), math.nan)[0].batch == 200
    assert choose(free, present, [200, 100], limits(), math.inf)[0].batch == 400  # twice the largest that was measured


def test_samples_are_accumulated_where_the_link_is_slow_and_memory_short():
    model = StepModel((SiteCosts(1e-3, 1e-5),) * 2, ExchangeCosts(1.0, 0.0))
    within = limits(bounds=((1, 16), (1, 16)), accumulate=True)
    taken = train(model, 1e6, within)[-1]
    assert taken.batch > 200
    assert max(taken.sizes) <= 16 * taken.micro_batches
    assert train(model, 1e6, limits(bounds=((1, 16), (1, 16))))[-1].batch == 32


def test_data_of_each_sites_own_are_used_up_together():
    model = StepModel((SiteCosts(1e-3, 1e-4), SiteCosts(1e-3, 4e-4)), ExchangeCosts(0.1, 0.0))
    taken = train(model, 1e4, limits(weights=(300.0, 100.0)))[-1]
    assert taken.batch > 64
    assert taken.sizes[0] == pytest.approx(3 * taken.sizes[1], abs=3)


def test_training_begins_with_the_base_batch_as_far_as_bounds_allow():
    assert initial_split(limits()) == BatchSplit((16, 16))
    assert initial_split(limits(bounds=((20, 99), (1, 99)))) == BatchSplit((20, 12))
    assert initial_split(limits(bounds=((40, 99), (1, 99)))) == BatchSplit((40, 1))
    assert initial_split(limits(bounds=((1, 6), (1, 6)), accumulate=True)).micro_batches == 3
    assert initial_split(limits(), 5000).batch == 1024
    narrow = {"bounds": ((5, 6), (5, 6)), "accumulate": True}  # 10 to 12 samples, or 20 to 24, or 30 to 36
    assert initial_split(limits(base_batch=15, **narrow)).batch == 20
    assert initial_split(limits(base_batch=15, max_batch=18, **narrow)).batch == 12


def test_bounds_that_contradict_each_other_are_refused():
    refuses(
        (
            lambda: limits(bounds=((600, 700),) * 2).check(),
            "at least 1200 samples in a step, and max_batch_size is 1024",
        ),
        (lambda: limits(bounds=((1, 10),) * 2).check(), "at most 20 samples in a step, and batch_size is 32"),
    )
    limits(bounds=((1, 10),) * 2, accumulate=True).check()
