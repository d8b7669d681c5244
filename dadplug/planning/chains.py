"""Chains of fully connected layers, whose deltas every site recomputes from those of the last one.

``D_{i-1} = (D_i W_i) * phi'(z_{i-1})``: of a layer whose output goes through an elementwise function into the next one
and nowhere else, a site that has all rows of ``D_i`` and ``A_i = phi(z_{i-1})`` needs no deltas. That is edAD
(arXiv:2102.09631).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..exchange.codec import register
from ..exchange.payload import FactorPayload
from ..hooks import LINEAR, Elementwise, Factor, LayerCapture, Trace, stack_by_form
from ..units.base import Unit
from ..units.factor import FactorUnit

register(Elementwise)


@register
@dataclass(frozen=True)
class ChainLink:
    """What follows a layer.

    Attributes:
        follower: name of the unit whose layer has the output as its input.
        function: the function between the two.
    """

    follower: str
    function: Elementwise


@register
@dataclass(frozen=True)
class ChainReport:
    """What one site saw of a layer in the first step.

    Attributes:
        link: what follows it, in all calls; None where that is nothing, or not always the same.
        chain_break: what breaks its chain, in words.
    """

    link: ChainLink | None
    chain_break: str = ""


@register
class ChainReports(NamedTuple):
    """What one site saw in the first step.

    Attributes:
        reports: by name of a unit that was at work.
        worked: whether the site had any gradient.
    """

    reports: dict[str, ChainReport]
    worked: bool


class ChainedUnit(FactorUnit):
    """A unit that sends activations alone, since its deltas follow from those of another unit.

    Rows of the two are matched call by call: this one's are the first ones of the follower's. What does not fit, since
    a step took another way through the model, becomes a dense gradient.

    Args:
        unit: the unit that it takes the place of.
        link: what follows it.
    """

    def __init__(self, unit: FactorUnit, link: ChainLink) -> None:
        super().__init__(unit.name, unit.bias, unit.parameters, unit.layers, "activations", LINEAR)
        self.arrivals, self.expected = unit.arrivals, unit.expected
        self.dense, self.outside = unit.dense, unit.outside
        self.link = link
        self.follower: FactorUnit = unit  # until `link_units` has replaced all
        self._accepted: list[int] = []
        self._refused: set[int] = set()

    @property
    def widths(self) -> tuple[int, int]:
        return 0, self.shape[1]

    @property
    def row_keys(self) -> list[int]:
        theirs = self.follower.row_keys
        for factor in self._peek():
            trace = factor.trace
            if trace is None or trace.key in self._refused or trace.key in self._accepted:
                continue
            place = len(self._accepted)
            fits = trace.function == self.link.function and theirs[place : place + 1] == [trace.follower_key]
            fits = fits and not self.follower.weight_changed
            if fits:
                self._accepted.append(trace.key)
            else:
                self._refused.add(trace.key)
        return self._accepted

    def take(self) -> Factor | None:
        accepted = set(self.row_keys)
        fitting: list[Factor] = []
        others: list[Factor] = []
        factors = self._collect()
        self._sent_factors = factors if self._is_small(factors) else []
        for factor in factors:
            fits = factor.trace is not None and factor.trace.key in accepted
            (fitting if fits else others).append(factor)
        for factor in stack_by_form(others):
            self._form(factor)
            self.dense = True
        if not fitting:
            return None
        activations = torch.cat([factor.activations for factor in fitting]) if fitting[1:] else fitting[0].activations
        return Factor(activations, activations.new_empty(len(activations), 0))

    def complete(
        self, shares: Sequence[FactorPayload], known: dict[str, list[FactorPayload]]
    ) -> list[FactorPayload] | None:
        theirs = known.get(self.link.follower)
        if theirs is None or any(mine.rows > their.rows for mine, their in zip(shares, theirs, strict=True)):
            return None
        weight = self.follower.lead.detach()
        whole = []
        for mine, their in zip(shares, theirs, strict=True):
            behind = their.part(0, mine.rows)
            deltas = self.link.function.backward(behind.left @ weight, behind.right)
            whole.append(FactorPayload(deltas.to(mine.right.device), mine.right))
        return whole

    def before_header(self) -> None:
        if self._stale:
            self.reclaim()

    @property
    def broken(self) -> bool:
        return self._stale

    @property
    def _stale(self) -> bool:
        """Whether the other sites would recompute deltas from others than this one had, or by another weight."""
        rests = self.follower.void or self.follower.weight_changed
        return self.sent and not self.void and bool(self._accepted) and rests

    def reclaim(self) -> bool:
        taken_back = super().reclaim()
        if taken_back:
            self._accepted.clear()
            self._refused.clear()
        return taken_back

    def discard(self) -> None:
        super().discard()
        self._accepted.clear()
        self._refused.clear()

    def begin_step(self) -> None:
        super().begin_step()
        self._accepted.clear()
        self._refused.clear()


class Chains(NamedTuple):
    """What all sites make of what they saw.

    Attributes:
        links: by name of a unit, what follows it.
        remarks: by name of a unit, its place in a chain, in words.
        seen: whether any site had a gradient.
    """

    links: dict[str, ChainLink]
    remarks: dict[str, str]
    seen: bool


def collect_chain_reports(units: Sequence[Unit], capture: LayerCapture) -> ChainReports:
    """Tells what this site saw of its fully connected layers, after the first step's backward passes.

    Args:
        units: the units.
        capture: the capture of their layers, with traces.
    """
    assert capture.tracer is not None
    linear = [unit for unit in units if isinstance(unit, FactorUnit) and unit.path == "factors" and unit.form == LINEAR]
    by_layer = {layer.name: unit for unit in linear for layer in unit.layers}
    reports = {}
    for unit in linear:
        title = f"{unit.layers[0].name} ({type(unit.layers[0].module).__name__})"
        traces = [factor.trace for layer in unit.layers for factor in layer.peek() if factor.trace is not None]
        if not traces:
            continue
        link, follower = None, by_layer.get(traces[0].follower) if traces[0].follower else None
        chain_break = capture.tracer.chain_breaks.get(unit.layers[0].name, "")
        if len(unit.layers) > 1:
            chain_break = f"{title} shares its weight with {unit.layers[1].name}"
        elif broken := next((trace.chain_break for trace in traces if trace.chain_break), ""):
            chain_break = f"{title} {broken}"
        elif traces[0].follower and (follower is None or len(follower.layers) > 1):
            chain_break = f"{traces[0].follower} behind {title} is all-reduced, or shares its weight"
        elif follower is not None and not _follows(follower, unit, traces):
            chain_break = f"{traces[0].follower} does not follow {title} in all its calls"
        elif follower is not None:
            link = ChainLink(follower.name, traces[0].function)
        reports[unit.name] = ChainReport(link, chain_break)
    return ChainReports(reports, any(unit.arrivals for unit in units))


def _follows(follower: FactorUnit, unit: FactorUnit, traces: Sequence[Trace]) -> bool:
    """Says whether the calls of a unit's layer all went to a follower's, in the same order, and with what they need."""
    keys = follower.row_keys[: len(traces)]
    same = all(trace.function == traces[0].function for trace in traces)
    fitting = follower is not unit and follower.lead.dtype == unit.lead.dtype
    return same and fitting and keys == [trace.follower_key for trace in traces]


def merge_chain_reports(reports_by_site: Sequence[ChainReports], units: Sequence[Unit]) -> Chains:
    """Draws the conclusions; the same on every site.

    Args:
        reports_by_site: what each site saw, by rank.
        units: the units.
    """
    links: dict[str, ChainLink] = {}
    breaks: dict[str, str] = {}
    names = [unit.name for unit in units if any(unit.name in each.reports for each in reports_by_site)]
    for name in names:
        given = [each.reports[name] for each in reports_by_site if name in each.reports]
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
        elif name in ends:
            remarks[name] = "ends a chain" + (f": {breaks[name]}" if breaks[name] else "")
        else:
            remarks[name] = "in no chain" + (f": {breaks[name]}" if breaks[name] else "")
    return Chains(links, remarks, any(each.worked for each in reports_by_site))


def refusal(chains: Chains, model: nn.Module, reasons: dict[str, str]) -> str:
    """Says why a model has no chain, and what to do.

    Args:
        chains: what the sites make of what they saw.
        model: the model.
        reasons: by name of a weight, why it takes the path that it does.
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


def link_units(units: Sequence[Unit], links: dict[str, ChainLink]) -> list[Unit]:
    """Puts units that send activations alone in the places of those that something follows."""
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
    """Orders units so that each comes behind the one that follows its layer, and else as they are."""
    places = {unit.name: (place, 0) for place, unit in enumerate(units)}

    def place(unit: Unit) -> tuple[int, int]:
        if not isinstance(unit, ChainedUnit):
            return places[unit.name]
        behind, depth = place(unit.follower)
        return max(places[unit.name], (behind, depth + 1))

    return sorted(units, key=place)
