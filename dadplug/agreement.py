"""What the sites agree on in the first step of a plan: things that only a step can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .hooks import Form
from .methods import Method
from .units import FactorUnit, Unit


@dataclass(frozen=True)
class FirstStep:
    """What a site saw in its first step.

    Attributes:
        order: names of the units in the order in which backward reached them.
        reasons: by unit that cannot go by factors: why.
        rows: by unit of factors, number of rows.
        forms: by unit of factors, the forms in which they came.
        samples: samples of the step.
    """

    order: list[str]
    reasons: dict[str, str]
    rows: dict[str, int]
    forms: dict[str, set[Form]]
    samples: int

    @classmethod
    def of(cls, units: Sequence[Unit], order: Sequence[Unit], share_inputs: bool, samples: int) -> FirstStep:
        """Looks at the units after a step's backward passes."""
        factored = [unit for unit in units if isinstance(unit, FactorUnit)]
        reasons = {unit.name: "used outside its layer too" for unit in factored if unit.outside}
        if not share_inputs:
            fed = "share_inputs=False: its layer is fed by data"
            reasons |= {unit.name: fed for unit in factored if unit.fed_by_data}
        rows, forms = {unit.name: unit.rows for unit in factored}, {unit.name: unit.forms for unit in factored}
        return cls([unit.name for unit in order], reasons, rows, forms, samples)


@dataclass(frozen=True)
class Agreement:
    """What all sites conclude from what each of them saw.

    Attributes:
        reasons: by unit that is to be all-reduced after all: why.
        rows: by unit of factors, the rows that a site is expected to send.
        samples: samples of all sites in a step.
    """

    reasons: dict[str, str]
    rows: dict[str, int]
    samples: int
    _places: dict[str, int]

    def order(self, units: Sequence[Unit]) -> list[Unit]:
        """Orders units as rank 0's backward reached them; what it has not seen comes last, in the model's reverse."""
        backwards = units[::-1]
        return sorted(backwards, key=lambda unit: self._places.get(unit.name, len(self._places)))


def agree(told: Sequence[FirstStep], units: Sequence[Unit], method: Method) -> Agreement:
    """Draws the conclusions, and tells the units their forms; the same on every site.

    Args:
        told: what each site saw, by rank.
        units: the units.
        method: the method.
    """
    reasons: dict[str, str] = {}
    rows: dict[str, int] = {}
    for unit in units:
        if not isinstance(unit, FactorUnit):
            continue
        most = max(each.rows.get(unit.name, 0) for each in told)
        given = [each.reasons[unit.name] for each in told if unit.name in each.reasons]
        if unit.form is None:
            forms = set().union(*(each.forms[unit.name] for each in told))
            if len(forms) == 1:
                unit.form = forms.pop()
            else:
                given.append("inputs of several sizes" if forms else "no site used it in the first step")
        if not given and (excess := _excess(unit, most, len(told))) >= 1.0:
            given.append(f"its factors would be {excess:.1f} times the bytes")
        if given:
            reasons[unit.name] = given[0]
        encoded = unit.form is None or unit.form.encoded
        rows[unit.name] = method.rows_sent(most, *unit.shape) if encoded else most
    places = {name: place for place, name in enumerate(told[0].order)}
    return Agreement(reasons, rows, sum(each.samples for each in told), places)


def _excess(unit: FactorUnit, rows: int, sites: int) -> float:
    """Tells how many times an all-reduce's bytes the factors take, 0.0 where they are to be sent in any case."""
    if unit.form is None or not unit.form.may_be_dense:
        return 0.0
    return max(sites, 2) * rows * sum(unit.widths) / (2 * unit.lead.numel())
