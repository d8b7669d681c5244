"""Training of a model of the zoo beside one process that has all rows."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import zoo
from comparison import off_by, shares
from loops.compare import scaled, small_gradients_compressed
from loops.reference import Agreement, mean

import dadplug
from dadplug.step.methods import METHODS

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
    """Train beside one process with all rows; return the largest error of a gradient, relative to its norm.

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
    check = exactly if METHODS[mode].traits.exact else Lossily(agreement)
    with small_gradients_compressed():
        reduction = dadplug.GradientReduction(model, **{"weighting": "samples"} | settings)
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
    """Compare with the gradients of one process that has all rows; return the largest error."""
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


def notices(mode: str, factor: float, options: dict | None = None, nodes: list | None = None) -> None:
    with scaled(factor), pytest.raises(AssertionError, match="is off by"):
        trains("partly", mode, 2, options, nodes)
