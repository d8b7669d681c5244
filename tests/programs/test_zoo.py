"""The whole zoo in every mode: unequal rows, accumulation, checkpointing, over many steps.

Exact modes are held against one process with all sites' rows; lossy modes against the published algorithm on the sites'
gradients, see `loops.reference`.

A few steps of each model and 30 of some by default; ``DADPLUG_ZOO=full`` takes 200 of all, at 2 and at 4 sites.
"""

import copy
import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import zoo
from comparison import off_by
from zoo_training import agreed_loss, notices, trains

import dadplug
from dadplug.step.methods import METHODS, method_names

pytestmark = pytest.mark.slow

FULL = os.environ.get("DADPLUG_ZOO") == "full"
LONG = ("mlp", "conv1d", "words")
SIZES = (2, 4) if FULL else (2,)


def is_refused(name: str, mode: str) -> None:
    """A model without a chain of layers is refused with another mode named, by all sites in the first step."""
    reduction = dadplug.GradientReduction(model := zoo.build(name), mode=mode, weighting="samples")
    zoo.loss(model, *zoo.batch(name, 5, seed=dist.get_rank())).backward()
    with pytest.raises(ValueError, match="Use mode='dad'"):
        reduction.synchronize()


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("mode", method_names())
@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_zoo_trains_in_every_mode(sites, name, mode, world_size):
    steps = 200 if FULL else 30 if name in LONG else 6
    if METHODS[mode].traits.recomputes_deltas and name not in zoo.CHAINS:
        sites(world_size).run(is_refused, name, mode)
    else:
        sites(world_size).run(trains, name, mode, steps)


@pytest.mark.parametrize("mode", method_names())
def test_a_wrong_gradient_would_fail(sites, mode):
    for factor in (0.0, 2.0):
        sites(2).run(notices, mode, factor)


def takes_any_rows(name: str, mode: str, seed: int) -> None:
    """Any number of rows and of micro-batches at each site and step, none included; sizes and layers that vary."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    reference = zoo.build(name)
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
    generator = torch.Generator().manual_seed(seed)
    for step in range(20):
        groups = []
        for group in range(int(torch.randint(1, 4, (1,), generator=generator))):
            counts = torch.randint(0, 6, (world_size,), generator=generator).tolist()
            number = 1000 * seed + 10 * step + group
            groups.append([zoo.batch(name, count, 100 * number + site) for site, count in enumerate(counts)])
        if not any(len(targets) for pieces in groups for _, targets in pieces):
            continue
        model.zero_grad(), reference.zero_grad()
        for number, pieces in enumerate(groups):
            if len(pieces[rank][1]):
                with reduction.no_sync() if number + 1 < len(groups) else nullcontext():
                    zoo.loss(model, *pieces[rank]).backward()
        reduction.synchronize()
        agreed_loss(reference, groups).backward()
        for (parameter, p), q in zip(model.named_parameters(), reference.parameters()):
            assert (p.grad is None) == (q.grad is None), f"step {step}: {parameter}"
            assert p.grad is None or off_by(p.grad, q.grad) < 1e-9, f"step {step}: {parameter}"
    assert reduction.first_difference() is None


@pytest.mark.parametrize("name", ["sizes", "towers", "words", "sparse", "transposed"])
def test_any_rows_at_any_site_whatever_the_layers(sites, name):
    for mode in ("dsgd", "dad"):
        sites(2).run(takes_any_rows, name, mode, 1)
    sites(3).run(takes_any_rows, name, "dad", 2)
