"""Linear layers of other libraries, recognised by their classes' names, held against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from dadplug.hooks import LayerCapture, capturable_layers
from dadplug.hooks.registry import refusal_of
from layer_gradients import matches_autograd
from torch import Tensor, nn

import dadplug
from dadplug.errors import NonFiniteError


def conv1d(out: int, width: int) -> nn.Module:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(out, width)


def named(name: str, kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class that has the name of a library's."""
    module, _, qualified = name.rpartition(".")
    return type(qualified, (kind,), {"__module__": module, "__qualname__": qualified, "forward": kind.forward})


class Plain(nn.Module):
    """A layer like torch_geometric's, which does not derive from nn.Linear."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OwnForward(nn.Linear):
    """A layer like timm's and mmcv's, which overrides the forward of nn.Linear by the same."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


STAND_INS = {
    "mmcv.cnn.bricks.wrappers.Linear": OwnForward,
    "timm.layers.linear.Linear": OwnForward,
    "timm.models.layers.linear.Linear": OwnForward,
    "torch_geometric.nn.dense.linear.Linear": Plain,
}


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4), (0,), ()])
def test_a_linear_layer_with_a_weight_of_in_by_out(shape):
    matches_autograd(conv1d(5, 3), torch.randn(*shape, 3))


def test_a_linear_layer_with_a_weight_of_in_by_out_without_a_trained_bias_and_of_transposed_inputs():
    layer = conv1d(5, 3)
    with LayerCapture(layer, weight_gradients=False) as capture:
        layer(torch.randn(3, 4, 2).transpose(0, 2).contiguous()).sum().backward()
        assert capture.factors[""].activations.shape == (8, 3)
    layer.bias.requires_grad_(False)
    with LayerCapture(layer) as capture:
        layer(x=torch.randn(4, 3)).square().sum().backward()
        torch.testing.assert_close(capture.factors[""].gradient(), layer.weight.grad)
    assert layer.bias.grad is None


def test_autograd_returns_and_differentiates_gradients_of_a_weight_of_in_by_out():
    layer, inputs = conv1d(5, 3).double(), torch.randn(4, 3, dtype=torch.float64)

    def penalty() -> list[Tensor]:
        (gradient,) = torch.autograd.grad(layer(inputs).tanh().sum(), layer.weight, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [layer.weight, layer.bias]))

    expected = penalty()
    with LayerCapture(layer, weight_gradients=False) as capture:
        torch.testing.assert_close(penalty(), expected)
        assert not capture.factors


def test_matrices_of_a_weight_of_in_by_out_are_the_rows():
    layer = conv1d(5, 3).double()
    with LayerCapture(layer) as capture:
        layer(torch.randn(40, 3, dtype=torch.float64)).square().sum().backward()
        matrix = capture.factors[""].matrix(layer.weight.shape)
    assert matrix.deltas.shape == (40, 3)
    assert matrix.activations.shape == (40, 5)
    torch.testing.assert_close(matrix.gradient(), layer.weight.grad)
    torch.testing.assert_close(matrix.bias_gradient(), layer.bias.grad)
    twice = type(matrix).stack([matrix, matrix])
    assert twice.inputs is twice.deltas
    assert twice.inputs.shape == (80, 3)


def test_autocast_keeps_a_weight_of_in_by_out_in_its_types():
    layer, inputs = conv1d(5, 3), torch.randn(2, 3, requires_grad=True)
    with LayerCapture(layer) as capture:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(inputs)
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
        assert inputs.grad.dtype == layer.weight.grad.dtype == torch.float32
        gradient = capture.factors[""].to(torch.float32).gradient()
        torch.testing.assert_close(gradient, layer.weight.grad, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("name", STAND_INS)
def test_layers_of_other_libraries_are_captured_by_name(name):
    kind = named(name, STAND_INS[name])
    assert not capturable_layers(STAND_INS[name](3, 5))
    matches_autograd(kind(3, 5), torch.randn(2, 4, 3))
    with LayerCapture(layer := kind(3, 5)) as capture:
        layer(x=torch.randn(4, 3)).sum().backward()
        assert capture.factors[""].rows == 4


def test_falcons_linear_layers_are_captured():
    layer = pytest.importorskip("transformers.models.falcon.modeling_falcon").FalconLinear
    matches_autograd(layer(3, 5), torch.randn(2, 4, 3))
    matches_autograd(layer(3, 5, bias=False), torch.randn(4, 3))


def test_a_layer_of_a_known_name_that_computes_something_else_is_left_alone():
    layer = named("timm.layers.linear.Linear", Scaled)(3, 5)
    assert not capturable_layers(layer)
    assert "is not a plain linear layer" in refusal_of(layer)
    with_context = named("timm.layers.linear.Linear", type("Two", (Plain,), {"forward": lambda self, x, y: x + y}))(
        3, 5
    )
    assert not capturable_layers(with_context)


def test_layers_without_a_shape_are_left_alone_until_they_have_one():
    layer = nn.LazyLinear(5)
    assert not capturable_layers(layer)
    layer(torch.randn(2, 3))
    matches_autograd(layer, torch.randn(4, 3))


def test_overridden_forwards_of_known_layers_are_left_alone():
    layer = conv1d(5, 3)

    class Doubled(type(layer)):
        def forward(self, x):
            return 2 * super().forward(x)

    assert not capturable_layers(Doubled(5, 3))
    assert capturable_layers(layer)
    layer.forward = lambda x: x
    assert not capturable_layers(layer)


def blames_the_loss() -> None:
    model = nn.Sequential(conv1d(24, 20), nn.Tanh(), conv1d(30, 24))
    for mode in ("dad", "rankdad"):
        reduction = dadplug.GradientReduction(model, mode=mode, rank=2)
        (model(torch.randn(6, 20)).sum() * torch.nan).backward()
        with pytest.raises(NonFiniteError, match=r"loss's gradient at the output of the layer of '2\.weight'"):
            reduction.synchronize()
        reduction.detach()
        model.zero_grad()


def test_what_is_not_finite_at_a_weight_of_in_by_out_is_told_from_its_input(sites):
    pytest.importorskip("transformers")
    sites(2).run(blames_the_loss)
