"""What the sites agree on in the first step of a plan: things that only a step can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..exchange.codec import register, register_family
from ..hooks import Form
from ..hooks.convolution import Geometry
from ..methods import Method
from ..units.base import Unit
from ..units.factor import FactorUnit
from .link_model import LinkCosts

register_family(Form)
register(Geometry)  # which forms of convolutions hold


@register
@dataclass(frozen=True)
class FirstStepReport:
    """What a site saw in its first step.

    Attributes:
        order: names of the units in the order in which backward reached them.
        reasons: by unit that cannot go by factors: why.
        rows: by unit of factors, number of rows.
        forms: by unit of factors, the forms in which they came.
        samples: samples of the step.
        link: what it measured of the link, where the method chooses by it.
    """

    order: list[str]
    reasons: dict[str, str]
    rows: dict[str, int]
    forms: dict[str, set[Form]]
    samples: int
    link: LinkCosts | None

    @classmethod
    def of(
        cls, units: Sequence[Unit], order: Sequence[Unit], share_inputs: bool, samples: int, link: LinkCosts | None
    ) -> FirstStepReport:
        """Look at the units after a step's backward passes."""
        factored = [unit for unit in units if isinstance(unit, FactorUnit)]
        reasons = {unit.name: "used outside its layer too" for unit in factored if unit.outside}
        if not share_inputs:
            fed = "share_inputs=False: its layer is fed by data"
            reasons |= {unit.name: fed for unit in factored if unit.fed_by_data}
        rows, forms = {unit.name: unit.rows for unit in factored}, {unit.name: unit.forms for unit in factored}
        return cls([unit.name for unit in order], reasons, rows, forms, samples, link)


@dataclass(frozen=True)
class MergedReport:
    """What all sites conclude from what each of them saw.

    Attributes:
        reasons: by unit that is to be all-reduced after all: why.
        chosen: by unit of factors that is to be all-reduced since that is faster: by how much.
        notices: by unit that goes by factors since that is faster: by how much.
        rows: by unit of factors, the rows that a site is expected to send.
        samples: samples of all sites in a step.
        largest: samples of the site that has most.
    """

    reasons: dict[str, str]
    rows: dict[str, int]
    samples: int
    chosen: dict[str, str]
    notices: dict[str, str]
    largest: int
    _places: dict[str, int]

    def order(self, units: Sequence[Unit]) -> list[Unit]:
        """Orders units as rank 0's backward reached them; what it has not seen comes last, in the model's reverse."""
        backwards = units[::-1]
        return sorted(backwards, key=lambda unit: self._places.get(unit.name, len(self._places)))


def merge_reports(reports: Sequence[FirstStepReport], units: Sequence[Unit], method: Method) -> MergedReport:
    """Draws the conclusions, and tells the units their forms; the same on every site.

    Args:
        reports: what each site saw, by rank.
        units: the units.
        method: the method.
    """
    reasons: dict[str, str] = {}
    rows: dict[str, int] = {}
    chosen: dict[str, str] = {}
    notices: dict[str, str] = {}
    links = [each.link for each in reports if each.link is not None]
    link = LinkCosts.worst(links) if links and len(reports) > 1 else None
    for unit in units:
        if not isinstance(unit, FactorUnit):
            continue
        most = max(each.rows.get(unit.name, 0) for each in reports)
        given = [each.reasons[unit.name] for each in reports if unit.name in each.reasons]
        if unit.form is None:
            forms = set().union(*(each.forms[unit.name] for each in reports))
            if len(forms) == 1:
                unit.form = forms.pop()
            else:
                given.append("inputs of several sizes" if forms else "no site used it in the first step")
        if not given and link is not None and unit.form is not None and not unit.form.sparse:
            dense, factors = _predict(unit, most, len(reports), link)
            words = f"{1e3 * factors:.2f} ms by factors, {1e3 * dense:.2f} ms by all-reduce"
            (chosen if dense < factors else notices)[unit.name] = f"predicted: {words}"
        elif not given and (excess := _excess(unit, most, len(reports))) >= 1.0:
            given.append(f"its factors would be {excess:.1f} times the bytes")
        if given:
            reasons[unit.name] = given[0]
        encoded = unit.form is None or unit.form.encoded
        rows[unit.name] = method.rows_sent(most, *unit.shape) if encoded else most
    places = {name: place for place, name in enumerate(reports[0].order)}
    samples = [each.samples for each in reports]
    return MergedReport(reasons, rows, sum(samples), chosen, notices, max(samples), places)


def _excess(unit: FactorUnit, rows: int, sites: int) -> float:
    """Tells how many times an all-reduce's bytes the factors take, 0.0 where they are to be sent in any case."""
    if unit.form is None or not unit.form.may_be_dense:
        return 0.0
    return max(sites, 2) * rows * sum(unit.widths) / (2 * unit.lead.numel())


def _predict(unit: FactorUnit, rows: int, sites: int, link: LinkCosts) -> tuple[float, float]:
    """Predicts the seconds of a unit's all-reduce, and of the exchange of its factors."""
    assert unit.form is not None
    numel, size = unit.lead.numel(), unit.lead.element_size()
    multiplications = rows * unit.form.positions * (sum(unit.widths) if unit.form.table_rows else numel)
    dense = link.dense(size * numel, multiplications)
    return dense, link.factors(size * rows * sum(unit.widths), multiplications, sites)
