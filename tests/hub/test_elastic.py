"""Training that goes on while sites leave and come: the same bits as with a site that is idle in these steps."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from cutting_relay import CuttingRelay
from elastic_runs import ENDED, Run, idles, stops
from running_hub import running_hub, until

from dadplug import GradientReduction
from dadplug.hub.server import elastic_run
from dadplug.model_sync.structure import mark_managed
from dadplug.options import Options

LEAVES = 3  # step in which the batches are larger than before, so that there is a second round


def leaves_and_returns(folder: Path, names: str, **settings: object) -> tuple[dict, list[dict[int, dict]]]:
    """Train with a site that is killed and comes back; return the lines of the first site, and those of all."""
    folder.mkdir()
    with running_hub(folder / "kits", tuple(names)) as hub:
        run = Run(folder, hub, stop=str(folder / "stop"), pause=0.01, **settings)
        for name in names[:-1]:
            run.start(name)
        run.start(names[-1], leave=LEAVES)
        assert run.processes[names[-1]].wait(ENDED) == -9
        run.start(names[-1])
        hub.await_line(f"{names[-1]} joins", ENDED)
        stops(folder, max(run.lines("a")) + 40)
        for name in names:
            run.end(name)
        return run.lines("a"), [run.lines(name) for name in names]


@pytest.mark.parametrize(
    ("mode", "names", "how"),
    [
        ("dsgd", "ab", "header"),
        ("dad", "ab", "sent"),
        ("dad", "abc", "late"),
        ("rankdad", "abc", "late"),
        ("auto", "ab", "before"),
    ],
)
def test_a_site_that_is_lost_and_returns_counts_as_an_idle_one(tmp_path, mode, names, how):
    first, every = leaves_and_returns(tmp_path / "run", names, mode=mode, how=how, link=[1e-4, 1e-8, 2e-8, 1e-11])
    last = len(names) - 1
    present = {step: line["present"] for step, line in first.items()}
    assert present[LEAVES - 1] == list(range(len(names)))
    assert last not in present[LEAVES]
    assert present[max(present)] == list(range(len(names)))
    for lines in every:
        assert all(lines[step]["digest"] == first[step]["digest"] for step in lines)
    assert max(every[last]) == max(first)  # the site that has returned
    reference = idles(tmp_path / "idle", names, present, mode=mode, link=[1e-4, 1e-8, 2e-8, 1e-11])
    assert {step: line["digest"] for step, line in reference.items()} == {
        step: line["digest"] for step, line in first.items()
    }


def test_a_site_that_returns_knows_who_is_absent_in_a_collective(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        run = Run(tmp_path, hub, stop=str(tmp_path / "stop"), meets=True, pause=0.01)
        run.start("a")
        run.start("b", leave=3)
        run.start("c", leave=5)
        for name in "bc":
            run.end(name, -9)
            hub.await_line(f"{name} has left", ENDED)
        run.start("b")  # c has been away for longer
        hub.await_line("b joins", ENDED)
        stops(tmp_path, max(run.lines("a")) + 20)
        for name in "ab":
            run.end(name)
        assert run.lines("a")[max(run.lines("a"))]["present"] == [0, 1]


def goes_by_way_of(relay: CuttingRelay, kit: Path) -> None:
    """Let a site dial a relay in place of the hub."""
    roster = json.loads((kit / "roster.json").read_text())
    roster["hub"] = f"127.0.0.1:{relay.address[1]}"
    (kit / "roster.json").write_text(json.dumps(roster))


@pytest.mark.parametrize(("grace", "cuts"), [(20.0, 40), (0.0, 1)])
def test_a_link_that_is_cut_anywhere_changes_nothing(tmp_path, monkeypatch, grace, cuts):
    monkeypatch.setattr(elastic_run, "SHORT_GRACE", grace)
    with running_hub(tmp_path / "kits", ("a", "b")) as hub, CuttingRelay(hub.address) as relay:
        goes_by_way_of(relay, tmp_path / "kits" / "b")
        run = Run(tmp_path, hub, mode="rankdad", stop=str(tmp_path / "stop"))
        run.start("a")
        run.start("b")
        run.await_step("a", 2)
        relay.refuse = not grace
        for number in range(cuts):
            relay.cut_after(number % 2, 1 + 211 * number)
            until(lambda cut=number: relay.cuts > cut, timeout=ENDED)
            again = number + 1 if grace else 0
            until(
                lambda count=again: sum("(training) has dialled again" in line for line in hub.log) >= count,
                timeout=ENDED,
            )
        if not grace:
            hub.await_line("b has left", ENDED)
            run.await_step("a", max(run.lines("a")) + 3)
            relay.refuse = False
            hub.await_line("b joins", ENDED)
        stops(tmp_path, max(run.lines("a")) + 20)
        run.end("a")
        assert ("it joins again" in run.end("b")) == (not grace)
        lines, others = run.lines("a"), run.lines("b")
    present = {step: line["present"] for step, line in lines.items()}
    assert present[max(present)] == [0, 1]
    assert ([0] in present.values()) is not bool(grace)
    assert all(line["digest"] == lines[step]["digest"] for step, line in others.items())
    reference = idles(tmp_path / "idle", "ab", present, mode="rankdad")
    assert [line["digest"] for line in reference.values()] == [line["digest"] for line in lines.values()]


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
def test_a_site_that_was_stopped_joins_again_in_its_process(tmp_path, mode):
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        run = Run(tmp_path, hub, mode=mode, stop=str(tmp_path / "stop"), site_timeout=1.0)
        for name in "abc":
            run.start(name)
        run.await_step("a", 2)
        run.processes["b"].send_signal(signal.SIGSTOP)
        hub.await_line("b has left: silent for 1 s", ENDED)
        run.await_step("a", max(run.lines("a")) + 3)
        run.processes["b"].send_signal(signal.SIGCONT)
        hub.await_line("b joins", ENDED)
        stops(tmp_path, max(run.lines("a")) + 20)
        for name in "abc":
            run.end(name)
        lines, others = run.lines("a"), run.lines("b")
    present = {step: line["present"] for step, line in lines.items()}
    assert [0, 2] in present.values()
    assert present[max(present)] == [0, 1, 2]
    assert all(line["digest"] == lines[step]["digest"] for step, line in others.items())
    reference = idles(tmp_path / "idle", "abc", present, mode=mode)
    assert [line["digest"] for line in reference.values()] == [line["digest"] for line in lines.values()]


def test_the_reason_is_told_and_training_goes_on(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, steps=12)
        run.start("a")
        run.start("b", leave=3, how="raise")
        assert "the data are lost" in run.end("b", 1)
        run.end("a")
        assert [line["present"] for line in run.lines("a").values()] == [[0, 1]] * 3 + [[0]] * 9
        assert hub.await_line("b has left: RuntimeError: the data are lost", ENDED)


def test_a_round_of_its_own_between_backward_and_the_end_of_the_step_takes_nothing_away(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, mode="dad", steps=10, talks=True)
        run.start("a")
        run.start("b", leave=6, how="before")
        assert run.processes["b"].wait(ENDED) == -9
        run.end("a")
        lines = run.lines("a")
    present = {step: line["present"] for step, line in lines.items()}
    assert list(present.values()) == [[0, 1]] * 6 + [[0]] * 4
    reference = idles(tmp_path / "idle", "ab", present, mode="dad")
    assert [line["digest"] for line in reference.values()] == [line["digest"] for line in lines.values()]


def test_below_min_sites_training_pauses_and_says_for_whom(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, min_sites=2, steps=12)
        run.start("a")
        run.start("b", leave=3)
        assert run.processes["b"].wait(ENDED) == -9
        hub.await_line("paused: 2 sites are needed and 1 is connected: waiting for b", ENDED)
        assert max(run.lines("a")) == 2
        run.start("b")
        assert "training pauses: 2 sites are needed and 1 is connected: waiting for b" in run.end("a")
        run.end("b")
        assert max(run.lines("b")) == 11


def test_another_site_gives_its_state_if_one_is_lost_meanwhile(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        run = Run(tmp_path, hub, stop=str(tmp_path / "stop"), pause=0.01)
        donor, other = "ab"  # of members that have been asked equally often, the first one is asked
        run.start(donor, how="donates")
        run.start(other)
        run.start("c", leave=LEAVES)
        assert run.processes["c"].wait(ENDED) == -9
        run.start("c")
        hub.await_line("c joins", ENDED)
        hub.await_line(f"{donor} has left", ENDED)
        run.await_step("c", max(run.lines(other)) + 2)
        stops(tmp_path, max(run.lines(other)) + 5)
        run.end(other)
        run.end("c")
        assert run.lines("c")[max(run.lines("c"))]["digest"] == run.lines(other)[max(run.lines("c"))]["digest"]


def test_a_site_that_is_lost_while_it_joins_holds_up_nobody(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, stop=str(tmp_path / "stop"), pause=0.01)
        run.start("a")
        run.start("b", leave=LEAVES)
        assert run.processes["b"].wait(ENDED) == -9
        run.start("b", how="joins")
        assert run.processes["b"].wait(ENDED) == -9
        run.start("b")
        run.await_step("b", max(run.lines("a")) + 2)
        stops(tmp_path, max(run.lines("a")) + 5)
        run.end("a")
        run.end("b")
        assert run.lines("b")[max(run.lines("b"))]["digest"] == run.lines("a")[max(run.lines("b"))]["digest"]


def test_what_needs_all_sites_is_refused():
    for options in ({"mode": "edad"}, {"mode": "powersgd"}, {"sync_batchnorm": True}, {"hierarchy": 2}):
        with pytest.raises(ValueError, match="needs all sites in every step: leave min_sites out"):
            Options.create(min_sites=1, **options)
    with pytest.raises(ValueError, match="min_sites must be a whole number of at least 1"):
        Options.create(min_sites=0)


def test_tables_that_are_spread_over_the_sites_are_refused():
    model = torch.nn.Linear(2, 2)
    mark_managed(model.weight, True)
    with pytest.raises(ValueError, match="the rows of 'weight' are spread over the sites, and all of them must stay"):
        GradientReduction(model, "dsgd", min_sites=1)


def requires(min_sites):
    import dadplug

    with pytest.raises(ValueError, match="min_sites needs a hub"):
        dadplug.GradientReduction(torch.nn.Linear(2, 2), "dsgd", min_sites=min_sites)


def test_sites_without_a_hub_cannot_leave(sites):
    sites(2).run(requires, 1)


def test_trainers_that_need_all_sites_say_so():
    pytest.importorskip("catalyst")
    pytest.importorskip("pytorch_lightning")
    from dadplug.runners import AdaPMRunner
    from dadplug.runners.pytorch_lightning import AdaPMStrategy, DADStrategy

    for build in (AdaPMStrategy, AdaPMRunner):
        with pytest.raises(ValueError, match=f"{build.__name__} needs all sites until the end: leave min_sites out"):
            build(min_sites=1)
    with pytest.raises(ValueError, match="min_sites needs a hub"):
        DADStrategy(min_sites=1)
