"""Comparison of a layer's factors with autograd's gradients."""

from __future__ import annotations

import torch
from dadplug.hooks import Factor, LayerCapture
from torch import nn


def backward(layer, weights, *inputs, **named):
    (layer(*inputs, **named).tanh() * weights).sum().backward()


def matches_autograd(layer: nn.Module, *inputs, **named) -> None:
    """Run a layer with and without capture: output, gradients, and what its factors say of them."""
    layer.double()
    given = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    differentiable = [x for x in (*given, *named.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    output = layer(*given, **named)
    weights = torch.randn_like(output)
    backward(layer, weights, *given, **named)
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    of_inputs = [x.grad for x in differentiable]
    for weight_gradients in (True, False):
        layer.zero_grad()
        for x in differentiable:
            x.grad = None
        with LayerCapture(layer, weight_gradients=weight_gradients) as capture:
            torch.testing.assert_close(layer(*given, **named), output)
            backward(layer, weights, *given, **named)
            (factor,) = capture.factors.values()
        torch.testing.assert_close([x.grad for x in differentiable], of_inputs)
        for name, parameter in layer.named_parameters():
            if weight_gradients:
                assert parameter.grad.is_sparse == expected[name].is_sparse
                torch.testing.assert_close(parameter.grad.to_dense(), expected[name].to_dense())
            else:
                assert parameter.grad is None
    says_the_gradients(factor, expected)


def says_the_gradients(factor: Factor, expected: dict) -> None:
    weight = expected["weight"]
    assert factor.gradient().is_sparse == weight.is_sparse
    torch.testing.assert_close(factor.gradient().to_dense(), weight.to_dense())
    twice = Factor.stack([factor, factor])
    torch.testing.assert_close(twice.gradient().to_dense(), 2 * weight.to_dense())
    added = factor.form.add_to(factor.gradient(), factor.deltas, factor.activations)
    torch.testing.assert_close(added.to_dense(), 2 * weight.to_dense())
    deltas, activations = factor.form.unfold(factor.deltas, factor.activations)
    torch.testing.assert_close((deltas.T @ activations).view(weight.shape), weight.to_dense())
    if "bias" in expected:
        torch.testing.assert_close(factor.bias_gradient(), expected["bias"])
