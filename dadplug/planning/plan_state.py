"""State of a plan that a site needs to join others: with it the site plans as they have."""

from __future__ import annotations

from dataclasses import dataclass

from ..exchange.codec import register
from ..hooks import Form
from .first_step import MergedReport

Layout = list[list[list[int]]]
"""By handler and slot: what `dadplug.exchange.factor_buckets.Slot.layout` returns."""


@register
@dataclass(frozen=True)
class PlanState:
    """State of a complete plan.

    Attributes:
        sites: number of sites of the plan.
        version: number of the plan.
        earlier: by name of a unit that is all-reduced since earlier plans: why.
        merged: conclusions from the first step's reports.
        forms: by name of a factor unit, the form of its factors.
        reference: samples of all sites in a step, about.
        planned_for: samples of the site that had most in the first step.
        off_plan: steps in succession with batches of another size.
        layout: room in the buckets, by handler and slot.
    """

    sites: int
    version: int
    earlier: dict[str, str]
    merged: MergedReport
    forms: dict[str, Form]
    reference: int
    planned_for: int
    off_plan: int
    layout: Layout
