"""Training that starts without some sites of the roster, which join later."""

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
import support
import torch
from elastic_site import batch, make_model
from fleet import ENDED, Fleet, MortalHub, idles, is_exact, same_bits
from hub_sites import open_link
from json_lines import unpacked
from running_hub import TestSite, running_hub, until
from torch import nn

import dadplug
from dadplug.errors import SiteError
from dadplug.hub.wire.messages import ALL_SITES, Start, StartTerms
from dadplug.tools.cli import Place

NAMES = "abcde"


def alone(present: dict[int, list[int]], steps: int) -> torch.Tensor:
    """Train in one process, in float64, on the rows of the sites that are present; return the parameters."""
    model = make_model().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        rows = [batch(slot, step) for slot in present[step]]
        inputs, targets = (torch.cat(each) for each in zip(*rows))
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(inputs.double()), targets).backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@pytest.mark.parametrize(("mode", "sealed"), [("dsgd", False), ("rankdad", True)])
def test_a_run_starts_with_three_of_five_sites_and_the_others_join(tmp_path, mode, sealed):
    hub = MortalHub(tmp_path / "hub", NAMES, sealed=sealed)
    settings = {"min_sites": 2, "pause": 0.05, "begins": [3, 0.5], "shows": True, "reports": 0.25}
    with Fleet(tmp_path, hub, mode=mode, **settings) as fleet:
        fleet.start("bcd")
        fleet.await_step("b", 2)
        assert any("training starts after step 0 without a, e" in line for line in hub.log)
        fleet.start("a")
        fleet.await_step("a", 3)
        fleet.start("e")
        fleet.await_step("e", 3)
        fleet.stop(10, "b")
        for name in "bcdea":
            printed = fleet.end(name)
            assert ("training goes on without site 4 (e), which has never connected" in printed) == (name in "bcd")
        until(lambda: sum("has contributed" in line for line in hub.log) == 5, fleet.state, ENDED)
        table = {line.split()[3]: line for line in hub.log if "has contributed" in line}
    for slot, name in enumerate(NAMES):
        done = fleet.lines(name)
        samples = sum(len(batch(slot, step)[0]) for step in done)
        assert f"{name} has contributed {samples:,} samples in {len(done)} steps, " in table[name]
        assert table[name].endswith(" of waiting, loss 0.25")
    lines, present = fleet.equal("bacde")
    assert present[0] == [1, 2, 3]
    assert [0, 1, 2, 3] in present.values()
    assert present[max(present)] == [0, 1, 2, 3, 4]
    same_bits(lines, idles(tmp_path / "idle", NAMES, present, mode=mode))
    if mode == "dsgd":
        torch.testing.assert_close(unpacked(lines[7]["parameters"]), alone(present, 8), rtol=1e-4, atol=1e-5)


def test_sites_and_hub_may_fail_in_the_set_up_and_before_the_start(tmp_path):
    """The hub is killed before the start, in the set-up and in training; a site is killed in the set-up.

    Most of the sites are left, which do not wait for as long as all might need to come back.
    """
    hub = MortalHub(tmp_path / "hub", "abcde")
    with Fleet(tmp_path, hub, min_sites=1, site_timeout=3.0, pause=0.06, begins=[4, 0.2]) as fleet:
        fleet.start("cde", how="set-up")
        hub.await_line("; 4 sites are enough to start", ENDED)
        hub.restart()
        fleet.start("b", how="set-up", leave=0)
        until(lambda: (tmp_path / "b" / "restored").exists(), fleet.state, ENDED)
        fleet.start("a")
        hub.await_line("a is connected; it joins at the next step", ENDED)
        (tmp_path / "b" / "goes on").touch()
        fleet.end("b", -9)
        hub.restart()
        hub.await_line("the run that began before the restart goes on", ENDED)
        for name in "cde":
            (tmp_path / name / "goes on").touch()
        fleet.await_step("a", 3)
        hub.restart()
        fleet.start("b")
        fleet.await_more("b", 3, "c")
        assert fleet.finish("cdeab", 8)[1][0] == [2, 3, 4]


def test_a_hub_that_is_killed_while_sites_agree_on_keys_goes_on_with_them(tmp_path):
    hub = MortalHub(tmp_path / "hub", "abc", ("frame", 2), sealed=True)
    with Fleet(tmp_path, hub, min_sites=1, pause=0.06, begins=[2, 0.2]) as fleet:
        fleet.start("bc")
        assert hub.process.wait(ENDED) == -9
        hub.start()
        fleet.await_step("b", 3)
        fleet.start("a")
        fleet.await_more("a", 3, "b")
        assert fleet.finish("bca", 8)[1][0] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_sites": 0}, "start_sites must be a whole number of at least 1, got 0"),
        ({"start_sites": True}, "start_sites must be a whole number"),
        ({"start_sites": 2.0}, "start_sites must be a whole number"),
        ({"start_sites": 3}, "start_sites=3, but the roster has 2: a, b"),
        ({"start_after": 5}, "start_after needs start_sites"),
        ({"start_sites": 1, "start_after": -1}, "start_after must be a number of seconds of at least 0, got -1"),
        ({"start_sites": 1, "start_after": float("nan")}, "start_after must be a number of seconds"),
        ({"start_sites": 1, "timeout": 60}, "start_after=60 s is not below timeout=60 s"),
        ({"start_sites": 1, "kit": None, "rank": 0}, "start_sites needs a hub"),
    ],
)
def test_what_cannot_be_met_is_refused_before_anything_is_sent(kits, arguments, message):
    with pytest.raises(ValueError, match=message):
        dadplug.connect(**{"kit": kits / "a"} | arguments)


CONNECTING = {
    "accelerate": lambda: import_module("dadplug.accelerate").Accelerator(cpu=True, start_sites=2),
    "transformers": lambda: import_module("dadplug.transformers").attach(None, start_sites=2),
    "torch": lambda: Place(0, 2, "tcp://127.0.0.1:1").connect(5.0, start_sites=2),
}


@pytest.mark.parametrize("library", CONNECTING)
def test_all_that_connects_refuses_a_start_without_a_kit(library):
    support.need(library, 1)
    with pytest.raises(ValueError, match="start_sites needs a hub"):
        CONNECTING[library]()


def test_sites_that_state_different_starts_are_named(hub_of_three):
    a = TestSite(hub_of_three.kit("a"), hub_of_three.address, start=StartTerms(2, 60_000))
    for start, words in ((StartTerms(), "no start_sites"), (StartTerms(2, 1000), "start_sites=2, start_after=1")):
        refused = TestSite(hub_of_three.kit("b"), hub_of_three.address, start=start).answer
        text = f"b states {words}, and a start_sites=2, start_after=60: all sites need the same"
        assert (refused.reason, refused.retry) == (text, False)
    assert TestSite(hub_of_three.kit("c"), hub_of_three.address, start=StartTerms(4, 0)).answer.reason.endswith(
        "has 3 sites"
    )
    a.leave()
    b = TestSite(hub_of_three.kit("b"), hub_of_three.address, start=StartTerms(1, 0))
    assert b.action(Start).absent == (0, 2)


def test_a_run_that_may_start_without_all_sites_needs_min_sites(tmp_path):
    with Fleet(tmp_path, "ab", begins=[1, 0]) as fleet:
        for min_sites, message in ((None, "start_sites needs min_sites"), (2, "min_sites=2 exceeds start_sites=1")):
            fleet.start("b", min_sites=min_sites)
            assert f"ValueError: {message}" in fleet.end("b", 1)


def starts_without_the_first(fleet: Fleet, key: str, digest: str = "digest") -> None:
    """Train at b and c from the start, and at a later; check that all end with the same bits.

    Args:
        run: the run.
        key: field that numbers lines with a digest.
        digest: the field of the digest.
    """

    def count(name):
        return sum(key in line for line in fleet.written(name))

    fleet.start("bc")
    until(lambda: min(count("b"), count("c")) > 2 or fleet.processes["b"].poll() is not None, fleet.state, ENDED)
    fleet.start("a")
    until(lambda: count("a") > 5 or fleet.processes["a"].poll() is not None, fleet.state, ENDED)
    step = max(line["step"] for line in fleet.written("b") if "step" in line) if key == "agreement" else 0
    (fleet.folder / "stop").write_text(str(step + 12))
    fleet.end("abc")
    ends = [[line for line in fleet.written(name) if key in line][-1] for name in "abc"]
    assert [end["present"] for end in ends] == [[0, 1, 2]] * 3
    assert len({(end[key], end[digest]) for end in ends}) == 1
    first = next(line for line in fleet.written("b") if key in line)
    assert first["present"] == [1, 2]


@pytest.mark.parametrize(
    ("program", "preload", "key", "settings"),
    [
        ("elastic_lightning", "pytorch_lightning", "number", {"epochs": 10000}),
        ("elastic_catalyst", "catalyst", "number", {"epochs": 10000, "returns": True}),
        ("elastic_local", "", "agreement", {"options": {}}),
    ],
)
def test_trainers_start_without_the_first_site(tmp_path, program, preload, key, settings):
    if preload:
        support.need(preload)
    path = str(Path(support.__file__).parent / f"{program}.py")
    settings |= {"pause": 0.01} if program != "elastic_catalyst" else {}
    with Fleet(tmp_path, "abc", path, [preload] * bool(preload), key=key, begins=[2, 0.2], **settings) as fleet:
        starts_without_the_first(fleet, key, "agreed" if key == "agreement" else "digest")


@pytest.mark.parametrize(("stated", "lie"), [(ALL_SITES, StartTerms(1, 0)), (StartTerms(2, 0), StartTerms(1, 0))])
def test_a_hub_that_starts_without_more_sites_than_a_site_allows_is_refused(tmp_path, stated, lie):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub, ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_link, hub.kits, "a", start=stated)
        hub.await_line("a has joined")
        hub.hub.relay.run.membership.start = lie
        with pytest.raises(
            SiteError, match=r"starts training without site 1 \(b\), site 2 \(c\), and this site states"
        ):
            opening.result()


# States that take long to arrive: the other sites go on training meanwhile, and the site that joins catches up

BALLAST = 4 << 20  # bytes, which take about two seconds
RATE = 20  # Mbit/s


def slow(folder, sealed=False, **settings):
    """Return three sites, the first two of which send at most `RATE`."""
    hub = MortalHub(folder / "hub", "abc", sealed=sealed, rate=dict.fromkeys("ab", RATE))
    return Fleet(folder, hub, ballast=BALLAST, pause=0.03, **settings)


def lose_and_start(fleet):
    """Let c leave, and start it anew once the others have gone on; return the donor of its state."""
    fleet.start("ab")
    fleet.start("c", leave=2)
    fleet.end("c", -9)
    fleet.await_step("a", 4)
    fleet.start("c")
    return fleet.hub.await_line("is asked for its state").split()[3]


def caught_up(fleet, names="ab"):
    """Let a fleet end with all sites; check that others have gone on while c got its state, and that all are equal."""
    fleet.await_step("c", 3)
    first = min(step for step in fleet.lines("c") if step > 2)
    until(lambda: max(fleet.lines("c")) in fleet.lines(names[0]) and _takes_part(fleet, names[0], first), fleet.state)
    _, present = fleet.finish(f"{names}c", 10)
    again = min(step for step in present if step > first and 2 in present[step])
    assert again - first >= 10, (first, again)  # steps without c, whose frames it was sent
    assert {*range(first, again)} <= fleet.lines("c").keys()
    return present


def _takes_part(fleet, name, first):
    lines = fleet.lines(name)
    return any(2 in line["present"] for step, line in lines.items() if step > first)


@pytest.mark.parametrize(
    ("settings", "sealed"),
    [
        ({"mode": "dsgd"}, False),
        ({"mode": "rankdad", "late": "skip"}, True),
        ({"mode": "rankdad", "exact": True, "merge": "owner"}, True),
    ],
    ids=["dsgd", "rankdad-skip", "owner"],
)
def test_others_train_on_while_a_state_is_on_its_way(tmp_path, settings, sealed):
    with slow(tmp_path, sealed, **settings) as fleet:
        lose_and_start(fleet)
        present = caught_up(fleet)
        assert any("c joins: training goes on without it from step" in line for line in fleet.hub.log)
        assert not any("receives the state of the training" in line for line in fleet.hub.log)  # no pause
    lines = fleet.lines("a")
    if "exact" in settings:
        is_exact(lines)
    else:
        same_bits(lines, idles(tmp_path / "idle", "abc", present, **{**settings, "late": "wait"}))


def test_another_site_sends_its_state_if_one_is_lost_with_it_on_its_way(tmp_path):
    with slow(tmp_path, mode="rankdad") as fleet:
        donor = lose_and_start(fleet)
        other = {"a": "b", "b": "a"}[donor]
        fleet.await_more(other, 10)
        fleet.processes[donor].kill()
        fleet.end(donor, -9)
        caught_up(fleet, other)
        asked = [line for line in fleet.hub.log if "is asked for its state" in line]
        assert len(asked) == 2
        assert f" {other} is asked" in asked[1]


def test_a_site_that_is_lost_with_its_state_on_its_way_holds_up_nobody(tmp_path):
    with slow(tmp_path, sealed=True, mode="dsgd") as fleet:
        lose_and_start(fleet)
        fleet.await_more("a", 10)
        fleet.processes["c"].kill()
        fleet.end("c", -9)
        fleet.await_step("a", max(fleet.lines("a")) + 20)
        fleet.start("c")
        caught_up(fleet)


def test_a_restart_of_the_hub_with_a_state_on_its_way_begins_it_anew(tmp_path):
    with slow(tmp_path, mode="dsgd") as fleet:
        lose_and_start(fleet)
        fleet.await_more("a", 10)
        fleet.hub.restart()
        caught_up(fleet)


def test_a_collective_waits_for_a_site_that_catches_up(tmp_path):
    with slow(tmp_path, mode="dsgd", meets=True) as fleet:
        lose_and_start(fleet)
        fleet.stop(25)  # a and b are there before c
        fleet.end("abc")
    _, present = fleet.equal("ac")
    assert any(2 not in present[step] for step in present if step > 4)
