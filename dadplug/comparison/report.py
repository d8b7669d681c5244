"""Report of a comparison as one HTML file that needs no other file and no network."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..progress import report_page

if TYPE_CHECKING:
    from .trial import Point

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
