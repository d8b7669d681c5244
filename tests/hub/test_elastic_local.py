"""Local steps over a hub, where sites leave, return and are late: what counts, bits that are equal, no sample twice."""

import math
import re
import signal
from pathlib import Path

import elastic_local
import pytest
import support
import torch
from elastic_local import reference
from elastic_runs import ENDED, MortalHub, Run
from running_hub import RunningHub, add_site, running_hub, until

import dadplug
from dadplug.local_steps import LocalOptions

EVERY = 4
AT_ONCE, LATER, AHEAD = {"overlap": False}, {"overlap": True}, {"overlap": True, "delay": 2}
"""Deltas are sent in the agreement that counts them, after the one before, or two steps ahead."""


def sites_of(folder: Path, hub: RunningHub, options: dict | None = None, **settings: object) -> Run:
    return Run(folder, hub, elastic_local.__file__, options=options or {}, **({"pause": 0.005} | settings))


def agreements(run: Run, name: str) -> dict[int, dict]:
    return {line["agreement"]: line for line in run.written(name) if "agreement" in line}


def stop(run: Run, name: str = "a", more: int = 12) -> None:
    (run.folder / "stop").write_text(str(max(line["step"] for line in agreements(run, name).values()) + more))


def check(run: Run, names: str, fragments: int = 1) -> dict[int, dict]:
    """Check that the agreed models of all sites are equal to the bit; return the agreements of all sites by number.

    Statistics are equal once a round.
    """
    every: dict[int, dict] = {}
    for name in names:
        for number, line in agreements(run, name).items():
            known = every.setdefault(number, line)
            same = ["agreed", "present", "step"] if line["here"] and known["here"] else ["agreed"]
            if len(same) > 1 and number % fragments == 0:
                same.append("buffers")
            for what in same:
                assert line[what] == known[what], (name, number, what, run.state())
    finals = [next(line for line in reversed(run.written(name)) if "final" in line) for name in names]
    assert len({line["final"] for line in finals}) == 1, run.state()
    assert {line["first"] for line in finals} == {None}
    assert len({line["steps"] for line in finals}) == 1
    return every


def ends(run: Run, names: str) -> dict[int, dict]:
    """Stop the sites, and check them; return the agreements by number."""
    stop(run)
    run.end(names)
    return check(run, names)


def returns(run: Run, settings: dict, agreed: int = 4, later: int = 8) -> dict[int, dict]:
    """Train at sites a, b and c; the last one is killed and returns.

    Args:
        run: the run.
        settings: when and how the site is killed.
        agreed: the agreement of the others after which it is started again.
        later: the agreement that it then takes part in before all stop.

    Returns:
        The agreements by number, as `check` does.
    """
    run.start("ab")
    run.start("c", **settings)
    run.end("c", -9)
    run.await_step("a", agreed, "agreement")
    run.start("c")
    run.await_step("c", later, "agreement")
    return ends(run, "abc")


def none_twice(run: Run, names: str) -> None:
    for name in names:
        batches = [(line["pid"], line["batch"]) for line in run.written(name) if "batch" in line]
        assert len(set(batches)) == len(batches)


def equals_reference(run: Run, names: str, every: dict[int, dict], options: dict) -> None:
    outer = options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0)
    found = reference([run.written(name) for name in names], outer, options.get("fragments", 1))
    assert len(found) >= len(every) - 1
    for number, sums in found.items():
        assert every[number]["sums"] == pytest.approx(sums, rel=1e-12, abs=1e-12), (number, run.state())


@pytest.mark.parametrize(
    ("how", "leave", "options"),
    [
        ("step", 6, {}),
        ("agreement", 8, {"outer_lr": 0.7, "outer_momentum": 0.9}),
        ("step", 10, {"overlap": True}),
        ("step", 6, {"overlap": True, "fragments": 2, "outer_lr": 0.7, "outer_momentum": 0.9}),
        ("agreement", 8, {"overlap": True, "delay": 1}),
        ("step", 7, {"overlap": True, "fragments": 2, "delay": 1}),
    ],
)
def test_a_killed_site_costs_its_part_and_returns(tmp_path, how, leave, options):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, options)
        every = returns(run, {"leave": leave, "how": how})
        none_twice(run, "abc")
        equals_reference(run, "abc", every, options)
        present = [every[number]["present"] for number in sorted(every)]
        assert [0, 1, 2] in present
        assert [0, 1] in present
        assert present[-1] == [0, 1, 2]
        told = run.processes["a"].read()[1]
        assert re.search(r"site 2 \(c\) has left: what it had done since agreement \d+, and not sent, is lost", told), (
            told
        )
        assert re.search(r"site 2 \(c\) takes part from agreement \d+ on", told), told
        told = run.processes["c"].read()[1]
        assert re.search(r"its last contribution is that of agreement \d+, and what it had done since", told), told
        joined = [line for line in run.written("c") if "joined" in line]
        part = EVERY // options.get("fragments", 1)
        assert (joined[1]["joined"] + 1) % part == 0  # one step before the agreement that the others are in
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


@pytest.mark.parametrize(("options", "lost"), [(AT_ONCE, 2), (LATER, 6), (AHEAD, 4)])
@pytest.mark.parametrize("talks", [False, True])
def test_no_step_is_lost_or_counts_twice(tmp_path, options, lost, talks):
    """A site is killed and returns; its process before has sent all but its last steps."""
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, options, counts=True, talks=talks)
        every = returns(run, {"leave": 10})
    counts(run, "abc", every, {"c": lost})


@pytest.mark.parametrize("options", [AT_ONCE, LATER, AHEAD | {"fragments": 2, "delay": 1}])
def test_sparse_deltas_of_sites_that_leave_and_are_late(tmp_path, options):
    """Replicas are equal to the bit, and all that a site has done is in the model, or in its memory without decay."""
    sparse = {"density": 0.5, "wire": "int2", "memory_decay": 1.0}
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        options = sparse | options | {"late": "skip", "site_timeout": 2.0}
        run = sites_of(tmp_path, hub, options)
        run.start("a")
        run.start("b", late=6, other=str(tmp_path / "a"))
        run.start("c", leave=10)
        run.end("c", -9)
        run.await_step("a", 4, "agreement")
        run.start("c")
        run.await_step("c", 10, "agreement")
        every = ends(run, "abc")
    present = [every[number]["present"] for number in sorted(every)]
    assert [0, 1] in present
    assert any(1 not in each for each in present)
    assert present[-1] == [0, 1, 2]
    trained = sum("batch" in line for line in run.written("b"))
    assert every[max(every)]["contributions"]["1"] == trained * elastic_local.ROWS[1]


@pytest.mark.parametrize("options", [AT_ONCE, LATER, AHEAD])
def test_the_steps_of_a_late_site_count_later(tmp_path, options):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        options = options | {"late": "skip", "site_timeout": 2.0}
        run = sites_of(tmp_path, hub, options, counts=True)
        run.start("ab")
        run.start("c", late=2, other=str(tmp_path / "a"))
        run.await_step("c", 8, "agreement")
        every = ends(run, "abc")
        assert any("it has missed" in line for line in hub.log), hub.log
    assert [0, 1] in [line["present"] for line in every.values()]
    counts(run, "abc", every)
    assert "this site is late: its steps count in a later agreement" in run.processes["c"].read()[1]


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        (AT_ONCE, [4, 8, 8, 12, 16]),
        (LATER, [None, 4, 8, 8, 12]),
        (AHEAD, [2, 6, 10, 12, 16]),  # those that were sent before count
        ({"overlap": True, "fragments": 2}, [None, None, 2, 2, 2, 6]),  # of that which has fewer of them
    ],
)
def test_a_site_with_nan_is_left_out_and_named(tmp_path, options, batches):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, options, norm=True, steps=24)
        run.start("ab")
        run.start("c", spoils=2)
        run.end("abc")
        every = check(run, "abc", options.get("fragments", 1))
    contributions = [every[number]["contributions"].get("2") for number in range(1, 1 + len(batches))]
    assert contributions == [each and each * elastic_local.ROWS[2] for each in batches]
    assert all(math.isfinite(value) for line in every.values() for value in [*line["sums"], *line["buffers"]])
    for name in "abc":
        told = run.processes[name].read()[1]
        assert re.search(r"parameter '0.weight' holds NaN or Inf at site 2 \(c\): its steps since the last", told), told


def test_a_site_that_sends_other_than_finite_deltas_is_left_out_and_named(tmp_path):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, steps=16)
        run.start("ab")
        run.start("c", spoils=2, how="lies")
        run.end("abc")
        every = check(run, "abc")
    contributions = [every[number]["contributions"].get("2", 0) for number in sorted(every)]
    assert contributions[2] == contributions[1] < contributions[3]
    assert all(math.isfinite(value) for line in every.values() for value in line["sums"])
    for name in "abc":
        told = run.processes[name].read()[1]
        assert re.search(r"site 2 \(c\) states that its parameters are finite, and has sent NaN", told), told


def test_statistics_are_those_of_the_sites_present(tmp_path):
    """Every agreement moves the running mean to the mean of the contributors' own, by samples."""
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, norm=True, pause=0.01)
        every = returns(run, {"leave": 9}, agreed=5)  # buffers and the final digest are compared
    compared = 0
    for number in sorted(every)[1:]:
        lines = [agreements(run, name).get(number) for name in "abc"]
        own = {slot: line["own"] for slot, line in enumerate(lines) if line and line["here"]}
        total = sum(elastic_local.ROWS[slot] for slot in own)
        weights = {slot: elastic_local.ROWS[slot] / total for slot in own}
        whole = set(own) == set(every[number]["present"]) and every[number]["step"] % EVERY == 0
        before = every.get(number - 1, {"present": []})["present"]  # those that have joined in it send more steps
        if whole and number < max(every) - 1 and set(before) >= set(own):
            compared += 1
            for place in (0, 1):
                mean = sum(weights[slot] * own[slot][place] for slot in own)
                assert every[number]["buffers"][place] == pytest.approx(mean, rel=1e-9), number
    assert compared > 3


def test_a_site_returns_into_the_first_agreement(tmp_path):
    """The agreement pauses below min_sites, and has further rounds for buffers, in which the site only listens."""
    with running_hub(tmp_path / "kits", tuple("ab")) as hub:
        run = sites_of(tmp_path, hub, {"min_sites": 2}, norm=True, steps=13)
        run.start("a")
        run.start("b", leave=1)
        run.end("b", -9)
        hub.await_line("paused: 2 sites are needed and 1 is connected: waiting for b", ENDED)
        run.start("b")
        run.end("ab")
        every = check(run, "ab")
    assert [every[number]["present"] for number in (1, 2)] == [[0], [0, 1]]
    assert all(line["buffers"][1] != 16.0 for line in every.values())  # variances that were 1 at the start


def test_in_a_timed_round_each_site_takes_as_many_steps_as_it_can(tmp_path):
    with running_hub(tmp_path / "kits", tuple("ab")) as hub:
        run = sites_of(tmp_path, hub, {"round_seconds": 0.3}, counts=True, steps=60)
        run.start("a", pause=0.01)
        run.start("b", pause=0.05)
        run.end("ab")
        every = check(run, "ab")
    counts(run, "ab", every)
    last = every[max(every)]["contributions"]
    assert last["0"] / elastic_local.ROWS[0] > 1.5 * last["1"] / elastic_local.ROWS[1]


def test_a_site_that_was_stopped_joins_again_in_its_process(tmp_path):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, {"site_timeout": 2.0})
        run.start("abc")
        run.await_step("a", 2, "agreement")
        run.processes["b"].send_signal(signal.SIGSTOP)
        hub.await_line("b has left: silent for 2 s", ENDED)
        run.await_step("a", max(agreements(run, "a")) + 2, "agreement")
        run.processes["b"].send_signal(signal.SIGCONT)
        hub.await_line("b joins", ENDED)
        run.await_step("b", max(agreements(run, "a")) + 3, "agreement")
        every = ends(run, "abc")
    present = [every[number]["present"] for number in sorted(every)]
    assert [0, 2] in present
    assert present[-1] == [0, 1, 2]


@pytest.mark.parametrize(("options", "lost"), [(AT_ONCE, 2), pytest.param(AHEAD, 4, marks=pytest.mark.extensive)])
def test_a_state_that_comes_late_is_that_of_an_open_round(tmp_path, options, lost):
    """The site asked first is held up; the round in which c joined is closed when another one sends its state."""
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        run = sites_of(tmp_path, hub, {**options, "site_timeout": 4.0}, counts=True)
        run.start("a", how="hesitates")
        run.start("b")
        run.lose("c", leave=6)
        hub.await_line("b is asked for its state, for c", ENDED)
        hub.await_line("c takes part again", ENDED)
        run.await_step("c", max(agreements(run, "b")) + 3, "agreement")
        every = ends(run, "abc")
        assert not any(" has left: 2 sites refuse it" in line for line in hub.log)
    counts(run, "abc", every, {"c": lost})
    assert every[max(every)]["present"] == [0, 1, 2]


def test_a_site_that_is_new_in_the_roster_takes_part(tmp_path):
    with running_hub(tmp_path / "kits", tuple("ab")) as hub:
        run = sites_of(tmp_path, hub, counts=True)
        run.start("ab")
        run.await_step("a", 3, "agreement")
        add_site(hub, "abc")
        run.start("c")
        run.await_step("c", 6, "agreement")
        every = ends(run, "abc")
        assert "it has had no part in it so far" in run.processes["c"].read()[1]
    counts(run, "abc", every)


def test_a_hub_that_is_killed_costs_nothing(tmp_path):
    hub = MortalHub(tmp_path, "ab")
    process = hub.start()
    run = sites_of(tmp_path, hub, {"overlap": True}, counts=True, pause=0.02)
    run.start("ab")
    run.await_step("a", 3, "agreement")
    process.kill()
    process.wait(ENDED)
    hub.start()
    run.await_step("b", max(agreements(run, "a")) + 3, "agreement")
    every = ends(run, "ab")
    hub.process.kill()
    assert {tuple(line["present"]) for line in every.values()} == {(0, 1)}
    counts(run, "ab", every)


@pytest.mark.parametrize("options", [AT_ONCE, LATER, {"overlap": True, "delay": 3}, {"overlap": True, "fragments": 2}])
def test_training_resumes_in_the_midst_of_a_round(tmp_path, options):
    """The agreed models are those of a training that has not been interrupted, to the bit."""
    digests = {}
    for place, saves in (("whole", -1), ("parts", 10)):
        folder = tmp_path / place
        folder.mkdir()
        options = options | {"outer_lr": 0.7, "outer_momentum": 0.9, "wire": "bf16"}
        for last in (saves, -1) if saves > 0 else (-1,):
            with running_hub(folder / f"kits{last}", tuple("ab")) as hub:
                run = sites_of(folder, hub, options, steps=26)
                for name in "ab":
                    run.start(name, saves=last, resumes=str(folder / f"{name}.pt"))
                run.end("ab")
        check(run, "ab")
        digests[place] = {line["agreement"]: line["agreed"] for line in run.written("a") if "agreement" in line}
    assert digests["whole"] == digests["parts"]


def test_what_needs_a_hub_or_all_sites_says_so():
    for options, name in (({"late": "skip"}, "late='skip'"), ({"round_seconds": 5.0}, "round_seconds=5.0")):
        with pytest.raises(ValueError, match=f"{name} needs min_sites, .* and a hub: LocalSGD"):
            LocalOptions.create(**options)
    for options in ({"warm_up": 3}, {"sync_batchnorm": True}):
        with pytest.raises(ValueError, match="needs all sites in every step: leave min_sites out"):
            LocalOptions.create(min_sites=1, **options)
    with pytest.raises(ValueError, match="delay=2 counts steps, and rounds of round_seconds=5 have no fixed number"):
        LocalOptions.create(min_sites=1, delay=2, round_seconds=5.0)
    with pytest.raises(ValueError, match="round_seconds must be a positive number or None"):
        LocalOptions.create(min_sites=1, round_seconds=0)


@support.at_sites(2)
def test_sites_without_a_hub_cannot_leave() -> None:

    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="min_sites needs a hub"):
        dadplug.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), min_sites=1)


@pytest.mark.parametrize("overlap", [False, True])
def test_local_steps_go_on_while_the_hub_is_away_and_count_in_the_next_agreement(tmp_path, overlap):
    """The hub is killed between two agreements, and away for the time of several."""
    hub = MortalHub(tmp_path, "ab")
    hub.start()
    run = sites_of(tmp_path, hub, {"overlap": overlap, "every": 60}, counts=True, pause=0.02)
    run.start("ab")
    for name in "ab":
        run.await_step(name, 2, "agreement")
    hub.process.kill()
    hub.process.wait(ENDED)
    before = {name: sum("batch" in line for line in run.written(name)) for name in "ab"}

    def have_stepped() -> bool:
        return all(sum("batch" in line for line in run.written(name)) > before[name] + 150 for name in "ab")

    until(have_stepped, run.state, ENDED)
    assert max(agreements(run, "a")) == 2
    hub.start()
    run.await_step("a", 4, "agreement")
    counts(run, "ab", ends(run, "ab"))
    hub.process.kill()
    assert "the hub is away: local steps go on" in run.processes["a"].read()[1]
