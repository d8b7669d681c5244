"""Sites whose gradients are out of all proportion over the hub: clipped as in one process, named once, at all sites."""

import math
import struct
from statistics import median_low

import pytest
import torch
from elastic_site import LIE, batch, make_model
from fleet import ENDED, Fleet
from json_lines import unpacked
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
        gradient = unpacked(lines[step]["gradient"])
        assert (gradient - expected).norm() < 1e-8 * expected.norm(), step
        values = unpacked(lines[step]["parameters"])
        nn.utils.vector_to_parameters(values, model.parameters())


SETTINGS = {"mode": "rankdad", "exact": True, "clip_sites": MULTIPLE}


@pytest.mark.parametrize("merge", ["all", "owner"])
@pytest.mark.parametrize("min_sites", [1, None])
def test_it_is_the_mean_of_clipped_gradients_and_named_once(tmp_path, merge, min_sites):
    with Fleet(tmp_path, "abc", merge=merge, min_sites=min_sites, steps=STEPS, **SETTINGS) as fleet:
        lines, _ = fleet.train("ab", c={"loud": LOUD})
        (named,) = [line for line in fleet.hub.log if "times the median" in line]
    is_exact(lines, 2)
    assert f"c: in step {LIE} the norm of its gradient or delta is " in named
    assert fleet.printed("a").count("times the median of all sites, and clipped to 3 times the median") == 1


@pytest.mark.parametrize("merge", ["all", "owner"])
def test_sealed_and_where_a_site_leaves_in_the_same_step(tmp_path, merge):
    with Fleet(tmp_path, sealed_hub(tmp_path), merge=merge, pause=0.1, **SETTINGS) as fleet:
        fleet.start("a")
        fleet.start("c", loud=LOUD)
        fleet.lose("b", leave=LIE + 1, how="late")
        fleet.hub.await_line("b joins", ENDED)
        lines, present = fleet.finish("abc", 10)
    assert present[LIE + 1] == [0, 2]
    is_exact(lines, 2)


@pytest.mark.parametrize("merge", ["all", "owner"])
def test_a_false_statement_does_not_get_past_those_that_see_what_is_sent(tmp_path, merge):
    """What is only summed is beyond them: it is left out of the comparison."""
    (tiny,) = struct.unpack(">q", struct.pack(">d", 0.01))
    with Fleet(tmp_path, "abc", merge=merge, steps=LIE + 1, **SETTINGS) as fleet:
        lines, _ = fleet.train("ab", c={"loud": LOUD, "lies": {NORM: tiny}})
    model = make_model(exact=True)
    nn.utils.vector_to_parameters(unpacked(lines[LIE - 1]["parameters"]), model.parameters())
    found = parts(model, [0, 1, 2], LIE, loud=2)
    limit = MULTIPLE * max(float(own.norm()) for _, own in found[:2])
    gradient = unpacked(lines[LIE]["gradient"])
    nn.utils.vector_to_parameters(gradient, model.parameters())
    sent = [each.detach().norm() for each in model.parameters() if each.dim() == 2]
    assert 0 < math.hypot(*map(float, sent)) < 2 * limit < 0.01 * float(found[2][1].norm())


@pytest.mark.parametrize("merge", ["all", "owner"])
def test_a_gradient_whose_norm_is_out_of_range_has_no_weight(tmp_path, merge):
    with Fleet(tmp_path, "abc", merge=merge, steps=LIE + 1, **SETTINGS) as fleet:
        lines, _ = fleet.train("ab", c={"loud": 1e160})
    assert 0 < float(unpacked(lines[LIE]["gradient"]).abs().max()) < 1e3


def test_sums_that_are_exchanged_again_are_those_of_the_step(tmp_path):
    """From a step on, the header of a site states that its gradient has changed since it was sent."""
    with Fleet(tmp_path, "abc", mode="dsgd", clip_sites=MULTIPLE, min_sites=None, steps=STEPS) as fleet:
        lines, _ = fleet.train("ab", c={"lies": {NORM + 1: 3}})
    assert len(lines) == STEPS
