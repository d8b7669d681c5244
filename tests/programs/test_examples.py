"""The examples, as a user runs them, and a script in the form of the published experiments."""

import os
import re
import signal
import time
from pathlib import Path

import forkserver
import pytest
import support
import torch
from dadplug.examples.zoo.graph import Graph, NeighbourLoader, block_graph
from data_files import write_mnist
from forkserver import TRAINERS
from support import refuses

from dadplug.models import GCN, build_model

pytestmark = pytest.mark.slow

pytest.importorskip("catalyst")
ROOT = Path(__file__).resolve().parents[2]
MNIST = str(ROOT / "examples" / "two_site_mnist.py")


def test_both_sites_start_on_this_machine_and_compare_methods(tmp_path):
    flags = ["--compare", "--epochs", "2", "--batch-size", "64", "--split", "by-class"]
    flags += ["--log-dir", str(tmp_path / "logs")]
    (only,) = support.run_programs([[MNIST, *flags]], timeout=200, preload=TRAINERS)
    assert only.status == 0, only.errors
    for mode in ("dsgd", "dad", "rankdad"):
        line = next(line for line in only.output.splitlines() if re.match(rf"{mode} +0\.", line))
        assert line.endswith("equal")
        assert float(line.split()[1]) > 0.85
    assert "DDP: 17.46 MB, 14 s at 10 Mbit/s, 1.4 s at 100 Mbit/s" in only.output
    assert re.search(r"  rankdad: 0\.11 MB, 0\.08\d s at 10 Mbit/s", only.output)
    picture = (tmp_path / "logs" / "comparison.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def row_of_rankdad(script: str, flags: list[str]) -> list[str]:
    """Run an example for an epoch; return the row of rankdad in its table."""
    (only,) = support.run_programs([[script, "--epochs", "1", *flags]], timeout=200, preload=TRAINERS)
    assert only.status == 0, only.errors
    row = next(line for line in only.output.splitlines() if re.match(r"rankdad +0\.", line)).split()
    assert row[-1] == "equal"
    return row


def test_the_vision_transformer_trains(tmp_path):
    pytest.importorskip("linformer")
    row = row_of_rankdad(str(ROOT / "examples" / "two_site_vit.py"), ["--log-dir", str(tmp_path)])
    assert float(row[1]) > 0.6
    assert float(row[4]) > 10  # times fewer bytes than dense


@pytest.mark.parametrize("trainer", ["lightning", "plain"])
def test_the_other_trainers_train(tmp_path, trainer):
    """As all examples do; the others of this file run in Catalyst."""
    if trainer == "lightning":
        pytest.importorskip("pytorch_lightning")
    row = row_of_rankdad(MNIST, ["--trainer", trainer, "--log-dir", str(tmp_path)])
    assert float(row[1]) > 0.6


def test_photos_that_are_not_there_end_the_example_with_advice(tmp_path):
    flags = ["--dataset", "dogsvscats", "--data-dir", str(tmp_path / "nowhere")]
    (only,) = support.run_programs([[str(ROOT / "examples" / "two_site_vit.py"), *flags]])
    assert only.status == 1
    assert "download train.zip of the dogs-vs-cats challenge" in only.errors
    assert "Traceback" not in only.errors


def test_the_plain_example_trains(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(support.free_port())]
    (only,) = support.run_programs([[*launch, str(ROOT / "examples" / "plain_pytorch.py")]], preload=TRAINERS)
    assert only.status == 0, only.errors
    assert float(re.search(r"accuracy (0\.\d+)", only.output).group(1)) > 0.9


def test_the_tutorial_of_adaptive_batches_trains_and_resumes(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    program = [str(ROOT / "examples" / "adaptive_mnist.py"), "--checkpoint", str(tmp_path / "run")]
    found = []
    for epochs in ("4", "5"):
        command = [*launch, str(support.free_port()), *program, "--epochs", epochs]
        (only,) = support.run_programs([command], timeout=200, preload=TRAINERS)
        assert only.status == 0, only.errors
        found.append(re.findall(r"epoch (\d): accuracy (0\.\d+), batch (\d+), .* progress (\d+) of", only.output))
    assert [int(line[0]) for line in found[0]] == [0, 1, 2, 3]
    assert [int(line[0]) for line in found[1]] == [4]  # the second program goes on
    assert int(found[1][0][3]) > int(found[0][-1][3])
    assert float(found[1][0][1]) > 0.8


def test_one_site_each_on_two_machines_with_mnists_files(tmp_path):
    write_mnist(tmp_path / "mnist", samples=40)
    url = f"tcp://127.0.0.1:{support.free_port()}"
    flags = ["--dist-url", url, "--dataset", "mnist", "--data-dir", str(tmp_path / "mnist"), "--epochs", "1"]
    first, second = support.run_programs(
        [[MNIST, "--rank", rank, *flags] for rank in "01"], timeout=200, preload=TRAINERS
    )
    assert first.status == second.status == 0, first.errors + second.errors
    assert "rankdad" in first.output
    assert second.output == ""


def test_wrong_arguments_end_before_any_site_starts():
    (only,) = support.run_programs([[MNIST, "--distributed-mode", "foo"]])
    assert only.status == 1
    assert only.errors.strip() == f"error: unknown mode 'foo'; valid ones are {support.valid_modes()}"


def test_a_hospital_that_is_killed_returns_into_the_run(tmp_path):
    flags = ["--steps", "60", "--kill-at", "20", "--seconds", "0.5", "--pause", "0.05", "--out", str(tmp_path)]
    (only,) = support.run_programs(
        [[str(ROOT / "examples" / "two_hospitals.py"), *flags]], timeout=200, preload=TRAINERS
    )
    assert only.status == 0, only.errors
    for line in ("lyon is killed", "hub: lyon has left: its connection was lost", "lyon is started again"):
        assert line in only.output
    assert "The two models are equal, to the bit." in only.output
    for event in ("was lost", "returned"):
        assert re.search(rf"Pause of berlin when lyon {event}: \d+\.\d\d s\.", only.output)
    rows = {row[0]: row for row in (line.split() for line in only.output.partition("took part")[2].splitlines()) if row}
    assert float(rows["berlin"][1]) > 0.8
    assert rows["berlin"][1:3] == rows["lyon"][1:3]
    last = rows["berlin"][-1]
    assert rows["berlin"][3:] == ["0", "to", last]
    assert re.fullmatch(rf"0 to \d+, \d+ to {last}", " ".join(rows["lyon"][3:]))
    assert (tmp_path / "two_hospitals.png").exists() or (tmp_path / "two_hospitals.txt").exists()


def test_an_error_of_a_hospital_ends_the_example(tmp_path):
    flags = ["--mode", "edad", "--out", str(tmp_path)]
    (only,) = support.run_programs([[str(ROOT / "examples" / "two_hospitals.py"), *flags]], preload=TRAINERS)
    assert only.status == 1
    assert "mode='edad' needs all sites in every step" in only.errors
    assert "Traceback" not in only.errors


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def status_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


def output_of(pid: int) -> tuple[str, ...]:
    """Return where a process writes; a server starts programs of other tests, too."""
    return tuple(os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2))


def started(pid: int) -> int:
    """Return when a process was started, in clock ticks since the start of the system; process ids begin again."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the sites' processes in /proc")
def test_a_site_killed_in_mid_epoch_ends_the_example_with_its_name():
    environment = os.environ | support.ONE_THREAD
    program = forkserver.start([MNIST, "--epochs", "200"], environment, preload=TRAINERS, destructors=True)
    try:
        while "epoch 1/200" not in program.read()[0].replace("  ", " "):
            assert program.poll() is None, program.read()
            time.sleep(0.1)
        (server,) = [int(line.split()[1]) for line in status_of(program.pid) if line.startswith("PPid")]
        outputs = {output_of(child) for child in children(program.pid)}
        others = [pid for pid in children(server) if pid != program.pid and started(pid) >= started(program.pid)]
        sites = [pid for pid in others if output_of(pid) in outputs]
        assert len(sites) == 2
        signalled = sites[1]
        os.kill(signalled, signal.SIGKILL)
        assert program.wait(200) != 0
        errors = program.read()[1]
        assert re.search(rf"error: site [01] \(.*, pid {signalled}\) is gone", errors), errors
        assert "Traceback" not in errors
        assert not any(Path(f"/proc/{site}").exists() for site in sites)
    finally:
        program.kill()


SEED_SCRIPT = """
import sys
import torch
from torch import nn, optim
from catalyst import dl
from dadplug.data import MNIST, transforms
from dadplug.runners import DistributedRunner

model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters(), lr=0.02)

transform = transforms.Compose([
        transforms.ToTensor(),
        transforms.Normalize((0.1307,), (0.3081,))
])
train_data = MNIST(sys.argv[1], train=True, download=True,
                        transform=transform)
valid_data = MNIST(sys.argv[1], train=False, download=True,
                        transform=transform)
num_classes = 10

# Create dataloaders
loaders = {
    "train": torch.utils.data.DataLoader(train_data, batch_size=8, shuffle=True, drop_last=True),
    "valid": torch.utils.data.DataLoader(valid_data, batch_size=8, shuffle=True, drop_last=True),
}

# Create catalyst runner
rankdad_runner = DistributedRunner(model,criterion, optimizer, mode="rankdad")

# run the catalyst experiment
rankdad_runner.train(
    model=model,
    loaders=loaders,
    criterion=criterion,
    optimizer=optimizer,
    num_epochs=1,
    logdir="logs",
    valid_loader="valid",
    valid_metric="loss",
    minimize_valid_metric=True,
    verbose=True,
    callbacks=[
        dl.AccuracyCallback(input_key="logits", target_key="targets", topk_args=(1, 3, 5)),
        dl.PrecisionRecallF1SupportCallback(
            input_key="logits", target_key="targets", num_classes=10
        ),
    ],
)
assert rankdad_runner.reduction.first_difference() is None
"""


def test_the_seeds_example_runs_with_its_imports_changed(tmp_path):
    """The example of "Creating Additional Experiments"; only the imports, the folder and the batch size are ours."""
    write_mnist(tmp_path / "data", samples=48)
    script = tmp_path / "script.py"
    script.write_text(SEED_SCRIPT)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(support.free_port())]
    command = [*launch, str(script), str(tmp_path / "data")]
    (program,) = support.run_programs([command], folder=tmp_path, timeout=200, preload=TRAINERS)
    assert program.status == 0, program.errors
    assert "valid (1/1) accuracy01" in program.output
    assert program.output.count("train (1/1)") == 1
    assert (tmp_path / "logs" / "checkpoints" / "model.best.pth").exists()


# Graphs by chance, sampled neighbourhoods, the graph network, and its example on two sites


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
    refuses(
        (lambda: net(trees[:, :8]), r"trees must be of shape \(batch, 9\), got \(2, 8\)"),
        (lambda: GCN(9, 0), "must be at least 1"),
    )


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


@pytest.mark.parametrize("how", ["hub", "torchrun"])
def test_hospitals_segment_volumes(tmp_path, how):
    pytest.importorskip("ignite")
    pytest.importorskip("monai")
    flags = ["--epochs", "2", "--volumes", "2", "--size", "16", "--modes", "rankdad", "--out", str(tmp_path)]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(support.free_port())]
    script = [str(ROOT / "examples" / "two_hospitals_segmentation.py"), *flags]
    (only,) = support.run_programs([script if how == "hub" else [*launch, *script]], timeout=300)
    assert only.status == 0, only.errors
    first, second = ((tmp_path / "rankdad" / name / "log.jsonl").read_text() for name in ("berlin", "lyon"))
    assert first == second  # Dice of all volumes, and as many bytes
    assert all(list((tmp_path / "rankdad" / name).glob("*.pt")) for name in ("berlin", "lyon"))
    if how == "hub":
        assert re.search(r"rankdad: Dice 0\.\d+ after 0\.\d+ MB", only.output)
        assert (tmp_path / "segmentation.png").exists()
