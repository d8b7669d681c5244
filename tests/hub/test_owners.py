"""Owners that merge layers over the hub: exact where the rank leaves nothing out, also when an owner leaves."""

import pytest
from elastic_runs import ENDED, Run, is_exact, presence, same_bits
from running_hub import add_site, running_hub, until
from sealed_sites import sealed_hub

LEAVES = 3


def leaves_and_returns(folder, hub, lost: str, **fields) -> dict[int, list[int]]:
    """Train with a site that is killed and returns; check gradients and parameters; return the present ones by step."""
    names, others = "abc", "abc".replace(lost, "")
    run = Run(folder, hub, mode="rankdad", merge="owner", exact=True, pause=0.01)
    run.start(others)
    run.lose(lost, leave=LEAVES, **fields)
    hub.await_line(f"{lost} joins", ENDED)
    run.stop(20, others[0])
    run.end(names)
    lines = run.lines(others[0])
    is_exact(lines)
    planned, sent = lines[1]["bytes"]
    assert planned < sent < 1.2 * planned  # what the hub passes on to several sites is sent once
    for name in names:
        same_bits(lines, run.lines(name))
    return presence(lines)


@pytest.mark.parametrize("lost", ["a", "b"])
@pytest.mark.parametrize("how", ["before", "sent", "header", "late"])
def test_an_owner_that_is_killed_is_replaced_in_the_same_step(tmp_path, how, lost):
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        present = leaves_and_returns(tmp_path, hub, lost, how=how)
    assert present[LEAVES] == present[LEAVES + 1] == [ord(name) - ord("a") for name in "abc".replace(lost, "")]
    assert present[max(present)] == [0, 1, 2]


@pytest.mark.parametrize("how", ["header", "late"])
def test_sealed_messages_to_owners_are_exact(tmp_path, how):
    with sealed_hub(tmp_path) as hub:
        present = leaves_and_returns(tmp_path, hub, "b", how=how)
    assert present[LEAVES] == [0, 2]
    assert present[max(present)] == [0, 1, 2]


@pytest.mark.parametrize("harm", ["weight", "unsent", "nan"])
def test_a_lie_to_owners_changes_nothing(tmp_path, harm):
    """All sites add up what they have sent to all, once an owner has got something else than the header states."""
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        run = Run(tmp_path, hub, mode="rankdad", merge="owner", exact=True, steps=12, stops=False)
        run.start("ab")
        run.start("c", harm=harm)
        run.end("abc")
    lines = run.lines("a")
    assert set(map(len, presence(lines).values())) == {3}
    is_exact(lines)
    for name in "bc":
        same_bits(lines, run.lines(name))


def test_a_run_that_grows_stays_exact_with_the_merge_of_the_others(tmp_path):
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        run = Run(tmp_path, hub, mode="rankdad", merge="auto", exact=True, pause=0.01)
        run.start("ab")
        run.await_step("a", 2)
        add_site(hub, "abc")
        run.start("c")
        run.await_step("c", max(run.lines("a")) + 3)
        lines, present = run.finish("abc")
    assert present[0] == [0, 1]
    assert all(line["measured"] for line in run.lines("c").values())  # else it would measure alone for the next plan
    is_exact(lines)


LATE = 8  # first step of which the median is known, with some more


def test_a_site_that_is_late_with_results_misses_the_step(tmp_path):
    """The results of owners travel in a second round, which the hub closes without a late site, too."""
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        run = Run(tmp_path, hub, mode="rankdad", merge="owner", late="skip", pause=0.01, exact=True)
        run.start("ab")
        run.start("c", other=str(tmp_path / "a"), late_steps=[LATE], late_in="further")
        until(
            lambda: any(2 in line["present"] for step, line in run.lines("a").items() if step > LATE), run.state, ENDED
        )
        run.stop()
        run.end("abc")
        log = "\n".join(hub.log)
    first, second, late = (run.lines(name) for name in "abc")
    assert first[LATE]["present"] == [0, 1]
    assert f"c is late: training goes on without it from step {LATE} on" in log
    assert f"c takes part again: it has missed step{'' if 2 in first[LATE + 1]['present'] else 's'} {LATE}" in log
    for lines in (second, late):
        assert presence(lines) == presence(first)
        same_bits(first, lines)
    is_exact(first)


def test_a_run_that_grows_is_planned_anew_where_so_many_sites_have_owners(tmp_path):
    """Two sites send their factors to each other. By the stated link, owners pay from three sites on."""
    with running_hub(tmp_path / "kits", ("a", "b")) as hub:
        link = [1e-4, 1e-9, 1e-9, 1e-10]
        run = Run(tmp_path, hub, mode="rankdad", merge="auto", exact=True, pause=0.01, link=link)
        run.start("ab")
        run.await_step("a", 2)
        add_site(hub, "abc")
        run.start("c")
        run.await_step("c", max(run.lines("a")) + 3)
        lines, present = run.finish("abc")
    assert present[0] == [0, 1]
    assert lines[max(lines)]["bytes"][0] > 2 * lines[1]["bytes"][0]  # as the plan states them, of an owner
    is_exact(lines)
