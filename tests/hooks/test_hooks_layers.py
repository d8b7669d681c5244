"""Factors of each kind of layer, held against autograd."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from dadplug.hooks import LayerCapture, capturable_layers
from dadplug.hooks.registry import refusal_of
from layer_gradients import matches_autograd
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

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


def test_matrices_of_a_convolution_have_as_few_rows_as_the_gradient():
    for groups, size, rows in ((1, 3, 2), (1, 9, 8), (4, 9, 8), (4, 3, 8)):
        layer = nn.Conv2d(16, 8, 3, groups=groups).double()
        with LayerCapture(layer) as capture:
            layer(torch.randn(2, 16, size, size, dtype=torch.float64)).square().sum().backward()
            factor = capture.factors[""]
        matrix = factor.matrix(layer.weight.shape)
        assert matrix.rows == rows
        assert matrix.deltas.shape[1:] == (8,)
        torch.testing.assert_close(matrix.deltas.T @ matrix.activations, layer.weight.grad.flatten(1))
        torch.testing.assert_close(matrix.gradient(), layer.weight.grad)
        torch.testing.assert_close(matrix.bias_gradient(), layer.bias.grad)


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


def test_autocast_keeps_a_convolution_in_its_types():
    layer, inputs = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 5, 5, requires_grad=True)
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
        with pytest.raises(ValueError, match="offsets must be None"):
            bags(LOOKUPS, torch.tensor([0]))
        with pytest.raises(ValueError, match="offsets are needed"):
            bags(LOOKUPS.flatten())


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
