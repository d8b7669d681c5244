"""Local steps: wires, checkpoints, changes of the model, and errors, on real sites."""

from __future__ import annotations

import io

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from local_reference import adam, batch, build, loss_of, train, vector
from torch import nn

from dadplug import LocalSGD, MismatchError, NonFiniteError, SiteError

LOSSY = [
    {"wire": "bf16"},
    {"wire": "int8"},
    {"rank": 2},
    {"rank": 2, "wire": "int8", "outer_lr": 0.7, "outer_momentum": 0.9},
    {"rank": 3, "wire": "bf16", "weighting": "uniform"},
]


def agrees_to_the_bit(dtypes: list[str]) -> None:
    site = dist.get_rank()
    for dtype in (getattr(torch, name) for name in dtypes):
        exact = {}
        for options in [{}, *LOSSY]:
            model = build(site, dtype)
            local = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.05), every=3, overlap=False, **options)
            start = vector(model).double()
            for first in range(0, 9, 3):
                train(local, range(first, first + 3), site, 8 - 3 * site)
                assert local.first_difference() is None, (dtype, options)
            sent = local.traffic.total_bytes_sent
            train(local, range(9, 11), site)
            assert local.first_difference() is not None
            local.finish()
            assert local.first_difference() is None
            assert {p.dtype for p in model.parameters()} == {dtype}
            moved = vector(model).double() - start
            if not options:
                exact = {"moved": moved, "bytes": sent}
            elif "outer_lr" not in options:
                assert off_by(moved, exact["moved"]) < 0.3, (dtype, options)
            if options and dtype == torch.float32:
                assert sent < 0.75 * exact["bytes"], options
            local.detach()


def test_replicas_are_equal_to_the_bit_after_each_agreement_on_every_wire(sites):
    sites(2).run(agrees_to_the_bit, ["float32", "float64", "bfloat16"])


def test_steps_that_are_not_to_be_fused_are_ordinary_after_the_warm_up():
    model = build()
    local = LocalSGD(model, adam(model.parameters()), every=2, warm_up=2, warm_up_mode="dad", fused=True)
    local.stop_fusing("a callback reads the gradients")
    for step in range(4):
        train(local, [step], 0)
        assert local.remarks == ("fused steps: no, a callback reads the gradients",)
        assert {type(each.grad) for each in model.parameters()} == {torch.Tensor}
    local.detach()


def run_some(local: LocalSGD, scheduler, steps, site: int) -> None:
    for step in steps:
        train(local, [step], site, 8 - 3 * site)
        scheduler.step()


def resumes(options: dict, stop: int) -> None:
    site = dist.get_rank()

    def make():
        model = build(site, torch.float32)
        model.insert(1, nn.BatchNorm1d(20))
        optimizer = adam([{"params": model[:2].parameters(), "lr": 0.02}, {"params": model[2:].parameters()}])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return model, optimizer, scheduler, LocalSGD(model, optimizer, every=4, **options)

    model, _, scheduler, straight = make()
    run_some(straight, scheduler, range(14), site)
    straight.finish()
    straight.detach()
    first = make()
    run_some(first[3], first[2], range(stop), site)
    buffer = io.BytesIO()
    torch.save([each.state_dict() for each in first], buffer)
    buffer.seek(0)
    first[3].finish()
    first[3].detach()
    again = make()
    for each, state in zip(again, torch.load(buffer, weights_only=True)):
        each.load_state_dict(state)
    run_some(again[3], again[2], range(stop, 14), site)
    again[3].finish()
    assert again[3].steps == straight.steps == 14
    for name, value in model.state_dict().items():
        assert torch.equal(value, again[0].state_dict()[name]), (options, stop, name)
    assert again[3].first_difference() is None
    again[3].detach()


@pytest.mark.parametrize("stop", [2, 6, 8])
def test_a_run_resumes_on_the_same_curve_to_the_bit(sites, stop):
    sites(2).run(resumes, {"rank": 2, "wire": "int8", "outer_lr": 0.7, "outer_momentum": 0.9}, stop)
    sites(2).run(resumes, {"overlap": False, "warm_up": 5, "warm_up_mode": "rankdad", "wire": "bf16"}, stop)


def discards() -> None:
    site = dist.get_rank()
    for overlap in (False, True):
        model = build()
        local = LocalSGD(model, adam(model.parameters()), every=3, overlap=overlap)
        train(local, range(5), site)
        agreed = {name: value.clone() for name, value in local._agreement.agreed.values.items()}
        if site == 1:
            with torch.no_grad():
                model[2].bias[4] = float("inf")
        with pytest.raises(NonFiniteError, match=r"parameter '2.bias' holds NaN or Inf at site 1 \("):
            train(local, range(5, 6), site)
        assert local.first_difference() is None
        if not overlap:  # otherwise the deltas of the round before have arrived since
            assert all(torch.equal(p, agreed[name]) for name, p in model.named_parameters())
        train(local, range(6, 10), site)
        local.finish()
        assert local.first_difference() is None
        assert all(p.isfinite().all() for p in model.parameters())
        local.detach()


def test_a_round_with_nan_is_discarded_on_all_sites(sites):
    sites(2).run(discards)


def changes_its_parameters() -> None:
    """Freeze, unfreeze, add and share parameters; what is frozen costs nothing, what is trained is agreed on."""
    site = dist.get_rank()
    model = build()
    model[4].requires_grad_(False)
    model.register_parameter("tied", model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local = LocalSGD(model, optimizer, every=2)
    frozen = model[4].weight.clone()
    train(local, range(4), site)
    assert torch.equal(model[4].weight, frozen)
    model[4].requires_grad_(True)
    model[0].requires_grad_(False)
    train(local, range(4, 9), site)
    local.finish()
    assert local.first_difference() is None
    assert not torch.equal(model[4].weight, frozen)
    assert "0.weight" not in local._agreement.agreed.values
    torch.manual_seed(5)
    model.append(nn.Linear(3, 3).double())
    optimizer.add_param_group({"params": model[5].parameters()})
    train(local, range(9, 12), site)
    local.finish()
    assert local.first_difference() is None
    torch.manual_seed(site)
    model.append(nn.Linear(3, 3).double())
    optimizer.add_param_group({"params": model[6].parameters()})
    with pytest.raises(MismatchError, match=r"'6.weight' has been added .* same values"):
        train(local, range(12, 14), site)
    if site:
        model[0].requires_grad_(True)
    with pytest.raises(MismatchError, match=r"0\.weight"):
        train(local, range(14, 16), site)
    local.detach()


def test_parameters_may_be_frozen_added_and_shared(sites):
    sites(2).run(changes_its_parameters)


def optimizes() -> None:
    site = dist.get_rank()
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    local = LocalSGD(model, optimizer, every=2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, *batch(0, site))
        loss.backward()
        return loss

    losses = [float(local.step(closure)) for _ in range(4)]
    assert losses[-1] < losses[0]
    with pytest.raises(RuntimeError, match=r"call local.step\(\) instead"):
        optimizer.step(closure)
    local.finish()
    assert local.first_difference() is None
    local.detach()
    optimizer.step(closure)

    local = LocalSGD(model, adam(model.parameters()), warm_up=1)
    with pytest.raises(ValueError, match="leave warm_up out"):
        local.step(closure)
    local.detach()


def test_any_optimizer_takes_the_steps(sites):
    sites(2).run(optimizes)


WRONG = [
    ({"every": 0}, "every must be a whole number of at least 1 or a function, got 0"),
    ({"every": 2.5}, "every must be"),
    ({"every": True}, "every must be"),
    ({"outer_lr": -1.0}, "outer_lr must be a positive number"),
    ({"outer_lr": float("nan")}, "outer_lr must be"),
    ({"outer_momentum": 1.0}, "outer_momentum must be a number from 0 up to"),
    ({"wire": "fp8"}, "unknown wire 'fp8'; valid ones are 'fp32', 'bf16', 'int8'"),
    ({"rank": 0}, "rank must be a whole number of at least 1 or None"),
    ({"warm_up": -1}, "warm_up must be"),
    ({"warm_up_mode": "localsgd"}, "unknown warm_up_mode"),
    ({"weighting": "rows"}, "unknown weighting"),
    ({"overlap": 1}, "overlap must be True or False"),
    ({"timeout": float("inf")}, "timeout must be a positive number of seconds, got inf"),
    ({"outer_momentu": 0.9}, "did you mean 'outer_momentum'"),
]


def refuses(cases: list) -> None:
    site = dist.get_rank()
    start = vector(build(site))
    for options, message in cases:
        for wrong_site in (1, None):  # at one site, then at both
            model = build(site)
            own = options if wrong_site in (site, None) else {}
            with pytest.raises(ValueError, match=message) as caught:
                LocalSGD(model, adam(model.parameters()), **own)
            assert ("site 1 (" in str(caught.value)) == (wrong_site == 1 and site == 0)
            assert torch.equal(vector(model), start)
    with pytest.raises(MismatchError, match=r"option every is 64 at site 0 .* and 32 at site 1"):
        LocalSGD(model, adam(model.parameters()), every=64 if site == 0 else 32)
    with pytest.raises(MismatchError, match=r"tensor 0\.weight"):
        LocalSGD(wide := nn.Sequential(nn.Linear(3, 3 + site)), adam(wide.parameters()))
    with pytest.raises(ValueError, match="not the model's"):
        LocalSGD(model, adam([*model.parameters(), nn.Parameter(torch.zeros(2))]))
    assert torch.equal(vector(model), start)
    local = LocalSGD(model, adam(model.parameters()), every=lambda step: 2 + site * (step > 1))
    with pytest.raises(MismatchError, match=r"the sites agree at different steps, site 0 .* at 4 and site 1 .* at 5"):
        train(local, range(5), site)
    local.detach()


def test_wrong_arguments_are_errors_on_all_sites_before_anything_has_changed(sites):
    sites(2).run(refuses, WRONG)


def loses_a_site() -> None:
    site = dist.get_rank()
    model = build()
    local = LocalSGD(model, adam(model.parameters()), every=3, timeout=30)
    train(local, range(4), site)
    if site == 1:
        local.abort("ValueError: no more memory")
        return
    with pytest.raises(SiteError, match=r"site 1 \(.*no more memory"):
        train(local, range(4, 30), site)


def test_a_site_that_exits_is_named_with_its_reason():
    with support.Sites(2) as group:
        group.run(loses_a_site)


def test_one_process_trains_as_its_optimizer_does():
    model, plain = build(), build()
    local = LocalSGD(model, adam(model.parameters()), every=3)
    train(local, range(7), 0)
    optimizer = adam(plain.parameters())
    for step in range(7):
        optimizer.zero_grad()
        loss_of(plain, *batch(step, 0)).backward()
        optimizer.step()
    local.finish()
    assert off_by(vector(model), vector(plain)) < 1e-12
    with pytest.raises(ValueError, match="every must be"):
        LocalSGD(model, adam(model.parameters()), every=-3)
