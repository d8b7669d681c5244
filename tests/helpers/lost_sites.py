"""One site of the tests of lost sites: connects, trains, saves, and on the way kills or stops itself if it is to.

Run as ``lost_sites.py CASE RANK PORT FOLDER SPARED``, where the case is JSON.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dadplug
from dadplug.exchange import rendezvous
from dadplug.step.model_sync import sameness

CONNECTING = 60.0  # seconds


@dataclass(frozen=True)
class Case:
    """One run of a group of sites.

    Attributes:
        phase: where the victim is hit.
        how: the signal: ``"KILL"`` or ``"STOP"``.
        victim: its rank.
        hierarchy: the sites of each node, or None.
        mode: the method.
        timeout: seconds.
    """

    phase: str
    how: str
    victim: int
    hierarchy: list[list[int]] | None
    mode: str
    timeout: float

    @property
    def world_size(self) -> int:
        return sum(map(len, self.hierarchy)) if self.hierarchy else 3


def site(case: Case, rank: int, port: int, folder: Path, spared: bool = False) -> None:
    """Run one site; writes into the folder what error it got, and when."""

    def hit(phase: str) -> None:
        if rank == case.victim and phase == case.phase and not spared:
            (folder / "hit.part").write_text(str(time.monotonic()))
            os.replace(folder / "hit.part", folder / "hit")
            os.kill(os.getpid(), getattr(signal, f"SIG{case.how}"))

    def hit_before(module: object, name: str, phase: str) -> None:
        function = getattr(module, name)

        def hitting(*args: object, **options: object) -> object:
            hit(phase)
            return function(*args, **options)

        setattr(module, name, hitting)

    hit_before(rendezvous.RollCall, "_claim", "claim")
    hit_before(rendezvous.RollCall, "_follow" if rank else "_lead", "roll call")
    hit_before(dist, "init_process_group", "group")
    hit_before(sameness, "broadcast_model", "broadcast")
    result = {"error": None, "kind": None}
    try:
        train(case, rank, port, folder, hit)
    except BaseException as error:
        result = {"error": str(error), "kind": type(error).__name__}
    result["when"] = time.monotonic()
    (folder / f"{rank}.part").write_text(json.dumps(result))
    os.replace(folder / f"{rank}.part", folder / f"{rank}.json")


def train(case: Case, rank: int, port: int, folder: Path, hit) -> None:
    in_rendezvous = case.phase in ("claim", "roll call", "group")
    dadplug.connect(
        rank, case.world_size, f"tcp://127.0.0.1:{port}", timeout=case.timeout if in_rendezvous else CONNECTING
    )
    if in_rendezvous:
        dist.barrier()
        return
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    reduction = dadplug.GradientReduction(model, mode=case.mode, timeout=case.timeout, hierarchy=case.hierarchy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        hit(f"forward {step}")
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        hit(f"synchronize {step}")
        reduction.synchronize()
        optimizer.step()
        hit(f"average {step}")
        reduction.average_buffers()
        hit(f"gather {step}")
        states = reduction.gather_objects(reduction.state_dict())
        if rank == 0:
            content = {"step": step, "model": model.state_dict(), "states": states}
            torch.save(content, folder / "last.part")
            os.replace(folder / "last.part", folder / "last.ckpt")


if __name__ == "__main__":
    case = Case(**json.loads(sys.argv[1]))
    site(case, int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), spared=sys.argv[5] == "True")
