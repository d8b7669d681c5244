"""edad: deltas recomputed along chains of layers, held against one process and against dad."""

import pytest
import support
import torch
import torch.distributed as dist
import zoo
from chained_models import chained, mlp
from comparison import Beside, assert_resumes, off_by, train
from torch import nn
from zoo import loss
from zoo_training import replicas_stay_equal, trains

import dadplug


@pytest.mark.parametrize("name", ["chain", "skips", "checkpointed"])
def test_gradients_are_those_of_one_process_at_four_sites_and_in_single_precision(sites, name):
    sites(4).run(trains, name, "edad", 5)
    sites(2).run(trains, name, "edad", 3, {}, None, torch.float32)


def test_share_inputs_false_keeps_the_first_layer_out_of_its_chain(sites):
    paths, _ = sites(2).run(trains, "chain", "edad", 6, {"share_inputs": False})
    assert paths["0.weight"] != "activations"
    assert paths["2.weight"] == "activations"


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
    with Beside(lambda: Wanders().double(), mode="edad") as both:
        for step, way in enumerate(ways):
            both.zero_grad()
            for site, piece in enumerate((slice(0, 4), slice(4, 9))):
                both.reference.way = both.model.way = way if site == 0 or not only_one_site else ""
                objective = penalised if both.reference.way == "penalty" else loss
                inputs, targets = zoo.part(zoo.batch("chain", 9, step), piece)
                (objective(both.reference, inputs, targets) * len(targets) / 9).backward()
                if site == dist.get_rank():
                    objective(both.model, inputs, targets).backward()
            both.reduction.synchronize()
            both.check((step, way))
        assert chained(both.reduction) == ["a.weight", "a.bias", "b.weight", "b.bias"]


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


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_replicas_are_equal_to_the_bit(sites, wire):
    sites(2).run(
        replicas_stay_equal,
        [name for name in zoo.CHAINS if name not in ("mixed", "transformer", "images")],
        "edad",
        8,
        {"wire": wire},
    )
    sites(4).run(replicas_stay_equal, ["chain"], "edad", 8, {"wire": wire})


@support.at_sites(2)
def test_autocast_keeps_chains() -> None:
    """Under autocast gradients are those of dad, up to the rounding of bf16."""
    rank, grads = dist.get_rank(), {}
    for mode in ("dad", "edad"):
        torch.manual_seed(7)
        model = zoo.build("chain", torch.float32)
        reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
        for step in range(2):
            model.zero_grad()
            mine = zoo.part(zoo.batch("chain", 12, step, torch.float32), (slice(0, 5), slice(5, 12))[rank])
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(model, *mine)
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
    torch.manual_seed(7)
    model = zoo.build("chain")

    def backward(step: int) -> None:
        model.zero_grad()
        mine = (slice(0, 4), slice(4, 10))[dist.get_rank()]
        loss(model, *zoo.part(zoo.batch("chain", 10, step), mine)).backward()

    return train(model, dadplug.GradientReduction(model, mode="edad", weighting="samples"), backward, steps, state)


def test_a_run_can_be_resumed(sites):
    assert assert_resumes(sites(2), resumes, 6, 3, exact=True)[2] == 3


def names_the_layer_of_a_bad_number(where: str) -> str:
    model = zoo.build("chain")
    reduction = dadplug.GradientReduction(model, mode="edad", weighting="samples")
    try:
        for step in range(3):
            inputs, targets = zoo.batch("chain", 4, step)
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
    with Beside(lambda: zoo.build("chain"), mode="edad") as both:
        for step in range(3):
            both.zero_grad()
            for site in range(2):
                (loss(both.reference, *zoo.batch("chain", 6, 2 * step + site)) / 2).backward()
            loss(both.model, *zoo.batch("chain", 6, 2 * step + dist.get_rank())).backward()
            if step == 0:
                for parameter in (*both.model.parameters(), *both.reference.parameters()):
                    parameter.grad.mul_(2)
            both.reduction.synchronize()
            both.check(step)
        assert len(chained(both.reduction)) >= 3


@pytest.mark.parametrize("passes", [1, 2, 3])
@support.at_sites(2)
def test_a_chain_whose_last_gradient_is_changed_loses_no_pass(passes: int) -> None:
    """One site goes backward, and changes the gradient of the layer behind the chained one; the other one is idle."""
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.LayerNorm(9), nn.Linear(9, 4))
    reduction = dadplug.GradientReduction(model, mode="edad", weighting="uniform")
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    model(inputs).square().sum().backward()
    reduction.synchronize()
    assert {row.parameter: row.path for row in reduction.plan}["0.weight"] == "activations"
    once = [parameter.grad.clone() for parameter in model.parameters()]
    for _ in range(2):  # what the sites expect of a step follows from the last one
        model.zero_grad()
        if dist.get_rank() == 1:
            for _ in range(passes):
                model(inputs).square().sum().backward()
            model[2].weight.grad.mul_(0.5)
            reduction.synchronize()
        else:
            reduction.idle()
        for number, (parameter, each) in enumerate(zip(model.parameters(), once, strict=True)):
            torch.testing.assert_close(parameter.grad, passes * each * (0.5 if number == 2 else 1.0))
