"""AdaScale: learning rates, progress and schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dadplug
from dadplug.adaptive.noise_formulas import NO_ESTIMATE, NoiseEstimate, gain


def train(optimizer, reduction, model, steps, batch=8):
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(batch, 4, dtype=torch.float64)
        (model(inputs) - inputs[:, :1]).square().mean().backward()
        reduction.synchronize()
        optimizer.step()


@pytest.fixture
def model():
    return nn.Linear(4, 1).double()


@pytest.fixture
def reduction(model):
    made = dadplug.GradientReduction(model, mode="dad")
    made.noise.every = 1
    yield made
    made.detach()


def test_the_gain_lies_between_one_and_the_ratio_of_the_batches():
    assert gain(NoiseEstimate(5.0, 0.0), 64, 8) == pytest.approx(8.0)  # nothing but noise
    assert gain(NoiseEstimate(0.0, 5.0), 64, 8) == 1.0
    assert gain(NoiseEstimate(8.0, 1.0), 64, 8) == pytest.approx(2.0 / (1.0 / 8 + 1.0))
    assert gain(NoiseEstimate(8.0, -1.0), 64, 8) == pytest.approx(8.0)
    assert gain(NoiseEstimate(8.0, 1.0), 8, 8) == 1.0
    assert gain(NoiseEstimate(8.0, 1.0), 4, 8) == pytest.approx(2.0 / 3.0)
    assert gain(NO_ESTIMATE, 64, 8) == gain(NoiseEstimate(0.0, 0.0), 64, 8) == 1.0


def test_learning_rates_are_scaled_inside_of_the_step_only(model, reduction):
    for kind, power in ((torch.optim.SGD, 1.0), (torch.optim.AdamW, 0.5), (torch.optim.RMSprop, 0.5)):
        optimizer = kind(model.parameters(), lr=0.01)
        scaler = dadplug.AdaScale(optimizer, reduction, base_batch=2)
        seen = []
        optimizer.register_step_pre_hook(lambda each, *_, seen=seen: seen.append(each.param_groups[0]["lr"]))
        train(optimizer, reduction, model, 4)
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert 1.0 < scaler.gain < 4.0
        assert scaler.gain == reduction.gain
        assert seen[-1] == pytest.approx(0.01 * scaler.gain**power)
        before = model.weight.detach().clone()
        scaler.detach()
        train(optimizer, reduction, model, 1)
        assert seen[-1] == 0.01
        assert not torch.equal(before, model.weight)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that calls another one, as those of trainers do."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


def test_the_optimizer_in_a_wrapper_is_scaled(model, reduction):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = dadplug.AdaScale(Wrapper(Wrapper(inner)), reduction, base_batch=4)
    assert scaler.optimizer is inner
    with pytest.raises(ValueError, match="scale the learning rate of Adagrad"):
        dadplug.AdaScale(Wrapper(torch.optim.Adagrad(model.parameters())), reduction)


def test_a_closure_is_scaled_by_the_gain_of_its_own_batch(model, reduction):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = dadplug.AdaScale(optimizer, reduction, base_batch=4)
    for batch in (4, 4, 16, 64):
        inputs = torch.randn(batch, 4, dtype=torch.float64)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = (model(inputs) - 1.0).square().mean()
            loss.backward()
            reduction.synchronize()
            return loss

        before = model.weight.detach().clone()
        optimizer.step(closure)
        assert scaler.gain == reduction.noise.gain(batch)
        torch.testing.assert_close(model.weight, before - scaler.gain * model.weight.grad)
    assert scaler.gain > 1.0


def test_progress_is_the_sum_of_gains_and_moves_the_scheduler(model, reduction):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    scaler = dadplug.AdaScale(optimizer, reduction, scheduler, base_batch=2, scheduler_every=2.0)
    gains = []
    for _ in range(20):
        train(optimizer, reduction, model, 1)
        scaler.step()
        gains.append(scaler.gain)
    assert scaler.progress == pytest.approx(math.fsum(gains))
    assert scaler.progress > 20.0
    assert scheduler.last_epoch == int(scaler.progress / 2.0)
    assert scaler.get_last_lr() == scheduler.get_last_lr() == [0.01 * 0.5 ** (scheduler.last_epoch // 3)]

    other = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(other, step_size=3, gamma=0.5)
    restored = dadplug.AdaScale(other, reduction, schedule, scheduler_every=2.0)
    restored.load_state_dict(scaler.state_dict())
    assert (restored.progress, schedule.last_epoch) == (scaler.progress, scheduler.last_epoch)


def test_the_first_batch_is_the_base_where_none_is_stated(model, reduction):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = dadplug.AdaScale(optimizer, reduction)
    train(optimizer, reduction, model, 3)
    assert (scaler.gain, scaler.progress, reduction.noise.base_batch) == (1.0, 3.0, 8)
    train(optimizer, reduction, model, 1, batch=32)
    assert 1.0 < scaler.gain < 4.0


def test_optimizers_that_cannot_be_scaled_are_refused(model, reduction):
    with pytest.raises(ValueError, match="Adadelta: it knows SGD, Adam, AdamW, RMSprop"):
        dadplug.AdaScale(torch.optim.Adadelta(model.parameters()), reduction)
    with pytest.raises(ValueError, match="got Linear"):
        dadplug.AdaScale(model, reduction)
    optimizer = torch.optim.Adadelta(model.parameters())
    with pytest.raises(ValueError, match="rule must be"):
        dadplug.AdaScale(optimizer, reduction, rule="cubic")
    with pytest.raises(ValueError, match="base_batch"):
        dadplug.AdaScale(optimizer, reduction, rule="sqrt", base_batch=0)
    with pytest.raises(ValueError, match="scheduler_every"):
        dadplug.AdaScale(optimizer, reduction, rule="sqrt", scheduler_every=0)
    scaler = dadplug.AdaScale(optimizer, reduction, rule="sqrt", base_batch=2)
    train(optimizer, reduction, model, 3)
    assert scaler.factor == pytest.approx(math.sqrt(scaler.gain))
