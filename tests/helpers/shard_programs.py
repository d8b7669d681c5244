"""Training and comparison of managed models that are saved in shards."""

from __future__ import annotations

import torch
from recommender import OPTIMIZERS, Recommender, batch

from dadplug.adapm import AdaModel

KINDS = {**OPTIMIZERS, "sparse": lambda parameters: torch.optim.Adam(parameters, lr=0.1)}


def make(kind, seed=1):
    torch.manual_seed(seed)
    model = Recommender()
    optimizer = KINDS[kind](model.parameters())
    return AdaModel(model, optimizer), optimizer


def steps(managed, optimizer, numbers):
    manager = managed.manager
    for step in numbers:
        inputs, targets = batch(step, manager.rank, manager.world_size)
        managed.intent({"items.weight": inputs[0], "tags.weight": inputs[2]}, manager.current_clock, step + 3)
        optimizer.zero_grad()
        (managed(*inputs) - targets).square().mean().backward()
        managed.synchronize()
        optimizer.step()
        manager.wait_sync(everywhere=True)


def whole(managed, optimizer):
    return {"model": managed.state_dict(), "optimizer": managed.optimizer_state_dict(optimizer)}


def end(managed):
    managed.manager.barrier()
    managed.close()
    managed.manager.close()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return list(map(str, one)) == list(map(str, other)) if isinstance(one, list) else one == other
