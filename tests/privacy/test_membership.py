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
