"""edad: deltas recomputed along chains of layers, held against one process and against dad."""

import copy
from contextlib import nullcontext

import pytest
import support
import torch
import torch.distributed as dist
from chained_models import MODELS, chained, compare, draw, loss, mlp, pair
from comparison import assert_resumes, off_by, shares, train
from torch import nn

import dadplug


def matches_one_process(name: str, dtype: torch.dtype, bound: float, steps: int, options: dict) -> list[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, reference = pair(name, dtype)
    reduction = dadplug.GradientReduction(model, mode="edad", **{"weighting": "samples"} | options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(steps):
        inputs, targets = draw(12 + step % 3, step, dtype)
        pieces = [shares(len(targets), site, world_size, step) for site in range(world_size)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, inputs[pieces[rank]], targets[pieces[rank]]).backward()
        reduction.synchronize()
        for piece in pieces:
            (loss(reference, inputs[piece], targets[piece]) * len(targets[piece]) / len(targets)).backward()
        compare(model, reference, bound, step)
        for optimizer in optimizers:
            optimizer.step()
    assert reduction.first_difference() is None
    names = chained(reduction)
    return names


ALL = {"mlp": 3, "tanh": 1, "functions": 12, "skips": 3, "tokens": 2, "partial": 3, "checkpointed": 3, "reentrant": 3}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(sites, name):
    for names in sites(2).run(matches_one_process, name, torch.float64, 1e-9, 8, {}):
        assert len([each for each in names if each.endswith("weight")]) == ALL[name], names


@pytest.mark.parametrize("name", ["mlp", "skips", "checkpointed"])
def test_gradients_are_those_of_one_process_at_four_sites_and_in_single_precision(sites, name):
    sites(4).run(matches_one_process, name, torch.float64, 1e-9, 5, {})
    sites(2).run(matches_one_process, name, torch.float32, 1e-5, 3, {})


def test_share_inputs_false_keeps_the_first_layer_out_of_its_chain(sites):
    first, _ = sites(2).run(matches_one_process, "mlp", torch.float64, 1e-9, 6, {"share_inputs": False})
    assert "0.weight" not in first
    assert "2.weight" in first


def takes_any_rows(name: str, seed: int) -> None:
    """Any number of rows and micro-batches at each site, none included, in the first step too."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, reference = pair(name)
    reduction = dadplug.GradientReduction(model, mode="edad", weighting="samples")
    generator = torch.Generator().manual_seed(seed)
    for step in range(15):
        counts = torch.randint(
            0, 6, (int(torch.randint(1, 4, (1,), generator=generator)), world_size), generator=generator
        )
        if step == 0:
            counts[:] = 0  # no site learns anything here
        if step == 1:
            counts[:, 0] = 0  # nor the site whose order of layers the others follow
        model.zero_grad(), reference.zero_grad()
        total = counts.sum().item()
        for group, row in enumerate(counts.tolist()):
            for site, count in enumerate(row):
                piece = draw(count, 1000 * step + 10 * group + site)
                if count:
                    (loss(reference, *piece) * sum(counts[:, site].tolist()) / total).backward()
                if count and site == rank:
                    last = group + 1 == len(counts) or step % 2
                    with nullcontext() if last else reduction.no_sync():
                        loss(model, *piece).backward()
        reduction.synchronize()
        compare(model, reference, 1e-9, step)
    assert reduction.first_difference() is None
    assert chained(reduction)


@pytest.mark.parametrize("name", ["mlp", "functions", "partial", "reentrant"])
def test_any_rows_at_any_site_in_any_number_of_passes(sites, name):
    for seed in (1, 2):
        sites(2).run(takes_any_rows, name, seed)
    sites(4).run(takes_any_rows, name, 3)


class Wanders(nn.Module):
    """Steps that differ from the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.way = ""
        self.hidden: torch.Tensor | None = None

    def forward(self, x):
        hidden = self.hidden = torch.tanh(self.a(x))
        if self.way == "skip":
            return self.c(torch.relu(self.b(hidden)) + hidden)
        if self.way == "other function":
            return self.c(torch.sigmoid(self.b(hidden)))
        if self.way == "other order":
            return self.c(torch.tanh(self.a(torch.relu(self.b(x)))))
        if self.way == "left out":
            return self.c(hidden)
        if self.way == "twice":
            return self.c(torch.relu(self.b(torch.relu(self.b(hidden)))))
        if self.way == "hook":
            hidden.register_hook(lambda gradient: 3 * gradient)
        return self.c(torch.relu(self.b(hidden)))


def penalised(model, inputs, targets):
    """A loss with a gradient penalty, and one on activations, in which second derivatives and a side path meet."""
    inputs = inputs.clone().requires_grad_(True)
    value = loss(model, inputs, targets)
    (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
    return value + slope.square().sum() + 1e-3 * model.hidden.abs().mean()


@pytest.mark.parametrize("only_one_site", [False, True])
@support.at_sites(2)
def test_steps_that_leave_the_chain_are_exact(only_one_site: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    reference = Wanders().double()
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode="edad", weighting="samples")
    ways = (
        "",
        "skip",
        "",
        "other function",
        "other order",
        "left out",
        "twice",
        "hook",
        "penalty",
        "",
        "other order",
        "",
    )
    for step, way in enumerate(ways):
        model.zero_grad(), reference.zero_grad()
        inputs, targets = draw(9, step)
        for site, piece in enumerate((slice(0, 4), slice(4, 9))):
            reference.way = model.way = way if site == 0 or not only_one_site else ""
            objective = penalised if reference.way == "penalty" else loss
            (objective(reference, inputs[piece], targets[piece]) * len(targets[piece]) / 9).backward()
            if site == rank:
                objective(model, inputs[piece], targets[piece]).backward()
        reduction.synchronize()
        compare(model, reference, 1e-9, (step, way))
    assert chained(reduction) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def bytes_sent(mode: str, options: dict) -> tuple[int, int]:
    torch.manual_seed(0)
    model = mlp(64, 64, 64, 64, 64, 64, 64, 10)
    reduction = dadplug.GradientReduction(model, mode=mode, **{"weighting": "samples"} | options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(16, 64, generator=generator), torch.randint(0, 10, (16,), generator=generator)
        model.zero_grad()
        loss(model, inputs, targets).backward()
        reduction.synchronize()
    reduction.detach()
    return reduction.traffic.bytes_sent, reduction.plan.bytes


@pytest.mark.parametrize("options", [{}, {"wire": "bf16"}, {"wire": "int8"}])
def test_about_half_of_the_bytes_of_dad_travel(sites, options):
    (dad, _), _ = sites(2).run(bytes_sent, "dad", options)
    (edad, planned), _ = sites(2).run(bytes_sent, "edad", options)
    assert 0.4 * dad < edad < 0.6 * dad
    if "wire" not in options:
        assert planned == pytest.approx(edad, rel=0.05)


def replicas_stay_equal(names: list[str], options: dict) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name in names:
        model, _ = pair(name, torch.float32)
        reduction = dadplug.GradientReduction(model, mode="edad", **{"weighting": "samples"} | options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(8):
            inputs, targets = draw(14, step, torch.float32)
            mine = shares(14, rank, world_size, step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=step % 4 == 3):
                value = loss(model, inputs[mine], targets[mine])
            value.backward()
            reduction.synchronize()
            optimizer.step()
        assert reduction.first_difference() is None, name
        reduction.detach()


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_replicas_are_equal_to_the_bit(sites, wire):
    sites(2).run(replicas_stay_equal, list(MODELS), {"wire": wire})
    sites(4).run(replicas_stay_equal, ["mlp"], {"wire": wire})


@support.at_sites(2)
def test_autocast_keeps_chains() -> None:
    """Under autocast gradients are those of dad, up to the rounding of bf16."""
    rank, grads = dist.get_rank(), {}
    for mode in ("dad", "edad"):
        model, _ = pair("mlp", torch.float32)
        reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
        for step in range(2):
            model.zero_grad()
            inputs, targets = draw(12, step, torch.float32)
            mine = slice(0, 5) if rank == 0 else slice(5, 12)
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model, inputs[mine], targets[mine])
            value.backward()
            reduction.synchronize()
        grads[mode] = [parameter.grad.clone() for parameter in model.parameters()]
        assert mode == "dad" or len(chained(reduction)) == 6
        reduction.detach()
    for found, expected in zip(grads["edad"], grads["dad"], strict=True):
        assert off_by(found, expected) < 0.02


def bits(mode: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = mlp(20, 30, 30, 10)
    reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
    for step in range(2):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss(model, torch.randn(8, 20, generator=generator), torch.arange(8)).backward()
        reduction.synchronize()
    return [parameter.grad for parameter in model.parameters()]


def test_equal_batches_have_the_bits_of_dad(sites):
    for found, expected in zip(sites(2).run(bits, "edad")[0], sites(2).run(bits, "dad")[0], strict=True):
        assert torch.equal(found, expected)


def resumes(steps: int, state: list | None) -> tuple:
    model, _ = pair("mlp")

    def backward(step: int) -> None:
        inputs, targets = draw(10, step)
        mine = slice(0, 4) if dist.get_rank() == 0 else slice(4, 10)
        model.zero_grad()
        loss(model, inputs[mine], targets[mine]).backward()

    return train(model, dadplug.GradientReduction(model, mode="edad", weighting="samples"), backward, steps, state)


def test_a_run_can_be_resumed(sites):
    assert assert_resumes(sites(2), resumes, 6, 3, exact=True)[2] == 3


def names_the_layer_of_a_bad_number(where: str) -> str:
    model, _ = pair("mlp")
    reduction = dadplug.GradientReduction(model, mode="edad", weighting="samples")
    try:
        for step in range(3):
            inputs, targets = draw(4, step)
            if step == 2 and dist.get_rank() == 1 and where == "input":
                inputs[1, 1] = float("nan")
            value = loss(model, inputs, targets)
            (value * float("nan") if step == 2 and where == "loss" else value).backward()
            if step == 2:
                with pytest.raises(dadplug.errors.NonFiniteError) as error:
                    reduction.synchronize()
            else:
                reduction.synchronize()
            if step < 2:
                model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    finally:
        reduction.detach()
    return str(error.value)


def test_numbers_that_are_not_finite_are_found_where_they_come_from(sites):
    for message in sites(2).run(names_the_layer_of_a_bad_number, "input"):
        assert "input of the layer of '0.weight'" in message
    for message in sites(2).run(names_the_layer_of_a_bad_number, "loss"):
        assert "output of the layer of '6.weight'" in message


@support.at_sites(2)
def test_chains_are_found_after_a_step_whose_gradients_were_changed_in_place() -> None:
    model, reference = pair("mlp", torch.float64)
    reduction = dadplug.GradientReduction(model, mode="edad")
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        for site in range(2):
            (loss(reference, *draw(6, 2 * step + site, torch.float64)) / 2).backward()
        loss(model, *draw(6, 2 * step + dist.get_rank(), torch.float64)).backward()
        if step == 0:
            for own, whole in zip(model.parameters(), reference.parameters(), strict=True):
                own.grad.mul_(2)
                whole.grad.mul_(2)
        reduction.synchronize()
        compare(model, reference, 1e-9, step)
    assert len(chained(reduction)) >= 3
