"""The search, with seconds from formulas in place of a clock."""

import math
import random
import statistics

import pytest

from dadplug.tuning.search import RuntimeModel, Space, Task, compare_in_pairs, search


class FormulaTask(Task):
    """A task whose seconds are a formula; its prior is another one."""

    def __init__(self, seconds, prior=lambda config: 1.0, values=None, default=None):
        values = values or {"block": tuple(2**n for n in range(8, 24)), "align": (4, 8, 16, 32), "own": (False, True)}
        space = Space(values)
        super().__init__("formula", space, default or space.configs()[0])
        self.seconds, self._prior = seconds, prior

    def calls(self, config):
        raise AssertionError("nothing is run")

    def prior(self, config):
        return self._prior(config)


def valley(best=2**17):
    """Seconds with one valley in the size of blocks, steps in the rest, and a cache that is left at 2^19."""

    def seconds(config):
        block, align, own = config
        far = math.log2(block / best)
        return 1e-3 * (1 + 0.05 * far**2 + 0.02 * abs(math.log2(align / 16)) + (0.3 if own else 0.0) + (block > 2**19))

    return seconds


def measure(task, config, samples):
    return task.seconds(config)


def test_a_quarter_of_the_measurements_find_the_optimum_and_random_ones_do_so_less_often():
    seconds = valley()
    task = FormulaTask(seconds)
    best = min(map(seconds, task.space.configs()))
    budget = len(task.space) // 4

    found, drawn = [], []
    for seed in range(10):
        result = search(task, measure, budget, seed)
        assert len(result.measured) == budget
        found.append(result.measured[result.best] <= 1.05 * best)
        rng = random.Random(seed)
        drawn.append(min(map(seconds, rng.sample(task.space.configs(), budget))) <= 1.05 * best)
    assert sum(found) >= 9
    assert sum(found) >= sum(drawn)


def test_a_good_prior_is_followed_and_a_bad_one_is_overcome():
    best = {"good": 0, "bad": 0}
    for seed in range(5):
        seconds = valley()
        for name, prior in (("good", seconds), ("bad", lambda config: 1 / valley()(config))):
            task = FormulaTask(seconds, prior)
            result = search(task, measure, 32, seed)
            best[name] += result.measured[result.best] <= 1.05 * min(map(seconds, task.space.configs()))
            if name == "good":
                assert list(result.measured)[1] == (2**17, 16, False)
    assert best["good"] == 5
    assert best["bad"] >= 4


@pytest.mark.parametrize("wrong", [1 / 4, 4])
def test_a_default_that_is_wrong_by_a_factor_of_four_is_corrected(wrong):
    seconds = valley()
    task = FormulaTask(seconds, default=(int(2**17 * wrong), 16, False))
    result = search(task, measure, len(task.space) // 4)
    assert next(iter(result.measured)) == task.default
    assert seconds(result.best) <= 1.05 * 1e-3
    assert compare_in_pairs(task, result.best, measure).holds


def test_spaces_smaller_than_the_budget_are_measured_whole_and_a_search_ends_in_time():
    task = FormulaTask(lambda config: config[0], values={"size": (1, 2, 3)}, default=(2,))
    assert search(task, measure, 100).measured == {(2,): 2, (1,): 1, (3,): 3}
    task = FormulaTask(lambda config: config[0], values={"size": (1, 2, 3)}, default=(7,))  # outside of the space
    assert set(search(task, measure, 100).measured) == {(7,), (1,), (2,), (3,)}
    task = FormulaTask(valley())
    assert list(search(task, measure, 50, enough=lambda: True).measured) == [task.default]


def test_the_model_learns_what_the_prior_leaves():
    seconds, rng = valley(), random.Random(0)
    task = FormulaTask(seconds, lambda config: 2e-3)
    model, configs = RuntimeModel(task), task.space.configs()
    known = rng.sample(configs, 60)
    model.fit({config: seconds(config) for config in known})
    rest = [config for config in configs if config not in known]
    errors = [abs(value - math.log(seconds(config))) for config, value in zip(rest, model.predict(rest), strict=True)]
    spread = statistics.pstdev(math.log(seconds(config)) for config in rest)
    assert statistics.median(errors) < 0.25 * spread


class Noisy:
    """Measures with random factors, as on a busy machine."""

    def __init__(self, spread):
        self.rng, self.spread, self.orders = random.Random(1), spread, []

    def __call__(self, task, config, samples):
        self.orders.append(config)
        return task.seconds(config) * math.exp(self.rng.gauss(0, self.spread))


def test_the_default_stays_unless_the_other_is_really_faster():
    task = FormulaTask(lambda config: config[0], values={"size": (90, 98, 100, 103)}, default=(100,))
    noisy = Noisy(0.05)
    outcome = compare_in_pairs(task, (90,), noisy)
    assert outcome.holds
    assert 0.87 < outcome.ratio < 0.93
    assert outcome.pairs == 30
    assert noisy.orders[:4] == [(100,), (90,), (90,), (100,)]
    assert not compare_in_pairs(task, (103,), noisy).holds
    same = FormulaTask(lambda config: 100.0, values={"size": (1, 2)}, default=(1,))
    wrong = sum(compare_in_pairs(same, (2,), Noisy(0.05)).holds for _ in range(1))
    for seed in range(200):
        noisy.rng = random.Random(seed)
        wrong += compare_in_pairs(same, (2,), noisy).holds
    assert wrong <= 10  # by chance
