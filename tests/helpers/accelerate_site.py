"""Programs of the tests of Accelerate: a site that trains and compares itself with one process, and one over a hub.

Run as ``accelerate_site.py`` by a launcher; as ``accelerate_site.py --fork``, which starts two processes; or as
``accelerate_site.py KIT FOLDER LEAVES``: trains over a hub until the file ``end`` in the folder says so, and kills
itself in step LEAVES unless that is negative.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dadplug.accelerate import Accelerator

MORE = 8  # steps after the return of a site


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare() -> None:
    """Train at two sites, and compare the parameters with those of one process."""
    accelerator = Accelerator(cpu=True, mode="dad", timeout=200)
    assert accelerator.num_processes == 2
    model, loader = build(accelerator.process_index), DataLoader(TensorDataset(rows(32)), 4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for (inputs,) in loader:
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(inputs)
    alone = build()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for parts in zip(*model.reduction.gather_objects(seen)):
        alone(torch.cat(parts)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert float((p - q).detach().norm() / q.detach().norm()) < 1e-10
    line = f"equal at {accelerator.process_index} after {len(seen)} steps\n"
    os.write(sys.stdout.fileno(), line.encode())  # in one piece: processes share the output
    accelerator.end_training()


def train_over_hub(kit: str, folder: Path, leaves: int, mode: str = "rankdad") -> None:
    """Train on data of this site, and write a line for each step."""
    local = {"every": 3, "overlap": False} if mode == "localsgd" else {}
    accelerator = Accelerator(cpu=True, mode=mode, kit=kit, min_sites=1, timeout=200, **local)
    site, model = accelerator.process_index, build()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader = DataLoader(TensorDataset(rows(10 + 5 * site, seed=site)), 4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    reduction, end = model.reduction, folder / "end"
    assert sum(len(inputs) for (inputs,) in loader) == 10 + 5 * site  # which is not divided
    batches = (inputs for _ in itertools.count() for (inputs,) in loader)
    missed = False
    with (folder / f"{site}-{model.steps}.jsonl").open("w") as file:
        while not (end.exists() and model.steps >= int(end.read_text())):
            before = getattr(reduction, "agreements", 0)
            if model.steps == leaves:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.backward(model(next(batches)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            line = {"agreed": getattr(reduction, "agreements", 1) > before} if local else {}
            line |= {"step": model.steps, "present": reduction.present_sites, "lr": scheduler.get_last_lr()[0]}
            print(json.dumps(line | {"digest": hashlib.sha256(content).hexdigest()}), file=file, flush=True)
            missed |= len(reduction.present_sites) == 1
            if len(reduction.present_sites) == 1:
                time.sleep(0.05)
            elif missed and not end.exists():
                part = folder / f"part-{site}"  # both sites may come here in the same step
                part.write_text(str(model.steps + MORE))
                part.rename(end)
        model.make_equal()
        assert reduction.first_difference() is None


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--fork"]:
        accelerate.debug_launcher(compare, num_processes=2)
    elif sys.argv[1:]:
        train_over_hub(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    else:
        compare()
