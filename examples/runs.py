"""Runs of the examples: their progress while they train, and a table and a picture of several."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class RunProgress:
    """Progress of one run.

    If standard error is a terminal, it is a tqdm bar with the run's values as its postfix. Otherwise, as in a file or
    where tqdm is not installed, one line is printed to standard output after each epoch.

    Args:
        name: name of the run, the bar's description.
        epochs: number of epochs.
        steps: number of steps in an epoch.
        shown: whether this process shows the progress; of several sites only one should.

    Example:
        >>> progress = RunProgress("rankdad", epochs=10, steps=len(loader))
        >>> for epoch in range(10):
        ...     for inputs, targets in loader:
        ...         progress.step(loss=f"{train(inputs, targets):.4f}")
        ...     progress.end_epoch(accuracy=f"{evaluate():.4f}")
        >>> progress.close()
    """

    def __init__(self, name: str, epochs: int, steps: int, *, shown: bool = True) -> None:
        self.name, self.epochs, self.steps = name, epochs, steps
        self._shown = shown
        self._epoch = 0
        self._values: dict[str, str] = {}
        self._bar = _terminal_bar(name, epochs * steps) if shown else None

    def step(self, **values: str) -> None:
        """Advance by a step.

        Args:
            values: new values of the run, as text; the others remain.
        """
        self._values.update(values)
        if self._bar is not None:
            self._bar.set_postfix(self._postfix(min(self._epoch + 1, self.epochs)), refresh=False)
            self._bar.update()

    def end_epoch(self, **values: str) -> None:
        """End an epoch, whatever the number of steps that it has had.

        Args:
            values: new values of the run, as text; the others remain.
        """
        self._values.update(values)
        self._epoch += 1
        if self._bar is not None:
            self._bar.n = self._epoch * self.steps
            self._bar.set_postfix(self._postfix(self._epoch))
        elif self._shown:
            text = ", ".join(f"{name}={value}" for name, value in self._values.items())
            print(f"{self.name}: epoch {self._epoch}/{self.epochs}, {text}", flush=True)

    def close(self) -> None:
        """Leave the bar as it is, and the cursor in the next line."""
        if self._bar is not None:
            self._bar.close()

    def _postfix(self, epoch: int) -> dict[str, str]:
        return {"epoch": f"{epoch}/{self.epochs}", **self._values}


def _terminal_bar(name: str, total: int) -> Any:
    """Return a tqdm bar, or None if there is no terminal or no tqdm."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=name, unit="step", dynamic_ncols=True)


@dataclass(frozen=True)
class RunRecord:
    """Results of one run.

    Attributes:
        mode: name of the method.
        losses: training loss by step, the mean over all sites.
        bytes_sent: total payload bytes that a site had sent after each step.
        accuracies: accuracy on held-out samples after each epoch, from 0 to 1.
        bytes_a_step: payload bytes that a site sends per step.
        dense_bytes: payload bytes per step if every gradient were all-reduced.
        step_seconds: median time of a step, in seconds.
        replicas_equal: whether the sites' parameters were bitwise equal at the end.
    """

    mode: str
    losses: Sequence[float]
    bytes_sent: Sequence[int]
    accuracies: Sequence[float]
    bytes_a_step: int
    dense_bytes: int
    step_seconds: float
    replicas_equal: bool

    @property
    def accuracy(self) -> float:
        """Accuracy after the last epoch."""
        return self.accuracies[-1]


def table(runs: Sequence[RunRecord]) -> str:
    """Format runs as a table, one run per line."""
    head = ("mode", "accuracy", "loss", "bytes a step", "fewer than dense", "ms a step", "replicas")
    lines = [head]
    for run in runs:
        lines.append(
            (
                run.mode,
                f"{run.accuracy:.4f}",
                f"{_smooth(run.losses)[-1]:.4f}",
                f"{run.bytes_a_step:,}",
                f"{run.dense_bytes / max(run.bytes_a_step, 1):.1f} x",
                f"{1e3 * run.step_seconds:.1f}",
                "equal" if run.replicas_equal else "DIFFERENT",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rows = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def seconds_on_links(runs: Sequence[RunRecord]) -> str:
    """Say how long the bytes of a step take on slow links, of all-reduced gradients, as DDP's, and of the runs."""
    sent = {"DDP": runs[0].dense_bytes} | {run.mode: run.bytes_a_step for run in runs}
    lines = [
        f"  {name}: {size / 1e6:.2f} MB, {8 * size / 10e6:.2g} s at 10 Mbit/s, {8 * size / 100e6:.2g} s at 100 Mbit/s"
        for name, size in sent.items()
    ]
    return "\n".join(["What a step sends, and how long that takes on slow links (bytes over rate):", *lines])


def picture(runs: Sequence[RunRecord], path: str | Path, title: str) -> None:
    """Plot the loss against steps, and against megabytes sent, as a PNG file.

    Args:
        runs: results of the runs.
        path: path of the PNG file.
        title: title of the plot.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'dadplug[examples]'") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    styles = ("-", "--", ":", "-.")
    for place, run in enumerate(runs):
        style = {"linestyle": styles[place % len(styles)], "linewidth": 2.2 - 0.3 * (place % 4), "label": run.mode}
        losses = _smooth(run.losses)
        by_step.plot(range(1, len(losses) + 1), losses, **style)
        by_bytes.plot([sent / 1e6 for sent in run.bytes_sent], losses, **style)
    by_step.set(xlabel="step", ylabel="training loss (mean over sites, smoothed)", yscale="log")
    by_bytes.set(xlabel="megabytes sent by a site", xscale="log")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _smooth(losses: Sequence[float], memory: float = 0.9) -> list[float]:
    """Return exponential moving averages with bias correction."""
    smoothed, mean, weight = [], 0.0, 0.0
    for loss in losses:
        mean, weight = memory * mean + (1 - memory) * loss, memory * weight + (1 - memory)
        smoothed.append(mean / weight)
    return smoothed
