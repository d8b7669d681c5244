"""What sites send of private and of frozen layers: nothing of their values, at no time."""

import private_site
import private_trainer
import pytest
import support
from fleet import ENDED, Fleet

PRIVATE = ["head.*", "norm.*", "mark"]


def joins(folder, **settings) -> Fleet:
    """Train at two sites, one of which ends and is started anew; return the run after its end."""
    with Fleet(folder, "ab", private_site.__file__, **settings) as fleet:
        fleet.start("a")
        fleet.start("b", leave=3)
        fleet.end("b", 3)
        fleet.hub.await_line("b has left", ENDED)
        fleet.start("b")
        fleet.hub.await_line("b joins", ENDED)
        fleet.stop(10)
        fleet.end("ab")
    return fleet


@pytest.mark.parametrize("way", ["dsgd", "rankdad", "ddp", "local"])
def test_no_value_of_a_private_layer_is_sent(tmp_path, way):
    run = joins(tmp_path, way=way, private=PRIVATE)
    for number, name in enumerate("ab"):
        lines = run.written(name)
        assert {line["found"] for line in lines} == {0}
        assert {line["mark"] for line in lines} == {number}
        assert lines[-1]["sent"] > 10_000
    assert run.written("a")[-1]["norm"] != run.written("b")[-1]["norm"]


@pytest.mark.parametrize("way", ["dsgd", "local"])
def test_the_search_finds_what_is_not_private(tmp_path, way):
    """At the start, in averages of buffers, and in the state that a site gets which joins."""
    run = joins(tmp_path, way=way)
    first = run.written("a")
    assert first[0]["found"]
    assert first[-1]["found"] > first[0]["found"]
    assert {line["mark"] for line in run.written("b")} == {0.0}


def test_a_site_that_joins_gets_adapters_and_not_the_frozen_model(tmp_path):
    run = joins(tmp_path, way="lora")
    joined = run.written("b")[-1]["joined"]
    adapters = 2 * 2 * 1024 * 16 * 4
    assert 2 * adapters < joined["sent"] + joined["received"] < 3 * adapters


def test_a_site_that_joins_with_another_frozen_model_is_refused(tmp_path):
    with Fleet(tmp_path, "ab", private_site.__file__, way="lora") as fleet:
        fleet.start("a")
        fleet.start("b", leave=3)
        fleet.end("b", 3)
        fleet.hub.await_line("b has left", ENDED)
        fleet.start("b", backbone=1)
        fleet.end("b")
        fleet.stop(10)
        fleet.end("a")
    error = fleet.written("b")[-1]["error"]
    assert "'0.frozen.weight'" in error
    assert "weights with which the other sites have started" in error


TRAINERS = {
    "elastic_lightning": ("pytorch_lightning", ["net.2.*"], {"epochs": 10000}),
    "elastic_catalyst": ("catalyst", ["2.*"], {"epochs": 10000, "returns": True}),
    "elastic_transformers": ("transformers.trainer", ["classifier.*"], {"epochs": 10, "pause": 0.2}),
}


@pytest.mark.parametrize("private", [True, False], ids=["private", "shared"])
@pytest.mark.parametrize("program", TRAINERS)
def test_no_trainer_sends_a_private_layer_to_a_site_that_joins(tmp_path, program, private):
    package, patterns, fields = TRAINERS[program]
    support.need(package.partition(".")[0])
    fields = fields | {"trainer": program, "private": patterns if private else [], "min_sites": 1}
    stops = "transformers" not in program
    with Fleet(tmp_path, "ab", private_trainer.__file__, [package], stops=stops, **fields) as fleet:
        fleet.start("a")
        fleet.start("b", leave=6)
        fleet.end("b", -9)
        fleet.hub.await_line("b has left", ENDED)
        before = int((tmp_path / "a" / "found").read_text().split()[0])
        fleet.start("b")
        fleet.hub.await_line("b joins", ENDED)
        if stops:
            (tmp_path / "stop").write_text("1")
        fleet.end("ab")
    every = [int((tmp_path / name / "found").read_text().split()[0]) for name in "ab"]
    assert every == [0, 0] if private else every[0] > before
