"""Runs that grow: a site that is new in the roster joins in the middle, and the bits are those of a run with it from
the start, in which it is idle until then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from elastic_runs import ENDED, Run, idles, stops
from running_hub import RunningHub, TestSite, add_site, running_hub

import dadplug
from dadplug.errors import FrameError
from dadplug.hub.pki.kits import Kit
from dadplug.hub.wire.messages import Grow, Pause, pack_control, read_control

LINK = [1e-4, 1e-8, 2e-8, 1e-11]


def keep_kits(hub: RunningHub, names: str) -> Path:
    """Copy kits, so that they have the roster of before; return the folder."""
    folder = hub.kits.parent / "kept"
    for name in names:
        shutil.copytree(hub.kits / name, folder / name)
    return folder


def same_bits(lines: dict[int, dict], others: dict[int, dict]) -> None:
    assert others
    assert {step: line["digest"] for step, line in others.items()} == {step: lines[step]["digest"] for step in others}


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("dsgd", {"late": "skip"}),
        ("dad", {}),
        ("rankdad", {}),
        ("rankdad", {"wire": "int8"}),
        ("auto", {"link": LINK}),
        ("dad", {"pause": 2.0}),
    ],
)
def test_a_site_that_is_new_counts_as_one_that_was_idle(tmp_path, mode, settings):
    """With long steps the site joins in the round in which the run grows; else the others have room for it before."""
    settings = {"pause": 0.02} | settings
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, mode=mode, stop=str(tmp_path / "stop"), meets=True, **settings)
        run.start("a")
        run.start("b")
        run.await_step("a", 3)
        add_site(hub, "abc")
        run.start("c")
        hub.await_line("c joins", ENDED)
        stops(tmp_path, max(run.lines("a")) + (20 if settings["pause"] < 1 else 5))
        for name in "abc":
            run.end(name)
        lines = run.lines("a")
        same_bits(lines, run.lines("b"))
        same_bits(lines, run.lines("c"))
    present = {step: line["present"] for step, line in lines.items()}
    assert present[3] == [0, 1]
    assert present[max(present)] == [0, 1, 2]
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode=mode, **settings | {"late": "wait", "pause": 0.0}))


def test_a_site_with_an_old_kit_returns_to_a_run_that_has_grown_twice(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        kept = keep_kits(hub, "ab")
        run = Run(tmp_path, hub, mode="rankdad", stop=str(tmp_path / "stop"), pause=0.02, meets=True)
        run.start("a", kit=str(kept / "a"))
        run.start("b", kit=str(kept / "b"), leave=3, how="late")
        run.end("b", -9)
        add_site(hub, "abc")
        run.start("c")
        hub.await_line("c joins", ENDED)
        add_site(hub, "abcd")
        run.start("d", leave=-1)
        hub.await_line("the run grows: it is one of 4 sites now, with d", ENDED)
        run.start("b", kit=str(kept / "b"))
        hub.await_line("b joins", ENDED)
        hub.await_line("d joins", ENDED)
        stops(tmp_path, max(run.lines("a")) + 20)
        for name in "abcd":
            run.end(name)
        lines = run.lines("a")
        for name in "bcd":
            same_bits(lines, {step: line for step, line in run.lines(name).items() if step > 3})
    present = {step: line["present"] for step, line in lines.items()}
    assert present[max(present)] == [0, 1, 2, 3]
    same_bits(lines, idles(tmp_path / "idle", "abcd", present, mode="rankdad"))


def test_a_run_that_needs_all_sites_goes_on_without_one_that_is_new(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, stop=str(tmp_path / "stop"), min_sites=None, pause=0.02)
        run.start("a")
        run.start("b")
        run.await_step("a", 2)
        add_site(hub, "abc")
        c = TestSite(Kit.load(hub.kits / "c"), hub.address, sites=3, release=dadplug.__version__)
        assert c.action(Pause).reason == "waiting for a, b to leave the last run"
        stops(tmp_path, max(run.lines("a")) + 5)
        for name in "ab":
            run.end(name)
        assert all(line["present"] == [0, 1] for line in run.lines("a").values())
        assert c.action(Pause).reason.endswith("waiting for a, b")  # to begin the next run


def test_names_of_a_growing_run_are_checked():
    body = pack_control(Grow(3, ("a", "b", "c")), 0)[32:]
    assert read_control(body, 2) == Grow(3, ("a", "b", "c"))
    for wrong in (Grow(3, ("a", 5)), Grow(3, "abc"), Grow(-1, ("a",))):
        with pytest.raises(FrameError, match="of a control message Grow is out of range"):
            read_control(pack_control(wrong, 0)[32:], 2)
