"""Programs under torchrun whose processes are killed and started again, also with another number of processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import support
import torch

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import dadplug

torch.set_num_threads(1)
folder, killed = Path(sys.argv[1]), json.loads(sys.argv[2])
dadplug.connect(timeout=200)
torch.manual_seed(0)
model, data = nn.Linear(4, 2), TensorDataset(torch.arange(41), torch.randn(41, 4), torch.randn(41, 2))
reduction = dadplug.GradientReduction(model, mode="dsgd", timeout=200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = dadplug.ElasticDataLoader(data, batch_size=4, shuffle=True)
state = {"model": model, "optimizer": optimizer, "reduction": reduction}
rank, first = reduction.site_rank, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
log = open(folder / f"batches-{os.environ['RUN']}{'' if first else '-again'}-{rank}", "w")
for epoch in dadplug.remaining_epochs_until(3, checkpoint=folder / "run.ckpt", state=state, every=2, timeout=200):
    stats = dadplug.Accumulator()
    for batch, (numbers, inputs, targets) in enumerate(loader):
        if [epoch, batch, rank] == killed and first:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        reduction.synchronize()
        optimizer.step()
        print(json.dumps([epoch, numbers.tolist()]), file=log, flush=True)
        for number in numbers.tolist():
            stats[number] += 1
    reduction.join(optimizer.step)
    with stats.synchronized():
        (folder / f"counts-{epoch}-{rank}").write_text(json.dumps(sorted(stats.items())))
assert reduction.first_difference() is None
torch.save(model.state_dict(), folder / f"model-{rank}.pt")
"""
ONCE = [[number, 1] for number in range(41)]


def run(folder: Path, processes: int, *options: str, killed: list[int] | None = None, name: str = "one") -> int:
    """Run the program under torchrun; return the exit status."""
    folder.mkdir(exist_ok=True)
    program = folder / "train.py"
    program.write_text(PROGRAM)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(support.free_port()), *options, str(program), str(folder), json.dumps(killed)]
    (finished,) = support.run_programs([command], folder=folder, env={"RUN": name})
    assert finished.status == 0 or killed is not None, finished.errors
    return finished.status


def batches(folder: Path, name: str, processes: int, epoch: int) -> list[list[list[int]]]:
    """Return the batches that each process has trained on in an epoch."""
    found = []
    for rank in range(processes):
        lines = map(json.loads, (folder / f"batches-{name}-{rank}").read_text().splitlines())
        found.append([numbers for each, numbers in lines if each == epoch])
    return found


def flat(sites: list[list[list[int]]]) -> list[int]:
    return [number for site in sites for batch in site for number in batch]


def counts(folder: Path, epoch: int, rank: int) -> list[list[int]]:
    return json.loads((folder / f"counts-{epoch}-{rank}").read_text())


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process_and_the_model_ends_equal_to_the_bit(tmp_path):
    run(tmp_path / "whole", 2)
    folder = tmp_path / "killed"
    assert run(folder, 2, "--max-restarts", "1", killed=[1, 3, 1]) == 0
    one, other = (torch.load(each / "model-0.pt") for each in (tmp_path / "whole", folder))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["weight"].abs().sum() > 0
    for epoch in range(3):
        assert counts(folder, epoch, 0) == counts(folder, epoch, 1) == ONCE
    before, after = (batches(folder, name, 2, 1) for name in ("one", "one-again"))
    assert [len(site) for site in before] == [3, 3]
    kept = [site[:2] for site in before]  # the checkpoint was written after two batches
    assert sorted(flat(kept) + flat(after)) == list(range(41))
    assert flat(batches(folder, "one-again", 2, 0)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(3, 2), (1, 3)])
def test_another_number_of_processes_goes_on(tmp_path, first, second):
    assert run(tmp_path, first, killed=[1, 3, 0], name="one") != 0
    assert not (tmp_path / "model-0.pt").exists()
    run(tmp_path, second, name="two")
    for epoch in (1, 2):
        assert all(counts(tmp_path, epoch, rank) == ONCE for rank in range(second))
    assert sorted(flat(batches(tmp_path, "one", first, 0))) == list(range(41))
    before, after = batches(tmp_path, "one", first, 1), batches(tmp_path, "two", second, 1)
    kept = [site[:2] for site in before]
    assert len(flat(kept)) == first * 8
    assert sorted(flat(kept) + flat(after)) == list(range(41))
    assert flat(batches(tmp_path, "two", second, 0)) == []
    assert sorted(flat(batches(tmp_path, "two", second, 2))) == list(range(41))
