"""Catalyst's runner over a hub, where sites leave: equal replicas, steps and metrics of the sites that are present."""

from __future__ import annotations

import json
from pathlib import Path

import elastic_data
import pytest
import support
import torch
from elastic_runs import ENDED, Run
from running_hub import RunningHub, running_hub, until

support.need("catalyst")

import elastic_catalyst  # noqa: E402
from elastic_catalyst import BATCH, net, train_data, valid_data  # noqa: E402


def sites_of(folder: Path, hub: RunningHub, **settings: object) -> Run:
    return Run(folder, hub, elastic_catalyst.__file__, ["catalyst"], key="number", **settings)


def trained(folder: Path, names: str, lost: str, **fields: object) -> dict[str, dict]:
    """Train with a site that is killed; return what the others have written, by name."""
    others = names.replace(lost, "")
    with running_hub(folder / "kits", tuple(names)) as hub:
        run = sites_of(folder, hub, stops=False)
        run.start(others)
        run.start(lost, **fields)
        run.end(lost, -9)
        run.end(others)
    return {name: json.loads((folder / name / "result.json").read_text()) for name in others}


def steps_of(slots: list[int]) -> int:
    return max(-(-len(train_data(slot)) // BATCH) for slot in slots)


def scores(model: torch.nn.Module, slots: list[int]) -> tuple[float, float]:
    """Return loss and accuracy over the validation data of some sites together."""
    inputs = torch.cat([valid_data(slot).tensors[0] for slot in slots])
    targets = torch.cat([valid_data(slot).tensors[1] for slot in slots])
    with torch.no_grad():
        outputs = model(inputs)
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    return float(loss), float((outputs.argmax(1) == targets).float().mean())


@pytest.mark.parametrize(
    ("names", "lost", "fields"),
    [
        ("abc", "c", {"leave": 2}),
        ("abc", "a", {"leave": 3, "ended": True}),
        ("ab", "b", {"leave": 0, "where": "other"}),
        ("abc", "a", {"leave": 2, "where": "other"}),
        ("abc", "b", {"leave": 4, "where": "other", "ended": True}),
        ("abc", "c", {"leave": 6, "where": "other"}),
        ("abc", "c", {"leave": 9, "where": "other"}),  # between the two gathers of the area under the curve
        ("abc", "a", {"leave": 10, "where": "other"}),
    ],
)
def test_the_others_go_on_and_measure_what_they_have(tmp_path, names, lost, fields):
    results = trained(tmp_path, names, lost, **fields)
    here = [slot for slot, name in enumerate(names) if name != lost]
    first, *others = results.values()
    for other in others:
        assert other["digest"] == first["digest"]
        for mine, theirs in zip(first["epochs"], other["epochs"], strict=True):
            assert mine["digest"] == theirs["digest"]
            assert mine["metrics"] == theirs["metrics"]
            assert mine["step"] == theirs["step"]
            assert mine["present"] == theirs["present"]
    epochs = first["epochs"]
    everyone = list(range(len(names)))
    assert [epochs[0]["present"], epochs[2]["present"]] == [everyone, here]
    assert epochs[0]["step"] == steps_of(everyone)
    assert epochs[1]["step"] - epochs[0]["step"] in (steps_of(everyone), steps_of(here))
    assert epochs[2]["step"] - epochs[1]["step"] == steps_of(here)
    model = net()
    model.load_state_dict(torch.load(tmp_path / names[here[0]] / "model.pth", weights_only=True))
    loss, accuracy = scores(model, here)
    measured = epochs[2]["metrics"]["valid"]
    assert measured["loss"] == pytest.approx(loss, rel=1e-5)
    assert measured["accuracy01"] == pytest.approx(accuracy)
    assert [result["epochs"][2]["main"] for result in results.values()] == [True] + [False] * len(others)
    checkpoint = torch.load(
        tmp_path / names[here[0]] / "checkpoints" / "runner.last.pth", weights_only=True, map_location="cpu"
    )
    assert checkpoint["epoch_step"] == 3
    assert [state is not None for state in checkpoint["dadplug"]] == [slot in here for slot in everyone]


@pytest.mark.parametrize(("names", "lost", "needed"), [("abc", "c", 1), ("ab", "a", 2)])
def test_a_site_that_returns_goes_on_where_the_others_are(tmp_path, names, lost, needed):
    with running_hub(tmp_path / "kits", tuple(names)) as hub:
        run = sites_of(tmp_path, hub, epochs=10000, returns=True, mode="dsgd", min_sites=needed)
        for name in names:
            run.start(name, bar=name == names[0], leave=9 if name == lost else -1)
        run.end(lost, -9)
        if needed == len(names):
            hub.await_line(f"paused: 2 sites are needed and 1 is connected: waiting for {lost}", ENDED)
        before = len(run.lines(lost))
        run.start(lost, bar=True)
        until(lambda: len(run.lines(lost)) > before + 10 or run.processes[lost].poll(), run.state, ENDED)
        run.stop(name=lost)
        run.end(names)
    here = [slot for slot, name in enumerate(names) if name != lost]
    other = names[here[0]]
    found, own = run.lines(other), run.lines(lost)
    assert max(found) == max(own)
    common = own.keys() & found.keys()  # not the steps in which a site has no batch
    assert len([number for number in common if number > 9]) > 5
    for number, line in own.items():
        for what in ("digest", "epoch", "batch", "lr", "present") if number in common else ():
            assert line[what] == found[number][what], (what, line)
        (inputs, _), _ = elastic_data.batch_of(names.index(lost), line["batch"], 6)
        assert line["first"] == float(inputs[0, 0])
    present = {number: line["present"] for number, line in found.items()}
    if needed < len(names):
        assert present[10] == here
    assert present[max(present)] == [*range(len(names))]
    if other == "a":  # has a batch in every step
        steps = {number: (line["batch"], line["present"]) for number, line in found.items()}
        reference = elastic_data.trained_in_one_process(steps, 6, every=6)
        for number, line in found.items():
            assert line["weights"] == pytest.approx(reference[number], rel=1e-9), number
    assert f"sites={len(names)}/{len(names)}" in run.processes["a"].read()[1]
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in names]
    assert all(result["digest"] == results[0]["digest"] for result in results)
    assert all(result["epochs"][-1]["metrics"] == results[0]["epochs"][-1]["metrics"] for result in results)
    assert results[0]["epochs"][-1]["metrics"]["train"]["sites"] == len(names)
