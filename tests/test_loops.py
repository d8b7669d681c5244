"""The loop zoo: training loops as users write them, in every mode, at two sites with unequal rows.

Each loop runs with `GradientReduction` and once more with gradients averaged by hand, in float64; lossy modes are held
against the published algorithm, see `loops.reference`.
"""

from __future__ import annotations

import functools

import pytest
import support
from loops import LOOPS, compare


def runs(name: str, modes: list[str], factor: float = 1.0) -> tuple[dict[str, list[str]], bool]:
    return compare.problems(name, modes, factor)


@functools.cache
def outcome(name: str) -> dict[str, list[str]]:
    """Runs a loop in all its modes; returns by mode what is wrong."""
    found: dict[str, list[str]] = {}
    while left := [mode for mode in LOOPS[name].modes if mode not in found]:
        results, lost = zip(*support.sites(2).run(runs, name, left), strict=True)
        for mode in left:
            if all(mode in result for result in results):
                found[mode] = [f"site {rank}: {each}" for rank, result in enumerate(results) for each in result[mode]]
        if any(lost):
            support.close_all()
    return found


KNOWN: dict[str, str] = {
    **dict.fromkeys([name for name in LOOPS if name.startswith("discarded")], "a discarded backward is trained on"),
    **dict.fromkeys(
        ["gan_with_two_reductions", "dcgan", "wgan_with_gradient_penalty", "fgsm", "pgd", "exception_in_backward"],
        "a discarded backward is trained on",
    ),
    **dict.fromkeys(["batch_of_no_rows", "batch_object"], "sample counts"),
    **dict.fromkeys(
        ["layers_added", "module_replaced", "state_assigned", "pruned_before", "pruned_in_mid_run"],
        "parameters that change are not followed",
    ),
    **dict.fromkeys(["maml", "hypernetwork", "functional_masks"], "derived weights lose their gradient"),
    **dict.fromkeys(
        ["autograd_grad_written_by_hand", "weight_hooks", "post_accumulate_hooks", "clipping_before_synchronize"],
        "gradients are not there before synchronize",
    ),
    "sam_with_local_ascent": "gradients are not there before synchronize",
    "gradient_from_before": "a gradient from before the reduction",
    "static_input_buffer": "a reused buffer",
    **dict.fromkeys(
        ["grad_scaler_with_overflow", "grad_scaler_of_pytorch", "refused_steps"], "error memories and the loss's scale"
    ),
    "loss_times_zero": "a basis of zeros stays one",
}


def case(name: str, mode: str) -> object:
    marks = [pytest.mark.xfail(reason=KNOWN[name])] if name in KNOWN else []
    return pytest.param(name, mode, marks=marks)


CASES = [case(name, mode) for name, each in LOOPS.items() for mode in each.modes]


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
