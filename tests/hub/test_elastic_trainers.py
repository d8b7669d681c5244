"""Trainers over a hub, where sites leave and return: equal replicas, and steps and metrics of the sites present."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import elastic_catalyst
import elastic_data
import pytest
import support
import torch
from elastic_catalyst import BATCH, train_data, valid_data
from elastic_catalyst import net as catalyst_net
from elastic_data import batch_of, batches_of, net, scores, trained_in_one_process
from fleet import ENDED, Fleet, MortalHub

from dadplug.errors import MismatchError

support.need("pytorch_lightning")

PROGRAM = str(Path(__file__).resolve().parents[1] / "helpers" / "elastic_lightning.py")
LEAVES, MORE = 3, 14  # steps


def sites_of(folder: Path, hub: Any, **settings: object) -> Fleet:
    return Fleet(folder, hub, PROGRAM, ["pytorch_lightning"], key="number", **settings)


def steps(fleet: Fleet, name: str) -> dict[int, dict]:
    """Return the lines of training, by the number of the batch from 1."""
    return {number + 1: line for number, line in fleet.lines(name).items()}


def validations(fleet: Fleet, name: str) -> dict[int, dict]:
    return {line["validation"]: line for line in fleet.written(name, "validation")}


def leave_and_return(fleet: Fleet, names: str, lost: str, leave: int = LEAVES) -> None:
    """Train with a site that is killed and comes back, for some more epochs."""
    for name in names:
        fleet.start(name, leave=leave if name == lost else -1)
    fleet.end(lost, -9)
    fleet.restart(lost, MORE)
    fleet.stop(name=lost)
    fleet.end(names)


def agree(fleet: Fleet, names: str) -> None:
    """Check that replicas, progress and metrics are the same at all sites, the one that has returned included."""
    first = steps(fleet, names[0])
    for name in names:
        for step, line in steps(fleet, name).items():
            for what in ("step", "digest", "epoch", "batch", "lr", "present", "sites"):
                assert line[what] == first[step][what], (name, what, line)
        assert max(steps(fleet, name)) == max(first)
    results = fleet.results(names)
    assert all(result == results[0] for result in results)
    last = max(validations(fleet, names[0]))
    for name in names:
        assert validations(fleet, name)[last] == validations(fleet, names[0])[last]


def test_a_site_that_returns_goes_on_where_the_others_are(tmp_path):
    with sites_of(tmp_path, "abc", epochs=10000, pause=0.03) as fleet:
        leave_and_return(fleet, "abc", "c")
    agree(fleet, "abc")
    lines, length = steps(fleet, "a"), len(batches_of(0))
    assert [*lines] == [*range(1, max(lines) + 1)]
    assert [lines[LEAVES]["present"], lines[LEAVES + 1]["present"]] == [[0, 1, 2], [0, 1]]
    assert lines[max(lines)]["present"] == [0, 1, 2]
    assert {line["sites"] for line in lines.values()} == {"3/3", "2/3"}
    assert [line["batch"] for line in lines.values()] == [step % length for step in range(len(lines))]
    reference = trained_in_one_process({step: (line["batch"], line["present"]) for step, line in lines.items()}, length)
    for step, line in lines.items():
        assert line["weights"] == pytest.approx(reference[step], rel=1e-9), step
    for line in steps(fleet, "c").values():  # the position in its data, too
        (inputs, _), _ = batch_of(2, line["batch"], length)
        assert line["first"] == float(inputs[0, 0])
    returned = [number for number, line in steps(fleet, "c").items() if line["loaded"] >= 0]
    assert steps(fleet, "c")[returned[0]]["loaded"] == returned[0] - 1  # what the module adds to a checkpoint
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


def test_the_first_site_hands_its_duties_on_and_gets_them_back(tmp_path):
    with sites_of(tmp_path, "ab", epochs=10000, pause=0.03, mode="rankdad", accumulate=2, bar=True) as fleet:
        leave_and_return(fleet, "ab", "a")
    agree(fleet, "ba")
    lines = steps(fleet, "b")
    alone = [number for number, line in lines.items() if line["present"] == [1]]
    assert all(lines[number]["zero"] for number in alone[2:-2])  # rounds between two steps show who is there, too
    assert [lines[1]["zero"], lines[max(lines)]["zero"]] == [False, False]
    assert steps(fleet, "a")[max(lines)]["zero"]
    output = fleet.processes["b"].read()[0]
    assert "sites: 1/2" in output or "sites=1/2" in output
    again = fleet.processes["a"].read()[0]
    assert "sites: 2/2" in again or "sites=2/2" in again


@pytest.mark.parametrize(
    "lie",
    [
        {"dirpath": None, "best_model_path": "/elsewhere/kept.ckpt"},
        {"dirpath": "/elsewhere", "best_k_models": {"/elsewhere/kept": 9.0}},
        {"dirpath": "/elsewhere", "last_model_path": "/elsewhere/../kept.ckpt"},
        {"kth_best_model_path": "/elsewhere/kept.ckpt"},
    ],
    ids=["no folder", "no checkpoint", "outside", "another folder"],
)
def test_a_state_of_another_site_names_no_file_that_lightning_removes(tmp_path, lie):
    from dadplug.runners._lightning.elastic import ElasticFit
    from pytorch_lightning.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(dirpath=tmp_path)
    state = {name: value for name, value in (callback.state_dict() | lie).items() if value is not None}
    fit = ElasticFit(None, SimpleNamespace(callbacks=[callback]), None)
    fit._parts, fit.joined = dict, {"parts": {}, "callbacks": {callback.state_key: state}}
    with pytest.raises(MismatchError, match=r"another site has sent a state of .* with the file '/elsewhere/"):
        fit.restore(None)
    assert not callback.best_model_path
    assert Path(callback.dirpath) == tmp_path


def test_states_of_trainers_are_checked_by_the_types_of_their_entries():
    from dadplug.runners._catalyst.runner import ElasticTraining
    from dadplug.runners._lightning.elastic import ElasticFit
    from dadplug.runners.site_trainer import TrainingState

    transport = SimpleNamespace(rounds=SimpleNamespace(place=1))
    trainer = SimpleNamespace(trainings=1, reduction=None)
    for state in (ElasticFit(None, trainer, transport), ElasticTraining(trainer, transport), TrainingState(trainer)):
        with pytest.raises(MismatchError, match="another site has sent an invalid state of its trainer"):
            state.load_state_dict({"place": 1, "parts": {}, **dict.fromkeys(state._kinds, b"x")})
        assert state.joined is None


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


def test_a_site_whose_loader_has_no_length_ends_alone():
    from dadplug.runners._lightning.elastic import ElasticFit

    lengths = {0: 3, 1: 0, 2: 5}
    transport = SimpleNamespace(gather_present=lambda own: lengths | {0: own}, sites="abc")
    fit = ElasticFit(None, None, transport)
    assert fit.compare_lengths(range(3)) == (3, 5)
    with pytest.raises(ValueError, match="known length"):
        ElasticFit(None, None, transport).compare_lengths(iter(()))


# Catalyst's runner over a hub, where sites leave: equal replicas, steps and metrics of the sites that are present


support.need("catalyst")


def catalyst_sites_of(folder: Path, hub: Any, **settings: object) -> Fleet:
    return Fleet(folder, hub, elastic_catalyst.__file__, ["catalyst"], key="number", **settings)


def trained(folder: Path, names: str, lost: str, **fields: object) -> dict[str, dict]:
    """Train with a site that is killed; return what the others have written, by name."""
    others = names.replace(lost, "")
    with catalyst_sites_of(folder, names, stops=False) as fleet:
        fleet.start(others)
        fleet.start(lost, **fields)
        fleet.end(lost, -9)
        fleet.end(others)
    return dict(zip(others, fleet.results(others)))


def steps_of(slots: list[int]) -> int:
    return max(-(-len(train_data(slot)) // BATCH) for slot in slots)


def catalyst_scores(model: torch.nn.Module, slots: list[int]) -> tuple[float, float]:
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
    model = catalyst_net()
    model.load_state_dict(torch.load(tmp_path / names[here[0]] / "model.pth", weights_only=True))
    loss, accuracy = catalyst_scores(model, here)
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
def test_a_site_that_returns_to_catalyst_goes_on_where_the_others_are(tmp_path, names, lost, needed):
    with catalyst_sites_of(tmp_path, names, epochs=10000, returns=True, mode="dsgd", min_sites=needed) as fleet:
        for name in names:
            fleet.start(name, bar=name == names[0], leave=9 if name == lost else -1)
        fleet.end(lost, -9)
        if needed == len(names):
            fleet.hub.await_line(f"paused: 2 sites are needed and 1 is connected: waiting for {lost}", ENDED)
        fleet.restart(lost, 11, bar=True)
        fleet.stop(name=lost)
        fleet.end(names)
    here = [slot for slot, name in enumerate(names) if name != lost]
    other = names[here[0]]
    found, own = fleet.lines(other), fleet.lines(lost)
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
    assert f"sites={len(names)}/{len(names)}" in fleet.printed("a")
    results = fleet.results(names)
    assert all(result["digest"] == results[0]["digest"] for result in results)
    assert all(result["epochs"][-1]["metrics"] == results[0]["epochs"][-1]["metrics"] for result in results)
    assert results[0]["epochs"][-1]["metrics"]["train"]["sites"] == len(names)
    valid = results[0]["epochs"][-1]["metrics"]["valid"]
    own = [valid[f"loss/site {slot} ({name})"] for slot, name in enumerate(names)]
    assert min(own) < valid["loss"] < max(own)  # pooled, beside each site's


def test_a_state_of_another_site_sets_no_other_attribute_of_a_runner():
    from dadplug.runners._catalyst.runner import ElasticTraining

    runner = SimpleNamespace(loaders={}, epoch_step=0)
    training = ElasticTraining(runner, None)
    training._parts = dict
    counters = {"batch_step": 1, "sample_step": 2, "num_epochs": 10**9}
    training.joined = {"parts": {}, "counters": counters, "epoch": 3}
    training.restore()
    assert vars(runner).keys() == {"loaders", "epoch_step", "batch_step", "sample_step"}
    training.joined = {"parts": {}, "counters": []}
    with pytest.raises(MismatchError, match="another site has sent a state of 'training' that cannot be loaded here"):
        training.restore()


# Local steps in trainers over a hub


TRAINERS = {
    "lightning": ("pytorch_lightning", PROGRAM, {}),
    "catalyst": ("catalyst", elastic_catalyst.__file__, {"returns": True}),
}


def trainers_of(trainer: str, folder: Path, hub: Any, **settings: object) -> Fleet:
    package, program, fields = TRAINERS[trainer]
    support.need(package)
    return Fleet(folder, hub, program, [package], key="number", **fields, **settings)


def agree_after_rounds(lines: dict[str, dict[int, dict]]) -> list[list[int]]:
    """Check that sites that take part in an agreement are equal after it; return who did, by agreement."""
    ended: dict[int, tuple[str, list[int]]] = {}
    for own in lines.values():
        for line in own.values():
            if line["agreements"] == line["before"] + 1:
                found = line["digest"], line["present"]
                if ended.setdefault(line["agreements"], found) != found:  # of a site that has joined in it
                    assert own is lines["c"]
                    assert 2 not in line["present"]
    assert len(ended) >= 3
    return [ended[number][1] for number in sorted(ended)]


def results_at_the_end(fleet: Fleet, names: str) -> list[dict]:
    """Return the results of sites without the epochs in which one of them was away."""
    return [
        each | ({"epochs": each["epochs"][-1]["metrics"]} if "epochs" in each else {}) for each in fleet.results(names)
    ]


@pytest.mark.parametrize(("trainer", "overlap"), [("catalyst", False), ("lightning", False), ("lightning", True)])
def test_local_steps_go_on_and_a_site_returns(tmp_path, trainer, overlap):
    settings = {"pause": 0.03} if trainer == "lightning" else {}
    with trainers_of(trainer, tmp_path, "abc", epochs=10000, every=4, overlap=overlap, **settings) as fleet:
        leave_and_return(fleet, "abc", "c", 9)
    lines = {name: fleet.lines(name) for name in "abc"}
    for number, line in lines["c"].items():
        for what in ("epoch", "batch", "lr"):
            assert line[what] == lines["a"][number][what], (what, line)
        (inputs, _), _ = batch_of(2, line["batch"], len(batches_of(0)))  # the position in its data, too
        assert line["first"] == float(inputs[0, 0])
    if not overlap:  # with it, each site has steps beside the agreed model
        present = agree_after_rounds(lines)
        assert [0, 1] in present
        assert present[-1] == [0, 1, 2]
    results = results_at_the_end(fleet, "abc")
    assert all(result == results[0] for result in results)


# Trainers over a hub that is killed and started again, with a late site, and one that the hub gives up


KNOWN = 8  # steps after which the hub knows how long one takes


@pytest.mark.parametrize("trainer", [*TRAINERS])
def test_a_trainer_goes_on_after_each_interruption(tmp_path, trainer):
    hub = MortalHub(tmp_path, "ab")
    settings = {"mode": "dad", "epochs": 10000, "late": "skip", "site_timeout": 3.0}
    with trainers_of(trainer, tmp_path, hub, **settings) as fleet:
        fleet.start("a")
        fleet.start("b", hold=str(tmp_path / "hold"))
        fleet.await_step("a", 4)
        hub.restart()
        hub.await_line("the run that began before the restart goes on", ENDED)
        fleet.await_step("a", max(fleet.lines("a")) + KNOWN)
        (tmp_path / "hold").touch()
        hub.await_line("b is late: training goes on without it", ENDED)
        (tmp_path / "hold").unlink()
        hub.await_line("b takes part again", ENDED)
        fleet.await_more("b", 4)
        fleet.freeze("b")
        hub.await_line("b has left: silent for 3 s", ENDED)
        fleet.thaw("b")
        errors = fleet.end("b", 1)
        assert "SiteError" in errors
        assert "has given this site up" in errors
        assert "start its program again, and it joins the others" in errors
        before = max(fleet.lines("b"))
        fleet.start("b")
        fleet.await_step("b", before + 1)
        fleet.await_step(
            "b", max(fleet.lines("b")) + 10
        )  # the other has gone on meanwhile, and b's first steps may be late
        (tmp_path / "stop").touch()
        fleet.end("ab")
    first, other = fleet.lines("a"), fleet.lines("b")
    common = first.keys() & other.keys()
    assert max(first) == max(other)
    assert all(first[number]["digest"] == other[number]["digest"] for number in common)
    assert [0] in [first[number]["present"] for number in common]  # missed by b
    assert [0, 1] in [
        first[number]["present"] for number in common if number > before
    ]  # in the last step it may be late
