"""Report as one HTML file that needs no other file and no network: a heading, a table and notes, light or dark."""

from __future__ import annotations

import html
from collections.abc import Sequence

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
img {{ max-width: 100%; background: #fff; }}
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
{above}
<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p>{note}</p>
{below}
</html>
"""


def report_page(
    title: str, cells: Sequence[Sequence[str]], notes: Sequence[str], *, above: str = "", below: str = ""
) -> str:
    """Format a report.

    Args:
        title: heading.
        cells: the table, its head first, as text.
        notes: sentences below the table, as text.
        above: HTML between heading and table.
        below: HTML below the notes.
    """
    head, *body = cells
    return _PAGE.format(
        title=html.escape(title),
        above=above,
        head="".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head),
        body="".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in body),
        note="<br>".join(map(html.escape, notes)),
        below=below,
    )
