"""Training over a hub, in every mode: the same parameters as over connections between the sites."""

from __future__ import annotations

import pytest
import support
import torch
import torch.distributed as dist
from hub_sites import NAMES
from running_hub import running_hub
from torch import nn

import dadplug
from dadplug.methods import method_names


class Recogniser(nn.Module):
    """Model with layers of several kinds: convolution, embedding, linear layers of unequal widths, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Conv2d(1, 6, 3)
        self.words = nn.Embedding(40, 24)
        self.join = nn.Linear(6 * 36 + 24, 150)
        self.norm = nn.LayerNorm(24)
        self.between = nn.Linear(150, 40)
        self.answer = nn.Linear(40, 10)

    def forward(self, picture, words):
        seen = torch.relu(self.picture(picture)).flatten(1)
        both = torch.cat([seen, self.norm(self.words(words).mean(1))], 1)
        return self.answer(torch.relu(self.between(torch.relu(self.join(both)))))


def train(mode: str) -> list[torch.Tensor]:
    """Train for a few steps with batches of unequal and changing sizes; return the parameters."""
    rank = dist.get_rank()
    torch.manual_seed(3 + rank)  # the parameters of site 0 have to reach the others
    model = Recogniser()
    reduction = dadplug.GradientReduction(model, mode=mode, timeout=200.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        size = 4 + (step * (rank + 2)) % 7  # rows beyond those of the step before go in a second round
        picture = torch.randn(size, 1, 8, 8, generator=generator)
        words = torch.randint(40, (size, 5), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(picture, words), torch.arange(size) % 10).backward()
        reduction.synchronize()
        optimizer.step()
    assert reduction.first_difference() is None
    assert reduction.traffic.bytes_sent > 0
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_both_ways(mode: str, kits: str) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    from dadplug.exchange import factory
    from dadplug.hub.pki.kits import Kit
    from dadplug.hub.site.link import HubLink
    from dadplug.hub.site.transport import HubTransport

    plain = train(mode)
    link = HubLink.open(Kit.load(f"{kits}/{NAMES[dist.get_rank()]}"), timeout=200.0)
    over_hub = (lambda group: True), (lambda group, traffic, device, timeout, *_: HubTransport(link, traffic, timeout))
    factory.register_network(*over_hub)
    try:
        return plain, train(mode), link.step - 1
    finally:
        factory._networks.remove(over_hub)
        link.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_mode_trains_as_without_a_hub(tmp_path, world_size):
    for mode in method_names():
        with running_hub(tmp_path / mode, NAMES[:world_size]) as hub:
            results = support.sites(world_size).run(train_both_ways, mode, str(hub.kits))
        for plain, over_hub, steps in results:
            assert steps == 6
            for before, found, first in zip(plain, over_hub, results[0][1], strict=True):
                assert torch.equal(found, first), mode  # replicas
                if world_size == 2 and mode != "auto":  # which chooses by measured times
                    assert torch.equal(found, before), mode
                else:  # sums are formed in another order, which may change what int8 rounds to
                    atol = 1e-3 if mode in ("auto", "rankdad") else 1e-5
                    assert torch.allclose(found, before, rtol=1e-3, atol=atol), mode
