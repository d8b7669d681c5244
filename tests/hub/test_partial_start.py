"""Training that starts without some sites of the roster, which join later."""

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
import support
import torch
from elastic_site import batch, make_model
from fleet import ENDED, Fleet, MortalHub, idles, same_bits
from hub_sites import open_link
from running_hub import TestSite, running_hub, until
from torch import nn

import dadplug
from dadplug.errors import SiteError
from dadplug.hub.wire.messages import ALL_SITES, Start, StartTerms
from dadplug.tools.cli import Place

NAMES = "abcde"


def alone(present: dict[int, list[int]], steps: int) -> list[float]:
    """Train in one process, in float64, on the rows of the sites that are present; return the parameters."""
    model = make_model().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        rows = [batch(slot, step) for slot in present[step]]
        inputs, targets = (torch.cat(each) for each in zip(*rows))
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(inputs.double()), targets).backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).tolist()


@pytest.mark.parametrize(("mode", "sealed"), [("dsgd", False), ("rankdad", True)])
def test_a_run_starts_with_three_of_five_sites_and_the_others_join(tmp_path, mode, sealed):
    hub = MortalHub(tmp_path / "hub", NAMES, sealed=sealed)
    settings = {"min_sites": 2, "pause": 0.02, "begins": [3, 0.5], "shows": True, "reports": 0.25}
    with Fleet(tmp_path, hub, mode=mode, **settings) as fleet:
        fleet.start("bcd")
        fleet.await_step("b", 2)
        assert any("training starts after step 0 without a, e" in line for line in hub.log)
        fleet.start("a")
        fleet.await_step("a", 3)
        fleet.start("e")
        fleet.await_step("e", 3)
        fleet.stop(name="b")
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
        expected = alone(present, 8)
        torch.testing.assert_close(torch.tensor(lines[7]["parameters"]), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_sites_and_hub_may_fail_in_the_set_up_and_before_the_start(tmp_path):
    """The hub is killed before the start, in the set-up and in training; a site is killed in the set-up.

    Most of the sites are left, which do not wait for as long as all might need to come back.
    """
    hub = MortalHub(tmp_path / "hub", "abcde")
    with Fleet(tmp_path, hub, min_sites=1, site_timeout=3.0, pause=0.02, begins=[4, 0.2]) as fleet:
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
        assert fleet.finish("cdeab")[1][0] == [2, 3, 4]


def test_a_hub_that_is_killed_while_sites_agree_on_keys_goes_on_with_them(tmp_path):
    hub = MortalHub(tmp_path / "hub", "abc", ("frame", 2), sealed=True)
    with Fleet(tmp_path, hub, min_sites=1, pause=0.02, begins=[2, 0.2]) as fleet:
        fleet.start("bc")
        assert hub.process.wait(ENDED) == -9
        hub.start()
        fleet.await_step("b", 3)
        fleet.start("a")
        fleet.await_more("a", 3, "b")
        assert fleet.finish("bca")[1][0] == [1, 2]


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
    support.need(library)
    with pytest.raises(ValueError, match="start_sites needs a hub"):
        CONNECTING[library]()


def test_sites_that_state_different_starts_are_named(tmp_path):
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        a = TestSite(hub.kit("a"), hub.address, start=StartTerms(2, 60_000))
        for start, words in ((StartTerms(), "no start_sites"), (StartTerms(2, 1000), "start_sites=2, start_after=1")):
            refused = TestSite(hub.kit("b"), hub.address, start=start).answer
            text = f"b states {words}, and a start_sites=2, start_after=60: all sites need the same"
            assert (refused.reason, refused.retry) == (text, False)
        assert TestSite(hub.kit("c"), hub.address, start=StartTerms(4, 0)).answer.reason.endswith("has 3 sites")
        a.leave()
        b = TestSite(hub.kit("b"), hub.address, start=StartTerms(1, 0))
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
