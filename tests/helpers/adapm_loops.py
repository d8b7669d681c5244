"""Training loops on managed embeddings, which run on a site or in one process, and a comparison of both."""

from __future__ import annotations

import contextlib
import copy
import inspect
import traceback

import pytest
import torch
from managed_loop import STEPS, Loop
from torch import nn
from torch.utils.checkpoint import checkpoint

from dadplug.adapm import ParameterManager


def plain(loop):
    for step in range(STEPS):
        loop.update(step)


def discards_to_none(loop):
    for step in range(STEPS):
        loop.loss(step + 50).backward()
        loop.update(step)


def discards_to_zero(loop):
    for step in range(STEPS):
        (loop.loss(step + 50) * 10).backward()
        loop.zero_grad(set_to_none=False)
        loop.train(step)


def discards_by_the_model(loop):
    for step in range(STEPS):
        (loop.loss(step + 50) * 10).backward()
        loop.model.zero_grad()
        loop.train(step)
        for parameter in loop.model.parameters():
            parameter.grad = None


def discards_at_one_site(loop):
    for step in range(STEPS):
        loop.zero_grad()
        if loop.rank == 1:
            (loop.loss(step + 50) * 10).backward()
            loop.zero_grad()
        loop.train(step)


def clears_after_forward(loop):
    for step in range(STEPS):
        loss = loop.loss(step)
        loop.zero_grad()
        loss.backward()
        loop.synchronize()
        loop.step()


def skips_batches(loop):
    for step in range(STEPS + 3):
        loop.zero_grad()
        loop.loss(step).backward()
        if step % 3 == 1:
            continue
        loop.synchronize()
        loop.step()


def accumulates_without_sync(loop):
    for step in range(0, 2 * STEPS, 2):
        loop.zero_grad()
        with loop.no_sync():
            (loop.loss(step) / 2).backward()
        (loop.loss(step + 1) / 2).backward()
        loop.synchronize()
        loop.step()


def accumulates_over_synchronizations(loop):
    for step in range(0, 2 * STEPS, 2):
        loop.zero_grad()
        for micro in (step, step + 1):
            (loop.loss(micro) / 2).backward()
            loop.synchronize()
        loop.step()


def never_clears(loop):
    for step in range(4):
        (loop.loss(step) / 4).backward()
        loop.synchronize()
        loop.step()


def steps_twice(loop):
    for step in range(STEPS):
        loop.update(step)
        loop.step()


def fails_in_forward(loop):
    for step in range(STEPS):
        if step % 2 and loop.rank != 0:
            handle = loop.net.head.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loop.loss(step + 50)
            handle.remove()
        loop.update(step)


def fails_in_backward(loop):
    for step in range(STEPS):
        if step % 2:
            rows = loop.net.words(loop.batch(step + 50)[0])
            rows.register_hook(lambda _: 1 / 0)
            features = loop.net.features(loop.batch(step + 50)[0])
            with pytest.raises(ZeroDivisionError):  # once gradients of the other table have arrived
                (loop.net.mix(features).square().sum() + rows.square().sum() * 10).backward()
        loop.update(step)


def fails_in_the_loader(loop):
    def load():
        for step in range(STEPS):
            if step == 2:
                raise OSError("the disk is gone")
            yield step

    with contextlib.suppress(OSError):
        for step in load():
            loop.zero_grad()
            loop.loss(step).backward()
            if step < 1:
                loop.synchronize()
                loop.step()
    for step in range(STEPS):
        loop.update(step)


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


def evaluates_between(loop):
    for step in range(STEPS):
        loop.zero_grad()
        with loop.no_sync():
            loop.loss(step).backward()
        loop.model.eval()
        with torch.no_grad():
            loop.loss(step + 50)
        loop.loss(step + 51)  # with a graph that nobody uses
        loop.model.train()
        loop.loss(step + 20).backward()
        loop.synchronize()
        loop.step()


def asks_for_gradients(loop):
    for step in range(STEPS):
        loop.zero_grad()
        (gradient,) = torch.autograd.grad(loop.loss(step + 50), loop.net.words.weight)
        assert gradient.to_dense().any()
        loop.train(step)


def runs_two_optimizers(loop):
    for step in range(STEPS):
        loop.zero_grad()
        loop.loss(step).backward()
        loop.synchronize()
        loop.optimizer.step()
        if step % 2:
            loop.second.step()
        loop.refresh()


def freezes_and_frees(loop):
    frozen = {1: [loop.net.words.weight], 2: [*loop.net.head.parameters()], 4: []}
    for step in range(STEPS):
        if step in frozen:
            for parameter in loop.net.parameters():
                parameter.requires_grad_(not any(parameter is other for other in frozen[step]))
        loop.update(step)


def trains_the_tables_only(loop):
    loop.net.mix.requires_grad_(False)
    loop.net.head.requires_grad_(False)
    discards_to_none(loop)


def passes_closures(loop):
    for step in range(STEPS):

        def closure(step=step):
            loop.zero_grad()
            loss = loop.loss(step)
            loss.backward()
            loop.synchronize()
            return loss

        loop.step(closure)


def goes_through_a_graph_twice(loop):
    for step in range(STEPS):
        loop.zero_grad()
        loss = loop.loss(step)
        with loop.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()
        loop.synchronize()
        loop.step()


def changes_gradients(loop):
    for step in range(STEPS):
        loop.zero_grad()
        loop.loss(step).backward()
        loop.synchronize()
        for parameter in loop.model.parameters():
            parameter.grad.mul_(0.5)
        loop.step()


def clips(loop):
    for step in range(STEPS):
        loop.zero_grad()
        loop.loss(step).backward()
        loop.synchronize()
        if loop.managed is None:
            norm = nn.utils.clip_grad_norm_(loop.net.parameters(), 0.05)
        else:
            norm = loop.managed.clip_grad_norm_(0.05)
        assert norm > 0.05
        loop.step()


def penalizes_gradients(loop):
    for step in range(STEPS):
        loop.zero_grad()
        ids, targets = loop.batch(step)
        features = loop.net.features(ids)
        scores = loop.net.head(loop.net.mix(features).tanh()).squeeze(1)
        (slopes,) = torch.autograd.grad(scores.sum(), features, create_graph=True)
        ((scores - targets).square().mean() + slopes.square().sum(1).mean()).backward()
        loop.synchronize()
        loop.step()


def recomputes(loop):
    for step in range(STEPS):
        loop.zero_grad()
        ids, targets = loop.batch(step)
        features = checkpoint(loop.net.features, ids, use_reentrant=False)
        (loop.net.head(loop.net.mix(features).tanh()).squeeze(1) - targets).square().mean().backward()
        loop.synchronize()
        loop.step()


def rests_at_one_site(loop):
    for step in range(STEPS):
        loop.zero_grad()
        if loop.rank == 1 and step in (1, 2):
            loop.managed.reduction.idle()
        else:
            loop.loss(step, only=0 if step in (1, 2) else None).backward()
            loop.synchronize()
        loop.step()


LOOPS = [each for each in [*globals().values()] if inspect.isfunction(each) and each.__module__ == __name__]


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


def run_all(kind, mode, names):
    results = {}
    programs = {program.__name__: program for program in LOOPS}
    for name in names:
        with ParameterManager(timeout=200) as manager:
            try:
                results[name] = run(programs[name], kind, mode, manager)
            except Exception:
                results[name] = traceback.format_exc()
    return results
