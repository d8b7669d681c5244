"""`dadplug.accelerate`: what scripts of Accelerate do, held against one process with the rows of all sites."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from support import forget_accelerators, refuses
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

accelerate = pytest.importorskip("accelerate", minversion="1.1")


from accelerate.local_sgd import LocalSGD  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)

import dadplug  # noqa: E402
from dadplug.accelerate import Accelerator, use  # noqa: E402


def build(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 3)).double()


def rows(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fresh(*args, **keywords) -> Accelerator:
    """Make an accelerator without what accelerate shares between those of a process."""
    forget_accelerators()
    return Accelerator(*args, cpu=True, **keywords)


def assert_equal(model: nn.Module, other: nn.Module, limit: float = 1e-10) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert off_by(p.detach(), q.detach()) <= limit, off_by(p.detach(), q.detach())


def clip(name: str, how: object, parameters) -> None:
    """Clip gradients by an accelerator, or by torch."""
    if name == "norm":
        (how.clip_grad_norm_ if how else nn.utils.clip_grad_norm_)(parameters, 0.1)
    elif name == "value":
        (how.clip_grad_value_ if how else nn.utils.clip_grad_value_)(parameters, 0.02)


def train(accelerator: Accelerator, clips: str, data: torch.Tensor, epochs: int = 2, join: bool = False):
    """A loop as in accelerate's documentation; return the model, and each micro-batch with whether a step followed."""
    model = build(seed=dist.get_rank() if dist.is_initialized() else 0)  # the sites start from site 0's
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(TensorDataset(data), 4, shuffle=True)
    optimizer, loader, model, scheduler = accelerator.prepare(optimizer, loader, model, scheduler)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    record = []
    for _ in range(epochs):
        with accelerator.join_uneven_inputs([model], even_batches=False) if join else nullcontext():
            for (inputs,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).square().mean())
                    if accelerator.sync_gradients:
                        clip(clips, accelerator, model.parameters())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                record.append((inputs, accelerator.sync_gradients))
    return model, record


def replay(micro_batches, accumulation: int, clips: str, model: nn.Module, plain=None, sites: int = 2) -> nn.Module:
    """Train a model on given micro-batches by a plain loop, alone or by a `GradientReduction`."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for inputs, steps in micro_batches:
        with plain.no_sync() if plain is not None and not steps else nullcontext():
            (model(inputs).square().mean() / accumulation).backward()
        if steps:
            if plain is not None:
                plain.synchronize()
            clip(clips, None, model.parameters())
            optimizer.step()
            for _ in range(sites):  # accelerate's scheduler makes a step for each process
                scheduler.step()
            optimizer.zero_grad()
    return model


CASES = {
    "clips": ({}, "norm", 1),
    "accumulates": ({"gradient_accumulation_steps": 2}, "value", 2),
    "each batch": (
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)},
        "norm",
        2,
    ),
}


@pytest.mark.parametrize(
    ("mode", "case"), [("dad", "clips"), ("dad", "each batch"), ("dsgd", "accumulates"), ("dad", "accumulates")]
)
@support.at_sites(2)
def test_a_script_trains_as_one_process(mode: str, case: str) -> None:
    keywords, clips, accumulation = CASES[case]
    accelerator, data = fresh(mode=mode, **copy.deepcopy(keywords)), rows(21)
    model, record = train(accelerator, clips, data)
    by_site = model.reduction.gather_objects([inputs for inputs, _ in record])
    assert len(record) == 6
    assert [steps for _, steps in record] == ([True] * 6 if accumulation == 1 else [False, True, True] * 2)
    seen = {tuple(row.tolist()) for site in by_site for inputs in site[:3] for row in inputs}
    assert seen == {tuple(row.tolist()) for row in data}  # each row in the first epoch
    whole = [(torch.cat([site[n] for site in by_site]), record[n][1]) for n in range(len(record))]
    assert_equal(model, replay(whole, accumulation, clips, build()))
    assert model.reduction.first_difference() is None
    assert model.reduction.traffic.total_bytes_sent > 0
    assert accelerator.unwrap_model(model) is model.module
    accelerator.free_memory()
    assert not accelerator._wrapped
    again = accelerator.prepare(model.module)  # free_memory has detached the model
    again.reduction.detach()


@pytest.mark.parametrize("accumulation", [1, 2])
@support.at_sites(2)
def test_a_low_rank_mode_trains_as_a_plain_loop(accumulation: int) -> None:
    options = {"mode": "rankdad", "rank": 2}
    accelerator = fresh(gradient_accumulation_steps=accumulation, **options)
    model, record = train(accelerator, "norm", rows(21))
    accelerator.free_memory()
    other = build(seed=dist.get_rank())
    reduction = dadplug.GradientReduction(other, **options)
    assert_equal(model, replay(record, accumulation, "norm", other, reduction), 0.0)
    reduction.detach()


@support.at_sites(2)
def test_sites_may_have_different_numbers_of_batches() -> None:
    """Sites with 4 and 3 batches, without rows that are repeated; the last batch of 2 rows counts by its rows."""
    accelerator = fresh(mode="dad", weighting="samples")
    model, record = train(accelerator, "", rows(26), epochs=1, join=True)
    by_site = model.reduction.gather_objects([inputs for inputs, _ in record])
    assert [len(site) for site in by_site] == [4, 3]
    assert len(by_site[0][-1]) == 2
    whole = [(torch.cat([site[n] for site in by_site if n < len(site)]), True) for n in range(4)]
    assert_equal(model, replay(whole, 1, "", build()))
    with pytest.raises(ValueError, match=r"prepare\(\) has returned, got Sequential"):
        accelerator.join_uneven_inputs([model.module]).__enter__()
    accelerator.free_memory()


@support.at_sites(2)
def test_sites_with_two_models_may_have_different_numbers_of_batches() -> None:
    """The others go on with both models, here in another order than that in which they have joined."""
    accelerator = fresh(mode="dad", timeout=60.0, weighting="samples")
    first, second, loader = accelerator.prepare(
        build(), nn.Linear(3, 2).double(), DataLoader(TensorDataset(rows(20)), 4)
    )
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
    with accelerator.join_uneven_inputs([first, second], even_batches=False):
        for (inputs,) in loader:
            hidden = first(inputs)
            second.zero_grad()
            accelerator.backward(second(hidden.detach()).square().mean())
            optimizers[1].step()
            first.zero_grad()
            accelerator.backward(hidden.square().mean())
            optimizers[0].step()
    assert [model.reduction.step for model in (first, second)] == [4, 4]  # 3 batches, and the end at both
    assert [model.reduction.first_difference() for model in (first, second)] == [None, None]
    accelerator.free_memory()


@support.at_sites(2)
def test_metrics_have_each_row_once() -> None:
    accelerator = fresh(mode="dsgd")
    loader = accelerator.prepare(DataLoader(TensorDataset(rows(21)), 4))
    found = torch.cat([accelerator.gather_for_metrics(inputs) for (inputs,) in loader])
    assert torch.equal(found, rows(21))
    rest = torch.cat([accelerator.gather(inputs) for (inputs,) in accelerator.skip_first_batches(loader, 1)])
    assert torch.equal(rest[:13], rows(21)[8:])
    accelerator.free_memory()


@pytest.mark.skipif("reducer" not in vars(dadplug.DistributedDataParallel), reason="needs the drop-in's reducer")
@support.at_sites(2)
def test_a_backward_pass_sends_what_was_held_back() -> None:
    """Gradients of a forward pass inside of no_sync, which the backward pass sends."""
    accelerator = fresh(mode="dad")
    model, alone, rank = accelerator.prepare(build()), build(), dist.get_rank()
    first, second = rows(8, seed=1), rows(8, seed=2)
    with accelerator.no_sync(model):
        losses = [model(part[rank::2]).square().mean() for part in (first, second)]
        accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    (alone(first).square().mean() + alone(second).square().mean()).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert off_by(p.grad, q.grad) < 1e-10
    accelerator.free_memory()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(16))


@pytest.mark.parametrize("split", [True, False])
@support.at_sites(2)
def test_a_scheduler_keeps_its_pace(split: bool) -> None:
    """Accelerate's for loaders that are divided, and one step a step for those of sites with data of their own."""
    accelerator = fresh(mode="dsgd", split_data=split, gradient_accumulation_steps=2, weighting="uniform")
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader, scheduler = DataLoader(TensorDataset(rows(16)), 4), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, loader, prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            prepared.step()
    assert scheduler.last_epoch == 2  # of one step for two sites, or of two steps
    accelerator.free_memory()


TOKENS = ((3, 1, 0, 2), (1, 4, 2, 5))  # of each micro-batch, by site


@pytest.mark.parametrize("mode", ["dsgd", "dad"])
@support.at_sites(2)
def test_losses_by_the_number_of_tokens_are_those_of_one_process(mode: str) -> None:
    """The recipe of accelerate's and transformers' documentation, in two steps of two micro-batches."""
    accelerator = fresh(mode=mode, split_data=False, gradient_accumulation_steps=2, weighting="uniform")
    rank, model, reference = dist.get_rank(), build(), build()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
    plain = torch.optim.Adam(reference.parameters(), 0.01)
    for step in range(2):
        batches = [[rows(n, seed=9 * step + site + 2 * n) for n in TOKENS[site][2 * step :][:2]] for site in range(2)]
        count = accelerator.gather(torch.tensor([sum(map(len, batches[rank]))])).sum().item()
        for inputs in batches[rank]:
            with accelerator.accumulate(model):
                loss = model(inputs).square().sum()
                accelerator.backward(loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / count)
                optimizer.step()
                optimizer.zero_grad()
        (sum(reference(each).square().sum() for site in batches for each in site) / count).backward()
        plain.step()
        plain.zero_grad()
    assert_equal(model, reference)
    accelerator.free_memory()


@support.at_sites(2)
def test_sites_load_their_own_data() -> None:
    """Loaders of sites with data of their own, and streams, which are not sent by site 0."""
    accelerator = fresh(mode="dad", split_data=False)
    own = rows(9 + 4 * dist.get_rank(), seed=dist.get_rank())
    loader, model = accelerator.prepare(DataLoader(TensorDataset(own), 4), build())
    assert torch.equal(torch.cat([inputs for (inputs,) in loader]), own)
    for (inputs,) in accelerator.prepare(DataLoader(TensorDataset(rows(9, seed=dist.get_rank())), 4)):
        assert len(accelerator.gather_for_metrics(inputs[:1].tolist(), use_gather_object=True)) == 2
    with accelerator.join_uneven_inputs([model]):  # also where even_batches is True: it is about data of all
        for (inputs,) in loader:
            accelerator.backward(model(inputs).square().mean())
            model.zero_grad()
    accelerator.free_memory()
    accelerator = fresh(mode="dad", dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.prepare(DataLoader(Stream(), 4))
    accelerator = fresh(mode="dad")
    with pytest.warns(UserWarning, match="dispatch_batches=False"):
        stream = accelerator.prepare(DataLoader(Stream(), 4))
    assert type(stream).__name__ == "DataLoaderShard"
    expected = rows(16).reshape(2, 2, 4, 6)[:, dist.get_rank()]
    assert torch.equal(torch.stack(list(stream)), expected)


LOCAL = {"mode": "localsgd", "every": 2, "wire": "int8"}
FEEDBACK = {"mode": "rankdad", "rank": 2, "error_feedback": True}


@pytest.mark.parametrize(
    "options", [{"mode": "rankdad"}, FEEDBACK, {"mode": "powersgd", "rank": 2}, {"mode": "topk"}, LOCAL]
)
@support.at_sites(2)
def test_a_training_resumes_to_the_bit(tmp_path: Path, options: dict) -> None:
    """A training that is interrupted after a checkpoint, and one that is not, end with the same bits."""

    def start(seed: int):
        accelerator = fresh(
            project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True), **options
        )
        model = build(seed, dropout=0.2)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        return accelerator, *accelerator.prepare(model, optimizer)

    def steps(accelerator, model, optimizer, numbers) -> None:
        for step in numbers:
            accelerator.backward(model(rows(5, seed=2 * step + dist.get_rank())).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(5 + dist.get_rank())
    whole = start(0)
    steps(*whole, range(3))
    whole[0].save_state()
    steps(*whole, range(3, 6))
    whole[0].free_memory()
    torch.manual_seed(50)
    resumed = start(7)
    resumed[0].load_state()
    assert resumed[1].steps == 3
    steps(*resumed, range(3, 6))
    assert_equal(resumed[1], whole[1], 0.0)
    checkpoint = tmp_path / "checkpoints" / "checkpoint_0"
    resumed[0].wait_for_everyone()
    (checkpoint / f"dadplug_{dist.get_rank()}.bin").rename(checkpoint / f"dadplug_{1 + dist.get_rank()}.bin.1")
    resumed[0].wait_for_everyone()
    if dist.get_rank() == 0:
        (checkpoint / "dadplug_1.bin.1").rename(checkpoint / "dadplug_0.bin")
    resumed[0].wait_for_everyone()
    resumed[0].load_state(str(checkpoint))  # the state of site 1 is missing
    assert resumed[1].steps == 3
    resumed[0].free_memory()


@pytest.mark.parametrize("accumulation", [1, 2])
@support.at_sites(2)
def test_local_steps_are_those_of_a_plain_loop(accumulation: int) -> None:
    """Steps, clipping, schedule and accumulation are those of a plain loop of `LocalSGD`, to the bit."""
    accelerator = fresh(gradient_accumulation_steps=accumulation, **LOCAL)
    model, record = train(accelerator, "norm", rows(21), join=True)
    assert isinstance(model.reduction, dadplug.LocalSGD)
    assert model.reduction.steps == sum(steps for _, steps in record)
    sent = model.reduction.traffic.total_bytes_sent
    accelerator.free_memory()
    other = build(seed=dist.get_rank())
    optimizer = torch.optim.Adam(other.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    local = dadplug.LocalSGD(other, optimizer, **{name: value for name, value in LOCAL.items() if name != "mode"})
    for epoch in (record[: len(record) // 2], record[len(record) // 2 :]):
        for inputs, steps in epoch:
            (other(inputs).square().mean() / accumulation).backward()
            if steps:
                clip("norm", None, other.parameters())
                local.step()
                for _ in range(2):
                    scheduler.step()
                optimizer.zero_grad()
        local.finish()
    assert_equal(model, other, 0.0)
    assert local.first_difference() is None
    assert sent == local.traffic.total_bytes_sent > 0
    local.detach()


def test_local_steps_need_one_optimizer_and_no_synchronous_steps(monkeypatch):
    model = build()
    refuses(
        (lambda: fresh(**LOCAL).prepare(build()), "prepare both in one call"),
        (
            lambda: fresh(warm_up=2, **LOCAL).prepare(model, torch.optim.SGD(model.parameters(), 0.1)),
            "Leave warm_up out",
        ),
        (lambda: fresh(bucket_mb=1.0, **LOCAL), "bucket_mb"),
    )


@pytest.mark.parametrize("mode", ["dad", "rankdad"])
@support.at_sites(2)
def test_a_step_that_overflows_at_one_site_is_skipped_at_all(mode: str) -> None:
    """A GradScaler, as accelerate has it on GPUs: an overflow at one site skips the step at both."""
    accelerator, rank, alone = fresh(mode=mode, rank=12, wire="fp32"), dist.get_rank(), build()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    accelerator._options["check_finite"] = False  # as where the scaler is there from the start
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    skipped = []
    for step in range(4):
        whole = rows(8, seed=step)
        accelerator.backward(model(whole[rank::2]).square().mean() * (1e300 if step == rank == 1 else 1.0))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        if not skipped[-1]:
            alone.zero_grad()
            alone(whole).square().mean().backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            torch.optim.SGD(alone.parameters(), 0.1).step()
    assert skipped == [False, True, False, False]
    assert_equal(model, alone, 1e-10 if mode == "dad" else 1e-6)
    assert model.reduction.first_difference() is None
    accelerator.free_memory()
    fresh()


@support.at_sites(2)
def test_a_model_may_be_compiled() -> None:
    accelerator = fresh(mode="dad", dynamo_backend="aot_eager")
    model, alone = accelerator.prepare(build()), build()
    assert isinstance(model, dadplug.DistributedDataParallel)
    for step in range(2):
        whole = rows(8, seed=step)
        accelerator.backward(model(whole[dist.get_rank() :: 2]).square().mean())
        alone(whole).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert off_by(p.grad, q.grad) < 1e-10
    if "keep_torch_compile" in inspect.signature(accelerate.Accelerator.unwrap_model).parameters:
        assert type(accelerator.unwrap_model(model, keep_torch_compile=False)) is nn.Sequential
    accelerator.free_memory()
    fresh()


@support.at_sites(2)
def test_an_accelerator_that_exists_uses_a_mode() -> None:
    rank, alone = dist.get_rank(), build()
    accelerator = accelerate.Accelerator(cpu=True)
    use(accelerator, "dad")
    evaluated = accelerator.prepare_model(build(), evaluation_mode=True)
    assert type(evaluated) is nn.Sequential
    model = accelerator.prepare(evaluated)  # trained after an evaluation
    assert isinstance(model, dadplug.DistributedDataParallel)
    assert type(accelerator) is Accelerator
    whole = rows(8)
    with accelerator.no_sync(model):
        accelerator.backward(model(whole[rank:4:2]).square().mean())
    accelerator.backward(model(whole[4 + rank :: 2]).square().mean())
    alone(whole[:4]).square().mean().backward()
    alone(whole[4:]).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert off_by(p.grad, q.grad) < 1e-10
    assert accelerator.prepare(model) is model
    with pytest.raises(ValueError, match="uses dadplug already"):
        use(accelerator)
    accelerator.free_memory()
    other = accelerate.Accelerator(cpu=True)
    wrapped = other.prepare(build())
    refuses(
        (lambda: use(other), r"use\(\) before prepare"),
        (lambda: Accelerator(cpu=True).prepare(wrapped), r"wrapped in DistributedDataParallel already.*\.module"),
    )


@support.at_sites(2)
def test_an_optimizer_may_not_step_what_would_differ() -> None:
    accelerator = fresh(mode="dad")
    bound, model = nn.Linear(3, 1).double(), build()
    optimizer = torch.optim.SGD([*model.parameters(), *bound.parameters()], 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(bound(model(rows(4))).mean())
    with pytest.raises(ValueError, match=r"no prepared model \(group 0, shape \[1, 3\]\).*prepare the module"):
        optimizer.step()
    bound.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    with LocalSGD(accelerator, model, 2):
        accelerator.backward(model(rows(4)).mean())
        with pytest.raises(RuntimeError, match="before gradients were synchronized"):
            optimizer.step()
    accelerator.free_memory()


def test_one_process_trains_alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    accelerator, data = fresh(mode="rankdad", rank=12, wire="fp32", gradient_accumulation_steps=2), rows(12)
    model, record = train(accelerator, "norm", data)
    assert [steps for _, steps in record] == [False, True, True] * 2
    assert model.reduction.step == 4
    assert_equal(model, replay(record, 2, "norm", build(), sites=1), 1e-8)
    frozen = build().requires_grad_(False)
    assert accelerator.prepare(frozen) is frozen
    refuses(
        (
            lambda: accelerator.prepare(build(), torch.optim.SGD(build().parameters(), 0.1)),
            r"none of the parameters.*model.parameters",
        ),
        (lambda: accelerator.prepare(nn.DataParallel(build())), r"already.*module"),
        (lambda: accelerator.prepare(model.module), "is prepared already"),
    )
    with torch.device("meta"), pytest.raises(ValueError, match="meta device"):
        accelerator.prepare(nn.Linear(2, 2))
    accelerator.free_memory()
    stray, _ = accelerator.prepare(torch.optim.SGD(build().parameters(), 0.1)), accelerator.prepare(build())
    with pytest.raises(ValueError, match="none of the parameters"):
        stray.step()
    accelerator.free_memory()


REFUSED = {
    "comm_hook='fp16'.*wire='bf16'": {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]},
    "comm_hook='power_sgd'.*mode='powersgd'": {
        "kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="power_sgd")]
    },
    "split_batches=True.*batch size": {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
    "dispatch_batches=True sends.*leave it out": {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
    "fp16.*'bf16'": {"mixed_precision": "fp16"},
    "fp8.*'bf16'": {"mixed_precision": "fp8"},
    "FSDP divides.*leave fsdp_plugin= out": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "DeepSpeed divides.*leave deepspeed_plugin= out": {"deepspeed_plugin": object()},
    "Megatron-LM divides.*leave megatron_lm_plugin= out": {"megatron_lm_plugin": object()},
    "tensor parallelism divides": {"torch_tp_plugin": object()},
    "parallelism_config divides.*leave": {"parallelism_config": object()},
    r"unknown option 'rnk' \(did you mean 'rank'\?\)": {"rnk": 2},
    "unknown mode 'dda'": {"mode": "dda"},
    "unknown split_data 'own'; valid ones are 'auto', True, False": {"split_data": "own"},
    "min_sites needs a hub": {"min_sites": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused(message, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        fresh(**REFUSED[message])
    assert dict(os.environ) == before
    assert fresh(mode="dad").mixed_precision == "no"


def test_a_launch_that_would_train_alone_is_refused(monkeypatch):
    forget_accelerators()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"FSDP divides.*ACCELERATE_USE_FSDP"):
        Accelerator(cpu=True)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes have been started.*cpu=True"):
        Accelerator()
    monkeypatch.delenv("WORLD_SIZE")
    for name in ("ACCELERATE_DYNAMO_BACKEND", "MASTER_ADDR"):
        monkeypatch.setenv(name, "no")
    with pytest.raises(ValueError, match=r"starts one process.*--multi_gpu"):
        Accelerator(cpu=True)


def test_arguments_of_ddp_without_effect_are_accepted(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    handler = DistributedDataParallelKwargs(dim=1, bucket_cap_mb=3, static_graph=True, broadcast_buffers=False)
    accelerator = fresh(kwargs_handlers=[handler])
    model = accelerator.prepare(build())
    assert model.broadcast_buffers is False
    accelerator.free_memory()
