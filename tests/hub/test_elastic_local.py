"""Local steps over a hub, where sites leave, return and are late: what counts, bits that are equal, no sample twice."""

import math
import re
from pathlib import Path
from typing import Any

import elastic_local
import pytest
import support
import torch
from elastic_local import check, ends, reference
from fleet import ENDED, Fleet, MortalHub
from running_hub import add_site, running_hub
from support import refuses

import dadplug
from dadplug.local_steps import LocalOptions

EVERY = 4
AT_ONCE, LATER, AHEAD = {"overlap": False}, {"overlap": True}, {"overlap": True, "delay": 2}
"""Deltas are sent in the agreement that counts them, after the one before, or two steps ahead."""


def sites_of(folder: Path, hub: Any, options: dict | None = None, **settings: object) -> Fleet:
    settings = {"pause": 0.005, "key": "agreement"} | settings
    return Fleet(folder, hub, elastic_local.__file__, options=options or {}, **settings)


def returns(fleet: Fleet, settings: dict, agreed: int = 4, later: int = 8) -> dict[int, dict]:
    """Train at sites a, b and c; the last one is killed and returns.

    Args:
        fleet: the sites.
        settings: when and how the site is killed.
        agreed: the agreement of the others after which it is started again.
        later: the agreement that it then takes part in before all stop.

    Returns:
        The agreements by number, as `check` does.
    """
    fleet.start("ab")
    fleet.start("c", **settings)
    fleet.end("c", -9)
    fleet.await_step("a", agreed)
    fleet.start("c")
    fleet.await_step("c", later)
    return ends(fleet, "abc")


def none_twice(fleet: Fleet, names: str) -> None:
    for name in names:
        batches = [(line["pid"], line["batch"]) for line in fleet.written(name, "batch")]
        assert len(set(batches)) == len(batches)


def equals_reference(fleet: Fleet, names: str, every: dict[int, dict], options: dict) -> None:
    outer = options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0)
    found = reference([fleet.written(name) for name in names], outer, options.get("fragments", 1))
    assert len(found) >= len(every) - 1
    for number, sums in found.items():
        assert every[number]["sums"] == pytest.approx(sums, rel=1e-12, abs=1e-12), (number, fleet.state())


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
    with sites_of(tmp_path, "abc", options) as fleet:
        every = returns(fleet, {"leave": leave, "how": how})
        none_twice(fleet, "abc")
        equals_reference(fleet, "abc", every, options)
        present = [every[number]["present"] for number in sorted(every)]
        assert [0, 1, 2] in present
        assert [0, 1] in present
        assert present[-1] == [0, 1, 2]
        told = fleet.printed("a")
        assert re.search(r"site 2 \(c\) has left: what it had done since agreement \d+, and not sent, is lost", told), (
            told
        )
        assert re.search(r"site 2 \(c\) takes part from agreement \d+ on", told), told
        told = fleet.printed("c")
        assert re.search(r"its last contribution is that of agreement \d+, and what it had done since", told), told
        joined = fleet.written("c", "joined")
        part = EVERY // options.get("fragments", 1)
        assert (joined[1]["joined"] + 1) % part == 0  # one step before the agreement that the others are in
        assert joined[1]["schedule"] == joined[1]["joined"]


def test_a_site_that_returns_has_the_chosen_delay(tmp_path):
    """`check` compares the delays of all sites after each agreement; all have chosen less than a quarter."""
    options = {"every": 16, "overlap": True, "density": 0.5, "wire": "int2"}
    with sites_of(tmp_path, "abc", options, pause=0.01) as fleet:
        every = returns(fleet, {"leave": 70})
    assert every[1]["delay"] == 4 > every[max(every)]["delay"]


def counts(fleet: Fleet, names: str, every: dict[int, dict], lost: dict[str, int] | None = None) -> None:
    """Check that each batch of the sites is part of the agreed model once, by the model's own elements.

    Args:
        fleet: the sites.
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
        trained = len(fleet.written(name, "batch"))
        assert steps[slot] == pytest.approx(trained - (lost or {}).get(name, 0)), (name, fleet.state())


@pytest.mark.parametrize(("options", "lost"), [(AT_ONCE, 2), (LATER, 6), (AHEAD, 4)])
@pytest.mark.parametrize("talks", [False, True])
def test_no_step_is_lost_or_counts_twice(tmp_path, options, lost, talks):
    """A site is killed and returns; its process before has sent all but its last steps."""
    with sites_of(tmp_path, "abc", options, counts=True, talks=talks) as fleet:
        every = returns(fleet, {"leave": 10})
    counts(fleet, "abc", every, {"c": lost})


@pytest.mark.parametrize("options", [AT_ONCE, LATER, AHEAD])
def test_the_steps_of_a_late_site_count_later(tmp_path, options):
    with sites_of(tmp_path, "abc", options | {"late": "skip", "site_timeout": 2.0}, counts=True) as fleet:
        fleet.start("ab")
        fleet.start("c", late=2, other=str(tmp_path / "a"))
        fleet.await_step("c", 8)
        every = ends(fleet, "abc")
        assert any("it has missed" in line for line in fleet.hub.log), fleet.hub.log
    assert [0, 1] in [line["present"] for line in every.values()]
    counts(fleet, "abc", every)
    assert "this site is late: its steps count in a later agreement" in fleet.printed("c")


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
    with sites_of(tmp_path, "abc", options, norm=True, steps=24) as fleet:
        fleet.start("ab")
        fleet.start("c", spoils=2)
        fleet.end("abc")
        every = check(fleet, "abc", options.get("fragments", 1))
    contributions = [every[number]["contributions"].get("2") for number in range(1, 1 + len(batches))]
    assert contributions == [each and each * elastic_local.ROWS[2] for each in batches]
    assert all(math.isfinite(value) for line in every.values() for value in [*line["sums"], *line["buffers"]])
    for name in "abc":
        told = fleet.printed(name)
        assert re.search(r"parameter '0.weight' holds NaN or Inf at site 2 \(c\): its steps since the last", told), told


@pytest.mark.parametrize("options", [{}, {"density": 0.1, "wire": "int2"}], ids=["dense", "sparse"])
def test_a_site_that_sends_other_than_finite_deltas_is_left_out_and_named(tmp_path, options):
    with sites_of(tmp_path, "abc", options) as fleet:
        fleet.start("ab")
        fleet.start("c", spoils=2, how="lies")
        fleet.await_step("a", 4)
        fleet.await_more("c", 1, "a")  # a site that is dropped has joined again then, and not as the others end
        every = ends(fleet, "abc")
    contributions = [every[number]["contributions"].get("2", 0) for number in sorted(every)]
    assert contributions[2] == contributions[1] <= contributions[3]
    assert options or contributions[1] < contributions[3]
    assert all(math.isfinite(value) for line in every.values() for value in line["sums"])
    found = "has sent an invalid delta of" if options else "states that its parameters are finite, and has sent NaN"
    for name in "ab":
        assert f"site 2 (c) {found}" in fleet.printed(name), fleet.state()


@pytest.mark.parametrize(
    "options",
    [{"overlap": False}, {"density": 0.1, "wire": "int2", "overlap": True, "fragments": 2}],
    ids=["dense", "sparse"],
)
def test_a_site_whose_delta_is_out_of_all_proportion_is_named(tmp_path, options):
    """NaN follows at all sites; the first of them is no more at fault than the others."""
    with sites_of(tmp_path, "abc", options, steps=40) as fleet:
        fleet.start("ab")
        fleet.start("c", spoils=2, how="shouts")
        fleet.end("abc", 1)
        for name in "ab":
            told = fleet.printed(name)
            assert len(re.findall(r": step \d+: the norm of the delta of site 2 \(c\) is ", told)) == 1, told
            assert re.search(r"NonFiniteError: in step \d+ the norm of the delta of site 2 \(c\) was ", told), told
        fleet.hub.await_line("c: in step ", ENDED)


@pytest.mark.parametrize("header", [{"weight": 2}, {"step": 1 << 62}, {"layout": 5}], ids=str)
def test_a_site_that_states_what_counts_for_more_or_is_no_agreement_is_left_out_and_named(tmp_path, header):
    with sites_of(tmp_path, "abc", {"weighting": "uniform"}, steps=24) as fleet:
        fleet.start("ab")
        fleet.start("c", spoils=2, header=header)
        fleet.end("ab")
        fleet.end("c", int("layout" in header))
        every = check(fleet, "ab")
    contributions = [every[number]["contributions"].get("2", 0) for number in sorted(every)]
    assert contributions[2] == contributions[1] > 0
    assert max(line["step"] for line in every.values()) < 40
    for name in "ab":
        assert "site 2 (c) has sent an invalid header: " in fleet.printed(name), fleet.state()


def test_statistics_are_those_of_the_sites_present(tmp_path):
    """Every agreement moves the running mean to the mean of the contributors' own, by samples."""
    with sites_of(tmp_path, "abc", norm=True, pause=0.01) as fleet:
        every = returns(fleet, {"leave": 9}, agreed=5)  # buffers and the final digest are compared
    compared = 0
    for number in sorted(every)[1:]:
        lines = [fleet.lines(name).get(number) for name in "abc"]
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
    with sites_of(tmp_path, "ab", {"min_sites": 2}, norm=True, steps=13) as fleet:
        fleet.start("a")
        fleet.start("b", leave=1)
        fleet.end("b", -9)
        fleet.hub.await_line("paused: 2 sites are needed and 1 is connected: waiting for b", ENDED)
        fleet.start("b")
        fleet.end("ab")
        every = check(fleet, "ab")
    assert [every[number]["present"] for number in (1, 2)] == [[0], [0, 1]]
    assert all(line["buffers"][1] != 16.0 for line in every.values())  # variances that were 1 at the start


def test_in_a_timed_round_each_site_takes_as_many_steps_as_it_can(tmp_path):
    with sites_of(tmp_path, "ab", {"round_seconds": 0.3}, counts=True, steps=60) as fleet:
        fleet.start("a", pause=0.01)
        fleet.start("b", pause=0.05)
        fleet.end("ab")
        every = check(fleet, "ab")
    counts(fleet, "ab", every)
    last = every[max(every)]["contributions"]
    assert last["0"] / elastic_local.ROWS[0] > 1.5 * last["1"] / elastic_local.ROWS[1]


def test_a_site_that_was_stopped_joins_again_in_its_process(tmp_path):
    with sites_of(tmp_path, "abc", {"site_timeout": 2.0}) as fleet:
        fleet.start("abc")
        fleet.await_step("a", 2)
        fleet.freeze("b")
        fleet.hub.await_line("b has left: silent for 2 s", ENDED)
        fleet.await_more("a", 2, "a")
        fleet.thaw("b")
        fleet.hub.await_line("b joins", ENDED)
        fleet.await_more("b", 3, "a")
        every = ends(fleet, "abc")
    present = [every[number]["present"] for number in sorted(every)]
    assert [0, 2] in present
    assert present[-1] == [0, 1, 2]


@pytest.mark.parametrize(("options", "lost"), [(AT_ONCE, 2), pytest.param(AHEAD, 4, marks=pytest.mark.extensive)])
def test_a_state_that_comes_late_is_that_of_an_open_round(tmp_path, options, lost):
    """The site asked first is held up; the round in which c joined is closed when another one sends its state."""
    with sites_of(tmp_path, "abc", {**options, "site_timeout": 4.0}, counts=True) as fleet:
        fleet.start("a", how="hesitates")
        fleet.start("b")
        fleet.lose("c", leave=6)
        fleet.hub.await_line("b is asked for its state, for c", ENDED)
        fleet.hub.await_line("c takes part again", ENDED)
        fleet.await_more("c", 3, "b")
        every = ends(fleet, "abc")
        assert not any(" has left: 2 sites refuse it" in line for line in fleet.hub.log)
    counts(fleet, "abc", every, {"c": lost})
    assert every[max(every)]["present"] == [0, 1, 2]


def test_a_site_that_is_new_in_the_roster_takes_part(tmp_path):
    with sites_of(tmp_path, "ab", counts=True) as fleet:
        fleet.start("ab")
        fleet.await_step("a", 3)
        add_site(fleet.hub, "abc")
        fleet.start("c")
        fleet.await_step("c", 6)
        every = ends(fleet, "abc")
        assert "it has had no part in it so far" in fleet.printed("c")
    counts(fleet, "abc", every)


def test_a_hub_that_is_killed_costs_nothing(tmp_path):
    with sites_of(tmp_path, MortalHub(tmp_path, "ab"), {"overlap": True}, counts=True, pause=0.02) as fleet:
        fleet.start("ab")
        fleet.await_step("a", 3)
        fleet.hub.restart()
        fleet.await_more("b", 3, "a")
        every = ends(fleet, "ab")
    assert {tuple(line["present"]) for line in every.values()} == {(0, 1)}
    counts(fleet, "ab", every)


@pytest.mark.parametrize("options", [AT_ONCE, LATER, {"overlap": True, "delay": 3}, {"overlap": True, "fragments": 2}])
def test_training_resumes_in_the_midst_of_a_round(tmp_path, options):
    """The agreed models are those of a training that has not been interrupted, to the bit."""
    digests = {}
    for place, saves in (("whole", -1), ("parts", 10)):
        folder = tmp_path / place
        options = options | {"outer_lr": 0.7, "outer_momentum": 0.9, "wire": "bf16"}
        for last in (saves, -1) if saves > 0 else (-1,):
            with sites_of(folder, running_hub(folder / f"kits{last}", tuple("ab")), options, steps=26) as fleet:
                for name in "ab":
                    fleet.start(name, saves=last, resumes=str(folder / f"{name}.pt"))
                fleet.end("ab")
        check(fleet, "ab")
        digests[place] = {number: line["agreed"] for number, line in fleet.lines("a").items()}
    assert digests["whole"] == digests["parts"]


def test_what_needs_a_hub_or_all_sites_says_so():
    for options, name in (({"late": "skip"}, "late='skip'"), ({"round_seconds": 5.0}, "round_seconds=5.0")):
        with pytest.raises(ValueError, match=f"{name} needs min_sites, .* and a hub: LocalSGD"):
            LocalOptions.create(**options)
    for options in ({"warm_up": 3}, {"sync_batchnorm": True}):
        with pytest.raises(ValueError, match="needs all sites in every step: leave min_sites out"):
            LocalOptions.create(min_sites=1, **options)
    refuses(
        (
            lambda: LocalOptions.create(min_sites=1, delay=2, round_seconds=5.0),
            "delay=2 counts steps, and rounds of round_seconds=5 have no fixed number",
        ),
        (lambda: LocalOptions.create(min_sites=1, round_seconds=0), "round_seconds must be a positive number or None"),
    )


@support.at_sites(2)
def test_sites_without_a_hub_cannot_leave() -> None:

    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="min_sites needs a hub"):
        dadplug.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), min_sites=1)
