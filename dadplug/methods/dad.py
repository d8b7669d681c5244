"""dAD: sites exchange activations and deltas, ``G = stack(D)^T stack(A)``; exact (arXiv:2102.09631, section 3)."""

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
