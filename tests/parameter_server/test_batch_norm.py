"""Batch normalisation by the statistics that sites have committed: against one process, discarded passes, checks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from local_reference import ends_equal
from torch import Tensor, nn

import dadplug
from dadplug.errors import NonFiniteError
from dadplug.model_sync.samples import SampleCounter
from dadplug.parameter_server.batch_norm import CommittedBatchNorms

SETTLED = 6  # steps with the same batches and parameters until all statistics are those of these


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv1d(2, 5, 3),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(20, 7),
        nn.BatchNorm1d(7, affine=False),
        nn.Tanh(),
        nn.Linear(7, 3),
    ]
    return nn.Sequential(*layers).double()


def batch(rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the batch of a site, of another distribution and size than those of others."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    rows = 4 + 3 * rank
    inputs = torch.randn(rows, 2, 6, generator=generator, dtype=torch.float64) * (1 + rank) + 2 * rank
    return inputs, torch.randint(3, (rows,), generator=generator)


def in_one_process(world_size: int, weighting: str) -> nn.Module:
    """Return the network after a step of one process on all rows."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, targets = zip(*(batch(rank) for rank in range(world_size)), strict=True)
    losses = nn.functional.cross_entropy(model(torch.cat(inputs)), torch.cat(targets), reduction="none")
    by_site = losses.split([len(each) for each in targets])
    if weighting == "samples":
        losses.mean().backward()
    else:
        torch.stack([each.mean() for each in by_site]).mean().backward()
    optimizer.step()
    return model


def settles(weighting: str, discards: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    server = dadplug.ParameterServer(
        model, optimizer, mode="dad", staleness=0, sync_batchnorm=True, weighting=weighting, average_buffers=False
    )
    inputs, targets = batch(rank)
    for step in range(SETTLED + 1):
        if discards:
            nn.functional.cross_entropy(model(batch(rank, 5)[0] * 9.0), targets).backward()
        if discards == "before":
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if discards == "between":
            optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.5 if step == SETTLED else 0.0
        server.step()
    ends_equal(server)
    expected = in_one_process(world_size, weighting)
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12), f"{weighting}, {discards}: {name}"
    assert "forward" not in vars(model[1])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_step_is_that_of_one_process_once_statistics_have_settled(sites, world_size):
    for weighting, discards in itertools.product(("samples", "uniform"), ("", "before", "between")):
        sites(world_size).run(settles, weighting, discards)


def running_statistics_are_those_of_all_rows() -> None:
    """Running statistics are those of all sites' rows, as long as parameters and batches stay the same."""
    rank = dist.get_rank()
    model, momentum = network(), 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    server = dadplug.ParameterServer(model, optimizer, mode="dad", staleness=0, sync_batchnorm=True)
    inputs, targets = batch(rank)
    for _ in range(2):
        before = model[1].running_mean.clone(), model[1].running_var.clone()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        server.step()
    rows = model[0](torch.cat([batch(each)[0] for each in range(2)])).detach().transpose(0, 1).flatten(1)
    moved = before[0].lerp(rows.mean(1), momentum), before[1].lerp(rows.var(1), momentum)
    assert torch.allclose(model[1].running_mean, moved[0], rtol=0, atol=1e-12)
    assert torch.allclose(model[1].running_var, moved[1], rtol=0, atol=1e-12)
    model.eval()
    plain = nn.functional.batch_norm(model[0](inputs), *moved, model[1].weight, model[1].bias)
    assert torch.allclose(model[1](model[0](inputs)), plain, rtol=0, atol=1e-12)
    ends_equal(server)


def a_resumed_training_has_the_same_curve() -> None:
    """A resumed training has the same curve, since the statistics of other sites are in the state."""
    rank = dist.get_rank()
    kept: dict = {}
    finals = []
    for resumed in (False, True):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if resumed:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        options = {"mode": "dad", "staleness": 0, "sync_batchnorm": True, "average_buffers": False}
        server = dadplug.ParameterServer(model, optimizer, **options)
        if resumed:
            server.load_state_dict(kept["server"])
            model.load_state_dict(kept["model"])  # buffers of this site: the start takes those of site 0
        for step in range(3 if resumed else 0, 6):
            inputs, targets = batch(rank, step)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            server.step()
            if step == 2:
                server.finish()
                kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "server": server.state_dict()}
                kept = torch.utils._pytree.tree_map(lambda each: each.clone() if torch.is_tensor(each) else each, kept)
        server.finish()
        finals.append(model.state_dict())
        server.detach()
    for name, value in finals[0].items():
        assert torch.equal(value, finals[1][name]), name


def statistics_of_a_batch_with_nan_are_not_sent() -> None:
    rank = dist.get_rank()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    server = dadplug.ParameterServer(model, optimizer, mode="dad", sync_batchnorm=True)
    for step in range(6):
        inputs, targets = batch(rank, step)
        bad = rank == 1 and step in (2, 4)
        loss = nn.functional.cross_entropy(model(inputs * float("nan") if bad else inputs), targets)
        loss.backward()
        if bad and step == 2:
            optimizer.zero_grad()
        elif bad:
            with pytest.raises(NonFiniteError):
                server.step()
        else:
            server.step()
    server.finish()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert server.first_difference() is None
    norms = server._replica._norms
    assert norms is not None
    states = server.gather_objects({site: packed for site, (_, packed) in norms.state_dict().items()})
    assert sorted(states[0]) == sorted(states[1]) == [0, 1]
    for site, name in itertools.product((0, 1), ("1", "5")):
        assert torch.equal(states[0][site][name], states[1][site][name])
    server.detach()


@pytest.mark.parametrize(
    "program",
    [
        running_statistics_are_those_of_all_rows,
        a_resumed_training_has_the_same_curve,
        statistics_of_a_batch_with_nan_are_not_sent,
    ],
)
def test_two_sites(sites, program):
    sites(2).run(program)


def made() -> CommittedBatchNorms:
    model = network()
    return CommittedBatchNorms(model, 0, 2, SampleCounter(model, lambda: None, lambda: None), True, 4)


def test_statistics_are_checked():
    norms = made()
    fine = {"1": torch.ones(22), "5": torch.ones(30)}
    assert norms.check(fine) is fine
    problems = {
        "missing": None,
        "'7', which is no": {"7": torch.ones(22)},
        "'1' are no numbers": {"1": torch.ones(22, dtype=torch.int32)},
        "'5' are not 30": {"5": torch.ones(22)},
        "'1' are not 22 finite": {"1": torch.full((22,), torch.inf)},
        "'1' are not possible": {"1": -torch.ones(22)},
    }
    for message, packed in problems.items():
        with pytest.raises(ValueError, match=message):
            norms.check(packed)


def test_statistics_of_a_silent_site_expire():
    norms, inputs = made(), batch(0)[0]
    layer = norms._layers["1"]
    rows = nn.Conv1d(2, 5, 3).double()(inputs)
    alone = layer(rows)
    other = torch.cat([torch.full((5,), 3.0), torch.full((5,), 40.0), torch.tensor([20.0, 5.0]), torch.zeros(10)])
    norms.follow(1, {"1": other}, 1)
    for norms.version in (1, 4):
        assert not torch.allclose(layer(rows), alone)
    norms.version = 5
    assert torch.equal(layer(rows), alone)
    norms.follow(0, {"1": other}, 5)  # a site's own rows are those of its batch
    assert torch.equal(layer(rows), alone)
