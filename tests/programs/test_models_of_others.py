"""Models that other people wrote, in every mode: two sites with unequal rows against one process in 64 bits.

Exact modes have the gradients of one process. A lossy mode is compared with what it should make of the sites' own
gradients at the same parameters: rankdad with the best approximations of its rank, topk and powersgd with their own
arithmetic in one process, what has not been sent yet included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import models_of_others as others
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dadplug

pytestmark = pytest.mark.slow

COUNTS = [3, 2]
STEPS = 5
RANK, DENSITY = 2, 0.25
EXACT = ("dsgd", "dad", "auto", "edad")
Gradients = dict[str, Tensor]
Paths = dict[str, str]


def gradients(model: nn.Module, batch: others.Batch, share: float = 1.0) -> Gradients:
    """Return autograd's own gradients of a batch's loss, by name."""
    model.zero_grad()
    (share * others.loss(model, batch)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def progress(name: str, model: nn.Module) -> float:
    """Return how far the loss of the first batch has come from the start."""
    first = others.union(others.batch(name, COUNTS, 0))
    with torch.no_grad():
        return float(others.loss(others.build(name).eval(), first) - others.loss(copy.deepcopy(model).eval(), first))


def one_process(name: str) -> tuple[list[Gradients], float]:
    """Train in one process with all rows; return each step's gradients, and how far the loss has come."""
    model, found = others.build(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        found.append(gradients(model, others.union(others.batch(name, COUNTS, step))))
        optimizer.step()
    return found, progress(name, model)


class Check:
    """A check of each step's agreed gradients.

    Attributes:
        progress: how far the loss has come in training.
    """

    progress = 0.0

    def __call__(self, step: int, model: nn.Module, pieces: list[others.Batch], paths: Paths) -> None:
        raise NotImplementedError


class Exact(Check):
    """A check that gradients are those of one process."""

    def __init__(self, expected: list[Gradients]) -> None:
        self.expected = expected

    def __call__(self, step: int, model: nn.Module, pieces: list[others.Batch], paths: Paths) -> None:
        whole = norm(self.expected[step].values())
        for parameter, p in model.named_parameters():
            assert (p.grad is None) == (parameter not in self.expected[step]), f"step {step}: {parameter}"
            if p.grad is not None:
                q = self.expected[step][parameter]
                error = norm([p.grad - q])
                assert error <= 1e-9 * norm([q]) + 1e-13 * whole, f"step {step}: {parameter} is off by {error:.1e}"


class Lossy(Check):
    """A check of each step's gradients against what a mode should make of the sites' own at the same parameters.

    Args:
        name: the model.
        rounding: relative error of numbers on the wire.
    """

    def __init__(self, name: str, rounding: float = 0.0) -> None:
        self.model = others.build(name).eval()
        self.rounding = rounding

    def __call__(self, step: int, model: nn.Module, pieces: list[others.Batch], paths: Paths) -> None:
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), model.parameters()):
                p.copy_(q)
        sites = [gradients(self.model, piece, count / sum(COUNTS)) for piece, count in zip(pieces, COUNTS)]
        whole, limits = norm(sum(each[name] for each in sites) for name in sites[0]), []
        for parameter, p in model.named_parameters():
            assert (p.grad is None) == (parameter not in sites[0]), f"step {step}: {parameter}"
            if p.grad is None:
                continue
            own = [each[parameter].reshape(len(p), -1) for each in sites]
            found, expected, limit = p.grad.reshape(len(p), -1), sum(own), 0.0
            if paths[parameter] not in ("allreduce", "factors") and p.dim() > 1:
                expected, limit = self.expect(parameter, found, own)
            error = norm([found - expected])
            allowed = limit + 1e-9 * norm(own) + 1e-13 * whole + self.rounding * (norm(own) + 0.03 * whole)
            assert error <= allowed, f"step {step}: {parameter} is off by {error:.1e}, and may be by {allowed:.1e}"
            limits.append(limit)
        assert math.hypot(*limits) < 0.9 * whole, "the limits would let a gradient of zeros pass"

    def expect(self, parameter: str, found: Tensor, own: list[Tensor]) -> tuple[Tensor, float]:
        """Return the gradient that is expected of the sites' own, as matrices, and how far the agreed one may be."""
        return sum(own), 0.0


class BestOfRank(Lossy):
    """rankdad: as near as the best approximations of the sites' gradients."""

    def expect(self, parameter: str, found: Tensor, own: list[Tensor]) -> tuple[Tensor, float]:
        return sum(own), 1.05 * sum(norm([torch.linalg.svdvals(each)[RANK:]]) for each in own)


class Projection(Lossy):
    """powersgd: all of the gradient, and of what has not been sent, in as many columns as the rank."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unsent: Gradients = {}

    def expect(self, parameter: str, found: Tensor, own: list[Tensor]) -> tuple[Tensor, float]:
        whole = sum(own) + self.unsent.get(parameter, 0.0)
        columns = torch.linalg.svd(found)[0][:, :RANK]
        sent = columns @ (columns.T @ whole)
        self.unsent[parameter] = whole - sent
        return sent, 0.0


class Largest(Lossy):
    """topk: each site's largest elements, those that have not been sent included."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unsent: dict[str, list[Tensor]] = {}

    def expect(self, parameter: str, found: Tensor, own: list[Tensor]) -> tuple[Tensor, float]:
        whole = [each + left for each, left in zip(own, self.unsent.get(parameter, [0.0, 0.0]))]
        sent = []
        for each in whole:
            places = each.abs().flatten().topk(math.ceil(DENSITY * each.numel())).indices
            sent.append(torch.zeros_like(each).flatten().index_put((places,), each.flatten()[places]).view_as(each))
        self.unsent[parameter] = [each - part for each, part in zip(whole, sent)]
        return sum(sent), 0.0


def trains(name: str, check: Check, steps: int = STEPS, *, spoil: float | None = None, **options: Any) -> Paths:
    """Train on this site.

    Args:
        name: the model.
        check: is given each step's agreed gradients.
        steps: number of steps.
        spoil: factor of the agreed gradients that are compressed.
        options: the reduction's options.

    Returns:
        The path of each parameter.
    """
    model = others.build(name)
    if options["mode"] not in EXACT:
        model.eval()  # statistics of a batch would be those of one site
    reduction = dadplug.GradientReduction(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        pieces = others.batch(name, COUNTS, step)
        others.loss(model, pieces[dist.get_rank()]).backward()
        reduction.synchronize()
        paths = {row.parameter: str(row.path) for row in reduction.plan}
        if spoil is not None:
            for parameter, p in model.named_parameters():
                if p.grad is not None and (
                    options["mode"] in EXACT or paths[parameter] not in ("allreduce", "factors")
                ):
                    p.grad.mul_(spoil)
        check(step, model, pieces, paths)
        optimizer.step()
    assert reduction.first_difference() is None
    reduction.detach()
    check.progress = progress(name, model)
    return paths


RANKDAD: dict[str, Any] = {
    "mode": "rankdad",
    "rank": RANK,
    "warm_start": False,
    "tolerance": 0.0,
    "error_feedback": False,
}
LOSSY: list[tuple[type[Lossy], dict[str, Any]]] = [
    (BestOfRank, RANKDAD),
    (Projection, {"mode": "powersgd", "rank": RANK}),
    (Largest, {"mode": "topk", "density": DENSITY}),
]


def trains_in_every_mode(name: str) -> None:
    subject = others.SUBJECTS[name]
    expected, of_one = one_process(name)
    options = {"sync_batchnorm": True} if name == "resnet" else {}
    for mode in EXACT:
        if mode != "edad" or subject.chains:
            paths = trains(name, Exact(expected), mode=mode, **options)
            assert (mode == "edad") == ("activations" in paths.values())
        else:
            with pytest.raises(ValueError, match="Use mode='dad'"):
                trains(name, Exact(expected), mode=mode)
    for kind, options in LOSSY:
        paths = trains(name, check := kind(name), **options)
        assert check.progress > 0.5 * of_one
        if options["mode"] == "rankdad":
            sizes = {parameter: p.numel() for parameter, p in check.model.named_parameters() if p.dim() > 1}
            trained = {parameter: size for parameter, size in sizes.items() if paths[parameter] != "frozen"}
            factored = sum(size for parameter, size in trained.items() if paths[parameter] in ("factors", "lowrank"))
            assert factored >= subject.factored * sum(trained.values())


@pytest.mark.parametrize("name", others.SUBJECTS)
def test_models_of_others_train_in_every_mode(sites, name):
    sites(2).run(trains_in_every_mode, name)


def trains_on_narrow_wires(name: str) -> None:
    for kind, options in LOSSY[:1]:
        for wire, rounding in (("bf16", 0.02), ("int8", 0.1)):
            trains(name, kind(name, rounding), wire=wire, **options)
    for wire, rounding in (("bf16", 0.02), ("int8", 0.1)):
        trains(name, Lossy(name, rounding), mode="dad", wire=wire)


def test_models_of_others_train_on_narrow_wires(sites):
    sites(2).run(trains_on_narrow_wires, "gpt2")


def finds_spoilt_gradients(name: str) -> None:
    checks = [(lambda: Exact(one_process(name)[0]), {"mode": mode}) for mode in EXACT[:3]]
    checks += [(lambda kind=kind: kind(name), options) for kind, options in LOSSY]
    for make, options in checks:
        for factor in (0.0, 2.0):
            with pytest.raises(AssertionError, match="is off by"):
                trains(name, make(), 1, spoil=factor, **options)


def test_the_checks_find_gradients_of_zeros_and_doubled_ones(sites):
    sites(2).run(finds_spoilt_gradients, "gpt2")
