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
ROUNDING = {"bf16": 0.02, "int8": 0.1}  # by wire format, the largest error of a gradient


def micro_batches(name: str, step: int, world_size: int, dtype: torch.dtype) -> list:
    """The batches of a step: one, or in every third step three, each cut into the sites' shares."""
    groups = []
    for group in range(3 if step % 3 == 2 else 1):
        whole = zoo.batch(name, SAMPLES - step % 2, 10 * step + group, dtype)
        pieces = [shares(len(whole[1]), rank, world_size, step + group) for rank in range(world_size)]
        groups.append([zoo.part(whole, piece) for piece in pieces])
    return groups


def trains(
    name: str,
    mode: str,
    steps: int,
    options: dict | None = None,
    nodes: list | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, str]:
    """Train beside one process with all rows; return the path of each parameter.

    Args:
        name: the model.
        mode: the mode.
        steps: number of steps.
        options: options of the reduction.
        nodes: under hierarchical groups, the ranks on each node, whose rows count as those of one site.
        dtype: the type of the model.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings = {"mode": mode, "rank": 2, "density": 0.3, **(options or {})}
    agreement = Agreement({key: settings[key] for key in settings if key != "hierarchy"}, world_size, nodes)
    bound = ROUNDING.get(settings.get("wire"), 1e-9 if dtype is torch.float64 else 1e-5)
    check = Exactly(bound) if METHODS[mode].traits.exact else Lossily(agreement)
    torch.manual_seed(5)
    reference = zoo.build(name, dtype)
    model = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)  # those of site 0 count
    with small_gradients_compressed():
        reduction = dadplug.GradientReduction(model, **{"weighting": "samples"} | settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(steps):
            optimizer.zero_grad()
            groups = micro_batches(name, step, world_size, dtype)
            reference.load_state_dict(model.state_dict())
            backward(reduction, groups)
            check(reduction, reference, groups, f"step {step}")
            optimizer.step()
    assert reduction.first_difference() is None
    paths = {row.parameter: str(row.path) for row in reduction.plan}
    reduction.detach()
    return paths


def is_refused(name: str, mode: str) -> None:
    """A model without a chain of layers is refused with another mode named, by all sites in the first step."""
    reduction = dadplug.GradientReduction(model := zoo.build(name), mode=mode, weighting="samples")
    zoo.loss(model, *zoo.batch(name, 5, seed=dist.get_rank())).backward()
    with pytest.raises(ValueError, match="Use mode='dad'"):
        reduction.synchronize()


def backward(reduction: dadplug.GradientReduction, groups: list) -> None:
    """Go backward through this site's micro-batches that have rows, and agree."""
    for number, pieces in enumerate(groups):
        mine = pieces[dist.get_rank()]
        if len(mine[1]):
            with reduction.no_sync() if number + 1 < len(groups) else nullcontext():
                zoo.loss(reduction.model, *mine).backward()
    reduction.synchronize()


def takes_any_rows(name: str, mode: str, seed: int) -> None:
    """Any number of rows and of micro-batches at each site and step, none included; sizes and layers that vary."""
    world_size = dist.get_world_size()
    torch.manual_seed(1)
    reference = zoo.build(name)
    reduction = dadplug.GradientReduction(copy.deepcopy(reference), mode=mode, weighting="samples")
    generator = torch.Generator().manual_seed(seed)
    for step in range(20):
        counts = torch.randint(
            0, 6, (int(torch.randint(1, 4, (1,), generator=generator)), world_size), generator=generator
        )
        counts[:, : max(0, world_size - step)] = 0  # no site has rows in the first step, nor site 0 in the second one
        groups = [
            [zoo.batch(name, count, 100 * (1000 * seed + 10 * step + group) + site) for site, count in enumerate(row)]
            for group, row in enumerate(counts.tolist())
        ]
        reduction.model.zero_grad()
        backward(reduction, groups)
        Exactly()(reduction, reference, groups, f"step {step}")
    assert reduction.first_difference() is None


def replicas_stay_equal(names: list[str], mode: str, steps: int, options: dict) -> None:
    """Train in single precision, of some models under autocast in each fourth step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name in names:
        narrows = name in zoo.CHAINS and name != "mixed"  # whose LSTM has no step in bfloat16
        torch.manual_seed(rank)
        model = zoo.build(name, torch.float32)
        reduction = dadplug.GradientReduction(model, mode=mode, rank=2, **{"weighting": "samples"} | options)
        kind = torch.optim.SGD if name in ("sparse", "bags") else torch.optim.AdamW  # it takes no sparse gradients
        optimizer = kind(model.parameters(), lr=0.01)
        for step in range(steps):
            mine = zoo.part(zoo.batch(name, 14, step, torch.float32), shares(14, rank, world_size, step))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=narrows and step % 4 == 3):
                value = zoo.loss(model, *mine)
            value.backward()
            reduction.synchronize()
            optimizer.step()
        assert reduction.first_difference() is None, name
        reduction.detach()


class Exactly:
    """Compares with the gradients of one process that has all rows.

    Args:
        bound: the largest error of a gradient, relative to its norm.
    """

    def __init__(self, bound: float = 1e-9) -> None:
        self.bound = bound

    def __call__(
        self, reduction: dadplug.GradientReduction, reference: torch.nn.Module, groups: list, where: str
    ) -> None:
        reference.zero_grad()
        if any(len(piece[1]) for pieces in groups for piece in pieces):
            agreed_loss(reference, groups).backward()
        whole = sum(float(q.grad.to_dense().norm()) ** 2 for q in reference.parameters() if q.grad is not None) ** 0.5
        for (name, p), q in zip(reduction.model.named_parameters(), reference.parameters()):
            assert (p.grad is None) == (q.grad is None), f"{where}: {name}"
            error = 0.0 if q.grad is None else off_by(p.grad, q.grad)
            if error and self.bound in ROUNDING.values():  # judge small gradients by the whole one, too
                error *= float(q.grad.norm() / (q.grad.norm() + 0.03 * whole))
            assert error < self.bound, f"{where}: {name} is off by {error:.1e}"


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
    ) -> None:
        sites, rows = gradients_of_sites(reference, groups)
        paths = {row.parameter: str(row.path) for row in reduction.plan}
        expected = self.agreement.agree(sites, rows, paths)
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
