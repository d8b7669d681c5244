"""Comparison of a loop run with `GradientReduction` and by hand."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dadplug
from dadplug.step.methods import topk

from .site import Record, Site

MODES: dict[str, dict[str, Any]] = {
    "dsgd": {"mode": "dsgd"},
    "dad": {"mode": "dad"},
    "edad": {"mode": "edad"},
    "auto": {"mode": "auto"},
    "rankdad": {"mode": "rankdad", "rank": 3},
    "rankdad-feedback": {"mode": "rankdad", "rank": 2, "error_feedback": True},
    "powersgd": {"mode": "powersgd", "rank": 2},
    "topk": {"mode": "topk", "density": 0.3},
    "dsgd-int8": {"mode": "dsgd", "wire": "int8"},
    "rankdad-int8": {"mode": "rankdad", "rank": 2, "wire": "int8"},
}
_EXACT = ("dsgd", "dad", "edad", "auto")
_FEW_ROWS = 1e-4  # rankdad keeps what it does not send in few rows by default, the reference all of it
_ROUNDING = 0.15  # what int8 takes away, relative to a gradient's norm, with what the last step lost added
_BOUND = 1.5  # times the largest error by hand
_TIMEOUT = 200.0  # seconds
_LEAST = 32  # elements from which top-k compresses a gradient here


@dataclass(frozen=True)
class Loop:
    """A training loop, and how it is compared.

    Attributes:
        function: the loop; gets a `Site`.
        chains: whether mode edad finds chains of layers in its models; otherwise it is left out.
        late: why payloads differ from those of the loop by hand. An agreed gradient's error in lossy modes, against
            the exact mean, is then held to 1.5 times the largest that the loop by hand has for the parameter.
        tolerance: largest difference, relative to a gradient's norm.
        int8: whether it runs with wire="int8", too.
    """

    function: Callable[[Site], None]
    chains: bool = True
    late: str = ""
    tolerance: float = 1e-9
    int8: bool = False

    @property
    def modes(self) -> list[str]:
        """The modes that the loop runs in."""
        skipped = {"edad"} if not self.chains else set()
        return [mode for mode in MODES if mode not in skipped and (self.int8 or not mode.endswith("int8"))]


LOOPS: dict[str, Loop] = {}


def loop(**options: Any) -> Callable[[Callable[[Site], None]], Callable[[Site], None]]:
    """Register a loop under its name; a function decorator."""

    def decorate(function: Callable[[Site], None]) -> Callable[[Site], None]:
        LOOPS[function.__name__] = Loop(function, **options)
        return function

    return decorate


def differences(name: str, mode: str, by_hand: dict[str, Site]) -> list[str]:
    """Run a loop in a mode both ways; return where they differ, in words.

    Args:
        name: the loop.
        mode: the mode.
        by_hand: the runs of the loop by hand; exact modes share one, which knows neither the mode nor its paths.
    """
    tried, options = LOOPS[name], MODES[mode]
    found = run(tried.function, Site(options))
    paths = [record.paths for record in found.records]
    key = "exact" if options["mode"] in _EXACT else mode
    if key not in by_hand:
        by_hand[key] = run(tried.function, Site(options, paths))
    expected = by_hand[key]
    problems = [difference] if (difference := found.reductions and _replicas(found)) else []
    if len(found.records) != len(expected.records):
        return [*problems, f"{len(found.records)} synchronisations, by hand {len(expected.records)}"]
    rounded, bounded = options.get("wire") == "int8", tried.late and options["mode"] not in _EXACT
    if rounded or bounded:
        found = run(tried.function, Site(options, forced=expected.records))
    keeps_rows = options["mode"] == "rankdad" and "error_feedback" not in options
    tolerance = _ROUNDING if rounded else max(tried.tolerance, _FEW_ROWS if keeps_rows else 0.0)
    allowed = _largest_errors(expected.records) if bounded else {}
    for step, (ours, theirs) in enumerate(zip(found.records, expected.records, strict=True)):
        problems += _different(ours, theirs, f"synchronisation {step}", tolerance, allowed)
    if not (problems or rounded or bounded):
        for index, (ours, theirs) in enumerate(zip(found.finals(), expected.finals(), strict=True)):
            if (error := _off(ours, theirs)) > tolerance:
                problems.append(f"parameter {index} at the end is off by {error:.1e}")
    return problems[:4]


def run(function: Callable[[Site], None], site: Site) -> Site:
    site.options = {"timeout": _TIMEOUT, **site.options}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with small_gradients_compressed():
            function(site)
            if not site.by_hand:
                site.differing = [reduction.first_difference() for reduction in site.reductions]
    finally:
        site.close()
        torch.set_default_dtype(before)
    return site


@contextmanager
def small_gradients_compressed() -> Iterator[None]:
    """Make top-k compress matrices as small as those of the loops, too."""
    before, topk._WHOLE = topk._WHOLE, _LEAST
    try:
        yield
    finally:
        topk._WHOLE = before


def _replicas(site: Site) -> str:
    return "".join(f"sites differ in {name}" for name in site.differing if name is not None)


def _largest_errors(records: Sequence[Record]) -> dict[str, float]:
    """By parameter, what the error of an agreed gradient may be, from those of the loop by hand."""
    largest: dict[str, float] = {}
    for record in records:
        for name, mean in record.means.items():
            found = record.gradients.get(name)
            if mean is not None and found is not None:
                largest[name] = max(largest.get(name, 0.0), _BOUND * _off(found, mean))
    return largest


def _different(ours: Record, theirs: Record, where: str, tolerance: float, allowed: dict[str, float]) -> Iterator[str]:
    overflown = [_overflown(record) for record in (ours, theirs)]
    if any(overflown):
        if not all(overflown):
            yield f"{where}: NaN or Inf {'in this run' if overflown[0] else 'by hand'} alone"
        return  # where they are depends on what was compressed
    for name, expected in theirs.gradients.items():
        found = ours.gradients.get(name)
        if (found is None) != (expected is None):
            yield f"{where}: {name} is {'None' if found is None else 'a gradient'}, by hand the other"
        elif found is not None and expected is not None:
            error = _off(found, expected)
            if name in allowed and error > tolerance:
                exact = theirs.means[name]
                assert exact is not None
                if (error := _off(found, exact)) > allowed[name] + tolerance:
                    yield f"{where}: {name} is off the exact mean by {error:.1e}, allowed {allowed[name]:.1e}"
            elif error > tolerance:
                ratio = float((found * expected).sum() / expected.square().sum())
                yield f"{where}: {name} is off by {error:.1e} (along the expected one: {ratio:.6g})"


def _overflown(record: Record) -> bool:
    return any(gradient is not None and not gradient.isfinite().all() for gradient in record.gradients.values())


def _off(found: Tensor, expected: Tensor) -> float:
    """The error relative to the expected norm, of tiny gradients to a small number."""
    return float((found - expected).norm() / (expected.norm() + 1e-5))


@contextmanager
def scaled(factor: float) -> Iterator[None]:
    """Multiply every agreed gradient by a factor: what a wrong exchange would do."""
    synchronize = dadplug.GradientReduction.synchronize

    def injected(self: dadplug.GradientReduction, **options: Any) -> None:
        synchronize(self, **options)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    dadplug.GradientReduction.synchronize = injected  # type: ignore[method-assign]
    try:
        yield
    finally:
        dadplug.GradientReduction.synchronize = synchronize  # type: ignore[method-assign]


def problems(name: str, modes: Sequence[str], factor: float = 1.0) -> tuple[dict[str, list[str]], bool]:
    """Run a loop in modes.

    Returns:
        By mode, where both runs differ; and whether the sites are no longer at the same place, after a mode in which
        one of them was left alone. Then further modes are missing.
    """
    found: dict[str, list[str]] = {}
    by_hand: dict[str, Site] = {}
    for mode in modes:
        raised: Exception | None = None
        try:
            with scaled(factor):
                found[mode] = differences(name, mode, by_hand)
        except Exception as error:
            raised = error
            found[mode] = [traceback.format_exc(limit=-6)]
        together = [None] * dist.get_world_size()
        dist.all_gather_object(together, (raised is not None, isinstance(raised, dadplug.SiteError)))
        if len(set(together)) > 1 or (True, True) in together:
            return found, True
    return found, False
