"""Loops whose optimizer or update is not plain: closures, second order, policies, averages, scalers, schedules."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dadplug

from .compare import loop
from .site import STEPS, Site, Training, loss, net, sgd


@loop()
def lbfgs(site: Site) -> None:
    """A closure that clears, goes backward and synchronises, as often as L-BFGS asks for it."""
    training = Training(site)
    optimizer = torch.optim.LBFGS(training.model.parameters(), lr=0.1, max_iter=3, history_size=3)
    for step in range(2):

        def closure() -> float:
            optimizer.zero_grad()
            training.trains(step)  # noqa: B023
            return 1.0  # the sites' losses differ, and L-BFGS looks at it

        optimizer.step(closure)


@loop(chains=False)
def maml(site: Site) -> None:
    """Inner steps by `autograd.grad`, the outer loss through `functional_call` with what they lead to."""
    training = Training(site, lr=0.1)
    for step in training.steps():
        (inputs, targets), (others, goals) = site.batch(step), site.batch(step + 20)
        weights = dict(training.model.named_parameters())
        with training.reduction.samples(len(others)):
            outputs = torch.func.functional_call(training.model, weights, (inputs,))
        value = nn.functional.cross_entropy(outputs, targets)
        slopes = torch.autograd.grad(value, tuple(weights.values()), create_graph=True)
        adapted = {name: p - 0.1 * slope for (name, p), slope in zip(weights.items(), slopes, strict=True)}
        with training.reduction.samples(len(others)):
            outputs = torch.func.functional_call(training.model, adapted, (others,))
        nn.functional.cross_entropy(outputs, goals).backward()
        training.agree(len(others))


@loop(late="what comes after a payload has left is compressed by itself, or sent as it is")
def reinforce(site: Site) -> None:
    """Episodes of lengths that differ, a backward pass for each."""
    training = Training(site, lr=0.05)
    for step in training.steps(5):
        rows = 0
        for episode in range(1 + (step + 2 * site.rank) % 4):
            states = site.inputs(10 * step + episode, 2 + episode)
            chosen = torch.distributions.Categorical(logits=training.model(states))
            (-(chosen.log_prob(chosen.sample()) * states[:, 0]).mean()).backward()
            rows += len(states)
        training.agree(rows)


@loop()
def ema_teacher_and_swa(site: Site) -> None:
    model = site.model()
    teacher = copy.deepcopy(model).requires_grad_(False)
    training = Training(site, model)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(STEPS):
        inputs, targets = site.batch(step)
        training.optimizer.zero_grad()
        outputs = model(inputs)
        (nn.functional.cross_entropy(outputs, targets) + (outputs - teacher(inputs)).square().mean()).backward()
        training.agree(len(inputs))
        training.optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
    assert loss(average, site.batch(0)).isfinite()


@loop()
def clipping_after_synchronize(site: Site) -> None:
    training = Training(site)
    for step in training.steps():
        training.trains(step)
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)


@loop()
def noise_with_a_shared_seed(site: Site) -> None:
    training = Training(site)
    noise = torch.Generator().manual_seed(3)
    for step in training.steps():
        training.trains(step)
        for parameter in training.model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=noise), alpha=0.01)


@loop()
def schedule_and_groups_added(site: Site) -> None:
    """A learning rate that falls, and parameters that the optimizer takes over later."""
    training = Training(site)
    model = training.model
    training.optimizer = torch.optim.SGD(model[0].parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.8)
    for step in range(5):
        if step == 2:
            training.optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})
            schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.7)
        model.zero_grad()
        training.trains(step)
        training.optimizer.step()
        schedule.step()


@loop()
def adamw_with_several_groups(site: Site) -> None:
    training = Training(site)
    matrices = [p for p in training.model.parameters() if p.dim() > 1]
    rest = {"params": [p for p in training.model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    training.optimizer = torch.optim.AdamW([{"params": matrices}, rest], lr=0.01, eps=1e-3)
    for step in training.steps():
        training.trains(step)


@loop()
def grad_scaler_with_overflow(site: Site) -> None:
    """A scaler by hand (that of PyTorch needs a device): the scale halves after an overflow at one site."""
    training = Training(site, check_finite=False)
    scale = 1024.0
    for step in range(7):
        training.optimizer.zero_grad()
        factor = torch.inf if step in (0, 3) and site.rank == step // 3 else 1
        with training.reduction.loss_scale(scale):
            (training.loss(step) * factor * scale).backward()
        training.agree(site.rows(step), scale)
        found = all(p.grad.isfinite().all() for p in training.model.parameters())
        if found:
            for parameter in training.model.parameters():
                parameter.grad.div_(scale)
            training.optimizer.step()
        scale = scale * 2 if found else scale / 4


@loop()
def grad_scaler_of_pytorch(site: Site) -> None:
    """`torch.amp.GradScaler` on the CPU, without an overflow, its scale doubled every second step."""
    training = Training(site, check_finite=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(6):
        training.optimizer.zero_grad()
        scaler.scale(training.loss(step)).backward()
        training.agree(site.rows(step), scaler.get_scale())
        scaler.step(training.optimizer)
        scaler.update()


@loop()
def refused_steps(site: Site) -> None:
    """NaN at one site is an error at all; the loop clears and goes on."""
    training = Training(site)
    for step in range(6):
        training.optimizer.zero_grad()
        inputs, targets = site.batch(step)
        refused = step in (0, 3)
        if refused and site.rank == 1:
            inputs[1, 2] = torch.nan
        loss(training.model, (inputs, targets)).backward()
        with pytest.raises(dadplug.NonFiniteError) if refused else nullcontext():
            training.agree(len(inputs))
        if not refused:
            training.optimizer.step()


class _OutOfMemory(RuntimeError):
    pass


@loop()
def exceptions_in_forward_and_loader(site: Site) -> None:
    """At one site: the loader, and a layer after others that have run; the site leaves the step out."""
    training = Training(site)

    def load(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 1 and site.rank == 0:
            raise OSError("a file cannot be read")
        return site.batch(step)

    def fail(*_: object) -> None:
        if step == 3 and site.rank == 1:
            raise _OutOfMemory

    training.model[4].register_forward_pre_hook(fail)
    for step in training.steps(6):
        try:
            loss(training.model, load(step)).backward()
        except (OSError, _OutOfMemory):
            site.idle(training.reduction)
        else:
            training.agree(site.rows(step))


class _Fuse(nn.Module):
    """A layer that raises in backward where it is armed."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        if self.armed:
            x.register_hook(self._fail)
        return x

    def _fail(self, _: torch.Tensor) -> None:
        raise _OutOfMemory


@loop()
def exception_in_backward(site: Site) -> None:
    """Backward fails half-way, as out of memory does; the loop clears, and takes half of the batch, or none."""
    training = Training(site, site.model(lambda: nn.Sequential(*net()[:2], _Fuse(), *net()[2:])))
    fuse = training.model[2]
    for step in training.steps(6):
        rows = site.rows(step)
        fuse.armed = (step in (1, 3) and site.rank == step // 3) or step == 4
        try:
            (training.loss(step) * (50 if fuse.armed else 1)).backward()
        except _OutOfMemory:
            fuse.armed = False
            training.optimizer.zero_grad()
            inputs, targets = site.batch(step)
            rows = 0 if step == 3 else rows // 2
            if rows:
                loss(training.model, (inputs[:rows], targets[:rows])).backward()
        training.agree(rows)


@loop()
def copies_and_pickles(site: Site) -> None:
    """A model copied and pickled between backward and step, as for early stopping and checkpoints."""
    training = Training(site)
    for step in training.steps():
        training.loss(step).backward()
        copied = copy.deepcopy(training.model)
        loss(copied, site.batch(step)).backward()
        training.agree(site.rows(step))
        pickled = pickle.loads(pickle.dumps(training.model))
        assert loss(pickled, site.batch(step)).item() == loss(copied, site.batch(step)).item()


@loop()
def two_reductions_over_halves(site: Site) -> None:
    model = site.model(lambda: nn.Sequential(net(out=6), net()))
    reductions = [site.reduce(half) for half in model]
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        for reduction in reductions:
            site.agree(reduction, site.rows(step))
        optimizer.step()
