"""Managed embeddings: torch's own results in one process, and one process's results over several sites."""

from __future__ import annotations

import copy

import pytest
import torch
from recommender import OPTIMIZERS, Recommender, batch, train
from torch import nn

from dadplug.adapm import AdaModel


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process_has_torchs_results(kind):
    model = Recommender()
    plain = copy.deepcopy(model)
    train(plain, OPTIMIZERS[kind](plain.parameters()), 6)
    optimizer = OPTIMIZERS[kind](model.parameters())
    managed = AdaModel(model, optimizer)
    assert set(managed.managed) == {"items.weight", "tags.weight"}
    train(managed, optimizer, 6, managed.synchronize)
    state = managed.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_sparse_adam_has_torchs_results():
    model = nn.Embedding(20, 4, sparse=True)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    own = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    managed = AdaModel(model, own)
    for step in range(5):
        ids = torch.randint(20, (7,), generator=torch.Generator().manual_seed(step))
        for each, steps in ((plain, optimizer), (managed, own)):
            steps.zero_grad()
            each(ids).square().sum().backward()
            steps.step()
    torch.testing.assert_close(managed.state_dict()["weight"], plain.weight.detach(), rtol=1e-4, atol=1e-5)


def trains_together(kind):
    import dadplug

    torch.manual_seed(1)
    model = Recommender()
    plain = copy.deepcopy(model)
    torch.manual_seed(dadplug.adapm.ParameterManager().rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    managed = AdaModel(model, optimizer)
    manager = managed.manager
    for step in range(5):
        inputs, targets = batch(step, manager.rank, manager.world_size)
        if step % 2:
            managed.intent({"items.weight": inputs[0], "tags.weight": inputs[2]}, manager.current_clock)
        optimizer.zero_grad()
        (managed(*inputs) - targets).square().mean().backward()
        managed.synchronize()
        optimizer.step()
        manager.wait_sync(everywhere=True)
    state = managed.state_dict()
    fresh = AdaModel(Recommender(), OPTIMIZERS[kind]([torch.nn.Parameter(torch.zeros(1))]))
    assert not fresh.managed
    managed.load_state_dict(state)
    again = managed.state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)
    train(plain, OPTIMIZERS[kind](plain.parameters()), 5)
    manager.barrier()
    managed.close()
    manager.close()
    return state, plain.state_dict()


def test_sites_together_are_one_process(sites):
    for state, expected in sites(2).run(trains_together, "sgd"):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        return self.out(self.words(ids))


def test_a_weight_that_is_used_as_a_matrix_stays_an_ordinary_parameter():
    model = Tied()
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not managed.managed
    assert managed(torch.tensor([1, 2])).shape == (2, 9)


@pytest.mark.parametrize(
    ("layer", "make", "message"),
    [
        ({"max_norm": 1.0}, lambda p: torch.optim.SGD(p, lr=0.1), "has max_norm=1.0, which rescales rows"),
        ({}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "which momentum=0.9 does not allow"),
        ({}, lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "which weight_decay=0.1 does not allow"),
        ({}, torch.optim.Rprop, "cannot be stepped by Rprop: use SGD, Adagrad, SparseAdam, Adam or"),
    ],
)
def test_what_rows_of_a_batch_cannot_have_is_told(layer, make, message):
    model = nn.Sequential(nn.Embedding(9, 4, **layer))
    with pytest.raises(ValueError, match=message):
        AdaModel(model, make(model.parameters()))


def test_frozen_tables_and_evaluation_push_nothing():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    managed = AdaModel(model, optimizer)
    managed(torch.tensor([1, 2])).sum().backward()
    managed.synchronize()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(managed.module[0](torch.arange(9)), before)


def test_intents_name_their_weight():
    model = nn.Sequential(nn.Embedding(9, 4))
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    managed.intent({"0.weight": torch.tensor([1])}, 0)
    with pytest.raises(ValueError, match=r"no managed weight is called 'words'; there are '0\.weight'"):
        managed.intent({"words": torch.tensor([1])}, 0)


def test_closed_layers_are_as_they_were():
    model = nn.Sequential(nn.Embedding(9, 4))
    managed = AdaModel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    managed.close()
    assert model(torch.tensor([1])).isnan().all()
