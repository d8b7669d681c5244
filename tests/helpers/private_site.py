"""One site of the tests of private layers: what it sends is searched for the values of these.

Run as ``private_site.py CASE``, where the case is JSON, see `Case`. Writes a line of JSON for each step.
"""

import json
import os
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from elastic_site import last_step
from torch import nn

import dadplug
from dadplug.errors import MismatchError
from dadplug.hub.secure.secure_socket import SecureSocket

SENTINEL, MANY = 1234567.0, 64
PATTERN = struct.pack("<f", SENTINEL) * 8


@dataclass(frozen=True)
class Case:
    """One process of a site.

    Attributes:
        kit: folder of its kit.
        folder: folder for what it writes.
        private: the option.
        way: mode of a reduction; "ddp" for a wrapped model, "local" for local steps, or "lora" for a reduction of
            adapters beside a frozen model.
        backbone: seed of the frozen model.
        leave: step after which the process ends without a word; -1 for never.
        steps: most steps.
        stop: file that contains the least number of steps, once it exists.
    """

    kit: str
    folder: str
    private: tuple[str, ...] = ()
    way: str = "dsgd"
    backbone: int = 0
    leave: int = -1
    steps: int = 1 << 30
    stop: str = ""


class Net(nn.Module):
    """A shared body, a normalisation, and a head that has a mark of its site."""

    def __init__(self, site: int) -> None:
        super().__init__()
        torch.manual_seed(site)
        self.body, self.norm, self.head = nn.Linear(12, 96), nn.BatchNorm1d(96), nn.Linear(96, 5)
        self.mark = nn.Parameter(torch.full((1,), float(site)))

    def forward(self, inputs):
        return self.head(torch.relu(self.norm(self.body(inputs)))) + 0.0 * self.mark


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, width: int = 1024, rank: int = 16) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, inputs):
        return torch.tanh(self.frozen(inputs) + self.up(self.down(inputs)))


class Traffic:
    """Bytes that this site sends and receives, apart from encryption, and how often these contain a pattern."""

    def __init__(self, pattern: bytes = PATTERN) -> None:
        self.sent = self.received = self.found = 0
        write, recv_into = SecureSocket.write, SecureSocket.recv_into

        def writing(connection: SecureSocket, content: bytes) -> None:
            self.sent += len(memoryview(content).cast("B"))
            self.found += bytes(content).count(pattern)
            write(connection, content)

        def receiving(connection: SecureSocket, buffer: memoryview) -> int | None:
            count = recv_into(connection, buffer)
            self.received += count or 0
            return count

        SecureSocket.write, SecureSocket.recv_into = writing, receiving


@torch.no_grad()
def plant(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Put the sentinel into private parameters, buffers and their momentum."""
    tensors = [model.head.weight, model.norm.weight, model.norm.running_mean]
    tensors += [optimizer.state[each]["momentum_buffer"] for each in tensors[:2] if optimizer.state.get(each)]
    for each in tensors:
        each.view(-1)[:MANY] = SENTINEL


def train(case: Case) -> None:
    traffic = Traffic()
    dadplug.connect(kit=case.kit, timeout=200)
    site = "ab".index(Path(case.kit).name)
    torch.manual_seed(case.backbone)
    lora = case.way == "lora"
    model = nn.Sequential(Adapted(), Adapted()) if lora else Net(site)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-9, momentum=0.9)
    if not lora:
        plant(model, optimizer)
    options = {"private": case.private, "min_sites": 1, "state": {"optimizer": optimizer}, "timeout": 200}
    options |= {"wire": "fp32"}
    called = model
    with (Path(case.folder) / "log.jsonl").open("a", buffering=1) as log:
        try:
            if case.way == "local":
                exchange = dadplug.LocalSGD(model, optimizer, every=2, **options)
            elif case.way == "ddp":
                called = dadplug.DistributedDataParallel(model, "dsgd", compare_every=2, **options)
                exchange = called.reduction
            else:
                mode = "rankdad" if lora else case.way
                exchange = dadplug.GradientReduction(model, mode, compare_every=2, **options)
        except MismatchError as error:
            log.write(json.dumps({"error": str(error)}) + "\n")
            return
        joined = {"sent": traffic.sent, "received": traffic.received}
        while (step := exchange.steps if case.way == "local" else exchange.step) < last_step(case, step):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + site)
            inputs = torch.randn(7, 1024 if lora else 12, generator=generator)
            outputs = called(inputs)
            (outputs.square().mean() if lora else nn.functional.cross_entropy(outputs, inputs.argmax(1) % 5)).backward()
            if not lora:
                plant(model, optimizer)
            if case.way == "local":
                exchange.step()
            else:
                exchange.synchronize() if case.way != "ddp" else None
                optimizer.step()
                if not step % 3:
                    exchange.average_buffers()
                    assert exchange.first_difference() is None
            if not lora:
                plant(model, optimizer)
            line = {"step": step, "found": traffic.found, "sent": traffic.sent, "joined": joined}
            if not lora:
                line["mark"] = float(model.mark)
                line["norm"] = float(model.norm.running_var.sum())
            log.write(json.dumps(line) + "\n")
            if step == case.leave:
                os._exit(3)
            time.sleep(0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Case(**json.loads(sys.argv[1])))
