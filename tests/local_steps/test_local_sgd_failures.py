"""Local steps under a GradScaler, over a hub, with schedules that fail, and when a site is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from local_reference import Reference, adam, batch, build, loss_of, train, vector
from running_hub import running_hub

from dadplug import LocalSGD
from dadplug.errors import SiteError
from dadplug.local_steps.agreement import Agreement


def trains_scaled(local: LocalSGD, site: int, infinite: tuple[int, int]) -> float:
    """Take seven steps under a GradScaler, one of which has an infinite gradient at a site; return the last scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(7):
        local.optimizer.zero_grad()
        loss = loss_of(local.model, *batch(step, site, 8 - 3 * site, torch.float32))
        scaler.scale(loss * float("inf") if (step, site) == infinite else loss).backward()
        local.step(scaler=scaler)
        scaler.update()
    local.finish()
    return scaler.get_scale()


def scales() -> None:
    """Scales are powers of two, so that a scaled run has the bits of one without a scaler that leaves the step out."""
    site = dist.get_rank()
    for overlap in (True, False):
        model, plain = build(0, torch.float32), build(0, torch.float32)
        expected = LocalSGD(plain, torch.optim.SGD(plain.parameters(), lr=0.1), every=3, overlap=overlap)
        for step in range(7):
            if (step, site) == (4, 1):
                loss_of(plain, *batch(step, site, 5, torch.float32)).backward()
                with expected.stepping():
                    pass
            else:
                train(expected, [step], site, 8 - 3 * site)
        expected.finish()
        local = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=3, overlap=overlap)
        assert trains_scaled(local, site, infinite=(4, 1)) == (512.0 if site else 1024.0)
        assert torch.equal(vector(model), vector(plain))
        assert local.first_difference() is None
        for each in (local, expected):
            each.detach()
    model = build(0, torch.float32)
    options = {"warm_up": 3, "check_finite": False}
    local = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=3, **options)
    assert trains_scaled(local, site, infinite=(1, 1)) == 512.0  # a synchronous step is left out at all sites
    assert vector(model).isfinite().all()
    assert local.first_difference() is None
    local.detach()


def test_a_grad_scaler_leaves_out_the_steps_of_its_site(sites):
    sites(2).run(scales)


def fails_in_the_schedule() -> None:
    site = dist.get_rank()
    for every, message in (
        (lambda step: 0, r"every\(0\) must be a whole number of at least 1, got 0"),
        (lambda step: 2.0, r"every\(0\) must be a whole number"),
        (lambda step: None, r"every\(0\) must be a whole number"),
    ):
        for wrong_site in (1, None):
            model = build()
            with pytest.raises(ValueError, match=message):
                LocalSGD(model, adam(model.parameters()), every=every if wrong_site in (site, None) else 4)
    model = build()
    local = LocalSGD(model, adam(model.parameters()), every=lambda step: 4 if step < 8 else -1, overlap=False)
    with pytest.raises(ValueError, match=r"every\(8\) must be a whole number of at least 1, got -1"):
        train(local, range(12), site)
    assert (local.steps, local.first_difference()) == (8, None)  # the agreement itself has taken place
    local.detach()


def test_what_a_schedule_returns_is_checked(sites):
    sites(2).run(fails_in_the_schedule)


def equals_reference() -> None:
    site = dist.get_rank()
    for options in ({"overlap": True, "outer_lr": 0.7, "outer_momentum": 0.9}, {"overlap": False}):
        reference = Reference(build(), adam, 2, options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0))
        reference.overlap = options["overlap"]
        model = build(site)
        local = LocalSGD(model, adam(model.parameters()), every=3, **options)
        for first, last in ((0, 3), (3, 6), (6, 8)):
            reference.round([[batch(step, s) for step in range(first, last)] for s in (0, 1)], last=last == 8)
        train(local, range(8), site)
        local.finish()
        assert off_by(vector(model), reference.sites[site].vector()) < 1e-12
        local.detach()
    model = build(site, torch.float32)
    local = LocalSGD(model, adam(model.parameters()), every=3, rank=2, wire="int8", warm_up=2, warm_up_mode="rankdad")
    train(local, range(8 - 2 * site), site)
    local.finish()
    assert local.first_difference() is None
    local.detach()


def test_local_steps_over_a_hub(tmp_path):
    names = ("a", "b")
    with (
        running_hub(tmp_path / "kits", sites=names) as hub,
        support.Sites(2, kits=[hub.kits / name for name in names]) as group,
    ):
        group.run(equals_reference)


def resume(folder: str) -> LocalSGD:
    """Build local steps, and load the last checkpoint of this site if there is one."""
    model = build(0, torch.float32)
    optimizer = adam(model.parameters())
    local = LocalSGD(model, optimizer, every=3, rank=2, wire="int8", timeout=60)
    path = Path(folder) / f"{dist.get_rank()}.pt"
    if path.exists():
        for each, state in zip((model, optimizer, local), torch.load(path, weights_only=True)):
            each.load_state_dict(state)
    return local


def is_killed(folder: str, place: str) -> None:
    """Save a checkpoint after four steps; then site 1 kills itself, between agreements or in one."""
    site = dist.get_rank()
    local = resume(folder)
    train(local, range(4), site)
    torch.save([each.state_dict() for each in (local.model, local.optimizer, local)], Path(folder) / f"{site}.pt")
    hits = {"before the headers": (Agreement, "_exchange_headers"), "before the deltas": (Agreement, "_launch")}
    if site and place == "between":
        os.kill(os.getpid(), signal.SIGKILL)
    if site:
        setattr(*hits[place], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(SiteError, match=r"site 1 \("):
        train(local, range(4, 30), site)


def goes_on(folder: str) -> None:
    site = dist.get_rank()
    local, straight = resume(folder), resume("nowhere")
    assert (local.steps, local.agreements) == (4, 1)
    train(local, range(4, 9), site)
    train(straight, range(9), site)
    for each in (local, straight):
        each.finish()
    assert torch.equal(vector(local.model), vector(straight.model))
    for each in (local, straight):
        each.detach()


@pytest.mark.parametrize("place", ["between", "before the headers", "before the deltas"])
def test_a_killed_site_is_named_and_the_last_checkpoint_loads(sites, tmp_path, place):
    with support.Sites(2) as group:
        group.start(is_killed, str(tmp_path), place)
        survivor, victim = group.outcomes()
    assert survivor.kind == "ok", survivor.value
    assert victim.kind == "ended"
    sites(2).run(goes_on, str(tmp_path))
