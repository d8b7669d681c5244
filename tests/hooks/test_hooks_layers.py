"""Factors of each kind of layer, held against autograd."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from dadplug.hooks import Elementwise, Factor, LayerCapture, capturable_layers, linear, registry
from dadplug.hooks.convolution import ConvOfOwnForward
from dadplug.hooks.registry import refusal_of
from support import refuses
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import dadplug
from dadplug.errors import NonFiniteError
from dadplug.exchange import codec


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


# Factors of each kind of layer, held against autograd


CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(dims, mode):
    size = (7, 6, 5)[:dims]
    for kernel, stride, padding, dilation, groups in product((2, 3), (1, 2), (0, 1, "same"), (1, 2), (1, 2, 4)):
        if padding != "same" or stride == 1:
            layer = CONVOLUTIONS[dims](4, 8, kernel, stride, padding, dilation, groups, padding_mode=mode)
            matches_autograd(layer, torch.randn(3, 4, *size))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions(dims):
    size = (4, 3, 2)[:dims]
    for stride, padding, dilation, groups, longer in product((1, 2, 3), (0, 1), (1, 2, 4), (1, 2, 4), (0, 1, 2)):
        if longer < max(stride, dilation):
            layer = TRANSPOSED[dims](8, 4, 3, stride, padding, longer, groups, dilation=dilation)
            matches_autograd(layer, torch.randn(3, 8, *size))


class PaddedConv(nn.Conv2d):
    """A convolution that pads its input in a forward of its own, and whose arguments are of many kinds."""

    def forward(self, input):
        stride = list(self.stride) if self.groups == 1 else self.stride[0]
        padded = F.pad(input, [0, 1, 0, 1])
        return F.conv2d(padded, self.weight, bias=self.bias, stride=stride, groups=self.groups)


class StandardisedConv(PaddedConv):
    """A convolution with another weight than its parameter, which is used for itself, too."""

    def forward(self, input):
        weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) * self.weight.std()
        return F.conv2d(input, weight, self.bias) + F.conv2d(input, self.weight, self.bias, 1, [0])


@pytest.fixture(autouse=True)
def own_forward(monkeypatch):
    for kind in (PaddedConv, StandardisedConv):
        monkeypatch.setitem(registry._FAMILIES, kind, ConvOfOwnForward())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_calls_of_a_convolution_with_a_forward_of_its_own(groups, channels_last):
    inputs = torch.randn(3, 4, 6, 5)
    if channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    matches_autograd(PaddedConv(4, 8, 3, stride=2, groups=groups), inputs)
    matches_autograd(PaddedConv(4, 8, 1, groups=groups, bias=False), inputs)


def test_a_weight_made_of_the_parameter_is_left_to_autograd():
    layer, inputs = StandardisedConv(4, 8, 3).double(), torch.randn(3, 4, 6, 5).double()
    layer(inputs).square().sum().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    with LayerCapture(layer, weight_gradients=False) as capture:
        layer(inputs).square().sum().backward()
        (factor,) = capture.factors.values()
    assert layer.weight.grad.abs().sum() > 0
    torch.testing.assert_close(layer.weight.grad + factor.gradient(), expected)


def test_transposed_convolutions_to_a_given_size():
    matches_autograd(nn.ConvTranspose2d(8, 4, 3, stride=2), torch.randn(2, 8, 3, 3), output_size=[8, 7])


@pytest.mark.parametrize(
    "layer", [nn.Conv1d(4, 8, 3, bias=False), nn.Conv2d(4, 8, 3, bias=False), nn.ConvTranspose2d(4, 8, 3)]
)
def test_convolutions_without_bias_or_batch(layer):
    size = (5, 6)[: layer.weight.dim() - 2]
    matches_autograd(layer, torch.randn(4, *size))
    matches_autograd(layer, torch.randn(2, 4, *size))


def test_convolutions_of_channels_last_and_of_transposed_inputs():
    matches_autograd(nn.Conv2d(4, 8, 3), torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last))
    matches_autograd(nn.Conv2d(4, 8, 3), torch.randn(4, 2, 6, 5).transpose(0, 1).transpose(2, 3))


def test_matrices_of_a_convolution_are_unfolded_where_their_rows_are_few():
    for groups, size, rows in ((1, 3, 2), (1, 9, 16), (4, 9, 16), (4, 3, 16)):
        layer = nn.Conv2d(16, 16, 3, groups=groups).double()
        with LayerCapture(layer) as capture:
            layer(torch.randn(2, 16, size, size, dtype=torch.float64)).square().sum().backward()
            factor = capture.factors[""]
        matrix = factor.matrix(layer.weight.shape)
        assert matrix.rows == rows
        assert matrix.deltas.shape[1:] == (16,)
        torch.testing.assert_close(matrix.deltas.T @ matrix.activations, layer.weight.grad.flatten(1))
        torch.testing.assert_close(matrix.gradient(), layer.weight.grad)
        torch.testing.assert_close(matrix.bias_gradient(), layer.bias.grad)
        assert rows == 2 or factor.matrix(layer.weight.shape, with_bias=False).bias is None


def test_a_tall_gradient_is_the_other_factor():
    layer = nn.Conv1d(1, 50, 2)
    with LayerCapture(layer) as capture:
        layer(torch.randn(3, 1, 8)).square().sum().backward()
        matrix = capture.factors[""].matrix(layer.weight.shape)
    assert matrix.rows == 2
    torch.testing.assert_close(matrix.gradient(), layer.weight.grad)


def test_calls_on_several_sizes_add_up():
    layer = nn.Conv2d(3, 4, 2).double()
    with LayerCapture(layer) as capture:
        for size in (3, 5, 3):
            layer(torch.randn(2, 3, size, size, dtype=torch.float64)).square().sum().backward()
        factor = capture.factors[""]
        torch.testing.assert_close(factor.gradient(), layer.weight.grad)
        torch.testing.assert_close(factor.bias_gradient(), layer.bias.grad)


def test_a_convolution_saves_what_autograd_saves():
    def saved(layer):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.numel()) or t, lambda t: t):
            layer(torch.randn(2, 3, 5, 5, requires_grad=True))
        return sum(found)

    layer = nn.Conv2d(3, 4, 3)
    plain = saved(layer)
    with LayerCapture(layer):
        assert saved(layer) == plain


@pytest.mark.parametrize(
    ("layer", "size"), [(nn.Conv2d(8, 6, 3), (9, 9)), (nn.ConvTranspose1d(8, 6, 3, 2), (9,)), (nn.Linear(8, 6), ())]
)
def test_without_weight_gradients_backward_is_as_short_as_that(layer, size):
    def operations(run):
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    inputs = torch.randn(4, 8, *size, requires_grad=True)
    forward = operations(lambda: layer(inputs))
    whole = operations(lambda: layer(inputs).sum().backward())
    with LayerCapture(layer, weight_gradients=False) as capture:
        assert operations(lambda: layer(inputs).sum().backward()) == forward + (whole - forward) // 2
        assert capture.factors


@pytest.mark.parametrize(
    ("build", "shape"),
    [(lambda: nn.Conv2d(3, 4, 3), (2, 3, 5, 5)), (lambda: conv1d(5, 3), (2, 3))],
    ids=["convolution", "weight of in by out"],
)
def test_autocast_keeps_a_layer_in_its_types(build, shape):
    layer, inputs = build(), torch.randn(shape, requires_grad=True)
    with LayerCapture(layer) as capture:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(inputs)
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
        assert inputs.grad.dtype == layer.weight.grad.dtype == torch.float32
        gradient = capture.factors[""].to(torch.float32).gradient()
        torch.testing.assert_close(gradient, layer.weight.grad, rtol=0.05, atol=0.01)


LOOKUPS = torch.tensor([[0, 3, 3, 8], [2, 2, 2, 1], [8, 0, 5, 2], [3, 2, 1, 1], [7, 7, 2, 0]])


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings(sparse):
    for padding in (None, 2, -1):
        matches_autograd(nn.Embedding(9, 3, padding_idx=padding, sparse=sparse), LOOKUPS)
    matches_autograd(nn.Embedding(9, 3, sparse=sparse), LOOKUPS[0].int())
    matches_autograd(nn.Embedding(9, 3, sparse=sparse), torch.tensor(4))
    matches_autograd(nn.Embedding(9, 3, sparse=sparse), LOOKUPS[:0])
    matches_autograd(nn.Embedding(9, 3, padding_idx=2, sparse=sparse), torch.tensor([2, 2]))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings(mode, sparse):
    for padding in (None, 2):
        bags = nn.EmbeddingBag(9, 3, mode=mode, padding_idx=padding, sparse=sparse)
        matches_autograd(bags, LOOKUPS)
        matches_autograd(bags, LOOKUPS.flatten(), torch.tensor([0, 3, 3, 10]))
        matches_autograd(bags, LOOKUPS.flatten().int(), offsets=torch.tensor([0, 20]).int())
        with_end = nn.EmbeddingBag(9, 3, mode=mode, padding_idx=padding, sparse=sparse, include_last_offset=True)
        matches_autograd(with_end, LOOKUPS.flatten(), torch.tensor([0, 3, 3, 10, 20]))


@pytest.mark.parametrize("padding", [None, 2])
def test_bags_with_weights(padding):
    bags = nn.EmbeddingBag(9, 3, mode="sum", padding_idx=padding)
    weights = torch.randn(5, 4, dtype=torch.float64)
    matches_autograd(bags, LOOKUPS, per_sample_weights=weights.clone().requires_grad_())
    matches_autograd(bags, LOOKUPS.flatten(), torch.tensor([0, 3, 3, 10]), per_sample_weights=weights.flatten())


def test_each_row_is_held_once():
    table = nn.Embedding(9, 3, padding_idx=2)
    with LayerCapture(table) as capture:
        table(LOOKUPS).square().sum().backward()
        table(LOOKUPS + 0).sum().backward()
        factor = capture.factors[""]
    assert factor.activations.flatten().tolist() == [0, 1, 3, 5, 7, 8]
    assert factor.deltas.shape == (6, 3)


def test_bags_say_what_is_wrong_with_their_input():
    bags = nn.EmbeddingBag(9, 3)
    with LayerCapture(bags):
        refuses(
            (lambda: bags(LOOKUPS, torch.tensor([0])), "offsets must be None"),
            (lambda: bags(LOOKUPS.flatten()), "offsets are needed"),
        )


def test_layers_without_factors_say_why():
    reasons = {
        "scale_grad_by_freq counts": nn.Embedding(9, 3, scale_grad_by_freq=True),
        "max_norm changes rows": nn.EmbeddingBag(9, 3, max_norm=1.0),
        "mode max": nn.EmbeddingBag(9, 3, mode="max"),
    }
    for reason, layer in reasons.items():
        assert reason in refusal_of(layer)
        assert not capturable_layers(layer)
    assert refusal_of(nn.Embedding(9, 3)) == refusal_of(nn.LayerNorm(3)) == ""


def test_complex_layers_and_overridden_methods_are_not_captured():
    class Padded(nn.Conv1d):
        def _conv_forward(self, *inputs):
            return 2 * super()._conv_forward(*inputs)

    model = nn.Sequential(
        nn.Conv1d(2, 2, 1, dtype=torch.complex64), nn.Linear(2, 2, dtype=torch.complex64), Padded(2, 2, 1)
    )
    assert not capturable_layers(model)


# Linear layers of other libraries, recognised by their classes' names, held against autograd


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


def test_forms_and_functions_can_be_sent():
    assert dadplug.GradientReduction  # which registers them
    for item in (linear.TRANSPOSED, Elementwise("ReluBackward0")):
        assert codec.decode(codec.encode(item)) == item
