"""Report of a comparison as one HTML file that needs no other file and no network."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trial import Point

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 280, 52, 36  # of a plot, in its own units
_COLOURS = ("#3b7dd8", "#d9822b", "#2e9e5b", "#c8443f", "#8a63c9", "#8c6d5a", "#d667ab", "#808890")

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --text: #1b1f24; --back: #fff; --line: #d0d7de; --faint: #57606a; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e6edf3; --back: #0d1117; --line: #30363d; --faint: #9198a1; }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
svg {{ flex: 1 1 20rem; min-width: 0; max-width: 100%; height: auto; }}
svg text {{ fill: var(--faint); font-size: 12px; }}
svg path {{ fill: none; stroke-width: 2; }}
svg line {{ stroke: var(--line); }}
.key {{ color: var(--faint); }}
.key span {{ margin-right: 1rem; white-space: nowrap; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
p {{ color: var(--faint); }}
</style>
<h1>{title}</h1>
<div class="plots">{plots}</div>
<div class="key">{key}</div>
<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p>{note}</p>
</html>
"""


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
    head, *body = cells
    key = "".join(
        f'<span><b style="color:{_COLOURS[number % len(_COLOURS)]}">&#9632;</b> {html.escape(label)}</span>'
        for number, label in enumerate(runs)
    )
    plots = _plot(runs, "seconds of training", lambda point: point.seconds)
    if any(run[-1].megabytes > 0 for each in runs.values() for run in each):
        plots += _plot(runs, "megabytes sent by a process", lambda point: point.megabytes)
    return _PAGE.format(
        title=html.escape(title),
        plots=plots,
        key=key,
        head="".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head),
        body="".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in body),
        note="<br>".join(map(html.escape, notes)),
    )


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
