"""Loops with several models, several losses or gradients for inputs: GANs, attacks, SAM."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from .compare import loop
from .site import STEPS, WIDTH, Site, Training, loss, net, sgd

LATENT = 5
PARTS = "rows are counted part by part where parts of the model are called; what has left too early is sent anew"


def _generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(LATENT, 8), nn.Tanh(), nn.Linear(8, WIDTH))


def _critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def _conv_generator() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (LATENT, 1)), nn.ConvTranspose1d(LATENT, 6, 3), nn.Tanh(), nn.ConvTranspose1d(6, 4, 4)
    )


def _conv_critic() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(4, 6, 3), nn.Tanh(), nn.Conv1d(6, 5, 2), nn.Flatten(), nn.Linear(15, 1))


def _real(critic: nn.Module, value: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(critic(value), torch.ones(len(value), 1))


def _fake(critic: nn.Module, value: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(critic(value), torch.zeros(len(value), 1))


@loop()
def gan_with_two_reductions(site: Site) -> None:
    """DCGAN: the generator's backward pass leaves gradients at the critic, which clears them before its own."""
    generator, critic = site.model(_generator), site.model(_critic)
    of_generator, of_critic = site.reduce(generator), site.reduce(critic)
    optimizers = sgd(generator), sgd(critic)
    for step in range(STEPS):
        real, noise = site.inputs(step), torch.randn(site.rows(step), LATENT)
        critic.zero_grad()
        _real(critic, real).backward()
        _fake(critic, generator(noise).detach()).backward()
        site.agree(of_critic, 2 * len(real))
        optimizers[1].step()
        generator.zero_grad()
        _real(critic, generator(noise)).backward()
        site.agree(of_generator, len(noise))
        optimizers[0].step()


@loop(chains=False)
def dcgan(site: Site) -> None:
    """The same with convolutions, and the critic's losses in one sum."""
    generator, critic = site.model(_conv_generator), site.model(_conv_critic)
    of_generator, of_critic = site.reduce(generator), site.reduce(critic)
    optimizers = sgd(generator), sgd(critic)
    for step in range(STEPS):
        rows = site.rows(step)
        real, fake = torch.randn(rows, 4, WIDTH), generator(torch.randn(rows, LATENT))
        critic.zero_grad()
        (_real(critic, real) + _fake(critic, fake.detach())).backward()
        site.agree(of_critic, rows)
        optimizers[1].step()
        generator.zero_grad()
        _real(critic, fake).backward()
        site.agree(of_generator, rows)
        optimizers[0].step()


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = _generator(), _critic()


@loop(late=PARTS)
def gan_with_one_reduction(site: Site) -> None:
    model = site.model(_Pair)
    reduction = site.reduce(model)
    optimizers = sgd(model.generator), sgd(model.critic)
    for step in range(STEPS):
        real, noise = site.inputs(step), torch.randn(site.rows(step), LATENT)
        model.zero_grad()
        (_real(model.critic, real) + _fake(model.critic, model.generator(noise).detach())).backward()
        site.agree(reduction, 2 * len(real))
        optimizers[1].step()
        model.zero_grad()
        _real(model.critic, model.generator(noise)).backward()
        site.agree(reduction, len(noise))
        optimizers[0].step()


@loop(chains=False)
def wgan_with_gradient_penalty(site: Site) -> None:
    """Two steps of the critic for one of the generator; the penalty takes a second derivative."""
    generator, critic = site.model(_generator), site.model(_critic)
    of_generator, of_critic = site.reduce(generator), site.reduce(critic)
    optimizers = sgd(generator, 0.05), sgd(critic, 0.05)
    for step in range(6):
        real, noise = site.inputs(step), torch.randn(site.rows(step), LATENT)
        if step % 3 < 2:
            optimizers[1].zero_grad()
            fake = generator(noise).detach()
            mixed = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            (critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
            site.agree(of_critic, len(real))
            optimizers[1].step()
        else:
            optimizers[0].zero_grad()
            (-critic(generator(noise)).mean()).backward()
            site.agree(of_generator, len(noise))
            optimizers[0].step()


@loop(chains=False)
def input_gradient_penalty(site: Site) -> None:
    """Double backward through all layers, the input's gradient by `autograd.grad`."""
    training = Training(site)
    for step in training.steps():
        inputs, targets = site.batch(step)
        value = loss(training.model, (inputs.requires_grad_(), targets))
        (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
        (value + slope.square().sum()).backward()
        training.agree(len(inputs))


@loop(int8=True)
def fgsm(site: Site) -> None:
    """A backward pass for the input's gradient, whose gradients of parameters are cleared."""
    training = Training(site)
    for step in range(STEPS):
        inputs, targets = site.batch(step)
        loss(training.model, (inputs.requires_grad_(), targets)).backward()
        attacked = (inputs + 0.1 * inputs.grad.sign()).detach()
        training.optimizer.zero_grad()
        loss(training.model, (attacked, targets)).backward()
        training.agree(len(inputs))
        training.optimizer.step()


@loop()
def pgd(site: Site) -> None:
    """Several ascent steps that change the input's data in place, and train on the last."""
    training = Training(site)
    for step in range(STEPS):
        inputs, targets = site.batch(step)
        for _ in range(3):
            loss(training.model, (inputs.requires_grad_(), targets)).backward()
            inputs.data.add_(0.05 * inputs.grad.sign())
            inputs.grad = None
        training.optimizer.zero_grad()
        loss(training.model, (inputs.detach(), targets)).backward()
        training.agree(len(inputs))
        training.optimizer.step()


@loop()
def free_adversarial_training(site: Site) -> None:
    """One backward pass for both the input's gradient and the parameters', the batch replayed."""
    training = Training(site)
    for step in training.steps(4):
        inputs, targets = site.batch(step // 2)
        if step % 2 == 0:
            noise = torch.zeros_like(inputs)
        loss(training.model, (inputs + noise.requires_grad_(), targets)).backward()
        noise = (noise + 0.1 * noise.grad.sign()).detach()
        training.agree(len(inputs))


def _ascend(model: nn.Module) -> list[Tensor]:
    """Perturb the weights along their gradients; return what they were."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=0.05 / (float(norm) + 1e-12))
    return kept


def _restore(model: nn.Module, kept: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.copy_(before)


def _sharpness_aware(site: Site, agreed: bool) -> None:
    training = Training(site)
    for step in training.steps():
        with nullcontext() if agreed else training.reduction.no_sync():
            training.loss(step).backward()
        if agreed:
            training.agree(site.rows(step))
        kept = _ascend(training.model)
        training.optimizer.zero_grad()
        training.trains(step)
        _restore(training.model, kept)


@loop()
def sam_with_agreed_ascent(site: Site) -> None:
    """Sharpness-aware minimisation: both backward passes are agreed on, so that all sites perturb alike."""
    _sharpness_aware(site, agreed=True)


@loop()
def sam_with_local_ascent(site: Site) -> None:
    """Each site perturbs along its own gradient, of a backward pass that is not sent, as under DDP."""
    _sharpness_aware(site, agreed=False)


@loop(chains=False, late=PARTS)
def several_losses_several_optimizers(site: Site) -> None:
    """A trunk and two heads, each with its optimizer; each head has a backward pass through the kept graph."""
    model = site.model(lambda: nn.ModuleDict({"trunk": net(out=8), "left": nn.Linear(8, 4), "right": nn.Linear(8, 3)}))
    reduction = site.reduce(model)
    optimizers = [sgd(part) for part in model.values()]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        features = model["trunk"](site.inputs(step))
        nn.functional.cross_entropy(model["left"](features), site.batch(step)[1]).backward(retain_graph=True)
        model["right"](features).square().mean().backward()
        site.agree(reduction, site.rows(step))
        for optimizer in optimizers:
            optimizer.step()
