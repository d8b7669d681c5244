"""Graphs by chance, sampled neighbourhoods, the graph network, and its example on two sites."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import support
import torch
from dadplug.examples.zoo.graph import Graph, NeighbourLoader, block_graph

from dadplug.models import GCN, build_model

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "gcn.py")


def neighbours(graph, node):
    return graph.neighbours[graph.starts[node] : graph.starts[node + 1]].tolist()


def test_a_graph_has_both_directions_each_once_and_every_node_itself():
    graph = Graph(torch.tensor([[0, 1], [1, 0], [1, 2], [2, 2]]), torch.zeros(4, dtype=torch.int64))
    assert [neighbours(graph, node) for node in range(4)] == [[0, 1], [0, 1, 2], [1, 2], [3]]


@pytest.mark.parametrize("edges", [torch.tensor([[0, 4]]), torch.tensor([[-1, 0]]), torch.tensor([0, 1])])
def test_edges_must_fit(edges):
    with pytest.raises(ValueError, match="edges"):
        Graph(edges, torch.zeros(4, dtype=torch.int64))


def test_a_block_graph_keeps_its_numbers():
    graph = block_graph(2000, classes=7, degree=12, inside=0.75, seed=3)
    again, other = block_graph(2000, 7, 12, 0.75, seed=3), block_graph(2000, 7, 12, 0.75, seed=4)
    assert torch.equal(graph.neighbours, again.neighbours)
    assert not torch.equal(graph.neighbours, other.neighbours)
    sizes = torch.bincount(graph.labels)
    assert int(sizes.max() - sizes.min()) <= 1
    sources = torch.repeat_interleave(torch.arange(2000), graph.starts.diff())
    edges = graph.neighbours != sources
    assert abs(int(edges.sum()) / 2000 - 12) < 0.5
    same = graph.labels[sources[edges]] == graph.labels[graph.neighbours[edges]]
    assert abs(float(same.float().mean()) - 0.75) < 0.02


def test_trees_hold_neighbours_of_neighbours():
    graph = block_graph(60, classes=3, degree=3)
    nodes = torch.tensor([5, 17, 59])
    trees = graph.trees(nodes, (4, 2), torch.Generator().manual_seed(1))
    assert trees.shape == (3, 1 + 4 + 8)
    for tree in trees.tolist():
        first, second = tree[1:5], tree[5:]
        assert all(each in neighbours(graph, tree[0]) for each in first)
        assert all(each in neighbours(graph, first[place // 2]) for place, each in enumerate(second))


def test_an_epoch_has_every_node_once_and_evaluation_the_same_trees():
    graph = block_graph(50, classes=5, degree=4)
    loader = NeighbourLoader(graph, torch.arange(10, 40), (3,), 8, seed=2)
    assert len(loader) == 4
    first, second = (torch.cat([trees for trees, _ in loader]) for _ in range(2))
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(10, 40))
    assert not torch.equal(first, second)
    still = NeighbourLoader(graph, torch.arange(10, 40), (3,), 8, shuffle=False)
    assert torch.equal(*(torch.cat([trees for trees, _ in still]) for _ in range(2)))
    assert all(torch.equal(graph.labels[trees[:, 0]], labels) for trees, labels in still)
    with pytest.raises(ValueError, match="batch_size and number of nodes"):
        NeighbourLoader(graph, torch.arange(0), (3,), 8)


def test_a_layer_is_the_mean_of_a_node_and_its_neighbours():
    net = build_model("gcn", nodes=9, classes=4, width=3, hidden=5, fanouts=(2, 3))
    trees = torch.randint(9, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = net(trees)
    for row, tree in enumerate(trees):
        values = net.nodes(tree)
        hop = [torch.relu(net.layers[0]((values[0] + values[1] + values[2]) / 3))]
        hop += [
            torch.relu(net.layers[0](torch.cat([values[1 + k : 2 + k], values[3 + 3 * k : 6 + 3 * k]]).mean(0)))
            for k in range(2)
        ]
        torch.testing.assert_close(logits[row], net.layers[1](torch.stack(hop).mean(0)))
    with pytest.raises(ValueError, match=r"trees must be of shape \(batch, 9\), got \(2, 8\)"):
        net(trees[:, :8])
    with pytest.raises(ValueError, match="must be at least 1"):
        GCN(9, 0)


def test_the_example_compares_all_ways():
    flags = ["--nodes", "2000", "--epochs", "5", "--batch-size", "64", "--split", "by-class"]
    (only,) = support.run_programs([[EXAMPLE, *flags]], timeout=200)
    assert only.status == 0, only.errors
    rows = {}
    for way in ("auto", "manual", "none", "ddp"):
        line = next(line for line in only.output.splitlines() if re.match(rf"{way} +0\.", line))
        rows[way] = [float(number) for number in re.findall(r"\d+\.\d+", line)]
    assert all(abs(row[0] - rows["ddp"][0]) < 0.05 for row in rows.values())
    assert rows["ddp"][0] > 0.7
    assert rows["manual"][2] > rows["none"][2] + 5  # per cent of rows that are local


def test_wrong_arguments_of_the_example_end_before_any_site_starts():
    (only,) = support.run_programs([[EXAMPLE, "--nodes", "3"]])
    assert only.status == 1
    assert only.errors.strip() == "error: cannot make a graph of 3 nodes, 8 classes, degree 10.0, inside 0.8"
