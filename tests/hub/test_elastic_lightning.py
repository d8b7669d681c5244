"""Lightning over a hub, where sites leave and return: equal replicas, and steps and metrics of the sites present."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import forkserver
import pytest
import support
import torch
from elastic_data import batch_of, batches_of, net, scores, trained_in_one_process
from json_lines import read_lines
from running_hub import RunningHub, add_site, running_hub, until

support.need("pytorch_lightning")

PROGRAM = str(Path(__file__).resolve().parents[1] / "helpers" / "elastic_lightning.py")
ENDED = 200.0  # seconds for a process, on a busy machine
LEAVES, MORE = 3, 14  # steps


class Run:
    """Processes of sites, and what they have written."""

    def __init__(self, folder: Path, hub: RunningHub, **settings: object) -> None:
        self.folder, self.hub, self.settings = folder, hub, settings
        self.stop = folder / "stop"
        self.processes: dict[str, forkserver.Program] = {}

    def start(self, name: str, **fields: object) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        case = {"kit": str(self.hub.kits / name), "folder": str(self.folder / name), "stop": str(self.stop)}
        arguments = [PROGRAM, json.dumps(case | self.settings | fields)]
        preload = ["pytorch_lightning"]
        self.processes[name] = forkserver.start(arguments, os.environ | support.ONE_THREAD, preload=preload)

    def end(self, name: str, status: int = 0) -> None:
        assert self.processes[name].wait(ENDED) == status, self.processes[name].read()

    def written(self, name: str) -> list[dict]:
        return read_lines(self.folder / name / "log.jsonl")

    def steps(self, name: str) -> dict[int, dict]:
        """Return the lines of training, by the number of the batch from 1."""
        return {line["number"] + 1: line for line in self.written(name) if "step" in line}

    def validations(self, name: str) -> dict[int, dict]:
        return {line["validation"]: line for line in self.written(name) if "validation" in line}

    def leave_and_return(self, names: str, lost: str) -> None:
        """Train with a site that is killed and comes back, for some more epochs."""
        for name in names:
            self.start(name, **({"leave": LEAVES} if name == lost else {}))
        self.end(lost, -9)
        self.start(lost)
        end = time.monotonic() + ENDED
        before = len(self.steps(lost))
        while len(self.steps(lost)) < before + MORE:
            assert self.processes[lost].poll() is None, self.processes[lost].read()
            assert time.monotonic() < end, self.hub.log
            time.sleep(0.05)
        self.stop.touch()
        for name in names:
            self.end(name)


def agree(run: Run, names: str) -> None:
    """Check that replicas, progress and metrics are the same at all sites, the one that has returned included."""
    first = run.steps(names[0])
    for name in names:
        for step, line in run.steps(name).items():
            for what in ("step", "digest", "epoch", "batch", "lr", "present", "sites"):
                assert line[what] == first[step][what], (name, what, line)
        assert max(run.steps(name)) == max(first)
    results = [json.loads((run.folder / name / "result.json").read_text()) for name in names]
    assert all(result == results[0] for result in results)
    last = max(run.validations(names[0]))
    for name in names:
        assert run.validations(name)[last] == run.validations(names[0])[last]


def test_a_site_that_returns_goes_on_where_the_others_are(tmp_path):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = Run(tmp_path, hub, epochs=10000, pause=0.01)
        run.leave_and_return("abc", "c")
    agree(run, "abc")
    lines, length = run.steps("a"), len(batches_of(0))
    assert [*lines] == [*range(1, max(lines) + 1)]
    assert [lines[LEAVES]["present"], lines[LEAVES + 1]["present"]] == [[0, 1, 2], [0, 1]]
    assert lines[max(lines)]["present"] == [0, 1, 2]
    assert {line["sites"] for line in lines.values()} == {"3/3", "2/3"}
    assert [line["batch"] for line in lines.values()] == [step % length for step in range(len(lines))]
    reference = trained_in_one_process({step: (line["batch"], line["present"]) for step, line in lines.items()}, length)
    for step, line in lines.items():
        assert line["weights"] == pytest.approx(reference[step], rel=1e-9), step
    for line in run.steps("c").values():  # the position in its data, too
        (inputs, _), _ = batch_of(2, line["batch"], length)
        assert line["first"] == float(inputs[0, 0])
    returned = [number for number, line in run.steps("c").items() if line["loaded"] >= 0]
    assert run.steps("c")[returned[0]]["loaded"] == returned[0] - 1  # what the module adds to a checkpoint
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
        run = Run(tmp_path, hub, epochs=10000, pause=0.01, mode="rankdad")
        for name in "ab":
            run.start(name)
        until(lambda: len(run.steps("a")) > 3, lambda: hub.log, ENDED)
        add_site(hub, "abc")
        run.start("c")
        until(lambda: len(run.steps("c")) > MORE, lambda: hub.log, ENDED)
        run.stop.touch()
        for name in "abc":
            run.end(name)
    agree(run, "abc")
    lines = run.steps("a")
    assert [lines[1]["present"], lines[max(lines)]["present"]] == [[0, 1], [0, 1, 2]]


def test_the_first_site_hands_its_duties_on_and_gets_them_back(tmp_path):
    with running_hub(tmp_path / "kits", tuple("ab")) as hub:
        run = Run(tmp_path, hub, epochs=10000, pause=0.01, mode="rankdad", accumulate=2, bar=True)
        run.leave_and_return("ab", "a")
    agree(run, "ba")
    lines = run.steps("b")
    alone = [number for number, line in lines.items() if line["present"] == [1]]
    assert all(lines[number]["zero"] for number in alone[2:-2])  # rounds between two steps show who is there, too
    assert [lines[1]["zero"], lines[max(lines)]["zero"]] == [False, False]
    assert run.steps("a")[max(lines)]["zero"]
    output = run.processes["b"].read()[0]
    assert "sites: 1/2" in output or "sites=1/2" in output
    again = run.processes["a"].read()[0]
    assert "sites: 2/2" in again or "sites=2/2" in again


@pytest.mark.parametrize("leave", [3, 8])
def test_a_validation_is_that_of_the_sites_that_are_left(tmp_path, leave):
    with running_hub(tmp_path / "kits", tuple("ab")) as hub:
        run = Run(tmp_path, hub, epochs=3)
        run.start("a", leave=leave, where="validation")
        run.start("b")
        run.end("a", -9)
        run.end("b")
    assert [*run.validations("b")] == [0, 1, 2, 3]  # the last one after the fit
    lines, measured = run.steps("b"), run.validations("b")[2]["metrics"]
    assert [line["present"] for line in lines.values()] == [[0, 1]] * 12 + [[1]] * 6
    model = net()
    model.load_state_dict(torch.load(tmp_path / "b" / "model.pth", weights_only=True))
    loss, accuracy = scores(model, [1])
    assert [measured["loss"], measured["metric_loss"]] == pytest.approx([loss, loss], rel=1e-6)
    assert measured["accuracy"] == pytest.approx(accuracy)
    second = run.validations("b")[1]["metrics"]
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
