"""An attack on the membership of one record, by the gradient that a site sends, against the bound of epsilon."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dadplug
from dadplug import DifferentialPrivacy

TRIALS, DELTA = 250, 1e-2


def scores(noise, member):
    """Return the products of what is sent with the record's own gradient, in units of its bound."""
    torch.manual_seed(0)
    model, rows, targets = nn.Linear(5, 3), torch.randn(6, 5), torch.arange(6) % 3
    rows[-1] *= 20  # the record stands out
    reduction = dadplug.GradientReduction(model, "dsgd", privacy=DifferentialPrivacy(noise, 0.5, 1.0, 6))
    F.cross_entropy(model(rows[-1:]), targets[-1:]).backward()
    own = dadplug.GradientReduction(nn.Linear(5, 3), "dsgd", privacy=DifferentialPrivacy(0.0, 0.5, 1.0, 1))
    own.model.load_state_dict(model.state_dict())
    model.zero_grad()
    F.cross_entropy(own.model(rows[-1:]), targets[-1:]).backward()
    own.synchronize()
    canary = torch.cat([each.grad.flatten() for each in own.model.parameters()])
    found = []
    kept = 6 if member else 5
    for _ in range(TRIALS if noise else 1):
        model.zero_grad()
        F.cross_entropy(model(rows[:kept]), targets[:kept]).backward()
        reduction.synchronize()
        sent = torch.cat([each.grad.flatten() for each in model.parameters()]) * 6
        found.append(float(sent @ canary) / 0.25)
    return torch.tensor(found)


def test_a_record_is_found_without_noise_and_within_the_bound_with_it():
    pytest.importorskip("opacus")
    (inside,), (outside,) = scores(0.0, True).tolist(), scores(0.0, False).tolist()
    assert inside - outside == pytest.approx(1.0, rel=1e-4)  # its clipped gradient, whatever its size
    threshold = (inside + outside) / 2
    hits, false_alarms = (float((scores(1.0, member) > threshold).float().mean()) for member in (True, False))
    reduction = dadplug.GradientReduction(nn.Linear(2, 2), "dsgd", privacy=DifferentialPrivacy(1.0, 0.5, 1.0, 6))
    reduction.idle()
    bound = math.exp(reduction.epsilon(DELTA)) * false_alarms + DELTA
    assert hits <= bound + 3 / math.sqrt(TRIALS)
    # The best attack on one step: 2 Phi(1 / 2) - 1 = 0.38. Noise that is too small would give more, too large less.
    assert hits - false_alarms == pytest.approx(0.383, abs=4 * math.sqrt(0.5 / TRIALS))


CANARIES, RUNS, STEPS = 40, 150, 4


def canary_scores(noise):
    """Return the scores of canaries of many runs, and which of them were members, both of shape (runs, canaries)."""
    torch.manual_seed(1)
    model = nn.Linear(CANARIES, 1, bias=False)
    privacy = DifferentialPrivacy(noise, 0.5, 1.0, CANARIES, loss_reduction="sum")
    reduction = dadplug.GradientReduction(model, "dsgd", compare_every=0, privacy=privacy)
    found, members = [], torch.rand(RUNS, CANARIES) < 0.5
    canaries = 20 * torch.eye(CANARIES)  # each has a direction of its own, which is the best that an attacker can wish
    for chosen in members:
        score = torch.zeros(CANARIES)
        for _ in range(STEPS):
            model.zero_grad()
            model(canaries[chosen]).sum().backward()
            reduction.synchronize()
            score += model.weight.grad[0] * CANARIES / 0.5
        found.append(score / STEPS)
    return torch.stack(found), members, reduction


def test_canaries_in_many_steps_stay_within_the_bound():
    pytest.importorskip("opacus")
    scores_, members, _ = canary_scores(0.0)
    torch.testing.assert_close(scores_, members.float())  # all of them are found without noise
    scores_, members, reduction = canary_scores(2.0)
    guesses = scores_ > 0.5
    hits, false_alarms = (float(guesses[members == inside].float().mean()) for inside in (True, False))
    spent = dadplug.privacy.Ledger()
    spent.spend(reduction.options.privacy, STEPS)  # of one run
    spread = math.sqrt(0.5 / (RUNS * CANARIES))
    for threshold in (0.0, 0.5, 1.0, 1.5):
        rates = [float((scores_[members == inside] > threshold).float().mean()) for inside in (True, False)]
        assert rates[0] <= math.exp(spent.epsilon(DELTA)) * rates[1] + DELTA + 4 * spread
    # Four steps of noise 2 are one of noise 1: 2 Phi(1 / 2) - 1 = 0.38.
    assert hits - false_alarms == pytest.approx(0.383, abs=5 * spread)
