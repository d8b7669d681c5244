"""Loops around one backward pass a step: cleared, repeated, skipped and accumulated gradients."""

from collections.abc import Callable

import torch
from torch import nn

from .compare import loop
from .site import STEPS, Site, Training, loss, trains

LATE = "what comes after a payload has left is compressed by itself, or sent as it is"
KEPT = "what is in `.grad` before the backward pass is not compressed with what it adds"


@loop(int8=True)
def plain(site: Site) -> None:
    trains(site, steps=6)


def _discards(site: Site, clear: Callable[[nn.Module], object]) -> None:
    """A backward pass whose gradients are thrown away, and the one that counts."""
    training = Training(site)
    for step in training.steps():
        (100 * training.loss(step + 10, 5)).backward()
        clear(training.model)
        training.trains(step)


@loop(int8=True)
def discarded_zero_grad(site: Site) -> None:
    _discards(site, lambda model: model.zero_grad())


@loop()
def discarded_set_to_zero(site: Site) -> None:
    _discards(site, lambda model: model.zero_grad(set_to_none=False))


@loop()
def discarded_grad_none(site: Site) -> None:
    def clear(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    _discards(site, clear)


@loop()
def discarded_grad_zero_(site: Site) -> None:
    def clear(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    _discards(site, clear)


@loop()
def discarded_by_the_optimizer(site: Site) -> None:
    training = Training(site)
    for step in range(STEPS):
        training.loss(step + 10, 5).backward()  # e.g. a look at gradients for a log
        training.optimizer.zero_grad()
        training.trains(step)
        training.optimizer.step()


@loop()
def discarded_now_and_then(site: Site) -> None:
    """Discarded at one site alone, and in some steps: payloads of other steps have left during backward."""
    training = Training(site)
    for step in training.steps(6):
        if (step in (2, 3) and site.rank == step % 2) or step == 4:
            (100 * training.loss(step + 10, 5)).backward()
            training.optimizer.zero_grad()
        training.trains(step)


@loop()
def discarded_and_no_other(site: Site) -> None:
    """A batch that one site throws away after backward, with no other instead: it takes no part in the step."""
    training = Training(site)
    for step in training.steps(5):
        training.loss(step).backward()
        discarded = step in (1, 3) and site.rank == step // 2
        if discarded:
            training.optimizer.zero_grad()
        training.agree(0 if discarded else site.rows(step))


@loop(int8=True)
def accumulation_under_no_sync(site: Site) -> None:
    training = Training(site)
    for step in training.steps():
        with training.reduction.no_sync():
            for part in range(2):
                training.loss(3 * step + part).backward()
        training.loss(3 * step + 2).backward()
        training.agree(sum(site.rows(3 * step + part) for part in range(3)))


@loop()
def accumulation_without_no_sync(site: Site) -> None:
    training = Training(site)
    for step in training.steps():
        for part in range(3):
            (training.loss(3 * step + part) / 3).backward()
        training.agree(sum(site.rows(3 * step + part) for part in range(3)))


@loop(late=LATE)
def more_and_more_backward_passes(site: Site) -> None:
    training = Training(site)
    for step in training.steps(5):
        passes = (1, 2, 1, 3, 2)[step]
        for part in range(passes):
            training.loss(3 * step + part).backward()
        training.agree(sum(site.rows(3 * step + part) for part in range(passes)))


@loop(late=LATE)
def static_input_buffer(site: Site) -> None:
    """One buffer for all batches, refilled before each of three backward passes, after steps with one."""
    training = Training(site)
    inputs, targets = site.batch(0)
    for step in training.steps(5):
        passes = 1 if step < 2 else 3
        for part in range(passes):
            for buffer, new in zip((inputs, targets), site.batch(3 * step + part, len(inputs)), strict=True):
                buffer.copy_(new)
            loss(training.model, (inputs, targets)).backward()
        training.agree(passes * len(inputs))


@loop()
def skipped_on_all_sites(site: Site) -> None:
    training = Training(site)
    for step in range(6):
        value = training.loss(step)
        if step % 3 != 1:
            training.optimizer.zero_grad()
            value.backward()
            training.agree(site.rows(step))
            training.optimizer.step()


@loop()
def skipped_on_one_site(site: Site) -> None:
    training = Training(site)
    for step in training.steps(6):
        value = training.loss(step)
        if step % 3 == 1 and site.rank == step // 3:
            site.idle(training.reduction)
        else:
            value.backward()
            training.agree(site.rows(step))


@loop()
def no_backward_at_one_site(site: Site) -> None:
    """The same, by `synchronize` alone; in the first step, too."""
    training = Training(site)
    for step in training.steps(5):
        takes_part = step % 2 or site.rank
        if takes_part:
            training.loss(step).backward()
        training.agree(site.rows(step) if takes_part else 0)


@loop()
def batch_of_no_rows(site: Site) -> None:
    training = Training(site)
    for step in training.steps(5):
        rows = 0 if step in (1, 3) and site.rank == step // 2 else site.rows(step)
        inputs, targets = site.batch(step, rows)
        outputs = training.model(inputs)
        nn.functional.cross_entropy(outputs, targets, reduction="sum").div(max(rows, 1)).backward()
        training.agree(rows)


@loop()
def loss_times_zero(site: Site) -> None:
    """A step that counts for nothing, at one site, at all, and as the first."""
    training = Training(site)
    for step in training.steps(6):
        factor = 0 if step in (0, 3) or (step == 2 and site.rank == 0) else 1
        (training.loss(step) * factor).backward()
        training.agree(site.rows(step))


@loop()
def single_rows(site: Site) -> None:
    """One row at each site, and one at one site alone: gradients of rank 2 and 1, before those of full rank."""
    training = Training(site)
    for step in training.steps(6):
        rows = site.rows(step) if step > 2 else int(step != 1 or site.rank == 0)
        if rows:
            training.loss(step, rows).backward()
        training.agree(rows)


@loop(late=KEPT)
def gradients_kept_over_steps(site: Site) -> None:
    """Cleared every second step alone: what has been agreed on stays, and new gradients add to it."""
    training = Training(site, lr=0.05)
    for step in range(5):
        if step % 2 == 0:
            training.optimizer.zero_grad()
        training.trains(step)
        training.optimizer.step()


@loop(late=KEPT)
def gradients_kept_at_one_site(site: Site) -> None:
    """As with DDP, which averages what stands in ``.grad``."""
    training = Training(site, lr=0.05)
    for step in range(4):
        if step != 2 or site.rank == 0:
            training.optimizer.zero_grad()
        training.trains(step)
        training.optimizer.step()


@loop(late=KEPT)
def idle_without_clearing(site: Site) -> None:
    """An idle site has gradients of the step before, which count for nothing."""
    training = Training(site)
    for step in range(5):
        if step in (2, 3) and site.rank == 1:
            site.idle(training.reduction)
        else:
            training.optimizer.zero_grad()
            training.trains(step)
        training.optimizer.step()


@loop(late=KEPT)
def gradient_from_before(site: Site) -> None:
    """A `.grad`, another at each site, that is there before the reduction is built, and counts."""
    model = site.model()
    loss(model, site.batch(20)).backward()
    training = Training(site, model)
    for step in range(STEPS):
        training.trains(step)
        training.optimizer.step()
        training.optimizer.zero_grad()


@loop()
def evaluation_between_backward_passes(site: Site) -> None:
    training = Training(site)
    for step in training.steps():
        for part in range(2):
            training.loss(2 * step + part).backward()
            training.model.eval()
            with torch.no_grad():
                training.loss(40 + step, 12)
            training.loss(41 + step, 2)  # with a graph through which no backward pass runs
            training.model.train()
        training.agree(site.rows(2 * step) + site.rows(2 * step + 1))


@loop()
def retained_graph(site: Site) -> None:
    """Two backward passes of one graph."""
    training = Training(site)
    for step in training.steps():
        outputs = training.model(site.inputs(step))
        outputs.square().mean().backward(retain_graph=True)
        outputs.sin().mean().backward()
        training.agree(site.rows(step))
