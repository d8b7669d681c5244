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
        fleet.hub.await_line("b returns" if "server" in settings["way"] else "b joins", ENDED)
        fleet.stop(10)
        fleet.end("ab")
    return fleet


@pytest.mark.parametrize("way", ["dsgd", "rankdad", "ddp", "local", "server"])
def test_no_value_of_a_private_layer_is_sent(tmp_path, way):
    run = joins(tmp_path, way=way, private=PRIVATE)
    for number, name in enumerate("ab"):
        lines = run.written(name)
        assert {line["found"] for line in lines} == {0}
        assert {line["mark"] for line in lines} == {number}
        assert lines[-1]["sent"] > 10_000
    first, second = (run.written(name)[-1] for name in "ab")
    assert first["norm"] != second["norm"]
    assert first["body"] == second["body"] or way == "local"  # which agrees later


@pytest.mark.parametrize("way", ["dsgd", "local", "server"])
def test_the_search_finds_what_is_not_private(tmp_path, way):
    """At the start, in averages of buffers, and in the state that a site gets which joins."""
    run = joins(tmp_path, way=way)
    first = run.written("a")
    assert first[0]["found"]
    assert first[-1]["found"] > first[0]["found"]
    assert {line["mark"] for line in run.written("b")} == {0.0}


@pytest.mark.parametrize(("way", "most"), [("lora", 2.2), ("lora adamw", 3), ("adamw lora server", 12)])
def test_a_site_that_joins_gets_adapters_and_not_the_frozen_model(tmp_path, way, most):
    """At a server with the commits that are made meanwhile. The frozen model has 32 times the bytes."""
    run = joins(tmp_path, way=way)
    joined = run.written("b")[-1]["joined"]
    adapters = 2 * 2 * 1024 * 16 * 4
    assert 1.7 * adapters < joined["sent"] + joined["received"] < most * adapters


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


@pytest.mark.parametrize("private", [True, False], ids=["private", "shared"])
@pytest.mark.parametrize(
    ("program", "package", "pattern"),
    [("returning_lightning", "pytorch_lightning", "net.3.*"), ("returning_catalyst", "catalyst", "3.*")],
)
def test_no_trainer_sends_a_private_layer_to_a_site_that_returns_to_a_server(
    tmp_path, program, package, pattern, private
):
    support.need(package)
    fields = {"trainer": program, "private": [pattern] if private else []}
    with Fleet(tmp_path, "abc", private_trainer.__file__, [package], stops=False, **fields) as fleet:
        fleet.start("abc")
        fleet.end("c", -9)
        fleet.start("c", back=True)
        fleet.end("abc")
    every = [int((tmp_path / name / "found").read_text().split()[0]) for name in "abc"]
    assert not any(every) if private else sum(every)


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
