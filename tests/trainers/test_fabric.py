"""The line for Lightning's Fabric that the documentation names, held against torch's DDP."""

import copy
import importlib.util

import pytest
import support
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import dadplug


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
@support.at_sites(2, own=True)  # one of Lightning's packages would be imported beside the other one
def test_fabric_trains_what_the_drop_in_wraps_as_with_ddp() -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(6)]
    first, trained = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double(), []
    for wrap in (TorchDDP, lambda model: dadplug.DistributedDataParallel(model, mode="dad", weighting="uniform")):
        model = wrap(copy.deepcopy(first))
        prepared, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.01))
        for inputs in fabric.setup_dataloaders(torch.utils.data.DataLoader(batches, None)):
            optimizer.zero_grad()
            fabric.backward(prepared(inputs).square().mean())
            optimizer.step()
        trained.append([each.detach().clone() for each in model.parameters()])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-10, atol=1e-12)
