"""A small recommender with managed tables: its training, alone and saved in shards."""

import torch
from torch import nn

from dadplug.adapm import AdaModel, RowwiseAdagrad


class Recommender(nn.Module):
    """Shared and padded tables, a bag with offsets, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(40, 6, padding_idx=0)
        self.again = nn.Embedding(40, 6, padding_idx=0)
        self.again.weight = self.items.weight
        self.tags = nn.EmbeddingBag(30, 6, mode="sum")
        self.head = nn.Linear(18, 1)

    def forward(self, items, others, tags, offsets):
        rows = [self.items(items).mean(1), self.again(others), self.tags(tags, offsets)]
        return self.head(torch.cat(rows, 1)).squeeze(1)


def batch(seed, rank=0, sites=1):
    """A batch, of which a site gets its share."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(40, (8, 3), generator=generator)
    others = torch.randint(40, (8,), generator=generator)
    tags = torch.randint(30, (8, 4), generator=generator)
    targets = torch.randn(8, generator=generator)
    mine = slice(rank * 8 // sites, (rank + 1) * 8 // sites)
    tags = tags[mine]
    return (items[mine], others[mine], tags.reshape(-1), torch.arange(0, tags.numel(), 4)), targets[mine]


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.2, lr_decay=0.1, initial_accumulator_value=0.1),
    "rowwise": lambda parameters: RowwiseAdagrad(parameters, lr=0.2),
}


def train(model, optimizer, steps, synchronize=lambda: None, rank=0, sites=1):
    for step in range(steps):
        inputs, targets = batch(step, rank, sites)
        optimizer.zero_grad()
        (model(*inputs) - targets).square().mean().backward()
        synchronize()
        optimizer.step()


# Training and comparison of managed models that are saved in shards


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
