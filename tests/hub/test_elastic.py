"""Training that goes on while sites leave and come: the same bits as with a site that is idle in these steps."""

import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import support
import torch
from cutting_relay import relayed_hub
from fleet import ENDED, Fleet, idles, presence, same_bits
from running_hub import RunningHub, TestSite, add_site, until
from sealed_sites import sealed_hub
from support import refuses
from torch import nn

import dadplug
from dadplug import GradientReduction
from dadplug.errors import FrameError, SiteError
from dadplug.hub.pki.kits import Kit
from dadplug.hub.server import run as run_module
from dadplug.hub.site import rounds as rounds_module
from dadplug.hub.site.donation import ANNOUNCED, StateRequests
from dadplug.hub.site.history import RoundHistory
from dadplug.hub.site.rounds import RoundClient
from dadplug.hub.wire.messages import (
    Grow,
    Pause,
    SendState,
    own_release,
    pack_control,
    read_control,
)
from dadplug.options import Options
from dadplug.step.model_sync.sameness import largest_state
from dadplug.step.model_sync.structure import mark_managed

LINK = [1e-4, 1e-8, 2e-8, 1e-11]  # its costs
LEAVES = 3  # step in which the batches are larger than before, so that there is a second round


def leaves_and_returns(
    folder: Path, names: str, sealed: bool, **settings: object
) -> tuple[dict, list[dict[int, dict]]]:
    """Train with a site that is killed and comes back; return the lines of the first site, and those of all."""
    with Fleet(folder, sealed_hub(folder, tuple(names), sealed), pause=0.08, **settings) as fleet:
        fleet.start(names[:-1])
        fleet.lose(names[-1], leave=LEAVES)
        fleet.hub.await_line(f"{names[-1]} joins", ENDED)
        fleet.stop(15)
        fleet.end(names)
        return fleet.lines("a"), [fleet.lines(name) for name in names]


@pytest.mark.parametrize(
    ("mode", "names", "how", "sealed"),
    [
        ("dsgd", "ab", "header", False),
        ("dad", "ab", "sent", False),
        ("dad", "abc", "late", False),
        ("rankdad", "abc", "late", False),
        ("auto", "ab", "before", False),
        ("dad", "abc", "late", True),
        ("rankdad", "abc", "late", True),
    ],
)
def test_a_site_that_is_lost_and_returns_counts_as_an_idle_one(tmp_path, mode, names, how, sealed):
    first, every = leaves_and_returns(tmp_path / "run", names, sealed, mode=mode, how=how, link=LINK)
    last, present = len(names) - 1, presence(first)
    assert present[LEAVES - 1] == list(range(len(names)))
    assert last not in present[LEAVES]
    assert present[max(present)] == list(range(len(names)))
    for lines in every:
        same_bits(first, lines)
        assert [lines[step]["extent"] for step in lines] == [first[step]["extent"] for step in lines]
    assert max(every[last]) == max(first)  # the site that has returned
    same_bits(first, idles(tmp_path / "idle", names, present, mode=mode, link=LINK))


@pytest.mark.parametrize("late", ["wait", "skip"])
def test_sites_that_join_or_are_late_go_on_with_the_rank_that_the_others_have_chosen(tmp_path, late):
    chooses = {"mode": "rankdad", "exact": True, "rank": "auto", "merge": "auto", "by_byte": 1e-4, "link": LINK}
    with Fleet(tmp_path, "abc", pause=0.05, late=late, **chooses) as fleet:
        fleet.start("ab")
        fleet.start("c", other=str(tmp_path / "a"), late_steps=[6] if late == "skip" else [])  # until they have chosen
        fleet.await_step("a", 10)
        fleet.processes["b"].kill()
        fleet.end("b", -9)
        fleet.await_more("a", 3)
        fleet.start("b")
        fleet.hub.await_line("b joins", ENDED)
        fleet.await_step("a", 26)
        lines, present = fleet.finish("abc")
    assert [lines[step]["rank"] for step in (0, 6, 7, max(lines))] == [8, 8, 4, 4]
    joined = fleet.lines("b")
    assert {joined[step]["rank"] for step in range(10, max(joined) + 1) if step in joined} == {4}
    assert lines[9]["bytes"][1] < 0.7 * lines[6]["bytes"][1]
    assert (2 in present[7]) == (late == "wait")


def test_a_wrapped_model_is_updated_before_its_next_forward_pass(tmp_path):
    """A site is killed, and its new process gets model, optimizer and step; then it is stopped, and joins again."""
    with Fleet(tmp_path, "ab", mode="rankdad", site_timeout=5.0, pause=0.1, wraps=True) as fleet:
        fleet.start("a")
        fleet.lose("b", leave=LEAVES, how="late")
        fleet.hub.await_line("b joins", ENDED)
        fleet.await_more("b", 2, "a")
        fleet.freeze("b")
        fleet.hub.await_line("b has left: silent for 5 s", ENDED)
        fleet.await_more("a", 3)
        fleet.thaw("b")
        fleet.await_joins("b", 2)
        lines, present = fleet.finish("ab", 8)
    assert list(present.values()).count([0]) >= 4
    same_bits(lines, idles(tmp_path / "idle", "ab", present, mode="rankdad"))


def test_a_site_that_returns_knows_who_is_absent_in_a_collective(tmp_path):
    with Fleet(tmp_path, "abc", meets=True, pause=0.1) as fleet:
        fleet.start("a")
        fleet.start("b", leave=3)
        fleet.start("c", leave=5)
        for name in "bc":
            fleet.end(name, -9)
            fleet.hub.await_line(f"{name} has left", ENDED)
        fleet.start("b")  # c has been away for longer
        fleet.hub.await_line("b joins", ENDED)
        fleet.stop(8)
        fleet.end("ab")
        assert fleet.lines("a")[max(fleet.lines("a"))]["present"] == [0, 1]


@pytest.mark.parametrize(("grace", "cuts"), [(20.0, 40), (0.0, 1)])
def test_a_link_that_is_cut_anywhere_changes_nothing(tmp_path, monkeypatch, grace, cuts):
    monkeypatch.setattr(run_module, "SHORT_GRACE", grace)
    with Fleet(tmp_path, relayed_hub(tmp_path, "ab"), mode="rankdad", pause=0.01) as fleet:
        hub, relay = fleet.hub, fleet.hub.relays[1]
        fleet.start("ab")
        fleet.await_step("a", 2)
        relay.refuse = not grace
        for number in range(cuts):
            relay.cut_after(number % 2, 1 + 211 * number)
            until(lambda cut=number: relay.cuts > cut, timeout=ENDED)
            again = number + 1 if grace else 0
            until(
                lambda count=again: sum("(training) has reconnected" in line for line in hub.log) >= count,
                timeout=ENDED,
            )
        if not grace:
            hub.await_line("b has left", ENDED)
            fleet.await_more("a", 3)
            relay.refuse = False
            hub.await_line("b joins", ENDED)
        fleet.stop()
        fleet.end("a")
        assert ("it joins again" in fleet.end("b")) == (not grace)
        lines, present = fleet.lines("a"), presence(fleet.lines("a"))
        same_bits(lines, fleet.lines("b"))
    assert present[max(present)] == [0, 1]
    assert ([0] in present.values()) is not bool(grace)
    same_bits(lines, idles(tmp_path / "idle", "ab", present, mode="rankdad"))


def test_a_round_of_its_own_between_backward_and_the_end_of_the_step_takes_nothing_away(tmp_path):
    with Fleet(tmp_path, "ab", mode="dad", steps=10, talks=True) as fleet:
        fleet.start("a")
        fleet.start("b", leave=6, how="before")
        fleet.end("b", -9)
        fleet.end("a")
        lines, present = fleet.lines("a"), presence(fleet.lines("a"))
    assert list(present.values()) == [[0, 1]] * 6 + [[0]] * 4
    same_bits(lines, idles(tmp_path / "idle", "ab", present, mode="dad"))


def test_below_min_sites_training_pauses_and_says_for_whom(tmp_path):
    with Fleet(tmp_path, "ab", min_sites=2, steps=12) as fleet:
        fleet.start("a")
        fleet.start("b", leave=3)
        fleet.end("b", -9)
        fleet.hub.await_line("paused: 2 sites are needed and 1 is connected: waiting for b", ENDED)
        assert max(fleet.lines("a")) == 2
        fleet.start("b")
        told = fleet.end("a")  # by logging, with the time
        for text in (
            r"training pauses: 2 sites are needed and 1 is connected: waiting for b\n",
            r"site 1 \(b\) is lost: .+\n",
            r"site 1 \(b\) is back, after \d+ s\n",
            r"training goes on, after \d+ s\n",
        ):
            assert re.search(rf"\d\d:\d\d:\d\d dadplug: {text}", told), told
        fleet.end("b")
        assert max(fleet.lines("b")) == 11


def test_another_site_gives_its_state_if_one_is_held_up(tmp_path):
    """The donor is alive, and its program does not get on; its state comes when the round has been closed long ago."""
    with Fleet(tmp_path, "abc", pause=0.1, site_timeout=4.0) as fleet:
        fleet.start("a", how="hesitates")
        fleet.start("b")
        fleet.lose("c", leave=LEAVES)
        fleet.hub.await_line("a is asked for its state, for c", ENDED)
        fleet.hub.await_line("b is asked for its state, for c", ENDED)
        fleet.await_more("c", 2, "b")
        fleet.stop(5, "b")
        fleet.end("abc")
        assert not any(" has left: 2 sites refuse it" in line for line in fleet.hub.log)
        assert not any("a has left" in line for line in fleet.hub.log if "training is complete" not in line)
        for name in "bc":
            same_bits(fleet.lines("a"), fleet.lines(name))


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


@support.at_sites(2)
def test_sites_without_a_hub_cannot_leave() -> None:

    with pytest.raises(ValueError, match="min_sites needs a hub"):
        dadplug.GradientReduction(torch.nn.Linear(2, 2), "dsgd", min_sites=1)


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


# States that a site announces: their size is checked before memory is taken


def rounds_of(announced: int) -> RoundClient:
    rounds = object.__new__(RoundClient)
    complete = SimpleNamespace(complete=True)
    inbox = SimpleNamespace(forget=lambda last: None)
    rounds._link = SimpleNamespace(
        post_control=lambda message: None,
        name=lambda rank: f"site {rank}",
        sealing=complete,
        lock=threading.Lock(),
        inbox=inbox,
    )
    rounds.closed, rounds._closes, rounds._position = 5, {}, None
    rounds.states = StateRequests(1, lambda head, content: None)
    rounds.states.take(SendState(3, 1, 5, 1))
    rounds._wait_until = lambda *given: None
    rounds.history, rounds.refusal = RoundHistory(), None

    def receive(request, number, buffer, timeout):
        buffer[:] = b"x" * len(buffer) if number else ANNOUNCED.pack(announced, 5, bytes(16))
        return True

    rounds._receive_part = receive
    return rounds


def test_a_state_that_is_larger_than_the_model_allows_is_refused():
    model = nn.Linear(100, 100)
    most = largest_state(model)
    assert most > 3 * sum(each.numel() * each.element_size() for each in model.parameters())
    with pytest.raises(SiteError, match=f"site 3 announces a state of {most + 1} bytes, where .* allows {most}"):
        rounds_of(most + 1).receive_state(1.0, most)
    assert rounds_of(1000).receive_state(1.0, most) == b"x" * 1000
    assert rounds_of(100_000).receive_state(1.0, 1 << 20) == b"x" * 100_000


def test_a_site_reports_how_much_of_a_state_has_arrived(monkeypatch, capsys):
    now, sent = [100.0], []
    monkeypatch.setattr(rounds_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rounds = rounds_of(1)
    rounds._link.post_control = sent.append
    monkeypatch.setattr(rounds_module, "PART_BYTES", 1_000_000)
    arrivals = {1: 104.0, 6: 106.0, 7: 110.0, 400: 700.0, 688: 711.0}  # in seconds, by part

    def receive(request, number, part, timeout):
        now[0] = arrivals.get(number, now[0])
        return True

    rounds._receive_part = receive
    assert rounds._receive_parts(SendState(3, 1, 5, 1), range(688_000_000), 1.0)  # its parts have lengths, as bytes do
    assert [each.received for each in sent] == [6_000_000, 400_000_000]
    assert str(sent[0]) == "receives the state: 6 of 688 MB, 11.4 min left"
    assert str(sent[1]) == "receives the state: 400 of 688 MB, 7.2 min left"
    assert capsys.readouterr().err == "".join(f"dadplug: {each}\n" for each in sent)


def test_the_largest_state_follows_the_model():
    with torch.device("meta"):
        large = nn.Linear(30_000, 30_000)
    assert largest_state(large) > 3 * 4 * 30_000**2
    assert largest_state(nn.Linear(3, 3)) < 1 << 30


# Sites that are late: they miss steps, stay members, and the bits are those of a run in which they are idle


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
    settings = {name: case.pop(name) for name in ("mode", "bucket_mb", "link", "wire") if name in case}
    with Fleet(folder, "abc", late="skip", pause=0.01, **settings) as fleet:
        fleet.start("ab")
        fleet.start("c", other=str(folder / "a"), **case)
        if returns:
            fleet.hub.await_line("c takes part again", ENDED)
        else:
            fleet.await_step("a", LATE + 10)
        fleet.stop()
        fleet.end("abc")
        return [fleet.lines(name) for name in "abc"], list(fleet.hub.log)


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        ("dsgd", {"late_steps": [LATE], "catches_up": True}),
        ("dad", {"late_steps": [LATE], "late_in": "backward", "bucket_mb": 1e-4}),
        ("rankdad", {"late_steps": [LATE, LATE + 1], "late_in": "backward", "bucket_mb": 1e-4}),
        ("auto", {"late_steps": [LATE], "late_in": "backward", "link": LINK}),
        ("topk", {"late_steps": [LATE], "late_in": "backward"}),  # with memories of errors, which the late site keeps
        ("dsgd", {"late_steps": [LATE], "late_in": "backward", "wire": "int8"}),
    ],
)
def test_a_late_site_misses_steps_as_if_it_were_idle(tmp_path, mode, case):
    (first, second, late), log = trains_with_a_late_site(tmp_path / "run", True, mode=mode, **case)
    present = presence(first)
    assert 2 not in present[LATE]
    assert any(2 in present[step] for step in range(LATE + 1, max(present) + 1))
    for lines in (second, late):
        assert presence(lines) == present
        same_bits(first, lines)
    assert missed(log, "c") == {step for step in present if 2 not in present[step]}
    settings = {name: case[name] for name in ("bucket_mb", "link", "wire") if name in case}
    same_bits(first, idles(tmp_path / "idle", "abc", present, resets=False, mode=mode, **settings))


def test_a_site_that_is_always_late_stays_a_member_and_its_data_are_not_used(tmp_path):
    (first, _, late), log = trains_with_a_late_site(tmp_path / "run", False, mode="dad", late_steps=[LATE, -1])
    same_bits(late, first)
    assert max(late) == max(first)
    assert not any(2 in first[step]["present"] for step in first if step >= LATE)
    assert missed(log, "c") == {*range(LATE, max(first) + 1)}


def test_options_of_late_sites_are_checked():
    refuses(
        (lambda: Options.create(late="skip"), "late='skip' needs min_sites"),
        (lambda: Options.create(late="drop", min_sites=1), "unknown late 'drop'; valid ones are 'wait', 'skip'"),
        (lambda: Options.create(late="skip", min_sites=1, patience=1.0), "patience must be a number above 1"),
    )


# Runs that grow: a site that is new in the roster joins in the middle, and the bits are those of a run with it


def keep_kits(hub: RunningHub, names: str) -> Path:
    """Copy kits, so that they have the roster of before; return the folder."""
    folder = hub.kits.parent / "kept"
    for name in names:
        shutil.copytree(hub.kits / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("dsgd", {"late": "skip"}),
        ("dad", {}),
        ("rankdad", {}),
        ("rankdad", {"wire": "int8"}),
        ("auto", {"link": LINK}),
        ("dad", {"pause": 1.0}),
        ("dad", {"sealed": True}),
        ("dad", {"pause": 1.0, "sealed": True}),
    ],
)
def test_a_site_that_is_new_counts_as_one_that_was_idle(tmp_path, mode, settings):
    """With long steps the site joins in the round in which the run grows; else the others have room for it before."""
    settings = {"pause": 0.02} | settings
    owner = {"hub_at": None, "sealed": True} if settings.pop("sealed", False) else {}
    with Fleet(tmp_path, sealed_hub(tmp_path, ("a", "b"), bool(owner)), mode=mode, meets=True, **settings) as fleet:
        fleet.start("ab")
        fleet.await_step("a", 3)
        add_site(fleet.hub, "abc", **owner)
        fleet.start("c")
        fleet.hub.await_line("c joins", ENDED)
        lines, present = fleet.finish("abc", 20 if settings["pause"] < 1 else 4)
    assert present[3] == [0, 1]
    same_bits(lines, idles(tmp_path / "idle", "abc", present, mode=mode, **settings | {"late": "wait", "pause": 0.0}))


def test_a_site_that_is_new_sums_in_the_format_of_the_others(tmp_path):
    """The others still send what two sites send in the step in which the run grows to three."""
    with Fleet(tmp_path, "ab", mode="rankdad", few=2, pause=1.0) as fleet:
        fleet.start("ab")
        fleet.await_step("a", 3)
        add_site(fleet.hub, "abc")
        fleet.start("c")
        fleet.hub.await_line("c joins", ENDED)
        _, present = fleet.finish("abc", 4)
    assert present[3] == [0, 1]
    assert present[max(present)] == [0, 1, 2]


def test_a_site_with_an_old_kit_returns_to_a_run_that_has_grown_twice(tmp_path):
    with Fleet(tmp_path, "ab", mode="rankdad", pause=0.02, meets=True) as fleet:
        hub, kept = fleet.hub, keep_kits(fleet.hub, "ab")
        fleet.start("a", kit=str(kept / "a"))
        fleet.start("b", kit=str(kept / "b"), leave=3, how="late")
        fleet.end("b", -9)
        add_site(hub, "abc")
        fleet.start("c")
        hub.await_line("c joins", ENDED)
        add_site(hub, "abcd")
        fleet.start("d", leave=-1)
        hub.await_line("the run grows: it is one of 4 sites now, with d", ENDED)
        fleet.start("b", kit=str(kept / "b"))
        hub.await_line("b joins", ENDED)
        hub.await_line("d joins", ENDED)
        fleet.stop()
        fleet.end("abcd")
        lines, present = fleet.lines("a"), presence(fleet.lines("a"))
        for name in "bcd":
            same_bits(lines, {step: line for step, line in fleet.lines(name).items() if step > 3})
    assert present[max(present)] == [0, 1, 2, 3]
    same_bits(lines, idles(tmp_path / "idle", "abcd", present, mode="rankdad"))


def test_a_run_that_needs_all_sites_goes_on_without_one_that_is_new(tmp_path):
    with Fleet(tmp_path, "ab", min_sites=None, pause=0.02) as fleet:
        fleet.start("ab")
        fleet.await_step("a", 2)
        add_site(fleet.hub, "abc")
        c = TestSite(Kit.load(fleet.hub.kits / "c"), fleet.hub.address, sites=3, release=own_release())
        assert c.action(Pause).reason == "waiting for a, b to leave the last run"
        fleet.stop(5)
        fleet.end("ab")
        assert all(present == [0, 1] for present in presence(fleet.lines("a")).values())
        assert c.action(Pause).reason.endswith("waiting for a, b")  # to begin the next run


def test_names_of_a_growing_run_are_checked():
    body = pack_control(Grow(3, ("a", "b", "c")), 0)[32:]
    assert read_control(body, 2) == Grow(3, ("a", "b", "c"))
    for wrong, field in ((Grow(3, ("a", 5)), "names"), (Grow(3, "abc"), "names"), (Grow(-1, ("a",)), "step")):
        with pytest.raises(FrameError, match=rf"damaged control message: .* at `\$\.{field}"):
            read_control(pack_control(wrong, 0)[32:], 2)
