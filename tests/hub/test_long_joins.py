"""States that take long to arrive: the other sites go on training meanwhile, and the site that joins catches up."""

import pytest
from fleet import Fleet, MortalHub, idles, is_exact, same_bits
from running_hub import until

BALLAST = 4 << 20  # bytes, which take about two seconds
RATE = 20  # Mbit/s


def slow(folder, sealed=False, **settings):
    """Return three sites, the first two of which send at most `RATE`."""
    hub = MortalHub(folder / "hub", "abc", sealed=sealed, rate=dict.fromkeys("ab", RATE))
    return Fleet(folder, hub, ballast=BALLAST, pause=0.01, **settings)


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
    _, present = fleet.finish(f"{names}c")
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
        fleet.stop(60)  # a and b are there before c
        fleet.end("abc")
    _, present = fleet.equal("ac")
    assert any(2 not in present[step] for step in present if step > 4)
