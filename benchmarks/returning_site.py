"""A process of a site for benchmarks/elastic.py: trains on its part of the data, and writes a log of its steps."""

from __future__ import annotations

import ctypes
import json
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # which optimizers import when they are made: a site returns faster with it
from torch import nn

import dadplug
from dadplug.models import MNISTNet

NETWORK = 0x40000000  # CLONE_NEWNET
LOOK = 20  # steps between two digests of the parameters


def small() -> nn.Module:
    """Return a network of 110,000 parameters, with batch normalisation."""
    first = (nn.Flatten(), nn.Linear(28 * 28, 128), nn.BatchNorm1d(128), nn.ReLU())
    return nn.Sequential(*first, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


MODELS = {"small": small, "mnistnet": MNISTNet}


@dataclass(frozen=True, kw_only=True)
class SiteCase:
    """What a process of a site has to do, whatever the sites exchange.

    Attributes:
        kit: folder of its kit.
        log: file for its log; messages go to the same path with ".err".
        data: file with images and labels for training and test.
        sites: number of sites, which divide the data.
        batch_size: samples of a site in a step.
        model: name of the model, see `MODELS`.
        seed: seed of the model and of the order of the data.
        pace: seconds to wait after each step.
        space: name of the network namespace of the site; empty for none of its own.
    """

    kit: str
    log: str
    data: str
    sites: int
    batch_size: int
    model: str
    seed: int
    pace: float
    space: str = ""

    def begin(self) -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
        """Connect this process; return the model, its optimizer, and images and labels for training and test."""
        os.dup2(os.open(f"{self.log}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), 2)
        if self.space:
            enter(self.space)
        torch.set_num_threads(1)
        data = torch.load(self.data, mmap=True)
        torch.manual_seed(self.seed)
        dadplug.connect(kit=self.kit)
        model = MODELS[self.model]()
        return model, torch.optim.Adam(model.parameters(), lr=1e-3), data


@dataclass(frozen=True, kw_only=True)
class Case(SiteCase):
    """What a process has to do whose site exchanges gradients.

    Attributes:
        steps: number of steps of the run.
        mode: the method.
        site_timeout: option of the reduction.
    """

    steps: int
    mode: str
    site_timeout: float


@dataclass(frozen=True)
class Order:
    """Order of a site's samples: each once an epoch, by the number of the step alone.

    Attributes:
        samples: number of training samples of all sites.
        sites: number of sites.
        rank: number of the site.
        batch_size: samples of a site in a step.
        seed: seed of the order.
    """

    samples: int
    sites: int
    rank: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of full batches that every site has."""
        return self.samples // self.sites // self.batch_size

    def epoch(self, number: int) -> torch.Tensor:
        """Return the indices of this site's samples in an epoch, in order."""
        own = torch.arange(self.rank, self.samples, self.sites)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {self.rank} {number}".encode()))
        chosen = torch.randperm(len(own), generator=generator)[: self.steps_per_epoch * self.batch_size]
        return own[chosen]

    def batch(self, step: int) -> torch.Tensor:
        """Return the indices of this site's samples in a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self.epoch(epoch)[place * self.batch_size :][: self.batch_size]


def enter(space: str) -> None:
    """Move this process to a network namespace, before it has started threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as file:
        if libc.setns(file.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), f"setns to {space}")


def digest(model: nn.Module) -> int:
    """Return a check sum of the parameters."""
    return zlib.crc32(torch.cat([each.detach().reshape(-1) for each in model.parameters()]).numpy().tobytes())


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of samples that a model classifies correctly."""
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(-1) for part in images.split(500)])
    return float((found == labels).double().mean())


def train(case: Case) -> None:
    """Train from the step at which this site joins to the last one.

    The log gets a line of JSON before each step, with its samples, and one after it.
    """
    model, optimizer, (images, labels, test_images, test_labels) = case.begin()
    reduction = dadplug.GradientReduction(
        model, case.mode, min_sites=1, site_timeout=case.site_timeout, state={"optimizer": optimizer}
    )
    order = Order(len(labels), case.sites, reduction.site_rank, case.batch_size, case.seed)
    with Path(case.log).open("a", buffering=1) as log:
        while (step := reduction.step) < case.steps:
            rows = order.batch(step)
            log.write(json.dumps({"step": step, "rows": rows.tolist()}) + "\n")
            start = time.monotonic()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            reduction.synchronize()
            optimizer.step()
            end = time.monotonic()
            line = {"step": step, "present": reduction.present_sites, "start": start, "end": end}
            if step % LOOK == LOOK - 1:
                line["digest"] = digest(model)
            log.write(json.dumps(line) + "\n")
            time.sleep(case.pace)
        reduction.average_buffers()
        log.write(json.dumps({"accuracy": accuracy(model, test_images, test_labels), "digest": digest(model)}) + "\n")
    reduction.detach()
