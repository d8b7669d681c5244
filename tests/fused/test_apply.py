from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dadplug
from dadplug import GradientReduction, NonFiniteError

ROWS = (5, 8)


class Net(nn.Module):
    """Layers of all kinds: factored, transposed, convolutional, without factors, one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.first = nn.Linear(4 * 36, 40)
        self.norm = nn.LayerNorm(40)
        self.second = nn.Linear(40, 30, bias=False)
        self.rare = nn.Linear(30, 30)
        self.last = nn.Linear(30, 3)

    def forward(self, images, rare=False):
        hidden = self.norm(torch.relu(self.first(torch.relu(self.conv(images)).flatten(1))))
        hidden = torch.tanh(self.second(hidden))
        return self.last(self.rare(hidden) if rare else hidden)


OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda weights: torch.optim.AdamW(weights, lr=0.01),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.05),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.001),  # no fused step
}


def _batch(step):
    """The rows of a step, those of this site among them."""
    torch.manual_seed(step)
    images, targets = torch.randn(sum(ROWS), 1, 8, 8, dtype=torch.float64), torch.randint(3, (sum(ROWS),))
    rank = dist.get_rank()
    start = sum(ROWS[:rank])
    return images, targets, slice(start, start + ROWS[rank])


def _loss(model, images, targets, step):
    return nn.functional.cross_entropy(model(images, rare=step % 2 == 1), targets)


def train_fused(mode: str, optimizer: str, clip: float | None, options: dict) -> dict[str, float]:
    """Train by `apply`, and by `synchronize` beside it; return what a test compares."""
    torch.manual_seed(0)
    model = Net().double()
    twin, alone = copy.deepcopy(model), copy.deepcopy(model)
    ours, theirs, single = (OPTIMIZERS[optimizer](each.parameters()) for each in (model, twin, alone))
    reduction = GradientReduction(model, mode=mode, **options)
    plain = GradientReduction(twin, mode=mode, **options)
    held, norms = 0, []
    for step in range(6):
        images, targets, own = _batch(step)
        for each in (ours, theirs, single):
            each.zero_grad()
        _loss(model, images[own], targets[own], step).backward()
        _loss(twin, images[own], targets[own], step).backward()
        _loss(alone, images, targets, step).backward()
        plain.synchronize()
        if clip is not None:
            norms.append(float(reduction.clip_grad_norm_(clip)))
            assert abs(norms[-1] - float(nn.utils.clip_grad_norm_(twin.parameters(), clip))) < 1e-9 * norms[-1]
            nn.utils.clip_grad_norm_(alone.parameters(), clip)
        reduction.apply(ours)
        theirs.step()
        single.step()
        held += sum(parameter.grad is None for parameter in model.parameters())
    gap = _distance(model, twin)
    exact = _distance(model, alone)
    assert reduction.first_difference() is None
    assert any(map(bool, norms)) == (clip is not None)
    return {"held": held, "twin": gap, "alone": exact, "moved": _distance(model, Net().double())}


def _distance(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((one - two).detach().abs().max()) for one, two in pairs)


# What is sent depends on the mode, the step on the optimizer: every mode with one optimizer, every optimizer with one
# mode, and each of the lossy and the mixed mode with another one.
@pytest.mark.parametrize(
    ("mode", "optimizer", "clip"),
    [
        *((mode, "sgd", 0.5) for mode in ("dad", "edad", "rankdad", "dsgd", "auto")),
        *(("dad", optimizer, clip) for optimizer, clip in (("adam", None), ("adagrad", 0.5), ("rmsprop", None))),
        *(("rankdad", "adam", None), ("auto", "rmsprop", 0.5)),
    ],
)
def test_apply_equals_synchronize_and_step(sites, mode, optimizer, clip):
    options = {"rank": 4} if mode == "rankdad" else {}
    for found in sites(2).run(train_fused, mode, optimizer, clip, options):
        assert found["twin"] < 1e-9
        assert found["moved"] > 1e-2
        if mode != "rankdad":
            assert found["alone"] < 1e-9
        if optimizer == "rmsprop" and clip is None:
            assert found["held"] <= 6
        elif optimizer != "rmsprop" and mode in ("dad", "edad", "rankdad"):
            assert found["held"] >= 6 * 3  # three weights at least in every step


def disagree() -> list[bool]:
    """Return, by step, whether the gradients of factored weights were formed, in steps that sites take in two ways."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reduction = GradientReduction(model, mode="dad")
    rank, formed = dist.get_rank(), []
    for step in range(5):
        optimizer.zero_grad()
        data = not (rank == 1 and step in (2, 3))
        if data:
            model(torch.randn(4, 8)).square().sum().backward()
        if step == 1 and rank == 1:  # this site forms its gradients, so all do
            reduction.synchronize()
            optimizer.step()
        elif step == 2 and rank == 1:
            reduction.idle()
            optimizer.step()
        else:
            reduction.apply(optimizer)
        formed.append(model[0].weight.grad is not None)
        assert reduction.first_difference() is None
    return formed


def test_sites_that_differ_form_all_gradients(sites):
    assert sites(2).run(disagree) == [[False, True, True, False, False]] * 2


def misuse() -> list[str]:
    """Return the errors of wrong calls; none of them changes a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.Adam(model.parameters())
    reduction = GradientReduction(model, mode="dad")
    before = copy.deepcopy(model.state_dict())
    errors = []

    def expect(error, call, *args):
        with pytest.raises(error) as caught:
            call(*args)
        errors.append(str(caught.value))

    def loss(scale=1.0):
        return model(torch.randn(4, 8) * scale).square().sum()

    expect(TypeError, reduction.apply, model)
    loss(float("nan") if dist.get_rank() else 1.0).backward()
    expect(NonFiniteError, reduction.apply, optimizer)
    assert not optimizer.state
    optimizer.zero_grad()
    loss().backward()
    reduction.clip_grad_norm_(0.1)
    expect(RuntimeError, optimizer.step)
    expect(RuntimeError, reduction.synchronize)
    expect(RuntimeError, loss().backward)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    reduction.detach()
    return errors


def test_wrong_calls(sites):
    for errors in sites(2).run(misuse):
        assert "optimizers" in errors[0]
        assert "NaN or Inf at site 1" in errors[1]
        assert all("apply(optimizer)" in error for error in errors[3:])
        assert "before gradients were synchronized" in errors[2]


def clips_what_is_not_finite() -> None:
    """After the error, gradients are those of `synchronize`, and training goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    reduction = GradientReduction(model, mode="dad", check_finite=False)
    plain = GradientReduction(twin, mode="dad", check_finite=False)
    for step in range(3):
        inputs = torch.randn(4, 8)
        for net in (model, twin):
            net.zero_grad()
            (net(inputs) * (float("inf") if step == 1 else 1.0)).square().sum().backward()
        plain.synchronize()
        if step == 1:
            with pytest.raises(RuntimeError, match="cannot be clipped"):
                reduction.clip_grad_norm_(0.1, error_if_nonfinite=True)
            for one, two in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad, equal_nan=True)
            continue
        reduction.clip_grad_norm_(0.1, error_if_nonfinite=True)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        reduction.apply(optimizer)
        other.step()
    assert reduction.first_difference() is None
    assert 0 <= _distance(model, twin) < 1e-6


def test_clipping_that_fails_leaves_gradients_for_the_program(sites):
    sites(2).run(clips_what_is_not_finite)


def two_optimizers() -> float:
    """Train by two optimizers, one call for both, and one weight that none of them has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    twin = copy.deepcopy(model)

    def optimizers(net):
        return torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.Adam(net[2].parameters())

    ours, theirs = optimizers(model), optimizers(twin)
    reduction, plain = GradientReduction(model, mode="dad"), GradientReduction(twin, mode="dad")
    for _ in range(3):
        inputs = torch.randn(4, 8, dtype=torch.float64)
        for net in (model, twin):
            net.zero_grad()
            net(inputs).square().sum().backward()
        plain.synchronize()
        reduction.apply(*ours)
        for each in theirs:
            each.step()
        assert model[0].weight.grad is None
        torch.testing.assert_close(model[4].weight.grad, twin[4].weight.grad)
    return _distance(model, twin)


def test_two_optimizers(sites):
    assert max(sites(2).run(two_optimizers)) < 1e-12


def test_alone():
    model = nn.Linear(5, 4)
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    reduction = dadplug.GradientReduction(model, mode="dad")
    inputs = torch.randn(3, 5)
    model(inputs).sum().backward()
    twin(inputs).sum().backward()
    reduction.apply(optimizer)
    plain.step()
    torch.testing.assert_close(model.weight, twin.weight)
    reduction.detach()
