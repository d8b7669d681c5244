"""A process of a site for benchmarks/elastic_local_steps.py: takes local steps on its data, and logs them."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import when they are made: a site returns faster with it
from returning_site import MODELS, Order, accuracy
from torch import nn

import dadplug


@dataclass(frozen=True)
class Case:
    """What a process of a site has to do.

    Attributes:
        kit: folder of its kit.
        log: file for its log; messages go to the same path with ".err".
        data: file with images and labels for training and test.
        sites: number of sites, which divide the data.
        until: time of the monotonic clock at which the site takes no more steps.
        batch_size: samples of a step.
        model: name of the model, see `MODELS` of returning_site.
        seed: seed of the model and of the order of the data.
        pace: seconds to wait after each step.
        options: options of the local steps.
    """

    kit: str
    log: str
    data: str
    sites: int
    until: float
    batch_size: int
    model: str
    seed: int
    pace: float
    options: dict[str, Any] = field(default_factory=dict)


def train(case: Case) -> None:
    """Train from the step at which this site joins until the time is over.

    The log gets a line of JSON for each step, with its number and time, and one for each agreement.
    """
    os.dup2(os.open(f"{case.log}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), 2)
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = torch.load(case.data, mmap=True)
    torch.manual_seed(case.seed)
    dadplug.connect(kit=case.kit)
    model = MODELS[case.model]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    local = dadplug.LocalSGD(model, optimizer, state={"optimizer": optimizer}, **case.options)
    order = Order(len(labels), case.sites, local.site_rank, case.batch_size, case.seed)
    with Path(case.log).open("a", buffering=1) as file:

        def write(**line: Any) -> None:
            file.write(json.dumps(line | {"pid": os.getpid()}) + "\n")

        write(joined=local.steps)
        own = local.steps  # number of this site's batch: those of a site that is slower are other ones
        while time.monotonic() < case.until:
            before, rows = local.agreements, order.batch(max(own, local.steps))
            own = max(own, local.steps) + 1
            write(batch=own - 1, rows=len(rows), after=before)
            start = time.monotonic()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            local.step()
            seconds = time.monotonic() - start
            write(seconds=seconds)
            if local.agreements != before:
                write_agreement(local, write)
            time.sleep(case.pace)
        before = local.agreements
        local.finish()
        if local.agreements != before:
            write_agreement(local, write)
        score, values = accuracy(model, test_images, test_labels), [*model.parameters(), *model.buffers()]
        write(accuracy=score, digest=digest(values), sent=local.traffic.total_bytes_sent)


def write_agreement(local: dadplug.LocalSGD, write: Any) -> None:
    """Write a line for an agreement: who took part in it, what is in the model since, and its bits."""
    agreed = digest(local._agreement.agreed.values.values())
    line = {"agreement": local.agreements, "present": local.present_sites, "agreed": agreed}
    write(**line, contributions=local.contributions, here=local.site_rank in local.present_sites)


def digest(tensors: Any) -> str:
    """Return a digest of the bits of tensors."""
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()[:16]
