"""What has to be the same at all sites, and is compared: models, settings, weights; and what must not be: data."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager

import pytest
import support
import torch
import torch.distributed as dist
from torch import nn

import dadplug
from dadplug.errors import MismatchError
from dadplug.lowrank import dispatch, portable
from dadplug.step.model_sync import sameness


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def train(reduction, optimizer, steps, seed=None):
    model = reduction.model
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if seed is None else seed))
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        reduction.synchronize()
        optimizer.step()


def settings_are_compared(name, values, text, options, later=False):
    model, value = network(), values[dist.get_rank()]
    reduction = dadplug.GradientReduction(model, mode="dsgd", **options)
    kind = value if name == "class" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    if later:
        train(reduction, optimizer, 3)
    if name != "class":
        optimizer.param_groups[0][name] = value
    if text is None:
        train(reduction, optimizer, 3)
    else:
        with pytest.raises(MismatchError, match=text):
            train(reduction, optimizer, 2)
        assert reduction._step == 2 + 3 * later  # in the first step that follows one of the optimizer
    reduction.detach()


CASES = [
    ("lr", (0.1, 0.2), r"lr of group 0 of optimizer 0 is 0\.1 at site 0.* and 0\.2 at site 1", {}),
    ("momentum", (0.0, 0.9), r"momentum of group 0.*0\.9 at site 1", {}),
    (
        "class",
        (torch.optim.SGD, torch.optim.Adam),
        "class of optimizer 0 is SGD .* and Adam at site 1",
        {},
    ),
    ("lr", (0.1, 0.2), None, {"may_differ": ("lr",), "compare_every": 0}),
    ("momentum", (0.0, 0.9), None, {"may_differ": ("optimizer",), "compare_every": 0}),
    ("lr", (0.1, 0.1), None, {}),
    ("lr", (0.1, 0.5), r"lr of group 0.*0\.1 at site 0.*0\.5 at site 1", {}, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{bool(case[2])}-{case[4:]}")
def test_settings_of_optimizers_are_compared(sites, case):
    sites(2).run(settings_are_compared, *case)


@pytest.mark.parametrize(
    ("edit", "every", "raises"), [(1e-3, 4, True), ("swap", 4, True), (1e-8, 4, False), (1e-3, 0, False)], ids=str
)
@support.at_sites(2)
def test_edited_weights_are_found_and_rounding_is_not(edit, every, raises) -> None:
    model = network()
    reduction = dadplug.GradientReduction(model, mode="rankdad", compare_every=every)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(reduction, optimizer, 3)
    if dist.get_rank():
        with torch.no_grad():
            if edit == "swap":
                model[2].bias[:2] = model[2].bias[:2].flip(0)
            else:
                model[2].bias[1] += edit
    if raises:
        with pytest.raises(MismatchError, match=r"'2\.bias' is the first .* site 0.* and site 1"):
            train(reduction, optimizer, 5)
        assert reduction._step == 5  # the fourth step was compared
        reduction.broadcast_model()
        train(reduction, optimizer, 5)
        assert reduction.first_difference() is None
    else:
        train(reduction, optimizer, 5)
    reduction.detach()


@support.at_sites(2)
def test_a_site_that_is_late_in_the_compared_step_is_compared_in_the_next_one() -> None:
    """The header of a late site does not count, as one with 0."""
    model, rank = network(), dist.get_rank()
    reduction = dadplug.GradientReduction(model, mode="rankdad", compare_every=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weights = reduction._comparisons.weights
    stated = weights.last_digest
    weights.last_digest = lambda step: stated(step) * (rank == 0 or step != 4)
    train(reduction, optimizer, 3)
    with torch.no_grad():
        model[2].bias[1] += 1e-3 * rank
    train(reduction, optimizer, 2)
    with pytest.raises(MismatchError, match=r"differ before step 5: '2\.bias' is the first"):
        train(reduction, optimizer, 1)
    reduction.detach()


def test_digests_see_every_bit():
    model = network().double()
    before = sameness.Weights(model, 1).digest()
    with torch.no_grad():
        model[0].weight[2, 3] = torch.nextafter(model[0].weight[2, 3], torch.tensor(9.0, dtype=torch.float64))
    assert sameness.Weights(model, 1).digest() != before
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert sameness.Weights(network().to(dtype), 1).digest() > 0


@contextmanager
def messages_of(name):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(f"dadplug.{name}")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def same_data(seed, every):
    """Train by a reduction, or by local steps; return what is told."""
    with messages_of("step.model_sync.sameness") as messages:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        way = dadplug.LocalSGD(model, optimizer, every=every) if every else dadplug.GradientReduction(model, mode="dad")
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if seed is None else seed))
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            (way.step if every else way.synchronize)()
        way.detach()
    return messages


@pytest.mark.parametrize("every", [0, 1, 3])
def test_the_same_data_at_two_sites_is_warned_of(sites, every):
    for messages in sites(2).run(same_data, 7, every):
        assert len(messages) == 1
        assert "have the same first batch" in messages[0]
    assert sites(2).run(same_data, None, every) == [[], []]


def another_version(make, name):
    real = sameness.environment
    assert set(real()) == {"version of torch", "version of dadplug", "version of numba", "kernels"}
    sameness.environment = lambda: real() | {name: f"9.{dist.get_rank()}"}
    try:
        make(may_differ=(name.removeprefix("version of "),)).detach()
        with pytest.raises(MismatchError, match=rf"{name} is 9\.0 at site 0.* and 9\.1 at site 1"):
            make()
    finally:
        sameness.environment = real


@support.at_sites(2)
def test_versions_and_kernels_are_compared() -> None:
    def reduction(**options):
        return dadplug.GradientReduction(network(), **options)

    def local(**options):
        model = network()
        return dadplug.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), **options)

    for name in sameness.environment():
        another_version(reduction, name)
    another_version(local, "version of dadplug")


def test_the_version_is_that_of_the_code_and_not_of_an_older_installation(monkeypatch):
    monkeypatch.setattr(sameness, "version_of", lambda package: "0.0.1")
    assert sameness.environment()["version of dadplug"] == dadplug.__version__


def test_kernels_are_named_by_what_computes(monkeypatch):
    assert sameness.environment()["kernels"] == "numba"
    monkeypatch.setattr(dispatch, "cpu_kernels", lambda: portable)
    assert sameness.environment()["kernels"] == "torch"


@support.at_sites(2)
def test_settings_of_optimizers_are_compared_before_local_steps() -> None:
    model, rank = network(), dist.get_rank()
    kind, rate, second = (torch.optim.SGD, torch.optim.Adam)[rank], (0.1, 0.2)[rank], (0.99, 0.9)[rank]
    for optimizer, text in [
        (torch.optim.SGD(model.parameters(), rate), r"lr of group 0 .* is 0\.1 at site 0.* and 0\.2 at"),
        (kind(model.parameters(), 0.1), "class of .* SGD at site 0.* and Adam at"),
        (torch.optim.Adam(model.parameters(), betas=(0.9, second)), r"betas of group 0 .*0\.99.* and .*0\.9"),
    ]:
        with pytest.raises(MismatchError, match=text):
            dadplug.LocalSGD(model, optimizer)
    dadplug.LocalSGD(model, torch.optim.SGD(model.parameters(), (0.1, 0.2)[rank]), may_differ=("lr",)).detach()


@support.at_sites(3)
def test_weights_are_compared_by_default() -> None:
    model = network()
    reduction = dadplug.GradientReduction(model, mode="dsgd")  # by default
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    train(reduction, optimizer, 1)
    if dist.get_rank() == 2:
        with torch.no_grad():
            model[0].weight[0, 0] += 1e-2
    with pytest.raises(MismatchError, match=r"'0\.weight' is the first .* site 0.* and site 2"):
        train(reduction, optimizer, 150)
    assert reduction._step == 101
    reduction.detach()


def clipped(mode, before, accumulates):
    model = network()
    reduction = dadplug.GradientReduction(model, mode=mode)
    with messages_of("step.model_sync.step_guard") as messages:
        for _ in range(3):
            model.zero_grad()
            if accumulates:
                with reduction.no_sync():
                    model(torch.randn(4, 6)).square().mean().backward()
            model(torch.randn(4, 6)).square().mean().backward()
            if before:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            reduction.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            if messages:
                break  # what has been sent cannot be changed in the steps that follow
    reduction.detach()
    return messages


@pytest.mark.parametrize("mode", ["dsgd", "rankdad", "powersgd"])
def test_gradients_clipped_too_early_are_warned_of(sites, mode):
    for messages in sites(2).run(clipped, mode, True, False):
        assert len(messages) == 1
        assert "was changed between backward() and synchronize(), as by clipping" in messages[0]
    assert sites(2).run(clipped, mode, False, False) == [[], []]
    assert sites(2).run(clipped, mode, False, True) == [[], []]


def steps_of_its_own(further, line_search):
    with messages_of("step.model_sync.step_guard") as messages:
        reduction = dadplug.GradientReduction(network(), mode="dsgd", compare_every=0)
        outside = nn.Parameter(torch.ones(7))
        (outside * 2).sum().backward()
        parameters = [*reduction.model.parameters(), *([outside] if further else [])]
        if line_search:  # one step: sites that decide by their own loss have different numbers of evaluations after it
            optimizer = torch.optim.LBFGS(parameters, max_iter=1, max_eval=1, line_search_fn="strong_wolfe")
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
            reduction.model(batch).square().mean().backward()
            reduction.synchronize()
            optimizer.step(lambda: torch.zeros(()))
        else:
            optimizer = torch.optim.SGD(parameters, 0.1)
            optimizer.zero_grad = reduction.model.zero_grad  # the outer gradient stays
            train(reduction, optimizer, 3)
        reduction.detach()
    return messages


@pytest.mark.parametrize(
    ("further", "line_search", "text"),
    [(True, False, r"SGD steps a parameter of shape \[7\] that is outside of the model"), (False, True, "line search")],
)
def test_steps_that_differ_between_sites_are_warned_of(sites, further, line_search, text):
    for messages in sites(2).run(steps_of_its_own, further, line_search):
        assert len(messages) == 1
        assert re.search(text, messages[0])
    assert sites(2).run(steps_of_its_own, False, False) == [[], []]


def test_models_are_flattened_in_parts(monkeypatch):
    monkeypatch.setattr(sameness, "_GROUP_BYTES", 100)
    tensors = [torch.full((n,), float(n), dtype=dtype) for n, dtype in [(9, torch.float32), (20, torch.float64)] * 2]
    tensors += [torch.full((30,), 30.0), torch.tensor(1.0), torch.tensor(2.0), torch.empty(0)]
    found = []
    for flat, group in sameness.flattened(tensors):
        assert flat.numel() * flat.element_size() <= 100 or len(group) == 1
        assert torch.equal(flat, torch.cat([each.reshape(-1) for each in group]))
        found += [each.data_ptr() for each in group]
    assert sorted(found) == sorted(each.data_ptr() for each in tensors)
