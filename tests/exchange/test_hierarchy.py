"""Hierarchical groups: four processes as two nodes, held against one process, and against two sites."""

import copy
import os
import sys

import pytest
import support
import torch
import torch.distributed as dist
import zoo
from comparison import off_by
from support import refuses
from torch import nn
from zoo_training import trains

import dadplug
from dadplug.exchange import Traffic
from dadplug.exchange.factory import open_transport
from dadplug.exchange.hierarchy import HierarchicalTransport, NodeGather
from dadplug.exchange.transport import Nodes, members_of
from dadplug.step.methods import METHODS, method_names

LAYOUTS = (2, [[0, 1, 2], [3]], [[0, 2], [1], [3]])
CUTS = (0, 2, 5, 9, 12)


@pytest.mark.parametrize("mode", method_names())
def test_every_mode_agrees_with_one_process(sites, mode):
    names = (
        ("mixed", "partly", "images")
        if METHODS[mode].traits.recomputes_deltas
        else ("mixed", "partly", "bags", "conv1d")
    )
    for name in names:
        sites(4).run(trains, name, mode, 6, {"hierarchy": 2}, [[0, 1], [2, 3]])


@pytest.mark.parametrize("mode", ["dsgd", "dad", "rankdad"])
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_nodes_may_have_different_numbers_of_processes(sites, mode, layout):
    sites(4).run(trains, "partly", mode, 6, {"hierarchy": layout}, layout)
    sites(4).run(trains, "words", mode, 4, {"hierarchy": layout, "weighting": "samples"}, layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@support.at_sites(4)
def test_sums_and_gathers_are_right(layout) -> None:
    """Results of a transport, for any sizes, many exchanges at once, and some steps."""
    transport = open_transport(None, Traffic(), torch.device("cpu"), 30, layout)
    rank, world_size = transport.rank, transport.world_size
    for size in (1, 2, 7, 1000):
        sums = [torch.full((size,), float(rank + k), dtype=torch.float64) for k in range(5)]
        for reduction in [transport.all_reduce(each) for each in sums]:
            reduction.wait()
        for k, each in enumerate(sums):
            assert torch.equal(each, torch.full_like(each, sum(range(world_size)) + world_size * k))
    sizes = [5, 0, 3, 1]
    gathers = [transport.gather(sizes, torch.float32) for _ in range(4)]
    for step in range(3):
        for number, gather in enumerate(gathers):
            gather.payload.fill_(100 * step + 10 * number + rank)
            gather.launch()
        for number, gather in enumerate(gathers):
            for source, payload in enumerate(gather.wait()):
                assert torch.equal(payload, torch.full((sizes[source],), 100.0 * step + 10 * number + source))
    transport.close()


def switches_streams(mode: str, layout) -> list[str]:
    """Gradients are the same to the bit on the processes' own connections and by gloo; returns what the former are."""
    found, connections = [], []
    for streams in ("1", "0"):
        os.environ["DADPLUG_STREAMS"] = streams
        found.append(gradients_of(mode, {"hierarchy": layout}, 4))
        transport = open_transport(None, Traffic(), torch.device("cpu"), 30, layout)
        transport.tags(1)
        connections.append({} if transport._sockets is None else transport._sockets.connections)
        transport.close()
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))
    assert not connections[1]
    return [f"{rank}: {connection.socket.family.name}" for rank, connection in connections[0].items()]


@pytest.mark.parametrize("mode", ["dsgd", "rankdad"])
def test_own_connections_give_the_results_of_gloo(sites, mode):
    families = sites(4).run(switches_streams, mode, [[0, 2], [1, 3]])
    near = "AF_UNIX" if sys.platform == "linux" else "AF_INET"
    assert families[0] == ["1: AF_INET", f"2: {near}", "3: AF_INET"]
    assert families[3] == ["0: AF_INET", f"1: {near}", "2: AF_INET"]


def gradients_of(mode: str, options: dict, processes: int) -> list[torch.Tensor]:
    """The gradients of eight steps on the same rows, by any number of processes on two nodes."""
    torch.manual_seed(5)
    model = zoo.build("mlp")
    reduction = dadplug.GradientReduction(model, mode=mode, rank=2, **{"weighting": "samples"} | options)
    found, share = [], 4 // processes
    for step in range(8):
        model.zero_grad()
        inputs, targets = zoo.batch("mlp", CUTS[-1], seed=step)
        mine = slice(CUTS[share * dist.get_rank()], CUTS[share * (dist.get_rank() + 1)])
        zoo.loss(model, inputs[mine], targets[mine]).backward()
        reduction.synchronize()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    assert reduction.first_difference() is None
    reduction.detach()
    return found


@pytest.mark.parametrize("options", [{}, {"error_feedback": True}, {"iterations": 2, "tolerance": 0.0}], ids=str)
def test_to_rankdad_a_node_is_a_site(sites, options):
    ours = sites(4).run(gradients_of, "rankdad", options | {"hierarchy": 2}, 4)
    theirs = sites(2).run(gradients_of, "rankdad", options, 2)
    assert all(torch.equal(p, q) for other in ours[1:] for p, q in zip(ours[0], other))
    assert max(off_by(p, q) for p, q in zip(ours[0], theirs[0])) < 1e-11


@pytest.mark.parametrize("announced", [True, False])
@support.at_sites(4)
def test_rows_that_come_late_count_as_much(announced: bool) -> None:
    """Several backward passes, announced or not, with numbers of rows that differ, and a site without data."""
    rank = dist.get_rank()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 30)).double()
    reference = copy.deepcopy(model)
    reduction = dadplug.GradientReduction(
        model, mode="rankdad", rank=8, tolerance=0.0, hierarchy=2, weighting="samples"
    )
    for step in range(6):
        model.zero_grad(), reference.zero_grad()
        data = torch.randn(2, 4, 1 + step % 2, 30, dtype=torch.float64)
        passes = 1 + step // 3
        active = [0, 1, 3] if step == 4 else [0, 1, 2, 3]
        for number in range(passes):
            for site in active:
                reference(data[number, site]).square().mean().div(len(active)).backward()
            if rank in active and announced and number + 1 < passes:
                with reduction.no_sync():
                    model(data[number, rank]).square().mean().backward()
            elif rank in active:
                model(data[number, rank]).square().mean().backward()
        reduction.synchronize()
        for (name, p), q in zip(model.named_parameters(), reference.named_parameters()):
            assert off_by(p.grad, q[1].grad) < 1e-9, (step, name)
    assert reduction.first_difference() is None


def costs(hierarchy) -> tuple[int, int, int, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 160), nn.ReLU(), nn.Linear(160, 200))
    reduction = dadplug.GradientReduction(
        model, mode="rankdad", rank=4, bucket_mb=0.004, hierarchy=hierarchy, weighting="samples", merge="all"
    )
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(16, 200)).square().mean().backward()
        reduction.synchronize()
    traffic, plan = reduction.traffic, reduction.plan
    return traffic.bytes_sent, traffic.bytes_inside, plan.bytes, str(plan)


def test_a_node_sends_its_gradient_once(sites):
    flat, nested = sites(4).run(costs, None), sites(4).run(costs, 2)
    between = sum(sent for sent, *_ in nested)
    assert between < sum(sent for sent, *_ in flat) / 5  # 2 nodes with one gradient, not 4 sites with 3 receivers
    assert all(inside == 0 for _, inside, *_ in flat)
    assert all(inside > 0 for _, inside, *_ in nested)
    for sent, _, planned, text in nested:
        assert "4 sites on 2 nodes" in text
        assert 0 < planned <= sent < 1.3 * planned + 2000  # heads, alignment, headers
    assert nested[0][0] < 0.7 * between  # the work is shared


@support.at_sites(4)
def test_it_resumes_and_follows_frozen_layers() -> None:
    """A run that is interrupted, and one that is not, and a plan that changes in both."""
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    finals = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 30))
        reduction = dadplug.GradientReduction(
            model, mode="rankdad", rank=2, hierarchy="auto" if interrupted else 2, weighting="samples"
        )
        torch.manual_seed(dist.get_rank())
        for step in range(6):
            if step == 3 and interrupted:
                state = copy.deepcopy(reduction.state_dict())
                reduction.detach()
                reduction = dadplug.GradientReduction(model, mode="rankdad", rank=2, hierarchy=2, weighting="samples")
                reduction.load_state_dict(state)
            model[0].requires_grad_(step != 4)
            model.zero_grad()
            model(torch.randn(4, 30)).square().mean().backward()
            reduction.synchronize()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
        reduction.detach()
        finals.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-7) for p, q in zip(*finals))


def test_a_killed_site_is_named_by_all(tmp_path):
    code = """
import os, signal
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
reduction = dadplug.GradientReduction(model, mode="dsgd", timeout=200, hierarchy=2)
for number in range(6):
    if rank == 2 and number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(8, 6)).square().mean().backward()
    reduction.synchronize()
"""
    finished = support.run_programs(support.site_scripts(code, tmp_path, 4), timeout=200, destructors=True)
    for rank in (0, 1, 3):
        assert finished[rank].status == 1
        assert "SiteError: site 2 (" in finished[rank].errors, finished[rank].errors


def announces_too_much(integers: int) -> str:
    """One process of each node announces more values than its integers give."""
    transport = open_transport(None, Traffic(), torch.device("cpu"), 30, 2)
    assert isinstance(transport, HierarchicalTransport)
    gather = NodeGather(transport, 0, 1, torch.float32, lambda integers: integers[0] if integers[0] < 9 else None)
    message = ""
    if gather.is_owner:
        try:
            gather.wait()
        except dadplug.MismatchError as error:
            message = str(error)
    else:
        transport.wait_all(transport.send(torch.tensor([1 << 50, integers]), transport.nodes.own[0], gather._tag))
    transport.gather_objects(None)
    transport.close()
    return message


def test_memory_is_not_allocated_by_what_a_process_announces(sites):
    first, _, third, _ = sites(4).run(announces_too_much, 3)
    for message, site in ((first, 1), (third, 3)):
        assert f"site {site} (" in message
        assert f"announces a message of {1 << 50} values" in message
        assert "which should have 3 values" in message
    assert all("does not fit the model" in message for message in sites(4).run(announces_too_much, 9)[::2])


def test_layouts():
    assert members_of(2, range(4)) == [[0, 1], [2, 3]]
    assert members_of("auto", ["a", "b", "a", "c"]) == [[0, 2], [1], [3]]
    nodes = Nodes.of([[0, 2, 3], [1]], 3)
    assert (nodes.node, nodes.index, nodes.owners) == (0, 2, 1)
    assert nodes.partners(2) == [1]
    assert nodes.peers == [0, 2]
    assert {nodes.receiver(1)} == {0}


@pytest.mark.parametrize("wrong", [0, -1, True, "node", 2.5, [0, 1]])
def test_an_invalid_hierarchy_is_reported(wrong):
    with pytest.raises(ValueError, match=r"hierarchy must be None, 'auto', a number"):
        dadplug.GradientReduction(nn.Linear(2, 2), hierarchy=wrong, weighting="samples")


@support.at_sites(4)
def test_a_hierarchy_that_does_not_fit_is_reported() -> None:
    refuses(
        (
            lambda: dadplug.GradientReduction(nn.Linear(2, 2), hierarchy=3, weighting="samples"),
            r"hierarchy=3 processes on each node do not divide 4 processes",
        ),
        (
            lambda: dadplug.GradientReduction(nn.Linear(2, 2), hierarchy=[[0, 1], [1, 2]], weighting="samples"),
            r"must name each of the ranks 0 to 3 once",
        ),
    )
    alone = dadplug.GradientReduction(
        nn.Linear(2, 2), mode="dsgd", hierarchy=4, weighting="samples"
    )  # one node: nothing to nest
    assert "4 sites, " in str(alone.plan)
    alone.detach()
