"""Warm-up of a method's kernels, whose first call takes as long as many steps."""

from __future__ import annotations

import torch

from ..hooks import Factor
from .base import MethodOptions, decode, make_method

_ROWS, _OUT, _WIDTH = 12, 20, 16


def warm_up(options: MethodOptions, dtype: torch.dtype) -> None:
    """Encode and decode a small layer, so that kernels are loaded or compiled before other sites wait for this one.

    Args:
        options: options of the reduction.
        dtype: type of the gradients.
    """
    method = make_method(options)
    if not (method.traits.takes_factors and dtype.is_floating_point):
        return
    generator = torch.Generator().manual_seed(0)
    activations, deltas = (torch.randn(_ROWS, n, generator=generator).to(dtype) for n in (_WIDTH, _OUT))
    for _ in range(2):  # the second call begins from the basis of the first
        payload = method.encode("warm-up", Factor(activations, deltas), True)
        decode([payload, payload], [0.5, 0.5], True, site_by_site=method.traits.exact)
        method.commit("warm-up")
