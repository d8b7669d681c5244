"""auto: the exact path of each layer with the least predicted time, factors (dAD) or the all-reduce."""

from __future__ import annotations

from .base import Traits, register_method
from .dad import DAD


@register_method("auto")
class Auto(DAD):
    """`DAD`, or an all-reduce, as `dadplug.planning.first_step` chooses by the link and the rows."""

    traits = Traits(exact=True, chooses_path=True)
