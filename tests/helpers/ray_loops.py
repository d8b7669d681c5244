"""Training functions of the tests of Ray: they know no Ray, so that the sites of other tests run them, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dadplug

ROWS, FEATURES, CLASSES = 12, 10, 4
STEPS, MICRO = 6, 2  # optimizer steps, and backward passes of each
SITE_ROWS = ((0, 8), (8, 12))  # of each batch: sites of different sizes


def build(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, CLASSES))
    return nn.Sequential(*layers).to(dtype)


def batch(number: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(ROWS, FEATURES, generator=generator, dtype=dtype)
    return inputs, torch.randint(CLASSES, (ROWS,), generator=generator)


def rows_of(rank: int | None) -> slice:
    return slice(None) if rank is None else slice(*SITE_ROWS[rank])


def plain(rank: int | None, wrapper: str = "") -> dict[str, Tensor]:
    """Train with accumulation and clipping, at a site or (rank None) on all rows; return the parameters."""
    module = build()
    model, reduction = module, None
    if wrapper == "reduction":
        reduction = dadplug.GradientReduction(module, mode="dad", weighting="samples")
    elif wrapper == "ddp":
        model = dadplug.DistributedDataParallel(module, mode="dad", weighting="samples")
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            inputs, targets = (each[rows_of(rank)] for each in batch(MICRO * step + micro))
            last = micro == MICRO - 1
            syncs = reduction or (model if wrapper else None)
            if syncs is not None and not last:
                with syncs.no_sync():
                    (nn.functional.cross_entropy(model(inputs), targets) / MICRO).backward()
            else:
                (nn.functional.cross_entropy(model(inputs), targets) / MICRO).backward()
        if reduction is not None:
            reduction.synchronize()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.2)
        assert norm > 0.2  # so that clipping changes something
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def generators() -> dict[str, Any]:
    """Return the state of this process's random numbers."""
    return {"torch": torch.get_rng_state(), "python": random.getstate()}


def set_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])


def resumable(
    rank: int,
    steps: int,
    every: int,
    load: Callable[[], dict[str, Any] | None] = lambda: None,
    save: Callable[[dict[str, Any]], None] = lambda state: None,
    at_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Tensor]:
    """Train with dropout and lossy compression; return the parameters, and the step that it has begun with.

    Args:
        rank: this site.
        steps: number of steps.
        every: steps between two checkpoints.
        load: returns the last checkpoint.
        save: keeps a checkpoint.
        at_step: is called before each step.
    """
    module = build(torch.float32, dropout=0.3)
    reduction = dadplug.GradientReduction(module, mode="rankdad", rank=2, wire="int8")
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    first = 0
    if (state := load()) is not None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        reduction.load_states(state["reduction"])
        set_generators(state["generators"][rank])
        first = state["step"]
    for step in range(first, steps):
        at_step(step)
        inputs, targets = (each[rows_of(rank)] for each in batch(step, torch.float32))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs * (1 + 0.01 * random.random())), targets).backward()
        reduction.synchronize()
        optimizer.step()
        if (step + 1) % every == 0:
            state = {"step": step + 1, "model": module.state_dict(), "optimizer": optimizer.state_dict()}
            state["reduction"] = reduction.gather_objects(reduction.state_dict())
            state["generators"] = reduction.gather_objects(generators())
            save(state)
    assert reduction.first_difference() is None
    return module.state_dict() | {"first": torch.tensor(first)}


def resumable_at_site(steps: int, every: int) -> dict[str, Tensor]:
    """Run `resumable` at a site of `support.sites`, without an interruption."""
    return resumable(dist.get_rank(), steps, every)
