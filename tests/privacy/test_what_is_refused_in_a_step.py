"""Ways by which a gradient could leave without being clipped by sample: each is clipped right, or is an error."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import refuses
from torch import nn
from torch.utils.checkpoint import checkpoint

import dadplug
from dadplug import DifferentialPrivacy, PrivacyError

NORM = 0.3
ROWS, TARGETS = 5 * torch.randn(1, 6, dtype=torch.float64), torch.tensor([1])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def reduce(model, mode="dsgd", **options):
    return dadplug.GradientReduction(model, mode, privacy=DifferentialPrivacy(0.0, NORM, 0.1, 1), **options)


def backward(model):
    F.cross_entropy(model(ROWS), TARGETS).backward()


def norm(model):
    return math.sqrt(sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None))


def test_two_backward_passes_through_one_forward_pass():
    model = net()
    reduction = reduce(model)
    loss = F.cross_entropy(model(ROWS), TARGETS)
    loss.backward(retain_graph=True)
    with pytest.raises(PrivacyError, match="by two, a sample counts twice"):
        loss.backward()
    model.zero_grad()
    backward(model)
    reduction.synchronize()
    assert norm(model) == pytest.approx(NORM)


@pytest.mark.parametrize("mode", ["dsgd", "rankdad"])
def test_gradients_cannot_be_read_or_changed_before_they_are_private(mode):
    model = net()
    reduction = reduce(model, mode)
    backward(model)
    refuses(
        (lambda: model[0].weight.grad.norm(), r"not private yet: read it after synchronize"),
        (lambda: model[0].weight.grad.mul_(100), "Clip and unscale after synchronize"),
        error=PrivacyError,
    )
    model[2].bias.grad = torch.ones(4, dtype=torch.float64)
    with pytest.raises(PrivacyError, match=r"'2.bias' was changed between backward\(\) and synchronize\(\)"):
        reduction.synchronize()
    model.zero_grad()
    assert not reduction.pending
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # no backward pass at all
    with pytest.raises(PrivacyError, match="is not of this step"):
        reduction.synchronize()
    assert reduction._private.ledger.entries == []


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mode", ["dsgd", "rankdad"])
def test_cleared_gradients_are_dropped(mode, set_to_none):
    model = net()
    reduction = reduce(model, mode)
    backward(model)
    model.zero_grad(set_to_none)
    reduction.synchronize()
    assert norm(model) == 0
    model.zero_grad(set_to_none)
    backward(model)
    reduction.synchronize()
    assert 0 < norm(model) <= NORM * (1 + 1e-9)


def test_the_scale_of_a_scaler_does_not_count():
    model, plain = net(), net()
    reduction = reduce(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(F.cross_entropy(model(ROWS), TARGETS) * 1e-3).backward()
    reduction.synchronize()
    scaler.unscale_(torch.optim.SGD(model.parameters(), 0.1))
    (F.cross_entropy(plain(ROWS), TARGETS) * 1e-3).backward()
    assert norm(plain) < NORM
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


class Inner(nn.Module):
    def __init__(self, reentrant, all_inside=False):
        super().__init__()
        self.reentrant, self.all_inside = reentrant, all_inside
        self.first, self.inner, self.last = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 4)

    def whole(self, x):
        return self.last(self.inner(self.first(x)))

    def forward(self, x):
        if self.all_inside:
            return checkpoint(self.whole, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    torch.manual_seed(0)
    model = Inner(reentrant).double()
    plain = Inner(False).double()
    plain.load_state_dict(model.state_dict())
    reduction = reduce(model)
    backward(model)
    reduction.synchronize()
    backward(plain)
    factor = min(1.0, NORM / norm(plain))
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad * factor)
    hidden = Inner(True, all_inside=True).double()
    _kept = reduce(hidden)
    with pytest.raises(PrivacyError, match="use use_reentrant=False"):
        F.cross_entropy(hidden(ROWS.clone()), TARGETS).backward()


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, deltas):
        raise ZeroDivisionError


def test_a_failed_backward_pass_leaves_nothing():
    model = net()
    reduction = reduce(model)
    hidden = model[0](ROWS)
    with pytest.raises(ZeroDivisionError):
        F.cross_entropy(model[2](Boom.apply(hidden)), TARGETS).backward()
    model.zero_grad()
    backward(model)
    reduction.synchronize()
    assert norm(model) == pytest.approx(NORM)


class Parts(nn.Module):
    """A module that is never called, as in Lightning, where a step calls its children."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 6).double(), nn.Linear(6, 4).double()


def test_children_that_are_called_by_themselves():
    model = Parts()
    reduction = reduce(model)
    F.cross_entropy(model.head(model.encoder(ROWS).tanh()), TARGETS).backward()
    reduction.synchronize()
    assert norm(model) == pytest.approx(NORM)
    model.zero_grad()
    with pytest.raises(PrivacyError, match="goes through two forward passes"):
        (model.encoder(ROWS) - model.encoder(2 * ROWS)).sum().backward()


def test_a_model_that_changes():
    model = net()
    model[0].requires_grad_(False)
    reduction = reduce(model)
    model[0].requires_grad_(True)
    model.append(nn.Linear(4, 4).double())
    backward(model)
    reduction.synchronize()
    assert norm(model) == pytest.approx(NORM)
    model.append(nn.BatchNorm1d(4).double().requires_grad_(False))
    for _ in range(2):  # it is found each time
        with pytest.raises(ValueError, match="mixes the samples of a batch"):
            model(ROWS.expand(2, -1))
    model[-1].eval()
    model.zero_grad()
    backward(model)
    reduction.synchronize()
    assert norm(model) == pytest.approx(NORM)
    model.train()
    with pytest.raises(PrivacyError, match=r"4 \(BatchNorm1d\) mixes the samples of a batch.*call eval\(\)"):
        model(ROWS)


class Means(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4).double()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x)


class NormOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(6).double(), nn.Linear(6, 4).double()

    def forward(self, x):
        return self.layer(self.norm(x) * self.norm.weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [(Means, "buffer 'mean' was changed in training"), (NormOutside, "'norm.weight' has not come through a call")],
)
def test_data_that_would_leave_by_other_ways(make, message):
    model = make()
    _kept = reduce(model)
    with pytest.raises(PrivacyError, match=message):
        backward(model)


def test_join_ends_and_counts_nothing():
    reduction = reduce(net())
    reduction.join(lambda: pytest.fail("there is nothing to step"))
    assert reduction._private.ledger.entries == []
    with pytest.raises(ValueError, match="are not clipped by sample"):
        reduction.attach(None)


# Losses that mix samples are refused where they can be seen, and others are not

SAMPLES, WORDS, CLASSES = 5, 6, 7


class Model(nn.Module):
    """Predictions of words, or the loss that is computed of them."""

    def __init__(self, loss=None):
        super().__init__()
        self.layer, self.loss = nn.Linear(4, CLASSES), loss

    def forward(self, x, targets=None):
        logits = self.layer(x)
        return logits if self.loss is None else {"loss": 1.0 + self.loss(logits, targets), "logits": logits}


def mean(logits, targets, **options):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def channels(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets)


def of_each_sample(logits, targets):
    summed = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)
    return (summed / (targets != -100).sum(1).clamp(min=1)).mean()


def by_constant(logits, targets):
    return mean(logits, targets, reduction="sum") / (SAMPLES * WORDS)


def squares(logits, targets):
    return ((logits - 1) * (targets != -100)[..., None]).square().sum() / (targets != -100).sum()


def step(loss, targets, within, scale=None):
    torch.manual_seed(0)
    model = Model(loss if within else None)
    reduction = dadplug.GradientReduction(model, "dsgd", privacy=DifferentialPrivacy())
    inputs = torch.randn(SAMPLES, WORDS, 4)
    for _ in range(2):
        model.zero_grad()
        value = model(inputs, targets)["loss"] if within else loss(model(inputs), targets)
        if scale is None:
            value.backward()
        else:
            torch.amp.GradScaler("cpu", init_scale=scale).scale(value).backward()
        reduction.synchronize()
    return reduction


def some_ignored():
    targets = torch.randint(0, CLASSES, (SAMPLES, WORDS), generator=torch.Generator().manual_seed(1))
    targets[1, 2:], targets[3, 5:] = -100, -100
    return targets


def test_means_over_kept_targets_and_weights_of_classes_are_refused():
    def weighted(logits, targets):
        return mean(logits, targets, weight=torch.arange(1.0, CLASSES + 1))

    kept = r"mean over targets that are not ignored, 2 to 6 in a sample.*loss_reduction"
    cases = itertools.product((mean, channels), (True, False))
    refuses(
        *((partial(step, loss, some_ignored(), within), kept) for loss, within in cases),
        (lambda: step(mean, some_ignored(), False, 256.0), kept),  # which a scaler has scaled
        (lambda: step(weighted, some_ignored().clamp(min=0), True), "weights of classes mixes samples"),
    )


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("loss", [of_each_sample, by_constant, squares])
def test_other_losses_are_not(loss, within):
    assert step(loss, some_ignored(), within).step == 2


@pytest.mark.parametrize("within", [True, False])
def test_a_mean_over_equally_many_targets_is_not(within):
    targets = some_ignored().clamp(min=0)
    assert step(mean, targets, within).step == 2
    targets[:, -2:] = -100
    assert step(mean, targets, within).step == 2
