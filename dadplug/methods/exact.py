"""Exact methods: dSGD, dAD, edAD, and the choice between the first two (dAD and edAD: arXiv:2102.09631, section 3)."""

from __future__ import annotations

from ..exchange.factor_buckets import FactorPayload
from ..hooks import Factor
from .base import Method, Traits, register_method


@register_method("dad")
class DAD(Method):
    """Gather of N (m + n) values a layer, fewer than dSGD's m n if N < m n / (m + n)."""

    traits = Traits(exact=True)

    def path(self, out: int, width: int) -> str:
        return "factors"

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        return rows

    def encode(self, name: str, factor: Factor, with_bias: bool) -> FactorPayload:
        return FactorPayload(factor.deltas, factor.activations)


@register_method("auto")
class Auto(DAD):
    """`DAD`, or an all-reduce, as `dadplug.planning.first_step` chooses by the link and the rows."""

    traits = Traits(exact=True, chooses_path=True)


@register_method("dsgd")
class DSGD(Method):
    """All-reduce of m n values a layer, in buckets that are summed during the backward pass."""

    traits = Traits(exact=True, takes_factors=False)

    def path(self, out: int, width: int) -> str:
        return "allreduce"

    def rows_sent(self, rows: int, out: int, width: int) -> int:
        return 0


@register_method("edad")
class EDAD(DAD):
    """Gather of N n values a layer in a chain, and of N (m + n) for the last one and for layers outside of chains."""

    traits = Traits(exact=True, recomputes_deltas=True)
