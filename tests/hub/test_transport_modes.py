"""Training over a hub, in every mode: the same parameters as over connections between the sites."""

from __future__ import annotations

from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
import zoo
from hub_sites import NAMES, over_hub, train
from running_hub import running_hub

from dadplug.methods import method_names


def parameters_after(mode: str) -> list[torch.Tensor]:
    """Train for a few steps with batches of unequal and changing sizes; return the parameters."""
    rank = dist.get_rank()
    torch.manual_seed(3 + rank)  # the parameters of site 0 have to reach the others
    model = zoo.build("mixed")  # layers of several kinds

    def loss(step: int) -> torch.Tensor:
        # Rows beyond those of the step before go in a second round.
        return zoo.loss(model, *zoo.batch("mixed", 4 + (step * (rank + 2)) % 7, seed=100 * step + rank))

    assert train(model, loss, 6, mode=mode, timeout=200.0).traffic.bytes_sent > 0
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_both_ways(mode: str, kits: str) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    plain = parameters_after(mode)
    with over_hub(Path(kits)) as link:
        return plain, parameters_after(mode), link.step - 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_mode_trains_as_without_a_hub(tmp_path, world_size):
    for mode in method_names():
        with running_hub(tmp_path / mode, NAMES[:world_size]) as hub:
            results = support.sites(world_size).run(train_both_ways, mode, str(hub.kits))
        for plain, linked, steps in results:
            assert steps == 6
            for before, found, first in zip(plain, linked, results[0][1], strict=True):
                assert torch.equal(found, first), mode  # replicas
                if world_size == 2 and mode != "auto":  # which chooses by measured times
                    assert torch.equal(found, before), mode
                else:  # sums are formed in another order, which may change what int8 rounds to
                    atol = 1e-3 if mode in ("auto", "rankdad") else 1e-5
                    assert torch.allclose(found, before, rtol=1e-3, atol=atol), mode
