"""Network with layers that rankdad divides among four sites, and the gradients of one process."""

import math
from contextlib import contextmanager

import torch
from torch import nn

import dadplug
from dadplug.lowrank.dispatch import merge_coefficients
from dadplug.step.reducer import merged
from dadplug.step.reducer.merged import DividedHandler, MergedHandler

WIDTHS = (401, 430, 1300, 20)  # of layers that are divided
SMALL = (90, 120, 100, 80)  # of layers that each have one owner


def network(dtype=torch.float64, widths=WIDTHS):
    torch.manual_seed(0)
    first, second, third, last = widths
    return nn.Sequential(
        nn.Linear(first, second),
        nn.Tanh(),
        nn.LayerNorm(second),
        nn.Linear(second, third, bias=False),
        nn.Linear(third, last),
    ).to(dtype)


def batch(rank, step, rows=None, width=WIDTHS[0]):
    """A site's batch of a step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = 1 + rank % 2 + step % 2 if rows is None else rows
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def backward(model, rank, step, rows=None):
    """Run backward on a site's batch of a step; return its rows and gradients."""
    model.zero_grad()
    inputs = batch(rank, step, rows, model[0].in_features).to(next(model.parameters()).dtype)
    model(inputs).square().mean().backward()
    return len(inputs), {name: p.grad.clone() for name, p in model.named_parameters()}


def mean_of(parts):
    rows = sum(count for count, _ in parts)
    return {name: sum(count / rows * own[name] for count, own in parts) for name in parts[0][1]}


def mean_of_sites(model, step, world_size, active=None):
    """The gradients that one process with all rows has, by name."""
    return mean_of([backward(model, rank, step) for rank in range(world_size) if active is None or rank in active])


def reduce(model, **options):
    return dadplug.GradientReduction(
        model, mode="rankdad", **{"weighting": "samples", "tolerance": 0.0, "merge": "owner"} | options
    )


def divided_layers(reduction) -> list[str]:
    handlers = reduction._planner._reducer._handlers
    return [unit.name for each in handlers if isinstance(each, DividedHandler) for unit in each.units]


def spectrum(kind: str, count: int) -> torch.Tensor:
    """Return singular values that decrease in one of three ways."""
    steps = torch.arange(1, count + 1, dtype=torch.float64)
    return {"flat": torch.ones(count), "power": steps**-1.0, "fast": 0.7**steps}[kind].double()


@contextmanager
def fail_to_merge(reduction):
    """Let the numerics of merging fail at all sites, as if LAPACK did not converge."""

    def raise_error(*given):
        raise FloatingPointError

    handlers = reduction._planner._reducer._handlers
    mergers = [handler._merger for handler in handlers if isinstance(handler, MergedHandler)]
    merged.merge_coefficients = lambda *given: [part * math.nan for part in merge_coefficients(*given)]
    for merger in mergers:
        merger.encode = raise_error
    try:
        yield
    finally:
        merged.merge_coefficients = merge_coefficients
        for merger in mergers:
            vars(merger).pop("encode", None)
