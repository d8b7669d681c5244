"""Private layers: the gradients of the others, and errors of patterns."""

import copy

import pytest
import support
import torch
import torch.distributed as dist
from torch import nn

from dadplug import GradientReduction

SITES = 2


class Net(nn.Module):
    """A shared body with a normalisation, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 30))
        self.head = nn.Linear(30, classes)

    def forward(self, inputs):
        return self.head(torch.tanh(self.body(inputs)))


def net(site: int) -> Net:
    """The model of a site, in float64: its head and its statistics are its own, all else is equal."""
    torch.manual_seed(5)
    model = Net().double()
    with torch.no_grad():
        model.head.weight.add_(site)
        model.body[1].running_mean.add_(site)
    return model


def batch(site: int, step: int):
    generator = torch.Generator().manual_seed(100 * step + site)
    inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return inputs + site, torch.randint(0, 3, (6,), generator=generator)


PRIVATE = ("head.*", "body.1.*")


@pytest.mark.parametrize("mode", ["dsgd", "dad", "edad", "rankdad", "powersgd", "topk"])
@support.at_sites(2)
def test_shared_gradients_are_those_of_one_process(mode: str) -> None:
    rank, lossy = dist.get_rank(), mode in ("rankdad", "powersgd", "topk")
    every = [net(site) for site in range(SITES)]  # one process with all rows, and each site's private layers
    model = copy.deepcopy(every[rank])
    options = {"rank": 40, "tolerance": 0.0, "wire": "fp32"} if mode == "rankdad" else {"rank": 40}
    options = {"density": 1.0} if mode == "topk" else options if lossy else {}
    reduction = GradientReduction(model, mode=mode, private=PRIVATE, sync_batchnorm=mode == "dad", **options)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, *every)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for site, each in enumerate(every):
            inputs, targets = batch(site, step)
            nn.functional.cross_entropy(each(inputs), targets).backward()
        inputs, targets = batch(rank, step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        reduction.synchronize()
        for (name, own), *others in zip(model.named_parameters(), *(each.parameters() for each in every)):
            shared = not name.startswith(("head.", "body.1."))
            expected = sum(each.grad for each in others) / SITES if shared else others[rank].grad
            torch.testing.assert_close(own.grad, expected, rtol=1e-7, atol=1e-10, msg=f"step {step}: {name}")
            if shared:
                for each in others:
                    each.grad.copy_(own.grad)
        for optimizer in optimizers:
            optimizer.step()
    reduction.average_buffers()
    torch.testing.assert_close(model.state_dict(), every[rank].state_dict(), rtol=1e-7, atol=1e-9)
    assert reduction.first_difference() is None
    rows = {row.parameter: row for row in reduction.plan}
    assert {name for name, row in rows.items() if row.path == "private"} == {
        name for name in rows if name.startswith(("head.", "body.1."))
    }
    assert rows["head.weight"].bytes == 0 < rows["body.0.weight"].bytes
    reduction.detach()
