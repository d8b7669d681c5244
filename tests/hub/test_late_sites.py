"""Sites that are late: they miss steps, stay members, and the bits are those of a run in which they are idle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from elastic_runs import ENDED, Run, idles, stops
from running_hub import running_hub

from dadplug.options import Options

LATE = 8  # first step of which the median is known, with some more


def missed(log: list[str], name: str) -> set[int]:
    """Return the steps that a site has missed, as the hub's journal names them."""
    found = [
        re.search(rf"{name} (?:takes part again|has left): it has missed steps? (\d+)(?: to (\d+))?", line)
        for line in log
    ]
    ranges = [(int(each[1]), int(each[2] or each[1])) for each in found if each]
    return {step for first, last in ranges for step in range(first, last + 1)}


def trains_with_a_late_site(folder: Path, returns: bool, **case: object) -> tuple[list[dict[int, dict]], list[str]]:
    """Train with three sites, of which the last one is late; return their lines, and the hub's journal.

    Args:
        folder: folder for kits and logs.
        returns: whether the late site takes part again.
        case: fields of the late site's case.
    """
    folder.mkdir()
    with running_hub(folder / "kits", ("a", "b", "c")) as hub:
        settings = {name: case.pop(name) for name in ("mode", "bucket_mb", "link", "wire") if name in case}
        run = Run(folder, hub, stop=str(folder / "stop"), late="skip", pause=0.01, **settings)
        for name in "ab":
            run.start(name)
        run.start("c", other=str(folder / "a.log"), **case)
        if returns:
            hub.await_line("c takes part again", ENDED)
        else:
            run.await_step("a", LATE + 10)
        stops(folder, max(run.lines("a")) + 20)
        for name in "abc":
            run.end(name)
        return [run.lines(name) for name in "abc"], list(hub.log)


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        ("dsgd", {"late_steps": [LATE], "catches_up": True}),
        ("dad", {"late_steps": [LATE], "late_in": "backward", "bucket_mb": 1e-4}),
        ("rankdad", {"late_steps": [LATE, LATE + 1], "late_in": "backward", "bucket_mb": 1e-4}),
        ("auto", {"late_steps": [LATE], "late_in": "backward", "link": [1e-4, 1e-8, 2e-8, 1e-11]}),
        ("topk", {"late_steps": [LATE], "late_in": "backward"}),  # with memories of errors, which the late site keeps
        ("dsgd", {"late_steps": [LATE], "late_in": "backward", "wire": "int8"}),
    ],
)
def test_a_late_site_misses_steps_as_if_it_were_idle(tmp_path, mode, case):
    (first, second, late), log = trains_with_a_late_site(tmp_path / "run", True, mode=mode, **case)
    present = {step: line["present"] for step, line in first.items()}
    assert 2 not in present[LATE]
    assert any(2 in present[step] for step in range(LATE + 1, max(present) + 1))
    for lines in (second, late):
        assert {step: line["present"] for step, line in lines.items()} == present
        assert [line["digest"] for line in lines.values()] == [line["digest"] for line in first.values()]
    absent = [step for step in present if 2 not in present[step]]
    assert missed(log, "c") == {*absent}
    settings = {name: case[name] for name in ("bucket_mb", "link", "wire") if name in case}
    reference = idles(tmp_path / "idle", "abc", present, resets=False, mode=mode, **settings)
    assert [line["digest"] for line in reference.values()] == [line["digest"] for line in first.values()]


def test_a_site_that_is_always_late_stays_a_member_and_its_data_are_not_used(tmp_path):
    (first, _, late), log = trains_with_a_late_site(tmp_path / "run", False, mode="dad", late_steps=[LATE, -1])
    assert max(late) == max(first)
    assert all(late[step]["digest"] == first[step]["digest"] for step in first)
    assert not any(2 in first[step]["present"] for step in first if step >= LATE)
    assert missed(log, "c") == {*range(LATE, max(first) + 1)}


def test_a_site_that_is_slow_in_a_further_round_is_waited_for(tmp_path):
    # In step 7 batches are larger than in the steps before it, so that it has two rounds.
    (first, _, late), _ = trains_with_a_late_site(
        tmp_path / "run", False, mode="dad", late_steps=[LATE - 1], late_in="further"
    )
    assert 2 in first[LATE - 1]["present"]
    assert [line["digest"] for line in late.values()] == [line["digest"] for line in first.values()]


def test_options_of_late_sites_are_checked():
    with pytest.raises(ValueError, match="late='skip' needs min_sites"):
        Options.create(late="skip")
    with pytest.raises(ValueError, match="unknown late 'drop'; valid ones are 'wait', 'skip'"):
        Options.create(late="drop", min_sites=1)
    with pytest.raises(ValueError, match="patience must be a number above 1"):
        Options.create(late="skip", min_sites=1, patience=1.0)
