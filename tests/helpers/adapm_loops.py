"""Training loops on managed embeddings, which run on a site or in one process, and a comparison of both."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import traceback

import pytest
import torch
from managed_loop import STEPS, Loop
from torch import nn
from torch.utils.checkpoint import checkpoint

from dadplug.adapm import ParameterManager


def each_step(program):
    """Make a program of all steps from that of one step, a function of the loop and the number of the step."""

    @functools.wraps(program)
    def whole(loop):
        for step in range(STEPS):
            program(loop, step)

    return whole


@each_step
def plain(loop, step):
    loop.update(step)


@each_step
def discards_to_none(loop, step):
    loop.loss(step + 50).backward()
    loop.update(step)


@each_step
def discards_to_zero(loop, step):
    (loop.loss(step + 50) * 10).backward()
    loop.zero_grad(set_to_none=False)
    loop.train(step)


@each_step
def discards_by_the_model(loop, step):
    (loop.loss(step + 50) * 10).backward()
    loop.model.zero_grad()
    loop.train(step)
    for parameter in loop.model.parameters():
        parameter.grad = None


@each_step
def discards_at_one_site(loop, step):
    loop.zero_grad()
    if loop.rank == 1:
        (loop.loss(step + 50) * 10).backward()
        loop.zero_grad()
    loop.train(step)


@each_step
def clears_after_forward(loop, step):
    loss = loop.loss(step)
    loop.zero_grad()
    loop.descend(loss)


def skips_batches(loop):
    for step in range(STEPS + 3):
        loop.zero_grad()
        loss = loop.loss(step)
        if step % 3 == 1:
            loss.backward()
        else:
            loop.descend(loss)


@each_step
def accumulates_without_sync(loop, step):
    loop.zero_grad()
    with loop.no_sync():
        (loop.loss(2 * step) / 2).backward()
    loop.descend(loop.loss(2 * step + 1) / 2)


@each_step
def accumulates_over_synchronizations(loop, step):
    loop.zero_grad()
    for micro in (2 * step, 2 * step + 1):
        (loop.loss(micro) / 2).backward()
        loop.synchronize()
    loop.step()


def never_clears(loop):
    for step in range(4):
        loop.descend(loop.loss(step) / 4)


@each_step
def steps_twice(loop, step):
    loop.update(step)
    loop.step()


@each_step
def fails_in_forward(loop, step):
    if step % 2 and loop.rank != 0:
        handle = loop.net.head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.loss(step + 50)
        handle.remove()
    loop.update(step)


@each_step
def fails_in_backward(loop, step):
    if step % 2:
        rows = loop.net.words(loop.batch(step + 50)[0])
        rows.register_hook(lambda _: 1 / 0)
        features = loop.net.features(loop.batch(step + 50)[0])
        with pytest.raises(ZeroDivisionError):  # once gradients of the other table have arrived
            (loop.net.mix(features).square().sum() + rows.square().sum() * 10).backward()
    loop.update(step)


def fails_in_the_loader(loop):
    def load():
        yield from range(2)
        raise OSError("the disk is gone")

    with contextlib.suppress(OSError):
        for step in load():
            loop.zero_grad()
            loss = loop.loss(step)
            if step < 1:
                loop.descend(loss)
            else:
                loss.backward()
    plain(loop)


def scales_with_an_overflow(loop):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        loop.zero_grad()
        ids, targets = loop.batch(step)
        rows = loop.net.words(ids)
        if step == 2 and loop.rank != 0:  # at one site, in rows only
            rows.register_hook(lambda gradient: gradient * torch.inf)
        loss = (loop.model(ids) - targets).square().mean() + rows.square().mean()
        scaler.scale(loss).backward()
        loop.synchronize()
        if step % 2:
            scaler.unscale_(loop.optimizer)
        before = loop.net.head.weight.detach().clone()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.refresh()
        assert torch.equal(before, loop.net.head.weight) == (step == 2)
    assert scaler.get_scale() == 64.0 * 2 / 2 * 2


@each_step
def evaluates_between(loop, step):
    loop.zero_grad()
    with loop.no_sync():
        loop.loss(step).backward()
    loop.model.eval()
    with torch.no_grad():
        loop.loss(step + 50)
    loop.loss(step + 51)  # with a graph that nobody uses
    loop.model.train()
    loop.train(step + 20)


@each_step
def asks_for_gradients(loop, step):
    loop.zero_grad()
    (gradient,) = torch.autograd.grad(loop.loss(step + 50), loop.net.words.weight)
    assert gradient.to_dense().any()
    loop.train(step)


@each_step
def runs_two_optimizers(loop, step):
    loop.zero_grad()
    loop.loss(step).backward()
    loop.synchronize()
    loop.optimizer.step()
    if step % 2:
        loop.second.step()
    loop.refresh()


@each_step
def freezes_and_frees(loop, step):
    frozen = {1: [loop.net.words.weight], 2: [*loop.net.head.parameters()], 4: []}
    if step in frozen:
        for parameter in loop.net.parameters():
            parameter.requires_grad_(not any(parameter is other for other in frozen[step]))
    loop.update(step)


def trains_the_tables_only(loop):
    loop.net.mix.requires_grad_(False)
    loop.net.head.requires_grad_(False)
    discards_to_none(loop)


@each_step
def passes_closures(loop, step):
    def closure():
        loop.zero_grad()
        loss = loop.loss(step)
        loss.backward()
        loop.synchronize()
        return loss

    loop.step(closure)


@each_step
def goes_through_a_graph_twice(loop, step):
    loop.zero_grad()
    loss = loop.loss(step)
    with loop.no_sync():
        loss.backward(retain_graph=True)
    loop.descend(loss)


@each_step
def changes_gradients(loop, step):
    def halve():
        for parameter in loop.model.parameters():
            parameter.grad.mul_(0.5)

    loop.update(step, halve)


@each_step
def clips(loop, step):
    def clip():
        if loop.managed is None:
            norm = nn.utils.clip_grad_norm_(loop.net.parameters(), 0.05)
        else:
            norm = loop.managed.clip_grad_norm_(0.05)
        assert norm > 0.05

    loop.update(step, clip)


@each_step
def penalizes_gradients(loop, step):
    loop.zero_grad()
    ids, targets = loop.batch(step)
    features = loop.net.features(ids)
    scores = loop.net.scores(features)
    (slopes,) = torch.autograd.grad(scores.sum(), features, create_graph=True)
    loop.descend((scores - targets).square().mean() + slopes.square().sum(1).mean())


@each_step
def recomputes(loop, step):
    loop.zero_grad()
    ids, targets = loop.batch(step)
    features = checkpoint(loop.net.features, ids, use_reentrant=False)
    loop.descend((loop.net.scores(features) - targets).square().mean())


@each_step
def rests_at_one_site(loop, step):
    loop.zero_grad()
    if loop.rank == 1 and step in (1, 2):
        loop.managed.reduction.idle()
        loop.step()
    else:
        loop.descend(loop.loss(step, only=0 if step in (1, 2) else None))


PROGRAMS = {
    name: each for name, each in [*globals().items()] if inspect.isfunction(each) and each.__module__ == __name__
}
del PROGRAMS["each_step"]


def run(program, kind, mode, manager):
    """Run a program on this site and in one process; returns the largest difference, and how far it has trained."""
    several = program is runs_two_optimizers
    options = {"timeout": 20.0, "check_finite": program is not scales_with_an_overflow}
    expected = Loop(kind, several=several)
    start = copy.deepcopy(expected.net.state_dict())
    program(expected)
    loop = Loop(kind, manager.rank, mode, manager, options, several)
    program(loop)
    state = loop.managed.state_dict()
    manager.barrier()
    loop.managed.close()
    wanted = expected.net.state_dict()
    off = {name: float((state[name].double() - wanted[name].double()).abs().max()) for name in wanted}
    moved = {name: float((start[name] - wanted[name]).abs().max()) for name in wanted}
    return off, moved


def run_all(kind, mode):
    results = {}
    for name, program in PROGRAMS.items():
        with ParameterManager(timeout=200) as manager:
            try:
                results[name] = run(program, kind, mode, manager)
            except Exception:
                results[name] = traceback.format_exc()
    return results
