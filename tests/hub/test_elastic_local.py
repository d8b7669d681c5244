"""Local steps over a hub, where sites leave, return and are late: what counts, bits that are equal, no sample twice."""

import re
import signal
from pathlib import Path

import elastic_local
import pytest
import torch
from elastic_local import reference
from elastic_runs import ENDED, Run
from running_hub import RunningHub, add_site, running_hub, until

import dadplug
from dadplug.local_steps import LocalOptions

EVERY = 4


def sites_of(folder: Path, hub: RunningHub, options: dict | None = None, **settings: object) -> Run:
    return Run(folder, hub, elastic_local.__file__, options=options or {}, **({"pause": 0.005} | settings))


def agreements(run: Run, name: str) -> dict[int, dict]:
    return {line["agreement"]: line for line in run.written(name) if "agreement" in line}


def stop(run: Run, name: str = "a", more: int = 12) -> None:
    (run.folder / "stop").write_text(str(max(line["step"] for line in agreements(run, name).values()) + more))


def await_agreement(run: Run, name: str, number: int) -> None:
    def reached() -> bool:
        assert run.processes[name].poll() is None, run.state()
        return max(agreements(run, name), default=0) >= number

    until(reached, run.state, ENDED)


def check(run: Run, names: str) -> dict[int, dict]:
    """Check that the agreed models of all sites are equal to the bit; return the agreements of all sites by number."""
    every: dict[int, dict] = {}
    for name in names:
        for number, line in agreements(run, name).items():
            known = every.setdefault(number, line)
            for what in ("agreed", "present", "step", "buffers") if line["here"] and known["here"] else ("agreed",):
                assert line[what] == known[what], (name, number, what, run.state())
    finals = [next(line for line in reversed(run.written(name)) if "final" in line) for name in names]
    assert len({line["final"] for line in finals}) == 1, run.state()
    assert {line["first"] for line in finals} == {None}
    assert len({line["steps"] for line in finals}) == 1
    return every


def none_twice(run: Run, names: str) -> None:
    for name in names:
        batches = [(line["pid"], line["batch"]) for line in run.written(name) if "batch" in line]
        assert len(set(batches)) == len(batches)


def equals_reference(run: Run, names: str, every: dict[int, dict], outer: tuple[float, float] = (1.0, 0.0)) -> None:
    found = reference([run.written(name) for name in names], outer)
    for number, line in every.items():
        assert line["sums"] == pytest.approx(found[number], rel=1e-9, abs=1e-12), (number, run.state())


@pytest.mark.parametrize(
    ("how", "leave", "options"),
    [
        ("step", 6, {}),
        ("agreement", 8, {"outer_lr": 0.7, "outer_momentum": 0.9}),
    ],
)
def test_a_killed_site_costs_its_part_and_returns(tmp_path, how, leave, options):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, options)
        run.start("ab")
        run.start("c", leave=leave, how=how)
        run.end("c", -9)
        await_agreement(run, "a", 4)
        run.start("c")
        await_agreement(run, "c", 8)
        stop(run)
        run.end("abc")
        every = check(run, "abc")
        none_twice(run, "abc")
        outer = options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0)
        equals_reference(run, "abc", every, outer)
        present = [every[number]["present"] for number in sorted(every)]
        assert [0, 1, 2] in present
        assert [0, 1] in present
        assert present[-1] == [0, 1, 2]
        told = run.processes["a"].read()[1]
        assert re.search(r"site 2 \(c\) has left: what it had done since agreement \d+, and not sent, is lost", told), told
        assert re.search(r"site 2 \(c\) takes part from agreement \d+ on", told), told
        told = run.processes["c"].read()[1]
        assert re.search(r"its last contribution is that of agreement \d+, and what it had done since", told), told
        joined = [line for line in run.written("c") if "joined" in line]
        assert joined[1]["joined"] % EVERY == EVERY - 1  # one step before the agreement that the others are in
        assert joined[1]["schedule"] == joined[1]["joined"]


def counts(run: Run, names: str, every: dict[int, dict], lost: dict[str, int] | None = None) -> None:
    """Check that each batch of the sites is part of the agreed model once, by the model's own elements.

    Args:
        run: the run.
        names: names of the sites.
        every: the agreements, by number.
        lost: number of batches that are not part of it, by name of the site.
    """
    numbers = sorted(every)
    before, values, steps = {}, [0.0] * 4, [0.0] * 4
    for number in numbers:
        now = {int(slot): weight for slot, weight in every[number]["contributions"].items()}
        weights = {slot: now[slot] - before.get(slot, 0) for slot in now}
        total = sum(weights.values())
        for slot, weight in weights.items():
            moved = every[number]["values"][slot] - values[slot]
            if weight:
                assert slot in every[number]["present"]
                steps[slot] += moved * 64 * total / weight
                assert moved * 64 * total / weight == pytest.approx(weight / elastic_local.ROWS[slot])
        before, values = now, every[number]["values"]
    for slot, name in enumerate(names):
        trained = sum("batch" in line for line in run.written(name))
        assert steps[slot] == pytest.approx(trained - (lost or {}).get(name, 0)), (name, run.state())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("talks", [False, True])
def test_no_step_is_lost_or_counts_twice(tmp_path, overlap, talks):
    """A site is killed and returns; its process before has sent all but its last steps."""
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, {"overlap": overlap}, counts=True, talks=talks)
        run.start("ab")
        run.start("c", leave=10)
        run.end("c", -9)
        await_agreement(run, "a", 4)
        run.start("c")
        await_agreement(run, "c", 8)
        stop(run)
        run.end("abc")
        every = check(run, "abc")
    counts(run, "abc", every, {"c": 6 if overlap else 2})


@pytest.mark.parametrize("overlap", [False, True])
def test_the_steps_of_a_late_site_count_later(tmp_path, overlap):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        options = {"overlap": overlap, "late": "skip", "site_timeout": 2.0}
        run = sites_of(tmp_path, hub, options, counts=True)
        run.start("ab")
        run.start("c", late=2, other=str(tmp_path / "a"))
        await_agreement(run, "c", 8)
        stop(run)
        run.end("abc")
        every = check(run, "abc")
        assert any("it has missed" in line for line in hub.log), hub.log
    assert [0, 1] in [line["present"] for line in every.values()]
    counts(run, "abc", every)
    assert "this site is late: its steps count in a later agreement" in run.processes["c"].read()[1]
