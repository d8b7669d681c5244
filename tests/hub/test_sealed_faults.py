"""Sealed training with late sites, hubs that restart, local steps, checkpoints and donors that are lost."""

import signal
from pathlib import Path

import elastic_local
import pytest
from elastic_runs import ENDED, MortalHub, Run, idles, presence, same_bits
from running_hub import running_hub, until
from sealed_sites import sealed_hub

MEDIAN = 8  # first step of which the median is known, with some more


# Late sites


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
def test_a_late_site_misses_steps_and_another_one_returns_meanwhile(tmp_path, mode):
    with sealed_hub(tmp_path) as hub:
        run = Run(tmp_path, hub, mode=mode, late="skip", pause=0.01)
        run.start("a")
        run.start("b", leave=MEDIAN + 4, how="sent")
        late = {"late_steps": [MEDIAN, MEDIAN + 1, MEDIAN + 6], "late_in": "backward", "bucket_mb": None}
        run.start("c", other=str(tmp_path / "a"), **late)
        run.end("b", -9)
        run.start("b")
        hub.await_line("b joins", ENDED)
        hub.await_line("c takes part again", ENDED)
        lines, present = run.finish("abc", 30)
    assert 2 not in present[MEDIAN]
    assert any(1 not in each for each in present.values())
    if mode == "dad":  # in others the memory of the late site stays, and that of the new process begins anew
        same_bits(lines, idles(tmp_path / "idle", "abc", present, mode=mode))


# A hub that is killed and started again


@pytest.mark.parametrize(("count", "sealed"), [(1, True), (3, True), (5, True), (2, False), (4, False)])
def test_a_hub_is_killed_while_a_site_joins(tmp_path, count, sealed):
    """After so many frames: of the welcomes, the state, the end of the round, and those of the next one."""
    hub = MortalHub(tmp_path / "run", "abc", sealed)
    run = Run(tmp_path / "run", hub, mode="dad", site_timeout=5.0, pause=0.02)
    process = hub.start("joining", count)
    run.start("ab")
    run.lose("c", leave=3)
    assert process.wait(ENDED) == -9, run.state()
    hub.start()
    run.await_step("c", max(run.lines("a")) + 3)
    lines, present = run.finish("abc", 30)
    hub.process.kill()
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode="dad"))


@pytest.mark.parametrize("sealed", [False, True])
def test_a_hub_is_killed_while_a_site_restores_its_state(tmp_path, sealed):
    """The others go on before the site is admitted again, so that its state has become outdated."""
    hub = MortalHub(tmp_path / "run", "abc", sealed)
    run = Run(tmp_path / "run", hub, mode="dad", site_timeout=5.0, pause=0.02)
    hub.start()
    run.start("ab")
    run.start("c", leave=3)
    run.end("c", -9)
    run.start("c", how="restores")
    until((tmp_path / "run" / "c" / "restored").exists, run.state, ENDED)
    run.processes["c"].send_signal(signal.SIGSTOP)
    hub.process.kill()
    hub.process.wait(ENDED)
    hub.start()
    run.await_step("a", max(run.lines("a")) + 3)
    run.processes["c"].send_signal(signal.SIGCONT)
    until(lambda: sum("c joins" in line for line in hub.log) == 2, run.state, ENDED)
    (tmp_path / "run" / "c" / "goes on").touch()
    run.await_step("c", max(run.lines("a")) + 3)
    lines, present = run.finish("abc", 30)
    hub.process.kill()
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode="dad"))


# Local steps


def agreed(run: Run, name: str) -> dict[int, str]:
    return {line["agreement"]: line["agreed"] for line in run.written(name) if "agreement" in line}


def stop_local(run: Run, names: str) -> None:
    """Let a run of local steps end, and check that the sites agree on each model, and on the last one."""
    steps = max(line["step"] for line in run.written(names[0]) if "agreement" in line)
    (run.folder / "stop").write_text(str(steps + 16))
    run.end(names)
    first = agreed(run, names[0])
    finals = {next(line["final"] for line in reversed(run.written(name)) if "final" in line) for name in names}
    assert len(finals) == 1, run.state()
    for name in names:
        assert {number: first.get(number) for number in agreed(run, name)} == agreed(run, name), name


@pytest.mark.parametrize("options", [{}, {"overlap": True, "late": "skip"}, {"density": 0.5, "wire": "int2"}])
def test_local_steps_go_on_while_a_site_is_killed_and_the_hub_restarts(tmp_path, options):
    hub = MortalHub(tmp_path, "abc", sealed=True)
    hub.start()
    run = Run(tmp_path, hub, elastic_local.__file__, options={"site_timeout": 5.0} | options, pause=0.01)
    run.start("ab")
    run.start("c", leave=10)
    run.end("c", -9)
    run.await_step("a", 4, "agreement")
    run.start("c")
    run.await_step("c", 6, "agreement")
    hub.process.kill()
    hub.process.wait(ENDED)
    hub.start()
    run.await_step("b", max(agreed(run, "a")) + 3, "agreement")
    stop_local(run, "abc")
    hub.process.kill()
    present = [line["present"] for line in run.written("a") if "agreement" in line]
    assert [0, 1] in present
    assert present[-1] == [0, 1, 2]


# Checkpoints: all sites end, and start again with what they have saved


def trains_in_parts(folder: Path, parts: list[int], sealed: bool, **settings: object) -> dict[int, dict]:
    """Train in some parts, each with new processes over the same hub; return the lines of the first site."""
    with sealed_hub(folder, sealed=True) if sealed else running_hub(folder / "kits", ("a", "b", "c")) as hub:
        run = Run(folder, hub, stops=False, steps=24, **settings)
        for saves in parts:
            for name in "abc":
                run.start(name, saves=saves, resumes=str(folder / f"{name}.pt"))
            run.end("abc")
        for name in "bc":
            same_bits(run.lines("a"), run.lines(name))
        return run.lines("a")


@pytest.mark.parametrize("min_sites", [1, None])
def test_all_sites_restart_from_checkpoints(tmp_path, min_sites):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = trains_in_parts(tmp_path / "whole", [-1], False, mode="rankdad", min_sites=min_sites)
    parts = trains_in_parts(tmp_path / "parts", [7, 15, -1], True, mode="rankdad", min_sites=min_sites)
    assert len(parts) == len(whole) == 24
    same_bits(whole, parts)


# Donors


@pytest.mark.parametrize("how", ["sends", "stops"])
def test_another_site_gives_its_state_if_one_is_lost_with_half_of_it_sent(tmp_path, how):
    with sealed_hub(tmp_path) as hub:
        run = Run(tmp_path, hub, mode="dad", pause=0.01, site_timeout=3.0)
        run.start("a", how=how)  # of members that have been asked equally often, the first one is asked
        run.start("b")
        run.lose("c", leave=3)
        hub.await_line("a has left", ENDED)
        run.await_step("c", max(run.lines("b")) + 2)
        if how == "stops":
            run.processes["a"].send_signal(signal.SIGCONT)  # it joins again in its process
        else:
            run.end("a", -9)
            run.start("a")
        until(lambda: sum("a joins" in line for line in hub.log) == 1, run.state, ENDED)
        run.await_step("a", max(run.lines("b")) + 2)
        run.stop(20, "b")
        run.end("abc")
        lines, present = run.lines("b"), presence(run.lines("b"))
        for name in "ac":
            same_bits(lines, run.lines(name))
    assert [1, 2] in present.values()
    assert present[max(present)] == [0, 1, 2]
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode="dad"))
