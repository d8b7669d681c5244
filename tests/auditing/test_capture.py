"""Captures: the messages of an audit are those of the exchange, in the formats of the network."""

import copy

import pytest
import torch
from torch import nn

from dadplug.tools.auditing.capture import Batch, capture

MODES = [
    ("dsgd", {}, 1e-6),
    ("dsgd", {"wire": "bf16"}, 1e-2),
    ("dsgd", {"wire": "int8"}, 0.05),
    ("dad", {}, 1e-6),
    ("dad", {"share_inputs": False}, 1e-6),
    ("dad", {"wire": "int8"}, 0.05),
    ("dad", {"fused": True}, 1e-6),
    ("edad", {}, 1e-6),
    ("rankdad", {"rank": 8}, 1e-5),
    ("rankdad", {"rank": 4}, 0.9),
    ("rankdad", {"rank": 8, "error_feedback": True}, 1e-5),
    ("powersgd", {"rank": 4}, 0.95),
    ("topk", {"density": 0.1}, 0.95),
    ("localsgd", {"every": 1}, 1e-4),
    ("localsgd", {"every": 1, "wire": "int8"}, 0.05),
]


@pytest.fixture
def batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    return Batch(model, nn.CrossEntropyLoss(), torch.randn(8, 20), torch.randint(0, 10, (8,)))


def gradients(batch):
    model = copy.deepcopy(batch.model)
    batch.loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("mode", "options", "tolerance"), MODES, ids=str)
def test_the_gradient_that_is_seen_is_that_of_the_site(batch, mode, options, tolerance):
    own, seen = gradients(batch), capture(batch, mode, **options)
    assert seen.bytes_sent > 0
    assert set(seen.gradients) == set(own)
    errors = [float((view.gradient() - own[view.name]).norm() / own[view.name].norm()) for view in seen.layers]
    assert max(errors) <= tolerance
    if tolerance > 1e-4:
        assert max(errors) > 1e-5  # the formats of the network have taken their part
    for name, gradient in seen.gradients.items():
        assert (gradient - own[name]).norm() <= max(tolerance, 1e-5) * own[name].norm() * 1.01, name


def test_rows_are_seen_where_they_are_sent(batch):
    layers = {view.name: view for view in capture(batch, "dad", share_inputs=False).layers}
    assert layers["0.weight"].inputs is None
    assert layers["0.weight"].fed_by_data
    assert torch.equal(layers["2.weight"].inputs, layers["2.weight"].truth)
    assert layers["2.weight"].sends_rows
    assert not capture(batch, "rankdad", rank=8).layers[0].sends_rows
    assert torch.equal(capture(batch, "dad").layers[0].inputs, batch.inputs)


def test_deltas_that_are_not_sent_are_recomputed(batch):
    exact, chained = capture(batch, "dad"), capture(batch, "edad")
    assert chained.bytes_sent < exact.bytes_sent
    for one, other in zip(exact.layers, chained.layers, strict=True):
        assert torch.allclose(one.deltas, other.deltas, atol=1e-6)


def test_convolutions_and_tables():
    torch.manual_seed(0)
    pictures = nn.Sequential(nn.Conv2d(1, 64, 5), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10))
    seen = capture(Batch(pictures, nn.CrossEntropyLoss(), torch.randn(2, 1, 8, 8), torch.tensor([1, 2])), "dad")
    assert [view.name for view in seen.layers] == ["0.weight", "3.weight"]
    words = nn.Sequential(nn.Embedding(200, 16), nn.Flatten(), nn.Linear(64, 10))
    text = torch.randint(0, 200, (4, 4))
    seen = capture(Batch(words, nn.CrossEntropyLoss(), text, torch.tensor([1, 2, 3, 4])), "rankdad")
    assert sorted(seen.layers[0].inputs[:, 0].tolist()) == sorted(set(text.flatten().tolist()))


def test_the_caller_keeps_model_and_generator(batch):
    before, state = copy.deepcopy(batch.model.state_dict()), torch.get_rng_state()
    capture(batch, "rankdad")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in batch.model.state_dict().items())
