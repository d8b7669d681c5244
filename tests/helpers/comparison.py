"""Comparisons of sites' gradients with those of one process that has all rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
import zoo
from torch import Tensor, nn

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


def descend(model: nn.Module) -> None:
    """Take a step of plain gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def train(model: nn.Module, reduction: Any, backward: Any, steps: int, state: list | None = None) -> tuple[list, list]:
    """Train by plain gradient descent, from the beginning or from a state that an earlier call has returned.

    Args:
        model: the model.
        reduction: its reduction, which is detached in the end.
        backward: runs a backward pass; gets the number of the step.
        steps: number of the first step that is left out.
        state: states of the model and of all sites, and the number of steps taken.

    Returns:
        The parameters at the end, and the state.
    """
    first = 0
    if state is not None:
        model.load_state_dict(state[0])
        reduction.load_states(state[1])
        first = state[2]
    for step in range(first, steps):
        backward(step)
        reduction.synchronize()
        descend(model)
    assert reduction.first_difference() is None
    states = reduction.gather_objects(reduction.state_dict())
    reduction.detach()
    return [p.detach().clone() for p in model.parameters()], [model.state_dict(), states, steps]


def assert_resumes(sites: Any, function: Any, whole: int, half: int, *options: Any, exact: bool = False) -> list:
    """Check that a training that is resumed ends as one that never stopped; return the state where it was stopped.

    Args:
        sites: the sites.
        function: runs `train` at a site; gets a number of steps, a state or None, and the options.
        whole: number of all steps.
        half: number of steps after which it is stopped.
        options: further arguments of the function.
        exact: whether the parameters are equal to the bit.
    """
    expected, _ = sites.run(function, whole, None, *options)[0]
    _, state = sites.run(function, half, None, *options)[0]
    resumed, _ = sites.run(function, whole, state, *options)[0]
    tolerance = 0.0 if exact else 1e-6
    for one, other in zip(expected, resumed, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return state


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
        self.reduction = dadplug.GradientReduction(self.model, **{"weighting": "samples"} | options)

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.reduction.detach()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both."""
        self.model.zero_grad(set_to_none)
        self.reference.zero_grad(set_to_none)

    def step(self, inputs: Any, targets: Tensor, mine: slice, where: object, rtol: float = 1e-9) -> None:
        """Train on rows, of which this site has its own or none, and compare the gradients of both."""
        if len(targets[mine]):
            zoo.loss(self.model, inputs[mine], targets[mine]).backward()
            self.reduction.synchronize()
        else:
            self.reduction.idle()
        zoo.loss(self.reference, inputs, targets).backward()
        self.check(where, rtol)

    def check(self, where: object, rtol: float = 1e-9) -> None:
        """Compare the gradients of both."""
        expected = dict(self.reference.named_parameters())
        for name, parameter in self.model.named_parameters():
            gradient = expected[name].grad
            assert (parameter.grad is None) == (gradient is None), (where, name)
            if gradient is not None:
                assert torch.allclose(parameter.grad, gradient, rtol=rtol, atol=1e-13), (where, name)
