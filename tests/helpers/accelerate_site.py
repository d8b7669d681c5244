"""Programs of the tests of Accelerate: a site that trains and compares itself with one process, and one over a hub.

Run as ``accelerate_site.py`` by a launcher; as ``accelerate_site.py --fork``, which starts two processes; or as
``accelerate_site.py CASE``: trains over a hub, where the case is JSON, see `elastic_site.Case`.
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
from elastic_site import Case, last_step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dadplug.accelerate import Accelerator


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


def train_over_hub(case: Case) -> None:
    """Train on data of this site, and write a line for each step."""
    local = {"every": 3, "overlap": False} if case.mode == "localsgd" else {}
    accelerator = Accelerator(cpu=True, mode=case.mode, kit=case.kit, min_sites=1, timeout=200, **local)
    site, model = accelerator.process_index, build()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    loader = DataLoader(TensorDataset(rows(10 + 5 * site, seed=site)), 4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    reduction = model.reduction
    assert sum(len(inputs) for (inputs,) in loader) == 10 + 5 * site  # which is not divided
    batches = (inputs for _ in itertools.count() for (inputs,) in loader)
    with Path(case.folder, "log.jsonl").open("a", buffering=1) as file:
        while model.steps < last_step(case, model.steps):
            before = getattr(reduction, "agreements", 0)
            if model.steps == case.leave:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.backward(model(next(batches)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            line = {"agreed": getattr(reduction, "agreements", 1) > before} if local else {}
            line |= {"step": model.steps, "present": reduction.present_sites, "lr": scheduler.get_last_lr()[0]}
            print(json.dumps(line | {"digest": hashlib.sha256(content).hexdigest()}), file=file)
            time.sleep(case.pause)
        model.make_equal()
        assert reduction.first_difference() is None


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--fork"]:
        accelerate.debug_launcher(compare, num_processes=2)
    elif sys.argv[1:]:
        train_over_hub(Case(**json.loads(sys.argv[1])))
    else:
        compare()
