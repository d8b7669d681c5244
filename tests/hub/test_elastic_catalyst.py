"""Catalyst's runner over a hub, where sites leave: equal replicas, steps and metrics of the sites that are present."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forkserver
import pytest
import support
import torch
from running_hub import RunningHub, running_hub

support.need("catalyst")

from elastic_catalyst import BATCH, Case, net, train_data, valid_data  # noqa: E402

ENDED = 200.0  # seconds for a process, on a busy machine


def start(folder: Path, hub: RunningHub, name: str, **fields: object) -> forkserver.Program:
    own = folder / name
    own.mkdir(exist_ok=True)
    case = Case(str(hub.kits / name), str(own), **fields)  # type: ignore[arg-type]
    return forkserver.start(case.start(), os.environ | support.ONE_THREAD, preload=["catalyst"])


def end(process: forkserver.Program, status: int = 0) -> str:
    assert process.wait(ENDED) == status, process.read()
    return process.read()[1]


def trained(folder: Path, names: str, lost: str, **fields: object) -> dict[str, dict]:
    """Train with a site that is killed; return what the others have written, by name."""
    with running_hub(folder / "kits", tuple(names)) as hub:
        settings = [fields if name == lost else {} for name in names]
        processes = {name: start(folder, hub, name, **each) for name, each in zip(names, settings, strict=True)}
        for name, process in processes.items():
            end(process, -9 if name == lost else 0)
    return {name: json.loads((folder / name / "result.json").read_text()) for name in names if name != lost}


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


def test_below_min_sites_training_ends_with_the_reason(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        first = start(tmp_path, hub, "a", min_sites=2)
        end(start(tmp_path, hub, "b", min_sites=2, leave=2), -9)
        assert "training cannot go on: 2 sites are needed and 1 is here: waiting for b" in end(first, 1)


def test_a_site_that_returns_is_refused_and_the_others_go_on(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        first = start(tmp_path, hub, "a", epochs=40)
        end(start(tmp_path, hub, "b", epochs=40, leave=2), -9)
        hub.await_line("b has left")
        assert "Catalyst's runner cannot join them" in end(start(tmp_path, hub, "b", epochs=40), 1)
        end(first)
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert len(result["epochs"]) == 40
    assert result["epochs"][39]["present"] == [0]
