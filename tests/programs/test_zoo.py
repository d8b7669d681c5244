"""The whole zoo in every mode: unequal rows, accumulation, checkpointing, over many steps.

Exact modes are held against one process with all sites' rows; lossy modes against the published algorithm on the sites'
gradients, see `loops.reference`.

A few steps of each model and 200 of some by default; ``DADPLUG_ZOO=full`` takes 200 of all, at 2 and at 4 sites.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import zoo
from loops.compare import scaled, small_gradients_compressed
from loops.reference import Agreement, mean
from test_reduction import off_by, shares

import dadplug
from dadplug.methods import method_names
from dadplug.methods.base import _METHODS

FULL = os.environ.get("DADPLUG_ZOO") == "full"
LONG = ("mlp", "conv1d", "words")
SIZES = (2, 4) if FULL else (2,)
SAMPLES = 14


def micro_batches(name: str, step: int, world_size: int) -> list:
    """The batches of a step: one, or in every third step three, each cut into the sites' shares."""
    groups = []
    for group in range(3 if step % 3 == 2 else 1):
        inputs, targets = zoo.batch(name, SAMPLES - step % 2, seed=10 * step + group)
        pieces = [shares(len(targets), rank, world_size, step + group) for rank in range(world_size)]
        groups.append([(inputs[piece], targets[piece]) for piece in pieces])
    return groups


def trains(name: str, mode: str, steps: int, options: dict | None = None, nodes: list | None = None) -> float:
    """Trains beside one process with all rows; returns the largest error of a gradient, relative to its norm.

    Args:
        name: the model.
        mode: the mode.
        steps: number of steps.
        options: options of the reduction.
        nodes: under hierarchical groups, the ranks on each node, whose rows count as those of one site.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    reference = zoo.build(name)
    model = copy.deepcopy(reference)
    settings = {"mode": mode, "rank": 2, "density": 0.3, **(options or {})}
    agreement = Agreement({key: settings[key] for key in settings if key != "hierarchy"}, world_size, nodes)
    check = exactly if _METHODS[mode].exact else Lossily(agreement)
    with small_gradients_compressed():
        reduction = dadplug.GradientReduction(model, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        worst = 0.0
        for step in range(steps):
            optimizer.zero_grad()
            groups = micro_batches(name, step, world_size)
            reference.load_state_dict(model.state_dict())
            for number, pieces in enumerate(groups):
                if len(pieces[rank][1]):
                    with reduction.no_sync() if number + 1 < len(groups) else nullcontext():
                        zoo.loss(model, *pieces[rank]).backward()
            reduction.synchronize()
            worst = max(worst, check(reduction, reference, groups, f"step {step}"))
            optimizer.step()
    assert reduction.first_difference() is None
    reduction.detach()
    return worst


def exactly(reduction: dadplug.GradientReduction, reference: torch.nn.Module, groups: list, where: str) -> float:
    """Compares with the gradients of one process that has all rows; returns the largest error."""
    reference.zero_grad()
    agreed_loss(reference, groups).backward()
    worst = 0.0
    for (name, p), q in zip(reduction.model.named_parameters(), reference.parameters()):
        assert (p.grad is None) == (q.grad is None), f"{where}: {name}"
        if q.grad is not None:
            worst = max(worst, error := off_by(p.grad, q.grad))
            assert error < 1e-9, f"{where}: {name} is off by {error:.1e}"
    return worst


class Lossily:
    """Compares with what the published algorithm makes of each site's gradients.

    Where it may choose otherwise, between numbers that are equal or where an iteration has not converged, the error
    against the exact mean must not be twice the algorithm's largest so far.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.largest: dict[str, float] = {}

    def __call__(
        self, reduction: dadplug.GradientReduction, reference: torch.nn.Module, groups: list, where: str
    ) -> float:
        sites, rows = gradients_of_sites(reference, groups)
        paths = {row.parameter: str(row.path) for row in reduction.plan}
        expected, worst = self.agreement.agree(sites, rows, paths), 0.0
        for name, p in reduction.model.named_parameters():
            assert (p.grad is None) == (expected[name] is None), f"{where}: {name}"
            if p.grad is None:
                continue
            exact = mean([site[name] for site in sites], rows)
            self.largest[name] = max(self.largest.get(name, 0.0), off_by(expected[name], exact))
            error = off_by(p.grad.to_dense(), expected[name])
            if error > 1e-6:
                error = off_by(p.grad.to_dense(), exact)
                assert error < 2 * self.largest[name], f"{where}: {name} is off by {error:.1e}"
            worst = max(worst, error)
        return worst


def gradients_of_sites(model: torch.nn.Module, groups: list) -> tuple[list[dict], list[int]]:
    """Each site's gradients by name, and its rows."""
    sites, rows = [], []
    for site in range(len(groups[0])):
        model.zero_grad()
        own = [pieces[site] for pieces in groups if len(pieces[site][1])]
        for piece in own:
            zoo.loss(model, *piece).backward()
        rows.append(sum(len(targets) for _, targets in own))
        sites.append({name: None if p.grad is None else p.grad.to_dense() for name, p in model.named_parameters()})
    return sites, rows


def agreed_loss(model: torch.nn.Module, groups: list) -> torch.Tensor:
    """The loss that the sites agree on: each weighs by the samples of all its micro-batches."""
    counts = [sum(len(pieces[rank][1]) for pieces in groups) for rank in range(len(groups[0]))]
    shares_of_sites = [count / sum(counts) for count in counts]
    return sum(
        share * zoo.loss(model, *piece)
        for pieces in groups
        for share, piece in zip(shares_of_sites, pieces)
        if len(piece[1])
    )


def is_refused(name: str, mode: str) -> None:
    """A model without a chain of layers is told to take another mode, by all sites in the first step."""
    reduction = dadplug.GradientReduction(model := zoo.build(name), mode=mode)
    zoo.loss(model, *zoo.batch(name, 5, seed=dist.get_rank())).backward()
    with pytest.raises(ValueError, match="Use mode='dad'"):
        reduction.synchronize()
    reduction.detach()


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("mode", method_names())
@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_zoo_trains_in_every_mode(sites, name, mode, world_size):
    steps = 200 if FULL else (200 if _METHODS[mode].exact else 60) if name in LONG else 6
    if _METHODS[mode].chains and name not in zoo.CHAINS:
        sites(world_size).run(is_refused, name, mode)
    else:
        sites(world_size).run(trains, name, mode, steps)


def notices(mode: str, factor: float, options: dict | None = None, nodes: list | None = None) -> None:
    with scaled(factor), pytest.raises(AssertionError, match="is off by"):
        trains("partly", mode, 2, options, nodes)


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
    reduction = dadplug.GradientReduction(model, mode=mode)
    generator = torch.Generator().manual_seed(seed)
    for step in range(40):
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
    reduction.detach()


@pytest.mark.parametrize("name", ["sizes", "towers", "words", "sparse", "transposed"])
def test_any_rows_at_any_site_whatever_the_layers(sites, name):
    for mode in ("dsgd", "dad"):
        sites(2).run(takes_any_rows, name, mode, 1)
    sites(3).run(takes_any_rows, name, "dad", 2)
