"""Secure sums over a hub: sites that leave and return, sealed messages or not."""

import pytest
import torch
from elastic_site import LIE, batch, make_model
from fleet import ENDED, Fleet, MortalHub
from json_lines import unpacked
from running_hub import until
from sealed_sites import sealed_hub
from torch import nn

import dadplug

PRIVACY = "secure_sum=True,noise_multiplier=0,max_grad_norm=0.5,expected_batch=8"
UNIT = 0.5 / 4096


def clipped(parameters: str, slots: list[int], step: int) -> torch.Tensor:
    """Return the mean of the sites' clipped gradients of a step, by one process."""
    model = make_model()
    nn.utils.vector_to_parameters(unpacked(parameters).float(), model.parameters())
    privacy = dadplug.DifferentialPrivacy(0.0, 0.5, expected_batch=8 * len(slots))
    reduction = dadplug.GradientReduction(model, "dsgd", privacy=privacy)
    for slot in slots:
        inputs, targets = batch(slot, step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
    reduction.synchronize()
    return torch.cat([each.grad.reshape(-1) for each in model.parameters()])


def check_sums(lines: dict[int, dict]) -> None:
    """Check the gradients of all steps of a site against those of one process."""
    for step, line in lines.items():
        if step - 1 in lines:
            wanted = clipped(lines[step - 1]["parameters"], line["present"], step)
            off = (unpacked(line["gradient"]) - wanted).abs().max()
            assert float(off) < 1.1 * UNIT / 2 / 8  # that of one site, which all of them may have
            assert float(wanted.abs().max()) > 100 * UNIT / 16


@pytest.mark.parametrize("sealed", [False, True])
def test_a_site_that_is_lost_and_returns(tmp_path, sealed):
    with Fleet(
        tmp_path,
        sealed_hub(tmp_path, tuple("abcd"), sealed),
        min_sites=3,
        pause=0.06,
        privacy=PRIVACY,
    ) as fleet:
        fleet.start("abc")
        fleet.start("d", leave=3, how="header")
        fleet.end("d", -9)
        fleet.start("d")
        fleet.hub.await_line("d joins", ENDED)
        lines, present = fleet.finish("abcd", 8)
    assert present[2] == [0, 1, 2, 3]
    assert present[3] == [0, 1, 2]
    check_sums(lines)
    (_, _, before, _), (_, _, three, sites), (_, _, after, again) = lines[max(lines)]["spent"]
    assert (before, sites, again) == (4, 3, 4)  # the exchange in which it was lost counts, too
    alone = list(present.values()).count([0, 1, 2])
    assert three in (alone, alone + 1)  # and that to which it came, unknown
    assert after == len(present) - 3 - alone


def test_a_site_whose_state_takes_long_follows_the_sums_of_the_others(tmp_path):
    hub = MortalHub(tmp_path / "hub", "abcd", sealed=True, rate=dict.fromkeys("abc", 20))
    with Fleet(tmp_path, hub, min_sites=3, pause=0.05, privacy=PRIVACY, ballast=4 << 20) as fleet:
        fleet.start("abc")
        fleet.lose("d", leave=3)
        until(
            lambda: any(3 in line["present"] for step, line in fleet.lines("a").items() if step > 3), fleet.state, ENDED
        )
        lines, present = fleet.finish("abcd", 8)
    replayed = [step for step in fleet.lines("d") if step > 3 and 3 not in present[step]]
    assert len(replayed) >= 5
    check_sums(lines)


@pytest.mark.parametrize(("leave", "how"), [(0, "late"), (2, "sent"), (0, "header")])
def test_a_site_that_leaves_between_its_key_and_its_sum(tmp_path, leave, how):
    with Fleet(tmp_path, sealed_hub(tmp_path, tuple("abcd")), min_sites=3, steps=5, privacy=PRIVACY) as fleet:
        fleet.start("d", leave=leave, how=how)
        lines, _ = fleet.train("abc")
    assert [line["present"] for line in lines.values()][leave:] == [[0, 1, 2]] * (5 - leave)
    check_sums(lines)


def test_sums_go_on_without_a_member_that_sends_no_key(tmp_path):
    with Fleet(tmp_path, sealed_hub(tmp_path, tuple("abcd")), min_sites=3, steps=8, privacy=PRIVACY) as fleet:
        fleet.start("d", harm="missing")
        lines, _ = fleet.train("abc")
    assert [line["present"] for line in lines.values()][LIE:] == [[0, 1, 2]] * (8 - LIE)
    check_sums(lines)


@pytest.mark.parametrize("sealed", [False, True])
def test_sites_that_stay(tmp_path, sealed):
    """The hub adds up masked numbers where it may read them."""
    with Fleet(
        tmp_path,
        sealed_hub(tmp_path, tuple("abcd"), sealed),
        min_sites=None,
        steps=5,
        bucket_mb=100.0,
        privacy=PRIVACY,
    ) as fleet:
        lines, _ = fleet.train("abcd")
        assert len(lines) == 5
        check_sums(lines)
        assert fleet.lines("c")[4]["spent"] == [[0.0, 0.01, 5, 4]]
