"""Sites that are killed in a trainer with a parameter server, and return in the midst of an epoch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import forkserver
import pytest
import support
from json_lines import read_lines
from returning_steps import BATCH, EPOCHS, LOST, SAMPLES, Case
from running_hub import running_hub

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
ENDED = 170.0  # seconds for a process, on a busy machine


def start(trainer: str, case: Case) -> forkserver.Program:
    support.need({"lightning": "pytorch_lightning"}.get(trainer, trainer))
    arguments = [str(HELPERS / f"returning_{trainer}.py"), json.dumps(vars(case))]
    preload = [{"lightning": "pytorch_lightning"}.get(trainer, trainer)]
    return forkserver.start(arguments, os.environ | support.ONE_THREAD, preload=preload)


def end(process: forkserver.Program, status: int = 0) -> None:
    assert process.wait(ENDED) == status, process.read()


def train(folder: Path, trainer: str, deal: str, kits: Path | None, lost: int = LOST) -> dict[str, list[dict]]:
    """Train with a site that is killed and comes back; return what the processes have written."""
    url = f"tcp://127.0.0.1:{support.free_port()}"
    places = [{"url": url} if kits is None else {"kit": str(kits / name)} for name in "abc"]
    cases = [Case(str(folder), rank, str(rank), deal=deal, lost=lost, **place) for rank, place in enumerate(places)]
    processes = [start(trainer, case) for case in cases]
    end(processes[lost], -9)
    assert Path(cases[lost].returns).exists()
    back = start(trainer, Case(str(folder), lost, "back", deal=deal, lost=lost, **places[lost]))
    for process in (*processes[:lost], *processes[lost + 1 :], back):
        end(process)
    assert not any(Path(case.returns).exists() for case in cases)
    return {name: read_lines(folder / f"{name}.jsonl") for name in ("0", "1", "2", "back")}


def check(lines: dict[str, list[dict]], deal: str, lost: int = LOST) -> None:
    """Check that replicas and metrics are equal, and that each contribution is committed once."""
    validations = {name: [each for each in lines[name] if "validation" in each] for name in lines}
    one, other = (str(rank) for rank in range(3) if rank != lost)
    assert [each["validation"] for each in validations[one]] == [*range(EPOCHS)]
    assert validations[other] == validations[one]
    assert validations["back"] == validations[one][1:]  # it has returned in the second epoch
    assert validations[one][0] == validations[str(lost)][0]
    assert [each["present"] for each in validations[one]] == [[0, 1, 2]] * EPOCHS
    logs = {name: [each for each in lines[name] if "commit" in each] for name in lines}
    assert logs[other] == logs[one]
    assert logs["back"] == logs[one][-len(logs["back"]) :]
    committed = [(each["site"], each["number"]) for each in logs[one]]
    steps = {name: [each for each in lines[name] if "ids" in each] for name in lines}
    numbers = sorted(number for site, number in committed if site == lost)
    assert numbers == [*range(len(numbers))]  # each once, over both processes
    assert len(set(committed)) == len(committed)
    sent = len(numbers) - len(steps["back"])  # of the process that was killed
    assert 0 < sent <= len(steps[str(lost)])
    used = steps[one] + steps[other] + steps[str(lost)][:sent] + steps["back"]
    assert len(used) == len(committed)
    first = steps["back"][0]
    assert first["epoch"] == 1
    if deal == "shared":
        for epoch in range(EPOCHS):
            ids = [index for step in used if step["epoch"] == epoch for index in step["ids"]]
            assert sorted(ids) == [*range(SAMPLES)]
    else:
        begun = 32 * lost + first["batch"] * BATCH
        assert first["ids"] == [*range(begun, begun + BATCH)]
        last = [step["ids"] for step in steps["back"] if step["epoch"] == 2]
        assert last == [[*range(at, at + BATCH)] for at in range(32 * lost, 32 * lost + 32, BATCH)]


def test_where_no_site_can_return_it_is_an_error(tmp_path, monkeypatch):
    from dadplug.runners import return_file

    server = SimpleNamespace(return_address="", detach=lambda: None)
    monkeypatch.setattr(return_file, "ParameterServer", lambda *_, **__: server)
    path = tmp_path / "address"
    with pytest.raises(ValueError, match=r"where messages are sealed.*leave return_file out"):
        return_file.ReturnFile(path).build(SimpleNamespace(world_size=2), None)
    assert return_file.ReturnFile(path).build(SimpleNamespace(world_size=1), None) is server  # that trains alone
    assert not path.exists()
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a file of return_file="):
        return_file.ReturnFile(path)


def test_without_site_0_the_others_name_it_and_start_anew(tmp_path):
    """The trainer is Catalyst; its strategy for Lightning uses the same file and log."""
    place = {"deal": "own", "url": f"tcp://127.0.0.1:{support.free_port()}", "ends": True}
    cases = [Case(str(tmp_path), rank, str(rank), **place) for rank in range(3)]
    processes = [start("catalyst", case) for case in cases]
    end(processes[0], -9)
    for process in processes[1:]:
        end(process, 1)
        assert "SiteError: site 0" in (errors := process.read()[1])
        assert "it has the sequencer, without which training cannot go on" in errors
    again = start("catalyst", cases[1])
    end(again, 1)
    assert "cannot be reached, it may have ended" in again.read()[1]
    assert [Path(case.returns).exists() for case in cases] == [True, False, True]


@pytest.mark.parametrize(
    ("trainer", "deal", "hub", "lost"),
    [
        ("lightning", "shared", False, 2),
        ("lightning", "own", True, 0),
        ("catalyst", "shared", True, 0),
        ("catalyst", "own", False, 2),
    ],
)
def test_a_site_returns_into_the_midst_of_an_epoch(tmp_path, trainer, deal, hub, lost):
    if not hub:
        check(train(tmp_path, trainer, deal, None, lost), deal, lost)
        return
    with running_hub(tmp_path / "kits", tuple("abc")) as running:
        check(train(tmp_path, trainer, deal, running.kits, lost), deal, lost)
