"""rankdad with an owner for each layer, held against the exact sum and the best approximation in one process."""

import os

import pytest
import support
import torch
import torch.distributed as dist
from comparison import assert_resumes, descend, off_by, train
from divided_network import SMALL, backward, mean_of_sites, merges_exactly, network, spectrum
from torch import nn

import dadplug
from dadplug.errors import SiteError
from dadplug.exchange.group_transport import GroupTransport
from dadplug.step.methods.rankdad import Merger
from dadplug.step.planning.merging import LinkCosts, predict_seconds
from dadplug.step.reducer.owners import OwnedLayer, assign_owners, numbers_sent


@pytest.mark.parametrize("count", [2, 3, 4])
def test_with_rank_enough_it_is_the_exact_mean(sites, count):
    assert sites(count).run(merges_exactly, SMALL, 1e-9, {"rank": 30}) == [[]] * count


@pytest.mark.parametrize("streams", ["0", "1"])
@support.at_sites(3)
def test_what_changes_after_it_was_sent_counts(streams: str) -> None:
    """Each bucket leaves at once: gradients change after they were sent."""
    os.environ["DADPLUG_STREAMS"] = streams  # with 0, over messages of gloo
    merges_exactly(SMALL, 1e-9, {"rank": 30, "bucket_mb": 0.001})


def residuals(kind: str, rank: int) -> list[float]:
    """Residual of the merged gradient over that of the best approximation of the same rank, by step; at the owner."""
    site, encode, arrived = dist.get_rank(), Merger.encode, []

    def record(self, name, factor, with_bias):
        arrived.append(factor.gradient())  # the sum of what the sites have sent
        return encode(self, name, factor, with_bias)

    model = nn.Sequential(nn.Linear(48, 64, bias=False)).double()
    options = {"rank": rank, "tolerance": 0.0, "error_feedback": False}  # a memory would be part of the sum
    reduction = dadplug.GradientReduction(model, mode="rankdad", merge="owner", **{"weighting": "samples"} | options)
    common, apart = torch.Generator().manual_seed(7), torch.Generator().manual_seed(site)
    left, right = (torch.randn(40, n, generator=common, dtype=torch.float64) for n in (64, 48))  # that sites share
    found = []
    Merger.encode = record
    for step in range(4):
        if step % 2 == 0:
            deltas, inputs = (
                t + 0.5 * torch.randn(t.shape, generator=apart, dtype=torch.float64) for t in (left, right)
            )
        model.zero_grad()
        (model(inputs) * deltas * spectrum(kind, 40)[:, None]).sum().backward()
        reduction.synchronize()
        if arrived:
            whole = arrived.pop()
            assert whole.norm() > 0
            found.append(float((model[0].weight.grad - whole).norm() / torch.linalg.svdvals(whole)[rank:].norm()))
    Merger.encode = encode
    return found


@pytest.mark.parametrize("kind", ["flat", "power", "fast"])
def test_the_residual_is_that_of_the_best_approximation(sites, kind):
    for rank in (2, 6):
        by_site = sites(4).run(residuals, kind, rank)
        assert [len(found) for found in by_site] == [4, 0, 0, 0]
        assert max(by_site[0]) < 1.05


def error_of_a_step(wire: str) -> float:
    """Return the largest distance between an agreed gradient and the true one, by parameter, in its norms."""
    model = network(torch.float32, SMALL)
    true = mean_of_sites(model, 0, dist.get_world_size())
    reduction = dadplug.GradientReduction(model, mode="rankdad", merge="owner", rank=30, wire=wire, weighting="samples")
    backward(model, dist.get_rank(), 0)
    reduction.synchronize()
    assert reduction.first_difference() is None
    return max(off_by(p.grad, true[name]) for name, p in model.named_parameters())


def test_wire_formats(sites):
    for wire, limit in (("fp32", 1e-5), ("bf16", 0.01), ("int8", 0.03)):
        assert max(sites(3).run(error_of_a_step, wire)) < limit


def trains(steps: int, state: list | None) -> tuple:
    options = {"rank": 2, "error_feedback": True, "wire": "bf16"}
    model = network(torch.float32, SMALL)
    reduction = dadplug.GradientReduction(model, mode="rankdad", merge="owner", **{"weighting": "samples"} | options)
    return train(model, reduction, lambda step: backward(model, dist.get_rank(), step), steps, state)


def test_checkpoints_hold_the_owners_memory(sites):
    states = assert_resumes(sites(2), trains, 7, 4)
    memories = [state["method"]["merger"]["errors"]["errors"] for state in states[1]]
    assert all(memories)
    assert not memories[0].keys() & memories[1].keys()  # of the layers that a site owns
    _, further = sites(3).run(trains, 5, states)[0]  # the owners are others now
    found = {name for state in further[1] for name in state["method"]["merger"]["errors"]["errors"]}
    assert found == memories[0].keys() | memories[1].keys()


def bytes_of_a_step(merge: str) -> tuple[int, int, str]:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    reduction = dadplug.GradientReduction(model, mode="rankdad", rank=4, merge=merge, weighting="samples")
    planned = reduction.plan.bytes
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        reduction.synchronize()
    assert reduction.plan.bytes == planned or merge != "owner"
    return reduction.traffic.bytes_sent, reduction.plan.bytes, reduction.detach()


def test_bytes_do_not_grow_with_the_number_of_sites(sites):
    found = {count: sites(count).run(bytes_of_a_step, "owner") for count in (2, 4, 8)}
    header = 8 * (9 + 2 * 16)  # the step header, in all modes
    for count, results in found.items():
        for sent, planned, _ in results:
            assert planned <= sent - (count - 1) * header < 1.05 * planned + 1000
    assert max(planned for _, planned, _ in found[8]) <= 2.2 * max(planned for _, planned, _ in found[2])
    to_all = sites(8).run(bytes_of_a_step, "all")
    assert max(sent for sent, *_ in found[8]) < 0.4 * max(sent for sent, *_ in to_all)


@support.at_sites(4)
def test_relayed_results_are_the_same_and_weigh_less_on_the_busiest_site() -> None:
    def train_with(relays: bool) -> tuple[dict[str, torch.Tensor], int]:
        own = GroupTransport.relayed_gather
        if not relays:
            GroupTransport.relayed_gather = GroupTransport.gather
        model = network(torch.float32, (1400, 1000, 4, 10))  # the first layer is most of it
        reduction = dadplug.GradientReduction(model, mode="rankdad", rank=8, wire="int8", merge="owner")
        for step in range(3):
            backward(model, dist.get_rank(), step)
            reduction.synchronize()
            descend(model)
        GroupTransport.relayed_gather = own
        sent = torch.tensor([reduction.traffic.bytes_sent])
        if relays:
            assert 0 <= (sent - reduction.plan.bytes) / sent < 0.3  # headers, and sums of small gradients
        assert reduction.first_difference() is None
        reduction.detach()
        dist.all_reduce(sent, dist.ReduceOp.MAX)
        return model.state_dict(), int(sent)

    relayed, directly = train_with(True), train_with(False)
    assert all(torch.equal(mine, other) for mine, other in zip(*(each[0].values() for each in (relayed, directly))))
    layer = 8 * (1400 + 1000)  # numbers of its factors: 3 times as much is sent in place of 1.5 times
    assert directly[1] - relayed[1] > 1.4 * layer


def deep(count: int) -> list[OwnedLayer]:
    return [OwnedLayer(str(index), 768, 768 * (1 + index % 4), 768, 8) for index in range(count)]


def test_the_prediction_for_many_sites():
    layers = deep(1024)
    whole = sum(layer.size for layer in layers)
    for sites in (2, 8, 64, 1024):
        sent = numbers_sent(layers, assign_owners(layers, sites), sites)
        assert sum(sent) == 2 * (sites - 1) * whole
        assert max(sent) < 2.5 * whole
    few = deep(64)
    assert max(numbers_sent(few, assign_owners(few, 2), 2)) == pytest.approx(sum(layer.size for layer in few), rel=0.05)


def test_auto_predicts_by_latency_and_bytes():
    layers = deep(32)

    def owner_is_faster(sites: int, latency: float, bytes_a_second: float) -> bool:
        link = LinkCosts(latency, (sites - 1) / bytes_a_second, 0.0, 0.0)
        to_all, to_owner = predict_seconds(layers, assign_owners(layers, sites), sites, link)
        return to_owner < to_all

    assert owner_is_faster(8, 1e-3, 1e6)
    assert not owner_is_faster(2, 1e-3, 1e6)  # as many bytes, and twice the latency
    assert not owner_is_faster(8, 10.0, 1e12)


def chooses(merge: str) -> tuple[tuple[str, str, int], ...]:
    model = network(torch.float32, SMALL)
    reduction = dadplug.GradientReduction(model, mode="rankdad", merge=merge, rank=2, weighting="samples")
    for step in range(2):
        backward(model, dist.get_rank(), step)
        reduction.synchronize()
    assert reduction.first_difference() is None
    return tuple((row.parameter, row.path, row.bytes) for row in reduction.plan)


def refuses(options: dict, message: str) -> None:
    model = network(torch.float32, SMALL)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        dadplug.GradientReduction(model, mode="rankdad", merge="owner", **{"weighting": "samples"} | options)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_the_option_is_checked(sites):
    assert len(set(sites(2).run(chooses, "auto"))) == 1
    sites(2).run(refuses, {"hierarchy": 1}, "hierarchy")
    for options, message in (({"mode": "dad"}, "mode='rankdad'"), ({}, "'all'")):
        with pytest.raises(ValueError, match=message):
            dadplug.GradientReduction(
                nn.Linear(2, 2), **{"merge": "owner" if options else "none"} | options, weighting="samples"
            )


@support.at_sites(3)
def test_a_silent_owner_is_named() -> None:
    rank, model = dist.get_rank(), network(torch.float32, SMALL)
    reduction = dadplug.GradientReduction(model, mode="rankdad", merge="owner", rank=2, weighting="samples")
    with pytest.raises(ValueError, match="at most 2"):
        reduction.max_rank = 3
    backward(model, rank, 0)
    reduction.synchronize()
    reduction._transport.timeout = 2
    if rank != 2:
        backward(model, rank, 1)
        with pytest.raises(SiteError, match="site 2"):
            reduction.synchronize()
    dist.barrier()
    reduction.detach(discard=True)
