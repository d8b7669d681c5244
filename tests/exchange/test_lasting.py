"""Memory of what lasts beyond a step, apart from what a step allocates and frees."""

import mmap

import pytest
import support
import torch
from torch import nn

import dadplug
from dadplug.exchange.wire import copied, lasting
from dadplug.step.reducer.factors import GatheredHandler


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (3,), (3, 0), (50, 77)])
def test_zeros_that_can_be_written(dtype, shape):
    made = lasting(shape, dtype)
    assert made.shape == shape
    assert made.dtype == dtype
    assert not made.any()
    assert torch.equal(made.fill_(1), torch.ones(shape, dtype=dtype))


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="no anonymous pages here")
def test_large_ones_have_pages_of_their_own():
    tensors = [lasting(3000, torch.float32) for _ in range(4)]
    assert not any(tensor.data_ptr() % mmap.PAGESIZE for tensor in tensors)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [float(tensor.mean()) for tensor in tensors] == [0, 1, 2, 3]


def test_copies_are_contiguous_and_independent():
    source = torch.arange(6000.0).view(60, 100).T
    copy = copied(source)
    assert copy.is_contiguous()
    assert torch.equal(copy, source)
    source.zero_()
    assert copy.any()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 5))


@support.at_sites(2)
def test_the_first_step_forms_each_gradient_once() -> None:
    formed = []
    original = GatheredHandler._decode_unit

    def counting(self, unit, *args):
        formed.append(unit.name)
        return original(self, unit, *args)

    GatheredHandler._decode_unit = counting
    try:
        model = network()
        reduction = dadplug.GradientReduction(model, mode="rankdad")
        for _ in range(2):
            formed.clear()
            model.zero_grad()
            model(torch.randn(16, 300)).square().mean().backward()
            reduction.synchronize()
            assert {"0.weight", "2.weight"} <= set(formed)
            assert len(set(formed)) == len(formed)
            assert all(bool(parameter.grad.any()) for parameter in model.parameters())
    finally:
        GatheredHandler._decode_unit = original


@support.at_sites(2)
def test_factors_that_wait_for_the_first_plan_are_copies() -> None:
    """Held as they are, they would lie between the activations that backward frees."""
    model, inputs = network(), []
    model[2].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    reduction = dadplug.GradientReduction(model, mode="rankdad")
    model(torch.randn(16, 300)).square().mean().backward()
    unit = next(unit for unit in reduction._planner.units if unit.name == "2.weight")
    (factor,) = unit.layers[0].peek()
    assert torch.equal(factor.activations, inputs[0])
    assert factor.activations.data_ptr() != inputs[0].data_ptr()
    reduction.synchronize()
    assert bool(model[2].weight.grad.any())
