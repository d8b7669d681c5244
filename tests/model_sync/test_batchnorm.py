"""Batch normalisation over all sites' rows, held against one process."""

from __future__ import annotations

import contextlib
import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dadplug


class Net(nn.Module):
    """Batch normalisations of one, two and no spatial dimensions, one without affine, one with a plain mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2)
        self.spatial = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(16, 8)
        self.plain = nn.BatchNorm1d(8, affine=False, momentum=None)
        self.deep = nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU())
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.spatial(self.conv(x))).flatten(1)
        return self.out(self.deep(torch.tanh(self.plain(self.hidden(x)))))


def batch(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 2, 3, 3, generator=generator, dtype=torch.float64)
    return inputs + torch.arange(samples)[:, None, None, None] / 4, torch.randint(0, 3, (samples,), generator=generator)


def trains_like_one_process(mode: str, weighting: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(5)
    reference = Net().double()
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode=mode, sync_batchnorm=True, weighting=weighting)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(4):
        inputs, targets = batch(10, seed=step)
        cut = 5 if weighting == "uniform" else 1 + 2 * step  # a single row at a site is enough
        mine = slice(0, cut) if rank == 0 else slice(cut, 10)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[mine]), targets[mine]).backward()
        reduction.synchronize()
        nn.functional.cross_entropy(reference(inputs), targets).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=f"step {step}: {name}")
        for (name, b), c in zip(model.named_buffers(), reference.buffers()):
            torch.testing.assert_close(b, c, rtol=1e-9, atol=1e-12, msg=f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
    model.eval(), reference.eval()
    torch.testing.assert_close(model(inputs), reference(inputs), rtol=1e-8, atol=1e-10)
    assert reduction.first_difference() is None
    reduction.detach()


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("mode", ["dsgd", "dad"])
def test_training_equals_one_process(sites, mode, weighting):
    sites(2).run(trains_like_one_process, mode, weighting)


def idles(mode: str) -> None:
    """Site 1 has no data in steps 2 and 3."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    reference = Net().double()
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode=mode, sync_batchnorm=True)
    for step in range(4):
        inputs, targets = batch(8, seed=step)
        model.zero_grad(), reference.zero_grad()
        mine = slice(0, 8) if step >= 2 else slice(0, 3) if rank == 0 else slice(3, 8)
        if step >= 2 and rank == 1:
            reduction.idle()
        else:
            nn.functional.cross_entropy(model(inputs[mine]), targets[mine]).backward()
            reduction.synchronize()
        nn.functional.cross_entropy(reference(inputs), targets).backward()
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
    reduction.detach()


def test_a_site_without_data_joins_in(sites):
    sites(2).run(idles, "dad")


def accumulates() -> None:
    """Micro-batches, one of which only site 0 has."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = Net().double()
    reduction = dadplug.GradientReduction(model, mode="dad", sync_batchnorm=True)
    for step in range(2):
        for micro in range(2):
            inputs, targets = batch(4, seed=10 * step + micro)
            if micro == 0:
                with reduction.no_sync():
                    nn.functional.cross_entropy(model(inputs), targets).backward()
            elif rank == 0:
                nn.functional.cross_entropy(model(inputs), targets).backward()
                reduction.synchronize()
            else:
                reduction.idle()
    assert all(p.grad is not None for p in model.parameters())
    reduction.detach()


def test_micro_batches_can_be_uneven(sites):
    sites(2).run(accumulates)


def accumulates_and_joins() -> list[torch.Tensor]:
    """Steps of two micro-batches each, of which site 1 has fewer than site 0."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = Net().double()
    reduction = dadplug.GradientReduction(model, mode="dad", sync_batchnorm=True, timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4 - 2 * rank):
        optimizer.zero_grad()
        for micro in range(2):
            inputs, targets = batch(4, seed=10 * step + micro)
            with reduction.no_sync() if micro == 0 else nullcontext():
                nn.functional.cross_entropy(model(inputs), targets).backward()
        reduction.synchronize()
        optimizer.step()
    reduction.join(optimizer.step)
    assert reduction.first_difference() is None
    assert reduction._step == 5
    reduction.detach()


def test_micro_batches_go_on_where_a_site_joins_without_data(sites):
    sites(2).run(accumulates_and_joins)


def refuses_one_row() -> str:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    reduction = dadplug.GradientReduction(model, sync_batchnorm=True)
    try:
        model(torch.ones(dist.get_rank(), 3))
    except ValueError as error:
        return str(error)
    finally:
        reduction.detach()
    return "nothing"


def test_one_row_over_all_sites_is_too_few(sites):
    for message in sites(2).run(refuses_one_row):
        assert "more than one value per channel when training, over all sites got 1" in message


def test_alone_it_is_ordinary_batch_normalisation():
    model = Net().double()
    other = copy.deepcopy(model)
    reduction = dadplug.GradientReduction(model, mode="dsgd", sync_batchnorm=True)
    inputs, targets = batch(6, seed=0)
    for each in (model, other):
        nn.functional.cross_entropy(each(inputs), targets).backward()
    reduction.synchronize()
    for p, q in zip([*model.parameters(), *model.buffers()], [*other.parameters(), *other.buffers()]):
        torch.testing.assert_close(p, q)
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    reduction.detach()
    assert "forward" not in vars(model.spatial)


def ends_uneven_steps(counts: tuple[tuple[int, ...], tuple[int, ...]]) -> int:
    """Train steps of different numbers of micro-batches at each site; the site with fewer steps joins."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = Net().double()
    reduction = dadplug.GradientReduction(model, mode="dad", sync_batchnorm=True, timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, micro_batches in enumerate(counts[rank]):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            inputs, targets = batch(4, seed=100 * rank + 10 * step + micro)
            with reduction.no_sync() if micro + 1 < micro_batches else contextlib.nullcontext():
                nn.functional.cross_entropy(model(inputs), targets).backward()
        reduction.synchronize()
        optimizer.step()
    reduction.join(optimizer.step)
    assert reduction.first_difference() is None
    steps = reduction.step
    reduction.detach()
    return steps


@pytest.mark.parametrize("counts", [((2, 2), (2, 2, 2, 1)), ((1, 3, 2), (3, 1)), ((2,), (2, 1, 2))])
def test_sites_with_other_numbers_of_micro_batches_train_and_join(sites, counts):
    assert sites(2).run(ends_uneven_steps, counts) == [max(map(len, counts)) + 1] * 2
