"""A process of a site for benchmarks/elastic_local_steps.py: takes local steps on its data, and logs them."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from returning_site import Order, SiteCase, accuracy
from torch import nn

import dadplug


@dataclass(frozen=True, kw_only=True)
class Case(SiteCase):
    """What a process has to do whose site takes local steps.

    Attributes:
        until: time of the monotonic clock at which the site takes no more steps.
        options: options of the local steps.
    """

    until: float
    options: dict[str, Any] = field(default_factory=dict)


def train(case: Case) -> None:
    """Train from the step at which this site joins until the time is over.

    The log gets a line of JSON for each step, with its number and time, and one for each agreement.
    """
    model, optimizer, (images, labels, test_images, test_labels) = case.begin()
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
