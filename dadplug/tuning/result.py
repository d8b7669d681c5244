"""Result of the tuner, and its table."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..schedules import Record

_WIDTH = 60  # characters of the last column


@dataclass(frozen=True)
class Row:
    """Result of a task.

    Attributes:
        task: name of the task.
        default: the constants before.
        chosen: the constants from now on.
        measured: number of configurations that were measured.
        size: number of configurations of the space.
        seconds: median of the default's seconds.
        ratio: median of the seconds over those of the default in pairs; 1.0 where the default stays.
        candidate: ratio of the fastest configuration that was found, also where the default stays.
        pairs: number of pairs.
    """

    task: str
    default: Mapping[str, Any]
    chosen: Mapping[str, Any]
    measured: int
    size: int
    seconds: float
    ratio: float
    candidate: float
    pairs: int

    @property
    def changed(self) -> bool:
        """Whether the constants have changed."""
        return dict(self.default) != dict(self.chosen)

    def values(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Tuning:
    """Result of `dadplug.tune`.

    Attributes:
        rows: a row for each task.
        record: the constants that this machine has from now on.
        path: the file that they are in; None if they were not stored.
        points: by task, measured and predicted seconds of configurations that the model predicted before.
        notes: remarks, such as a backend that could not be tried.
    """

    rows: Sequence[Row]
    record: Record
    path: Path | None
    points: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def table(self) -> str:
        """Return what was tried and won, as text."""
        head = ("task", "tried", "default", "time", "constants")
        lines = [head]
        for row in self.rows:
            first, *further = textwrap.wrap(_change(row), _WIDTH) or [""]
            lines.append((row.task, f"{row.measured} of {row.size}", _duration(row.seconds), _gain(row), first))
            lines += [("", "", "", "", each) for each in further]
        widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        text.insert(1, "  ".join("-" * width for width in widths))
        text += [f"note: {each}" for each in self.notes]
        text.append("not stored" if self.path is None else f"stored in {self.path}")
        return "\n".join(text)


def _gain(row: Row) -> str:
    if not row.changed:
        return "as before"
    return f"{100 * (1 - row.ratio):.0f} % less" if row.pairs else "same choices"


def _duration(seconds: float) -> str:
    if seconds <= 0:
        return "-"
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _change(row: Row) -> str:
    """Return the constants that have changed, or the ones that stay."""
    parts = []
    for name, value in row.chosen.items():
        before = row.default.get(name)
        parts.append(f"{name} {_short(value)}" if before == value else f"{name} {_short(before)} -> {_short(value)}")
    return ", ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return str(value)
