"""Factors of large layers are handed over before the gradient of the layer's input is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from dadplug.hooks import LayerCapture, OwnHook
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTHS = (512, 1024)  # 8 rows make a large layer


class _Products(TorchDispatchMode):
    """Record of matrix products."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.events.append("product")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("traced", "rows"), [(False, 8), (True, 8), (False, 2)])
def test_factors_before_the_gradient_of_the_input(traced, rows):
    layer = nn.Linear(*WIDTHS)
    events: list[str] = []
    with LayerCapture(layer, weight_gradients=False, trace_chains=traced) as capture:
        inputs = torch.randn(rows, WIDTHS[0], requires_grad=True)
        outputs = layer(inputs)
        layer.weight.register_post_accumulate_grad_hook(OwnHook(lambda _: events.append("factors")))
        with _Products(events):
            outputs.sum().backward()
        assert capture.factors[""].deltas.shape == (rows, WIDTHS[1])
    early = rows == 8 and not traced
    assert events == (["factors", "product"] if early else ["product", "factors"])


@pytest.mark.parametrize("leading", [(8,), (2, 3, 4)])
def test_gradients_of_large_layers(leading):
    plain = nn.Sequential(nn.Linear(*WIDTHS), nn.Tanh(), nn.Linear(*WIDTHS[::-1], bias=False)).double()
    model = copy.deepcopy(plain)
    inputs = torch.randn(*leading, WIDTHS[0], dtype=torch.float64)
    found = []
    with LayerCapture(model, weight_gradients=False) as capture:
        for each in (plain, model):
            leaf = inputs.clone().requires_grad_()
            (penalised,) = torch.autograd.grad(each(leaf).square().sum(), leaf, create_graph=True)
            (each(leaf).square().sum() + 1e-3 * penalised.square().sum()).backward()
            found.append(leaf.grad)
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
        for name, factor in capture.factors.items():
            layer, expected = model.get_submodule(name), plain.get_submodule(name)
            dense = 0.0 if layer.weight.grad is None else layer.weight.grad
            gradient = factor.deltas.T @ factor.activations + dense
            torch.testing.assert_close(gradient, expected.weight.grad, rtol=1e-12, atol=1e-9)


def test_a_weight_changed_before_backward_is_found():
    layer = nn.Linear(*WIDTHS)
    with LayerCapture(layer, weight_gradients=False):
        outputs = layer(torch.randn(8, WIDTHS[0], requires_grad=True))
        with torch.no_grad():
            layer.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs.sum().backward()
