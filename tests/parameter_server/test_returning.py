"""A site that is killed in mid-training, and returns from the state of another one and the log."""

from __future__ import annotations

import hashlib
import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from server_log import keys, recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dadplug

SAMPLES, PHASES = 96, 3


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SAMPLES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def made(rejoin: str | None = None, **more) -> tuple[nn.Module, dadplug.ParameterServer]:
    model, optimizer = network()
    options = {"mode": "rankdad", "rank": 2, "staleness": 3, "deal": "shared", "timeout": 100.0} | more
    state = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1000)}
    return model, dadplug.ParameterServer(model, optimizer, rejoin=rejoin, state=state, **options)


def train(model: nn.Module, server: dadplug.ParameterServer, folder: Path, process: str, lost: int) -> list:
    """Train in the phases that are left; return the log, with what each of this process's contributions was of."""
    data = TensorDataset(torch.eye(SAMPLES), torch.arange(SAMPLES))
    loader = server.loader(DataLoader(data, batch_size=4, shuffle=True))
    log = recorded(server)
    with (folder / process).open("a", buffering=1) as file:
        for phase in range(server.phases, PHASES):
            for number, (inputs, indices) in enumerate(loader):
                file.write(f"{phase} " + " ".join(map(str, indices.tolist())) + "\n")
                if process == "back" and phase == PHASES - 1:
                    (folder / "working").touch()
                nn.functional.cross_entropy(model(inputs), indices % 3).backward()
                if process == str(lost) and phase == 1 and number == 2:
                    (folder / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if (
                    process not in ("back", str(lost)) and number == 1 and phase > 0
                ):  # so that both processes have batches
                    wait_for(folder / ("killed" if phase == 1 else "working"))
                if process == str(2 - lost // 2) and phase == 1 and number == 1:  # not the one whose state is taken
                    wait_for(folder / "returned")
                server.step()
            server.finish()
    return keys(log)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def summary(model: nn.Module, server: dadplug.ParameterServer) -> tuple:
    moments = server._optimizer.optimizer.state_dict()["state"].values()
    tensors = [*model.state_dict().values(), *(value for each in moments for value in each.values())]
    state = [value.numpy().tobytes() for value in tensors]
    if (norms := server._replica._norms) is not None:
        committed = norms.state_dict()
        assert sorted(committed) == [0, 1, 2]
        state += [str(age).encode() + packed["1"].numpy().tobytes() for _, (age, packed) in sorted(committed.items())]
    return hashlib.sha256(b"".join(state)).hexdigest(), server.version, server.phases


def trains(folder: str, options: dict, lost: int) -> tuple:
    rank = dist.get_rank()
    model, server = made(**options)
    (Path(folder) / f"address{rank}").write_text(server.return_address)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = train(model, server, Path(folder), str(rank), lost)
    found = summary(model, server)
    first, *others = [each for each in range(3) if each != lost]
    if rank == first:  # the sequencer's process ends last
        for other in (*others, "back"):
            wait_for(Path(folder) / f"done{other}")
    (Path(folder) / f"done{rank}").touch()
    server.detach()
    return found, log, [str(each.message) for each in caught]


def returns(folder: str, options: dict, lost: int) -> tuple:
    folder = Path(folder)
    wait_for(folder / f"address{lost}")
    address = (folder / f"address{lost}").read_text()
    with pytest.raises(ValueError, match="rejoin should be the return_address"):
        made("nowhere")
    with pytest.raises(ValueError, match="unknown role 'server'"):
        dadplug.ParameterServer(*network(), role="server", rejoin=address)
    wait_for(folder / "killed")
    with pytest.raises(dadplug.SiteError, match="cannot be reached"):
        made(f"{address.rsplit('/', 2)[0]}/{'0' * 32}/{lost}")
    with pytest.raises(dadplug.MismatchError, match=f"option staleness is 3 at the other sites and 1 at site {lost}"):
        made(address, **options | {"staleness": 1})
    model, server = made(address, **options)
    assert server.phases == 1
    assert server.version > 0
    (folder / "returned").touch()
    with pytest.raises(RuntimeError, match="this site has returned into a training"):
        server.gather_objects(1)
    log = train(model, server, folder, "back", lost)
    found = summary(model, server)
    (folder / "doneback").touch()
    server.detach()
    return found, log


def test_a_killed_site_returns_and_has_the_bits_of_the_others(tmp_path):
    check_return(tmp_path, sync_batchnorm=True)


def check_return(tmp_path: Path, kits: Sequence[Path] = (), lost: int = 2, **options) -> None:
    with support.Sites(3, kits=kits) as group, support.Sites(1) as other:
        group.start(trains, str(tmp_path), options, lost)
        other.start(returns, str(tmp_path), options, lost)
        outcomes = group.outcomes()
        killed = outcomes.pop(lost)
        first, second = outcomes
        (back,) = other.outcomes()
    assert killed.kind == "ended", killed.value
    assert [each.kind for each in (first, second, back)] == ["ok"] * 3, [first.value, second.value, back.value]
    assert first.value[0] == second.value[0] == back.value[0]
    assert first.value[0][2] == PHASES
    log = first.value[1]
    assert second.value[1] == log
    assert log[-len(back.value[1]) :] == back.value[1]
    assert any(f"site {lost}" in each and "has left, and the others go on" in each for each in first.value[2])
    assert len(set(log)) == len(log)
    lines = [[line.split() for line in (tmp_path / name).read_text().splitlines()] for name in ("0", "1", "2", "back")]
    numbers = sorted(number for site, number in log if site == lost)
    assert numbers == list(range(len(numbers)))  # each number once, over both processes
    by_number = {(site, number): line for site in {0, 1, 2} - {lost} for number, line in enumerate(lines[site])}
    of_lost = lines[lost][: len(numbers) - len(lines[3])] + lines[3]
    by_number |= {(lost, number): line for number, line in enumerate(of_lost)}
    assert lines[3]
    for phase in range(PHASES):
        used = [int(index) for key in log for index in by_number[key][1:] if by_number[key][0] == str(phase)]
        assert sorted(used) == list(range(SAMPLES))


def halts(folder: str, killed: bool) -> tuple:
    """Train with a checkpoint after each phase, and lose site 0, or go on from the last checkpoint."""
    rank, path = dist.get_rank(), Path(folder) / f"checkpoint{dist.get_rank()}.pt"
    model, optimizer = network()
    kept = torch.load(path, weights_only=False) if path.exists() else None
    if kept is not None:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    server = dadplug.ParameterServer(model, optimizer, rank=2, staleness=2, error_feedback=True, timeout=100.0)
    if kept is not None:
        server.load_state_dict(kept["server"])
    phases = kept["phases"] if kept else 0
    refused = ""
    try:
        for phase in range(phases, 3):
            for step in range(4):
                indices = torch.arange(8 * rank + 4 * (step % 2), 8 * rank + 4 * (step % 2) + 4)
                nn.functional.cross_entropy(model(torch.eye(SAMPLES)[indices]), indices % 3).backward()
                if killed and rank == 0 and (phase, step) == (1, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                server.step()
            server.finish()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "server": server.state_dict()}
            torch.save(state | {"phases": phase + 1}, path)
    except dadplug.SiteError as error:
        refused = str(error)
    server.detach()
    return refused, phases, summary(model, server)


def test_after_the_loss_of_site_0_all_start_again_from_the_last_checkpoint(tmp_path):
    with support.Sites(2) as group:
        group.start(halts, str(tmp_path), True)
        first, second = group.outcomes()
    assert first.kind == "ended"
    assert second.kind == "ok", second.value
    assert second.value[0].startswith("site 0")
    assert "it has the sequencer, without which training cannot go on" in second.value[0]
    with support.Sites(2) as group:
        first, second = group.run(halts, str(tmp_path), False)
    assert first == second
    assert first[:2] == ("", 1)
    kept = torch.load(tmp_path / "checkpoint0.pt", weights_only=False)
    assert (kept["phases"], kept["server"]["version"]) == (3, first[2][1])  # versions go on from the checkpoint's
