"""Result of a comparison: a row for each strategy, a table, a picture, one HTML file, and the fastest strategy."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...support.logs import table
from ...support.progress import new_figure, report_page
from .trial import DEFAULTS, LEAST_STEPS, Point

# The HTML file

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 280, 52, 36  # of a plot, in its own units
_COLOURS = ("#3b7dd8", "#d9822b", "#2e9e5b", "#c8443f", "#8a63c9", "#8c6d5a", "#d667ab", "#808890")


def page(
    runs: Mapping[str, Sequence[Sequence[Point]]], title: str, cells: Sequence[Sequence[str]], notes: Sequence[str]
) -> str:
    """Format a report.

    Args:
        runs: runs of each way by its label, which are plotted.
        title: heading, the verdict.
        cells: the table, its head first.
        notes: sentences below the table.
    """
    key = "".join(
        f'<span><b style="color:{_COLOURS[number % len(_COLOURS)]}">&#9632;</b> {html.escape(label)}</span>'
        for number, label in enumerate(runs)
    )
    plots = _plot(runs, "seconds of training", lambda point: point.seconds)
    if any(run[-1].megabytes > 0 for each in runs.values() for run in each):
        plots += _plot(runs, "megabytes sent by a process", lambda point: point.megabytes)
    above = f'<div class="plots">{plots}</div>\n<div class="key">{key}</div>'
    return report_page(title, cells, notes, above=above)


def _plot(runs: Mapping[str, Sequence[Sequence[Point]]], label: str, axis: Callable[[Point], float]) -> str:
    """Draw the held-out loss against a quantity as SVG, a line for each run, of its finite points."""
    lines = [
        (number, [(axis(point), point.loss) for point in run if math.isfinite(point.loss)])
        for number, each in enumerate(runs.values())
        for run in each
    ]
    points = [point for _, line in lines for point in line]
    if not points:
        return ""
    right = max(x for x, _ in points) or 1.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    high = high if high > low else low + 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / right * (_WIDTH - _LEFT - 12)
        return across, 12 + (high - y) / (high - low) * (_HEIGHT - _BOTTOM - 12)

    parts = []
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(part * right, low + part * (high - low))
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{low + part * (high - low):.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{part * right:.3g}</text>')
    for number, line in lines:
        steps = " L".join("{:.1f} {:.1f}".format(*place(*point)) for point in line)
        parts.append(f'<path stroke="{_COLOURS[number % len(_COLOURS)]}" d="M{steps}"/>')
    parts.append(f'<text x="{(_WIDTH + _LEFT) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{label}</text>')
    name = html.escape(f"Held-out loss against {label}")
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


# The result

LOOPBACK = "loopback: not your link"
_CONFIDENT = 2.0  # standard errors by which a way has to be ahead


@dataclass(frozen=True)
class Row:
    """Results of one way.

    Attributes:
        way: name of the way in the registry.
        label: its name in tables and pictures.
        runs: its runs, by seed; empty if it failed.
        failure: why it failed; empty if it did not.
        least: steps that a run needs for its loss to be compared.
        agrees: whether it exchanges gradients in every step.
    """

    way: str
    label: str
    runs: Sequence[Sequence[Point]] = ()
    failure: str = ""
    least: int = LEAST_STEPS
    agrees: bool = False

    @property
    def steps(self) -> int:
        """Number of steps of its shortest run; 0 if the way failed."""
        return min((run[-1].steps for run in self.runs), default=0)

    @property
    def is_measured(self) -> bool:
        """Whether each run has enough steps for its loss to be compared."""
        return bool(self.runs) and self.steps >= self.least

    @property
    def shortage(self) -> str:
        """Reason why its loss is not compared, such as "not measured: 1 step; ..."; empty if it is, or has failed."""
        if self.is_measured or not self.runs:
            return ""
        found = f"not measured: {self.steps} step{'' if self.steps == 1 else 's'}; at least {self.least} are needed"
        return f"{found}, which take about {self.least * self.step_seconds:.2g} s a run"

    @property
    def losses(self) -> list[float]:
        """Held-out loss at the end of each run, the mean of its last three evaluations."""
        return [statistics.fmean(point.loss for point in run[-3:]) for run in self.runs]

    @property
    def loss(self) -> float:
        """Mean held-out loss at the end of the runs; NaN if the way failed."""
        return statistics.fmean(self.losses) if self.runs else math.nan

    @property
    def step_seconds(self) -> float:
        """Mean time of a step, in seconds."""
        return _ratio([run[-1].seconds for run in self.runs], [run[-1].steps for run in self.runs])

    @property
    def megabytes_a_step(self) -> float:
        """Payload megabytes that a process sends in a step."""
        return _ratio([run[-1].megabytes for run in self.runs], [run[-1].steps for run in self.runs])

    def seconds_to(self, loss: float) -> float:
        """Return the mean time until a run's held-out loss is at a value or below, in seconds; Inf if one never is.

        Args:
            loss: the value.
        """
        return self._until(loss, "seconds")

    def megabytes_to(self, loss: float) -> float:
        """Return the mean payload until then, in megabytes.

        Args:
            loss: the value.
        """
        return self._until(loss, "megabytes")

    def _until(self, loss: float, axis: str) -> float:
        return statistics.fmean(_crossing(run, loss, axis) for run in self.runs) if self.runs else math.inf


def _ratio(values: list[float], counts: list[int]) -> float:
    return sum(values) / sum(counts) if sum(counts) else math.nan


def _crossing(run: Sequence[Point], loss: float, axis: str) -> float:
    """Return seconds or megabytes at which a run's loss first reaches a value, interpolated between laps."""
    before = run[0]
    if before.loss <= loss:
        return 0.0
    for point in run[1:]:
        if point.loss <= loss:
            part = (before.loss - loss) / (before.loss - point.loss)
            start, end = getattr(before, axis), getattr(point, axis)
            return float(start + part * (end - start))
        before = point
    return math.inf


@dataclass(frozen=True)
class Comparison:
    """Result of `dadplug.compare`.

    Attributes:
        rows: a row for each way: first those of the final by their loss, then the others, those that were not measured,
            and those that failed.
        finalists: names of the ways that ran in the final, with as many seeds.
        seconds: training time of each run.
        held_out: number of held-out samples.
        processes: number of processes, or connected sites.
        batch_size: samples in a batch of each process.
        connected: whether the processes were sites that the user had connected.
        link: the link between them, in words.
    """

    rows: list[Row] = field(repr=False)
    finalists: list[str]
    seconds: float
    held_out: int
    processes: int
    batch_size: int
    connected: bool
    link: str = LOOPBACK

    @property
    def best(self) -> str | None:
        """Name of the way with the lowest held-out loss after the same time; None if no difference exceeds noise.

        It has to be ahead of every other finalist by two standard errors of the differences between runs of the same
        seed, and in each of these runs.
        """
        return self.leaders[0] if len(self.leaders) == 1 else None

    @property
    def leaders(self) -> list[str]:
        """Names of the finalists from which the first does not differ beyond noise, itself included."""
        final = self._final
        return [row.way for row in final if row is final[0] or not _ahead(final[0].losses, row.losses)]

    @property
    def verdict(self) -> str:
        """One sentence: the winner, or that there is none."""
        labels = {row.way: row.label for row in self.rows}
        short = [row for row in self.rows if row.shortage]
        names = " and ".join(labels[way] for way in self.leaders)
        if not names:
            return f"no verdict: {short[0].label} {short[0].shortage}" if short else "no way could be compared"
        if short and sum(row.is_measured for row in self.rows) == 1:
            return f"no verdict: only {names} was measured"
        measured = " of the measured ways" if short else ""
        return f"no difference beyond noise between {names}" if self.best is None else f"fastest{measured}: {names}"

    @property
    def faster_than_defaults(self) -> list[str]:
        """Names of the finalists that exchange gradients in every step and are ahead of the defaults of rankdad.

        Empty over loopback, which the defaults are not for.
        """
        defaults = [row for row in self._final if row.way == DEFAULTS]
        if not defaults or self.link == LOOPBACK:
            return []
        return [row.way for row in self._final if row.agrees and _ahead(row.losses, defaults[0].losses)]

    def table(self) -> str:
        """Format the rows as a table, with the verdict."""
        lines = self._lines()
        return "\n".join([*table(lines, right=range(1, len(lines[0]))), *self._notes(), self.verdict])

    def _lines(self) -> list[tuple[str, ...]]:
        """Cells of the table, its head first."""
        goal = max((max(row.losses) for row in self._final), default=math.nan)  # that every run of finalists reaches
        reached = (f"s to {goal:.4g}", f"MB to {goal:.4g}") if self._final else ("s to loss", "MB to loss")
        head = ("", "loss", "runs", "steps a run", "MB a run", *reached, "ms a step", "MB a step")
        return [head, *(self._cells(row, goal) for row in self.rows if row.runs)]

    def _notes(self) -> list[str]:
        """Reasons of failures, and the meaning of the figures."""
        failures = [f"{row.label}: failed, {row.failure}" for row in self.rows if row.failure]
        short = [f"{row.label}: {row.shortage}" for row in self.rows if row.shortage]
        where = "connected sites" if self.connected else "processes of this machine"
        note = (
            f"Loss of {self.held_out} held-out samples after {self.seconds:.3g} s of training, mean of the last three "
            f"evaluations; {self.processes} {where}, batches of {self.batch_size}."
        )
        link = [f"Measured over {self.link}."] if self.processes > 1 else []
        labels = " and ".join(row.label for row in self.rows if row.way in self.faster_than_defaults)
        defect = f"Faster than the defaults of rankdad: {labels}. This is a defect of the defaults: please report it."
        return [*failures, *short, note, *link, *([defect] if labels else [])]

    @property
    def _final(self) -> list[Row]:
        """Rows of the final, the lowest loss first."""
        return [row for row in self.rows if row.way in self.finalists and row.is_measured]

    def _cells(self, row: Row, goal: float) -> tuple[str, ...]:
        loss = f"{row.loss:.4f}" + ("" if row.way in self.finalists else "*")
        reached = [each if row.is_measured else math.inf for each in (row.seconds_to(goal), row.megabytes_to(goal))]
        return (
            row.label,
            loss if row.is_measured else "not measured",
            str(len(row.runs)),
            str(row.steps),
            f"{statistics.fmean(run[-1].megabytes for run in row.runs):.2f}",
            *(f"{each:.2f}" if math.isfinite(each) else "-" for each in reached),
            f"{1e3 * row.step_seconds:.1f}",
            f"{row.megabytes_a_step:.3f}",
        )

    def html(self, path: str | Path) -> None:
        """Write table and pictures as one HTML file, which needs no other file, no network and no matplotlib.

        Args:
            path: path of the HTML file.
        """
        text = page({row.label: row.runs for row in self.rows if row.runs}, self.verdict, self._lines(), self._notes())
        Path(path).write_text(text, encoding="utf-8")

    def picture(self, path: str | Path) -> None:
        """Plot the held-out loss against seconds, and against megabytes sent, as a PNG file.

        Args:
            path: path of the PNG file.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        where = "sites" if self.connected else "processes"
        draw([row for row in self.rows if row.runs], f"{self.verdict} ({self.processes} {where})", path)

    def __str__(self) -> str:
        return self.table()


def _ahead(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether losses are lower than others, of the same seeds, beyond noise."""
    differences = [other - own for own, other in zip(first, second, strict=True)]
    if len(differences) < 2 or min(differences) <= 0:
        return False
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences) > _CONFIDENT * error


def draw(rows: Sequence[Row], title: str, path: str | Path) -> None:
    """Plot the runs of several ways as a PNG file, each run a line.

    Args:
        rows: rows with at least one run.
        title: title of the picture.
        path: path of the PNG file.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure = new_figure(10, 4.8)
    from matplotlib.ticker import LogLocator, NullFormatter

    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for place, row in enumerate(rows):
        for number, run in enumerate(row.runs):
            style = {"color": f"C{place % 10}", "linewidth": 1.6, "label": row.label if number == 0 else None}
            losses = [point.loss for point in run]
            by_time.plot([point.seconds for point in run], losses, **style)
            if run[-1].megabytes > 0:  # the axis is logarithmic, and has no place for the start
                by_bytes.plot([point.megabytes for point in run[1:]], losses[1:], **style)
    by_time.set(xlabel="seconds of training", ylabel="held-out loss", yscale="log")
    by_bytes.set(xlabel="megabytes sent by a process")
    if any(row.megabytes_a_step > 0 for row in rows):
        by_bytes.set(xscale="log")
        by_bytes.xaxis.set_major_formatter("{x:g}")
    by_time.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))  # losses often stay within a decade
    by_time.yaxis.set_major_formatter("{x:g}")
    by_time.yaxis.set_minor_formatter(NullFormatter())
    for panel in (by_time, by_bytes):
        panel.grid(alpha=0.3)
    figure.legend(*by_time.get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
