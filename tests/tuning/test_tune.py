"""`dadplug.tune` with seconds from formulas: nothing depends on the machine's times."""

import dataclasses
import json
import math

import pytest
from torch import nn

import dadplug
from dadplug import schedules
from dadplug.cli.commands import main
from dadplug.lowrank.algorithms import predict
from dadplug.schedules import Decoding, Encoding, Record
from dadplug.tuning import tasks
from dadplug.tuning.tasks import Layer

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


@pytest.mark.parametrize("seconds", [0, -1])
def test_arguments_are_checked(folder, seconds, monkeypatch):
    with pytest.raises(ValueError, match="seconds has to be positive"):
        dadplug.tune(seconds=seconds)
    monkeypatch.setenv("DADPLUG_TUNING", "0")
    with pytest.raises(ValueError, match="switches tuned constants off"):
        dadplug.tune(seconds=1, timer=synthetic)


def test_the_command_line(folder, capsys, monkeypatch):
    seen, tune = [], dadplug.tune

    def quick(model, seconds, **options):
        seen.append((model, seconds, options))
        return tune(None, 1000, timer=synthetic, progress=False, rows=options["rows"])

    monkeypatch.setattr("dadplug.tuning.tune", quick)
    assert main(["tune", "--seconds", "5", "--batch-size", "8"]) == 0
    assert seen == [(None, 5.0, {"builder": None, "input_shape": None, "rows": 8})]
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
