"""Gradients that are final when ``backward()`` returns, without a wrapper: ``synchronize="backward"``."""

from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from support import refuses
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dadplug

MODES = ("dsgd", "dad", "rankdad")


class Net(nn.Module):
    """Linear layers and a convolution in float64, one part of which may be checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.middle, self.last = nn.Linear(18, 8), nn.Linear(8, 2)
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        return self.middle(self.conv(x.unsqueeze(1)).flatten(1)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.block(x))
        return self.last(checkpoint(self.block, x.requires_grad_(), use_reentrant=self.reentrant))


def build(**keywords: Any) -> Net:
    torch.manual_seed(0)
    return Net(**keywords).double()


def rows(step: int, sites: Any) -> Tensor:
    made = [torch.randn(4, 6, generator=torch.Generator().manual_seed(9 * step + site)) for site in sites]
    return torch.cat(made).double()


def follow(steps: Any, expected: int, modes: Any = MODES, **keywords: Any) -> None:
    """Train a model of all sites and a plain one on the rows of all; `steps` gets model, sites and reduction."""
    for mode in modes:
        model, alone, start = build(**keywords), build(**keywords), build(**keywords)
        rank = {"rank": 12} if mode == "rankdad" else {}
        reduction = dadplug.GradientReduction(model, mode, synchronize="backward", wire="fp32", **rank)
        steps(model, [dist.get_rank()], reduction)
        steps(alone, range(2), None)
        assert reduction.step == expected
        for (name, p), q, first in zip(model.named_parameters(), alone.parameters(), start.parameters(), strict=True):
            assert off_by(p.detach(), q.detach()) < 1e-9, (mode, name)
            assert off_by(q.detach(), first.detach()) > 1e-6
        assert reduction.first_difference() is None
        reduction.detach()


def train(model: nn.Module, sites: Any, backward: Any, steps: int = 4) -> None:
    """Train by a loop that never calls `synchronize`."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        backward(step, rows(step, sites))
        optimizer.step()


@support.at_sites(2)
def test_a_loop_without_synchronize_follows_one_process() -> None:
    def steps(model: nn.Module, sites: Any, reduction: Any) -> None:
        train(model, sites, lambda step, x: model(x).square().mean().backward())

    follow(steps, 4)
    for reentrant in (True, False):
        follow(steps, 4, reentrant=reentrant)


@support.at_sites(2)
def test_parts_that_are_called_alone() -> None:
    """As by a trainer that never calls the model itself."""

    def steps(model: nn.Module, sites: Any, reduction: Any) -> None:
        train(model, sites, lambda step, x: model.last(model.block(x)).square().mean().backward())

    follow(steps, 4)


@support.at_sites(2)
def test_several_backward_passes_add_up() -> None:
    def separate(model: nn.Module, sites: Any, reduction: Any) -> None:
        def backward(step: int, x: Tensor) -> None:
            outputs = model(x)
            outputs.square().mean().backward(retain_graph=True)
            outputs.abs().mean().backward()

        train(model, sites, backward)

    def of_two_batches(model: nn.Module, sites: Any, reduction: Any) -> None:
        def backward(step: int, x: Tensor) -> None:
            model(x).square().mean().backward()
            model(rows(step + 50, sites)).square().mean().backward()

        train(model, sites, backward)

    for steps in (separate, of_two_batches):
        follow(steps, 8)


@support.at_sites(2)
def test_no_sync_accumulates() -> None:
    def steps(model: nn.Module, sites: Any, reduction: Any) -> None:
        def backward(step: int, x: Tensor) -> None:
            if reduction is None:
                model(x).square().mean().backward()
            else:
                with reduction.no_sync():
                    model(x).square().mean().backward()
                assert reduction.pending
            model(rows(step + 50, sites)).square().mean().backward()

        train(model, sites, backward)

    follow(steps, 4)


@support.at_sites(2)
def test_passes_of_autograd_grad_and_interrupted_ones() -> None:
    def penalised(model: nn.Module, sites: Any, reduction: Any) -> None:
        def backward(step: int, x: Tensor) -> None:
            outputs = model(x.requires_grad_())
            (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
            (outputs.square().mean() + slope.square().mean()).backward()

        train(model, sites, backward)

    def interrupted(model: nn.Module, sites: Any, reduction: Any) -> None:
        def fails(_: Tensor) -> None:
            raise ZeroDivisionError("in a hook")

        def backward(step: int, x: Tensor) -> None:
            if step == 1 and 1 in sites:  # at one site alone
                hidden = model.block(x)
                hidden.register_hook(fails)
                with pytest.raises(ZeroDivisionError):
                    model.last(hidden).square().mean().backward()
                model.zero_grad()
            model(x).square().mean().backward()

        train(model, sites, backward)

    for steps in (penalised, interrupted):
        follow(steps, 4)


@support.at_sites(2)
def test_closures_and_scalers() -> None:
    def closures(model: nn.Module, sites: Any, reduction: Any) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, tolerance_change=0.0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(rows(0, sites)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    def scaled(model: nn.Module, sites: Any, reduction: Any) -> None:
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=256.0), torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(rows(step, sites)).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    follow(closures, 6)
    follow(scaled, 4)


@support.at_sites(2)
def test_overflow_at_one_site_reaches_the_scalers_of_all() -> None:
    model = build()
    reduction = dadplug.GradientReduction(model, "dsgd", synchronize="backward", check_finite=False)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=256.0), torch.optim.SGD(model.parameters(), 0.1)
    before = [each.detach().clone() for each in model.parameters()]
    factor = torch.inf if dist.get_rank() == 1 else 1.0
    scaler.scale(model(rows(0, [dist.get_rank()])).square().mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    reduction.detach()
    checked = dadplug.GradientReduction(model, "dsgd", synchronize="backward")
    with pytest.raises(dadplug.errors.NonFiniteError):  # at both
        (model(rows(0, [dist.get_rank()])).square().mean() * factor).backward()
    model.zero_grad()
    model(rows(1, [dist.get_rank()])).square().mean().backward()
    assert checked.step == 2
    assert checked.first_difference() is None
    checked.detach()


@support.at_sites(2)
def test_idle_and_calls_of_synchronize() -> None:
    rank, model, alone = dist.get_rank(), build(), build()
    reduction = dadplug.GradientReduction(model, "dsgd", synchronize="backward")
    if rank == 0:
        model(rows(0, [0])).square().mean().backward()
    else:
        reduction.idle()
    alone(rows(0, [0])).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert off_by(p.grad, q.grad) < 1e-12
    refuses(
        (lambda: reduction.synchronize(), "has synchronized"),
        (lambda: reduction.apply(torch.optim.SGD(model.parameters(), 0.1)), "has synchronized"),
        error=RuntimeError,
    )
    assert reduction.step == 1
    model.zero_grad()
    with reduction.no_sync():
        model(rows(1, [rank])).square().mean().backward()
    reduction.synchronize()  # of what `no_sync` has held back
    assert reduction.step == 2
    reduction.detach()


def test_other_values_are_refused() -> None:
    model = build()
    refuses(
        (
            lambda: dadplug.GradientReduction(model, synchronize="step"),
            r"unknown synchronize 'step'.*'call', 'backward'",
        ),
        (lambda: dadplug.DistributedDataParallel(model, synchronize="call"), "unknown option 'synchronize'"),
    )
    dadplug.GradientReduction(model).detach()  # nothing was changed
