"""Result of a race: a table, a picture, and the way that was fastest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .picture import draw
from .row import Row

_CONFIDENT = 2.0  # standard errors by which a way has to be ahead


@dataclass(frozen=True)
class Comparison:
    """Result of a race.

    Attributes:
        rows: a row for each way: first those of the final by their loss, then the others, at last those that failed.
        finalists: names of the ways that ran in the final, with as many seeds.
        seconds: training time of each run of the final.
        held_out: number of held-out samples.
        processes: number of processes, or connected sites.
        batch_size: samples in a batch of each process.
        connected: whether the processes were sites that the user had connected.
    """

    rows: list[Row] = field(repr=False)
    finalists: list[str]
    seconds: float
    held_out: int
    processes: int
    batch_size: int
    connected: bool

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
        if self.best is not None:
            return f"fastest: {labels[self.best]}"
        if not self.leaders:
            return "no way could be raced"
        return "no difference beyond noise between " + " and ".join(labels[way] for way in self.leaders)

    def table(self) -> str:
        """Format the rows as a table, with the verdict."""
        goal = self._goal()
        head = ("", "loss", "runs", f"s to {goal:.4g}", f"MB to {goal:.4g}", "ms a step", "MB a step")
        lines = [head, *(self._cells(row, goal) for row in self.rows if row.runs)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        failures = [f"{row.label}: not raced, {row.failure}" for row in self.rows if row.failure]
        where = "connected sites" if self.connected else "processes of this machine"
        note = (
            f"Loss of {self.held_out} held-out samples after {self.seconds:.3g} s of training, mean of the last three "
            f"evaluations; {self.processes} {where}, batches of {self.batch_size}."
        )
        return "\n".join([text[0], "-" * len(text[0]), *text[1:], *failures, note, self.verdict])

    @property
    def _final(self) -> list[Row]:
        """Rows of the final, the lowest loss first."""
        return [row for row in self.rows if row.way in self.finalists and row.runs]

    def _goal(self) -> float:
        """Loss that every finalist reaches in every run."""
        return max((max(row.losses) for row in self._final), default=math.nan)

    def _cells(self, row: Row, goal: float) -> tuple[str, ...]:
        final = row.way in self.finalists
        seconds, megabytes = row.seconds_to(goal), row.megabytes_to(goal)
        return (
            row.label,
            f"{row.loss:.4f}" + ("" if final else "*"),
            str(len(row.runs)),
            f"{seconds:.2f}" if math.isfinite(seconds) else "-",
            f"{megabytes:.2f}" if math.isfinite(megabytes) else "-",
            f"{1e3 * row.step_seconds:.1f}",
            f"{row.megabytes_a_step:.3f}",
        )

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
