"""Sites whose gradients are out of all proportion over the hub: clipped as in one process, named once, at all sites."""

import math
import struct
from statistics import median_low

import pytest
import torch
from elastic_runs import ENDED, Run, presence, same_bits
from elastic_site import LIE, batch, make_model
from running_hub import running_hub
from sealed_sites import sealed_hub
from torch import nn

LOUD, MULTIPLE, STEPS = 1e4, 3.0, 12
NORM = 12  # place of the norm in a step header


def parts(model: nn.Module, slots: list[int], step: int, loud: int) -> list[tuple[int, torch.Tensor]]:
    """Return the rows and the gradient of each site, in one process."""
    criterion, found = nn.CrossEntropyLoss(), []
    for slot in slots:
        inputs, targets = batch(slot, step, exact=True)
        model.zero_grad()
        (criterion(model(inputs.double()), targets) * (LOUD if slot == loud and step >= LIE else 1.0)).backward()
        found.append((len(targets), torch.cat([each.grad.reshape(-1) for each in model.parameters()])))
    return found


def is_exact(lines: dict[int, dict], loud: int) -> None:
    """Compare the gradients of a site with the mean of clipped ones in one process."""
    model = make_model(exact=True)
    for step in range(max(lines) + 1):
        found = parts(model, lines[step]["present"], step, loud)
        norms = [float(own.norm()) for _, own in found]
        limit, rows = MULTIPLE * median_low(norms), sum(count for count, _ in found)
        pairs = zip(found, norms, strict=True)
        expected = sum(count / rows * min(1.0, limit / norm) * own for (count, own), norm in pairs)
        gradient = torch.tensor(lines[step]["gradient"], dtype=torch.float64)
        assert (gradient - expected).norm() < 1e-8 * expected.norm(), step
        values = torch.tensor(lines[step]["parameters"], dtype=torch.float64)
        nn.utils.vector_to_parameters(values, model.parameters())


def trained(folder, hub, lost: str = "", **fields) -> tuple[Run, dict[int, dict]]:
    """Train three sites, of which the last one is loud; return the run and the lines of the first."""
    settings = {"mode": "rankdad", "exact": True, "clip_sites": MULTIPLE} | fields
    run = Run(folder, hub, stops=bool(lost), **settings | ({"pause": 0.01} if lost else {"steps": STEPS}))
    run.start("ab".replace(lost, ""))
    run.start("c", loud=LOUD)
    if lost:
        run.lose(lost, leave=LIE + 1, how="late")
        hub.await_line(f"{lost} joins", ENDED)
        run.stop(10)
    run.end("abc")
    lines = run.lines("a")
    for name in "bc":
        same_bits(lines, run.lines(name))
    return run, lines


@pytest.mark.parametrize("merge", ["all", "owner"])
@pytest.mark.parametrize("min_sites", [1, None])
def test_it_is_the_mean_of_clipped_gradients_and_named_once(tmp_path, merge, min_sites):
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        run, lines = trained(tmp_path, hub, merge=merge, min_sites=min_sites)
        named = [line for line in hub.log if "times the median" in line]
    is_exact(lines, 2)
    assert len(named) == 1
    assert f"c: in step {LIE} the norm of its gradient is " in named[0]
    printed = run.processes["a"].read()[1]
    assert printed.count("times the median of all sites, and clipped to 3 times the median") == 1


@pytest.mark.parametrize("merge", ["all", "owner"])
def test_sealed_and_where_a_site_leaves_in_the_same_step(tmp_path, merge):
    with sealed_hub(tmp_path) as hub:
        _, lines = trained(tmp_path, hub, lost="b", merge=merge)
    assert presence(lines)[LIE + 1] == [0, 2]
    is_exact(lines, 2)


@pytest.mark.parametrize("merge", ["all", "owner"])
def test_a_false_statement_does_not_get_past_those_that_see_what_is_sent(tmp_path, merge):
    """What is only summed is beyond them: it is left out of the comparison."""
    (tiny,) = struct.unpack(">q", struct.pack(">d", 0.01))
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        run = Run(
            tmp_path, hub, mode="rankdad", exact=True, clip_sites=MULTIPLE, merge=merge, steps=LIE + 1, stops=False
        )
        run.start("ab")
        run.start("c", loud=LOUD, lies={NORM: tiny})
        run.end("abc")
    lines = run.lines("a")
    for name in "bc":
        same_bits(lines, run.lines(name))
    model = make_model(exact=True)
    nn.utils.vector_to_parameters(torch.tensor(lines[LIE - 1]["parameters"], dtype=torch.float64), model.parameters())
    found = parts(model, [0, 1, 2], LIE, loud=2)
    limit = MULTIPLE * max(float(own.norm()) for _, own in found[:2])
    gradient = torch.tensor(lines[LIE]["gradient"], dtype=torch.float64)
    nn.utils.vector_to_parameters(gradient, model.parameters())
    sent = [each.detach().norm() for each in model.parameters() if each.dim() == 2]
    assert 0 < math.hypot(*map(float, sent)) < 2 * limit < 0.01 * float(found[2][1].norm())


@pytest.mark.parametrize("merge", ["all", "owner"])
def test_a_gradient_whose_norm_is_out_of_range_has_no_weight(tmp_path, merge):
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        run = Run(
            tmp_path, hub, mode="rankdad", exact=True, clip_sites=MULTIPLE, merge=merge, steps=LIE + 1, stops=False
        )
        run.start("ab")
        run.start("c", loud=1e160)
        run.end("abc")
    lines = run.lines("a")
    for name in "bc":
        same_bits(lines, run.lines(name))
    assert 0 < max(map(abs, lines[LIE]["gradient"])) < 1e3


def test_sums_that_are_exchanged_again_are_those_of_the_step(tmp_path):
    """From a step on, the header of a site states that its gradient has changed since it was sent."""
    with running_hub(tmp_path / "kits", ("a", "b", "c")) as hub:
        run = Run(tmp_path, hub, mode="dsgd", clip_sites=MULTIPLE, min_sites=None, steps=STEPS, stops=False)
        run.start("ab")
        run.start("c", lies={NORM + 1: 3})
        run.end("abc")
    for name in "bc":
        same_bits(run.lines("a"), run.lines(name))
