"""Local steps, fragments of a round, and headers that travel beside the next steps, held against a simulation."""

from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from local_reference import ROWS, Simulation, adam, ends_equal, local_steps, resumes, train, vector
from running_hub import running_hub
from torch import nn

from dadplug import LocalSGD, MismatchError, NonFiniteError
from dadplug.local_steps.agreement import Fragment, divide


def widening(step: int) -> int:
    return 2 if step < 4 else 5


def thinning(agreement: int) -> float:
    return 0.5 if agreement < 2 else 0.05


SPARSE = {"every": 3, "overlap": False, "density": 0.1, "wire": "int2"}
WHOLE = [
    {"every": 4, "overlap": False, "fused": True},
    {"every": 4, "overlap": False, "outer_lr": 0.7, "outer_momentum": 0.9},
    {"every": 4, "fused": True},
    {"every": 4, "outer_lr": 0.7, "outer_momentum": 0.9},
    {"every": 4, "weighting": "uniform"},
    {"every": 4, "delay": 2},
    {"every": widening, "overlap": False},
    SPARSE | {"outer_lr": 1.5},
    SPARSE | {"memory_decay": 0.5, "weighting": "uniform"},
    SPARSE | {"overlap": True, "density": thinning, "delay": 1},
]
CASES = [
    {"fragments": 2, "every": 4},
    {"fragments": 3, "every": 7, "delay": 1},
    {"fragments": 2, "every": 6, "delay": 2, "outer_lr": 0.7, "outer_momentum": 0.9},
    {"fragments": 3, "every": 3, "delay": 1, "outer_lr": 1.5, "density": 0.1, "wire": "int2"},
    {"fragments": 2, "every": 5, "delay": 1, "density": 0.05, "wire": "int2"},
    {"fragments": 2, "every": 8, "delay": 2, "density": 0.05, "wire": "int2"},
]


def simulation_of(options: dict, count: int = 2) -> Simulation:
    return Simulation(count, **{name: each for name, each in options.items() if name not in ("wire", "fused")})


def equals_the_simulation(cases: list[dict]) -> None:
    site, count = dist.get_rank(), dist.get_world_size()
    rows = ROWS[:count]
    for options in cases:
        simulation = simulation_of(options, count)
        local = local_steps(site, **options)  # rank 0's parameters have to reach the others
        for step in range(17):
            simulation.step(step, rows)
            train(local, [step], site, rows[site])
            assert off_by(vector(local.model), simulation.sites[site].vector()) < 1e-12, (options, step)
            if simulation.last == step + 1 and not options.get("overlap", True):
                assert local.first_difference() is None
        local.finish()
        simulation.finish(17)
        assert (local.steps, local.agreements) == (17, simulation.number)
        for step in range(17, 24):  # training goes on
            assert off_by(vector(local.model), simulation.sites[site].vector()) < 1e-12, (options, step)
            simulation.step(step, rows)
            train(local, [step], site, rows[site])
        ends_equal(local)


def test_parameters_are_those_of_a_simulation_in_one_process(sites):
    sites(2).run(equals_the_simulation, [*WHOLE, *CASES])
    sites(3).run(equals_the_simulation, [*WHOLE[2:4], *CASES[1:4:2]])


def rounds_and_compresses() -> None:
    site = dist.get_rank()
    options = {"rank": 2, "wire": "int8", "warm_up": 2, "warm_up_mode": "rankdad"}
    local = local_steps(site, dtype=torch.float32, every=3, **options)
    train(local, range(8 - 2 * site), site)
    ends_equal(local)


def test_local_steps_over_a_hub(tmp_path):
    names = ("a", "b")
    with (
        running_hub(tmp_path / "kits", sites=names) as hub,
        support.Sites(2, kits=[hub.kits / name for name in names]) as group,
    ):
        group.run(equals_the_simulation, [WHOLE[0], WHOLE[3], CASES[3]])
        group.run(rounds_and_compresses)


@support.at_sites(2)
def test_a_site_that_runs_out_of_batches_takes_part_without_weight() -> None:
    """Site 0 has 13 batches, site 1 has 6: nothing of either is lost."""
    site = dist.get_rank()
    for options in (*WHOLE[1:5], *CASES[:2]):
        simulation = simulation_of(options)
        for step in range(13):
            simulation.step(step, (8, 5 if step < 6 else 0))
        simulation.finish(13)
        local = local_steps(0, **options)
        train(local, range((13, 6)[site]), site, ROWS[site])
        local.finish()
        assert off_by(vector(local.model), simulation.sites[site].vector()) < 1e-12, options
        assert local.steps == 13
        ends_equal(local)


@pytest.mark.parametrize(("finish_after", "fused"), [(9, False), (2, True)])
@support.at_sites(2)
def test_local_steps_begin_after_synchronous_ones_which_a_site_may_not_finish(finish_after: int, fused: bool) -> None:
    """Three synchronous steps, which are those of one process with all rows, then local ones."""
    site, simulation = dist.get_rank(), Simulation(2, every=4)
    for step in range(7):
        take = simulation.synchronous_step if step < 3 else simulation.step
        take(step, (8, 5 if step < finish_after else 0))
    simulation.finish(7)
    local = local_steps(site, every=4, warm_up=3, warm_up_mode="dad", fused=fused)
    train(local, range(7 if site == 0 else min(7, finish_after)), site, ROWS[site])
    local.finish()
    assert local.steps == 7
    assert off_by(vector(local.model), simulation.sites[site].vector()) < 1e-12
    ends_equal(local)


# Headers


@pytest.mark.parametrize(("options", "passed"), [({"delay": 3}, 2), ({"fragments": 2}, 1)])
@support.at_sites(2)
def test_no_step_waits_for_a_site_that_is_late(tmp_path: Path, options: dict, passed: int) -> None:
    """Site 1 takes its step of an agreement when site 0 is some steps further."""
    site, file = dist.get_rank(), tmp_path / "passed"
    local = local_steps(0, every=4, timeout=20.0, **options)
    train(local, range(8), site)  # the first round lays out the payloads
    dist.barrier()
    if site == 1:
        train(local, range(8, 11), site)
        support.until(file.exists, lambda: "site 0 waits", 20.0)
        train(local, range(11, 20), site)
    else:
        train(local, range(8, 12 + passed), site)
        file.touch()
        train(local, range(12 + passed, 20), site)
    ends_equal(local)


@support.at_sites(2)
def test_a_round_with_nan_is_discarded_on_all_sites_at_one_step() -> None:
    site = dist.get_rank()
    for options in ({"every": 4, "delay": 2}, {"every": 8, "fragments": 2, "delay": 2, "density": 0.1, "wire": "int2"}):
        local = local_steps(0, dtype=torch.float32, **options)
        train(local, range(11), site)
        if site == 1:
            with torch.no_grad():
                for parameter in local.model.parameters():
                    parameter.fill_(float("nan"))
        train(local, range(11, 13), site)
        with pytest.raises(NonFiniteError, match=r"at step 12 parameter '.*' holds NaN or Inf at site 1 \("):
            train(local, range(13, 16), site)
        assert local.steps == 14
        assert local.first_difference() is None
        assert all(bool(each.isfinite().all()) for each in local.model.parameters())
        local.optimizer.state.clear()
        train(local, range(16, 30), site)
        assert all(bool(each.isfinite().all()) for each in local.model.parameters())
        ends_equal(local)


@support.at_sites(2)
def test_sites_at_different_steps_are_an_error() -> None:
    site = dist.get_rank()
    local = local_steps(0, every=4, delay=2)
    train(local, range(4), site)
    if site == 1:
        local._next += 1
    with pytest.raises(MismatchError, match=r"agree at different steps, site 0 \(.*\) at 8 and site 1 \(.*\) at 9"):
        train(local, range(4, 13), site)
    local.detach()


# Changes of the model, buffers, checkpoints


@support.at_sites(2)
def test_statistics_are_means_at_the_end_of_each_round() -> None:
    site = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)).double()
    local = LocalSGD(model, adam(model.parameters()), every=4, fragments=2)
    for first in range(0, 12, 2):
        train(local, range(first, first + 2), site, ROWS[site])
        equal = local.gather_objects(model[1].running_mean)[1 - site].equal(model[1].running_mean)
        assert equal == (first % 4 == 2)
    ends_equal(local)


@support.at_sites(2)
def test_ends_on_equal_bits_in_every_type() -> None:
    site, sparse = dist.get_rank(), {"density": 0.1, "wire": "int2"}
    for dtype in (torch.bfloat16, torch.float32):
        for options in ({"delay": 1}, {"rank": 2, "wire": "int8"}, {"wire": "bf16", "outer_momentum": 0.5}, sparse):
            local = local_steps(site, dtype=dtype, every=4, fragments=2, **options)
            start = vector(local.model)
            train(local, range(9), site)
            assert local.first_difference() is not None
            local.finish()
            assert not torch.equal(vector(local.model), start)
            ends_equal(local)


@pytest.mark.parametrize("stop", [5, 6, 8])
def test_a_run_resumes_on_the_same_curve_to_the_bit(sites, stop):
    sites(2).run(resumes, {"fragments": 2, "delay": 1, "density": 0.1, "wire": "int2"}, stop)
    sites(2).run(resumes, {"fragments": 2, "rank": 2, "wire": "int8", "outer_momentum": 0.5}, stop)


# Without other sites


def test_fragments_have_about_as_many_numbers_and_keep_their_parameters():
    sizes = {"a": 10, "b": 400, "c": 120, "d": 130, "e": 100}
    values = {name: torch.zeros(size) for name, size in sizes.items()}
    fragments = [Fragment(None) for _ in range(2)]
    divide(fragments, values)
    assert [each.names for each in fragments] == [["b"], ["a", "c", "d", "e"]]
    del values["c"]
    divide(fragments, values | {"f": torch.zeros(5)})
    assert [each.names for each in fragments] == [["b"], ["a", "d", "e", "f"]]


def test_a_checkpoint_of_another_number_of_fragments_is_refused():
    local, other = local_steps(0, every=4, fragments=2), local_steps(0, every=4, fragments=3)
    train(local, range(3), 0)
    with pytest.raises(ValueError, match="is of a run with fragments=2, and this one has fragments=3"):
        other.load_state_dict(local.state_dict())
    local.detach()
    other.detach()
