"""Steps of optimizers: only on gradients that the sites have agreed on, also of parameters that were replaced."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import dadplug

SITES = 2


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def batch(step: int, sites: Any) -> tuple[Tensor, Tensor]:
    generators = [torch.Generator().manual_seed(10 * step + site) for site in sites]
    inputs = torch.cat([torch.randn(6, 4, generator=each, dtype=torch.float64) for each in generators])
    return inputs, torch.cat([torch.randint(0, 3, (6,), generator=each) for each in generators])


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# Parameters that are replaced


def swapped(change: Callable[[nn.Module], object]) -> Callable[[nn.Module], None]:
    """Change a model with torch's switch for parameters that keep their identity."""

    def changed(model: nn.Module) -> None:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            change(model)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return changed


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: 1.1 * value for name, value in model.state_dict().items()}


def overwrite(model: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.float().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def replace_head(model: nn.Module) -> None:
    torch.manual_seed(5)
    for each in model.parameters():
        each.requires_grad_(False)
    model[3] = nn.Linear(8, 3).double()


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "assigned": lambda model: model.load_state_dict(state_of(model), assign=True),
    "swapped": swapped(lambda model: model.float().double()),
    "loaded by swapping": swapped(lambda model: model.load_state_dict(state_of(model))),
    "overwritten": overwrite,
    "head": replace_head,
    "class": lambda model: setattr(model[0], "__class__", Doubled),
}


def train(change: str, at: int, wrap: Callable[[nn.Module], Any] | None) -> nn.Module:
    model = build()
    wrapped = None if wrap is None else wrap(model)
    called = wrapped if isinstance(wrapped, nn.Module) else model
    optimizer = sgd(model)
    for step in range(5):
        if step == at:
            CHANGES[change](model)
            optimizer = sgd(model)
        inputs, targets = batch(step, range(SITES) if wrap is None else [dist.get_rank()])
        optimizer.zero_grad()
        F.cross_entropy(called(inputs), targets).backward()
        if isinstance(wrapped, dadplug.GradientReduction):
            wrapped.synchronize()
        optimizer.step()
    return model


@support.at_sites(SITES)
def test_replaced_parameters_are_followed() -> None:
    for change in CHANGES:
        for mode, at in (("dad", 0), ("rankdad", 3), ("dsgd", 3)):
            alone = train(change, at, None)
            options: dict[str, Any] = {"mode": mode, "weighting": "samples" if at else "uniform"}
            for wrap in (dadplug.GradientReduction, dadplug.DistributedDataParallel):
                found = train(change, at, partial(wrap, **options))
                for one, other in zip(found.parameters(), alone.parameters(), strict=True):
                    assert torch.allclose(one, other, rtol=1e-12), (change, at, mode)


# Steps without an agreement


class Steps:
    """A site with a reduction that has agreed once, for steps that follow."""

    def __init__(self, kind: str, options: dict[str, Any] | None = None) -> None:
        self.model = build()
        options = options or {"mode": "dad", "weighting": "uniform"}
        if options["mode"] == "edad":
            self.model[2] = nn.Identity()  # for a chain of layers
        wrap: Any = dadplug.DistributedDataParallel if kind == "drop-in" else dadplug.GradientReduction
        self.wrapped = wrap(self.model, **options)
        self.reduction = self.wrapped.reduction if kind == "drop-in" else self.wrapped
        self.called = self.wrapped if kind == "drop-in" else self.model
        self.optimizer: torch.optim.Optimizer = sgd(self.model)
        self.closure(synchronizes=True)
        self.optimizer.step()

    def closure(self, synchronizes: bool, called: nn.Module | None = None) -> Tensor:
        self.optimizer.zero_grad()
        inputs, targets = batch(0, [dist.get_rank()])
        loss = F.cross_entropy((called or self.called)(inputs), targets)
        loss.backward()
        if synchronizes and self.called is self.model:
            self.reduction.synchronize()
        return loss

    # Steps that are errors

    def in_a_closure(self) -> None:
        self.optimizer.step(lambda: self.closure(False, self.model))

    def in_a_closure_by_name(self) -> None:
        self.optimizer.step(closure=lambda: self.closure(False, self.model))

    def in_a_search(self) -> None:
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), max_iter=3)
        self.optimizer.step(lambda: self.closure(False, self.model))

    def beside_a_closure(self) -> None:
        self.closure(False, self.model)
        self.optimizer.step(lambda: None)  # as Lightning's manual optimization does

    def of_gradients_by_hand(self) -> None:
        for each in self.model.parameters():
            each.grad = torch.randn_like(each)
        self.optimizer.step()

    def of_replaced_parameters(self) -> None:
        self.model.load_state_dict(self.model.state_dict(), assign=True)
        self.optimizer = sgd(self.model)
        self.optimizer.step()  # without gradients there is nothing to agree on
        self.closure(False, self.model)
        self.optimizer.step()

    # Steps that are not

    def closure_that_synchronizes(self) -> None:
        self.optimizer.step(lambda: self.closure(True))

    def search_that_synchronizes(self) -> None:
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), max_iter=3)
        self.optimizer.step(lambda: self.closure(True))

    def closure_of_a_known_loss(self) -> None:
        loss = self.closure(True)
        self.optimizer.step(lambda: loss)

    def two_optimizers(self) -> None:
        first, second = sgd(self.model[0]), sgd(self.model[3])
        for _ in range(2):
            self.closure(True)
            first.step()
            second.step()

    def gradients_by_hand_that_are_synchronized(self) -> None:
        for _ in range(2):
            for each in self.model.parameters():
                each.grad = torch.randn_like(each)
            self.reduction.synchronize()
            self.optimizer.step()

    def state_before_the_first_step(self) -> None:
        adam = torch.optim.Adam(self.model.parameters(), lr=0.0)
        for _ in range(2):
            for each in self.model.parameters():
                each.grad = torch.zeros_like(each)
            adam.step()

    def skipped_by_a_scaler(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, float("inf"), 1.0):
            self.optimizer.zero_grad()
            inputs, targets = batch(0, [dist.get_rank()])
            scaler.scale(factor * F.cross_entropy(self.called(inputs), targets)).backward()
            scaler.step(self.optimizer)
            scaler.update()


ERRORS = [name for name in vars(Steps) if name.startswith(("in_a", "beside", "of_"))]
FINE = [name for name in vars(Steps) if name.startswith(("closure_", "search", "two", "gradients", "state"))]


@support.at_sites(SITES)
def test_steps_without_an_agreement_are_errors() -> None:
    for kind in ("plain", "drop-in"):
        for name in ERRORS:
            steps = Steps(kind)
            before = [each.detach().clone() for each in steps.model.parameters()]
            with pytest.raises(RuntimeError, match="synchronize"):
                getattr(steps, name)()
            for one, other in zip(before, steps.model.parameters(), strict=True):
                assert torch.equal(one, other), (kind, name)  # nothing has changed
        for name in FINE + ["skipped_by_a_scaler"] * (kind == "drop-in"):
            steps = Steps(kind)
            getattr(steps, name)()
            assert steps.reduction.first_difference() is None, (kind, name)


# Steps without a backward pass

MODES: list[dict[str, Any]] = [
    {"mode": "dsgd"},
    {"mode": "dad"},
    {"mode": "edad"},
    {"mode": "rankdad", "rank": 2},
    {"mode": "powersgd", "rank": 2},
    {"mode": "topk"},
]


def evaluate(steps: Steps) -> None:
    with torch.no_grad():
        steps.model(batch(1, [0])[0])


BETWEEN: dict[str, Callable[[Steps], object]] = {  # what makes a further step of a site without data
    "stepped": lambda steps: steps.optimizer.step(),
    "cleared": lambda steps: steps.model.zero_grad(set_to_none=dist.get_rank() == 0),
    "cleared at one site": lambda steps: evaluate(steps) if dist.get_rank() else steps.model.zero_grad(),
}


@support.at_sites(SITES)
def test_a_second_synchronize_replaces_no_agreed_gradients() -> None:
    for options in MODES:
        steps = Steps("plain", options)
        for again in (steps.reduction.synchronize, lambda steps=steps: steps.reduction.apply(steps.optimizer)):
            steps.closure(synchronizes=True)
            before = [each.grad.clone() for each in steps.model.parameters()]
            with pytest.raises(dadplug.MismatchError, match=rf"site {dist.get_rank()}.*second synchronize"):
                again()
            for one, other in zip(before, steps.model.parameters(), strict=True):
                assert torch.equal(one, other.grad), options
            steps.optimizer.step()
        for name, between in BETWEEN.items():
            steps.closure(synchronizes=True)
            between(steps)
            steps.reduction.synchronize()  # as idle(): nothing of earlier steps is applied again
            assert not any(each.grad is not None and each.grad.any() for each in steps.model.parameters()), name
            steps.optimizer.step()
            assert steps.reduction.first_difference() is None, (options, name)
        steps.closure(synchronizes=True)
        steps.reduction.synchronize(stop=True)
        assert steps.reduction.stopped
        steps.reduction.detach()


@support.at_sites(SITES)
def test_an_optimizer_of_a_copy_is_warned_of() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dadplug").addHandler(handler)
    try:
        for follows in (True, False):
            model = build()
            trained = copy.deepcopy(model)
            reduction = dadplug.GradientReduction(trained, mode="dsgd", weighting="uniform")
            optimizer = sgd(trained if follows else model)
            for step in range(4):
                inputs, targets = batch(step, [dist.get_rank()])
                trained.zero_grad()
                F.cross_entropy(trained(inputs), targets).backward()
                reduction.synchronize()
                optimizer.step()
            assert sum("holds none" in each for each in records) == (0 if follows else 1)
            reduction.detach()
    finally:
        logging.getLogger("dadplug").removeHandler(handler)


# Gradients that are not those of the last backward pass alone


def set_data(parameter: nn.Parameter, values: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data = values


def write_by_dlpack(parameter: nn.Parameter, values: Tensor) -> None:
    torch.from_dlpack(parameter.grad).copy_(values)
    parameter.grad = parameter.grad.clone()  # torch does not count the change


def write_in_place(parameter: nn.Parameter, values: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = values
    else:
        parameter.grad.copy_(values)


def multiply_in_hooks(model: nn.Module, step: int, site: int) -> None:
    def triple(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(3)

    hooks = [each.register_post_accumulate_grad_hook(triple) for each in model.parameters()]
    F.cross_entropy(model(batch(step, [site])[0]), batch(step, [site])[1]).backward()
    for each in hooks:
        each.remove()


def multiply_as_one_list(model: nn.Module, step: int, site: int) -> None:
    F.cross_entropy(model(batch(step, [site])[0]), batch(step, [site])[1]).backward()
    torch._foreach_mul_([each.grad for each in model.parameters()], 0.25)


def rewrite(write: Callable[[nn.Parameter, Tensor], object]) -> Callable[[nn.Module, int, int], None]:
    def change(model: nn.Module, step: int, site: int) -> None:
        F.cross_entropy(model(batch(step, [site])[0]), batch(step, [site])[1]).backward()
        for each in model.parameters():
            assert each.grad is not None
            write(each, each.grad.detach().clamp(-0.02, 0.02))

    return change


def evolve(model: nn.Module, step: int, site: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + site)
    for each in model.parameters():
        write_in_place(each, torch.randn(each.shape, generator=generator, dtype=each.dtype))


def write_zeros_at_one_site(model: nn.Module, step: int, site: int) -> None:
    for each in model.parameters():
        each.grad = torch.full_like(each, float(site))


WRITTEN: dict[str, tuple[bool, Callable[[nn.Module, int, int], None]]] = {  # whether gradients are cleared before
    "replaced": (True, rewrite(lambda each, values: setattr(each, "grad", values))),
    "by data": (True, rewrite(set_data)),
    "by DLPack": (True, rewrite(write_by_dlpack)),
    "in hooks": (True, multiply_in_hooks),
    "as one list": (True, multiply_as_one_list),
    "expanded": (True, rewrite(lambda each, values: setattr(each, "grad", values.mean().expand(each.shape)))),
    "without backward": (False, evolve),
    "zeros": (True, write_zeros_at_one_site),  # a site whose gradients are zero counts in the mean
}


@support.at_sites(SITES)
def test_what_stands_in_grad_is_agreed() -> None:
    for name, (clears, write) in WRITTEN.items():
        weighting = "uniform" if name in ("without backward", "zeros") else "samples"  # which only backward counts
        for options in ({"mode": "dad"}, {"mode": "dsgd"}, {"mode": "rankdad", "rank": 2}):
            model, *alone = (build() for _ in range(1 + SITES))
            if weighting == "samples":  # without a gradient that autograd forms
                model, *alone = (nn.Sequential(each[0], each[1], each[3]) for each in (model, *alone))
            reduction = dadplug.GradientReduction(model, weighting=weighting, **options)
            for step in range(4):
                for site, each in enumerate([model, *alone], -1):
                    if clears or site >= 0:
                        each.zero_grad()
                    write(each, step, dist.get_rank() if site < 0 else site)
                reduction.synchronize()
                for one, *others in zip(*(each.parameters() for each in [model, *alone]), strict=True):
                    mean = sum(each.grad for each in others) / SITES
                    close = torch.allclose(one.grad, mean, rtol=1e-9, atol=1e-12)
                    lossy = "rank" in options and one.dim() == 2 and bool(one.grad.any())
                    assert close or lossy, (name, options, step)
            assert reduction.first_difference() is None
            reduction.detach()


@support.at_sites(SITES)
def test_a_gradient_that_has_been_sent_is_read_and_not_changed() -> None:
    model = nn.Linear(300, 300)
    reduction = dadplug.GradientReduction(model, mode="dad")
    for _ in range(3):  # more rows than are held once they are sent
        model.zero_grad()
        model(torch.randn(700, 300)).square().mean().backward()
        gradient = model.weight.grad
        assert gradient is not None
        if reduction.step == 2:
            view = gradient.view(-1)
            assert bool(view.sum() != 0)
            for change in (lambda view=view: view.add_(1), *(partial(torch.from_dlpack, e) for e in (gradient, view))):
                with pytest.raises(RuntimeError, match="on its way to the other sites"):
                    change()
        reduction.synchronize()
    assert reduction.first_difference() is None
    reduction.detach()


@support.at_sites(SITES)
def test_a_weight_frozen_within_a_step_has_no_gradient_of_one_site() -> None:
    for options in ({"mode": "dsgd"}, {"mode": "dad"}, {"mode": "rankdad", "rank": 2}):
        for frozen in (0, 2):
            for after in (True, False):  # after backward, or before
                model, alone = build(), [build() for _ in range(SITES)]
                reduction, optimizer = dadplug.GradientReduction(model, **options), sgd(model)
                weight = next(model.parameters())
                for step in range(4):
                    for site, each in enumerate([model, *alone], -1):
                        each.requires_grad_(True)
                        each.load_state_dict(model.state_dict())
                        each.zero_grad()
                        rows, targets = batch(step, [dist.get_rank() if site < 0 else site])
                        loss = F.cross_entropy(each(rows), targets)
                        weight.requires_grad_(step != frozen or after or site >= 0)
                        loss.backward()
                    weight.requires_grad_(step != frozen)
                    reduction.synchronize()
                    mean = sum(next(each.parameters()).grad for each in alone) / SITES
                    exact = weight.grad is None or torch.allclose(weight.grad, mean, rtol=1e-9, atol=1e-12)
                    assert exact or "rank" in options, (options, frozen, after, step)
                    assert weight.grad is not None or step == frozen
                    optimizer.step()
                assert reduction.first_difference() is None, (options, frozen, after)
                reduction.detach()


@support.at_sites(SITES)
def test_sites_of_the_drop_in_may_be_idle_in_turns() -> None:
    model, alone = build(), build()
    model.register_buffer("count", torch.tensor(0.0))
    wrapped = dadplug.DistributedDataParallel(model, mode="dad")
    for step in range(4):
        for each in (model, alone):
            each.zero_grad()
        inputs, targets = batch(step, [step % SITES])
        if dist.get_rank() == step % SITES:
            F.cross_entropy(wrapped(inputs), targets).backward()
        else:
            wrapped.reduction.idle()
        F.cross_entropy(alone(inputs), targets).backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad)
