"""Loops around one backward pass a step: cleared, repeated, skipped and accumulated gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .compare import loop
from .site import Site, loss, sgd

STEPS = 4
LATE = "what comes after a payload has left is compressed by itself, or sent as it is"
KEPT = "what is in `.grad` before the backward pass is not compressed with what it adds"


@loop(int8=True)
def plain(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()


def _discards(site: Site, clear: Callable[[nn.Module], object]) -> None:
    """A backward pass whose gradients are thrown away, and the one that counts."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (100 * loss(model, site.batch(step + 10, 5))).backward()
        clear(model)
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()


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
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss(model, site.batch(step + 10, 5)).backward()  # e.g. a look at gradients for a log
        optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()


@loop()
def discarded_now_and_then(site: Site) -> None:
    """Discarded at one site alone, and in some steps: payloads of other steps have left during backward."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        if (step in (2, 3) and site.rank == step % 2) or step == 4:
            (100 * loss(model, site.batch(step + 10, 5))).backward()
            optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()


@loop()
def discarded_and_no_other(site: Site) -> None:
    """A batch that one site throws away after backward, with no other instead: it takes no part in the step."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        if step in (1, 3) and site.rank == step // 2:
            optimizer.zero_grad()
            site.agree(reduction, 0)
        else:
            site.agree(reduction, site.rows(step))
        optimizer.step()


@loop(int8=True)
def accumulation_under_no_sync(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = [site.rows(3 * step + part) for part in range(3)]
        with reduction.no_sync():
            for part in range(2):
                loss(model, site.batch(3 * step + part)).backward()
        loss(model, site.batch(3 * step + 2)).backward()
        site.agree(reduction, sum(rows))
        optimizer.step()


@loop()
def accumulation_without_no_sync(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            (loss(model, site.batch(3 * step + part)) / 3).backward()
        site.agree(reduction, sum(site.rows(3 * step + part) for part in range(3)))
        optimizer.step()


@loop(late=LATE)
def more_and_more_backward_passes(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step, passes in enumerate((1, 2, 1, 3, 2)):
        optimizer.zero_grad()
        for part in range(passes):
            loss(model, site.batch(3 * step + part)).backward()
        site.agree(reduction, sum(site.rows(3 * step + part) for part in range(passes)))
        optimizer.step()


@loop(late=LATE)
def static_input_buffer(site: Site) -> None:
    """One buffer for all batches, refilled before each of three backward passes, after steps with one."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    inputs, targets = site.batch(0)
    for step in range(5):
        optimizer.zero_grad()
        passes = 1 if step < 2 else 3
        for part in range(passes):
            for buffer, new in zip((inputs, targets), site.batch(3 * step + part, len(inputs)), strict=True):
                buffer.copy_(new)
            loss(model, (inputs, targets)).backward()
        site.agree(reduction, passes * len(inputs))
        optimizer.step()


@loop()
def skipped_on_all_sites(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(6):
        value = loss(model, site.batch(step))
        if step % 3 == 1:
            continue
        optimizer.zero_grad()
        value.backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()


@loop()
def skipped_on_one_site(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        value = loss(model, site.batch(step))
        if step % 3 == 1 and site.rank == step // 3:
            site.idle(reduction)
        else:
            value.backward()
            site.agree(reduction, site.rows(step))
        optimizer.step()


@loop()
def no_backward_at_one_site(site: Site) -> None:
    """The same, by `synchronize` alone; in the first step, too."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        takes_part = step % 2 or site.rank
        if takes_part:
            loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step) if takes_part else 0)
        optimizer.step()


@loop()
def batch_of_no_rows(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        rows = 0 if step in (1, 3) and site.rank == step // 2 else site.rows(step)
        inputs, targets = site.batch(step, rows)
        nn.functional.cross_entropy(model(inputs), targets, reduction="sum").div(max(rows, 1)).backward()
        site.agree(reduction, rows)
        optimizer.step()


@loop()
def loss_times_zero(site: Site) -> None:
    """A step that counts for nothing, at one site, at all, and as the first."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        value = loss(model, site.batch(step))
        if step in (0, 3) or (step == 2 and site.rank == 0):
            value = value * 0
        value.backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()


@loop()
def single_rows(site: Site) -> None:
    """One row at each site, and one at one site alone: gradients of rank 2 and 1, before those of full rank."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        rows = site.rows(step) if step > 2 else int(step != 1 or site.rank == 0)
        if rows:
            loss(model, site.batch(step, rows)).backward()
        site.agree(reduction, rows)
        optimizer.step()


@loop(late=KEPT)
def gradients_kept_over_steps(site: Site) -> None:
    """Cleared every second step alone: what has been agreed on stays, and new gradients add to it."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model, lr=0.05)
    for step in range(5):
        if step % 2 == 0:
            optimizer.zero_grad()
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()


@loop(late=KEPT)
def gradient_from_before(site: Site) -> None:
    """A `.grad`, another at each site, that is there before the reduction is built, and counts."""
    model = site.model()
    loss(model, site.batch(20)).backward()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss(model, site.batch(step)).backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()
        optimizer.zero_grad()


@loop()
def evaluation_between_backward_passes(site: Site) -> None:
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            loss(model, site.batch(2 * step + part)).backward()
            model.eval()
            with torch.no_grad():
                loss(model, site.batch(40 + step, 12))
            loss(model, site.batch(41 + step, 2))  # with a graph, that nobody runs backward through
            model.train()
        site.agree(reduction, site.rows(2 * step) + site.rows(2 * step + 1))
        optimizer.step()


@loop()
def retained_graph(site: Site) -> None:
    """Two backward passes of one graph."""
    model = site.model()
    reduction = site.reduce(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = model(site.inputs(step))
        outputs.square().mean().backward(retain_graph=True)
        outputs.sin().mean().backward()
        site.agree(reduction, site.rows(step))
        optimizer.step()
