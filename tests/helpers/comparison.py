"""Comparisons of sites' gradients with those of one process that has all rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import dadplug


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


class Beside:
    """A model under reduction, and a copy of it in one process that has the rows of all sites.

        with Beside(build, mode="dad") as both:
            for step in range(3):
                both.zero_grad()
                ...  # backward of both.model by this site's rows, of both.reference by those of all sites
                both.reduction.synchronize()
                both.check(step)

    Args:
        build: makes the model, the same at all sites.
        options: options of the reduction.
    """

    def __init__(self, build: Any, **options: Any) -> None:
        torch.manual_seed(3)
        self.reference: nn.Module = build()
        self.model = copy.deepcopy(self.reference)
        self.reduction = dadplug.GradientReduction(self.model, **options)

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.reduction.detach()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both."""
        self.model.zero_grad(set_to_none)
        self.reference.zero_grad(set_to_none)

    def check(self, where: object, rtol: float = 1e-9) -> None:
        """Compare the gradients of both."""
        expected = dict(self.reference.named_parameters())
        for name, parameter in self.model.named_parameters():
            gradient = expected[name].grad
            assert (parameter.grad is None) == (gradient is None), (where, name)
            if gradient is not None:
                assert torch.allclose(parameter.grad, gradient, rtol=rtol, atol=1e-13), (where, name)
