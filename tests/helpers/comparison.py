"""Comparisons of sites' gradients with those of one process that has all rows."""

from __future__ import annotations


def shares(samples: int, rank: int, world_size: int, step: int) -> slice:
    """Cut a batch unevenly, in another way each step."""
    cuts = sorted((17 * (step + 1) * (site + 1)) % (samples - 1) + 1 for site in range(world_size - 1))
    bounds = [0, *cuts, samples]
    return slice(bounds[rank], bounds[rank + 1])


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def off_by(found, expected):
    """The relative error of a gradient; a gradient that is nothing but noise counts as right."""
    assert found.is_sparse == expected.is_sparse
    error, size = (found - expected).to_dense().norm(), expected.to_dense().norm()
    return 0.0 if size < 1e-14 else float(error / size)
