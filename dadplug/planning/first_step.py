"""First step of a plan: reports of the sites on what only a step can show, and the conclusions from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..exchange.codec import register, register_family
from ..hooks import Form
from ..hooks.convolution import Geometry
from ..hooks.linear import TransposedForm
from ..methods import Method
from ..schedules import Decoding, current
from ..units.base import Unit
from ..units.factor import FactorUnit
from .merging import LinkCosts

register_family(Form)
register(TransposedForm, "dadplug.hooks.libraries.TransposedForm")  # as other versions call it
register(Geometry)  # which forms of convolutions hold
register(Decoding)


@register
@dataclass(frozen=True)
class FirstStepReport:
    """One site's report on its first step.

    Attributes:
        order: names of the units in the order in which backward reached them.
        reasons: by name of a unit that cannot be sent as factors, why.
        rows: by name of a factor unit, number of rows.
        forms: by name of a factor unit, the forms of its factors.
        samples: samples of the step.
        link: measured costs of the link, where the method chooses by them.
        decoding: this site's constants of decoding; those of the first site hold at all sites.
    """

    order: list[str]
    reasons: dict[str, str]
    rows: dict[str, int]
    forms: dict[str, set[Form]]
    samples: int
    link: LinkCosts | None
    decoding: Decoding

    @classmethod
    def of(
        cls, units: Sequence[Unit], order: Sequence[Unit], share_inputs: bool, samples: int, link: LinkCosts | None
    ) -> FirstStepReport:
        """Report on the units after a step's backward passes.

        Args:
            units: the units.
            order: the units whose gradients have arrived, in that order.
            share_inputs: value of the option.
            samples: samples of the step.
            link: measured costs of the link, or None.
        """
        factored = [unit for unit in units if isinstance(unit, FactorUnit)]
        reasons = {unit.name: "used outside its layer too" for unit in factored if unit.outside}
        if not share_inputs:
            fed = "share_inputs=False: its layer is fed by data"
            reasons |= {unit.name: fed for unit in factored if unit.fed_by_data}
        rows, forms = {unit.name: unit.rows for unit in factored}, {unit.name: unit.forms for unit in factored}
        decoding = current().decoding
        return cls([unit.name for unit in order], reasons, rows, forms, samples, link, decoding)


@register
@dataclass(frozen=True)
class MergedReport:
    """Conclusions of all sites from their reports on the first step.

    Attributes:
        reasons: by name of a unit that is all-reduced after all, in this plan and in further ones: why.
        rows: by name of a factor unit, the rows that a site is expected to send.
        samples: samples of all sites in a step.
        chosen: by name of a factor unit that is all-reduced in this plan, since that is predicted to be faster: by how
            much.
        notices: by name of a unit that is sent as factors, since that is predicted to be faster: by how much.
        largest: samples of the site that has most.
        positions: by name of a unit, its position in the order in which rank 0's backward reached them.
        decoding: constants of decoding: those of the first site that is present.
    """

    reasons: dict[str, str]
    rows: dict[str, int]
    samples: int
    chosen: dict[str, str]
    notices: dict[str, str]
    largest: int
    positions: dict[str, int]
    decoding: Decoding

    def order(self, units: Sequence[Unit]) -> list[Unit]:
        """Return units in the order in which rank 0's backward reached them.

        Units that it has not reached come last, in the reverse of the model's order.
        """
        backwards = units[::-1]
        return sorted(backwards, key=lambda unit: self.positions.get(unit.name, len(self.positions)))


def merge_reports(
    reports: Sequence[FirstStepReport], units: Iterable[Unit], method: Method, sites: int
) -> MergedReport:
    """Merge the sites' reports; the result is the same on every site. Sets the form of units that have none yet.

    Args:
        reports: the reports of the sites that are present, by rank.
        units: the units.
        method: the method.
        sites: number of sites, with those that are absent: a plan holds also when they come.
    """
    reasons: dict[str, str] = {}
    rows: dict[str, int] = {}
    chosen: dict[str, str] = {}
    notices: dict[str, str] = {}
    chooses = method.traits.chooses_path and sites > 1
    link = LinkCosts.worst_of(each.link for each in reports) if chooses else None
    for unit in units:
        if not isinstance(unit, FactorUnit):
            continue
        most = max(each.rows.get(unit.name, 0) for each in reports)
        given = [each.reasons[unit.name] for each in reports if unit.name in each.reasons]
        if unit.form is None:
            forms: set[Form] = set().union(*(each.forms[unit.name] for each in reports))
            if len(forms) == 1:
                unit.form = forms.pop()
            else:
                given.append("inputs of several sizes" if forms else "no site used it in the first step")
        if not given and link is not None and unit.form is not None and not unit.form.sparse:
            dense, factors = _predict(unit, unit.form, most, sites, link)
            words = f"{1e3 * factors:.2f} ms by factors, {1e3 * dense:.2f} ms by all-reduce"
            (chosen if dense < factors else notices)[unit.name] = f"predicted: {words}"
        elif not given and (excess := _excess(unit, most, sites)) >= 1.0:
            given.append(f"its factors would be {excess:.1f} times the bytes")
        if given:
            reasons[unit.name] = given[0]
        encoded = unit.form is None or unit.form.encoded
        rows[unit.name] = method.rows_sent(most, *unit.shape) if encoded else most
    positions = {name: position for position, name in enumerate(reports[0].order)}
    samples = [each.samples for each in reports]
    decoding = reports[0].decoding
    return MergedReport(reasons, rows, sum(samples), chosen, notices, max(samples), positions, decoding)


def _excess(unit: FactorUnit, rows: int, sites: int) -> float:
    """Return the bytes of the factors over those of an all-reduce; 0.0 where factors are sent in any case."""
    if unit.form is None or not unit.form.may_be_dense:
        return 0.0
    return max(sites, 2) * rows * sum(unit.widths) / (2 * unit.lead.numel())


def _predict(unit: FactorUnit, form: Form, rows: int, sites: int, link: LinkCosts) -> tuple[float, float]:
    """Predict the seconds of a unit's all-reduce, and those of the exchange of its factors."""
    numel, size = unit.lead.numel(), unit.lead.element_size()
    multiplications = rows * form.positions * (sum(unit.widths) if form.table_rows else numel)
    dense = link.dense(size * numel, multiplications)
    return dense, link.factors(size * rows * sum(unit.widths), multiplications, sites)
