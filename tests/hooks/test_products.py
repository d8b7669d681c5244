"""Matrix products of captured layers by oneDNN, where it is faster than MKL."""

import pytest
import torch
import torch.nn.functional as F
from dadplug.hooks import LayerCapture, products
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dadplug.options import Options
from dadplug.step.methods import make_method
from dadplug.step.planning.partition import partition_parameters

pytestmark = pytest.mark.skipif(
    products._onednn() is None or not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@pytest.fixture
def calls(monkeypatch):
    """Have oneDNN used on every processor, and list the shapes of what it multiplies."""
    shapes = []

    def multiply(left, transposed, bias):
        found = own(left, transposed, bias)
        if found is not None:
            shapes.append((*left.shape, len(transposed)))
        return found

    own = products._multiply
    monkeypatch.setattr(products, "has_faster_kernels", lambda: True)
    monkeypatch.setattr(products, "_multiply", multiply)
    return shapes


def error(result, expected):
    return float(((result - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("shape", [(16,), (3, 40), (2, 5, 16)])
def test_products_are_precise(calls, shape, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    left, weight, bias = (torch.randn(*size, generator=generator) for size in ((*shape, 300), (200, 300), (200,)))
    doubles = left.double(), weight.double(), bias.double()
    assert torch.equal(products.linear(left, weight, bias), F.linear(left, weight, bias))
    monkeypatch.setattr(products.thread, "fastest", True)
    assert error(products.linear(left, weight, bias), F.linear(*doubles)) < 1e-6
    assert error(products.linear(left, weight, None), F.linear(*doubles[:2])) < 1e-6
    assert error(products.product(left, weight.T), doubles[0] @ doubles[1].T) < 1e-6
    assert error(products.product(left, weight.T.contiguous()), doubles[0] @ doubles[1].T) < 1e-6
    assert calls == [(*shape, 300, 200)] * 4


def test_small_and_other_products_are_torchs_own(calls):
    left, right = torch.randn(64, 128), torch.randn(128, 128)
    expanded = torch.ones(()).expand(64, 128)
    cases = [(left[:8], right[:, :64]), (left[:7], right), (left.double(), right.double()), (expanded, right)]
    cases += [(left.bfloat16(), right.bfloat16()), (torch.randn(64, 256)[:, ::2], right)]
    for factors in cases:
        assert torch.equal(products.product(*factors), factors[0] @ factors[1])
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(products.product(left, right), left @ right)
    with FlopCounterMode(display=False) as counter:
        products.product(left, right)
    assert counter.get_total_flops() == 2 * 64 * 128 * 128
    with torch.autocast("cpu", torch.bfloat16):
        assert products.product(left, right).dtype == torch.bfloat16
    room = torch.empty(64, 128)
    assert products.product(left, right, room) is room
    leaf = right.clone().requires_grad_()
    assert products.product(left, leaf).requires_grad
    assert not calls


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 192), nn.ReLU(), nn.Linear(192, 128))


@pytest.mark.parametrize("weight_gradients", [True, False])
def test_captured_layers_multiply_by_it(calls, weight_gradients):
    model, inputs = make_model(), torch.randn(2, 64, 256)
    reference = make_model().double()
    with LayerCapture(model, weight_gradients=weight_gradients, fastest=True) as capture:
        outputs = model(inputs)
        outputs.square().sum().backward()
        factors = capture.factors
    expected = reference(inputs.double())
    expected.square().sum().backward()
    assert error(outputs, expected) < 1e-6
    for name, factor in factors.items():
        assert error(factor.gradient(), reference.get_submodule(name).weight.grad) < 1e-5
    assert calls == [(2, 64, 256, 192), (2, 64, 192, 128), (2, 64, 128, 192)]


def test_second_derivatives_are_torchs_own(calls):
    model, inputs = make_model(), torch.randn(64, 256, requires_grad=True)
    with LayerCapture(model, fastest=True):
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        gradient.square().sum().backward()
    plain = make_model()
    (gradient,) = torch.autograd.grad(plain(inputs).sum(), inputs, create_graph=True)
    gradient.square().sum().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad)
    # Those of the forward pass, and that of the zeros that ReLU's second derivative sends back.
    assert calls == [(64, 256, 192), (64, 192, 128), (64, 192, 256)]


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
def test_exact_methods_keep_the_rounding_of_torch(calls, mode):
    model, inputs = make_model(), torch.randn(64, 256)
    partition = partition_parameters(model, make_method(Options(mode=mode)), frozenset(), False)
    outputs = model(inputs)
    outputs.square().sum().backward()
    partition.capture.detach()
    assert bool(calls) == (mode == "rankdad")
    if mode == "dad":
        assert torch.equal(outputs, make_model()(inputs))
