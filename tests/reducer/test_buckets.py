"""Buckets of gradients that are summed: their size, and what the meter says of the layers that share one."""

from types import SimpleNamespace

import pytest
import support
import torch
from torch import nn

import dadplug
from dadplug.exchange.group_transport import GroupTransport
from dadplug.step.reducer.summed import DenseHandler


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
