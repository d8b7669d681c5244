"""Network with layers that rankdad divides among four sites, and the gradients of one process."""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from comparison import descend, off_by
from torch import nn

import dadplug
from dadplug.errors import NonFiniteError
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


def merges_exactly(widths, limit: float, options: dict) -> list[str]:
    """Compare steps with one process, at a rank that leaves nothing out; return the layers that are divided.

    A site idles in a step; gradients are read, discarded, added to, not finite or cleared after they have been sent.
    """
    site, world_size = dist.get_rank(), dist.get_world_size()
    model, apart = network(widths=widths), network(widths=widths)
    reduction = reduce(model, **options)
    assert {row.path for row in reduction.plan if len(row.shape) == 2} == {"lowrank"}
    for step in range(8):
        active = [each for each in range(world_size) if step != 2 or each != 1]
        apart.load_state_dict(model.state_dict())
        expected = mean_of_sites(apart, step, world_size, active)
        if site in active:
            backward(model, site, step)
        else:
            model.zero_grad()
        if step == 3 and site == 1:
            assert all(p.grad.abs().sum() > 0 for p in model.parameters())  # what has been sent can be read
            backward(model, site, step)
        if step == 4:
            (count, own), *others = (backward(apart, each, step) for each in range(world_size))
            expected = mean_of([(count + 5, own), *others])
            if site == 0:
                (0.0 * model(torch.ones(5, widths[0], dtype=torch.float64)).square().mean()).backward()
        if step == 5:
            if site == 1:
                model.zero_grad()
                model(torch.full((3, widths[0]), math.nan, dtype=torch.float64)).square().mean().backward()
            with pytest.raises(NonFiniteError, match="site 1"):
                reduction.synchronize()
            continue
        cleared = ["0.weight", "0.bias"] if step == 6 else []
        for name in cleared:  # at all sites
            model.get_parameter(name).grad = None
        reduction.synchronize() if site in active else reduction.idle()
        for name, p in model.named_parameters():
            assert (p.grad is None) == (name in cleared), (step, name)
            assert p.grad is None or off_by(p.grad, expected[name]) < limit, (step, name)
        if not cleared:
            descend(model)
    assert reduction.first_difference() is None
    divided, layers = divided_layers(reduction), reduction.traffic.layers
    assert all(layers[name].encode_seconds > 0 < layers[name].decode_seconds for name in divided)
    reduction.detach()
    return divided


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
