"""Training that starts without some sites of the roster, which join later."""

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest
import support
import torch
from elastic_runs import ENDED, MortalHub, Run, idles, same_bits
from elastic_site import batch, make_model
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


def ends_with_all(run: Run, names: str) -> None:
    """Let sites end together; check that all are present and have the bits of the first, which began with the run."""
    run.stop(name=names[0])
    run.end(names)
    lines = run.lines(names[0])
    for name in names[1:]:
        same_bits(lines, run.lines(name))
    assert lines[max(lines)]["present"] == [*range(len(names))]


@pytest.mark.parametrize(("mode", "sealed"), [("dsgd", False), ("rankdad", True)])
def test_a_run_starts_with_three_of_five_sites_and_the_others_join(tmp_path, mode, sealed):
    hub = MortalHub(tmp_path / "hub", NAMES, sealed=sealed)
    served = hub.start()
    try:
        run = Run(tmp_path, hub, mode=mode, min_sites=2, pause=0.02, begins=[3, 0.5], shows=True, reports=0.25)
        run.start("bcd")
        run.await_step("b", 2)
        assert any("training starts after step 0 without a, e" in line for line in hub.log)
        run.start("a")
        run.await_step("a", 3)
        run.start("e")
        run.await_step("e", 3)
        run.stop(name="b")
        for name in "bcdea":
            printed = run.end(name)
            assert ("training goes on without site 4 (e), which has never connected" in printed) == (name in "bcd")
        until(lambda: sum("has contributed" in line for line in hub.log) == 5, run.state, ENDED)
        table = {line.split()[3]: line for line in hub.log if "has contributed" in line}
    finally:
        served.kill()
    for slot, name in enumerate(NAMES):
        done = run.lines(name)
        samples = sum(len(batch(slot, step)[0]) for step in done)
        assert f"{name} has contributed {samples:,} samples in {len(done)} steps, " in table[name]
        assert table[name].endswith(" of waiting, loss 0.25")
    lines = run.lines("b")
    present = {step: line["present"] for step, line in lines.items()}
    assert present[0] == [1, 2, 3]
    assert [0, 1, 2, 3] in present.values()
    assert present[max(present)] == [0, 1, 2, 3, 4]
    for name in "acde":
        same_bits(lines, run.lines(name))
    same_bits(lines, idles(tmp_path / "idle", NAMES, present, mode=mode))
    if mode == "dsgd":
        expected = alone(present, 8)
        torch.testing.assert_close(torch.tensor(lines[7]["parameters"]), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_sites_and_hub_may_fail_in_the_set_up_and_before_the_start(tmp_path):
    """The hub is killed before the start, in the set-up and in training; a site is killed in the set-up.

    Most of the sites are left, which do not wait for as long as all might need to come back.
    """
    hub = MortalHub(tmp_path / "hub", "abcde")

    def restart(served):
        served.kill()
        served.wait(ENDED)
        return hub.start()

    def awaits(text):
        until(lambda: any(text in line for line in hub.log), run.state, ENDED)

    served = hub.start()
    run = Run(tmp_path, hub, min_sites=1, site_timeout=3.0, pause=0.02, begins=[4, 0.2])
    try:
        run.start("cde", how="set-up")
        awaits("; 4 sites are enough to start")
        served = restart(served)
        run.start("b", how="set-up", leave=0)
        until(lambda: (tmp_path / "b" / "restored").exists(), run.state, ENDED)
        run.start("a")
        awaits("a is connected; it joins at the next step")
        (tmp_path / "b" / "goes on").touch()
        run.end("b", -9)
        served = restart(served)
        awaits("the run that began before the restart goes on")
        for name in "cde":
            (tmp_path / name / "goes on").touch()
        run.await_step("a", 3)
        served = restart(served)
        run.start("b")
        run.await_step("b", max(run.lines("c")) + 3)
        ends_with_all(run, "cdeab")
    finally:
        served.kill()
    assert run.lines("c")[0]["present"] == [2, 3, 4]


def test_a_hub_that_is_killed_while_sites_agree_on_keys_goes_on_with_them(tmp_path):
    hub = MortalHub(tmp_path / "hub", "abc", sealed=True)
    served = hub.start("frame", 2)
    run = Run(tmp_path, hub, min_sites=1, pause=0.02, begins=[2, 0.2])
    try:
        run.start("bc")
        assert served.wait(ENDED) == -9
        served = hub.start()
        run.await_step("b", 3)
        run.start("a")
        run.await_step("a", max(run.lines("b")) + 3)
        ends_with_all(run, "bca")
    finally:
        served.kill()
    assert run.lines("b")[0]["present"] == [1, 2]


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
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        for min_sites, message in ((None, "start_sites needs min_sites"), (2, "min_sites=2 exceeds start_sites=1")):
            run = Run(tmp_path, hub, min_sites=min_sites, begins=[1, 0])
            run.start("b")
            assert f"ValueError: {message}" in run.end("b", 1)


def starts_without_the_first(run: Run, key: str, digest: str = "digest") -> None:
    """Train at b and c from the start, and at a later; check that all end with the same bits.

    Args:
        run: the run.
        key: field that numbers lines with a digest.
        digest: the field of the digest.
    """

    def count(name):
        return sum(key in line for line in run.written(name))

    run.start("bc")
    until(lambda: min(count("b"), count("c")) > 2 or run.processes["b"].poll() is not None, run.state, ENDED)
    run.start("a")
    until(lambda: count("a") > 5 or run.processes["a"].poll() is not None, run.state, ENDED)
    step = max(line["step"] for line in run.written("b") if "step" in line) if key == "agreement" else 0
    (run.folder / "stop").write_text(str(step + 12))
    run.end("abc")
    ends = [[line for line in run.written(name) if key in line][-1] for name in "abc"]
    assert [end["present"] for end in ends] == [[0, 1, 2]] * 3
    assert len({(end[key], end[digest]) for end in ends}) == 1
    first = next(line for line in run.written("b") if key in line)
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
    with running_hub(tmp_path / "kits", tuple("abc")) as hub:
        settings |= {"pause": 0.01} if program != "elastic_catalyst" else {}
        run = Run(tmp_path, hub, path, [preload] * bool(preload), begins=[2, 0.2], **settings)
        starts_without_the_first(run, key, "agreed" if key == "agreement" else "digest")


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
