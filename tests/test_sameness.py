"""What has to be the same at all sites, and is compared: models, settings, weights; and what must not be: data."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dadplug
from dadplug.errors import MismatchError
from dadplug.model_sync import sameness
from dadplug.model_sync.structure import refuse_wrapped


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


def settings_are_compared(name, values, text, options):
    model, value = network(), values[dist.get_rank()]
    reduction = dadplug.GradientReduction(model, mode="dsgd", **options)
    kinds = {"class": value} if name == "class" else {}
    kind = kinds.get("class", torch.optim.SGD)
    optimizer = kind(model.parameters(), **{"lr": 0.1} | ({} if kinds else {name: value}))
    if text is None:
        train(reduction, optimizer, 3)
    else:
        with pytest.raises(MismatchError, match=text):
            train(reduction, optimizer, 2)
        assert reduction._step == 2  # in the first step that follows one of the optimizer
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
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{bool(case[2])}")
def test_settings_of_optimizers_are_compared(sites, case):
    sites(2).run(settings_are_compared, *case)


def learning_rates_that_differ_later():
    model = network()
    reduction, optimizer = dadplug.GradientReduction(model, mode="rankdad"), torch.optim.Adam(model.parameters())
    train(reduction, optimizer, 3)
    if dist.get_rank():
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(MismatchError, match=r"lr of group 0.*0\.001 at site 0.*0\.5 at site 1"):
        train(reduction, optimizer, 3)
    assert reduction._step == 5
    reduction.detach()


def test_learning_rates_that_differ_later_are_found(sites):
    sites(2).run(learning_rates_that_differ_later)


def edited_weights(edit, every, raises):
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


@pytest.mark.parametrize(
    ("edit", "every", "raises"), [(1e-3, 4, True), ("swap", 4, True), (1e-8, 4, False), (1e-3, 0, False)], ids=str
)
def test_edited_weights_are_found_and_rounding_is_not(sites, edit, every, raises):
    sites(2).run(edited_weights, edit, every, raises)


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


def same_data(seed):
    with messages_of("model_sync.sameness") as messages:
        reduction = dadplug.GradientReduction(network(), mode="dad")
        train(reduction, torch.optim.SGD(reduction.model.parameters(), 0.1), 2, seed)
        reduction.detach()
    return messages


def test_the_same_data_at_two_sites_is_warned_of(sites):
    assert all("have the same first batch" in messages[0] for messages in sites(2).run(same_data, 7))
    assert sites(2).run(same_data, None) == [[], []]


def another_order():
    model = network()
    if dist.get_rank():
        model = nn.Sequential(model[0], model[1], model[2])
        model[0].weight, model[0].bias = nn.Parameter(model[0].weight), nn.Parameter(model[0].bias)
        bias = model[0]._parameters.pop("bias")
        weight = model[0]._parameters.pop("weight")
        model[0].register_parameter("bias", bias)
        model[0].register_parameter("weight", weight)
    with pytest.raises(MismatchError, match=r"where site 0.* has tensor 0\.weight, site 1.* has tensor 0\.bias"):
        dadplug.GradientReduction(model)


def test_parameters_in_another_order_are_refused(sites):
    sites(2).run(another_order)


def another_version(may_differ):
    real = sameness.environment
    sameness.environment = lambda: real() | {"version of torch": f"9.{dist.get_rank()}"}
    try:
        if may_differ:
            dadplug.GradientReduction(network(), may_differ=("torch",)).detach()
        else:
            with pytest.raises(MismatchError, match=r"version of torch is 9\.0 at site 0.* and 9\.1 at site 1"):
                dadplug.GradientReduction(network())
    finally:
        sameness.environment = real


@pytest.mark.parametrize("may_differ", [False, True])
def test_versions_are_compared(sites, may_differ):
    sites(2).run(another_version, may_differ)


class DistributedDataParallel(nn.Module):
    """A class of the user's own with the name of a wrapper."""


def wrapped_models(kind):
    model = network()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "nested":
        model = nn.Sequential(nn.parallel.DistributedDataParallel(model))
    elif kind == "compiled":
        model = torch.compile(nn.parallel.DistributedDataParallel(model))
    elif kind == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        fsdp = pytest.importorskip("torch.distributed.fsdp")
        if not hasattr(fsdp, "fully_shard"):
            return
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        model = fsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"(is wrapped in torch's|is sharded by torch's) "):
        dadplug.GradientReduction(model)


@pytest.mark.parametrize("kind", ["ddp", "nested", "compiled", "fsdp", "fsdp2"])
def test_wrapped_models_are_refused(sites, kind):
    sites(2).run(wrapped_models, kind)


def test_a_class_with_the_name_of_a_wrapper_is_not_one():
    refuse_wrapped(DistributedDataParallel())


def clipped(mode, before, accumulates):
    model = network()
    reduction = dadplug.GradientReduction(model, mode=mode)
    with messages_of("reduction") as messages:
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
