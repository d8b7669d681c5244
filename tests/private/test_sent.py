"""What sites send of private and of frozen layers: nothing of their values, at no time."""

import private_site
import private_trainer
import pytest
import support
from elastic_runs import ENDED, Run
from running_hub import running_hub

PRIVATE = ["head.*", "norm.*", "mark"]


def joins(folder, **settings) -> Run:
    """Train at two sites, one of which ends and is started anew; return the run after its end."""
    with running_hub(folder / "kits", ("a", "b")) as hub:
        run = Run(folder, hub, private_site.__file__, **settings)
        run.start("a")
        run.start("b", leave=3)
        run.end("b", 3)
        hub.await_line("b has left", ENDED)
        run.start("b")
        hub.await_line("b joins", ENDED)
        run.stop(10)
        run.end("ab")
    return run


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
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, private_site.__file__, way="lora")
        run.start("a")
        run.start("b", leave=3)
        run.end("b", 3)
        hub.await_line("b has left", ENDED)
        run.start("b", backbone=1)
        run.end("b")
        run.stop(10)
        run.end("a")
    error = run.written("b")[-1]["error"]
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
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, private_trainer.__file__, [package], stops=stops, **fields)
        run.start("a")
        run.start("b", leave=6)
        run.end("b", -9)
        hub.await_line("b has left", ENDED)
        before = int((tmp_path / "a" / "found").read_text().split()[0])
        run.start("b")
        hub.await_line("b joins", ENDED)
        if stops:
            (tmp_path / "stop").write_text("1")
        run.end("ab")
    every = [int((tmp_path / name / "found").read_text().split()[0]) for name in "ab"]
    assert every == [0, 0] if private else every[0] > before
