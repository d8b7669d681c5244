"""Losses that mix samples are refused where they can be seen, and others are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dadplug
from dadplug import DifferentialPrivacy

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


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("loss", [mean, channels])
def test_a_mean_over_kept_targets_is_refused(loss, within):
    with pytest.raises(ValueError, match=r"mean over targets that are not ignored, 2 to 6 in a sample.*loss_reduction"):
        step(loss, some_ignored(), within)


def test_the_scale_of_a_scaler_does_not_hide_it():
    with pytest.raises(ValueError, match="mean over targets that are not ignored"):
        step(mean, some_ignored(), False, 256.0)


def test_weights_of_classes_are_refused_where_a_model_shows_them():
    def weighted(logits, targets):
        return mean(logits, targets, weight=torch.arange(1.0, CLASSES + 1))

    with pytest.raises(ValueError, match="weights of classes mixes samples"):
        step(weighted, some_ignored().clamp(min=0), True)


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
