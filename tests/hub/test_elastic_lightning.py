"""Lightning over a hub, where sites leave and return: equal replicas, and steps and metrics of the sites present."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import support
import torch
from elastic_data import batch_of, batches_of, net, scores, trained_in_one_process
from elastic_runs import ENDED, Run
from running_hub import RunningHub, add_site, running_hub, until

support.need("pytorch_lightning")

PROGRAM = str(Path(__file__).resolve().parents[1] / "helpers" / "elastic_lightning.py")
LEAVES, MORE = 3, 14  # steps


def sites_of(folder: Path, hub: RunningHub, **settings: object) -> Run:
    return Run(folder, hub, PROGRAM, ["pytorch_lightning"], key="number", **settings)


def steps(run: Run, name: str) -> dict[int, dict]:
    """Return the lines of training, by the number of the batch from 1."""
    return {number + 1: line for number, line in run.lines(name).items()}


def validations(run: Run, name: str) -> dict[int, dict]:
    return {line["validation"]: line for line in run.written(name) if "validation" in line}


def leave_and_return(run: Run, names: str, lost: str) -> None:
    """Train with a site that is killed and comes back, for some more epochs."""
    for name in names:
        run.start(name, leave=LEAVES if name == lost else -1)
    run.end(lost, -9)
    before = len(steps(run, lost))
    run.start(lost)
    until(lambda: len(steps(run, lost)) >= before + MORE or run.processes[lost].poll() is not None, run.state, ENDED)
    run.stop()
    run.end(names)


def agree(run: Run, names: str) -> None:
    """Check that replicas, progress and metrics are the same at all sites, the one that has returned included."""
    first = steps(run, names[0])
    for name in names:
        for step, line in steps(run, name).items():
            for what in ("step", "digest", "epoch", "batch", "lr", "present", "sites"):
                assert line[what] == first[step][what], (name, what, line)
        assert max(steps(run, name)) == max(first)
    results = [json.loads((run.folder / name / "result.json").read_text()) for name in names]
    assert all(result == results[0] for result in results)
    last = max(validations(run, names[0]))
    for name in names:
        assert validations(run, name)[last] == validations(run, names[0])[last]


def test_a_site_that_returns_goes_on_where_the_others_are(tmp_path):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, epochs=10000, pause=0.01)
        leave_and_return(run, "abc", "c")
    agree(run, "abc")
    lines, length = steps(run, "a"), len(batches_of(0))
    assert [*lines] == [*range(1, max(lines) + 1)]
    assert [lines[LEAVES]["present"], lines[LEAVES + 1]["present"]] == [[0, 1, 2], [0, 1]]
    assert lines[max(lines)]["present"] == [0, 1, 2]
    assert {line["sites"] for line in lines.values()} == {"3/3", "2/3"}
    assert [line["batch"] for line in lines.values()] == [step % length for step in range(len(lines))]
    reference = trained_in_one_process({step: (line["batch"], line["present"]) for step, line in lines.items()}, length)
    for step, line in lines.items():
        assert line["weights"] == pytest.approx(reference[step], rel=1e-9), step
    for line in steps(run, "c").values():  # the position in its data, too
        (inputs, _), _ = batch_of(2, line["batch"], length)
        assert line["first"] == float(inputs[0, 0])
    returned = [number for number, line in steps(run, "c").items() if line["loaded"] >= 0]
    assert steps(run, "c")[returned[0]]["loaded"] == returned[0] - 1  # what the module adds to a checkpoint
    assert returned[0] > LEAVES
    model = net()
    model.load_state_dict(torch.load(tmp_path / "c" / "model.pth", weights_only=True))
    loss, accuracy = scores(model, [0, 1, 2])
    tested = json.loads((tmp_path / "c" / "result.json").read_text())["tested"]
    assert [tested["loss"], tested["metric_loss"]] == pytest.approx([loss, loss], rel=1e-6)
    assert tested["accuracy"] == pytest.approx(accuracy)
    checkpoint = torch.load(tmp_path / "a" / "checkpoints" / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == max(lines)
    assert all(state is not None for state in checkpoint["dadplug"])


def test_a_site_that_is_new_in_the_roster_joins_in_the_run(tmp_path):
    with running_hub(tmp_path / "kits", tuple("ab")) as hub:
        run = sites_of(tmp_path, hub, epochs=10000, pause=0.01, mode="rankdad")
        run.start("ab")
        until(lambda: len(steps(run, "a")) > 3, run.state, ENDED)
        add_site(hub, "abc")
        run.start("c")
        until(lambda: len(steps(run, "c")) > MORE, run.state, ENDED)
        run.stop()
        run.end("abc")
    agree(run, "abc")
    lines = steps(run, "a")
    assert [lines[1]["present"], lines[max(lines)]["present"]] == [[0, 1], [0, 1, 2]]


def test_the_first_site_hands_its_duties_on_and_gets_them_back(tmp_path):
    with running_hub(tmp_path / "kits", tuple("ab")) as hub:
        run = sites_of(tmp_path, hub, epochs=10000, pause=0.01, mode="rankdad", accumulate=2, bar=True)
        leave_and_return(run, "ab", "a")
    agree(run, "ba")
    lines = steps(run, "b")
    alone = [number for number, line in lines.items() if line["present"] == [1]]
    assert all(lines[number]["zero"] for number in alone[2:-2])  # rounds between two steps show who is there, too
    assert [lines[1]["zero"], lines[max(lines)]["zero"]] == [False, False]
    assert steps(run, "a")[max(lines)]["zero"]
    output = run.processes["b"].read()[0]
    assert "sites: 1/2" in output or "sites=1/2" in output
    again = run.processes["a"].read()[0]
    assert "sites: 2/2" in again or "sites=2/2" in again


@pytest.mark.parametrize("leave", [3, 8])
def test_a_validation_is_that_of_the_sites_that_are_left(tmp_path, leave):
    with running_hub(tmp_path / "kits", tuple("ab")) as hub:
        run = sites_of(tmp_path, hub, stops=False, epochs=3)
        run.start("a", leave=leave, where="validation")
        run.start("b")
        run.end("a", -9)
        run.end("b")
    assert [*validations(run, "b")] == [0, 1, 2, 3]  # the last one after the fit
    lines, measured = steps(run, "b"), validations(run, "b")[2]["metrics"]
    assert [line["present"] for line in lines.values()] == [[0, 1]] * 12 + [[1]] * 6
    model = net()
    model.load_state_dict(torch.load(tmp_path / "b" / "model.pth", weights_only=True))
    loss, accuracy = scores(model, [1])
    assert [measured["loss"], measured["metric_loss"]] == pytest.approx([loss, loss], rel=1e-6)
    assert measured["accuracy"] == pytest.approx(accuracy)
    second = validations(run, "b")[1]["metrics"]
    assert second["loss"] == pytest.approx(second["metric_loss"], rel=1e-6)  # each over the same sites throughout


class Callback:
    """Stand-in of Lightning's base class."""

    def on_save_checkpoint(self) -> None:
        pass


class Averaging(Callback):
    def on_save_checkpoint(self) -> None:
        pass


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"automatic": False}, "manual optimization"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"_val_check_time_interval": 60.0}, "by its own clock"),
        ({"callbacks": [Callback(), Averaging()]}, "state of Averaging"),
    ],
)
def test_what_a_site_cannot_return_into_is_refused(settings, reason):
    from dadplug.runners._lightning.elastic import ElasticFit

    automatic = settings.pop("automatic", True)
    module = SimpleNamespace(automatic_optimization=automatic, training_step=lambda batch: None)
    usual = {"callbacks": [Callback()], "reload_dataloaders_every_n_epochs": 0}
    fit = ElasticFit(SimpleNamespace(lightning_module=module), SimpleNamespace(**(usual | settings)), None)
    with pytest.raises(ValueError, match=f"{reason}.*leave min_sites out"):
        fit.begin(None, fits=True)
