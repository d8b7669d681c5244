"""edAD: dAD that sends deltas at the end of a chain of layers only; exact (arXiv:2102.09631).

Every site recomputes the others on the rows of all sites, ``D_{i-1} = (D_i W_i) * phi'(z_{i-1})``.
"""

from __future__ import annotations

from .base import Traits, register_method
from .dad import DAD


@register_method("edad")
class EDAD(DAD):
    """Gather of N n values a layer in a chain, and of N (m + n) for the last one and for layers outside of chains."""

    traits = Traits(exact=True, recomputes_deltas=True)
