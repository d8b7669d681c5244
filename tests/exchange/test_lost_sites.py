"""Whichever site is killed or stopped, wherever it is: all others get a SiteError that names it, and end."""

import dataclasses
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forkserver
import lost_sites
import pytest
import support
import torch
from lost_sites import Case
from torch import nn

import dadplug

pytestmark = pytest.mark.slow

TIMEOUT = 3.0  # seconds
HANGS = 60.0  # seconds after which a site is said to hang; a busy machine is slow
SIDE_BY_SIDE = 6
NODES = [[0, 1], [2, 3]]

starting = threading.Lock()


def start(case: Case, rank: int, port: int, folder: Path, spared: bool = False) -> forkserver.Program:
    arguments = [json.dumps(dataclasses.asdict(case)), str(rank), str(port), str(folder), str(spared)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole = rank == 0 and case.victim == 1  # wherever it is lost, one survivor ends as users' programs do
    with starting:
        return forkserver.start([lost_sites.__file__, *arguments], environment, destructors=whole)


def run(case: Case, folder: Path, again: bool = False) -> list[dict]:
    """Run a case; return what its sites wrote, those of the victim left out.

    Args:
        case: the case.
        folder: where they write it.
        again: start the victim again once it has been hit. The last site starts then, too, so that the roll call cannot
            be complete with a victim that answers and is hit at once.
    """
    folder.mkdir()
    port = support.free_port()
    late = case.world_size - 1 if again else None
    programs = {rank: start(case, rank, port, folder) for rank in range(case.world_size) if rank != late}
    victim = programs[case.victim]
    try:
        survivors = [rank for rank in programs if rank != case.victim]
        deadline = time.monotonic() + HANGS
        while any(programs[rank].poll() is None for rank in survivors) and time.monotonic() < deadline:
            time.sleep(0.05)
            if again and (folder / "hit").exists():
                again = False
                programs[case.victim] = start(case, case.victim, port, folder, spared=True)
                programs[case.world_size - 1] = start(case, case.world_size - 1, port, folder)
                survivors += [case.victim, case.world_size - 1]
        return [result_of(programs[rank], folder / f"{rank}.json") for rank in survivors]
    finally:
        for program in (victim, *programs.values()):
            program.kill()


def result_of(program: forkserver.Program, path: Path) -> dict:
    status = program.poll()
    if status is None or not path.exists():
        return {"kind": "hangs" if status is None else f"status {status}", "error": program.read()[1][-2000:]}
    result = json.loads(path.read_text())
    return result if status == 0 else result | {"kind": f"{result['kind']} and status {status}"}


def check(case: Case, folder: Path) -> str:
    """Run a case; return what is wrong with it. On a busy machine sites may be slower than the timeout: then again."""
    for patience in (1, 5):
        slower = dataclasses.replace(case, timeout=case.timeout * patience)
        problems = problems_of(slower, folder.with_name(f"{folder.name}-{patience}"))
        if not problems:
            break
    return problems


def problems_of(case: Case, folder: Path) -> str:
    results = run(case, folder)
    if not (folder / "hit").exists():
        return f"{case}: not hit: {results}"
    hit = float((folder / "hit").read_text())
    problems = []
    for result in results:
        if result["kind"] != "SiteError" or f"site {case.victim}" not in result["error"]:
            problems.append(f"{case}: {result['kind']}: {result['error']}")
        else:
            print(f"{case.phase:14} {case.how} {case.victim} {result['when'] - hit:.2f} s of {case.timeout:g}")
    if case.phase[-1].isdigit():
        saved = torch.load(folder / "last.ckpt", weights_only=True)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
        model.load_state_dict(saved["model"])
        reduction = dadplug.GradientReduction(model, mode=case.mode)
        reduction.load_states(saved["states"])
        if not int(case.phase[-1]) <= reduction.step == saved["step"] + 1:
            problems.append(f"{case}: the checkpoint is of step {saved['step']}")
        reduction.detach()
    return "\n".join(problems)


PLACES = {
    "rendezvous": ("roll call", "group"),
    "setup": ("broadcast", "broadcast"),
    "step": ("forward 2", "synchronize 2"),
    "checkpoint": ("average 2", "gather 2"),
}


def cases(part: str, hierarchy: list[list[int]] | None) -> list[Case]:
    return [
        Case(PLACES[part][(victim + turn) % 2], how, victim, hierarchy, ("dad", "dsgd")[victim % 2], TIMEOUT)
        for turn, how in enumerate(("STOP", "KILL"))
        # The last two sites have the same part in an exchange: one of them is stopped, the other one is killed.
        for victim in (range(3 if hierarchy else 2) if how == "STOP" else (0, 1, 3) if hierarchy else (0, 2))
    ]


@pytest.mark.parametrize("parts", [["rendezvous", "setup"], ["step", "checkpoint"]], ids="-".join)
def test_a_lost_site_is_named_by_all_others(tmp_path, parts):
    todo = [case for part in parts for case in cases(part, None)]
    todo += [case for part in parts if part != "rendezvous" for case in cases(part, NODES)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        problems = list(pool.map(check, todo, [tmp_path / str(number) for number in range(len(todo))]))
    assert not any(problems), "\n".join(filter(None, problems))


def test_a_site_that_comes_again_gets_its_rank(tmp_path):
    hits = [("claim", "KILL"), ("roll call", "KILL"), ("roll call", "STOP")]
    todo = [Case(phase, how, 1, None, "dad", 40.0) for phase, how in hits]
    with ThreadPoolExecutor(len(todo)) as pool:
        every = pool.map(run, todo, [tmp_path / str(number) for number in range(len(todo))], [True] * len(todo))
    for case, results in zip(todo, every, strict=True):
        assert [result["error"] for result in results] == [None] * 3, (case, results)
