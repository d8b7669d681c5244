"""Local steps between sites: wires, statistics, checkpoints, changes of the model, errors."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from local_reference import (
    ROWS,
    adam,
    batch,
    build,
    ends_equal,
    local_steps,
    loss_of,
    resumes,
    train,
    vector,
)
from torch import nn

from dadplug import LocalSGD, MismatchError, NonFiniteError, SiteError
from dadplug.local_steps.agreed_model import AgreedModel
from dadplug.local_steps.agreement import Agreement, DeltaFormat, SparseFormat


def normalised_model(site: int) -> nn.Sequential:
    torch.manual_seed(site)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3)).double()


@support.at_sites(2)
def test_running_statistics_are_averaged_at_each_agreement() -> None:
    site = dist.get_rank()
    torch.manual_seed(0)
    model = normalised_model(site)
    model.register_buffer("mask", torch.ones(5))  # which nothing changes
    local = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.01), every=3, overlap=False, weighting="samples")
    train(local, range(2), site, ROWS[site])
    norm = model[1]
    model.eval()
    before = local.gather_objects({name: buffer.clone() for name, buffer in norm.named_buffers()})
    model.train()
    with torch.no_grad():
        inputs = model[0](batch(2, site, ROWS[site])[0])
        mean, var = inputs.mean(0), inputs.var(0)
    expected = local.gather_objects(
        (0.9 * before[site]["running_mean"] + 0.1 * mean, 0.9 * before[site]["running_var"] + 0.1 * var)
    )
    train(local, range(2, 3), site, ROWS[site])
    shares = [8 / 13, 5 / 13]
    for place, name in enumerate(("running_mean", "running_var")):
        agreed = sum(share * own[place] for share, own in zip(shares, expected))
        assert off_by(getattr(norm, name), agreed) < 1e-12, name
    assert int(norm.num_batches_tracked) == 3
    assert local._agreement._buffers.names == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    local.detach()


@support.at_sites(2)
def test_the_agreed_model_is_shown_in_a_block_and_training_goes_on_as_without_it() -> None:
    site, shown = dist.get_rank(), {}
    for shows in (False, True):
        torch.manual_seed(0)
        model = normalised_model(0)
        local = LocalSGD(model, adam(model.parameters()), every=3, warm_up=1, weighting="samples")
        train(local, range(5), site)
        own = model.state_dict()
        own = {name: each.clone() for name, each in own.items()}
        if shows:
            with local.agreed():
                assert local.first_difference() is None
                assert not torch.equal(model[0].weight, own["0.weight"])
                inside = {name: each.clone() for name, each in model.state_dict().items()}
                others = local.gather_objects(inside)[1 - site]
                assert all(torch.equal(each, others[name]) for name, each in inside.items())
                with pytest.raises(RuntimeError, match=r"a step within local\.agreed"):
                    local.step()
            assert all(torch.equal(each, own[name]) for name, each in model.state_dict().items())
            model[0].weight.grad = None
        train(local, range(5, 8), site)
        shown[shows] = vector(model)
        local.detach()
    assert torch.equal(shown[False], shown[True])


@support.at_sites(2)
def test_statistics_of_all_rows_in_every_step() -> None:
    """With an agreement after each step of SGD, local steps are those of one process with all rows."""
    site = dist.get_rank()
    reference, model = normalised_model(0), normalised_model(site)
    local = LocalSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        every=1,
        overlap=False,
        sync_batchnorm=True,
        weighting="samples",
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        both = [batch(step, s, ROWS[s]) for s in range(2)]
        optimizer.zero_grad()
        nn.functional.mse_loss(
            reference(torch.cat([both[0][0], both[1][0]])), torch.cat([both[0][1], both[1][1]])
        ).backward()
        optimizer.step()
        train(local, range(step, step + 1), site, ROWS[site])
        assert off_by(vector(model), vector(reference)) < 1e-12
        assert off_by(model[1].running_var, reference[1].running_var) < 1e-12
    train(local, range(4, 6 + 4 * site), site, ROWS[site])  # site 0 runs out
    ends_equal(local)


# Wires, checkpoints, changes of the model, and errors


def test_steps_that_are_not_to_be_fused_are_ordinary_after_the_warm_up():
    local = local_steps(0, every=2, warm_up=2, warm_up_mode="dad", fused=True)
    local.stop_fusing("a callback reads the gradients")
    for step in range(4):
        train(local, [step], 0)
        assert local.remarks == ("fused steps: no, a callback reads the gradients",)
        assert {type(each.grad) for each in local.model.parameters()} == {torch.Tensor}
    local.detach()


@pytest.mark.parametrize("stop", [2, 6, 8])
def test_a_run_resumes_on_the_same_curve_to_the_bit(sites, stop):
    sites(2).run(resumes, {"rank": 2, "wire": "int8", "outer_lr": 0.7, "outer_momentum": 0.9}, stop)
    sites(2).run(resumes, {"overlap": False, "warm_up": 5, "warm_up_mode": "rankdad", "wire": "bf16"}, stop)
    sites(2).run(resumes, {"density": 0.1, "wire": "int2", "delay": 3 if stop == 6 else 1, "fused": True}, stop)


@support.at_sites(2)
def test_a_round_with_nan_is_discarded_on_all_sites() -> None:
    site = dist.get_rank()
    for overlap in (False, True):
        local = local_steps(0, every=3, overlap=overlap)
        train(local, range(5), site)
        agreed = {name: value.clone() for name, value in local._agreement.agreed.values.items()}
        if site == 1:
            with torch.no_grad():
                local.model[2].bias[4] = float("inf")
        with pytest.raises(NonFiniteError, match=r"parameter '2.bias' holds NaN or Inf at site 1 \("):
            train(local, range(5, 6), site)
        assert local.first_difference() is None
        if not overlap:  # otherwise the deltas of the round before have arrived since
            assert all(torch.equal(p, agreed[name]) for name, p in local.model.named_parameters())
        train(local, range(6, 10), site)
        ends_equal(local)
        assert all(p.isfinite().all() for p in local.model.parameters())


@support.at_sites(2)
def test_what_is_not_as_its_site_states_is_not_applied() -> None:
    """Site 1 states that its parameters are finite, and sends NaN, or factors whose products overflow."""
    site, encode = dist.get_rank(), DeltaFormat.encode
    for options, value in (({}, float("nan")), ({"overlap": True}, float("inf")), ({"rank": 2}, 1e300)):
        local = local_steps(0, every=3, **options)
        train(local, range(3 + 3 * bool(options.get("overlap"))), site)
        agreed = vector(local.model)

        def lie(form: DeltaFormat, deltas: dict, payloads: dict, value: float = value) -> None:
            encode(form, deltas, payloads)
            for each in payloads.values():
                each.fill_(value)

        try:
            DeltaFormat.encode = lie if site else encode
            with pytest.raises(NonFiniteError, match=r"^site 1 \(.*\) states that its parameters are finite"):
                train(local, range(6, 12), site)
        finally:
            DeltaFormat.encode = encode
        assert agreed.isfinite().all()
        assert all(each.isfinite().all() for each in local._agreement.agreed.values.values())
        local.detach()


@support.at_sites(2)
def test_a_delta_out_of_all_proportion_explains_nan_in_later_steps() -> None:
    site, sparse = dist.get_rank(), {"density": 0.5, "wire": "int2", "delay": 1}
    for options in ({}, {"overlap": True, "fragments": 2}, {"overlap": True} | sparse):
        kind = SparseFormat if "density" in options else DeltaFormat
        encode, local = kind.encode, local_steps(0, every=3, **options)
        train(local, range(6), site)

        def lie(form: Any, deltas: dict, payloads: dict, encode: Any = encode) -> None:
            encode(form, {name: torch.full_like(each, 1e200) for name, each in deltas.items()}, payloads)

        try:
            kind.encode = lie if site else encode
            named = r"^in step \d+ the norm of the delta of site 1 \(.*\) was .*, which explains this: at step \d+"
            with pytest.raises(NonFiniteError, match=named):
                train(local, range(6, 24), site)
        finally:
            kind.encode = encode
        local.detach()


@pytest.mark.parametrize("kind", ["wide", "momenta"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float16, torch.float64], ids=str)
def test_agreed_values_of_another_type_are_refused(kind, dtype):
    model, agreed = nn.Linear(3, 2).half(), AgreedModel(0.9)
    agreed.follow(model)
    agreed.move(
        {name: torch.ones_like(each) for name, each in agreed.values.items()}, dict.fromkeys(agreed.values, 1.0)
    )
    state = agreed.donate(model)
    AgreedModel(0.9).adopt(state, model)
    with pytest.raises(ValueError, match="is of another shape or type"):
        AgreedModel(0.9).adopt(state | {kind: {name: each.to(dtype) for name, each in state[kind].items()}}, model)


@pytest.mark.parametrize("fragments", [1, 2])
@support.at_sites(2)
def test_parameters_may_be_frozen_added_and_shared(fragments: int) -> None:
    """Freeze, unfreeze, add and share parameters; what is frozen costs nothing, what is trained is agreed on."""
    site = dist.get_rank()
    model = build()
    model[4].requires_grad_(False)
    model.register_parameter("tied", model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local = LocalSGD(model, optimizer, every=2, fragments=fragments, weighting="samples")
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


@support.at_sites(2)
def test_what_is_frozen_within_a_round_is_agreed_on() -> None:
    for options in ({}, {"overlap": True}, {"overlap": True, "fragments": 2}):
        local = local_steps(0, every=2, **options)
        train(local, range(3), dist.get_rank())
        local.model[0].requires_grad_(False)
        train(local, range(3, 12), dist.get_rank())
        ends_equal(local)


@support.at_sites(2)
def test_any_optimizer_takes_the_steps() -> None:
    site = dist.get_rank()
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    local = LocalSGD(model, optimizer, every=2, weighting="samples")

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, *batch(0, site))
        loss.backward()
        return loss

    losses = [float(local.step(closure)) for _ in range(4)]
    assert losses[-1] < losses[0]
    with pytest.raises(RuntimeError, match=r"call local.step\(\) instead"):
        optimizer.step(closure)
    ends_equal(local)
    optimizer.step(closure)

    local = LocalSGD(model, adam(model.parameters()), warm_up=1, weighting="samples")
    with pytest.raises(ValueError, match="leave warm_up out"):
        local.step(closure)
    local.detach()


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
    ({"every": 4, "fragments": 0}, "fragments must be a whole number of at least 1"),
    ({"every": 4, "fragments": 2, "overlap": False}, "fragments=2 are sent while steps go on"),
    ({"every": 2, "fragments": 3}, "a round of 2 steps cannot be divided into fragments=3"),
    ({"every": 8, "fragments": 7}, "fragments=7 of a model with 6 trained parameters"),
    ({"every": lambda step: 0}, r"every\(0\) must be a whole number of at least 1, got 0"),
    ({"every": lambda step: 2.0}, r"every\(0\) must be a whole number"),
    ({"every": lambda step: None}, r"every\(0\) must be a whole number"),
    ({"density": 0.0, "wire": "int2"}, "density must be a number above 0 and up to 1"),
    ({"density": 1.5, "wire": "int2"}, "density must be a number above 0 and up to 1"),
    ({"density": lambda number: 2, "wire": "int2"}, r"density\(0\) must be a number above 0"),
    ({"wire": "int2"}, "add density=0.02"),
    ({"density": 0.02}, "add wire='int2'"),
    ({"density": 0.02, "wire": "int2", "rank": 4}, "leave one of them out"),
    ({"density": 0.02, "wire": "int2", "outer_momentum": 0.9}, "leave outer_momentum out"),
    ({"memory_decay": 0.9}, "add density"),
    ({"delay": 3, "overlap": False}, "leave overlap=False out"),
    ({"density": 0.02, "wire": "int2", "memory_decay": 1.1}, "memory_decay must be a number from 0 to 1"),
]


@support.at_sites(2)
def test_wrong_arguments_are_errors_on_all_sites_before_anything_has_changed() -> None:
    site = dist.get_rank()
    start = vector(build(site))
    for options, message in WRONG:
        for wrong_site in (1, None):  # at one site, then at both
            model = build(site)
            own = options if wrong_site in (site, None) else {}
            with pytest.raises(ValueError, match=message) as caught:
                LocalSGD(model, adam(model.parameters()), **{"weighting": "samples"} | own)
            assert ("site 1 (" in str(caught.value)) == (wrong_site == 1 and site == 0)
            assert torch.equal(vector(model), start)
    with pytest.raises(MismatchError, match=r"option every is 64 at site 0 .* and 32 at site 1"):
        LocalSGD(model, adam(model.parameters()), every=64 if site == 0 else 32, weighting="samples")
    with pytest.raises(MismatchError, match=r"tensor 0\.weight"):
        LocalSGD(wide := nn.Sequential(nn.Linear(3, 3 + site)), adam(wide.parameters()), weighting="samples")
    with pytest.raises(ValueError, match="not the model's"):
        LocalSGD(model, adam([*model.parameters(), nn.Parameter(torch.zeros(2))]), weighting="samples")
    assert torch.equal(vector(model), start)
    local = LocalSGD(model, adam(model.parameters()), every=lambda step: 2 + site * (step > 1), weighting="samples")
    with pytest.raises(MismatchError, match=r"the sites agree at different steps, site 0 .* at 4 and site 1 .* at 5"):
        train(local, range(5), site)
    local.detach()


@support.at_sites(2, own=True)
def test_a_site_that_exits_is_named_with_its_reason() -> None:
    site = dist.get_rank()
    local = local_steps(0, every=3, timeout=30)
    train(local, range(4), site)
    if site == 1:
        local.abort("ValueError: no more memory")
        return
    with pytest.raises(SiteError, match=r"site 1 \(.*no more memory"):
        train(local, range(4, 30), site)


def test_one_process_trains_as_its_optimizer_does():
    model, plain = build(), build()
    local = LocalSGD(model, adam(model.parameters()), every=3, weighting="samples")
    train(local, range(7), 0)
    optimizer = adam(plain.parameters())
    for step in range(7):
        optimizer.zero_grad()
        loss_of(plain, *batch(step, 0)).backward()
        optimizer.step()
    local.finish()
    assert off_by(vector(model), vector(plain)) < 1e-12
    local.detach()
    with pytest.raises(ValueError, match="every must be"):
        LocalSGD(model, adam(model.parameters()), every=-3, weighting="samples")


# GradScalers, hubs, schedules that fail, sites that are killed


def trains_scaled(local: LocalSGD, site: int, infinite: tuple[int, int]) -> float:
    """Take seven steps under a GradScaler, one of which has an infinite gradient at a site; return the last scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(7):
        local.optimizer.zero_grad()
        loss = loss_of(local.model, *batch(step, site, 8 - 3 * site, torch.float32))
        scaler.scale(loss * float("inf") if (step, site) == infinite else loss).backward()
        local.step(scaler=scaler)
        scaler.update()
    local.finish()
    return scaler.get_scale()


@support.at_sites(2)
def test_a_grad_scaler_leaves_out_the_steps_of_its_site() -> None:
    """Scales are powers of two, so that a scaled run has the bits of one without a scaler that leaves the step out."""
    site = dist.get_rank()
    for overlap in (True, False):
        model, plain = build(0, torch.float32), build(0, torch.float32)
        expected = LocalSGD(
            plain, torch.optim.SGD(plain.parameters(), lr=0.1), every=3, overlap=overlap, weighting="samples"
        )
        for step in range(7):
            if (step, site) == (4, 1):
                loss_of(plain, *batch(step, site, 5, torch.float32)).backward()
                with expected.stepping():
                    pass
            else:
                train(expected, [step], site, 8 - 3 * site)
        expected.finish()
        local = LocalSGD(
            model, torch.optim.SGD(model.parameters(), lr=0.1), every=3, overlap=overlap, weighting="samples"
        )
        assert trains_scaled(local, site, infinite=(4, 1)) == (512.0 if site else 1024.0)
        assert torch.equal(vector(model), vector(plain))
        assert local.first_difference() is None
        for each in (local, expected):
            each.detach()
    model = build(0, torch.float32)
    options = {"warm_up": 3, "check_finite": False}
    local = LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=3, **{"weighting": "samples"} | options)
    assert trains_scaled(local, site, infinite=(1, 1)) == 512.0  # a synchronous step is left out at all sites
    assert vector(model).isfinite().all()
    assert local.first_difference() is None
    local.detach()


@support.at_sites(2)
def test_what_a_schedule_returns_later_is_checked() -> None:
    site = dist.get_rank()
    local = local_steps(0, every=lambda step: 4 if step < 8 else -1, overlap=False)
    with pytest.raises(ValueError, match=r"every\(8\) must be a whole number of at least 1, got -1"):
        train(local, range(12), site)
    assert (local.steps, local.first_difference()) == (8, None)  # the agreement itself has taken place
    local.detach()


def resume(folder: str, fragments: int) -> LocalSGD:
    """Build local steps, and load the last checkpoint of this site if there is one."""
    model = build(0, torch.float32)
    optimizer = adam(model.parameters())
    local = LocalSGD(
        model, optimizer, every=3, rank=2, wire="int8", fragments=fragments, timeout=60, weighting="samples"
    )
    path = Path(folder) / f"{dist.get_rank()}.pt"
    if path.exists():
        for each, state in zip((model, optimizer, local), torch.load(path, weights_only=True)):
            each.load_state_dict(state)
    return local


def is_killed(folder: str, place: str, fragments: int) -> None:
    """Save a checkpoint after four steps; then site 1 kills itself, between agreements or in one."""
    site = dist.get_rank()
    local = resume(folder, fragments)
    train(local, range(4), site)
    torch.save([each.state_dict() for each in (local.model, local.optimizer, local)], Path(folder) / f"{site}.pt")
    hits = {"before the headers": (Agreement, "_launch_header"), "before the deltas": (Agreement, "_launch")}
    if site and place == "between":
        os.kill(os.getpid(), signal.SIGKILL)
    if site:
        setattr(*hits[place], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(SiteError, match=r"site 1 \("):
        train(local, range(4, 30), site)


def goes_on(folder: str, fragments: int) -> None:
    site = dist.get_rank()
    local, straight = resume(folder, fragments), resume("nowhere", fragments)
    assert (local.steps, local.agreements) == (4, 1 if fragments == 1 else 3)
    train(local, range(4, 9), site)
    train(straight, range(9), site)
    for each in (local, straight):
        each.finish()
    assert torch.equal(vector(local.model), vector(straight.model))
    for each in (local, straight):
        each.detach()


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("place", ["between", "before the headers", "before the deltas"])
def test_a_killed_site_is_named_and_the_last_checkpoint_loads(sites, tmp_path, place, fragments):
    with support.Sites(2) as group:
        group.start(is_killed, str(tmp_path), place, fragments)
        survivor, victim = group.outcomes()
    assert survivor.kind == "ok", survivor.value
    assert victim.kind == "ended"
    sites(2).run(goes_on, str(tmp_path), fragments)


@pytest.mark.parametrize("options", [{"rank": 1, "wire": "bf16"}, {"density": 0.5, "wire": "int2"}], ids=str)
def test_the_memory_of_a_parameter_that_was_removed_is_dropped_and_that_of_a_frozen_one_is_kept(options):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    local = LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), every=1, overlap=False, **options)
    for number in range(6):
        model(torch.randn(5, 4)).square().mean().backward()
        local.step()
        if number == 1:
            model[0].requires_grad_(False)
            del model[2]
    (form,) = [each.form.state_dict() for each in local._agreement._fragments]
    assert {"0.weight"} < form["errors"].keys() <= {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert form["carries"].keys() == ({"0.weight", "1.weight"} if "rank" in options else set())
    local.detach()


# Payloads of deltas: what is decoded is what was sent, and error feedback loses nothing over rounds


FORMATS = [("fp32", None), ("bf16", None), ("int8", None), ("fp32", 2), ("bf16", 2), ("int8", 2)]


def some_deltas(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (30, 20), "filter": (8, 4, 3, 3), "bias": (700,), "scale": (), "none": (0, 4), "thin": (9, 1)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def payloads(form: DeltaFormat, like: dict[str, torch.Tensor]) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: torch.zeros(size, dtype=dtype) for dtype, size in form.layout(like).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("wire", "rank"), FORMATS)
def test_what_is_not_sent_is_in_the_error_memory(wire, rank, dtype):
    form = DeltaFormat(wire, rank, error_feedback=True)
    total = {name: torch.zeros_like(delta) for name, delta in some_deltas(0, dtype).items()}
    arrived = {name: torch.zeros_like(delta) for name, delta in total.items()}
    for seed in range(4):
        payloads(form, {"scale": total["scale"]} if seed == 2 else total)  # where the others are frozen for a while
        room = payloads(form, total)
        deltas = some_deltas(seed, dtype)
        for name, delta in deltas.items():
            total[name] += delta
        form.encode(deltas, room)
        sent = form.decode({dtype: [payload, payload] for dtype, payload in room.items()}, [0.25, 0.75])
        for name in total:
            arrived[name] += sent[name]
    errors = form.state_dict()["errors"]
    for name in total:
        left = total[name] - arrived[name]
        assert torch.allclose(errors.get(name, torch.zeros_like(left)), left, atol=1e-5), name
    compressed = {"weight", "filter"} if rank else set()
    rounded = set() if wire == "fp32" and dtype == torch.float32 else {"weight", "filter", "bias", "scale", "thin"}
    assert set(errors) == compressed | (rounded if wire != "fp32" else set())


def test_factors_are_smaller_and_small_tensors_are_sent_whole():
    like = some_deltas(0)
    whole, factors = (sum(DeltaFormat("fp32", rank, True).layout(like).values()) for rank in (None, 2))
    assert whole == sum(delta.numel() for delta in like.values())
    assert factors == whole - 600 - 288 + 2 * (30 + 20) + 2 * (8 + 36)
