"""Buffers of all kinds are equal at all sites at the start, and averaged, copied or left as they are in training."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import support
import torch
import torch.distributed as dist
from comparison import off_by
from torch import Tensor, nn

import dadplug
from dadplug.exchange.codec import decode, encode
from dadplug.exchange.rounds import Rounds
from dadplug.step.model_sync.buffers import MovingBuffers
from dadplug.step.model_sync.sameness import load_tensors, tensors_of

INF = math.inf
DENSE = {  # what rank r has, and what sites agree on: without the idle site 1, and by equal shares
    "mean": (lambda r: torch.tensor([1.0 + r, 2.0]), lambda idle: torch.tensor([1.0 if idle else 1.5, 2.0])),
    "mask": (lambda r: torch.full((3, 3), -INF).triu(1), lambda idle: torch.full((3, 3), -INF).triu(1)),
    "limits": (lambda r: torch.tensor([INF, INF if r else 1.0]), lambda idle: torch.tensor([INF, idle or INF])),
    "phases": (lambda r: torch.tensor([1 + r + 2j]), lambda idle: torch.tensor([(1 if idle else 1.5) + 2j])),
    "halves": (lambda r: torch.tensor([1 + r + 2j], dtype=torch.complex32), lambda idle: None),
    "conjugate": (lambda r: torch.tensor([1 + 2j]).conj(), lambda idle: torch.tensor([1 - 2j])),
    "scales": (lambda r: torch.tensor([1.0 + r]).to(torch.float8_e4m3fn), lambda idle: torch.tensor([1.0])),
    "expanded": (lambda r: torch.tensor([1.0 + r]).expand(4), lambda idle: torch.full((4,), 1.0 if idle else 1.5)),
    "column": (lambda r: torch.tensor([[r], [2]]).expand(2, 3), lambda idle: torch.tensor([[0] * 3, [2] * 3])),
    "order": (lambda r: torch.tensor([r, 1 - r]), lambda idle: torch.tensor([0, 1])),
    "unsigned": (lambda r: torch.tensor([r, 5]).to(torch.uint16), lambda idle: torch.tensor([0, 5])),
    "chosen": (lambda r: torch.tensor([bool(r), True]), lambda idle: torch.tensor([False, True])),
    "count": (lambda r: torch.tensor(3 + r), lambda idle: torch.tensor(3 if idle else 4)),
    "third": (lambda r: torch.tensor([0.1, 1e-45, 3e38]), lambda idle: torch.tensor([0.1, 1e-45, 3e38])),
    "transposed": (lambda r: torch.arange(6.0).view(2, 3).t() + r, lambda idle: None),
    "nothing": (lambda r: torch.empty(0, 3), lambda idle: torch.empty(0, 3)),
}


def with_rows(r, layout):
    return (torch.eye(4) * (1 + r)).to_sparse(layout=layout, **({"blocksize": (2, 2)} if "bs" in str(layout) else {}))


OTHERS = {
    "coo": lambda r: with_rows(r, torch.sparse_coo),
    "csr": lambda r: with_rows(r, torch.sparse_csr),
    "csc": lambda r: with_rows(r, torch.sparse_csc),
    "bsr": lambda r: with_rows(r, torch.sparse_bsr),
    "quantized": lambda r: torch.quantize_per_tensor(torch.tensor([1.0 + r, 2.0]), 0.5, 0, torch.qint8),
    "nested": lambda r: torch.nested.nested_tensor([torch.full((2,), 1.0 + r), torch.full((3,), 2.0)]),
}


def buffers_of(rank):
    return {name: make(rank) for name, (make, _) in DENSE.items()} | {name: make(rank) for name, make in OTHERS.items()}


def model_at(rank):
    model = nn.Linear(3, 2)
    for name, buffer in buffers_of(rank).items():
        model.register_buffer(name, buffer)
    return model


def plain(tensor):
    if tensor.is_nested:
        return torch.cat([each.flatten() for each in tensor.unbind()])
    if tensor.is_quantized:
        return tensor.dequantize()
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.resolve_conj().to(torch.complex64 if dense.is_complex() else torch.float32)


def check(model, expected, names=None):
    for name in expected if names is None else names:
        if expected[name] is not None:
            found = plain(getattr(model, name))
            torch.testing.assert_close(found, plain(expected[name]), rtol=0, atol=0, msg=f"{name}: {found}")


def change(model, rank):
    """Give the dense buffers the values of a rank, as training does."""
    for name, (make, _) in DENSE.items():
        setattr(model, name, make(rank))


def agreed(idle):
    return {name: of(idle) for name, (_, of) in DENSE.items()}


def take_step(model, step):
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    step()


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@support.at_sites(2)
def test_a_reduction_averages_or_copies_them(weighting):
    rank = dist.get_rank()
    model = model_at(rank)
    reduction = dadplug.GradientReduction(model, mode="dsgd", weighting=weighting)
    check(model, buffers_of(0))
    change(model, rank)
    idle = weighting == "samples"
    if idle and rank:
        reduction.idle()
    else:
        take_step(model, reduction.synchronize)
    reduction.average_buffers()
    check(model, agreed(idle))
    check(model, buffers_of(0), OTHERS)


@support.at_sites(2)
def test_the_drop_in_broadcasts_them():
    rank = dist.get_rank()
    model = model_at(rank)
    wrapped = dadplug.DistributedDataParallel(model, mode="dsgd")
    check(model, buffers_of(0))
    with wrapped.join():
        for step in range(2 + 2 * rank):
            change(model, rank)
            wrapped(torch.ones(2, 3)).sum().backward()
            check(model, buffers_of(0) if step == 1 else {})
    check(model, buffers_of(1), DENSE)
    check(model, buffers_of(0), OTHERS)


@pytest.mark.parametrize("overlap", [False, True])
@support.at_sites(2)
def test_local_steps_average_or_copy_them(overlap):
    rank = dist.get_rank()
    model = model_at(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local = dadplug.LocalSGD(model, optimizer, every=1, weighting="uniform", overlap=overlap)
    check(model, buffers_of(0))
    change(model, rank)
    take_step(model, local.step)
    local.finish()
    check(model, agreed(False))
    change(model, rank)
    with local.agreed():
        check(model, agreed(False))
    check(model, buffers_of(rank), DENSE)


@support.at_sites(2)
def test_a_parameter_server_averages_or_copies_them():
    rank = dist.get_rank()
    model = model_at(rank)
    server = dadplug.ParameterServer(model, torch.optim.SGD(model.parameters(), 0.1), mode="dsgd")
    check(model, buffers_of(0))
    change(model, rank)
    take_step(model, server.step)
    server.finish()
    check(model, agreed(False))
    check(model, buffers_of(0), OTHERS)


def test_a_site_that_joins_gets_them():
    model = model_at(1)
    load_tensors(tensors_of(model), decode(encode(tensors_of(model_at(0)))))
    check(model, buffers_of(0))


@support.at_sites(2)
def test_sparse_ones_of_other_places_are_refused():
    model = nn.Linear(2, 2)
    model.register_buffer("links", torch.eye(2 + dist.get_rank(), 3).to_sparse())
    with pytest.raises(dadplug.MismatchError, match="links"):
        dadplug.GradientReduction(model, mode="dsgd")


def test_names_of_buffers_that_another_site_makes_up_are_not_kept():
    moving = MovingBuffers(nn.BatchNorm1d(2))
    every = {0: ["running_mean"], 1: ["running_var", *map(str, range(1000))]}
    moving.announce(SimpleNamespace(gather_present=lambda own: every, rounds=Rounds(2), sites="ab"))
    assert moving.names == ["running_mean", "running_var"]


# Tables with ``max_norm``, of which only the rows that some site looks up may change


class Table(nn.Module):
    """A table most of whose rows are longer than its ``max_norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(200, 6, max_norm=1.0), nn.Linear(6, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table(input=words).mean(1))


def words(step: int, sites: Sequence[int]) -> Tensor:
    numbers = [torch.randint(200, (3, 4), generator=torch.Generator().manual_seed(9 * step + site)) for site in sites]
    return torch.cat(numbers)


def train(model: nn.Module, sites: Sequence[int]) -> None:
    """Train with momentum, which moves rows that a step does not look up; use a copy at one site."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for step in range(4):
        if 1 in sites:
            copy.deepcopy(getattr(model, "module", model))(words(50 + step, [1]))
        optimizer.zero_grad()
        model(words(step, sites)).square().mean().backward()
        optimizer.step()


@support.at_sites(2)
def test_rows_that_no_site_looks_up_stay() -> None:
    torch.manual_seed(0)
    alone = Table().double()
    model = dadplug.DistributedDataParallel(copy.deepcopy(alone), mode="dad", compare_every=1)
    train(model, [dist.get_rank()])
    train(alone, range(2))
    for one, two in zip(model.module.parameters(), alone.parameters(), strict=True):
        assert off_by(one.detach(), two.detach()) < 1e-10
    assert model.reduction.first_difference() is None
    assert int((alone.table.weight.norm(dim=1) > 1.001).sum()) > 100
