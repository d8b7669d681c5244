"""`dadplug.tune` with seconds from formulas: nothing depends on the machine's times."""

import dataclasses
import json
import math
import os
import random
import stat
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import dadplug
from dadplug.lowrank import sum_of_products, sum_one_by_one, top_k
from dadplug.lowrank.algorithms import choose, predict
from dadplug.serving import loading
from dadplug.serving.backends import runner_of
from dadplug.support import schedules
from dadplug.support.schedules import Decoding, Encoding, Machine, Record, Serving
from dadplug.tools.cli.commands import main
from dadplug.tools.tuning import tasks, tune
from dadplug.tools.tuning.search import Space, Task, compare_in_pairs, search
from dadplug.tools.tuning.tasks import Layer, ServingTask, label

TRUE = Encoding(fat=20_000.0, skinny=9_000.0, eigen=200.0, start_gram=10.0, start_iteration=30.0, start_formed=25.0)
BEST = {"few": 20, "strip": 512, "block": 1 << 15, "align": 16, "tile": 1 << 16, "narrow": 64, "coarse": 12}


def synthetic(task, config, samples=1):
    """Seconds by formulas: a valley around `BEST`, and compression at the rates of `TRUE`."""
    if isinstance(task, tasks.AlgorithmTask):
        case, algorithm = task.cases[config[0]], config[1]
        return 1e-6 * predict(*case, 1, TRUE)[algorithm]
    if isinstance(task, tasks.ChoiceTask):
        return sum(synthetic(task._algorithms, each) for each in task.chosen(config))
    named = task.space.named(config)
    return 1e-3 * math.prod(1 + 0.05 * math.log2((1 + value) / (1 + BEST[name])) ** 2 for name, value in named.items())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DADPLUG_TUNING", str(tmp_path))
    schedules.forget()
    yield tmp_path
    schedules.forget()


@pytest.mark.parametrize("factor", [1 / 4, 4])
def test_constants_that_are_wrong_by_a_factor_of_four_are_found_again(folder, factor):
    wrong = Record(
        Decoding(
            few=round(BEST["few"] * factor),
            strip=round(BEST["strip"] * factor),
            block=round(BEST["block"] * factor),
            align=round(BEST["align"] * factor),
            tile=round(BEST["tile"] * factor),
        ),
        Encoding(**{name: value * factor for name, value in TRUE.values().items() if name != "coarse"}, coarse=20),
    )
    result = dadplug.tune(seconds=1000, timer=synthetic, defaults=wrong, progress=False)
    record = schedules.load()
    assert record == result.record
    for name, value in (record.encoding.values() | record.decoding.values()).items():
        if name in BEST:  # seconds within a few percent of the optimum
            assert abs(math.log2((1 + value) / (1 + BEST[name]))) <= 1.1, name
    task = tasks.AlgorithmTask(tasks.cases_for(tasks.MNIST_NET), wrong.encoding)
    fitted = tasks.fit_rates(task, {config: synthetic(task, config) for config in task.space.configs()})
    for name in (*tasks.RATES, *tasks.STARTS):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert all(row.changed and row.ratio < 1 for row in result.rows[:-1])
    assert all(row.pairs == 30 and row.measured <= max(11, 0.26 * row.size) for row in result.rows[:-1])


def test_the_best_constants_stay(folder):
    best = Record(Decoding(**{name: value for name, value in BEST.items() if name != "coarse"}), Encoding(coarse=12))
    result = dadplug.tune(seconds=1000, timer=synthetic, defaults=best, progress=False, store=False)
    assert result.record.decoding == best.decoding
    assert result.path is None
    assert not any(folder.iterdir())
    assert [row.ratio for row in result.rows[:-1]] == [1.0] * 4
    assert "as before" in result.table()


def test_a_configuration_that_is_not_faster_in_pairs_is_not_taken(folder):
    def lucky(task, config, samples):
        """Return few seconds the first time only."""
        seen = counts.setdefault((task.name, config), [])
        seen.append(1)
        return 1e-6 if len(seen) == 1 and config != task.default else 1e-3

    counts = {}
    result = dadplug.tune(seconds=1000, timer=lucky, progress=False, store=False)
    assert result.record.decoding == Decoding()
    assert not any(row.changed for row in result.rows[:-1])


def test_the_file_and_the_table_tell_what_was_won(folder, capsys):
    result = dadplug.tune(nn.Sequential(nn.Linear(64, 32), nn.Conv2d(16, 32, 3)), 1000, timer=synthetic)
    content = json.loads(result.path.read_text())
    assert [row["task"] for row in content["results"]] == [row.task for row in result.rows]
    assert content["decoding"] == result.record.decoding.values()
    table, progress = result.table(), capsys.readouterr().err
    assert len(progress.splitlines()) == len(result.rows)
    for row in result.rows:
        assert row.task in table
        assert f"{row.measured} of {row.size}" in table
    assert f"strip 1048576 -> {result.record.decoding.strip}" in table
    assert str(result.path) in table
    assert all(len(points) and all(min(each) > 0 for each in points) for points in result.points.values())


def test_layers_of_a_model():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 10), nn.LayerNorm(32)
    )
    assert tasks.layers_of(model, 8) == [Layer(32, 27, 8), Layer(32, 64, 8)]


def run(task, config):
    for call in task.calls(config):
        call()


def test_every_task_runs_with_the_ends_of_its_space():
    layers = [Layer(40, 24, 6), Layer(17, 33, 6)]
    for task in tasks.tasks_for(layers, Decoding(), Encoding()):
        configs = task.space.configs()
        for config in (task.default, configs[0], configs[-1]):
            run(task, config)
            assert task.prior(config) > 0
    task = tasks.AlgorithmTask(tasks.cases_for(layers), Encoding())
    for config in task.space.configs():
        run(task, config)
        assert task.prior(config) > 0
    run(tasks.ChoiceTask(task, Encoding(), dataclasses.replace(TRUE)), ("fitted",))


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_arguments_are_checked(folder, seconds, monkeypatch):
    with pytest.raises(ValueError, match="seconds has to be positive"):
        dadplug.tune(seconds=seconds)
    monkeypatch.setenv("DADPLUG_TUNING", "0")
    with pytest.raises(ValueError, match="switches tuned constants off"):
        dadplug.tune(seconds=1, timer=synthetic)


def test_a_busy_machine_is_told_and_nothing_is_stored(folder, monkeypatch):
    loads = [(99.0, 0, 0)]
    monkeypatch.setattr("os.getloadavg", lambda: loads[0])
    with pytest.raises(ValueError, match=r"busy: its load is 99.*busy=True"):
        dadplug.tune(seconds=0.01, progress=False)
    tuner = SimpleNamespace(notes=[], rows=[], points={})
    monkeypatch.setattr("torch.get_num_threads", lambda: -100)
    monkeypatch.setattr("dadplug.tools.tuning.warmup", lambda: None)
    monkeypatch.setattr("dadplug.tools.tuning.Tuner", lambda *_: tuner)
    monkeypatch.setattr("dadplug.tools.tuning._run_tasks", lambda *_: schedules.Record())
    assert "not stored" in dadplug.tune(seconds=1, progress=False).table()  # busy since it began
    assert "is busy" in tuner.notes[0]
    assert dadplug.tune(seconds=1, progress=False, busy=True).path is not None


def test_the_command_line(folder, capsys, monkeypatch):
    seen, tune = [], dadplug.tune

    def quick(model, seconds, **options):
        seen.append((model, seconds, options))
        return tune(None, 1000, timer=synthetic, progress=False, rows=options["rows"])

    monkeypatch.setattr("dadplug.tools.tuning.tune", quick)
    assert main(["tune", "--seconds", "5", "--batch-size", "8"]) == 0
    assert seen == [(None, 5.0, {"builder": None, "input_shape": None, "rows": 8, "busy": False})]
    out = capsys.readouterr().out
    assert "sum of low-rank factors" in out
    assert schedules.load().tuned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such.ckpt"], "no-such.ckpt"),
        (["--seconds", "0"], "seconds has to be positive"),
        (["--batch-size", "0"], "rows has to be at least 1, not 0"),
        (["--builder", "task.py:net"], "give the model, too"),
        (["--input-shape", "784"], "give the model, too"),
    ],
)
def test_errors_on_the_command_line_are_one_line(folder, capsys, arguments, message):
    with pytest.raises(SystemExit, match="1"):
        main(["tune", *arguments])
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert message in line


@pytest.mark.parametrize("threads", ["0", "-2", "two"])
def test_threads_are_a_number_of_at_least_one(folder, capsys, threads):
    with pytest.raises(SystemExit, match="2"):
        main(["tune", f"--threads={threads}"])
    assert f"argument --threads: '{threads}' is no number of at least 1" in capsys.readouterr().err


# The search, with seconds from formulas in place of a clock


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


def test_spaces_smaller_than_the_budget_are_measured_whole_and_a_search_ends_in_time():
    task = FormulaTask(lambda config: config[0], values={"size": (1, 2, 3)}, default=(2,))
    assert search(task, measure, 100).measured == {(2,): 2, (1,): 1, (3,): 3}
    task = FormulaTask(lambda config: config[0], values={"size": (1, 2, 3)}, default=(7,))  # outside of the space
    assert set(search(task, measure, 100).measured) == {(7,), (1,), (2,), (3,)}
    task = FormulaTask(valley())
    assert list(search(task, measure, 50, enough=lambda: True).measured) == [task.default]


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


# Files of tuned constants


TUNED = Record(
    Decoding(few=24, strip=512, block=1 << 15, align=8, tile=1 << 14),
    Encoding(fat=90_000.0, coarse=12),
    {"a": Serving("compiled", fused=True)},
    tuned=True,
)


@pytest.fixture
def path(folder):
    return schedules.save(TUNED, Machine.this(), [{"task": "some"}])


def test_what_is_saved_is_what_later_processes_use(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedules.current() == TUNED
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_ISREG(path.stat().st_mode)
    later = dataclasses.replace(TUNED, decoding=Decoding(few=4))
    schedules.save(later, Machine.this())
    assert schedules.current() == TUNED
    schedules.forget()
    assert schedules.current() == later


def test_without_a_file_or_switched_off_the_defaults_hold(folder, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedules.load() == Record()
        schedules.save(TUNED, Machine.this())
        monkeypatch.setenv("DADPLUG_TUNING", "0")
        assert schedules.load() == Record()
    with pytest.raises(ValueError, match="switches tuned constants off"):
        schedules.save(TUNED, Machine.this())


def changed(**entries):
    return lambda content: json.dumps(json.loads(content) | entries).encode()


def of_machine(**entries):
    def change(content):
        found = json.loads(content)
        return json.dumps(found | {"machine": found["machine"] | entries}).encode()

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[: len(content) // 2], "damaged"),
        (lambda content: b"", "damaged"),
        (lambda content: b"\xff\x00" * 100, "damaged"),
        (lambda content: b"[" * 100_000, ""),
        (lambda content: b" " * (1 << 21), "larger"),
        (lambda content: b"[]", "damaged"),
        (changed(format=2), "format"),
        (changed(machine=None), "damaged"),
        (changed(served=[]), "damaged"),
        (changed(served={"a": {"backend": "os.system"}}), "backend"),
        (changed(decoding={"few": "12"}), "few must be of type int"),
        (changed(decoding={"few": True}), "few must be of type int"),
        (changed(decoding={"few": -4}), "few must lie in"),
        (changed(decoding={"tile": 0}), "tile must lie in"),
        (changed(decoding={"other": 1}), "unknown option 'other'"),
        (changed(encoding={"fat": float("nan")}), "fat must lie in"),
        (of_machine(cpu="another"), "cpu 'another' instead of"),
        (of_machine(torch="1.0"), "torch '1.0' instead of"),
        (of_machine(sources="0"), "sources '0' instead of"),
        (of_machine(threads=64), "threads 64 instead of"),
    ],
)
def test_a_file_that_is_damaged_foreign_or_outdated_is_ignored_with_a_warning(path, change, reason):
    path.write_bytes(change(path.read_bytes()))
    with pytest.warns(UserWarning, match="the tuned constants in .* are not used") as caught:
        assert schedules.load() == Record()
    assert reason in str(caught[0].message)


def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(path):
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="are not used"):
        assert schedules.load() == Record()


def test_an_interrupted_write_leaves_the_file_before(path, monkeypatch):
    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        schedules.save(Record(), Machine.this())
    assert schedules.load() == TUNED
    assert os.listdir(path.parent) == [path.name]


def test_threads_have_files_of_their_own():
    assert Machine.this(1).key != Machine.this(2).key
    assert Machine.this(1).key == Machine.this(1).key


def test_constants_change_how_kernels_compute_and_not_what():
    generator = torch.Generator().manual_seed(0)
    lefts = [torch.randn(5, 37, generator=generator, dtype=torch.float64) for _ in range(2)]
    rights = [torch.randn(5, 53, generator=generator, dtype=torch.float64) for _ in range(2)]
    exact = sum(0.5 * left.T @ right for left, right in zip(lefts, rights, strict=True))
    for few in (0, 64):
        for strip in (16, 20, 1 << 20):
            found = sum_of_products(lefts, rights, [0.5, 0.5], Decoding(few=few, strip=strip))
            torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    for block in (16, 200, 1 << 20):
        for align in (1, 4, 64):
            found = sum_one_by_one(lefts, rights, Decoding(block=block, align=align))
            torch.testing.assert_close(found, 2 * exact, rtol=1e-12, atol=1e-12)
    values = torch.randn(3000, generator=generator)
    expected = top_k(values, 100)
    for coarse in (8, 22):
        with schedules.replaced(Record(encoding=Encoding(coarse=coarse))):
            assert all(map(torch.equal, top_k(values, 100), expected))


def test_the_cost_model_of_compression_has_the_constants_of_the_process():
    case = (256, 768, 768, 8, 1)
    before = predict(*case)
    with schedules.replaced(Record(encoding=Encoding(skinny=30.0, start_gram=0.0, fat=1e8, eigen=1e6))):
        assert predict(*case)["iteration"] > 100 * before["iteration"]
        assert choose(*case) == "gram"
    assert predict(*case) == before
    assert choose(*case) == "iteration"


# Ways in which a served model computes


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.alone = nn.BatchNorm2d(8)
        self.last, self.last_norm = nn.Linear(8, 5), nn.BatchNorm1d(5)

    def forward(self, images):
        hidden = self.first(images)
        hidden = hidden + self.norm(self.second(hidden)) + self.alone(hidden)
        return self.last_norm(self.last(hidden.mean((2, 3))))


class Shifted(nn.Module):
    def forward(self, outputs):
        return outputs + 0.1


def trained():
    model = Residual()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval()


def norms(module):
    return sum(isinstance(each, (nn.BatchNorm1d, nn.BatchNorm2d)) for each in module.modules())


def test_normalisations_become_part_of_the_layers_before_them():
    model = trained()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    new = loading.fused(model)
    called = {node.target for node in new.graph.nodes if node.op == "call_module"}
    assert {each for each in called if "norm" in each or each == "first.1"} == set()
    assert "alone" in called
    images = torch.randn(4, 3, 6, 6)
    torch.testing.assert_close(new(images), model(images), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_what_is_used_twice_is_not_fused():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.other = nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, inputs):
            once = self.conv(inputs)
            return self.norm(once) + once + self.other(self.conv(inputs))

    model = Shared().eval()
    assert loading.fused(model) is model


@pytest.fixture
def compiled(monkeypatch):
    """Replace torch.compile, which takes a minute, by what records its calls."""
    calls = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: calls.append(module) or module)
    return calls


def test_all_ways_give_the_outputs_of_the_model(compiled):
    model, example = trained(), np.random.default_rng(0).normal(size=(3, 3, 6, 6)).astype(np.float32)
    expected = runner_of(model)(example)
    for backend in ("eager", "compiled"):
        for last in (False, True):
            for fused in (False, True):
                run = loading.make_run(model, Serving(backend, last, fused), example)
                torch.testing.assert_close(run(example), expected, rtol=1e-4, atol=1e-5)
    assert len(compiled) == 4


def test_a_served_model_computes_as_it_was_tuned(compiled):
    model, key = trained(), loading.key_of(trained())
    record = Record(served={key: Serving("compiled", True, True, "3,6,6")}, tuned=True)
    example = loading.example_of(model, (3, 6, 6))
    expected = runner_of(model)(example)
    loading.scheduled(model)
    assert not compiled
    with schedules.replaced(record), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = loading.scheduled(model)(example)
    assert norms(compiled[0]) == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    other = nn.Sequential(nn.Linear(8, 5))
    assert loading.key_of(other) != key
    with schedules.replaced(record):
        loading.scheduled(other)
    assert len(compiled) == 1


@pytest.mark.parametrize("fails", ["raises", "is wrong"])
def test_a_way_that_fails_is_not_used(monkeypatch, fails):
    def compile_badly(module, **options):
        if fails == "raises":
            raise RuntimeError("no compiler")
        return nn.Sequential(module, Shifted())

    monkeypatch.setattr(torch, "compile", compile_badly)
    model = trained()
    record = Record(served={loading.key_of(model): Serving("compiled", shape="3,6,6")}, tuned=True)
    example = loading.example_of(model, (3, 6, 6))
    with schedules.replaced(record), pytest.warns(UserWarning, match="served as it is"):
        run = loading.scheduled(model)
    assert torch.equal(run(example), runner_of(model)(example))
    task = ServingTask(model, (3, 6, 6), lambda: False)
    assert all("compiled" not in way for (way,) in task.space.configs())
    assert any(note.startswith("compiled") for note in task.notes)


def test_tuning_a_model_stores_its_way(compiled, folder):
    wanted = label(Serving("compiled", True, True))

    def measure(task, config, samples):
        return 0.5 if config == (wanted,) else 1.0

    model = trained()
    result = tune(model, 1000, input_shape=(3, 6, 6), timer=measure, progress=False)
    assert schedules.load().served == {loading.key_of(model): Serving("compiled", True, True, "3,6,6")}
    assert result.rows[-1].task == "served model"
    assert "compiled, channels last, fused" in result.table()
    other = nn.Sequential(nn.Linear(6, 2))
    tune(other, 1000, input_shape=(6,), timer=measure, progress=False)
    assert set(schedules.load().served) == {loading.key_of(model), loading.key_of(other)}


# Sites whose files differ: what decodes is the choice of site 0


FIRST = Record(Decoding(few=64, strip=16, block=64, align=4, tile=64), Encoding(fat=12_345.0), tuned=True)
SECOND = Record(Decoding(few=0, tile=1 << 20), Encoding(fat=54_321.0, start_gram=1e5), tuned=True)


def trains_with_a_file(folder, mode, fused):
    """Train with a file of this site's own; return constants, the first difference and the weights."""
    import os

    import torch.distributed as dist

    rank = dist.get_rank()
    os.environ["DADPLUG_TUNING"] = f"{folder}/{rank}"
    schedules.forget()
    try:
        schedules.save([FIRST, SECOND][rank], Machine.this())
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 24))
        reduction = dadplug.GradientReduction(model, mode=mode, rank=3, dense="allreduce")
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 48, generator=generator)).square().mean().backward()
            if fused:
                reduction.apply(optimizer)
            else:
                reduction.synchronize()
                optimizer.step()
        used = reduction._planner._reducer._context.decoding
        own = schedules.current()
        difference = reduction.first_difference()
        reduction.detach()
        weights = [each.detach().clone() for each in model.parameters()]
        return dataclasses.asdict(used), own == [FIRST, SECOND][rank], difference, weights
    finally:
        schedules.forget()


def trains_in_all_ways(folder):
    ways = [("rankdad", False), ("rankdad", True), ("dad", False), ("auto", False)]
    return [trains_with_a_file(folder, *way) for way in ways]


def test_replicas_are_equal_where_files_differ(sites, tmp_path):
    first, second = sites(2).run(trains_in_all_ways, str(tmp_path))
    for (used, own, difference, weights), (used2, own2, difference2, weights2) in zip(first, second, strict=True):
        assert used == used2 == FIRST.decoding.values()
        assert own
        assert own2
        assert difference is None
        assert difference2 is None
        assert all(map(torch.equal, weights, weights2))
