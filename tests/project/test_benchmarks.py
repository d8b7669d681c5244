"""The benchmarks do what they say, at a few steps; the figures themselves are theirs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import support
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


def program(name):
    """Import a benchmark; its neighbours are found as when it runs."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return support.load(str(FOLDER / f"{name}.py"))


def wander(name, steps):
    soak = program("soak")
    verdict = soak.soak(name, argparse.Namespace(seed=0, steps=steps, delay=0.001, look=10, timeout=60))
    verdict.memory.clear()  # kernels compile in so few steps
    assert verdict.steps == steps
    assert not verdict.fault()


@pytest.mark.parametrize("name", ["dad", "rankdad:wire=bf16+error_feedback=true", "powersgd"])
def test_sites_that_use_other_layers_at_other_times_stay_in_step(sites, name):
    sites(2).run(wander, name, 40)


def test_a_fault_of_a_long_run_is_found():
    verdict = program("soak").Verdict
    assert "differs" in verdict(first_difference="a.weight differs").fault()
    assert "off autograd" in verdict(worst_gradient=1e-2).fault()
    assert "off autograd" in verdict(worst_gradient=float("nan")).fault()
    assert "grown from 100 to 120" in verdict(memory=[100.0, 104.0, 120.0]).fault()
    assert not verdict(worst_gradient=1e-6, memory=[100.0, 120.0, 105.0]).fault()


def test_methods_are_named_with_their_options():
    parse = program("attach").parse
    assert parse("ddp") == ("ddp", {})
    assert parse("topk:density=0.05") == ("topk", {"density": 0.05})
    assert parse("rankdad:rank=2+wire=bf16+error_feedback=true") == (
        "rankdad",
        {"rank": 2, "wire": "bf16", "error_feedback": True},
    )


def measure(name):
    step_time = program("step_time")
    arguments = argparse.Namespace(model="lstm", rank=2, batch_size=2, steps=4, seconds=9.0, optimizer="sgd")
    arguments.shape, arguments.rates, arguments.warm_up = False, ["unknown"], 5
    ((rate, measured),) = step_time.measure(name, arguments)
    assert rate == "unknown"
    assert 3 <= measured.steps <= 4
    assert measured.peak > 0
    return measured.seconds


@pytest.mark.parametrize("name", ["ddp-powersgd", "rankdad"])
def test_step_times(sites, name):
    assert all(seconds > 0 for seconds in sites(2).run(measure, name))


def learn(name):
    timed = program("time_to_accuracy")
    data = timed.load_dataset("digits")
    model, data = timed.build_for(data, "MNISTNet")
    arguments = argparse.Namespace(
        dataset="digits", method=name, rank=2, lr=None, batch_size=8, every=2, limit=60.0, steps=4, target=None
    )
    return timed.train(arguments, model, data, 0)


@pytest.mark.parametrize("name", ["ddp", "dad"])
def test_accuracy_is_looked_at_every_few_steps(sites, name):
    one, other = sites(2).run(learn, name)
    assert one["steps"] == other["steps"] == 4
    assert one["curve"] == other["curve"]
    assert len(one["curve"]) == 2
    assert all(0 <= value <= 1 for _, value in one["curve"])


def test_a_table_of_step_times_says_what_failed():
    rows = [
        {"model": "vit", "method": "ddp", "rate": "10mbit", "ms": 2000.0, "bytes": 4_000_000, "steps": 3},
        {"model": "vit", "method": "dad", "rate": "10mbit", "ms": 20.0, "bytes": 40_000, "steps": 3},
        {"model": "vit", "method": "topk", "rate": "10mbit", "error": "SiteError: gone"},
    ]
    table = program("two_site_link").table(rows, ["10mbit", "none"])
    assert "| ViT | dad | 0.04 | 20 (100 x) |  |" in table
    assert "| ViT | topk | - | failed [1] |  |" in table
    assert "[1] SiteError: gone" in table


def test_a_table_of_times_to_accuracy_estimates_what_was_given_up():
    curve, target = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.95)], 0.9
    rows = [
        {"method": "ddp", "rate": "none", "seed": 0, "target": target, "curve": curve, "steps": 30, "step": 0.1},
        {"method": "ddp", "rate": "10mbit", "seed": 0, "target": target, "curve": curve[:1], "steps": 2, "step": 4.0},
        {"method": "dad", "rate": "10mbit", "seed": 0, "target": target, "curve": curve, "steps": 30, "step": 0.1},
        {"method": "topk", "error": "SiteError: gone"},
    ]
    table = program("time_to_accuracy").table(rows, ["none", "10mbit"])
    assert "| DDP | 30 | 2 s (1 x) | ~ 120 s (1 x) |" in table
    assert "| dad | 30 | - | 2 s (60 x) |" in table
    assert "topk: SiteError: gone" in table


def test_a_table_of_berts_steps():
    rows = [
        {"method": "alone", "ms": 3000.0, "bytes": 100, "peak": 1_500_000_000},
        {"method": "ddp", "ms": 41_000.0, "bytes": 440_000_000, "peak": 2_000_000_000},
        {"method": "rankdad:rank=8+wire=bf16", "ms": 2600.0, "bytes": 3_900_000, "peak": 1_600_000_000},
    ]
    table = program("bert").table(rows)
    assert "| one process alone | 3.00 | 0 | 1.50 |" in table
    assert "| DDP | 41.0 | 440 | 2.00 |" in table
    assert "| rankdad, rank 8, bf16 | 2.60 | 3.9 | 1.60 |" in table


def test_bert_has_the_parameters_of_bert_base():
    pytest.importorskip("transformers")
    with torch.device("meta"):  # without memory
        model = program("workloads").BERT.build()
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 109
