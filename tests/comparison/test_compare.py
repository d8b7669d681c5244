import dataclasses
import io
import math
import os
import pickle
import random
import textwrap
import threading

import pytest
import support
import torch
from support import refuses
from torch import nn
from torch.utils.data import TensorDataset

import dadplug
from dadplug.errors import RunFailedError
from dadplug.exchange.handshake import own_node
from dadplug.support.progress import ProgressBar
from dadplug.tools.comparison import STRATEGIES, Comparison, Place, Row, Strategy, _Trials
from dadplug.tools.comparison import link as links
from dadplug.tools.comparison.pool import Pool
from dadplug.tools.comparison.result import LOOPBACK
from dadplug.tools.comparison.trial import MAX_HELD_OUT, WARM_UP, Point, Task, Trainer, _Clock


def samples(count=512):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 12, generator=generator)
    return TensorDataset(inputs, (inputs[:, :3].sum(1) > 0).long())


def build():
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    return model, torch.optim.Adam(model.parameters(), 1e-2), nn.CrossEntropyLoss()


def build_for_no_way():
    model = nn.Linear(12, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if torch.distributed.is_initialized():
        raise ValueError("this model trains alone")
    return model, optimizer, nn.CrossEntropyLoss()


# Rows and verdicts


def run(*points):
    return [Point(*point) for point in points]


def row(way, *losses, steps=30, **more):
    return Row(way, way.upper(), [run((0.0, 0.0, 0, 2.0), *[(2.0, 4.0, steps, loss)] * 3) for loss in losses], **more)


def comparison(*rows, finalists=None, link=LOOPBACK):
    finalists = [each.way for each in rows] if finalists is None else finalists
    return Comparison(list(rows), finalists, 2.0, 100, 2, 32, False, link)


def test_a_report_is_one_html_file_with_the_figures_of_the_table(tmp_path):
    found = comparison(row("a", 0.5, 0.6, 0.4), row("<b>", 0.7, 0.8, 0.6), Row("c", "C", failure="no such <thing>"))
    found.html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    shown = (found.verdict, "C: failed, no such &lt;thing&gt;", "<td>0.5000</td>", "<td>0.7000</td>")
    assert [word for word in shown if word not in text] == []
    assert "<B>" not in text
    assert (text.count("<svg"), text.count("<path")) == (2, 12)  # two plots of two ways with three runs
    assert not [word for word in ("http:", "https:", "src=", "@import", "<script") if word in text]


def test_the_strategy_that_is_ahead_in_every_run_is_the_best():
    found = comparison(row("a", 0.5, 0.6, 0.4), row("b", 0.7, 0.8, 0.6), Row("c", "C", failure="no such thing"))
    assert found.best == "a"
    assert found.verdict == "fastest: A"
    assert "C: failed, no such thing" in found.table()
    head = found.table().splitlines()[0].strip()
    assert [each for each in head.split("  ") if each] == [
        *("loss", "runs", "steps a run", "MB a run", "s to 0.8", "MB to 0.8", "ms a step", "MB a step")
    ]
    (cells,) = [line.split() for line in found.table().splitlines() if line.startswith("A ")]
    assert cells[2:5] == ["3", "30", "4.00"]


def test_a_difference_within_noise_has_no_winner():
    behind_once = comparison(row("a", 0.5, 0.6, 0.4), row("b", 0.49, 0.9, 0.8))
    wide = comparison(row("a", 0.5, 0.6, 0.4), row("b", 0.501, 0.602, 0.9))
    for found in (behind_once, wide):
        assert found.best is None
        assert found.leaders == ["a", "b"]
        assert found.verdict == "no difference beyond noise between A and B"


def test_strategies_that_left_before_the_final_do_not_win():
    found = comparison(row("a", 0.5, 0.6), row("b", 0.1), finalists=["a"])
    assert found.best == "a"
    assert "0.1000*" in found.table()


def test_a_way_with_too_few_steps_has_no_part_in_the_verdict():
    short = row("a", 0.1, 0.1, steps=1)
    found = comparison(short, row("b", 0.5, 0.6), row("c", 0.7, 0.8))
    assert (found.best, found.verdict) == ("b", "fastest of the measured ways: B")
    assert "A: not measured: 1 step; at least 20 are needed, which take about 40 s a run" in found.table()
    assert [line.split()[1:3] for line in found.table().splitlines() if line.startswith("A ")] == [["not", "measured"]]
    assert "0.1000" not in found.table()
    assert comparison(short, row("b", 0.5, 0.6)).verdict == "no verdict: only B was measured"
    alone = comparison(short)
    assert (alone.best, alone.leaders) == (None, [])
    assert "nan" not in alone.table()
    assert alone.verdict.startswith("no verdict: A not measured: 1 step; at least 20 are needed")
    assert not row("a", 0.1, steps=47, least=48).is_measured
    assert row("a", 0.1, steps=48, least=48).shortage == Row("c", "C", failure="no such thing").shortage == ""


def test_the_link_is_named_and_a_way_that_beats_the_defaults_is_reported():
    rows = (row("a", 0.4, 0.5, agrees=True), row("b", 0.3, 0.4), row("rankdad", 0.6, 0.7, agrees=True))
    found = comparison(*rows, link="the link between the sites (hosts: a, b)")
    assert found.faster_than_defaults == ["a"]  # b does not exchange gradients in every step
    lines = found.table().splitlines()
    assert "Measured over the link between the sites (hosts: a, b)." in lines
    assert "Faster than the defaults of rankdad: A. This is a defect of the defaults: please report it." in lines
    near = comparison(*rows)
    assert "Measured over loopback: not your link." in near.table()
    assert near.faster_than_defaults == []
    assert comparison(*rows[:2], link="a link").faster_than_defaults == []
    assert "defect" not in near.table() + comparison(rows[2], row("d", 0.8, 0.9, agrees=True), link="a link").table()


def test_seconds_to_a_loss_are_interpolated_between_evaluations():
    found = Row("a", "A", [run((0.0, 0.0, 0, 2.0), (1.0, 10.0, 5, 1.0), (3.0, 30.0, 15, 0.5))])
    assert found.seconds_to(1.5) == 0.5
    assert found.megabytes_to(0.75) == 20.0
    assert found.seconds_to(2.5) == 0.0
    assert found.seconds_to(0.4) == float("inf")
    assert found.step_seconds == 0.2
    assert found.megabytes_a_step == 2.0
    assert found.loss == pytest.approx(3.5 / 3)


# Tasks


def test_batches_of_the_processes_share_no_sample_and_leave_the_held_out_ones():
    data = TensorDataset(torch.arange(103.0), torch.arange(103.0))
    task = Task.create(build, data, None, 10, 2, dealt=True)
    seen = []
    for rank in range(2):
        batches = task.batches(rank, 2, seed=3)
        own = torch.cat([next(batches)[0] for _ in range(4)])
        assert torch.equal(own, torch.cat([each for each, _ in zip_first(task.batches(rank, 2, seed=3), 4)]))
        seen += own.tolist()
    held_out = [float(task.held_out[index][0]) for index in range(len(task.held_out))]
    assert len(set(seen)) == len(seen) == 80
    assert len(held_out) == 10
    assert not set(held_out) & set(seen)


def zip_first(batches, count):
    return [next(batches) for _ in range(count)]


def test_evaluation_leaves_no_trace():
    model, _, criterion = build()
    model.insert(1, nn.BatchNorm1d(32))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.random.get_rng_state()
    data = samples(400)
    task = Task.create(build, data, None, 8, 1, dealt=True)
    loss = task.evaluate(model, criterion)
    inputs, targets = (torch.stack(column) for column in zip(*[task.held_out[i] for i in range(40)], strict=True))
    expected = criterion(model.eval()(inputs), targets)
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    task.evaluate(model, criterion)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, samples(64), None, 8, 2), TypeError, "build must be a function"),
        ((build, samples(64), None, 0, 2), ValueError, "batch_size must be a whole number of at least 1, got 0"),
        ((build, samples(64), None, 32, 2), ValueError, "29 samples to train on, fewer than a batch of 32"),
        ((build, samples(0), None, 32, 2), ValueError, "0 samples to train on"),
        ((build, iter([1]), None, 8, 2), TypeError, "draws samples by number|drawn by number"),
        ((build, ["text"] * 64, None, 8, 2), TypeError, "samples must be tuples of inputs and a target"),
        ((build, [{"x": 1.0, "y": 1}] * 64, None, 8, 2), TypeError, "samples must be tuples of inputs and a target"),
        ((build, [(1.0,)] * 64, None, 8, 2), TypeError, "samples must be tuples of inputs and a target"),
    ],
)
def test_tasks_that_cannot_be_compared_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Task.create(*arguments, dealt=True)
    assert MAX_HELD_OUT == 1000


def test_wrong_arguments_are_refused_before_anything_runs():
    for options, message in [
        *(({"seconds": wrong}, "seconds must be a positive number") for wrong in (0, math.inf, math.nan, "60")),
        ({"seeds": 1}, "at least 2"),
        ({"processes": 0}, "at least 1"),
        ({"ways": ["nonsense"]}, "unknown way to train 'nonsense'; valid ones are alone, threads, ddp, dad"),
        ({"ways": ["dad"], "processes": 1}, "'dad' has nothing to compare with 1 processes here"),
    ]:
        with pytest.raises(ValueError, match=message):
            dadplug.compare(build, samples(), **options)
    with pytest.raises(ValueError, match="at the top level of a module"):
        dadplug.compare(lambda: build(), samples(), ways=["alone"], processes=2)


def test_the_seconds_are_those_of_each_way_and_ways_with_too_few_steps_leave_early():
    seconds, losses = {}, {"ddp": 0.1, "dad": 0.2, "rank4": 0.3, "rank32": 0.4, "rankdad": 0.5, "server": 0.0}

    def train(name, length, seed):
        seconds.setdefault(name, []).append(length)
        return run((0.0, 0.0, 0, 2.0), (length, 1.0, 1 if name == "server" else 30, losses[name]))

    trials = _Trials(list(losses), 20.0, 3, shown=False)
    trials.run(train)
    assert trials.finalists == ["ddp", "dad", "rank4", "rankdad"]  # the defaults are in each final
    assert seconds == {name: [5.0] * (4 if name in trials.finalists else 1) for name in losses}
    assert [each.way for each in trials.rows()] == [*trials.finalists, "rank32", "server"]
    seconds.clear()
    pair = _Trials(["rankdad", "server"], 18.0, 3, shown=False)
    pair.run(train)
    assert seconds == {"rankdad": [6.0] * 3, "server": [6.0]}
    assert [each.way for each in pair.rows() if each.is_measured] == ["rankdad"]


@pytest.mark.parametrize(("step", "warm_up", "steps"), [(0.01, WARM_UP, 600), (0.5, WARM_UP, 12), (8.0, 2, 1)])
def test_a_run_takes_its_time_with_slow_steps_too(monkeypatch, step, warm_up, steps):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def train(count):
        with clock.timed(count):
            now[0] += count * step

    clock = _Clock(6.0)
    while clock.next_warm_up():
        train(1)
    assert clock.steps == warm_up
    clock.begin(evaluation=0.0)
    laps = 0
    while count := clock.next_lap():
        train(count)
        laps += 1
    assert clock.steps == steps
    assert abs(clock.seconds - 6.0) <= step / 2
    slow = _Clock(6.0)
    slow.begin(evaluation=100.0)
    assert (slow.laps, clock.laps) == (3, 10)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_reason_of_a_failed_run_is_shown_at_once(capsys):
    def fail(name, seconds, seed):
        raise RunFailedError("process 0: it has no memory")

    _Trials(["dad"], 1.0, 2, shown=True).run(fail)
    assert "run 1 of 2: dad: failed, process 0: it has no memory\n" in capsys.readouterr().err


def test_progress_is_a_bar_in_a_terminal_and_lines_in_a_log():
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        progress = ProgressBar(4.0, stream=stream)
        for number, label in enumerate(("DDP", "dad")):
            with progress.span(2.0 * number, 2.0, f"run {number + 1} of 2: {label}"):
                pass
            progress.report(f"run {number + 1} of 2: {label}: loss 0.5")
    assert log.getvalue() == "run 1 of 2: DDP: loss 0.5\nrun 2 of 2: dad: loss 0.5\n"
    lines = [line.split("\r\033[K")[-1] for line in terminal.getvalue().rstrip("\n").split("\n")]
    assert lines == log.getvalue().splitlines()
    bars = [part for part in terminal.getvalue().split("\r\033[K") if part.startswith("[")]
    assert bars[0].endswith("run 1 of 2: DDP")
    assert [bar.count("#") for bar in bars] == sorted(bar.count("#") for bar in bars)
    silent = ProgressBar(4.0, stream=(stream := Terminal()), shown=False)
    with silent.span(0.0, 1.0, "DDP"):
        silent.show("DDP")
    silent.report("DDP")
    assert not stream.getvalue()


# Processes of this machine


def answers(shared, rank, count, action):
    if action == "fail" and rank == 1:
        raise ValueError("this process cannot")
    if action == "die" and rank == 0:
        os._exit(3)
    value = torch.tensor([float(rank + 1)])
    if count > 1:
        torch.distributed.all_reduce(value)
    return shared, rank, float(value), torch.get_num_threads()


@pytest.mark.slow
def test_a_pool_goes_on_after_a_failed_run():
    with Pool("shared") as pool:
        assert pool.run(answers, 2, 1, "") == [("shared", 0, 3.0, 1), ("shared", 1, 3.0, 1)]
        assert pool.run(answers, 1, 2, "") == [("shared", 0, 1.0, 2)]
        with pytest.raises(RunFailedError, match="process 0: it has ended with status 3"):
            pool.run(answers, 1, 1, "die")
        assert pool.run(answers, 1, 1, "") == [("shared", 0, 1.0, 1)]
    with pytest.raises(ValueError, match="top level of a module"):
        Pool(lambda: None)
    assert pickle.loads(pickle.dumps(build)) is build


# A link of its own


def test_a_link_is_a_rate_and_a_round_trip(monkeypatch):
    monkeypatch.setattr(links.os, "geteuid", lambda: 0)
    monkeypatch.setattr(links.sys, "platform", "linux")
    link = links.Link.parse("2.5Mbit, 60ms")
    assert (link.rate, link.round_trip) == (2.5e6, 0.06)
    assert links.Link.parse("1gbit,0ms").round_trip == 0.0
    for text in ("20mbit", "20,60", "0mbit,60ms", "20mbit,60ms,1", "1.2.3mbit,60ms", ""):
        with pytest.raises(ValueError, match="a rate and a round trip, such as 20mbit,60ms"):
            links.Link.parse(text)
    refuses(
        (
            lambda: dadplug.compare(build, samples(), link="20mbit,60ms", processes=1),
            "processes must be a whole number of at least 2, got 1",
        ),
        (
            lambda: dadplug.compare(build, samples(), link="20mbit,60ms", processes=2, ways=["hogwild"]),
            "'Hogwild!' has nothing to compare",
        ),
    )
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match="needs network namespaces of Linux, and root"):
        dadplug.compare(build, samples(), link="20mbit,60ms")


def test_on_a_link_each_process_is_a_site():
    place = Place(2, 1, connected=False, link=links.Link("", 1e6, 0.0))
    names = [name for name, strategy in STRATEGIES.items() if strategy.applies(place)]
    assert {"threads", "hogwild"}.isdisjoint(names)
    assert {(STRATEGIES[name].processes(place), STRATEGIES[name].threads(place)) for name in names} == {(2, 1)}


def test_a_relay_gives_each_site_the_rate_in_both_directions_and_drops_what_waits_too_long(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    relay = links.Relay(links.Link("", 8e3, 2.0))  # a byte takes a millisecond
    relay._devices = {0: -1, 1: -1, 2: -1}
    assert relay._due(0, 1, 100) == pytest.approx(1.1)
    assert relay._due(0, 2, 100) == pytest.approx(1.2)  # site 0 sends one packet after the other
    assert relay._due(2, 1, 100) == pytest.approx(1.2)  # and site 1 receives so
    assert relay._due(0, 3, 100) is None
    assert relay._due(0, 1, 100) == pytest.approx(1.3)
    assert relay._due(0, 1, 200) == pytest.approx(1.5)
    assert relay._due(0, 1, 100) is None  # after half a second


def may_link():
    try:
        links.Link.parse("1gbit,1ms")
    except ValueError:
        return False
    return True


def nodes(shared, rank, count):
    value = torch.full((5000,), float(rank + 1))
    torch.distributed.all_reduce(value)
    return float(value.sum()), own_node()


@pytest.mark.slow
@pytest.mark.skipif(not may_link(), reason="links need root")
def test_processes_on_a_link_of_their_own_have_no_other():
    try:
        with Pool("shared", links.Link.parse("100mbit,2ms")) as pool:
            (first, one), (second, other) = pool.run(nodes, 2, 1)
    except ValueError as error:  # root in a container without the right to make namespaces
        pytest.skip(str(error))
    assert first == second == 15000.0
    assert len({one, other, own_node()}) == 3
    assert not [each for each in threading.enumerate() if isinstance(each, links.Relay)]


@pytest.mark.slow
def test_a_comparison_on_this_machine_by_the_command(tmp_path):
    (tmp_path / "task.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset

        def build():
            model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
            return model, torch.optim.Adam(model.parameters(), 1e-2), nn.CrossEntropyLoss()

        def dataset():
            inputs = torch.randn(512, 12, generator=torch.Generator().manual_seed(1))
            return TensorDataset(inputs, (inputs[:, :3].sum(1) > 0).long())
        """)
    )
    program = ["-m", "dadplug", "compare", "task.py:build"]
    options = [
        "--seconds=1",
        "--processes=2",
        "--ways=alone,ddp,hogwild",
        "--picture=comparison.png",
        "--html=report.html",
    ]
    commands = [[*program, "task.py:dataset", *options], [*program, "task.py:missing"]]
    commands += [[*program, "digits", "--ways=none"], [*program, "task.py:dataset", "--data-dir=photos"]]
    commands += [
        [*program, "digits", "--picture=none/loss.png"],
        [*program, "digits", "--picture=loss.txt"],
    ]
    found, wrong, embedded, folder, nowhere, text = support.run_programs(commands, folder=tmp_path)
    assert found.status == 0, found.errors
    lines = found.output.splitlines()
    labels = [line.split("  ")[0] for line in lines[2:5]]
    assert sorted(labels) == ["DDP", "Hogwild!", "alone, 1 thread"]
    assert "Measured over loopback: not your link." in lines
    verdict = lines[-3]  # on a busy machine a way may have too few steps
    assert verdict.startswith(("fastest", "no difference beyond noise between ", "no verdict: "))
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert verdict in (tmp_path / "report.html").read_text()
    assert "Exception" not in found.errors
    assert (wrong.status, wrong.errors) == (1, "error: task.py has no missing\n")
    assert embedded.errors.startswith("error: unknown way to train 'none'")
    assert folder.errors.startswith("error: --data-dir is for a data set of ")
    assert "there is no folder 'none' that may be written to" in nowhere.errors  # before any run
    assert "'loss.txt' should end in .png" in text.errors
    assert nowhere.status == text.status == 2


def test_a_place_between_sites_is_given_in_full():
    for flags in (["--rank=0"], ["--rank=1", "--num-nodes=2"], ["--dist-url=tcp://127.0.0.1:1"]):
        (wrong,) = support.run_programs([["-m", "dadplug", "compare", "dadplug:compare", "digits", *flags]])
        assert (wrong.status, "--num-nodes" in wrong.errors) == (1, True), flags


# Connected sites


def climb(model, optimizer):
    """Train so that the loss becomes larger."""

    def step():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.003 * parameter.grad.sign()

    return Trainer(model, optimizer, step)


def compares_between_sites():
    known = dict(STRATEGIES)
    STRATEGIES.register("ascent")(Strategy("ascent", climb))
    for name, strategy in STRATEGIES.items():
        STRATEGIES[name] = dataclasses.replace(strategy, least=1)  # on a busy machine there are few
    try:
        alone = "alone" if torch.get_num_threads() == 1 else "threads"
        ways = [alone, "diloco", "dad", "server", "ascent"]
        found = dadplug.compare(build, samples(), 1.0, ways=ways, seeds=2, progress=False)
        failed = dadplug.compare(build_for_no_way, samples(), 0.2, ways=["dad"], progress=False)
    finally:
        del STRATEGIES["ascent"]
        STRATEGIES.update(known)
    rows = {each.way: each for each in found.rows}
    for name in ("diloco", "dad", "server"):
        assert rows[name].megabytes_a_step > 0
        for points in rows[name].runs:
            assert points[0].steps == 0
            assert min(each.loss for each in points) < points[0].loss  # the last ones may overfit
            assert [p.steps for p in points] == sorted(p.steps for p in points)
            assert points[-1].seconds > 0
    assert rows["ascent"].megabytes_a_step == 0
    assert rows["ascent"].runs[0][-1].loss > rows["ascent"].runs[0][0].loss
    assert "ascent" not in found.finalists
    assert len(found.finalists) == 3
    assert found.connected
    assert found.link == LOOPBACK
    assert found.processes == 2
    assert failed.rows[0].failure == "ValueError: this model trains alone"
    assert failed.best is None
    assert failed.verdict == "no way could be compared"
    return [(each.way, each.losses) for each in found.rows]


def test_connected_sites_are_compared_over_their_link(sites):
    random.seed(0)
    first, second = sites(2).run(compares_between_sites)
    assert first == second
    assert Place(2, 2, connected=True) != Place(2, 2, connected=False)
