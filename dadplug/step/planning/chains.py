"""Chains of fully connected layers, whose deltas every site recomputes from those of the last layer.

``D_{i-1} = (D_i W_i) * phi'(z_{i-1})``: of a layer whose output goes through an elementwise function into the next one
and nowhere else, a site that has all rows of ``D_i`` and ``A_i = phi(z_{i-1})`` needs no deltas. That is edAD
(arXiv:2102.09631).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from ...exchange.codec import register
from ...hooks import LINEAR, LayerCapture, Trace
from ..methods.base import GradientPath
from ..units.base import Unit
from ..units.factor import ChainedUnit, ChainLink, FactorUnit


@register
@dataclass(frozen=True)
class ChainReport:
    """One site's report on a layer in the first step.

    Attributes:
        link: the link to the layer that follows in all calls; None where there is none, or not always the same.
        chain_break: what breaks the chain behind the layer, as a sentence; empty for nothing.
    """

    link: ChainLink | None
    chain_break: str = ""


@register
class ChainReports(NamedTuple):
    """One site's reports on its layers in the first step.

    Attributes:
        layers: by name of a unit whose layer was called.
        worked: whether the site had any gradient.
    """

    layers: dict[str, ChainReport]
    worked: bool


class Chains(NamedTuple):
    """Chains on which all sites agree.

    Attributes:
        links: by name of a unit, the link to the one that follows.
        remarks: by name of a unit, its place in a chain, as a sentence.
        seen: whether any site had a gradient.
    """

    links: dict[str, ChainLink]
    remarks: dict[str, str]
    seen: bool


def collect_chain_reports(units: Sequence[Unit], capture: LayerCapture) -> ChainReports:
    """Report on this site's fully connected layers, after the first step's backward passes.

    Args:
        units: the units.
        capture: the capture of their layers, with traces.
    """
    assert capture.tracer is not None
    factored = (unit for unit in units if isinstance(unit, FactorUnit) and unit.path == GradientPath.FACTORS)
    linear = [unit for unit in factored if unit.form == LINEAR]
    by_layer = {layer.name: unit for unit in linear for layer in unit.layers}
    layers = {}
    for unit in linear:
        traces = [factor.trace for layer in unit.layers for factor in layer.peek() if factor.trace is not None]
        if traces:
            chain_break = capture.tracer.chain_breaks.get(unit.layers[0].name, "")
            layers[unit.name] = _report(unit, traces, by_layer, chain_break)
    # Where a program has changed all gradients in place, no layer has a trace, and the next step shows the chains.
    return ChainReports(layers, bool(layers) or (not linear and any(unit.arrivals for unit in units)))


def _report(
    unit: FactorUnit, traces: Sequence[Trace], by_layer: Mapping[str, FactorUnit], chain_break: str
) -> ChainReport:
    """Report on one layer.

    Args:
        unit: the unit of the layer.
        traces: the traces of the layer's calls.
        by_layer: the units of fully connected layers, by name of the layer.
        chain_break: what breaks the chain if no layer follows.
    """
    title = f"{unit.layers[0].name} ({type(unit.layers[0].module).__name__})"
    name = traces[0].follower
    follower = by_layer.get(name) if name else None
    if len(unit.layers) > 1:
        return ChainReport(None, f"{title} shares its weight with {unit.layers[1].name}")
    if broken := next((trace.chain_break for trace in traces if trace.chain_break), ""):
        return ChainReport(None, f"{title} {broken}")
    if name and (follower is None or len(follower.layers) > 1):
        return ChainReport(None, f"{name} behind {title} is all-reduced, or shares its weight")
    if follower is None:
        return ChainReport(None, chain_break)
    if not _follows(follower, unit, traces):
        return ChainReport(None, f"{name} does not follow {title} in all its calls")
    return ChainReport(ChainLink(follower.name, traces[0].function), chain_break)


def _follows(follower: FactorUnit, unit: FactorUnit, traces: Sequence[Trace]) -> bool:
    """Return whether the calls of a unit's layer all led to a follower's, in the same order and by one function."""
    keys = follower.row_keys[: len(traces)]
    same = all(trace.function == traces[0].function for trace in traces)
    fitting = follower is not unit and follower.lead.dtype == unit.lead.dtype
    return same and fitting and keys == [trace.follower_key for trace in traces]


def merge_chain_reports(reports: Sequence[ChainReports], units: Sequence[Unit]) -> Chains:
    """Merge the sites' reports; the result is the same on every site.

    Args:
        reports: the reports of all sites, by rank.
        units: the units.
    """
    links: dict[str, ChainLink] = {}
    breaks: dict[str, str] = {}
    names = [unit.name for unit in units if any(unit.name in each.layers for each in reports)]
    for name in names:
        given = [each.layers[name] for each in reports if name in each.layers]
        link = given[0].link
        if link is not None and all(report.link == link for report in given):
            links[name] = link
        else:
            chain_break = next((report.chain_break for report in given if report.chain_break), "")
            breaks[name] = chain_break or ("" if link is None else "sites have it followed by different layers")
    ends = {link.follower for link in links.values()}
    remarks = {}
    for name in names:
        if name in links:
            remarks[name] = f"its deltas are recomputed from those of {links[name].follower}"
        else:
            place = "ends a chain" if name in ends else "in no chain"
            remarks[name] = place + (f": {breaks[name]}" if breaks[name] else "")
    return Chains(links, remarks, any(each.worked for each in reports))


def refusal(chains: Chains, model: nn.Module, reasons: Mapping[str, str]) -> str:
    """Return the message for a model that has no chain, with what breaks its chains first.

    Args:
        chains: the merged reports.
        model: the model.
        reasons: by name of a weight, why it takes its path.
    """
    breaks = [remark.partition(": ")[2] for remark in chains.remarks.values()]
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" in reasons.keys() - chains.remarks.keys():
            breaks.append(f"{name} ({type(module).__name__}) is all-reduced: {reasons[f'{name}.weight']}")
    chain_break = next((each for each in breaks if each), "no fully connected layer in it follows another")
    return (
        "mode 'edad' recomputes deltas along chains of two fully connected layers or more, and this model has none: "
        f"{chain_break}. Use mode='dad', which sends the deltas of every layer"
    )


def link_units(units: Sequence[Unit], links: Mapping[str, ChainLink]) -> list[Unit]:
    """Replace the units that another one follows by units that send activations alone.

    Args:
        units: the units.
        links: by name of a unit, the link to the one that follows.
    """
    replaced = [_linked(unit, links.get(unit.name)) for unit in units]
    by_name = {unit.name: unit for unit in replaced}
    for unit in replaced:
        if isinstance(unit, ChainedUnit):
            follower = by_name[unit.link.follower]
            assert isinstance(follower, FactorUnit)
            unit.follower = follower
    return replaced


def _linked(unit: Unit, link: ChainLink | None) -> Unit:
    if link is None:
        return unit
    assert isinstance(unit, FactorUnit)
    unit.release()
    return ChainedUnit(unit, link)


def order_followers_first(units: Sequence[Unit]) -> list[Unit]:
    """Return units so that each comes after the one that follows its layer, and otherwise in the same order."""
    places = {unit.name: (place, 0) for place, unit in enumerate(units)}

    def place(unit: Unit) -> tuple[int, int]:
        if not isinstance(unit, ChainedUnit):
            return places[unit.name]
        after, depth = place(unit.follower)
        return max(places[unit.name], (after, depth + 1))

    return sorted(units, key=place)
