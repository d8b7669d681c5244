"""Local steps between sites, held against a simulation of all sites in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from comparison import off_by
from local_reference import Reference, adam, batch, build, train, vector
from torch import nn

from dadplug import LocalSGD

CASES = [
    {"overlap": False},
    {"overlap": False, "outer_lr": 0.7, "outer_momentum": 0.9},
    {"overlap": True},
    {"overlap": True, "outer_lr": 0.7, "outer_momentum": 0.9},
    {"overlap": True, "weighting": "uniform"},
]
ROWS = (8, 5, 6)


def reference_of(options: dict, count: int = 2, model: nn.Module | None = None) -> Reference:
    names = {"outer_lr": "lr", "outer_momentum": "mu", "overlap": "overlap"}
    settings = {names[name]: value for name, value in options.items() if name in names}
    return Reference(model or build(), adam, count, uniform="weighting" in options, **settings)


def batches(first: int, lasts: tuple[int, ...]) -> list[list]:
    return [[batch(step, site, ROWS[site]) for step in range(first, last)] for site, last in enumerate(lasts)]


def equals_reference(cases: list[dict]) -> None:
    site, count = dist.get_rank(), dist.get_world_size()
    for options in cases:
        reference = reference_of(options, count)
        model = build(site)  # rank 0's parameters have to reach the other
        local = LocalSGD(model, adam(model.parameters()), every=4, **options)
        for first, last in ((0, 4), (4, 8), (8, 11)):
            reference.round(batches(first, (last,) * count), last=last == 11)
            train(local, range(first, last), site, ROWS[site])
            if last == 11:
                local.finish()
            assert (error := off_by(vector(model), reference.sites[site].vector())) < 1e-12, (options, last, error)
            if last == 11 or not options["overlap"]:
                assert local.first_difference() is None
        assert (local.steps, local.agreements) == (11, 3)
        reference.round(batches(11, (15,) * count))  # training goes on after finish()
        train(local, range(11, 15), site, ROWS[site])
        assert off_by(vector(model), reference.sites[site].vector()) < 1e-12, options
        local.detach()


def test_parameters_are_those_of_a_simulation_in_one_process(sites):
    sites(2).run(equals_reference, CASES)
    sites(3).run(equals_reference, CASES[2:4])


def uneven(cases: list[dict]) -> None:
    """Site 0 has 13 batches, site 1 has 5."""
    site = dist.get_rank()
    for options in cases:
        reference = reference_of(options)
        for first, lasts, last in ((0, (4, 4), False), (4, (8, 5), False), (8, (12, 8), False), (12, (13, 12), True)):
            reference.round([own[: max(0, 13 - 8 * s - first)] for s, own in enumerate(batches(first, lasts))], last)
        model = build()
        local = LocalSGD(model, adam(model.parameters()), every=4, **options)
        train(local, range((13, 5)[site]), site, ROWS[site])
        local.finish()
        assert off_by(vector(model), reference.sites[site].vector()) < 1e-12, options
        assert local.first_difference() is None
        assert local.steps == 13
        local.detach()


def test_a_site_that_runs_out_of_batches_takes_part_without_weight(sites):
    sites(2).run(uneven, CASES)


def scheduled() -> None:
    site = dist.get_rank()
    reference = reference_of({})
    model = build()
    local = LocalSGD(model, adam(model.parameters()), every=lambda step: 2 if step < 4 else 5, overlap=False)
    for first, last in ((0, 2), (2, 4), (4, 9)):
        reference.round(batches(first, (last, last)))
        train(local, range(first, last), site, ROWS[site])
        assert off_by(vector(model), reference.sites[site].vector()) < 1e-12
    assert local.agreements == 3
    local.detach()


def test_the_interval_may_be_a_function_of_the_step(sites):
    sites(2).run(scheduled)


def warms_up(finish_after: int) -> None:
    """Three synchronous steps, which are those of one process with all rows, then local ones."""
    site = dist.get_rank()
    reference = reference_of({"overlap": True})
    for step in range(3):
        reference.synchronous_step([batch(step, s, ROWS[s]) if step < finish_after or s == 0 else None for s in (0, 1)])
    model = build(site)
    local = LocalSGD(model, adam(model.parameters()), every=4, warm_up=3, warm_up_mode="dad")
    lasts = (7, 7 if finish_after > 3 else 3)
    train(local, range(7 if site == 0 else min(7, finish_after)), site, ROWS[site])
    reference.round(batches(3, lasts))
    reference.round([[], []], last=True)
    local.finish()
    assert local.steps == 7
    assert off_by(vector(model), reference.sites[site].vector()) < 1e-12
    assert local.first_difference() is None
    local.detach()


def test_local_steps_begin_after_synchronous_ones(sites):
    sites(2).run(warms_up, 9)


def test_a_site_may_run_out_of_batches_in_the_warm_up(sites):
    sites(2).run(warms_up, 2)


def normalised_model(site: int) -> nn.Sequential:
    torch.manual_seed(site)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3)).double()


def averages_buffers() -> None:
    site = dist.get_rank()
    torch.manual_seed(0)
    model = normalised_model(site)
    model.register_buffer("mask", torch.ones(5))  # which nothing changes
    local = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.01), every=3, overlap=False)
    train(local, range(2), site, ROWS[site])
    norm = model[1]
    model.eval()
    before = local.gather_objects({name: buffer.clone() for name, buffer in norm.named_buffers()})
    model.train()
    with torch.no_grad():
        inputs = model[0](batch(2, site, ROWS[site])[0])
        mean, var = inputs.mean(0), inputs.var(0)
    expected = local.gather_objects(
        (0.9 * before[site]["running_mean"] + 0.1 * mean, 0.9 * before[site]["running_var"] + 0.1 * var)
    )
    train(local, range(2, 3), site, ROWS[site])
    shares = [8 / 13, 5 / 13]
    for place, name in enumerate(("running_mean", "running_var")):
        agreed = sum(share * own[place] for share, own in zip(shares, expected))
        assert off_by(getattr(norm, name), agreed) < 1e-12, name
    assert int(norm.num_batches_tracked) == 3
    assert local._agreement._buffers.names == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    local.detach()


def test_running_statistics_are_averaged_at_each_agreement(sites):
    sites(2).run(averages_buffers)


def synchronises_statistics() -> None:
    """With an agreement after each step of SGD, local steps are those of one process with all rows."""
    site = dist.get_rank()
    reference, model = normalised_model(0), normalised_model(site)
    local = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, overlap=False, sync_batchnorm=True)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        both = [batch(step, s, ROWS[s]) for s in range(2)]
        optimizer.zero_grad()
        nn.functional.mse_loss(
            reference(torch.cat([both[0][0], both[1][0]])), torch.cat([both[0][1], both[1][1]])
        ).backward()
        optimizer.step()
        train(local, range(step, step + 1), site, ROWS[site])
        assert off_by(vector(model), vector(reference)) < 1e-12
        assert off_by(model[1].running_var, reference[1].running_var) < 1e-12
    train(local, range(4, 6 + 4 * site), site, ROWS[site])  # site 0 runs out
    local.finish()
    assert local.first_difference() is None
    local.detach()


def test_statistics_of_all_rows_in_every_step(sites):
    sites(2).run(synchronises_statistics)
