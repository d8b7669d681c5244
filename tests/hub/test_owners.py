"""Owners that merge layers over the hub: exact where the rank leaves nothing out, also when an owner leaves."""

import pytest
from fleet import ENDED, Fleet, is_exact, presence, same_bits
from running_hub import add_site, until
from sealed_sites import sealed_hub

LEAVES = 3


def leaves_and_returns(folder, hub, lost: str, **fields) -> dict[int, list[int]]:
    """Train with a site that is killed and returns; check gradients and parameters; return the present ones by step."""
    others = "abc".replace(lost, "")
    with Fleet(folder, hub, mode="rankdad", merge="owner", exact=True, pause=0.1) as fleet:
        fleet.start(others)
        fleet.lose(lost, leave=LEAVES, **fields)
        fleet.hub.await_line(f"{lost} joins", ENDED)
        lines, present = fleet.finish(others + lost, 8)
    is_exact(lines)
    planned, sent = lines[1]["bytes"]
    assert planned < sent < 1.2 * planned  # what the hub passes on to several sites is sent once
    return present


@pytest.mark.parametrize("lost", ["a", "b"])
@pytest.mark.parametrize("how", ["before", "sent", "header", "late"])
def test_an_owner_that_is_killed_is_replaced_in_the_same_step(tmp_path, how, lost):
    present = leaves_and_returns(tmp_path, "abc", lost, how=how)
    assert present[LEAVES] == present[LEAVES + 1] == [ord(name) - ord("a") for name in "abc".replace(lost, "")]


@pytest.mark.parametrize("stopped", ["a", "b"])
@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
def test_an_owner_that_is_stopped_is_replaced_and_joins_again(tmp_path, stopped, sealed):
    others, hub = "abc".replace(stopped, ""), sealed_hub(tmp_path) if sealed else "abc"
    settings = {"mode": "rankdad", "merge": "owner", "exact": True, "site_timeout": 2.0, "pause": 0.1}
    with Fleet(tmp_path, hub, **settings) as fleet:
        fleet.start("abc")
        fleet.await_step(others[0], 2)
        fleet.freeze(stopped)
        fleet.hub.await_line(f"{stopped} has left: silent for 2 s", ENDED)
        fleet.await_more(others[0], 3)
        fleet.thaw(stopped)
        fleet.hub.await_line(f"{stopped} joins", ENDED)
        lines, present = fleet.finish(others + stopped, 8)
    assert ["abc".index(each) for each in others] in present.values()
    is_exact(lines)


@pytest.mark.parametrize("how", ["header", "late"])
def test_sealed_messages_to_owners_are_exact(tmp_path, how):
    assert leaves_and_returns(tmp_path, sealed_hub(tmp_path), "b", how=how)[LEAVES] == [0, 2]


@pytest.mark.parametrize("harm", ["weight", "unsent", "nan"])
def test_a_lie_to_owners_changes_nothing(tmp_path, harm):
    """All sites add up what they have sent to all, once an owner has got something else than the header states."""
    with Fleet(tmp_path, "abc", mode="rankdad", merge="owner", exact=True, steps=12) as fleet:
        lines, present = fleet.train("ab", c={"harm": harm})
        printed = fleet.printed("a") + fleet.printed("b")
        named = "site 2 (c) has sent " in printed and "to this owner" in printed
    assert set(map(len, present.values())) == {3}
    is_exact(lines)
    assert named == (harm != "nan")


LATE = 8  # first step of which the median is known, with some more


def test_a_site_that_is_late_with_results_misses_the_step(tmp_path):
    """The results of owners travel in a second round, which the hub closes without a late site, too."""
    with Fleet(tmp_path, "abc", mode="rankdad", merge="owner", late="skip", pause=0.08, exact=True) as fleet:
        fleet.start("ab")
        fleet.start("c", other=str(tmp_path / "a"), late_steps=[LATE], late_in="further")
        until(
            lambda: any(2 in line["present"] for step, line in fleet.lines("a").items() if step > LATE),
            fleet.state,
            ENDED,
        )
        fleet.stop(8)
        fleet.end("abc")
        log = "\n".join(fleet.hub.log)
    first, second, late = (fleet.lines(name) for name in "abc")
    assert first[LATE]["present"] == [0, 1]
    assert f"c is late: training goes on without it from step {LATE} on" in log
    assert f"c takes part again: it has missed step{'' if 2 in first[LATE + 1]['present'] else 's'} {LATE}" in log
    for lines in (second, late):
        assert presence(lines) == presence(first)
        same_bits(first, lines)
    is_exact(first)


LINK = [1e-4, 1e-9, 1e-9, 1e-10]  # costs by which owners pay from three sites on


@pytest.mark.parametrize("link", [[], LINK], ids=["measured", "stated"])
def test_a_run_that_grows_stays_exact_and_is_planned_anew_where_so_many_sites_have_owners(tmp_path, link):
    """Two sites send factors to each other. By a measured link a site that joins takes the merge of the others."""
    with Fleet(tmp_path, "ab", mode="rankdad", merge="auto", exact=True, pause=0.1, link=link) as fleet:
        fleet.start("ab")
        fleet.await_step("a", 2)
        add_site(fleet.hub, "abc")
        fleet.start("c")
        fleet.await_more("c", 3, "a")
        lines, present = fleet.finish("abc", 8)
    assert present[0] == [0, 1]
    is_exact(lines)
    if link:
        assert lines[max(lines)]["bytes"][0] > 2 * lines[1]["bytes"][0]  # as the plan states them, of an owner
    else:
        assert all(line["measured"] for line in fleet.lines("c").values())  # none measures alone
