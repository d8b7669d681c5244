"""What scripts do with torch's DistributedDataParallel, done with dadplug's or without a wrapper, by gradients that are
final when ``backward()`` returns: each case is held against one process.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from support import refuses
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import dadplug

MODES = ("dad", "dsgd")


@dataclass
class Answer:
    """An output that no library knows."""

    logits: Tensor
    hidden: Tensor
    nothing: None = None


class Net(nn.Module):
    """A model with a normalisation, a layer that is used twice, and outputs of several kinds."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.norm, self.scale, self.reentrant = nn.LayerNorm(12), nn.Parameter(torch.ones(12)), reentrant

    def block(self, x: Tensor) -> Tensor:
        return self.norm(self.middle(self.middle(x).tanh())) * self.scale

    def forward(self, x: Tensor, kind: str = "tensor") -> Any:
        hidden = self.first(x).tanh()
        if self.reentrant is not None:
            hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        else:
            hidden = self.block(hidden)
        logits = self.last(hidden)
        if kind == "stored":
            self.stored = logits
            return logits.detach()
        if kind == "backward":
            logits.square().mean().backward()
            return None
        kinds = {
            "tensor": logits,
            "dataclass": Answer(logits, hidden.detach()),
            "nested": {"all": [(logits, None)], "hidden": hidden.detach()},
        }
        return kinds[kind]


def build(seed: int = 0, kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


def rows(step: int, sites: Any) -> Tensor:
    """Rows of some sites; all have as many, since a loss of several passes is not weighted by each pass's."""
    made = []
    for site in sites:
        generator = torch.Generator().manual_seed(100 * step + site)
        made.append(torch.randn(4, 6, generator=generator, dtype=torch.float64))
    return torch.cat(made)


def plain(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, TorchDDP) else model


def same(model: nn.Module, alone: nn.Module, limit: float = 1e-10) -> None:
    for (name, p), q in zip(plain(model).named_parameters(), plain(alone).parameters(), strict=True):
        assert off_by(p.detach(), q.detach()) < limit, name


def follow(
    steps: Callable[..., None],
    kind: Callable[[], nn.Module] = Net,
    expected: int = 4,
    ways: Sequence[str] = ("wrapped", "not wrapped"),
) -> None:
    """Train in each way, and in one process with the rows of all, and compare.

    Args:
        steps: gets what is called in training, the sites whose rows it has, and the reduction, where there is one.
        kind: makes the model.
        expected: number of steps of the reduction.
        ways: "wrapped" as with torch's class, or "not wrapped", by ``synchronize="backward"``.
    """
    for way, mode in itertools.product(ways, (*MODES, "rankdad")):
        model, alone = build(0, kind), build(0, kind)
        options = {"mode": mode, "wire": "fp32"} | ({"rank": 12} if mode == "rankdad" else {})
        if way == "wrapped":
            model = dadplug.DistributedDataParallel(model, **options)
            reduction = model.reduction
        else:
            reduction = dadplug.GradientReduction(model, synchronize="backward", **options)
        steps(model, [dist.get_rank()], reduction)
        steps(alone, range(2), None)
        assert reduction.step == expected, (way, mode)
        same(model, alone, 1e-9)
        assert off_by(next(alone.parameters()).detach(), next(build(0, kind).parameters()).detach()) > 1e-6
        assert reduction.first_difference() is None
        reduction.detach()


def squares(model: nn.Module, step: int, sites: Any) -> Tensor:
    return model(rows(step, sites)).square().mean()


def absolutes(model: nn.Module, step: int, sites: Any) -> Tensor:
    return model(rows(step, sites)).abs().mean()


def trains(
    model: nn.Module, sites: Any, reduction: Any = None, loss_of: Callable[..., Tensor | None] = squares, count: int = 4
) -> None:
    """Train by a loss, which gets what is called, the number of the step and the sites; it may go backward itself."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, step, sites)
        if loss is not None:
            loss.backward()
        optimizer.step()


def of_a_dataclass(net: nn.Module, step: int, sites: Any) -> Tensor:
    return net(rows(step, sites), "dataclass").logits.square().mean()


def of_containers(net: nn.Module, step: int, sites: Any) -> Tensor:
    return net(rows(step, sites), kind="nested")["all"][0][0].square().mean()


def not_returned(net: nn.Module, step: int, sites: Any) -> Tensor:
    assert not net(rows(step, sites), "stored").requires_grad
    return plain(net).stored.square().mean()


def inside_of_forward(net: nn.Module, step: int, sites: Any) -> None:
    return net(rows(step, sites), "backward")


def separate(net: nn.Module, step: int, sites: Any) -> None:
    """Two backward passes through one forward pass."""
    outputs = net(rows(step, sites))
    outputs.square().mean().backward(retain_graph=True)
    outputs.abs().mean().backward()


def of_two_batches(net: nn.Module, step: int, sites: Any) -> Tensor:
    squares(net, step, sites).backward()
    return squares(net, step + 50, sites)


def interrupted(net: nn.Module, step: int, sites: Any) -> Tensor:
    """An error in the backward pass of a step, at one site alone."""

    def fails(_: Tensor) -> None:
        raise ZeroDivisionError("in a hook")

    if step == 1 and 1 in sites:
        hidden = []
        handle = plain(net).norm.register_forward_hook(lambda *call: hidden.append(call[2]))
        outputs = net(rows(step, sites))
        hidden[0].register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            outputs.square().mean().backward()
        handle.remove()
        net.zero_grad()
    return squares(net, step, sites)


LOSSES = {  # and the number of the reduction's steps
    of_a_dataclass: 4,
    of_containers: 4,
    not_returned: 4,
    inside_of_forward: 4,
    separate: 8,
    of_two_batches: 8,
    interrupted: 4,
}


@support.at_sites(2)
def test_losses_and_backward_passes_of_all_kinds() -> None:
    for loss, expected in LOSSES.items():
        follow(partial(trains, loss_of=loss), expected=expected)


@support.at_sites(2)
def test_activation_checkpointing_in_both_forms() -> None:
    """One step of the reduction a step, although a pass inside of each reaches parameters."""
    for reentrant in (None, True, False):
        follow(trains, partial(Net, reentrant))


@support.at_sites(2)
def test_parts_that_are_called_alone() -> None:
    """As by a trainer that never calls the model itself."""

    def of_parts(net: nn.Module, step: int, sites: Any) -> Tensor:
        return net.last(net.block(net.first(rows(step, sites)).tanh())).square().mean()

    follow(partial(trains, loss_of=of_parts), ways=["not wrapped"])


@support.at_sites(2)
def test_no_sync_accumulates() -> None:
    def steps(model: nn.Module, sites: Any, reduction: Any) -> None:
        def loss(net: nn.Module, step: int, sites: Any) -> Tensor:
            held_back = nullcontext() if reduction is None else (net if net is not plain(net) else reduction).no_sync()
            with held_back:
                squares(net, step, sites).backward()
            assert reduction is None or reduction.pending
            return squares(net, step + 50, sites)

        trains(model, sites, loss_of=loss)

    follow(steps)


def penalised(net: nn.Module, step: int, sites: Any) -> Tensor:
    x = rows(step, sites).requires_grad_()
    outputs = net(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return penalty if step == 2 else outputs.mean() + penalty


@support.at_sites(2)
def test_autograd_grad_and_double_backward() -> None:
    def steps(model: nn.Module, sites: Any, reduction: Any) -> None:
        trains(model, sites, loss_of=penalised)
        if reduction is not None:
            assert reduction.step == 4  # torch.autograd.grad synchronizes nothing
            other = build()
            torch.nn.Module.load_state_dict(other, plain(model).state_dict())
            own = torch.autograd.grad(squares(model, 9, sites), list(model.parameters()))
            expected = torch.autograd.grad(squares(other, 9, sites), list(other.parameters()))
            torch.testing.assert_close(own, expected)

    follow(steps)


@support.at_sites(2)
def test_closures_scalers_and_kept_gradients() -> None:
    def closures(model: nn.Module, sites: Any, reduction: Any) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3, tolerance_change=0.0)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = squares(model, 0, sites)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    def scaled(model: nn.Module, sites: Any, reduction: Any) -> None:
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=256.0), torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(squares(model, step, sites)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    def kept(model: nn.Module, sites: Any, reduction: Any) -> None:
        """The forward pass is evaluated before, and gradients are set to zero in place of None."""
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            model.eval()
            with torch.no_grad():
                if 0 in sites:
                    model(rows(20 + step, sites))
            model.train()
            optimizer.zero_grad(set_to_none=False)
            squares(model, step, sites).backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()

    follow(closures, expected=6)
    follow(scaled)
    follow(kept)


@support.at_sites(2)
def test_adversarial_networks() -> None:
    """Two wrapped models in a step: the gradients that one gets by way of the other are cleared, or it is frozen."""
    for freeze in (False, True):
        for mode in MODES:
            ends = []
            for members in ([dist.get_rank()], range(2)):
                maker, critic = build(1, lambda: nn.Linear(6, 6)), build(2)
                if len(members) == 1:
                    maker = dadplug.DistributedDataParallel(maker, mode=mode)
                    critic = dadplug.DistributedDataParallel(critic, mode=mode)
                optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in (maker, critic)]
                for step in range(4):
                    optimizers[1].zero_grad()
                    plain(critic).requires_grad_(True)
                    loss = critic(rows(step, members)).mean() - critic(maker(rows(30 + step, members)).detach()).mean()
                    loss.backward()
                    optimizers[1].step()
                    optimizers[0].zero_grad()
                    plain(critic).requires_grad_(not freeze)
                    critic(maker(rows(60 + step, members))).mean().backward()
                    optimizers[0].step()
                ends.append((maker, critic))
            for one, two in zip(*ends, strict=True):
                same(one, two)
            for each in ends[0]:
                each.reduction.detach()


class Outer(nn.Module):
    """A model of which one part is wrapped; the part is not used in each step."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(6, 6).double(), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.before(x))


@support.at_sites(2)
def test_a_wrapped_part_of_a_model() -> None:
    for mode in MODES:
        model = Outer(dadplug.DistributedDataParallel(build(1), mode=mode))
        alone = Outer(build(1))
        alone.before.load_state_dict(model.before.state_dict())
        for step in range(3):
            model(rows(step, [dist.get_rank()])).square().mean().backward()
            alone(rows(step, range(2))).square().mean().backward()
        for p, q in zip(model.part.module.parameters(), alone.part.parameters(), strict=True):
            assert off_by(p.grad, q.grad) < 1e-10
        with pytest.raises(ValueError, match="DistributedDataParallel"):
            dadplug.DistributedDataParallel(model, mode=mode)
        model.part.reduction.detach()


class Branches(nn.Module):
    """A part that a site may leave out, behind an input that needs gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.used(x) if use else x * 2


@support.at_sites(2)
def test_a_site_uses_no_parameter() -> None:
    """One site's pass reaches no parameter: it contributes nothing, and takes part."""
    rank, model = dist.get_rank(), dadplug.DistributedDataParallel(build(0, Branches), mode="dad")
    alone = build(0, Branches)
    for _ in range(2):
        x = rows(0, [rank]).requires_grad_()
        model(x, use=rank == 0).square().mean().backward()
    for _ in range(2):
        (alone(rows(0, [0]), True).square().mean() / 2).backward()
    assert off_by(model.module.used.weight.grad, alone.used.weight.grad) < 1e-10
    assert model.reduction.step == 2
    model.reduction.detach()


@support.at_sites(2)
def test_copies_and_moving_averages() -> None:
    """Copies: a moving average as scripts make it, evaluated at one site, and a copy that trains on."""
    rank, model, alone = dist.get_rank(), dadplug.DistributedDataParallel(build(), mode="dad"), build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    reference = AveragedModel(alone, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for net, mean, members in ((model, average, [rank]), (alone, reference, range(2))):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            net(rows(step, members)).square().mean().backward()
            optimizer.step()
            mean.update_parameters(net)
    same(average.module, reference.module)
    assert off_by(average.module.module.first.weight.detach(), model.module.first.weight.detach()) > 1e-6
    if rank == 0:
        with torch.no_grad():
            torch.testing.assert_close(average(rows(9, [0])), reference(rows(9, [0])))
    copied = copy.deepcopy(model)
    trains(model, [rank])
    trains(alone, range(2))
    second = build()
    second.load_state_dict(copied.module.state_dict())
    trains(copied, [rank], loss_of=absolutes)
    trains(second, range(2), loss_of=absolutes)
    same(model, alone)
    same(copied, second)
    assert isinstance(copied, dadplug.DistributedDataParallel)
    assert copied.reduction is not model.reduction
    assert copied.reduction.options == model.reduction.options
    for each in (model, copied):
        each.reduction.detach()


@support.at_sites(2)
def test_pickled_models_and_groups() -> None:
    rank, model = dist.get_rank(), dadplug.DistributedDataParallel(build(), mode="dad", weighting="uniform")
    trains(model, [rank])
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    same(loaded, model, 1e-15)
    with loaded.no_sync():
        loaded(rows(5, [rank])).square().mean().backward()
    loaded(rows(6, [rank])).square().mean().backward()
    alone = build()
    alone.load_state_dict(model.module.state_dict())
    (alone(rows(5, range(2))).square().mean() + alone(rows(6, range(2))).square().mean()).backward()
    for p, q in zip(loaded.module.parameters(), alone.parameters(), strict=True):
        assert off_by(p.grad, q.grad) < 1e-10
    assert loaded.reduction.options == model.reduction.options
    for each in (model, loaded):
        each.reduction.detach()
    group = dist.new_group([0, 1])
    other = dadplug.DistributedDataParallel(build(), mode="dsgd", process_group=group)
    assert other.process_group is group
    with pytest.raises(RuntimeError, match="copy its module"):
        copy.deepcopy(other)
    other(rows(0, [rank])).square().mean().backward()
    other.reduction.detach()


@support.at_sites(2)
def test_arguments_in_the_order_of_torch() -> None:
    rank = dist.get_rank()
    group = dist.new_group([0, 1])
    by_position = dadplug.DistributedDataParallel(build(), None, None, 0, True, True, group, 25, True, mode="dsgd")
    assert by_position.process_group is group
    assert by_position.find_unused_parameters
    assert by_position.reduction.options.mode == "dsgd"
    named = dadplug.DistributedDataParallel(
        build(), "dad", bucket_cap_mb=10, check_reduction=False, gradient_as_bucket_view=True, static_graph=True,
        skip_all_reduce_unused_params=True,
    )  # fmt: skip
    assert named.reduction.options.mode == "dad"
    assert named.static_graph
    for each in (by_position, named):
        each(rows(0, [rank])).square().mean().backward()
        each.reduction.detach()
    torch.nn.utils.parameters_to_vector(named.parameters())


def test_what_cannot_work_is_refused() -> None:
    model, wrap = build(), dadplug.DistributedDataParallel
    wrapped, frozen = wrap(build(), mode="rankdad"), build().requires_grad_(False)
    refuses(
        (lambda: wrap(model, device_ids=[0]), "leave them out"),
        (lambda: wrap(model, [0]), "leave them out"),
        (lambda: wrap(model, device_ids=[0, 1]), "device_ids"),
        (lambda: wrap(model, init_sync=False), "Leave it out"),
        (lambda: wrap(model, mixed_precision=object()), "torch.autocast"),
        (lambda: wrap(model, rnk=3), r"unknown option 'rnk'.*'rank'"),
        (lambda: wrap(model, "dad", mode="dsgd"), "'mode' twice", TypeError),
        (lambda: wrap(model, "dad", [0]), "have to be named", TypeError),
        (lambda: wrapped.register_comm_hook(None, None), "mode='powersgd'", RuntimeError),
        (lambda: wrap(wrapped), "in DistributedDataParallel already: use it"),
        (lambda: wrap(frozen), "requires gradients", RuntimeError),
        (lambda: wrap(model, synchronize="call"), "unknown option 'synchronize'"),
        (
            lambda: dadplug.GradientReduction(model, synchronize="step"),
            r"unknown synchronize 'step'.*'call', 'backward'",
        ),
    )
    wrapped.reduction.detach()
    dadplug.GradientReduction(model).detach()  # nothing was changed


class Normalised(nn.Module):
    """A model with running statistics, some of which scripts leave out of the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("own", torch.full((2,), 1.0))
        self.extra = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))) * self.extra


@support.at_sites(2)
def test_another_module_in_its_place() -> None:
    model = dadplug.DistributedDataParallel(build(), mode="dad")
    model.module = nn.Sequential(model.module)  # as a compiled one
    model(rows(0, [dist.get_rank()])).mean().backward()
    model.module = build()
    with pytest.raises(RuntimeError, match="wrap that one"):
        model(rows(0, [0]))


@support.at_sites(2)
def test_a_mesh_as_with_torch() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = dadplug.DistributedDataParallel(build(), mode="dad", device_mesh=mesh)
    assert model.device_mesh is mesh
    model(rows(0, [dist.get_rank()])).mean().backward()
    assert model.reduction.contributors == [0, 1]
    both = {"device_mesh": mesh, "process_group": dist.group.WORLD}
    for wrong in (both, {"device_mesh": init_device_mesh("cpu", (2, 1))}):
        with pytest.raises(RuntimeError, match=r"device_mesh|1D"):
            dadplug.DistributedDataParallel(build(), mode="dad", **wrong)


@support.at_sites(2)
def test_parameters_and_buffers_that_are_left_out() -> None:
    rank = dist.get_rank()
    net = build(0, Normalised)
    with torch.no_grad():
        net.extra.fill_(rank + 1.0)
        net.own.fill_(rank + 1.0)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(net, ["extra", "own"])
    model = dadplug.DistributedDataParallel(net, mode="dad")
    for step in range(3):
        model(rows(step, [rank])).square().mean().backward()
    assert net.own.tolist() == [rank + 1.0] * 2
    assert net.extra.tolist() == [rank + 1.0] * 3
    gradients = model.reduction.gather_objects([net.extra.grad, net.last.weight.grad])
    assert not torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])
    net.extra = nn.Parameter(torch.full_like(net.extra, rank + 3.0))  # another one of that name
    for step in range(2):
        model(rows(step, [rank])).square().mean().backward()
    gradients = model.reduction.gather_objects([net.extra.grad, net.last.weight.grad])
    assert not torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])
    optimizer = torch.optim.SGD([net.extra], 0.1)
    for _ in range(2):  # its gradients need no agreement
        optimizer.step()
    assert net.extra.ne(rank + 3.0).all()
    model.reduction.detach()
    for broadcast, forward, expected in ((False, None, rank + 1.0), (True, None, 1.0), (None, False, 1.0)):
        net = build(0, Normalised)
        net.own.fill_(rank + 1.0)
        model = dadplug.DistributedDataParallel(
            net, mode="dsgd", broadcast_buffers=broadcast, forward_sync_buffers=forward
        )
        assert net.own.tolist() == [expected] * 2
        net.own.fill_(rank + 5.0)
        model(rows(0, [rank])).mean().backward()
        assert net.own.tolist() == [5.0 if broadcast else rank + 5.0] * 2
        model.reduction.detach()


@support.at_sites(2)
def test_join_with_running_statistics() -> None:
    """Sites with different numbers of batches, running statistics, and site 0 as the first that has none left."""
    rank = dist.get_rank()
    for outer, divides in itertools.product((False, True), repeat=2):
        options = {"mode": "dad", "compare_every": 2, "weighting": "uniform"}
        model = dadplug.DistributedDataParallel(build(0, Normalised), **options)
        alone = build(0, Normalised)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        by = {} if divides else {"divide_by_initial_world_size": False}  # True by default, as with torch's class
        with Join([model], **by) if outer else model.join(**by):
            for step in range(2 + 3 * rank):
                optimizer.zero_grad()
                model(rows(step, [rank])).square().mean().backward()
                optimizer.step()
        assert model.reduction.first_difference() is None
        statistics = model.reduction.gather_objects(model.module.norm.running_mean)
        assert torch.equal(*statistics)
        assert int(model.module.norm.num_batches_tracked) == 5
        reference = torch.optim.SGD(alone.parameters(), 0.05)
        for step in range(5):  # batches are normalised at each site
            reference.zero_grad()
            parts = [alone(rows(step, [site])).square().mean() for site in (range(2) if step < 2 else [1])]
            (sum(parts) / (2 if divides else len(parts))).backward()
            reference.step()
        same(model, alone)
        with pytest.raises(ValueError, match="throw_on_early_termination"), model.join(throw_on_early_termination=True):
            pass
        model(rows(0, [rank])).mean().backward()  # training goes on
        model.reduction.detach()


@support.at_sites(2)
def test_join_of_two_models() -> None:
    """`Join` of two models, which train one after the other in each step; a site has three batches more."""
    rank = dist.get_rank()
    models = [dadplug.DistributedDataParallel(build(seed), mode="dad") for seed in range(2)]
    references = [build(seed) for seed in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (*models, *references)]
    with Join(models, divide_by_initial_world_size=False):
        for step in range(2 + 3 * rank):
            for model, optimizer in zip(models, optimizers[:2]):
                optimizer.zero_grad()
                model(rows(step, [rank])).square().mean().backward()
                optimizer.step()
    for step in range(5):
        for model, optimizer in zip(references, optimizers[2:]):
            optimizer.zero_grad()
            model(rows(step, range(2) if step < 2 else [1])).square().mean().backward()
            optimizer.step()
    for model, reference in zip(models, references):
        assert model.reduction.first_difference() is None
        same(model, reference)
        model.reduction.detach()


@support.at_sites(2)
def test_mixed_precision() -> None:
    """Autocast in bfloat16, and a GradScaler that skips a step at both sites since one has Inf."""
    rank = dist.get_rank()
    for mode in MODES:
        model, alone = dadplug.DistributedDataParallel(build().float(), mode=mode), build().float()
        for net, members in ((model, [rank]), (alone, range(2))):
            with torch.autocast("cpu", torch.bfloat16):
                net(rows(0, members).float()).square().mean().backward()
        for p, q in zip(model.module.parameters(), alone.parameters(), strict=True):
            assert off_by(p.grad, q.grad) < 0.03
        model.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(rows(1, [rank]).float()).square().mean() * (float("inf") if rank else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 32.0
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        optimizer.zero_grad()
        scaler.scale(model(rows(2, [rank]).float()).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert model.reduction.first_difference() is None
        model.reduction.detach()


@support.at_sites(2)
def test_a_pass_by_way_of_the_module_exchanges_nothing_and_is_no_step() -> None:
    model = dadplug.DistributedDataParallel(build(), mode="dad")
    model.module(rows(2, [dist.get_rank()])).mean().backward()
    with pytest.raises(RuntimeError, match="call the wrapped model"):
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert model.reduction.step == 0
    model.reduction.detach()


@support.at_sites(2)
def test_transforms_of_torch_func() -> None:
    """Transforms of torch.func through the wrapper, which exchange nothing."""
    rank, model = dist.get_rank(), dadplug.DistributedDataParallel(build(), mode="dad")
    x = rows(0, [rank])
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    own = torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).square().mean())(parameters)
    alone = build()
    alone(x).square().mean().backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(own[f"module.{name}"], parameter.grad)
    assert model.reduction.step == 0
    model(x).square().mean().backward()
    assert model.reduction.step == 1
    model.reduction.detach()


@support.at_sites(2)
def test_idle_sites_calls_of_synchronize_and_what_is_not_finite_without_a_wrapper() -> None:
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
    with pytest.raises(dadplug.errors.NonFiniteError):  # at both
        (model(rows(0, [rank])).square().mean() * (torch.inf if rank else 1.0)).backward()
    model.zero_grad()
    model(rows(1, [rank])).square().mean().backward()
    assert reduction.step == 4
    assert reduction.first_difference() is None
    reduction.detach()
