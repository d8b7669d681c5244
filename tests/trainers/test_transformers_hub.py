"""transformers' Trainer at sites that connect to a hub: one is killed and started again, and returns into the run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import elastic_transformers
from dadplug.runners.site_trainer import TrainingState
from fleet import Fleet
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from dadplug.errors import MismatchError

NAMES = "abcd"


def trained(folder: Path, lost: str = "", **settings: object) -> tuple[Fleet, dict[str, dict]]:
    """Train at four sites, one of which may be killed at a third and started again; return what they have written."""
    with Fleet(
        folder, NAMES, elastic_transformers.__file__, ["transformers.trainer"], stops=False, min_sites=1, **settings
    ) as fleet:
        for name in NAMES:
            fleet.start(name, leave=11 if name == lost else -1, pause=0.15 if lost else 0.0)
        if lost:
            fleet.end(lost, -9)
            fleet.start(lost)
        fleet.end(NAMES)
    return fleet, dict(zip(NAMES, fleet.results(NAMES)))


def altered(state: dict[str, Any], change: str) -> None:
    callbacks = state["stateful_callbacks"]
    if change == "attribute":
        callbacks["EarlyStoppingCallback"]["attributes"]["on_step_end"] = 1
    elif change == "argument":
        callbacks["TrainerControl"]["args"]["on_step_end"] = 1
    else:
        state["best_model_checkpoint"] = change


@pytest.mark.parametrize("change", ["attribute", "argument", "/elsewhere", "/elsewhere/.."])
def test_a_state_of_another_site_sets_no_other_attribute_and_names_no_other_folder(tmp_path, change):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(elastic_transformers.net(0), args, callbacks=[EarlyStoppingCallback(2)])
    trainer.batches_in_epoch, trainer.split_data = 1, None
    training = TrainingState(trainer)
    text = training._progress()["state"]
    training.joined = {"state": text}
    assert json.loads(training.restored()) == json.loads(text)
    state = json.loads(text)
    altered(state, "/elsewhere/checkpoint-5")
    training.joined = {"state": json.dumps(state)}
    assert json.loads(training.restored())["best_model_checkpoint"] == str(tmp_path / "checkpoint-5")
    altered(state, change)
    training.joined = {"state": json.dumps(state)}
    with pytest.raises(MismatchError, match="another site has sent an invalid state of its trainer"):
        training.restored()


def test_a_site_that_was_killed_returns_into_the_run(tmp_path):
    run, results = trained(tmp_path / "lost", "c")
    first, *others = results.values()
    assert first["step"] == 32  # 8 epochs of 8 batches, two in a step
    for other in others:
        assert other["digest"] == first["digest"]
        assert other["step"] == first["step"]
    lines, own = run.lines("a"), run.lines("c")
    assert sorted(lines) == list(range(1, 33))  # no step lost
    returned = [step for step in own if step > 12]
    assert len(returned) > 5, "the site has come back too late to tell"
    for step, line in own.items():
        for what in ("digest", "lr", "epoch", "present", "reduction"):
            assert line[what] == lines[step][what], (step, what)
    present = {step: line["present"] for step, line in lines.items()}
    assert present[12] == [0, 1, 3]
    assert present[32] == [0, 1, 2, 3]
    for step, loss in results["c"]["evaluations"].items():
        if int(step) > min(returned):
            assert loss == first["evaluations"][step]
    undisturbed = [trained(tmp_path / str(seed), seed=seed)[1]["a"]["best"] for seed in range(3)]
    spread = max(undisturbed) - min(undisturbed)
    assert abs(first["best"] - statistics.mean(undisturbed)) <= max(2 * spread, 0.02)


def test_a_site_returns_into_local_steps(tmp_path):
    run, results = trained(tmp_path, "c", mode="localsgd")
    first, *others = results.values()
    assert first["step"] == 32
    for other in others:
        assert (other["digest"], other["step"]) == (first["digest"], first["step"])
    lines = {name: run.lines(name) for name in NAMES}
    assert all(sorted(lines[name]) == list(range(1, 33)) for name in "abd")
    returned = [step for step in lines["c"] if step > 12]
    assert len(returned) > 5, "the site has come back too late to tell"
    for step, line in lines["c"].items():
        for what in ("lr", "epoch", "reduction"):
            assert line[what] == lines["a"][step][what], (step, what)
    agreed = {step: line for step, line in lines["a"].items() if line["agreements"] == line["before"] + 1}
    assert len(agreed) >= 5
    for step, line in agreed.items():
        for name in "bcd":
            other = lines[name].get(step)
            if other is not None and NAMES.index(name) in line["present"]:
                assert (other["digest"], other["present"]) == (line["digest"], line["present"]), (step, name)
    assert [0, 1, 3] in [line["present"] for line in agreed.values()]
    assert lines["a"][32]["present"] == [0, 1, 2, 3]
    for step, loss in results["c"]["evaluations"].items():
        if int(step) > min(returned):
            assert loss == first["evaluations"][step]


def test_training_starts_without_the_first_site(tmp_path):
    with Fleet(
        tmp_path,
        NAMES,
        elastic_transformers.__file__,
        ["transformers.trainer"],
        stops=False,
        begins=[3, 0.2],
        pause=0.15,
    ) as fleet:
        fleet.start("bcd")
        fleet.await_step("b", 1)
        fleet.start("a")
        fleet.end(NAMES)
    results = fleet.results(NAMES)
    assert len({(result["digest"], result["step"]) for result in results}) == 1
    assert [*results[0]["by_site"]] == [f"eval_loss/site {slot} ({name})" for slot, name in enumerate(NAMES)]
    assert len({*results[0]["by_site"].values()}) == 4  # of each site's own data
    assert all(result["by_site"] == results[0]["by_site"] for result in results)
    lines, own = fleet.lines("b"), fleet.lines("a")
    assert [lines[1]["present"], lines[32]["present"]] == [[1, 2, 3], [0, 1, 2, 3]]
    assert len(own) > 5
    for step, line in own.items():
        assert (line["digest"], line["lr"]) == (lines[step]["digest"], lines[step]["lr"])
