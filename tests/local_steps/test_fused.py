"""Local steps on gradients that are not formed, beside ordinary ones."""

import contextlib
import copy

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from local_reference import adam, batch, build, ends_equal, loss_of, train, vector
from torch import nn

from dadplug import LocalSGD

OPTIMIZERS = {
    "adam": adam,
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "ascent": lambda weights: torch.optim.AdamW(weights, lr=0.01, maximize=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.05),
}
LINEAR = ("0.weight", "2.weight", "4.weight")


@support.at_sites(2)
def test_one_site_may_fuse_alone() -> None:
    """Sites need not fuse alike: one of them may not be able to."""
    site = dist.get_rank()
    model = build(site, torch.float32)
    local = LocalSGD(model, adam(model.parameters()), every=2, fused=site == 1, overlap=False, sync_batchnorm=True)
    train(local, range(4), site)
    assert local.first_difference() is None
    local.detach()


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3)).double()


@support.at_sites(2)
def test_statistics_are_those_of_all_rows() -> None:
    site = dist.get_rank()
    models = [normalised(), normalised()]
    for model, fused in zip(models, (True, False)):
        local = LocalSGD(model, adam(model.parameters()), every=3, fused=fused, sync_batchnorm=True)
        train(local, range(7), site)
        ends_equal(local)
    assert off_by(vector(models[0]), vector(models[1])) < 1e-12


class Pair:
    """A model in training by fused local steps, and its twin in training by the optimizer alone."""

    def __init__(self, model: nn.Module | None = None, make=adam, **options) -> None:
        self.model = build() if model is None else model
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.other = make(self.model.parameters()), make(self.twin.parameters())
        self.local = LocalSGD(self.model, self.optimizer, every=2, fused=True, **options)

    def backward(self, step: int, rows: int = 8) -> None:
        for model in (self.model, self.twin):
            loss_of(model, *batch(step, 0, rows)).backward()

    def zero_grad(self, **settings) -> None:
        for each in (self.optimizer, self.other):
            each.zero_grad(**settings)

    def step(self) -> None:
        """Take a step with both, and compare."""
        self.local.step()
        self.other.step()
        self.compare()

    def pass_and_step(self, step: int, rows: int = 8) -> None:
        """Clear the gradients, take a backward pass, and step with both."""
        self.zero_grad()
        self.backward(step, rows)
        self.step()

    def compare(self) -> None:
        """Check that parameters, gradients and states are equal."""
        for own, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert off_by(own.detach(), other.detach()) < 1e-11
            assert (own.grad is None) == (other.grad is None)
            if own.grad is not None:
                assert off_by(own.grad.clone(), other.grad) < 1e-11
        states = [each.state_dict()["state"] for each in (self.optimizer, self.other)]
        assert states[0].keys() == states[1].keys()
        for key, state in states[1].items():
            assert all(off_by(torch.as_tensor(states[0][key][name]), value) < 1e-11 for name, value in state.items())

    @property
    def formed(self) -> list[str]:
        return [name for name, each in self.model.named_parameters() if type(each.grad) is torch.Tensor]


@pytest.fixture
def pairs():
    """Function that makes a pair, whose hooks are removed in the end."""
    with contextlib.ExitStack() as stack:

        def make(*model: nn.Module, **options) -> Pair:
            pair = Pair(*model, **options)
            stack.callback(lambda: pair.local.detach())
            return pair

        yield make


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_optimizer(pairs, name):
    pair = pairs(make=OPTIMIZERS[name])
    for step in range(5):
        pair.zero_grad()
        pair.backward(step, 5 + step)
        assert pair.formed == []
        pair.step()
        assert not set(LINEAR) & set(pair.formed)
    ordinary = OPTIMIZERS[name](pair.model.parameters())  # the states load where steps are ordinary, and back
    ordinary.load_state_dict(pair.optimizer.state_dict())
    pair.local.detach()
    pair.zero_grad()
    pair.backward(7)
    ordinary.step()
    pair.other.step()
    pair.optimizer.load_state_dict(ordinary.state_dict())
    pair.local = LocalSGD(pair.model, pair.optimizer, fused=True)
    pair.pass_and_step(8)


def test_gradients_accumulate_and_are_cleared_as_autograds(pairs):
    pair = pairs()
    for step in range(3):  # several passes before a step, and no clearing after it
        pair.backward(2 * step)
        with pair.local.no_sync():
            pair.backward(2 * step + 1)
        pair.step()
    pair.step()  # once more with the same gradients
    pair.zero_grad()
    pair.backward(7)
    pair.zero_grad()  # no step
    pair.step()
    pair.backward(8)
    pair.step()
    assert not set(LINEAR) & set(pair.formed)
    pair.zero_grad(set_to_none=False)
    pair.backward(9)
    for model in (pair.model, pair.twin):
        model[0].weight.grad = None  # of one alone
        model[2].weight.grad.mul_(0.5)
        model[4].bias.grad = None
    pair.step()


def test_clipping_takes_norms_of_what_is_not_formed(pairs):
    pair = pairs(make=OPTIMIZERS["sgd"])
    for step in range(4):
        pair.zero_grad()
        pair.backward(step)
        norms = [pair.local.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.1)]
        assert off_by(*norms) < 1e-11
        if step == 1:
            pair.zero_grad()  # the program skips the step
            pair.backward(9)
        pair.step()
        assert not set(LINEAR) & set(pair.formed)
    pair.zero_grad()
    pair.backward(5)
    for model in (pair.model, pair.twin):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # torch's function reads and changes them
    pair.step()
    loss_of(pair.model, batch(0, 0)[0] * float("nan"), batch(0, 0)[1]).backward()
    with pytest.raises(RuntimeError, match="nan"):
        pair.local.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_errors_between_forward_and_step_leave_no_trace(pairs):
    pair = pairs()

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise OSError("broken")

    for model in (pair.model, pair.twin):
        model(torch.randn(3, 6, dtype=torch.float64))  # no backward
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(3, 7, dtype=torch.float64))
        with pytest.raises(OSError, match="broken"):
            model[2:](Broken.apply(model[:2](batch(0, 0)[0]))).sum().backward()
    pair.step()  # with the gradients of the layers that backward has reached
    pair.zero_grad()
    pair.backward(1)
    plain, pair.optimizer.step = pair.optimizer.step, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pair.local.step()
    pair.optimizer.step = plain
    pair.step()
    with pytest.raises(RuntimeError, match=r"call local.step\(\) instead"):
        pair.optimizer.step()


def test_closures_and_steps_of_the_trainer(pairs):
    pair = pairs()

    def closure(model, optimizer):
        def evaluate():
            optimizer.zero_grad()
            loss = loss_of(model, *batch(3, 0))
            loss.backward()
            return loss

        return evaluate

    for _ in range(3):
        loss = pair.local.step(closure(pair.model, pair.optimizer))
        assert off_by(loss.detach(), pair.other.step(closure(pair.twin, pair.other)).detach()) < 1e-12
        assert not set(LINEAR) & set(pair.formed)
        pair.compare()
    with pair.local.stepping():  # an ordinary step, with gradients that are formed for it
        pair.optimizer.step()
    pair.other.step()
    with pair.local.stepping():
        pair.optimizer.step(closure(pair.model, pair.optimizer))
    pair.other.step(closure(pair.twin, pair.other))
    pair.compare()


def test_inputs_may_be_overwritten_after_backward(pairs):
    pair = pairs()
    inputs, targets = batch(0, 0)
    for model in (pair.model, pair.twin):
        loss_of(model, inputs, targets).backward()
    inputs.zero_()
    pair.step()


def test_a_grad_scaler_takes_ordinary_steps(pairs):
    pair = pairs(build(0, torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, unscales in enumerate((True, False)):
        pair.zero_grad()
        scaler.scale(loss_of(pair.model, *batch(step, 0, dtype=torch.float32))).backward()
        loss_of(pair.twin, *batch(step, 0, dtype=torch.float32)).backward()
        if unscales:
            scaler.unscale_(pair.optimizer)
        pair.local.step(scaler=scaler)
        scaler.update()
        pair.other.step()
        assert off_by(vector(pair.model), vector(pair.twin)) < 1e-6
    assert pair.local.remarks == ("fused steps: no, a GradScaler scales the loss",)
    pair = pairs()
    pair.backward(0)
    pair.local.step(scaler=torch.amp.GradScaler("cpu", enabled=False))
    pair.other.step()
    assert pair.local.remarks == ("fused steps: yes",)
    pair.compare()


def test_parameters_may_be_frozen_added_and_tied(pairs):
    pair = pairs(make=lambda weights: torch.optim.SGD(weights, lr=0.1))

    def both(change):
        change(pair.model, pair.optimizer)
        change(pair.twin, pair.other)
        for step in range(2):
            pair.pass_and_step(step)

    both(lambda model, _: model[2].requires_grad_(False))
    both(lambda model, _: model[2].weight.requires_grad_(True))
    both(lambda model, _: model[2].requires_grad_(True))

    def append(model, optimizer):
        torch.manual_seed(3)
        model.append(nn.Linear(3, 3).double())
        optimizer.add_param_group({"params": model[5].parameters(), "lr": 0.2})

    both(append)
    assert not {*LINEAR, "5.weight"} & set(pair.formed)
    both(lambda model, _: model.register_parameter("tied", model[2].weight))
    assert "tied" in pair.formed
    assert "  tied: no, shared by layers that do not go together" in pair.local.remarks
    both(lambda model, _: setattr(model[4], "weight", nn.Parameter(torch.ones_like(model[4].weight))))


def test_what_is_not_fused_has_a_reason(pairs):
    pair = pairs(make=lambda weights: torch.optim.RMSprop(weights, lr=0.01))
    pair.backward(0)
    pair.step()
    assert pair.local.remarks == ("fused steps: no, RMSprop has no fused step",)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.first = nn.Conv1d(1, 4, 3), nn.Linear(16, 300)
            self.second, self.third = nn.Linear(300, 300), nn.Linear(300, 3)
            self.third.weight.requires_grad_(False)

        def forward(self, inputs):
            hidden = torch.relu(self.first(self.conv(inputs[:, None]).flatten(1)))
            return self.third(torch.tanh(self.second(hidden))) + 1e-3 * self.first.weight.sum()

    pair = pairs(Net().double())
    for step in range(3):
        pair.pass_and_step(step, 8 if step else 400)
        assert {"first.weight", "second.weight"} <= set(pair.formed)
    assert "used outside its layer too" in pair.local.remarks[0]
    assert "its 400 rows take more memory than its gradient" in pair.local.remarks[0]

    hooked = pairs()
    hooked.local.detach()
    hooked.optimizer.register_step_post_hook(lambda *_: None)
    local = LocalSGD(hooked.model, hooked.optimizer, fused=True)
    assert local.remarks == ("fused steps: no, hooks of the optimizer may read the gradient",)
    local.detach()
    with pytest.raises(ValueError, match="fused must be True or False"):
        LocalSGD(hooked.model, hooked.optimizer, fused=1)
