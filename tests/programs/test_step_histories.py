"""Random histories of steps at two sites: passes, cleared, changed and dropped gradients, reuse, no_sync, idle sites.

Each is run with `GradientReduction` and again by hand, in float64, and must agree. DADPLUG_HISTORIES sets the number of
histories, which then differ from run to run.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import step_history
import support
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from step_history import BACKWARDS, Step

GIVEN = os.environ.get("DADPLUG_HISTORIES")
COUNTS = [int(GIVEN)] if GIVEN else [4, pytest.param(40, marks=pytest.mark.extensive)]
PARAMETERS = 13

backwards = st.tuples(
    st.sampled_from(["backward", "backward", "quiet"]), st.integers(0, len(BACKWARDS) - 1), st.integers(0, 3)
)
changes = st.one_of(
    st.tuples(st.just("clear"), st.integers(0, 1)),
    st.tuples(st.sampled_from(["drop", "zero", "read"]), st.integers(0, PARAMETERS - 1)),
    st.tuples(st.sampled_from(["write", "scale"]), st.integers(0, PARAMETERS - 1), st.integers(0, 2)),
)
actions = st.lists(st.one_of(backwards, backwards, changes), max_size=4).map(tuple)
steps = st.builds(
    Step,
    actions=st.tuples(actions, actions),
    ends=st.tuples(*[st.sampled_from([True, True, True, False])] * 2),
    clears=st.sampled_from([True, True, False]),
    updates=st.booleans(),
)
first = st.just(Step(((("backward", 0, 0),), (("backward", 0, 0),)), (True, True), updates=False))


def run(history: list[Step], mode: str) -> list[str]:
    return step_history.problems(history, mode)


def settled(history: list[Step], mode: str, quiet: int) -> dict[str, float]:
    return step_history.unconserved(history, mode, quiet)


def histories(**fixed: bool) -> st.SearchStrategy[list[Step]]:
    each = steps.map(lambda step: replace(step, **fixed))
    return st.tuples(first, st.lists(each, min_size=1, max_size=5)).map(lambda parts: [parts[0], *parts[1]])


def checked(check: Callable[[list[Step]], None], count: int, strategy: st.SearchStrategy[list[Step]]) -> None:
    """Check random histories."""
    options = settings(
        max_examples=count,
        derandomize=GIVEN is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    options(given(strategy)(check))()


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("mode", ["dsgd", "dad", "edad", "auto"])
def test_random_steps_agree_as_by_hand(mode, count):
    def check(history):
        for rank, wrong in enumerate(support.sites(2).run(run, history, mode)):
            assert not wrong, f"site {rank}: {wrong}"

    checked(check, count, histories())


BACKWARD, AGAIN = ("backward", 0, 0), ("backward", BACKWARDS.index("again"), 0)
FOUND = {  # by mode, what a site does in a step in which the other one is idle, where it has failed
    "chained rows formed, then the bias alone": ("edad", (AGAIN, ("drop", 0)), True),
    "changed behind a chain after two passes": ("edad", (BACKWARD, BACKWARD, ("scale", 2, 0)), True),
    "weight cleared, then the bias changed": ("dad", (BACKWARD, ("zero", 0), ("scale", 1, 0)), False),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_random_steps_have_found_agrees_as_by_hand(sites, name):
    mode, actions, clears = FOUND[name]
    both = Step(((BACKWARD,), (BACKWARD,)), (True, True), clears, updates=False)
    history = [both, Step(((), actions), (False, True), clears, updates=False)] * 2
    assert sites(2).run(run, history, mode) == [[], []]


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad-feedback"])
def test_gradients_that_are_cleared_in_place_count_as_little_as_none(sites, mode):
    histories = []
    for clears in (True, False):
        begin = Step(((BACKWARD,), (BACKWARD,)), (True, True), clears, updates=False)
        for to_none in (0, 1):
            cleared = Step(((BACKWARD,), (BACKWARD, ("clear", to_none))), (True, True), clears=True, updates=False)
            histories.append([begin, Step(((), ()), (False, False), clears, updates=False), cleared])
    for history in histories if mode != "rankdad-feedback" else histories[:2]:
        if mode == "rankdad-feedback":
            for off in sites(2).run(settled, history, mode, 16):
                assert max(off.values()) < 1e-6
        else:
            assert sites(2).run(run, history, mode) == [[], []]


QUIET = {"rankdad-feedback": (16, 1e-6), "topk": (16, 1e-6), "dsgd-int8": (8, 1e-4), "powersgd": (40, 1e-2)}


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("mode", QUIET)
def test_random_steps_lose_nothing(mode, count):
    """All that is applied and kept is the sum of the mean gradients."""
    quiet, most = QUIET[mode]

    def check(history):
        for rank, off in enumerate(support.sites(2).run(settled, history, mode, quiet)):
            assert max(off.values()) < most, f"site {rank}: {off}"

    checked(check, count, histories(clears=True, updates=False))
