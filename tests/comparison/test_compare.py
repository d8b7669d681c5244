import io
import os
import pickle
import random
import textwrap

import pytest
import support
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dadplug
from dadplug.errors import RunFailedError
from dadplug.support.progress import ProgressBar
from dadplug.tools.comparison import STRATEGIES, Comparison, Place, Row, Strategy, _Trials
from dadplug.tools.comparison.pool import Pool
from dadplug.tools.comparison.trial import MAX_HELD_OUT, Point, Task, Trainer


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


def row(way, *losses):
    return Row(way, way.upper(), [run((0.0, 0.0, 0, 2.0), *[(2.0, 4.0, 10, loss)] * 3) for loss in losses])


def comparison(*rows, finalists=None):
    finalists = [each.way for each in rows] if finalists is None else finalists
    return Comparison(list(rows), finalists, 2.0, 100, 2, 32, False)


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
        *("loss", "runs", "s to 0.8", "MB to 0.8", "ms a step", "MB a step")
    ]


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
        ((build, iter([1]), None, 8, 2), TypeError, "draws samples by number|drawn by number"),
    ],
)
def test_tasks_that_cannot_be_compared_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Task.create(*arguments, dealt=True)
    assert MAX_HELD_OUT == 1000


def test_wrong_arguments_are_refused_before_anything_runs():
    for options, message in [
        ({"seconds": 0}, "seconds must be above 0"),
        ({"seeds": 1}, "at least 2"),
        ({"processes": 0}, "at least 1"),
        ({"ways": ["nonsense"]}, "unknown way to train 'nonsense'; valid ones are alone, threads, ddp, dad"),
        ({"ways": ["dad"], "processes": 1}, "'dad' has nothing to compare with 1 processes here"),
    ]:
        with pytest.raises(ValueError, match=message):
            dadplug.compare(build, samples(), **options)
    with pytest.raises(ValueError, match="at the top level of a module"):
        dadplug.compare(lambda: build(), samples(), ways=["alone"], processes=2)


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
        "--seconds=2",
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
    assert lines[6].startswith(("fastest: ", "no difference beyond noise between "))
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert lines[6] in (tmp_path / "report.html").read_text()
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
    STRATEGIES.register("ascent")(Strategy("ascent", climb))
    try:
        alone = "alone" if torch.get_num_threads() == 1 else "threads"
        ways = [alone, "diloco", "dad", "server", "ascent"]
        found = dadplug.compare(build, samples(), 2.0, ways=ways, seeds=2, progress=False)
        failed = dadplug.compare(build_for_no_way, samples(), 0.2, ways=["dad"], progress=False)
    finally:
        del STRATEGIES["ascent"]
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
