"""dSGD: every gradient is all-reduced, ``G = sum over sites of w_s G_s``; the exact baseline."""

from __future__ import annotations

from .base import Method, Traits, register_method


@register_method("dsgd")
class DSGD(Method):
    """All-reduce of m n values a layer, in buckets that are summed during the backward pass."""

    traits = Traits(exact=True, takes_factors=False)

    def path(self, out: int, width: int) -> str:
        return "allreduce"

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        return 0
