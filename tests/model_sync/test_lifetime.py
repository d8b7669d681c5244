"""What no program refers to any more ends by itself: hooks, overridden forwards, threads and connections."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import support
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as optim

import dadplug

WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "reduction": lambda model, _: dadplug.GradientReduction(model, weighting="uniform"),
    "drop-in": lambda model, _: dadplug.DistributedDataParallel(model, mode="dad", weighting="uniform"),
    "normalised": lambda model, _: dadplug.GradientReduction(model, "dsgd", weighting="uniform", sync_batchnorm=True),
    "local": lambda model, optimizer: dadplug.LocalSGD(model, optimizer, every=2),
    "local, fused": lambda model, optimizer: dadplug.LocalSGD(model, optimizer, every=2, fused=True),
    "local, synchronous": lambda model, optimizer: dadplug.LocalSGD(model, optimizer, every=2, warm_up=9),
    "server": lambda model, optimizer: dadplug.ParameterServer(model, optimizer, mode="dad"),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def rows(site: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(site), dtype=torch.float64)


def wrap_and_train(way: str, model: nn.Module, steps: int = 2) -> None:
    """Wrap a model, train it, and drop what has wrapped it, without a word to the other site."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = WAYS[way](model, optimizer)
    called = wrapped if isinstance(wrapped, nn.Module) else model
    for _ in range(steps):
        optimizer.zero_grad()
        called(rows(dist.get_rank())).square().mean().backward()
        if isinstance(wrapped, dadplug.GradientReduction):
            wrapped.synchronize()
        (optimizer if isinstance(wrapped, (nn.Module, dadplug.GradientReduction)) else wrapped).step()
    if isinstance(wrapped, dadplug.ParameterServer):
        wrapped.finish()


def resources() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def hooks_of(model: nn.Module) -> list[Any]:
    """Everything on a model that is called when the model is used."""
    found: list[Any] = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    for module in model.modules():
        found += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    for parameter in model.parameters():
        found += [*(parameter._backward_hooks or {}).values()]
        found += [*(parameter._post_accumulate_grad_hooks or {}).values()]  # type: ignore[attr-defined]
    return found


@support.at_sites(2)
def test_dropped_wrappers_leave_the_model_as_it_was() -> None:
    gc.freeze()  # what was there before: looking for garbage takes a fifth of a second otherwise
    for way in WAYS:
        model = build()
        wrap_and_train(way, model)
        before = resources()
        assert hooks_of(model) == [], way
        for _ in range(2):
            wrap_and_train(way, model)
        assert resources() == before, way
    model, alone = build(), build()  # and can be wrapped again, and trains right
    for way in ("drop-in", "reduction", "local"):
        wrap_and_train(way, model, steps=1)
    model.load_state_dict(build().state_dict())
    wrap_and_train("normalised", model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        alone(torch.cat([rows(0), rows(1)])).square().mean().backward()
        optimizer.step()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other)


@support.at_sites(2)
def test_a_wrapper_may_be_collected_while_hooks_of_optimizers_run() -> None:
    held: list[Any] = []

    def drop(*_: Any) -> None:
        held.clear()
        gc.collect()

    def hooks_of_all() -> tuple[list[int], list[int]]:
        dadplug.GradientReduction(build()).detach()  # removes those of what has been collected
        return list(optim._global_optimizer_pre_hooks), list(optim._global_optimizer_post_hooks)

    before = hooks_of_all()
    for way in ("reduction", "local", "server"):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held.append(WAYS[way](model, optimizer))
        hooks = [optim.register_optimizer_step_pre_hook(each) for each in (drop, lambda *_: None)]
        hooks += [optimizer.register_step_pre_hook(lambda *_: None)]
        optimizer.step()
        assert not held
        for hook in hooks:
            hook.remove()
        assert hooks_of_all() == before, way


@support.at_sites(2)
def test_gradients_of_a_dropped_wrapper_are_the_sites_own() -> None:
    layers: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "linear": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), rows(0)),
        "convolution": (
            lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(3, 3)),
            rows(0).view(6, 2, 2),
        ),
        "table": (lambda: nn.Sequential(nn.Embedding(9, 5), nn.Flatten()), torch.arange(9).view(3, 3)),
    }
    for name, (make, inputs) in layers.items():
        for mode in ("dsgd", "dad", "rankdad"):
            torch.manual_seed(0)
            model, alone = make().double(), make().double()
            for drops_before_backward in (True, False):
                alone.load_state_dict(model.state_dict())
                alone.zero_grad()
                model.zero_grad()
                alone(inputs).square().mean().backward()
                reduction = dadplug.GradientReduction(model, mode, weighting="uniform")
                loss = model(inputs).square().mean()
                if not drops_before_backward:
                    loss.backward()
                del reduction
                gc.collect()
                if drops_before_backward:
                    loss.backward()
                for one, other in zip(model.parameters(), alone.parameters(), strict=True):
                    assert torch.allclose(one.grad, other.grad), (name, mode, drops_before_backward)
