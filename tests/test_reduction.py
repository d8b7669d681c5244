"""Gradient reduction between sites, held against one process with all sites' rows."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import zoo
from comparison import Beside, gradients, off_by, shares
from torch import nn

import dadplug
from dadplug import GradientReduction
from dadplug.data import load_dataset, site_indices
from dadplug.models import MNISTNet

EXACT = ("dsgd", "dad")
MODES = (*EXACT, "rankdad")


def reference_loss(name, model, inputs, targets, world_size, step):
    """The loss on all sites' rows; batch by batch where the way through the model depends on the batch."""
    if name not in zoo.BY_BATCH:
        return zoo.loss(model, inputs, targets)
    pieces = [shares(len(targets), rank, world_size, step) for rank in range(world_size)]
    return sum(zoo.loss(model, inputs[piece], targets[piece]) * len(targets[piece]) / len(targets) for piece in pieces)


def matches_one_process(name: str, mode: str, steps: int, options: dict) -> int:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    reference = zoo.build(name)
    model = copy.deepcopy(reference)
    if rank:  # rank 0's parameters must reach the others
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    reduction = dadplug.GradientReduction(model, mode=mode, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2) for each in (model, reference)]
    for step in range(steps):
        inputs, targets = zoo.batch(name, 12 + step % 3, seed=step)
        mine = shares(len(targets), rank, world_size, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        zoo.loss(model, inputs[mine], targets[mine]).backward()
        reduction.synchronize()
        reference_loss(name, reference, inputs, targets, world_size, step).backward()
        expected, found = gradients(reference), gradients(model)
        for parameter, gradient in expected.items():
            if gradient is None:
                assert found[parameter] is None, f"step {step}: {parameter} has a gradient out of nothing"
            else:
                error = off_by(found[parameter], gradient)
                assert error < 1e-10, f"step {step}: {parameter} is off by {error:.1e}"
        for optimizer in optimizers:
            optimizer.step()
    assert reduction.first_difference() is None
    sent = reduction.traffic.total_bytes_sent
    reduction.detach()
    return sent


@pytest.mark.parametrize("mode", EXACT)
def test_exact_modes_match_one_process_at_more_sites(sites, mode):
    sites(4).run(matches_one_process, "mixed", mode, 4, {})
    sites(4).run(matches_one_process, "repeated", mode, 4, {})


def replicas_stay_equal(names: list[str], mode: str, steps: int, options: dict) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name in names:
        torch.manual_seed(rank)
        model = zoo.build(name, torch.float32)
        reduction = dadplug.GradientReduction(model, mode=mode, rank=2, **options)
        kind = torch.optim.SGD if name in ("sparse", "bags") else torch.optim.AdamW  # it takes no sparse gradients
        optimizer = kind(model.parameters(), lr=0.01)
        for step in range(steps):
            inputs, targets = zoo.batch(name, 14, seed=step)
            inputs = inputs.float() if inputs.is_floating_point() else inputs
            mine = shares(14, rank, world_size, step)
            optimizer.zero_grad()
            zoo.loss(model, inputs[mine], targets[mine]).backward()
            reduction.synchronize()
            optimizer.step()
        assert reduction.first_difference() is None, name
        reduction.detach()


@pytest.mark.parametrize("mode", MODES)
def test_replicas_are_equal_to_the_bit_after_many_steps(sites, mode):
    sites(2).run(replicas_stay_equal, list(zoo.ZOO), mode, 10, {})


@pytest.mark.parametrize("mode", MODES)
def test_replicas_are_equal_to_the_bit_on_a_rounding_wire(sites, mode):
    names = ["mixed", "conv1d", "transposed", "bags", "images"]
    sites(2).run(replicas_stay_equal, names, mode, 20, {"wire": "bf16", "dense": "lowrank"})


def curve(mode: str) -> list[float]:
    torch.manual_seed(0)
    data = load_dataset("digits")
    model = MNISTNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    reduction = GradientReduction(model, mode, sync_batchnorm=True)
    mine = site_indices(data.train.labels, reduction.site_rank, reduction.world_size, "by-class")
    losses = []
    for step in range(20):
        picked = mine[torch.arange(32 * step, 32 * (step + 1)) % len(mine)]
        loss = nn.functional.cross_entropy(model(data.train.images[picked]), data.train.labels[picked])
        optimizer.zero_grad()
        loss.backward()
        reduction.synchronize()
        optimizer.step()
        losses.append(loss.item())
    reduction.detach()
    return losses


def test_dad_and_dsgd_train_on_one_curve_in_single_precision(sites):
    # Any rounding that differs would grow to percents within these steps: ReLUs flip, and Adam steps on noise.
    for dense, factors in zip(sites(2).run(curve, "dsgd"), sites(2).run(curve, "dad"), strict=True):
        assert factors == pytest.approx(dense, rel=1e-4)


def mlp() -> nn.Module:
    return zoo.build("mlp")


def accumulates(mode: str, use_no_sync: bool) -> None:
    """Micro-batches, one buffer reused for all inputs, as a loader may; an uneven last group."""
    rank = dist.get_rank()
    buffer = torch.empty(4, 6, dtype=torch.float64)
    with Beside(mlp, mode=mode) as both:
        for step, groups in enumerate((3, 3, 2, 4, 1)):
            both.zero_grad()
            for group in range(groups):
                inputs, targets = zoo.batch("mlp", 8, seed=10 * step + group)
                buffer.copy_(inputs[4 * rank : 4 * rank + 4])
                value = zoo.loss(both.model, buffer, targets[4 * rank : 4 * rank + 4])
                with both.reduction.no_sync() if use_no_sync and group + 1 < groups else nullcontext():
                    value.backward()
                zoo.loss(both.reference, inputs, targets).backward()
            both.reduction.synchronize()
            both.check(step, rtol=1e-10)


@pytest.mark.parametrize("use_no_sync", [True, False])
@pytest.mark.parametrize("mode", EXACT)
def test_accumulated_gradients_add_up(sites, mode, use_no_sync):
    sites(2).run(accumulates, mode, use_no_sync)


def test_no_sync_sends_nothing(sites):
    assert sites(2).run(bytes_in_no_sync) == [0, 0]


def bytes_in_no_sync() -> int:
    model = mlp()
    reduction = dadplug.GradientReduction(model, mode="dad")
    for step in range(3):
        inputs, targets = zoo.batch("mlp", 4, seed=step)
        before = reduction.traffic.total_bytes_sent
        with reduction.no_sync():
            zoo.loss(model, inputs, targets).backward()
        sent = reduction.traffic.total_bytes_sent - before
        reduction.synchronize()
    reduction.detach()
    return sent


def gradients_accumulate_over_steps(mode: str, set_to_none: bool) -> None:
    """Without zero_grad in between, `.grad` grows by each step's agreed gradient."""
    mine = (slice(0, 3), slice(3, 8))[dist.get_rank()]
    with Beside(lambda: zoo.build("mixed"), mode=mode) as both:
        for step in range(4):
            if step % 2 == 0:
                both.zero_grad(set_to_none)
            inputs, targets = zoo.batch("mixed", 8, seed=step)
            zoo.loss(both.model, inputs[mine], targets[mine]).backward()
            both.reduction.synchronize()
            zoo.loss(both.reference, inputs, targets).backward()
            both.check(step)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mode", EXACT)
def test_gradients_accumulate_between_steps(sites, mode, set_to_none):
    sites(2).run(gradients_accumulate_over_steps, mode, set_to_none)


def uniform_weighting(mode: str) -> None:
    parts = [slice(0, 2), slice(2, 9)]
    mine = parts[dist.get_rank()]
    with Beside(mlp, mode=mode, weighting="uniform") as both:
        for step in range(3):
            both.zero_grad()
            inputs, targets = zoo.batch("mlp", 9, seed=step)
            zoo.loss(both.model, inputs[mine], targets[mine]).backward()
            both.reduction.synchronize()
            sum(0.5 * zoo.loss(both.reference, inputs[part], targets[part]) for part in parts).backward()
            both.check(step, rtol=1e-10)


@pytest.mark.parametrize("mode", EXACT)
def test_uniform_weighting_counts_sites_equally(sites, mode):
    sites(2).run(uniform_weighting, mode)


def idles(mode: str) -> None:
    """Site 1 has no data from the third step on, nor in the first."""
    rank = dist.get_rank()
    with Beside(lambda: zoo.build("mixed"), mode=mode) as both:
        for step in range(6):
            both.zero_grad()
            inputs, targets = zoo.batch("mixed", 6, seed=step)
            rows = (slice(0, 4), slice(4, 6)) if step in (1, 2) else (slice(0, 6), slice(0, 0))
            mine = rows[rank]
            if len(targets[mine]):
                zoo.loss(both.model, inputs[mine], targets[mine]).backward()
                both.reduction.synchronize()
            else:
                both.reduction.idle()
            zoo.loss(both.reference, inputs, targets).backward()
            both.check(step)


@pytest.mark.parametrize("mode", EXACT)
def test_a_site_without_data_gets_the_others_gradient(sites, mode):
    sites(2).run(idles, mode)


def everybody_idles() -> None:
    model = mlp()
    reduction = dadplug.GradientReduction(model, mode="dad")
    for _ in range(2):
        reduction.idle()
        assert all(p.grad is None for p in model.parameters())
    reduction.detach()


def test_a_step_without_any_data_leaves_no_gradient(sites):
    sites(2).run(everybody_idles)


def stops() -> list[bool]:
    model = mlp()
    reduction = dadplug.GradientReduction(model, mode="rankdad", rank=2)
    seen = []
    for step in range(3):
        inputs, targets = zoo.batch("mlp", 4, seed=step)
        zoo.loss(model, inputs, targets).backward()
        reduction.synchronize(stop=step == 1 and dist.get_rank() == 1)
        seen.append(reduction.stopped)
    reduction.detach()
    return seen


def test_one_site_can_stop_all(sites):
    assert sites(2).run(stops) == [[False, True, False]] * 2


def second_derivatives(mode: str, name: str) -> None:
    """A gradient penalty in every other step: the inner gradient must leave no factors, the outer one is dense."""
    halves = slice(0, 4), slice(4, 8)
    mine = halves[dist.get_rank()]

    def penalised(net, inputs, targets, step):
        inputs = inputs.clone().requires_grad_(True)
        value = zoo.loss(net, inputs, targets)
        if step % 2:
            (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
            value = value + slope.tanh().square().sum()
        return value

    with Beside(lambda: zoo.build(name), mode=mode) as both:
        for step in range(4):
            both.zero_grad()
            inputs, targets = zoo.batch(name, 8, seed=step)
            penalised(both.model, inputs[mine], targets[mine], step).backward()
            both.reduction.synchronize()
            sum(penalised(both.reference, inputs[half], targets[half], step) / 2 for half in halves).backward()
            both.check(step)


@pytest.mark.parametrize("mode", EXACT)
def test_gradient_penalties_are_exact(sites, mode):
    for name in ("mlp", "conv1d", "transposed"):
        sites(2).run(second_derivatives, mode, name)


def thaws(mode: str) -> None:
    """A frozen part is freed in mid-training, and frozen again."""
    mine = (slice(0, 3), slice(3, 8))[dist.get_rank()]
    with Beside(mlp, mode=mode) as both:
        for step in range(6):
            for net in (both.model, both.reference):
                net[0].requires_grad_(step in (2, 3))
            both.zero_grad()
            inputs, targets = zoo.batch("mlp", 8, seed=step)
            zoo.loss(both.model, inputs[mine], targets[mine]).backward()
            both.reduction.synchronize()
            zoo.loss(both.reference, inputs, targets).backward()
            both.check(step, rtol=1e-10)
        assert {row.path for row in both.reduction.plan if row.parameter.startswith("0.")} == {"frozen"}


@pytest.mark.parametrize("mode", EXACT)
def test_parameters_can_be_frozen_and_freed(sites, mode):
    sites(2).run(thaws, mode)


def test_the_old_name_of_the_site_rank_warns():
    reduction = dadplug.GradientReduction(torch.nn.Linear(2, 2), mode="rankdad", rank=3)
    with pytest.warns(DeprecationWarning, match=r"use reduction\.site_rank"):
        assert reduction.rank == reduction.site_rank == 0


def refuses_other_arguments() -> None:
    for other in (None, "model", torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)):
        with pytest.raises(TypeError, match=f"the model must be a torch.nn.Module, got {type(other).__name__}"):
            GradientReduction(other, mode="dad")
    for group in ("gloo", 3, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(TypeError, match="process_group must be a"):
            GradientReduction(nn.Linear(2, 2), mode="dad", process_group=group)


def test_arguments_of_other_types_are_refused(sites):
    sites(2).run(refuses_other_arguments)
