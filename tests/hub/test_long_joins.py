"""States that take long to arrive: the other sites go on training meanwhile, and the site that joins catches up."""

import pytest
from elastic_runs import MortalHub, Run, idles, is_exact, presence, same_bits
from running_hub import until

BALLAST = 4 << 20  # bytes, which take about two seconds
RATE = 20  # Mbit/s


class Slow:
    """Run of three sites, the first two of which send at most `RATE`."""

    def __init__(self, folder, sealed=False, **settings):
        self.hub = MortalHub(folder / "hub", "abc", sealed=sealed)
        for name in "ab":
            (self.hub.kits / name / "policy.toml").write_text(f"rate_limit = {RATE}\nencrypt_local = true\n")
        self.served = self.hub.start()
        self.run = Run(folder, self.hub, ballast=BALLAST, pause=0.01, **settings)

    def lose_and_start(self, **fields):
        """Let c leave, and start it anew once the others have gone on; return the step in which they are then."""
        run = self.run
        run.start("ab")
        run.start("c", leave=2)
        run.end("c", -9)
        run.await_step("a", 4)
        run.start("c", **fields)
        until(lambda: any("is asked for its state" in line for line in self.hub.log), run.state)
        return max(run.lines("a"))


def caught_up(run, names="ab"):
    """Let a run end with all sites; check that others have gone on while c got its state, and that all are equal."""
    run.await_step("c", 3)
    first = min(step for step in run.lines("c") if step > 2)
    until(lambda: max(run.lines("c")) in run.lines(names[0]) and _takes_part(run, names[0], first), run.state)
    _, present = run.finish(f"{names}c")
    again = min(step for step in present if step > first and 2 in present[step])
    assert again - first >= 10, (first, again)  # steps without c, whose frames it was sent
    assert {*range(first, again)} <= run.lines("c").keys()
    return present


def _takes_part(run, name, first):
    lines = run.lines(name)
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
    slow = Slow(tmp_path, sealed, **settings)
    try:
        slow.lose_and_start()
        present = caught_up(slow.run)
        assert any("c joins: training goes on without it from step" in line for line in slow.hub.log)
        assert not any("receives the state of the training" in line for line in slow.hub.log)  # no pause
    finally:
        slow.served.kill()
    lines = slow.run.lines("a")
    if "exact" in settings:
        is_exact(lines)
    else:
        same_bits(lines, idles(tmp_path / "idle", "abc", present, **{**settings, "late": "wait"}))


def test_another_site_sends_its_state_if_one_is_lost_with_it_on_its_way(tmp_path):
    slow = Slow(tmp_path, mode="rankdad")
    try:
        slow.lose_and_start()
        donor = next(line for line in slow.hub.log if "is asked for its state" in line).split()[3]
        other = {"a": "b", "b": "a"}[donor]
        slow.run.await_step(other, max(slow.run.lines(other)) + 10)
        slow.run.processes[donor].kill()
        slow.run.end(donor, -9)
        caught_up(slow.run, other)
        asked = [line for line in slow.hub.log if "is asked for its state" in line]
        assert len(asked) == 2
        assert f" {other} is asked" in asked[1]
    finally:
        slow.served.kill()


def test_a_site_that_is_lost_with_its_state_on_its_way_holds_up_nobody(tmp_path):
    slow = Slow(tmp_path, sealed=True, mode="dsgd")
    try:
        began = slow.lose_and_start()
        slow.run.await_step("a", began + 10)
        slow.run.processes["c"].kill()
        slow.run.end("c", -9)
        slow.run.await_step("a", max(slow.run.lines("a")) + 20)
        slow.run.start("c")
        caught_up(slow.run)
    finally:
        slow.served.kill()


def test_a_restart_of_the_hub_with_a_state_on_its_way_begins_it_anew(tmp_path):
    slow = Slow(tmp_path, mode="dsgd")
    try:
        began = slow.lose_and_start()
        slow.run.await_step("a", began + 10)
        slow.served.kill()
        slow.served = slow.hub.start()
        caught_up(slow.run)
    finally:
        slow.served.kill()


def test_a_collective_waits_for_a_site_that_catches_up(tmp_path):
    slow = Slow(tmp_path, mode="dsgd", meets=True)
    try:
        slow.lose_and_start()
        slow.run.stop(60)  # a and b are there before c
        slow.run.end("abc")
    finally:
        slow.served.kill()
    lines = slow.run.lines("a")
    same_bits(lines, slow.run.lines("c"))
    present = presence(lines)
    assert any(2 not in present[step] for step in present if step > 4)
