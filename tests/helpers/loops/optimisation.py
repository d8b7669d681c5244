"""Loops whose optimizer or update is not plain: closures, second order, policies, averages, scalers, schedules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dadplug

from .compare import loop
from .site import Site, loss, net, sgd

STEPS = 4


@loop()
def lbfgs(site: Site) -> None:
    """A closure that clears, goes backward and synchronises, as often as L-BFGS asks for it."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)
    for step in range(2):
        batch = site.batch(step)

        def closure() -> float:
            optimizer.zero_grad()
            value = loss(model, batch)  # noqa: B023
            value.backward()
            site.agree(reduction, len(batch[1]))  # noqa: B023
            return 1.0  # the sites' losses differ, and L-BFGS looks at it

        optimizer.step(closure)


@loop(chains=False)
def maml(site: Site) -> None:
    """Inner steps by `autograd.grad`, the outer loss through `functional_call` with what they lead to."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model, 0.1)
    for step in range(STEPS):
        (inputs, targets), (others, goals) = site.batch(step), site.batch(step + 20)
        weights = dict(model.named_parameters())
        with reduction.samples(len(others)):
            value = nn.functional.cross_entropy(torch.func.functional_call(model, weights, (inputs,)), targets)
        slopes = torch.autograd.grad(value, tuple(weights.values()), create_graph=True)
        adapted = {name: p - 0.1 * slope for (name, p), slope in zip(weights.items(), slopes, strict=True)}
        optimizer.zero_grad()
        with reduction.samples(len(others)):
            outputs = torch.func.functional_call(model, adapted, (others,))
        nn.functional.cross_entropy(outputs, goals).backward()
        site.agree(reduction, len(others))
        optimizer.step()


@loop(late="what comes after a payload has left is compressed by itself, or sent as it is")
def reinforce(site: Site) -> None:
    """Episodes of lengths that differ, a backward pass for each."""
    policy = site.model()
    reduction = site.reduce(policy)
    optimizer = sgd(policy, 0.05)
    for step in range(5):
        optimizer.zero_grad()
        rows = 0
        for episode in range(1 + (step + 2 * site.rank) % 4):
            states = site.inputs(10 * step + episode, 2 + episode)
            chosen = torch.distributions.Categorical(logits=policy(states))
            actions = chosen.sample()
            (-(chosen.log_prob(actions) * states[:, 0]).mean()).backward()
            rows += len(states)
        site.agree(reduction, rows)
        optimizer.step()


@loop()
def ema_teacher_and_swa(site: Site) -> None:
    model = site.model()
    teacher = copy.deepcopy(model).requires_grad_(False)
    reduction = site.reduce(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        inputs, targets = site.batch(step)
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = teacher(inputs)
        outputs = model(inputs)
        (nn.functional.cross_entropy(outputs, targets) + (outputs - wanted).square().mean()).backward()
        site.agree(reduction, len(inputs))
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
    assert loss(average, site.batch(0)).isfinite()


@loop()
def clipping_after_synchronize(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@loop()
def noise_with_a_shared_seed(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    noise = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=noise), alpha=0.01)
        optimizer.step()


@loop()
def schedule_and_groups_added(site: Site) -> None:
    """A learning rate that falls, and parameters that the optimizer takes over later."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        model.zero_grad()
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()
        schedule.step()


@loop()
def adamw_with_several_groups(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=0.01, eps=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()


@loop()
def grad_scaler_with_overflow(site: Site) -> None:
    """A scaler by hand (that of PyTorch needs a device): the scale halves after an overflow at one site."""
    model = site.model()
    reduction = site.reduce(model, check_finite=False)
    optimizer = sgd(model)
    scale = 1024.0
    for step in range(7):
        optimizer.zero_grad()
        value = loss(model, site.batch(step))
        if step in (0, 3) and site.rank == step // 3:
            value = value * torch.inf
        with reduction.loss_scale(scale):
            (value * scale).backward()
        site.agree(reduction, site.rows(step), scale)
        found = all(p.grad.isfinite().all() for p in model.parameters())
        if found:
            for parameter in model.parameters():
                parameter.grad.div_(scale)
            optimizer.step()
        scale = scale * 2 if found else scale / 4


@loop()
def grad_scaler_of_pytorch(site: Site) -> None:
    """`torch.amp.GradScaler` on the CPU, without an overflow, its scale doubled every second step."""
    model = site.model()
    reduction = site.reduce(model, check_finite=False)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss(model, site.batch(step))).backward()
        site.agree(reduction, site.rows(step), scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()


@loop()
def refused_steps(site: Site) -> None:
    """NaN at one site is an error at all; the loop clears and goes on."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        inputs, targets = site.batch(step)
        if step in (0, 3) and site.rank == 1:
            inputs[1, 2] = torch.nan
        loss(model, (inputs, targets)).backward()
        if step in (0, 3):
            with pytest.raises(dadplug.NonFiniteError):
                site.agree(reduction, len(inputs))
            continue
        site.agree(reduction, len(inputs))
        optimizer.step()


class _OutOfMemory(RuntimeError):
    pass


@loop()
def exceptions_in_forward_and_loader(site: Site) -> None:
    """At one site: the loader, and a layer after others that have run; the site leaves the step out."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)

    def load(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 1 and site.rank == 0:
            raise OSError("a file cannot be read")
        return site.batch(step)

    def fail(*_: object) -> None:
        raise _OutOfMemory

    for step in range(6):
        optimizer.zero_grad()
        hook = model[4].register_forward_pre_hook(fail) if step == 3 and site.rank == 1 else None
        try:
            loss(model, load(step)).backward()
        except (OSError, _OutOfMemory):
            site.idle(reduction)
        else:
            site.agree(reduction, site.rows(step))
        finally:
            if hook is not None:
                hook.remove()
        optimizer.step()


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
    model = site.model(lambda: nn.Sequential(*net()[:2], _Fuse(), *net()[2:]))
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        inputs, targets = site.batch(step)
        model[2].armed = (step in (1, 3) and site.rank == step // 3) or step == 4
        try:
            (loss(model, (inputs, targets)) * (50 if model[2].armed else 1)).backward()
            rows = len(inputs)
        except _OutOfMemory:
            model[2].armed = False
            optimizer.zero_grad()
            rows = 0 if step == 3 else len(inputs) // 2
            if rows:
                loss(model, (inputs[:rows], targets[:rows])).backward()
        site.agree(reduction, rows)
        optimizer.step()


@loop()
def copies_and_pickles(site: Site) -> None:
    """A model copied and pickled between backward and step, as for early stopping and checkpoints."""
    import pickle

    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        copied = copy.deepcopy(model)
        loss(copied, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        pickled = pickle.loads(pickle.dumps(model))
        assert loss(pickled, site.batch(step)).item() == loss(copied, site.batch(step)).item()
        optimizer.step()


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
