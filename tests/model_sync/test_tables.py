"""Tables with ``max_norm``, of which only the rows that some site looks up may change."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import support
import torch
import torch.distributed as dist
from comparison import off_by
from torch import Tensor, nn

import dadplug


class Table(nn.Module):
    """A table most of whose rows are longer than its ``max_norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(200, 6, max_norm=1.0), nn.Linear(6, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table(input=words).mean(1))


def words(step: int, sites: Sequence[int]) -> Tensor:
    numbers = [torch.randint(200, (3, 4), generator=torch.Generator().manual_seed(9 * step + site)) for site in sites]
    return torch.cat(numbers)


def train(model: nn.Module, sites: Sequence[int]) -> None:
    """Train with momentum, which moves rows that a step does not look up; use a copy at one site."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for step in range(4):
        if 1 in sites:
            copy.deepcopy(getattr(model, "module", model))(words(50 + step, [1]))
        optimizer.zero_grad()
        model(words(step, sites)).square().mean().backward()
        optimizer.step()


@support.at_sites(2)
def test_rows_that_no_site_looks_up_stay() -> None:
    torch.manual_seed(0)
    alone = Table().double()
    model = dadplug.DistributedDataParallel(copy.deepcopy(alone), mode="dad", compare_every=1)
    train(model, [dist.get_rank()])
    train(alone, range(2))
    for one, two in zip(model.module.parameters(), alone.parameters(), strict=True):
        assert off_by(one.detach(), two.detach()) < 1e-10
    assert model.reduction.first_difference() is None
    assert int((alone.table.weight.norm(dim=1) > 1.001).sum()) > 100
