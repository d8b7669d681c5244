"""Noise in every number that a site sends, over 10,000 steps: mean, variance, distribution, independence.

Each bound is one that a right program fails once in about 10^7 comparisons.
"""

import math

import pytest
import torch
from torch import nn

import dadplug
from dadplug import DifferentialPrivacy

STEPS = 10_000
SIGMAS = 5.5


def sends(secure, site, steps=STEPS):
    """Return what a site puts into its bucket, without the clipped gradients in it, in units of the deviation."""
    torch.manual_seed(7)
    model = nn.Linear(5, 3)
    inputs, targets = torch.randn(4, 5), torch.randint(0, 3, (4,))
    settings = {"max_grad_norm": 1.5, "sample_rate": 0.1, "expected_batch": 4 + site, "secure": secure}
    exact = dadplug.GradientReduction(model, "dsgd", privacy=DifferentialPrivacy(0.0, **settings))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    exact.synchronize()
    clipped = {name: each.grad.flatten() * (4 + site) for name, each in model.named_parameters()}
    exact.detach()
    reduction = dadplug.GradientReduction(model, "dsgd", compare_every=0, privacy=DifferentialPrivacy(2.0, **settings))
    reduction.idle()  # makes the plan
    (handler,) = reduction._planner._reducer._handlers
    names, sent, launch = [unit.name for unit in handler.units], [], handler.bucket.launch

    def launched():
        sent.append(torch.cat([handler.bucket._parts[handler._slots[name]] for name in names]))
        launch()

    handler.bucket.launch = launched
    for step in range(steps):
        model.zero_grad()
        if step % 10 == 1:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            reduction.synchronize()
        else:  # an empty batch
            reduction.idle()
    assert len(sent) == steps
    payloads = torch.stack(sent).double() * (4 + site)  # gradients times the site's share of the samples, which is 1
    payloads[1::10] -= torch.cat([clipped[name] for name in names])
    return payloads / 3.0


def check(noise):
    """Check that the columns and the rows are independent standard normal numbers."""
    steps = len(noise)
    assert float(noise.mean(0).abs().max()) < SIGMAS / math.sqrt(steps)
    assert float((noise.var(0) - 1).abs().max()) < SIGMAS * math.sqrt(2 / steps)
    assert abs(float(noise.var()) - 1) < SIGMAS * math.sqrt(2 / noise.numel())
    sizes = (noise.square() - 1) / math.sqrt(2)  # whose products have longer tails
    for values, spread in ((noise, 1.0), (sizes, 2.0)):
        for lag in (0, 1, 2, 7):
            products = values[lag:].T @ values[: steps - lag] / (steps - lag)
            if not lag:
                products.fill_diagonal_(0.0)
            assert float(products.abs().max()) < SIGMAS * spread / math.sqrt(steps - lag), lag
    sorted_, _ = noise.flatten().sort()
    expected = torch.special.ndtr(sorted_)
    found = torch.arange(1, len(sorted_) + 1).double() / len(sorted_)
    assert float((expected - found).abs().max()) < math.sqrt(-math.log(1e-7 / 2) / 2 / len(sorted_))


@pytest.mark.parametrize(("secure", "steps"), [(False, STEPS), (True, STEPS // 5)])
def test_noise_in_every_sent_number(secure, steps):
    one = sends(secure, 0, steps)
    assert one.shape == (steps, 18)
    check(one)
    if not secure:
        other = sends(secure, 1, 2000)
        check(torch.cat([one[:2000], other], 1))  # sites draw independently


def test_wrong_noise_is_found():
    right = torch.randn(STEPS, 18).double()
    check(right)
    wrong = right.clone()
    wrong[:, 3] *= 1.05
    again = right.clone()
    again[1::2, 4] = again[::2, 4]
    for each in (wrong, again, right + 0.06, torch.cat([right[:, :1], right[:, 1:-1], right[:, :1]], 1)):
        with pytest.raises(AssertionError):
            check(each)
