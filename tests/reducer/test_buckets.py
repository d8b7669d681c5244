"""Buckets of gradients that are summed: their size, and what the meter says of the layers that share one."""

from types import SimpleNamespace

import pytest
import support
import torch
from torch import nn

import dadplug
from dadplug import MismatchError, NonFiniteError
from dadplug.exchange.group_transport import GroupTransport
from dadplug.step.reducer.faults import Fault, FaultLog, raise_fault
from dadplug.step.reducer.handler import StepHeader
from dadplug.step.reducer.summed import DenseHandler
from dadplug.step.units.base import DenseUnit


@pytest.mark.parametrize(("whole", "full"), [(0.1, 0.25), (8.0, 0.25), (16.0, 0.5), (44.0, 4.0), (500.0, 4.0)])
def test_buckets_grow_with_the_model(whole, full):
    """Two sites gather small ones; above 1 MB an all-reduce costs less, by as few buckets as with more sites."""
    two = SimpleNamespace(world_size=2, _peer_to_peer=True)
    two.prefers_gather = lambda nbytes: GroupTransport.prefers_gather(two, nbytes)
    assert DenseHandler.full_at(two, whole) == full
    three = SimpleNamespace(prefers_gather=lambda nbytes: False)
    assert DenseHandler.full_at(three, whole) == DenseHandler.bucket_mb


@support.at_sites(2)
def test_the_times_of_a_bucket_are_divided_among_its_layers():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    reduction = dadplug.GradientReduction(model, mode="dsgd")
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        reduction.synchronize()
        layers = reduction.traffic.layers
        assert set(layers) == {name for name, _ in model.named_parameters()}
        assert sum(each.bytes for each in layers.values()) == 4 * sum(each.numel() for each in model.parameters())
        assert {each.encode_seconds for each in layers.values()} == {layers["0.weight"].encode_seconds}
        assert layers["0.weight"].encode_seconds > 0
        assert layers["2.bias"].decode_seconds > 0
        assert reduction.traffic.layers == layers, step  # which reading does not divide again


# Step headers and faults: what a site reports of a step, and the error that all sites raise for it

SITES = ["site 0 (here)", "site 1 (there)"]


def unit(name: str) -> DenseUnit:
    return DenseUnit(name, nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("fault", [each for each in Fault if each <= Fault.ATTACHED])
def test_a_header_survives_packing(fault):
    header = StepHeader(7, 3, 16, True, fault, 2, fault == Fault.NONE)
    header.present, header.dense, header.void = [True, False, True], [False, True, True], [False, False, True]
    header.extra_rows = [0, 5, 1_000_000]
    again = StepHeader.unpack(header.pack(), attached=3)
    assert again == header
    assert isinstance(again.fault, Fault)


def test_the_first_fault_of_the_forward_pass_is_reported():
    log = FaultLog()
    for fault, name in [(Fault.GRADIENT, "c"), (Fault.ACTIVATIONS, "b"), (Fault.DELTAS, "d"), (Fault.ACTIVATIONS, "a")]:
        log.record(fault, unit(name))
    assert log.first == (Fault.ACTIVATIONS, "a")  # backward reaches last what comes first in the forward pass
    log.drop(unit("a"))
    assert log.first == (Fault.ACTIVATIONS, "b")
    log.drop(unit("b"))
    assert log.first == (Fault.GRADIENT, "c")
    log.clear()
    assert not log.entries


@pytest.mark.parametrize(("value", "faults"), [(1.0, 0), (float("nan"), 1), (float("inf"), 1), (None, 0)])
def test_gradients_are_checked(value, faults):
    log, checked = FaultLog(), unit("a")
    if value is not None:
        checked.lead.grad = torch.tensor([0.0, value])
    log.check_gradient(checked)
    assert log.entries == [(Fault.GRADIENT, "a")] * faults


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault.ACTIVATIONS, NonFiniteError, "step 4: NaN or Inf at site 1 .*in the input of the layer of 'b'"),
        (Fault.DELTAS, NonFiniteError, "the loss's gradient at the output of the layer of 'b'"),
        (Fault.GRADIENT, NonFiniteError, "in the gradient of 'b', the first that backward reached"),
        (Fault.ATTACHED, NonFiniteError, "in the gradient of 'table'"),
        (Fault.CHAIN_BROKEN, MismatchError, "cannot recompute the gradient of 'b' of site 1"),
    ],
)
def test_each_fault_has_its_message(fault, error, message):
    headers = [StepHeader(4, 0, 8), StepHeader(4, 0, 8, fault=fault, culprit=1)]
    with pytest.raises(error, match=message):
        raise_fault(headers, ["a", "b"], SITES, ["words", "table"])


def test_without_a_fault_nothing_is_raised():
    raise_fault([StepHeader(4, 0, 8)] * 2, ["a"], SITES)
