"""Batch normalisation over all sites' rows, checks of a model, and inputs of unequal numbers."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import support
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import dadplug
from dadplug.hogwild.layout import check_model as check_hogwild_model
from dadplug.step.model_sync.replicated_model import ReplicatedModel
from dadplug.step.model_sync.samples import batches_before, takes_part
from dadplug.step.model_sync.structure import refuse_wrapped


class Net(nn.Module):
    """Batch normalisations of one, two and no spatial dimensions, one without affine, one with a plain mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2)
        self.spatial = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(16, 8)
        self.plain = nn.BatchNorm1d(8, affine=False, momentum=None)
        self.deep = nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU())
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.spatial(self.conv(x))).flatten(1)
        return self.out(self.deep(torch.tanh(self.plain(self.hidden(x)))))


def batch(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 2, 3, 3, generator=generator, dtype=torch.float64)
    return inputs + torch.arange(samples)[:, None, None, None] / 4, torch.randint(0, 3, (samples,), generator=generator)


# Rows of the first site, of 10, by step: a single one is enough, and with all of them the other site has no data.
CUTS = {"samples": (1, 3, 5, 7), "uniform": (5, 5, 5, 5), "idle": (1, 3, 10, 10)}


@pytest.mark.parametrize("rows", CUTS)
@pytest.mark.parametrize("mode", ["dsgd", "dad"])
@support.at_sites(2)
def test_training_equals_one_process(mode: str, rows: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(5)
    reference = Net().double()
    model = copy.deepcopy(reference)
    weighting = "uniform" if rows == "uniform" else "samples"
    reduction = dadplug.GradientReduction(model, mode=mode, sync_batchnorm=True, weighting=weighting)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step, cut in enumerate(CUTS[rows]):
        inputs, targets = batch(10, seed=step)
        mine = slice(0, cut) if rank == 0 else slice(cut, 10)
        for optimizer in optimizers:
            optimizer.zero_grad()
        if len(inputs[mine]):
            nn.functional.cross_entropy(model(inputs[mine]), targets[mine]).backward()
            reduction.synchronize()
        else:
            reduction.idle()
        nn.functional.cross_entropy(reference(inputs), targets).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=f"step {step}: {name}")
        buffers = zip(model.named_buffers(), reference.buffers()) if rows != "idle" else ()
        for (name, b), c in buffers:
            torch.testing.assert_close(b, c, rtol=1e-9, atol=1e-12, msg=f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
    if rows != "idle":
        model.eval(), reference.eval()
        torch.testing.assert_close(model(inputs), reference(inputs), rtol=1e-8, atol=1e-10)
    assert reduction.first_difference() is None


@support.at_sites(2)
def test_micro_batches_can_be_uneven() -> None:
    """Micro-batches, one of which only site 0 has."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = Net().double()
    reduction = dadplug.GradientReduction(model, mode="dad", sync_batchnorm=True, weighting="samples")
    for step in range(2):
        for micro in range(2):
            inputs, targets = batch(4, seed=10 * step + micro)
            if micro == 0:
                with reduction.no_sync():
                    nn.functional.cross_entropy(model(inputs), targets).backward()
            elif rank == 0:
                nn.functional.cross_entropy(model(inputs), targets).backward()
                reduction.synchronize()
            else:
                reduction.idle()
    assert all(p.grad is not None for p in model.parameters())


@support.at_sites(2)
def test_one_row_over_all_sites_is_too_few() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    reduction = dadplug.GradientReduction(model, sync_batchnorm=True)
    with pytest.raises(ValueError, match="more than one value per channel when training, over all sites got 1"):
        model(torch.ones(dist.get_rank(), 3))
    reduction.detach()


def test_alone_it_is_ordinary_batch_normalisation():
    model = Net().double()
    other = copy.deepcopy(model)
    reduction = dadplug.GradientReduction(model, mode="dsgd", sync_batchnorm=True)
    inputs, targets = batch(6, seed=0)
    for each in (model, other):
        nn.functional.cross_entropy(each(inputs), targets).backward()
    reduction.synchronize()
    for p, q in zip([*model.parameters(), *model.buffers()], [*other.parameters(), *other.buffers()]):
        torch.testing.assert_close(p, q)
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    reduction.detach()
    assert "forward" not in vars(model.spatial)


@pytest.mark.parametrize(
    "counts", [((2, 2), (2, 2, 2, 1)), ((1, 3, 2), (3, 1)), ((2,), (2, 1, 2)), ((2, 2, 2, 2), (2, 2))]
)
@support.at_sites(2)
def test_sites_with_other_numbers_of_micro_batches_train_and_join(
    counts: tuple[tuple[int, ...], ...],
) -> None:
    """Train steps of different numbers of micro-batches at each site; the site with fewer steps joins."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = Net().double()
    reduction = dadplug.GradientReduction(model, mode="dad", sync_batchnorm=True, timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, micro_batches in enumerate(counts[rank]):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            inputs, targets = batch(4, seed=100 * rank + 10 * step + micro)
            with reduction.no_sync() if micro + 1 < micro_batches else nullcontext():
                nn.functional.cross_entropy(model(inputs), targets).backward()
        reduction.synchronize()
        optimizer.step()
    reduction.join(optimizer.step)
    assert reduction.first_difference() is None
    assert reduction.step == max(map(len, counts)) + 1


# Checks of a model before anything is sent


def _raised(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="torch's") as caught:
        call()
    return str(caught.value)


def refuses_wrapped() -> list[str]:
    ddp = nn.parallel.DistributedDataParallel
    models = [ddp(nn.Linear(4, 3)), torch.compile(ddp(nn.Linear(4, 3))), nn.Sequential(nn.ReLU(), ddp(nn.Linear(4, 3)))]
    messages = [_raised(lambda model=model: dadplug.GradientReduction(model)) for model in models]
    model = models[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others: list[Callable[[], object]] = [
        lambda: dadplug.LocalSGD(model, optimizer),
        lambda: dadplug.ParameterServer(model, optimizer),
        lambda: check_hogwild_model(model, [optimizer]),
    ]
    dadplug.GradientReduction(model.module).detach()  # the remedy
    return messages + [_raised(call) for call in others]


def test_a_model_in_ddp_is_refused_by_every_entry(sites):
    whole, compiled, part, *others = sites(2).run(refuses_wrapped)[0]
    assert "the model is wrapped in torch's DistributedDataParallel" in whole
    assert "(model.module)" in whole
    assert "wrapped in torch's DistributedDataParallel" in compiled
    assert "layer '1' is wrapped" in part
    assert "(model.1.module)" in part
    assert all(message == whole for message in others)


@support.at_sites(2)
def test_a_model_in_fsdp_is_refused() -> None:
    wrapped = fsdp.FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))
    in_place = fsdp.fully_shard(nn.Linear(4, 3), mesh=init_device_mesh("cpu", (2,)))
    refusal = _raised(lambda: dadplug.GradientReduction(wrapped))
    assert "wrapped in torch's FullyShardedDataParallel" in refusal
    assert "is sharded by torch's fully_shard" in _raised(lambda: dadplug.GradientReduction(in_place))


def test_a_class_with_the_name_of_a_wrapper_is_not_one():
    refuse_wrapped(type("DistributedDataParallel", (nn.Module,), {})())


@pytest.mark.parametrize(("of", "first", "second"), [("layers", "a.weight", "b.weight"), ("parameters", "a", "b")])
@support.at_sites(2)
def test_another_order_is_told(of: str, first: str, second: str) -> None:
    """Build a model whose layers, or parameters, are defined in another order at site 1."""
    model, names = nn.Module(), ["a", "b"]
    for name in names[::-1] if dist.get_rank() else names:
        if of == "layers":
            model.add_module(name, nn.Linear(3, 3))
        else:
            model.register_parameter(name, nn.Parameter(torch.ones(3)))
    with pytest.raises(dadplug.MismatchError) as caught:
        dadplug.GradientReduction(model)
    message = str(caught.value)
    assert f"has tensor {first}, site 1" in message
    assert f"has tensor {second}. Define layers" in message


@given(steps=st.integers(1, 300), data=st.data())
def test_every_batch_is_used_once_spread_over_the_epoch(steps, data):
    own = data.draw(st.integers(1, steps))
    participates = [takes_part(step, own, steps) for step in range(steps)]
    assert sum(participates) == own
    assert participates[0]
    assert participates[-1] or own == 1
    assert [sum(participates[:step]) for step in range(steps + 1)] == [
        batches_before(step, own, steps) for step in range(steps + 1)
    ]
    if own > 1:
        gaps = "".join("x" if each else "." for each in participates).strip("x").split("x")
        gaps = [len(gap) for gap in gaps]
        assert max(gaps) <= (steps - own) // (own - 1) + 1


def test_a_site_without_batches_never_takes_part():
    assert not any(takes_part(step, 0, 5) for step in range(5))


def test_a_site_that_joins_describes_itself_before_the_others_wait_for_it(monkeypatch):
    """Its description loads kernels, which takes seconds in a new process."""
    done = []

    class Waiting:
        joins = True

        @property
        def rounds(self) -> "Waiting":
            return self

        def receive_state(self, most: int) -> None:
            done.append("the others wait")

    site = ReplicatedModel.__new__(ReplicatedModel)
    site.shared, site._transport = nn.Linear(2, 2), Waiting()
    monkeypatch.setattr(ReplicatedModel, "_describe", lambda self: done.append("described"))
    assert site._receive_state() is None
    assert done == ["described", "the others wait"]
