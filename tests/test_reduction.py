"""Gradient reduction between sites, held against one process with all sites' rows; its reports and state."""

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
import zoo
from comparison import Beside, gradients
from support import refuses
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo_training import replicas_stay_equal, trains

import dadplug
from dadplug import GradientReduction
from dadplug.data import load_dataset, site_indices
from dadplug.models import MNISTNet

EXACT = ("dsgd", "dad")
MODES = (*EXACT, "rankdad")


@pytest.mark.parametrize("mode", EXACT)
def test_exact_modes_match_one_process_at_more_sites(sites, mode):
    for name in ("mixed", "repeated"):
        sites(4).run(trains, name, mode, 4)


@pytest.mark.parametrize("mode", MODES)
def test_replicas_are_equal_to_the_bit_after_many_steps(sites, mode):
    sites(2).run(replicas_stay_equal, list(zoo.ZOO), mode, 10, {})


def curve(mode: str) -> list[float]:
    torch.manual_seed(0)
    data = load_dataset("digits")
    model = MNISTNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    reduction = GradientReduction(model, mode, sync_batchnorm=True, weighting="samples")
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
    return losses


def test_dad_and_dsgd_train_on_one_curve_in_single_precision(sites):
    # Any rounding that differs would grow to percents within these steps: ReLUs flip, and Adam steps on noise.
    for dense, factors in zip(sites(2).run(curve, "dsgd"), sites(2).run(curve, "dad"), strict=True):
        assert factors == pytest.approx(dense, rel=1e-4)


def mlp() -> nn.Module:
    return zoo.build("mlp")


@support.at_sites(2)
def test_nothing_is_sent_under_no_sync() -> None:
    reduction = dadplug.GradientReduction(mlp(), mode="dad")
    before = reduction.traffic.total_bytes_sent
    for step in range(2):
        with reduction.no_sync():
            zoo.loss(reduction.model, *zoo.batch("mlp", 4, seed=step)).backward()
    assert reduction.traffic.total_bytes_sent == before
    reduction.synchronize()
    assert reduction.traffic.total_bytes_sent > before


@pytest.mark.parametrize("mode", EXACT)
@support.at_sites(2)
def test_uniform_weighting_counts_sites_equally(mode: str) -> None:
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


@support.at_sites(2)
def test_a_step_without_any_data_leaves_no_gradient() -> None:
    model = mlp()
    reduction = dadplug.GradientReduction(model, mode="dad", weighting="samples")
    for _ in range(2):
        reduction.idle()
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad", "topk"])
@support.at_sites(2)
def test_batches_without_rows_at_all_sites_leave_zeros_as_in_one_process(mode: str) -> None:
    """A step after one with rows; momentum and weight decay go on, which they do not where there is no gradient."""
    for name in ("mixed", "tied", "conv2d", "partly", "sparse"):
        with Beside(lambda name=name: zoo.build(name), mode=mode) as both:
            for rows in (slice(None), slice(0, 0)):
                both.zero_grad()
                inputs, _ = zoo.batch(name, 6, seed=0)
                for model in (both.model, both.reference):
                    model(inputs[rows]).sum().backward()
                both.reduction.synchronize()
            found, expected = gradients(both.model), gradients(both.reference)
            assert any(gradient is not None for gradient in expected.values())
            for parameter, gradient in expected.items():
                assert (found[parameter] is None) == (gradient is None), f"{name}: {parameter}"
                if gradient is not None:
                    assert found[parameter].is_sparse == gradient.is_sparse, f"{name}: {parameter}"
                    assert not found[parameter].to_dense().any(), f"{name}: {parameter}"


@support.at_sites(2)
def test_one_site_can_stop_all() -> None:
    model = mlp()
    reduction = dadplug.GradientReduction(model, mode="rankdad", rank=2, weighting="samples")
    seen = []
    for step in range(3):
        inputs, targets = zoo.batch("mlp", 4, seed=step)
        zoo.loss(model, inputs, targets).backward()
        reduction.synchronize(stop=step == 1 and dist.get_rank() == 1)
        seen.append(reduction.stopped)
    assert seen == [False, True, False]


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("name", ["mlp", "conv1d", "transposed"])
@support.at_sites(2)
def test_gradient_penalties_are_exact(mode: str, name: str) -> None:
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


@support.at_sites(2)
def test_arguments_of_other_types_are_refused() -> None:
    others = (None, "model", torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    groups = ("gloo", 3, dist.GroupMember.NON_GROUP_MEMBER)
    scripted = torch.jit.script(nn.Linear(2, 2))
    compiled = "{} is compiled by torch.jit.script.*torch.compile"
    report = GradientReduction(nn.Linear(2, 2), mode="dad").report
    refuses(
        *(
            (partial(GradientReduction, each), f"must be a torch.nn.Module, got {type(each).__name__}")
            for each in others
        ),
        *(
            (partial(GradientReduction, nn.Linear(2, 2), process_group=each), "process_group must be")
            for each in groups
        ),
        *((partial(report, loss), f"got {type(loss).__name__}") for loss in (True, "0.5", torch.ones(()))),
        (lambda: GradientReduction(scripted), compiled.format("the model"), ValueError),
        (lambda: GradientReduction(nn.Sequential(scripted)), compiled.format("layer '0'"), ValueError),
        (lambda: GradientReduction(nn.LazyLinear(3)), "parameter 'weight' has no shape yet", ValueError),
        error=TypeError,
    )


# Reports and state of a reduction: plan, traffic, state, buffers, options


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.LayerNorm(60), nn.Linear(60, 50), nn.Linear(50, 3)).to(dtype)


def step(reduction, model, samples=8, seed=0, width=40):
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank() if dist.is_initialized() else seed)
    inputs = torch.randn(samples, width, generator=generator).to(next(model.parameters()).dtype)
    model.zero_grad()
    model(inputs).square().mean().backward()
    reduction.synchronize()


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad", "powersgd", "topk"])
@support.at_sites(2)
def test_the_plan_says_what_is_sent(mode: str, wire: str) -> None:
    model = layers()
    reduction = dadplug.GradientReduction(model, mode=mode, rank=4, wire=wire, density=0.1, weighting="samples")
    assert [row.parameter for row in reduction.plan] == [name for name, _ in model.named_parameters()]
    for seed in range(4):
        step(reduction, model, samples=6 + dist.get_rank(), seed=seed)
    paths = {row.parameter: row.path for row in reduction.plan}
    path = {"dsgd": "allreduce", "dad": "factors", "rankdad": "lowrank"}.get(mode, mode)
    assert paths["0.weight"] == paths["3.weight"] == path
    assert paths["0.bias"] == ("allreduce" if mode in ("powersgd", "topk") else path)
    assert paths["2.weight"] == paths["2.bias"] == "allreduce"
    assert paths["4.weight"] == (path if mode in ("dsgd", "dad") else "allreduce")
    sent, predicted = reduction.traffic.bytes_sent, reduction.plan.bytes
    assert predicted <= sent <= 1.05 * predicted + 800, (predicted, sent)  # padding, scales, step headers
    assert reduction.plan.dense_bytes == sum(p.numel() for p in model.parameters()) * 4
    assert reduction.traffic.dense_bytes == reduction.plan.dense_bytes
    assert reduction.traffic.total_bytes_sent >= 4 * sent
    assert str(reduction.plan).count("\n") == len(list(reduction.plan)) + 3
    assert "bytes in the last step" in repr(reduction.traffic)
    assert reduction.first_difference() is None


def bytes_by_step(mode: str, samples: list) -> list[int]:
    model = layers()
    reduction = dadplug.GradientReduction(model, mode=mode, weighting="samples")
    sent = []
    for seed, count in enumerate(samples):
        step(reduction, model, samples=count, seed=seed)
        sent.append(reduction.traffic.bytes_sent)
    return sent


def test_more_rows_take_a_second_round_once_and_fewer_send_padding(sites):
    sent = sites(2).run(bytes_by_step, "dad", [4, 4, 8, 8, 2, 8] + [4] * 20)[0]
    row = 4 * (100 + 110 + 53)
    assert sent[1] < 4 * row + 1500
    assert sent[3] == sent[4] == sent[5]
    assert 8 * row < sent[3] < 8 * row + 1500
    assert sent[2] >= sent[3]
    assert sent[-1] == sent[1]  # after a while the room is given back


def test_a_state_of_another_mode_is_refused():
    model = layers()
    reduction = dadplug.GradientReduction(model, mode="rankdad", weighting="samples")
    state = reduction.state_dict()
    reduction.detach()
    with pytest.raises(ValueError, match="the state is of mode 'rankdad', not 'dad'"):
        dadplug.GradientReduction(model, mode="dad", weighting="samples").load_state_dict(state)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@support.at_sites(2)
def test_buffers_are_averaged(weighting: str) -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    reduction = dadplug.GradientReduction(model, mode="dsgd", weighting=weighting)
    samples = 6 if rank == 0 else 2
    torch.manual_seed(rank)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(samples, 3) + rank).square().mean().backward()
        reduction.synchronize()
    if rank == 1:
        with torch.no_grad():
            model(torch.randn(samples, 3))
    buffers = reduction.gather_objects([buffer.clone() for buffer in model.buffers()])
    weights = [0.75, 0.25] if weighting == "samples" else [0.5, 0.5]
    reduction.average_buffers()
    mean, var, count = model[1].running_mean, model[1].running_var, model[1].num_batches_tracked
    torch.testing.assert_close(mean, sum(w * each[0] for w, each in zip(weights, buffers)))
    torch.testing.assert_close(var, sum(w * each[1] for w, each in zip(weights, buffers)))
    assert int(count) == 4
    after = reduction.gather_objects([buffer.clone() for buffer in model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*after))


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
@support.at_sites(2)
def test_raw_inputs_stay_at_their_site(mode: str) -> None:
    torch.manual_seed(0)
    reference = layers(torch.float64)
    model = copy.deepcopy(reference)
    reduction = dadplug.GradientReduction(model, mode=mode, rank=8, share_inputs=False, weighting="samples")
    everything = []
    for number in range(3):
        step(reduction, model, seed=number)
        inputs = torch.cat(
            [torch.randn(8, 40, generator=torch.Generator().manual_seed(number + 100 * r)) for r in (0, 1)]
        )
        reference.zero_grad()
        reference(inputs.double()).square().mean().backward()
        everything = [(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters())]
        if mode == "dad":
            for p, q in everything:
                torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-13)
    paths = {row.parameter: (row.path, row.reason) for row in reduction.plan}
    assert paths["0.weight"] == ("allreduce", "share_inputs=False: its layer is fed by data")
    assert paths["3.weight"][0] != "allreduce"
    torch.testing.assert_close(*everything[0], rtol=1e-9, atol=1e-13)  # the first layer's is exact in any mode


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
@support.at_sites(2)
def test_raw_inputs_that_need_a_gradient_stay_at_their_site(mode: str) -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    reduction = dadplug.GradientReduction(model, mode=mode, rank=8, share_inputs=False)
    hidden = model[:2](torch.randn(4, 40).requires_grad_())
    model[3:](checkpoint(model[2], hidden, use_reentrant=True)).square().mean().backward()
    reduction.synchronize()
    paths = {row.parameter: row.path for row in reduction.plan}
    assert paths["0.weight"] == "allreduce"
    assert "allreduce" not in (paths["2.weight"], paths["4.weight"])  # a checkpoint detaches what it gets
    reduction.detach()


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
@support.at_sites(2)
def test_raw_inputs_of_a_layer_that_data_reach_in_a_later_step_stay_at_their_site(mode: str) -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    reduction = dadplug.GradientReduction(model, mode=mode, rank=8, share_inputs=False)
    for number in range(3):
        inputs = torch.randn(4, 40)
        hidden = model[0](inputs)
        loss = (hidden + model[1](hidden if number < 2 else inputs)).square().mean()
        if number < 2:
            loss.backward()
            reduction.synchronize()
    with pytest.raises(
        dadplug.errors.PolicyError, match=r"data have reached the layer of '1.weight' for the first time"
    ):
        loss.backward()
    reduction.detach(discard=True)


@pytest.mark.parametrize("mode", ["dsgd", "dad"])
@support.at_sites(2)
def test_parts_called_beside_their_model_do_not_count(mode: str) -> None:
    """At one site a part is called beside the model itself, as in a penalty: its samples are the same ones."""

    def loss(model, inputs, rank):
        value = model(inputs).square().mean()
        return value if rank else value + 0.1 * model[0](inputs).square().mean()

    rank = dist.get_rank()
    with Beside(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), mode=mode) as both:
        inputs = torch.randn(9, 3, dtype=torch.float64)
        parts = inputs[:4], inputs[4:]
        for step in range(3):
            both.zero_grad()
            loss(both.model, parts[rank], rank).backward()
            both.reduction.synchronize()
            sum(len(part) / 9 * loss(both.reference, part, site) for site, part in enumerate(parts)).backward()
            both.check(step)


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad"])
def test_alone_it_trains_by_the_same_method(mode):
    model, reference = layers(torch.float64), layers(torch.float64)
    reduction = dadplug.GradientReduction(model, mode=mode, rank=64, weighting="samples")
    for seed in range(3):
        step(reduction, model, seed=seed)
        reference.zero_grad()
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed)).double()
        reference(inputs).square().mean().backward()
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
    assert reduction.traffic.total_bytes_sent == 0
    assert reduction.first_difference() is None
    reduction.average_buffers()
    reduction.detach()


def test_a_step_without_synchronize_is_refused():
    model = layers()
    reduction = dadplug.GradientReduction(model, weighting="samples")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Linear(2, 2)
    model(torch.randn(4, 40)).sum().backward()
    with pytest.raises(RuntimeError, match=r"call reduction.synchronize\(\) after backward\(\)"):
        optimizer.step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # none of its business
    reduction.synchronize()
    optimizer.step()
    reduction.detach()
    model(torch.randn(4, 40)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("replaced", [False, True])
@support.at_sites(2)
def test_the_first_step_of_an_optimizer_is_on_what_was_agreed_on(replaced: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    reduction = dadplug.GradientReduction(model, mode="dsgd")
    model(torch.randn(5, 4)).sum().backward()
    reduction.synchronize()
    for part in model:  # each takes a part of one agreement
        torch.optim.SGD(part.parameters(), lr=0.1).step()
    if replaced:
        model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    for each in model.parameters():
        each.grad = torch.randn(each.shape)
    with pytest.raises(RuntimeError, match="before gradients were synchronized"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("way", [dadplug.GradientReduction, dadplug.LocalSGD, dadplug.ParameterServer])
def test_the_error_of_a_damaged_state_names_its_site(way):
    model = layers()
    arguments = () if way is dadplug.GradientReduction else (torch.optim.SGD(model.parameters(), 0.1),)
    attached = way(model, *arguments)
    state = attached.state_dict()
    for name, value in [(name, value) for name in state for value in (None, [1], "x")]:
        for states in ([state | {name: value}], [None, state | {name: value}]):
            with suppress(dadplug.errors.DamagedError):  # not all that is damaged is used
                attached.load_states(states)
    for states in ([{}], [None, 3], [None, {"version": "x", "step": "x", "warm_up": "x", "mode": "rankdad"}]):
        with pytest.raises(dadplug.errors.DamagedError, match=f"the state of site {len(states) - 1} in"):
            attached.load_states(states)
    attached.detach()


def same_state(one: Any, other: Any) -> bool:
    """Whether two nested states are the same."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def damaged_states(state: Any) -> Iterator[Any]:
    """Yield a nested state without one of its entries, or with another one in its place, for each of them."""
    for name, value in state.items() if isinstance(state, dict) else ():
        yield {other: each for other, each in state.items() if other != name}
        for wrong in (None, "x", -(1 << 70), math.nan, {}, [[]], torch.full((3,), torch.nan)):
            yield state | {name: wrong}
        yield from (state | {name: each} for each in damaged_states(value))


@pytest.mark.parametrize("way", ["rankdad", "topk", "local", "server"])
@support.at_sites(2)
def test_a_damaged_state_is_loaded_as_a_whole_or_not_at_all(way: str) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if way == "local":
        trained = dadplug.LocalSGD(model, optimizer, every=2, wire="int8")
    elif way == "server":
        trained = dadplug.ParameterServer(model, optimizer, mode="rankdad", rank=2)
    else:
        trained = GradientReduction(model, mode=way, rank=2)

    def train() -> Any:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 40)).square().sum().backward()
            trained.step() if way in ("local", "server") else trained.synchronize()
        if way == "server":
            trained.finish()
        return copy.deepcopy(trained.state_dict())

    earlier, present = train(), train()
    errors, unchanged = [], []
    for damaged in damaged_states(earlier):
        try:
            trained.load_state_dict(damaged)
        except ValueError as error:
            errors.append(error)
            unchanged.append(same_state(trained.state_dict(), present))
        else:
            trained.load_state_dict(present)
    assert all(unchanged)
    assert len(errors) > 50
    of_another_way = "load the states of model and optimizer"
    assert all(isinstance(each, dadplug.errors.DamagedError) or of_another_way in str(each) for each in errors)
    trained.detach()


def test_two_reductions_on_one_model_are_refused():
    model = layers()
    reduction = dadplug.GradientReduction(model, mode="dad")
    wrapped, message = dadplug.DistributedDataParallel(layers()), r"a GradientReduction exchanges.*detach\(\)"
    for other in (model, nn.Sequential(model[0], nn.Linear(2, 2))):  # also where only a part is shared
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        refuses(
            (partial(dadplug.GradientReduction, other), message),
            (partial(dadplug.LocalSGD, other, optimizer), message),
            (partial(dadplug.ParameterServer, other, optimizer), message),
            (partial(dadplug.hogwild.Hogwild, other, optimizer), message),
            (
                lambda: dadplug.GradientReduction(wrapped),
                r"dadplug's DistributedDataParallel.*model\.reduction.*model\.module",
            ),
        )
    reduction.detach()
    dadplug.GradientReduction(model, mode="dad", weighting="samples").detach()


def test_a_state_of_another_way_to_train_is_an_error():
    model = nn.Linear(4, 3)
    ways = {
        "reduction": lambda optimizer: dadplug.GradientReduction(model, mode="dad"),
        "local": lambda optimizer: dadplug.LocalSGD(model, optimizer, every=2),
        "server": lambda optimizer: dadplug.ParameterServer(model, optimizer),
    }
    states = {}
    for name, make in ways.items():
        way = make(torch.optim.SGD(model.parameters(), lr=0.1))
        states[name] = way.state_dict()
        for other in states.keys() - {name}:
            with pytest.raises(ValueError, match=r"of another way to train.* load the states of model and optimizer"):
                way.load_state_dict(states[other])
        way.detach()
