"""Loops that are refused: an error on all sites, before any parameter has changed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from loops.compare import MODES
from loops.site import Site, loss, net, sgd
from torch import nn

import dadplug


def start(mode: str) -> tuple[Site, nn.Module, dadplug.GradientReduction]:
    """Two steps of a plain loop."""
    site = Site({**MODES[mode], "timeout": 20.0})
    model = net()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        loss(model, cast(site.batch(step))).backward()
        reduction.synchronize()
        optimizer.step()
    optimizer.zero_grad()
    return site, model, reduction


def cast(batch: tuple) -> tuple:
    return batch[0].float(), batch[1]


def adds_other_layers(mode: str) -> None:
    """A layer at one site alone, and layers of different widths."""
    for width in (None, 5):
        site, model, reduction = start(mode)
        if site.rank == 0 or width is not None:
            model.append(nn.Linear(4, 4 if site.rank == 0 else int(width)))
        before = copy.deepcopy(model.state_dict())
        loss(model, cast(site.batch(2))).backward()
        with pytest.raises(dadplug.MismatchError):
            reduction.synchronize()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        site.close()


@pytest.mark.parametrize("mode", list(MODES))
def test_layers_added_at_one_site_are_refused(sites, mode):
    sites(2).run(adds_other_layers, mode)


def detaches(mode: str) -> None:
    """Between backward and synchronize: the site's own gradient stays, or there is an error."""
    site, model, reduction = start(mode)
    apart = net()
    apart.load_state_dict(model.state_dict())
    batch = cast(site.batch(2))
    with reduction.no_sync():
        loss(model, batch).backward()
    loss(apart, batch).backward()
    try:
        reduction.detach()
    except RuntimeError:
        return
    for ours, theirs in zip(model.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", list(MODES))
def test_detach_after_backward_keeps_the_gradient(sites, mode):
    sites(2).run(detaches, mode)


def reads(mode: str) -> None:
    """A gradient that is read before it has been agreed on is the site's own, or an error.

    One that a lossy mode has compressed and sent already is what this site has sent.
    """
    site, model, reduction = start(mode)
    apart = net()
    apart.load_state_dict(model.state_dict())
    batch = cast(site.batch(2))
    loss(model, batch).backward()
    loss(apart, batch).backward()
    for ours, theirs in zip(model.parameters(), apart.parameters(), strict=True):
        try:
            found = ours.grad * 1
        except RuntimeError as error:
            assert "synchronize" in str(error)  # noqa: PT017
        else:
            compressed = mode.startswith("rankdad") and ours.dim() > 1
            assert (found - theirs.grad).norm() < (0.8 if compressed else 1e-5) * theirs.grad.norm()
    reduction.synchronize()
    assert all(p.grad is not None and type(p.grad) is torch.Tensor for p in model.parameters())
    assert reduction.first_difference() is None
    dist.barrier()
    site.close()


@pytest.mark.parametrize("mode", list(MODES))
def test_a_gradient_read_early_is_right_or_an_error(sites, mode):
    sites(2).run(reads, mode)
