"""Managed embeddings: torch's own results in one process, and in any loop one process's results over several sites."""

from __future__ import annotations

import copy
import functools

import pytest
import support
import torch
from adapm_loops import LOOPS, run_all
from managed_loop import Loop
from recommender import OPTIMIZERS, Recommender, batch, train
from torch import nn

from dadplug import NonFiniteError
from dadplug.adapm import AdaModel, ParameterManager


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


TOLERANCE = 3e-6


@functools.cache
def results(kind, mode):
    """Run all loops in one call of the sites; the tests look at what has come of them."""
    return support.sites(2).run(run_all, kind, mode, [program.__name__ for program in LOOPS], timeout=400)


@pytest.mark.parametrize("program", LOOPS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(("kind", "mode"), [("sgd", "dsgd"), ("adagrad", "dad")])
def test_loops_on_managed_rows_train_as_one_process(program, kind, mode):
    for result in (of_site[program.__name__] for of_site in results(kind, mode)):
        assert not isinstance(result, str), result
        off, moved = result
        assert max(off.values()) < TOLERANCE, off
        tables = [moved["words.weight"], moved["tags.weight"]]
        assert min(tables) > 200 * TOLERANCE, moved  # else there would be nothing to see


def refuses():
    with ParameterManager(timeout=200) as manager:
        loop = Loop("sgd", manager.rank, manager=manager)
        loop.update(0)
        before = loop.managed.state_dict()
        loop.zero_grad()
        loop.loss(1).backward()
        with pytest.raises(RuntimeError, match="before gradient"):
            loop.optimizer.step()
        with pytest.raises(
            RuntimeError, match=r"clip_grad_norm_\(\) before the gradient of 'words.weight' is synchronized"
        ):
            loop.managed.clip_grad_norm_(1.0)
        loop.synchronize()
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            with pytest.raises(RuntimeError, match=r"spread over the sites.*AdaModel\.other_parameters"):
                clip(loop.managed.parameters(), 1.0)
        loop.zero_grad()
        ids, _ = loop.batch(2)
        rows = loop.net.tags(ids)
        if manager.rank == 1:
            rows.register_hook(lambda gradient: gradient * torch.nan)
        (rows.square().mean() + loop.loss(2)).backward()
        with pytest.raises(NonFiniteError, match=r"NaN or Inf at site 1.*the gradient of rows of 'tags\.weight'"):
            loop.synchronize()
        loop.zero_grad()
        after = loop.managed.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in ("words.weight", "tags.weight"))
        loop.update(3)
        manager.barrier()
        loop.managed.close()


def test_what_would_go_wrong_unseen_is_refused(sites):
    sites(2).run(refuses)
