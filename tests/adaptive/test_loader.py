"""The division of a data set: every sample once, whatever the number of sites is and however often it changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dadplug import ElasticSampler
from dadplug.adaptive.loader import Schedule, order_of

lengths = st.integers(0, 300)
batch_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple)


def batches(schedule: Schedule, member: int) -> list[list[int]]:
    order = list(range(schedule.length))
    return [order[schedule.batch(step, member)] for step in range(schedule.steps(member))]


def all_batches(schedule: Schedule) -> list[list[list[int]]]:
    return [batches(schedule, member) for member in range(len(schedule.sizes))]


@given(lengths, batch_sizes)
def test_each_sample_is_in_one_batch_of_one_site(length, sizes):
    found = all_batches(Schedule(length, 0, sizes))
    assert sorted(sample for site in found for batch in site for sample in batch) == list(range(length))
    assert all(batch for site in found for batch in site)


@given(lengths, st.integers(1, 9), st.integers(1, 5))
def test_sites_have_equally_many_batches_of_at_most_one_sample_more(length, size, count):
    schedule = Schedule(length, 0, (size,) * count)
    found = all_batches(schedule)
    if length >= count:
        assert len({len(site) for site in found}) == 1
    assert max((len(batch) for site in found for batch in site), default=0) <= size + (
        0 < length % (size * count) < count
    )
    full = [[len(batch) for batch in site[:-1]] for site in found]
    assert all(sizes == [size] * len(sizes) for sizes in full)


@given(lengths, st.lists(st.tuples(batch_sizes, st.integers(0, 20)), max_size=4), batch_sizes)
def test_each_sample_is_used_once_when_the_number_of_sites_changes(length, runs, last):
    used, seen = 0, []
    for sizes, steps in runs:
        schedule = Schedule(length, used, sizes)
        found = all_batches(schedule)
        steps = min(steps, *map(len, found))  # a checkpoint is written while all sites have batches
        seen += [sample for site in found for batch in site[:steps] for sample in batch]
        used = schedule.used_after(steps)
        assert sorted(seen) == list(range(used))
    seen += [sample for site in all_batches(Schedule(length, used, last)) for batch in site for sample in batch]
    assert sorted(seen) == list(range(length))


@given(lengths, lengths, batch_sizes)
def test_drop_last_leaves_only_full_batches(length, used, sizes):
    schedule = Schedule(length, min(used, length), sizes, drop_last=True)
    found = all_batches(schedule)
    full = (length - schedule.used) // sum(sizes)
    assert [[len(batch) for batch in site] for site in found] == [[size] * full for size in sizes]
    assert schedule.used_after(full) == schedule.used + full * sum(sizes)


def test_one_site_has_the_batches_of_a_data_loader():
    assert [len(batch) for batch in batches(Schedule(70, 0, (16,)), 0)] == [16, 16, 16, 16, 6]


def test_the_order_is_a_permutation_that_depends_on_seed_epoch_and_pass():
    orders = [order_of(50, True, *key).tolist() for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert order_of(50, True, 0, 1, 0).tolist() == orders[2]
    assert order_of(5, False, 0, 1, 0).tolist() == [0, 1, 2, 3, 4]


def samplers(length: int, count: int, epoch: int, used: int = 0) -> list[list[int]]:
    found = []
    for rank in range(count):
        sampler = ElasticSampler(range(length), rank=rank, num_sites=count)
        sampler.set_epoch(epoch, used)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1])
    return found


@given(st.integers(1, 100), st.integers(1, 4), st.integers(1, 4), st.integers(1, 7), st.integers(0, 5))
def test_samplers_go_on_with_another_number_of_sites(length, count, later, size, steps):
    steps = min(steps, length // (count * size))
    before = [sample for each in samplers(length, count, 2) for sample in each[: steps * size]]
    after = [sample for each in samplers(length, later, 2, used=len(before)) for sample in each]
    assert sorted(before + after) == list(range(length))


def test_the_order_of_samplers_does_not_depend_on_the_number_of_sites():
    (alone,) = samplers(20, 1, 3)
    first, second = samplers(20, 2, 3)
    assert [sample for pair in zip(first, second, strict=True) for sample in pair] == alone
    assert alone != samplers(20, 1, 4)[0]


def test_samplers_refuse_wrong_places():
    with pytest.raises(ValueError, match="0 to 1 for 2 sites, got 2"):
        ElasticSampler(range(3), rank=2, num_sites=2)
    with pytest.raises(ValueError, match="0 to 3, the length of the data set, got 4"):
        ElasticSampler(range(3)).set_epoch(0, used=4)
