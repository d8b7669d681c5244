"""`dadplug.DistributedDataParallel` in place of torch's class: the loops of scripts, held against one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import dadplug


class Net(nn.Module):
    """A model with a branch that a step may leave out, and an output in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(6, 20), nn.Linear(20, 4), nn.Linear(20, 4)
        self.norm = nn.LayerNorm(20)

    def forward(self, inputs, branch=False, checkpointed=False):
        def run(x):
            return self.norm(self.first(x).tanh())

        hidden = checkpoint(run, inputs, use_reentrant=False) if checkpointed else run(inputs)
        return {"logits": (self.other if branch else self.second)(hidden)}


def rows(step: int, site: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + site)
    return torch.randn(3 + site, 6, generator=generator, dtype=torch.float64)


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def loss_of(model, step: int, sites, **options) -> torch.Tensor:
    """The loss of some sites' rows; its mean over sites is weighted by rows, as one process has it."""
    return model(torch.cat([rows(step, site) for site in sites]), **options)["logits"].square().mean()


def train(model: nn.Module, sites, steps: int = 6) -> None:
    """A loop with accumulation, clipping, checkpointing, two forward passes, and layers that are not used."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        branch = step % 3 == 2
        if step % 2:  # accumulation: the numbers of rows of both micro-batches are those of the sites
            with model.no_sync() if isinstance(model, TorchDDP) else nullcontext():
                loss_of(model, 50 + step, sites, branch=branch).backward()
        if step == 4:
            whole = loss_of(model, step, sites) + loss_of(model, 80 + step, sites, branch=True)
        else:
            whole = loss_of(model, step, sites, branch=branch, checkpointed=step == 3)
        whole.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


@pytest.mark.parametrize("mode", ["dad", "dsgd"])
@support.at_sites(2)
def test_a_script_of_ddp_trains_as_one_process(mode: str) -> None:
    rank, alone = dist.get_rank(), build()
    train(alone, range(2))
    model = dadplug.DistributedDataParallel(
        build(seed=rank + 1), mode=mode, static_graph=True, find_unused_parameters=True, weighting="samples"
    )
    model.module.load_state_dict(build().state_dict())
    assert isinstance(model, TorchDDP)
    train(model, [rank])
    for (name, p), q in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        assert off_by(p.detach(), q.detach()) < 1e-10, name
    state = model.state_dict()
    assert set(state) == {f"module.{name}" for name in alone.state_dict()}
    model.load_state_dict(state)
    assert model.reduction.first_difference() is None
    assert model.reduction.traffic.bytes_sent > 0
    model.reduction.detach()


@support.at_sites(2)
def test_buffers_are_those_of_site_0() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    model = dadplug.DistributedDataParallel(net, mode="dsgd", weighting="samples")
    for step in range(3):
        before = copy.deepcopy(net[1].running_mean)
        model(rows(step, dist.get_rank())).square().mean().backward()
        means = model.reduction.gather_objects(before)
        if step:  # each site went on from the mean of site 0
            momentum, own = net[1].momentum, net[0](rows(step, dist.get_rank())).mean(0)
            torch.testing.assert_close(net[1].running_mean, (1 - momentum) * means[0] + momentum * own.detach())
    whole = model(rows(7, dist.get_rank())).square().mean() + model(rows(8, dist.get_rank())).square().mean()
    whole.backward()  # through a layer whose buffers have been replaced since its forward pass
    model.eval()
    with torch.no_grad():  # at one site alone
        if dist.get_rank() == 0:
            model(rows(9, 0))
    model.reduction.detach()
