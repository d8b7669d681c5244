"""auto: for each layer the exact path that is predicted to take the least time, factors (dAD) or the all-reduce."""

from __future__ import annotations

from .base import Traits, register_method
from .dad import DAD


@register_method("auto")
class Auto(DAD):
    """Sends what `DAD` sends, or all-reduces; `dadplug.planning.first_step` chooses by the link and by the rows."""

    traits = Traits(exact=True, chooses_path=True)
