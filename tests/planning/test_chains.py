"""Chains of layers: which there are, what breaks them, and what the plan says of them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from chained_models import chained, compare, draw, loss, mlp, pair
from dadplug.hooks import Elementwise, register_elementwise
from dadplug.hooks.elementwise import _KINDS
from torch import nn

import dadplug


def thaws() -> list[list[str]]:
    """Layers are frozen and freed in mid-training: chains are found anew, and a warning says so where none is left."""
    rank = dist.get_rank()
    model, reference = pair("mlp")
    reduction = dadplug.GradientReduction(model, mode="edad")
    found = []
    for step in range(8):
        for net in (model, reference):
            net[4].requires_grad_(step not in (2, 3))
            net[0].requires_grad_(step not in (4, 5))
            net[2].requires_grad_(step != 5)
            net[4].requires_grad_(step not in (2, 3, 5))
            net.zero_grad()
        inputs, targets = draw(8, step)
        mine = slice(0, 3) if rank == 0 else slice(3, 8)
        loss(model, inputs[mine], targets[mine]).backward()
        if step == 5:
            with pytest.warns(UserWarning, match="follows another"):
                reduction.synchronize()
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                reduction.synchronize()
        loss(reference, inputs, targets).backward()
        compare(model, reference, 1e-9, step)
        found.append([name for name in chained(reduction) if name.endswith("weight")])
        reasons = {row.parameter: row.reason for row in reduction.plan}
        assert step != 2 or reasons["2.weight"] == "ends a chain: 4 (Linear) is frozen"
    reduction.detach()
    return found


def test_chains_are_found_anew_when_layers_are_frozen_or_freed(sites):
    full = ["0.weight", "2.weight", "4.weight"]
    expected = [full, full, ["0.weight"], ["0.weight"], ["2.weight", "4.weight"], [], full, full]
    assert sites(2).run(thaws) == [expected] * 2


BREAKERS = {
    "1 (BatchNorm1d) mixes rows": lambda: [nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU()],
    "2 (Dropout) draws its own numbers": lambda: [nn.ReLU(), nn.Dropout(), nn.LayerNorm(6)],
    "1 (LayerNorm) mixes the numbers of a row": lambda: [nn.LayerNorm(6)],
    "1 (GELU) has a derivative that its output does not tell": lambda: [nn.GELU()],
    "1 (PReLU) has a slope that is trained": lambda: [nn.PReLU()],
    "1 (Tanh) is followed by another function": lambda: [nn.Tanh(), nn.Sigmoid()],
    "1 (LeakyReLU) is no function that chains go through": lambda: [nn.LeakyReLU(-0.1)],
    "1 (Linear) is frozen": lambda: [nn.Linear(6, 6).requires_grad_(False)],
}


def refuses(breaker: str, idle: bool) -> str:
    layers = BREAKERS[breaker]() if breaker else []
    model = nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 4)) if breaker else nn.Linear(6, 4)
    reduction = dadplug.GradientReduction(model.double(), mode="edad")
    try:
        if not (idle and dist.get_rank() == 0):
            loss(model, *draw(4, 1)).backward()
        with pytest.raises(ValueError, match="mode 'edad'") as error:
            reduction.synchronize()
    finally:
        reduction.detach()
    return str(error.value)


@pytest.mark.parametrize("breaker", [*BREAKERS, ""])
def test_a_model_without_a_chain_is_refused_on_all_sites_by_the_module_that_breaks_it(sites, breaker):
    for message in [*sites(2).run(refuses, breaker, False), *sites(2).run(refuses, breaker, True)]:
        assert (breaker or "no fully connected layer in it follows another") in message
        assert "Use mode='dad'" in message


FUNCTIONS = [
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1), nn.LeakyReLU(0.1, inplace=True), nn.ELU(0.5), nn.SELU()),
    *(nn.ELU(inplace=True), nn.Tanh(), nn.Sigmoid()),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_tell_the_derivatives(function, dtype):
    inputs = (3 * torch.randn(50, 7)).to(dtype).requires_grad_()
    outputs, gradient = function(inputs * 1), torch.randn(50, 7).to(dtype)
    (expected,) = torch.autograd.grad(outputs, inputs, gradient, retain_graph=True)
    elementwise = Elementwise.of(outputs.grad_fn)
    torch.testing.assert_close(elementwise.backward(gradient, outputs.detach()), expected)


def test_functions_can_be_registered():
    def backward(gradient, output, beta, threshold):
        return gradient * -torch.expm1(-beta * output)

    register_elementwise(["SoftplusBackward0"], backward, ["beta", "threshold"], rounds=True)
    try:
        model = mlp(6, 5, 4, phi=nn.Softplus).double()
        reference = copy.deepcopy(model)
        reduction = dadplug.GradientReduction(model, mode="edad")
        for net in (model, reference):
            loss(net, *draw(5, 0)).backward()
        reduction.synchronize()
        compare(model, reference, 1e-12, "softplus")
        assert len(chained(reduction)) == 2
        reduction.detach()
    finally:
        del _KINDS["SoftplusBackward0"]


def test_copies_made_while_chains_are_traced_are_plain():
    model, _ = pair("mlp")
    reduction = dadplug.GradientReduction(model, mode="edad")
    inputs, targets = draw(4, 0)
    value = loss(model, inputs, targets)
    copied = copy.deepcopy(model)
    value.backward()
    assert torch.equal(copied(inputs), model(inputs))
    reduction.detach()
    assert not any(module._forward_hooks for module in model.modules())


def test_compiled_code_between_layers_is_refused_with_its_name():
    torch._dynamo.reset()
    model, _ = pair("mlp")
    reduction = dadplug.GradientReduction(model, mode="edad")
    for activation in model[1::2]:  # of a whole model, versions of torch compile different parts
        activation.forward = torch.compile(activation.forward, backend="aot_eager")
    loss(model, *draw(4, 0)).backward()
    with pytest.raises(ValueError, match=r"torch.compile's code before 2 \(Linear\) cannot be looked into"):
        reduction.synchronize()
    reduction.detach()
