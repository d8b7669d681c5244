"""Training by one call, elapsed times and charts."""

from __future__ import annotations

from pathlib import Path

import hogwild_training as training
import pytest
import support
import torch
from forkserver import TRAINERS
from torch import nn
from torch.utils.data import DataLoader

from dadplug.hogwild import chart_losses, log_elapsed_time, train_model


def loader() -> DataLoader:
    return DataLoader(training.pairs(), batch_size=training.BATCH, shuffle=True)


def experiment() -> None:
    by_processes = {}
    for processes, epochs in ((1, 4), (2, 2), (4, 1)):
        model = training.network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        tracker = [9.0]
        losses = train_model(
            model,
            loader(),
            processes,
            epochs,
            optimizer,
            log_interval=5,
            loss_tracker=tracker,
            test_dataloader=loader(),
        )
        assert losses is tracker
        assert losses.pop(0) == 9.0
        assert len(losses) == 4 * training.BATCHES  # as many samples in each configuration
        assert sum(losses[-12:]) < 0.8 * sum(losses[:12])
        by_processes[processes] = losses
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    torch.manual_seed(42)
    expected = []
    for _ in range(4):
        for inputs, targets in loader():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert by_processes[1] == pytest.approx(expected, rel=1e-3)  # on another number of threads
    print("no logs")
    train_model(model, loader(), 2, 1, optimizer, log_interval=-1)


def test_train_model():
    lines, _, rest = training.run_here(__file__, "experiment").partition("no logs\n")
    assert not rest
    assert lines.count("test data: average loss") == 3
    assert "process 0 (pid" in lines
    assert "of 90 (" in lines


def test_wrong_arguments():
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for arguments, message in (
        ({"device": "cuda"}, "device must be 'cpu', got 'cuda'"),
        ({"num_processes": 0}, "num_processes must be a whole number"),
        ({"epochs_per_process": 1.5}, "epochs_per_process must be a whole number"),
        ({"log_interval": 0}, "or -1 for no logs"),
    ):
        given = {"num_processes": 1, "epochs_per_process": 1} | arguments
        with pytest.raises(ValueError, match=message):
            train_model(model, loader(), optimizer=optimizer, **given)


def test_times_and_charts(capsys, tmp_path):
    log_elapsed_time(4, 1, 2.0, 12.5)
    log_elapsed_time(1, 4, 0.0, 1.0)
    assert capsys.readouterr().out == (
        "Elapsed time for 4 processes x 1 epoch: 10.50 s\nElapsed time for 1 process x 4 epochs: 1.00 s\n"
    )
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    losses = {"1 process x 4 epochs": [2.0, 1.0, 0.5], "4 processes x 1 epoch": [2.0, 1.5]}
    figure = chart_losses(losses, path=tmp_path / "chart.png")
    (axes,) = figure.axes
    assert axes.get_title() == "Comparing Training Losses Across Configurations"
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert curves == {
        "1 process x 4 epochs": ([1, 2, 3], [2.0, 1.0, 0.5]),
        "4 processes x 1 epoch": ([1, 2], [2.0, 1.5]),
    }
    assert (tmp_path / "chart.png").stat().st_size > 1000
    assert chart_losses(losses, "Mine", path=tmp_path / "chart.png").axes[0].get_title() == "Mine"
    with pytest.raises(ValueError, match="no losses"):
        chart_losses({})


def test_the_example(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    example = Path(__file__).resolve().parents[2] / "examples" / "hogwild.py"
    (program,) = support.run_programs(
        [[str(example), "--samples", "128", "--chart", "chart.png"]], folder=tmp_path, timeout=240, preload=TRAINERS
    )
    assert program.status == 0, program.output + program.errors
    for words in ("1 process x 4 epochs", "4 processes x 1 epoch", "2 processes x 2 epochs"):
        assert f"Elapsed time for {words}: " in program.output
    assert program.output.count("test data: average loss") == 3
    assert (tmp_path / "chart.png").stat().st_size > 1000
