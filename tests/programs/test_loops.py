"""The loop zoo: training loops as users write them, in every mode, at two sites with unequal rows.

Each loop runs with `GradientReduction` and again with gradients averaged by hand, in float64; lossy modes are held
against the published algorithm, see `loops.reference`.
"""

from __future__ import annotations

import functools

import pytest
import support
from loops import LOOPS, compare

pytestmark = pytest.mark.slow


def runs(name: str, modes: list[str], factor: float = 1.0) -> tuple[dict[str, list[str]], bool]:
    return compare.problems(name, modes, factor)


@functools.cache
def outcome(name: str) -> dict[str, list[str]]:
    """Run a loop in all its modes; return by mode what is wrong."""
    found: dict[str, list[str]] = {}
    while left := [mode for mode in LOOPS[name].modes if mode not in found]:
        results, lost = zip(*support.sites(2).run(runs, name, left), strict=True)
        for mode in left:
            if all(mode in result for result in results):
                found[mode] = [f"site {rank}: {each}" for rank, result in enumerate(results) for each in result[mode]]
        if any(lost):
            support.close_all()
    return found


CASES = [(name, mode) for name, each in LOOPS.items() for mode in each.modes]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_loop_trains_as_by_hand(name, mode):
    wrong = outcome(name)[mode]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_a_wrong_gradient_would_fail(sites, factor):
    for results, lost in sites(2).run(runs, "plain", LOOPS["plain"].modes, factor):
        assert not lost
        assert list(results) == LOOPS["plain"].modes
        for mode, wrong in results.items():
            assert any("is off" in each for each in wrong), mode


def test_there_are_forty_loops():
    assert len(LOOPS) >= 40
