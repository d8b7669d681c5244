"""The adaptive loader: every sample once whatever the batches are, changes at the same step, arguments, restarts."""

from functools import partial
from types import SimpleNamespace

import pytest
import support
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import refuses
from torch.utils.data import ChainDataset, DistributedSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import dadplug
from dadplug import ElasticSampler
from dadplug.adaptive import adaptive_loader, reset_progress
from dadplug.adaptive.goodput import BatchLimits, BatchSplit
from dadplug.adaptive.loader import Schedule, order_of
from dadplug.adaptive.progress import Pass
from dadplug.errors import MismatchError
from dadplug.exchange import Traffic
from dadplug.exchange.rounds import Rounds


class Gradients:
    """A reduction whose noise is given, and whose steps take a given time on a clock of its own."""

    def __init__(self, noise_scale: float = 300.0, **speed: float) -> None:
        self.traffic, self.plan = Traffic(), []
        self.noise = SimpleNamespace(base_batch=None, scale=noise_scale)
        self.gain = 1.5
        self.clock, self.exchange = 0.0, 0.0
        self.fixed, self.per_row = speed.get("fixed", 1.0), speed.get("per_row", 1e-3)

    def perf_counter(self) -> float:
        return self.clock

    def step(self, rows: int) -> None:
        """Take a step; one of a group waits for the slowest."""
        own = slowest = self.fixed + self.per_row * rows
        if dist.is_initialized():
            every = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
            dist.all_gather(every, torch.tensor([own], dtype=torch.float64))
            slowest = max(each.item() for each in every)
        self.clock += slowest + self.exchange
        self.traffic._wait += slowest - own + self.exchange
        self.traffic.end_step()


class Padded(Gradients):
    """A reduction whose payloads have room for the most samples of the present step and of the 16 before."""

    def __init__(self) -> None:
        super().__init__(noise_scale=8.0, fixed=0.01)
        self.rows: list[int] = []

    def step(self, rows: int) -> None:
        self.rows = [*self.rows[-16:], rows]
        room = max(self.rows)
        self.plan = [SimpleNamespace(path="factors", shape=(room, 250), bytes=1000 * room)]
        self.exchange = 0.1 * room
        self.traffic.add(1000 * room)
        super().step(rows)


@pytest.fixture
def gradients(monkeypatch):
    found = Gradients()
    monkeypatch.setattr(adaptive_loader, "time", found)
    return found


def loader(length=600, size=8, **options):
    return dadplug.AdaptiveDataLoader(TensorDataset(torch.arange(length)), size, **options)


def train(data, gradients, stop=None):
    """Train an epoch; return the batches, as lists of samples."""
    seen = []
    for (samples,) in data:
        seen.append(samples.tolist())
        if data.accumulates:
            continue
        gradients.step(sum(map(len, seen[-data.accumulation_steps :])))
        if len(seen) == stop:
            break
    return seen


def flat(batches):
    return [sample for batch in batches for sample in batch]


def test_without_autoscaling_it_divides_as_a_data_loader_does():
    data = loader(70, 16)
    assert len(data) == 5
    assert [len(batch) for (batch,) in data] == [16, 16, 16, 16, 6]
    assert data.current_batch_size == 16
    assert data.max_batch_size is None


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_every_sample_is_used_once_while_the_batch_grows(gradients, options):
    data = loader(1200 if not options else 400, shuffle=True, **options)
    data.autoscale_batch_size(256, (2, 200), reduction=gradients)
    for _ in dadplug.remaining_epochs_until(2):
        seen = train(data, gradients)
        assert sorted(flat(seen)) == list(range(len(data.dataset)))
    sizes = [*map(len, seen)]
    assert max(sizes) == data.current_batch_size > 16
    assert sizes[0] > 8
    assert data.goodput > 0
    assert gradients.noise.base_batch == 8
    assert data.progress == pytest.approx(1.5 * gradients.traffic.steps)


def test_a_change_takes_effect_in_the_next_step_and_the_length_follows(gradients):
    data = loader(600, num_workers=1)
    data.autoscale_batch_size(64, reduction=gradients)
    lengths, sizes = [], []
    for (samples,) in data:
        sizes.append(len(samples))
        lengths.append(len(data))
        gradients.step(len(samples))
    assert sizes[:9] == [8] * 8 + [16]  # the first decision comes after eight steps
    assert lengths[:8] == [75] * 8
    assert lengths[8] == 8 + 34  # 536 samples are left
    assert lengths[-1] == len(sizes)


def test_a_smaller_batch_is_not_judged_by_payloads_with_room_for_a_larger_one(monkeypatch):
    gradients = Padded()
    monkeypatch.setattr(adaptive_loader, "time", gradients)
    data = loader(2400)
    data.autoscale_batch_size(64, reduction=gradients)
    sizes = [*map(len, train(data, gradients))]
    assert max(sizes) == 16  # is tried, takes twice as long, and is given up
    assert sizes.index(16) < 16
    assert set(sizes[40:]) == {8}


def test_steps_are_accumulated(gradients):
    gradients.noise.scale, gradients.exchange, gradients.fixed = 1e6, 10.0, 0.0
    data = loader(2000)
    data.autoscale_batch_size(512, (1, 8), gradient_accumulation=True, reduction=gradients)
    seen, weights, rows = [], [], 0
    for (samples,) in data:
        seen.append(samples.tolist())
        weights.append((data.batch_weight, data.accumulates))
        rows += len(samples)
        if not data.accumulates:
            gradients.step(rows)
            rows = 0
    assert flat(seen) == list(range(2000))
    assert max(map(len, seen)) <= 8
    assert data.accumulation_steps > 3
    assert sum(weight for weight, _ in weights) == pytest.approx(gradients.traffic.steps)
    assert len([each for each, accumulates in weights if not accumulates]) == gradients.traffic.steps


def test_a_program_that_steps_while_samples_are_accumulated_is_told(gradients):
    gradients.noise.scale = 1e6
    data = loader(2000)
    data.autoscale_batch_size(512, (1, 8), gradient_accumulation=True, reduction=gradients)
    with pytest.raises(RuntimeError, match=r"take no step while loader\.accumulates is set"):
        [gradients.step(len(samples)) for (samples,) in data]


def run(path, gradients, stop=None, **options):
    """Train two epochs with checkpoints after every third batch; return batches by epoch, and the loader."""
    reset_progress()
    data = loader(500, shuffle=True, **options)
    data.autoscale_batch_size(64, reduction=gradients)
    seen = {}
    for epoch in dadplug.remaining_epochs_until(2, checkpoint=path, state={}, every=3, timeout=200):
        seen[epoch] = train(data, gradients, stop if epoch == 1 else None)
        if stop is not None and epoch == 1:
            break
    return seen, data


def test_a_restart_goes_on_with_the_batch_the_progress_and_the_next_sample(tmp_path, gradients):
    before, data = run(tmp_path / "run", gradients, stop=4)
    size, progress = data.current_batch_size, data.progress
    after, data = run(tmp_path / "run", gradients)
    assert [*after] == [1]
    assert size > 16
    assert len(after[1][0]) == size
    assert sorted(flat(before[1][:3] + after[1])) == list(range(500))
    assert data.progress > progress


def test_the_order_of_a_sampler_is_the_same_after_a_restart():
    weights = WeightedRandomSampler(torch.ones(30), 40)
    first, again, other = (
        [sample for (batch,) in loader(30, sampler=weights, seed=seed) for sample in batch.tolist()]
        for seed in (3, 3, 4)
    )
    assert first == again != other
    assert len(first) == 40
    chosen = [sample for (batch,) in loader(30, sampler=SubsetRandomSampler([5, 7, 11])) for sample in batch.tolist()]
    assert sorted(chosen) == [5, 7, 11]


REFUSED = (  # arguments of a loader
    ({"dataset": ChainDataset([])}, "an IterableDataset has no samples by number"),
    ({"batch_sampler": [[0, 1]]}, "leave out the batch_sampler"),
    ({"batch_size": None}, "batch_size must be a whole number of at least 1, got None"),
    ({"in_order": False}, "in_order=False"),
    ({"sampler": range(5), "shuffle": True}, "leave out shuffle"),
    ({"sampler": iter(range(5))}, "the sampler needs a length"),
    ({"sampler": DistributedSampler(range(5), 1, 0)}, "leave out the DistributedSampler"),
    ({"sampler": SubsetRandomSampler([1], torch.Generator())}, "a generator of its own"),
    ({"prefetch_factor": 2}, "prefetch_factor"),
)


def test_what_cannot_be_followed_is_refused():
    given, data = {"dataset": TensorDataset(torch.arange(10)), "batch_size": 4}, loader()
    data.autoscale_batch_size(64)
    bounds = loader().autoscale_batch_size
    refuses(
        *((partial(dadplug.AdaptiveDataLoader, **given | wrong), message) for wrong, message in REFUSED),
        (lambda: bounds(4), "max_batch_size is 4, less than batch_size, 8"),
        (lambda: bounds(0), "max_batch_size must be a whole number"),
        (lambda: bounds(64, (32, 16)), r"local_bsz_bounds \(32, 16\) and max_batch_size 64 contradict each other"),
        (lambda: bounds(64, (65, None)), "contradict each other"),
        (lambda: bounds(64, (1.5, None)), "the lower bound must be a whole number of at least 1, got 1.5"),
        (lambda: list(data), r"needs a dadplug\.GradientReduction", RuntimeError),
        (lambda: ElasticSampler(range(3), rank=2, num_sites=2), "0 to 1 for 2 sites, got 2"),
        (lambda: ElasticSampler(range(3)).set_epoch(0, used=4), "0 to 3, the length of the data set, got 4"),
    )


# Several sites


def trains(path, plan, stop=None, lengths=None):
    """Train two epochs where each site has a speed of its own.

    Args:
        path: path of the checkpoint.
        plan: for each site, seconds for each sample.
        stop: number of batches of the second epoch after which the process is lost.
        lengths: for each site, the length of its own data.

    Returns:
        Batches by epoch, the sizes that the loader reports, the progress, and how often each sample was counted.
    """
    reset_progress()
    rank = dist.get_rank()
    gradients = Gradients(per_row=plan[rank], fixed=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive_loader, "time", gradients)
        own = {} if lengths is None else {"source": f"site {rank}"}
        data = loader(600 if lengths is None else lengths[rank], 24, shuffle=True, **own)
        data.autoscale_batch_size(240, (1, 200), reduction=gradients)
        seen, counts, sizes = {}, {}, []
        for epoch in dadplug.remaining_epochs_until(2, checkpoint=path, state={}, every=1, timeout=200):
            seen[epoch], stats = [], dadplug.Accumulator()
            for (samples,) in data:
                seen[epoch].append(samples.tolist())
                sizes.append(data.current_batch_size)
                for sample in samples.tolist():
                    stats[sample] += 1
                if epoch == 1 and len(seen[epoch]) == stop:
                    return seen, sizes, data.progress, counts
                gradients.step(len(samples))
            with stats.synchronized():
                counts[epoch] = dict(stats)
    return seen, sizes, data.progress, counts


def test_a_faster_site_gets_more_samples_and_both_change_in_the_same_step(sites, tmp_path):
    first, second = sites(2).run(trains, tmp_path / "run", [0.001, 0.004])
    assert first[1] == second[1]
    assert first[1][-1] > 24
    for epoch in (0, 1):
        assert sorted(flat(first[0][epoch] + second[0][epoch])) == list(range(600))
    fast, slow = len(first[0][1][0]), len(second[0][1][0])
    assert fast == pytest.approx(4 * slow, rel=0.15)


def test_a_restart_on_another_number_of_sites_uses_every_sample_once(sites, tmp_path):
    for count in (1, 3):
        path = tmp_path / f"run {count}"
        before = sites(2).run(trains, path, [0.001] * 2, 3)
        assert before[0][1][-1] > 24
        after = sites(count).run(trains, path, [0.001] * count)
        kept = [sample for site in before for sample in flat(site[0][1][:2])]  # the third was not in the checkpoint
        assert sorted(kept + [sample for site in after for sample in flat(site[0][1])]) == list(range(600))
        assert all(0 not in site[0] for site in after)
        assert after[0][1][0] == before[0][1][-1]  # the same batch, over other sites
        assert after[0][2] > before[0][2]
        assert all(site[3] == {1: dict.fromkeys(range(600), 1)} for site in after)


def test_sites_use_up_data_of_their_own_together(sites, tmp_path):
    found = sites(2).run(trains, tmp_path / "run", [0.001, 0.001], None, [400, 200])
    for site, length in zip(found, (400, 200), strict=True):
        assert sorted(flat(site[0][0])) == sorted(flat(site[0][1])) == list(range(length))
    assert abs(len(found[0][0][1]) - len(found[1][0][1])) <= 1


@support.at_sites(2)
def test_bounds_of_all_sites_are_compared() -> None:
    """Bounds that only contradict each other together, and different batches."""

    def ask(bounds: object, *sizes: int) -> None:
        reset_progress()
        data = loader(100, sizes[dist.get_rank()])
        data.autoscale_batch_size(64, bounds)
        next(iter(data))

    at_least = "2 sites ask for at least 80 samples in a step, and max_batch_size is 64"
    refuses(
        (lambda: ask((40, 50), 8, 8), at_least),
        (lambda: ask((None, 3), 8, 8), "at most 6 samples in a step, and batch_size is 8"),
        (lambda: ask(None, 8, 9), "8, 64, False at site 0.*9, 64, False at site 1", dadplug.MismatchError),
    )


@pytest.mark.parametrize(("part", "failing"), [("_choose", 0), ("_report", 1)])
@support.at_sites(2)
def test_an_error_in_a_decision_is_raised_at_all_sites(part: str, failing: int) -> None:
    """Train where the first site cannot decide, or the second one not report."""
    reset_progress()
    gradients = Gradients()

    def fail(*_):
        raise ZeroDivisionError("no step has a time")

    words = rf"^site {failing}\b.* cannot choose the batch: ZeroDivisionError: no step has a time"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive_loader, "time", gradients)
        if part == "_choose" or dist.get_rank() == 1:
            patch.setattr(dadplug.AdaptiveDataLoader, part, fail)
        data = loader(600, 24)
        data.autoscale_batch_size(64, reduction=gradients)
        refuses((lambda: train(data, gradients), words, RuntimeError))


# The division of a data set: every sample once, whatever the number of sites is and however often it changes


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


class OneLies(SimpleNamespace):
    """Transport of two sites, of which one sends what a test has set in place of objects of a type."""

    sites, world_size, rounds = ("site 0 (a)", "site 1 (b)"), 2, Rounds(2)

    def gather_present(self, item):
        lies = not isinstance(item, adaptive_loader.BatchReport)
        return dict(sorted({self.rank: item, 1 - self.rank: self.lie if lies else item}.items()))


def test_batches_that_another_site_has_made_up_name_it():
    data = TensorDataset(torch.zeros(64, 1))
    for size, used in ((0, 0), (-8, 0), (8, -1)):
        current = SimpleNamespace(transport=OneLies(rank=0, lie=("other", size, (0, 1, used, 64, False, [0]))))
        with pytest.raises(MismatchError, match=r"site 1 \(b\) has sent an invalid position"):
            dadplug.ElasticDataLoader(data, 8)._divide(current, Pass(0, True), 0)
    for split in (BatchSplit((8,)), BatchSplit((8, 8), 0), BatchSplit((1, 1 << 40))):
        loader = dadplug.AdaptiveDataLoader(data, batch_size=8)
        loader._limits, loader._split = BatchLimits(8, 32, ((1, 16), (1, 16))), BatchSplit((4, 4))
        loader._report = lambda: adaptive_loader.BatchReport((), (0.0, 0.0), 1.0)
        with pytest.raises(MismatchError, match=r"site 0 \(a\) has sent an invalid choice of the batch"):
            loader._decide(OneLies(rank=1, lie=(split, 1.0)))
        assert loader._split == BatchSplit((4, 4))
