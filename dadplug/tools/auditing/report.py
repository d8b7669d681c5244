"""Report of an audit: a table, a verdict in words, a picture, JSON, and one page of HTML."""

from __future__ import annotations

import base64
import html
import io
import json
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...support.files import write_file
from ...support.logs import table
from ...support.progress import new_figure, report_page
from .attacks.base import RECOVERED, Result, is_picture
from .capture import Observation

_HEAD = ("layer", "path", "class", "attack", "of", "recovered", "similarity", "chance", "PSNR", "SSIM")
_COLUMNS = 8  # samples of a picture
_WIDTH = 118  # characters of lines below the table
_PLAIN = (bool, int, float, str, type(None))  # values that JSON has
_MARGIN = 0.8  # similarity up to which a setting counts as a remedy: other batches are easier


class Untried(NamedTuple):
    """Attack that was not made.

    Attributes:
        attack: name of the attack.
        layer: name of the weight; empty for all.
        reason: why.
    """

    attack: str
    layer: str
    reason: str

    @property
    def is_limit(self) -> bool:
        """Whether the attack might have worked, but was left out or failed."""
        return any(word in self.reason for word in ("time", "left out", "failed", "more than", "as other layers"))


@dataclass(frozen=True)
class LayerReport:
    """Results for one weight.

    Attributes:
        name: name of the weight; empty for attacks on all messages together.
        path: the path of its gradient.
        exposure: what the plan says about it, see `dadplug.step.planning.plan.exposure`.
        results: the results of the attacks.
    """

    name: str
    path: str
    exposure: str
    results: Sequence[Result]

    @property
    def recovered(self) -> float:
        """Largest share of samples, of data or activations, that an attack has recovered."""
        kinds = ("data", "activations")
        return max((result.recovered for result in self.results if result.target in kinds), default=0.0)


@dataclass(frozen=True)
class Remedy:
    """A change of options that an audit has tried.

    Attributes:
        options: the options that it changes, as keyword arguments.
        cost: order in which it costs: 0 for bytes alone, 1 for changed gradients too, 2 for noise.
        recovered: share of samples that the attacks have recovered in spite of it.
        similarity: largest similarity of a reconstruction of data.
        bytes_sent: payload of a step, in bytes.
    """

    options: Mapping[str, Any]
    cost: int
    recovered: float = 1.0
    similarity: float = 1.0
    bytes_sent: int = 0

    @property
    def stops(self) -> bool:
        """Whether no attack has recovered a sample, or has come near to it."""
        return self.recovered == 0 and self.similarity <= _MARGIN

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


@dataclass(eq=False)
class Report:
    """Result of `dadplug.audit`. Prints as a table.

    Attributes:
        mode: the mode.
        options: its options.
        observer: ``"site"`` or ``"hub"``.
        sealed: whether sites encrypt for each other.
        seen: what was captured.
        results: results of the attacks.
        untried: attacks that were not made, with reasons.
        seconds: duration.
        remedy: cheapest options with which the attacks recover nothing; None where none was found or looked for.
        tried: all remedies that were tried.
    """

    mode: str
    options: Mapping[str, Any]
    observer: str
    sealed: bool
    seen: Observation = field(repr=False)
    results: Sequence[Result]
    untried: Sequence[Untried]
    seconds: float
    remedy: Remedy | None = None
    tried: Sequence[Remedy] = ()

    @property
    def recovered(self) -> float:
        """Share of the batch's samples whose data at least one attack has recovered, from 0 to 1."""
        return share_recovered(self.results)

    @property
    def bytes_sent(self) -> int:
        """Payload of the step, in bytes."""
        return self.seen.bytes_sent

    @property
    def layers(self) -> list[LayerReport]:
        """Results by weight, in the model's order; at last those of attacks on all messages together."""
        exposures = {} if self.seen.plan is None else {row.parameter: row.exposure for row in self.seen.plan}
        by_name: dict[str, list[Result]] = defaultdict(list)
        for result in self.results:
            by_name[result.layer].append(result)
        found = [
            LayerReport(view.name, view.path, exposures.get(view.name, ""), by_name.get(view.name, []))
            for view in self.seen.layers
        ]
        return found + ([LayerReport("", "all", "", by_name[""])] if by_name.get("") else [])

    @property
    def best(self) -> Result | None:
        """The attack that has recovered most of the data; None where none has been made."""
        data = [result for result in self.results if result.target == "data"]
        return max(data, key=lambda each: (each.recovered, each.attack != "span", each.similarity), default=None)

    @property
    def out_of_time(self) -> bool:
        """Whether the time was over before an attack on the data was made, so that the report says nothing."""
        return self.best is None and any("time" in each.reason for each in self.untried)

    @property
    def verdict(self) -> str:
        """Summary in words: the share that was recovered, a setting that stops the attacks, and the limits."""
        return " ".join(filter(None, [self._finding(), self._further(), self._advice(), self._limits()]))

    def _finding(self) -> str:
        who = "The hub" if self.observer == "hub" else "Another site"
        if self.observer == "hub" and self.sealed:
            return (
                "The hub sees sizes and times of messages alone, since sites encrypt for each other. The other sites "
                "see all: repeat the audit with observer='site'."
            )
        best = self.best
        if self.recovered > 0 and best is not None:
            what = "confirm candidates for" if best.attack == "span" else "recover"
            where = f"{best.attack} on {best.layer}" if best.layer else best.attack
            return f"{who} can {what} {self.recovered:.0%} of the samples of this batch (attack {where})."
        if best is None:
            if self.out_of_time:
                return "The time was over before an attack on the data was made: raise seconds. That says nothing."
            return "No attack on the data applies to this model and mode; that is no proof that none exists."
        return (
            f"No attack that was tried has recovered a sample (best similarity {best.similarity:.2f}, by "
            f"{best.attack}; {RECOVERED} counts as recovered). That is no proof."
        )

    def _further(self) -> str:
        notes = []
        for target, text in (("words", "row numbers of tables"), ("labels", "labels"), ("membership", "who took part")):
            most = max(
                (
                    each.recovered if target != "words" else each.similarity
                    for each in self.results
                    if each.target == target
                ),
                default=0.0,
            )
            if most >= 0.5:
                notes.append(text)
        kinds = [each for each in self.results if each.target == "activations" and each.recovered >= 0.5]
        if kinds:
            notes.append(
                f"activations of {kinds[0].layer}" + (f" and {len(kinds) - 1} further layers" if kinds[1:] else "")
            )
        return f"Also visible: {', '.join(notes)}." if notes else ""

    def _advice(self) -> str:
        if not self.recovered:
            return ""
        if self.remedy is None:
            if not self.tried:
                return ""
            tried = ", ".join(str(each) for each in self.tried)
            return f"None of the settings that were tried ({tried}) stops these attacks: use differential privacy."
        if self.remedy.options == {"sealed": True}:
            return "Cheapest remedy: sealed = true in the project file, so that the hub cannot read payloads."
        size = f"{self.remedy.bytes_sent:,} bytes a step, {self.bytes_sent:,} now"
        return f"Cheapest setting that stops these attacks: {self.remedy} ({size})."

    def _limits(self) -> str:
        if not self.results:
            return ""
        names = sorted({each.attack for each in self.untried if each.is_limit} - {each.attack for each in self.results})
        missing = f"Not tried for their cost: {', '.join(names)}. " if names else ""
        return f"{missing}Attacks that this table does not list were not tried."

    def table(self) -> str:
        """Format the results as a table, with the verdict and what was not tried."""
        lines = table([_HEAD, *self._lines()], right=range(5, len(_HEAD)))
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        count = len(self.seen.batch)
        title = f"mode {self.mode}{options}; {count} samples, {self.bytes_sent:,} bytes sent; seen by {_who(self)}"
        return "\n".join([title, *lines, *self._notes(), *textwrap.wrap(self.verdict, _WIDTH)])

    def _lines(self) -> list[tuple[str, ...]]:
        """Return the cells of each result, and a line for all weights of a path and class without any."""
        lines = [_cells(layer, result) for layer in self.layers for result in layer.results]
        others: dict[tuple[str, str], int] = defaultdict(int)
        for layer in self.layers:
            others[layer.path, layer.exposure] += not layer.results
        return lines + [(f"{count} further", *kind, *[""] * 7) for kind, count in others.items() if count]

    def _notes(self) -> list[str]:
        notes = [
            f"{each.attack}{f' on {each.layer}' if each.layer else ''}: {each.note}"
            for each in self.results
            if each.note
        ]
        grouped: dict[tuple[str, str], int] = defaultdict(int)
        for each in self.untried:
            grouped[each.attack, each.reason] += 1
        ran = {each.attack for each in self.results}
        for (attack, reason), count in grouped.items():
            if Untried(attack, "", reason).is_limit:
                notes.append(f"not tried: {attack}{f' ({count} layers)' if count > 1 else ''}: {reason}")
        if other := sorted({attack for attack, _ in grouped} - ran):
            notes.append(f"do not apply, or are not needed: {', '.join(other)}; report.untried has the reasons")
        return [*notes, *self.seen.remarks]

    def __str__(self) -> str:
        return self.table()

    # Files

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, without reconstructions."""
        return {
            "mode": self.mode,
            "options": {
                name: value if isinstance(value, _PLAIN) else repr(value) for name, value in self.options.items()
            },
            "observer": self.observer,
            "sealed": self.sealed,
            "samples": len(self.seen.batch),
            "bytes_sent": self.bytes_sent,
            "recovered": self.recovered,
            "verdict": self.verdict,
            "remedy": None if self.remedy is None else str(self.remedy),
            "tried": [
                {"options": str(each), "recovered": each.recovered, "bytes_sent": each.bytes_sent}
                for each in self.tried
            ],
            "layers": [
                {
                    "name": layer.name,
                    "path": layer.path,
                    "exposure": layer.exposure,
                    "results": [_result_dict(result) for result in layer.results],
                }
                for layer in self.layers
            ],
            "not_tried": [each._asdict() for each in self.untried],
            "seconds": self.seconds,
        }

    def json(self, path: str | Path) -> None:
        """Write the report as JSON.

        Args:
            path: path of the file.
        """
        write_file(Path(path), json.dumps(self.as_dict(), indent=2).encode())

    def picture(self, path: str | Path) -> None:
        """Draw originals beside what the attacks have reconstructed, as a PNG file.

        Args:
            path: path of the PNG file.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        write_file(Path(path), self._drawn())

    def html(self, path: str | Path) -> None:
        """Write the report as one HTML file that contains its picture.

        Args:
            path: path of the file.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        picture = base64.b64encode(self._drawn()).decode()
        above = (
            f"<p><b>{html.escape(self.verdict)}</b></p>"
            f"<p>{len(self.seen.batch)} samples, {self.bytes_sent:,} bytes sent, seen by {html.escape(_who(self))}; "
            f"{self.seconds:.0f} s.</p>"
        )
        page = report_page(
            f"Audit of mode {self.mode}{options}",
            [_HEAD, *self._lines()],
            self._notes(),
            above=above,
            below=f"<img alt='originals and reconstructions' src='data:image/png;base64,{picture}'>",
        )
        write_file(Path(path), page.encode())

    def _drawn(self) -> bytes:
        """Return the picture as the content of a PNG file."""
        data = self.seen.batch.data
        shown = [result for result in self.results if result.pictures is not None and result.target == "data"]
        figure = _pictures(data, shown) if is_picture(data) and shown else _bars(self.results)
        characters = int(9 * figure.get_figwidth())
        figure.suptitle("\n".join(textwrap.wrap(self._finding(), characters)), fontsize=10)
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=120, format="png")
        return buffer.getvalue()


def share_recovered(results: Sequence[Result]) -> float:
    """Return the share of samples whose data some attack has recovered."""
    scores = [result.scores for result in results if result.target == "data" and len(result.scores)]
    if not scores:
        return 0.0
    found = scores[0].cpu() >= RECOVERED
    for each in scores[1:]:
        found = found | (each.cpu() >= RECOVERED) if len(each) == len(found) else found
    return float(found.float().mean())


def _who(report: Report) -> str:
    return (
        ("a hub that cannot read payloads" if report.sealed else "the hub")
        if report.observer == "hub"
        else "another site"
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _cells(layer: LayerReport, result: Result) -> tuple[str, ...]:
    return (
        layer.name or "(all)",
        layer.path,
        layer.exposure,
        result.attack,
        result.target,
        f"{result.recovered:.0%}",
        f"{result.similarity:.3f}",
        f"{result.chance:.3f}",
        _number(result.psnr, ".1f"),
        _number(result.ssim, ".2f"),
    )


def _result_dict(result: Result) -> dict[str, Any]:
    kept = ("attack", "target", "recovered", "similarity", "measure", "chance", "psnr", "ssim", "note", "seconds")
    return {name: getattr(result, name) for name in kept} | {
        "scores": [round(each, 4) for each in result.scores.tolist()]
    }


def _pictures(data: Tensor, shown: Sequence[Result]) -> Any:
    """Draw a row of originals, and a row of reconstructions for each attack."""
    count = min(_COLUMNS, len(data))
    low, high = float(data.min()), float(data.max())
    rows: list[tuple[str, Tensor, Tensor | None]] = [("original", data, None)]
    for result in shown:
        assert result.pictures is not None
        kind = "confirmed" if result.attack == "span" else "recovered"
        rows.append((f"{result.attack}\n{result.recovered:.0%} {kind}", result.pictures, result.scores))
    figure = new_figure(1.15 * count + 1.4, 1.3 * len(rows) + 0.7)
    panels = figure.subplots(len(rows), count, squeeze=False)
    for line, (label, pictures, scores) in zip(panels, rows, strict=True):
        for number, panel in enumerate(line):
            image = pictures[number].detach().float().cpu().clamp(low, high)
            image = (image - low) / max(high - low, 1e-12)
            panel.imshow(image.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
            panel.set(xticks=[], yticks=[])
            if scores is not None and number < len(scores):
                panel.set_xlabel(f"{float(scores[number]):.2f}", fontsize=8, labelpad=2)
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    return figure


def _bars(results: Sequence[Result]) -> Any:
    """Draw the similarity of each attack beside that of chance."""
    figure = new_figure(8, 0.45 * max(2, len(results)) + 1.6)
    panel = figure.subplots()
    labels = [f"{each.attack} {each.layer}".strip() for each in results][::-1]
    panel.barh(range(len(labels)), [each.similarity for each in results][::-1], color="C0", label="similarity")
    panel.plot([each.chance for each in results][::-1], range(len(labels)), "k|", markersize=12, label="chance")
    panel.axvline(RECOVERED, color="C3", linewidth=1, linestyle="--", label="recovered")
    panel.set(xlim=(0, 1.02), yticks=range(len(labels)), yticklabels=labels)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure
