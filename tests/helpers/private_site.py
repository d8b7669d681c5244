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
from typing import Any

import torch
from elastic_site import last_step
from torch import nn

import dadplug
from dadplug.errors import MismatchError
from dadplug.hub.secure.secure_socket import SecureSocket

SENTINEL, MANY = 1234567.0, 64


@dataclass(frozen=True)
class Case:
    """One process of a site.

    Attributes:
        kit: folder of its kit.
        folder: folder for what it writes.
        private: the option.
        way: mode of a reduction; "ddp" for a wrapped model, "local" for local steps, "server" for a parameter server,
            "lora" for a reduction of adapters beside a frozen model, or "lora server" for a server of these; with
            "adamw" in it, that optimizer trains, else SGD with momentum.
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
    """Bytes that this site sends and receives, apart from encryption, and how often it sends the sentinel.

    Args:
        double: whether it is in double precision; else it is looked for also as the state of a site that joins has it,
            which contains the lower 16 bits of all numbers first.
    """

    def __init__(self, double: bool = False) -> None:
        self.sent = self.received = self.found = 0
        whole = struct.pack("<d" if double else "<f", SENTINEL)
        patterns = (whole * 8,) if double else (whole * 8, whole[:2] * 8)
        write, recv_into = SecureSocket.write, SecureSocket.recv_into

        def writing(connection: SecureSocket, content: bytes) -> None:
            self.sent += len(memoryview(content).cast("B"))
            self.found += sum(map(bytes(content).count, patterns))
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


def address_of(case: Case) -> Path:
    """Return the file with the address of a parameter server, which a process leaves to the next one of its site."""
    return Path(case.folder) / "address"


def build(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, nn.Module]:
    """Return what exchanges the model's gradients or parameters, and the model to call."""
    options = {"private": case.private, "timeout": 200, "wire": "fp32"}
    lora, address = "lora" in case.way, address_of(case)
    if "server" in case.way:
        rejoin = address.read_text() if address.exists() else None
        mode = "rankdad" if lora else "dsgd"
        server = dadplug.ParameterServer(model, optimizer, mode, staleness=2, rejoin=rejoin, **options)
        address.write_text(server.return_address)
        return server, model
    options |= {"min_sites": 1, "state": {"optimizer": optimizer}}
    if case.way == "local":
        return dadplug.LocalSGD(model, optimizer, every=2, **options), model
    if case.way == "ddp":
        wrapped = dadplug.DistributedDataParallel(model, "dsgd", compare_every=2, **options)
        return wrapped.reduction, wrapped
    return dadplug.GradientReduction(model, "rankdad" if lora else case.way, compare_every=2, **options), model


def train(case: Case) -> None:
    traffic = Traffic()
    if not address_of(case).exists():
        dadplug.connect(kit=case.kit, timeout=200)
    site = "ab".index(Path(case.kit).name)
    torch.manual_seed(case.backbone)
    lora, way = "lora" in case.way, case.way.split()[-1]
    model = nn.Sequential(Adapted(), Adapted()) if lora else Net(site)
    trained = [each for each in model.parameters() if each.requires_grad]
    sgd = torch.optim.SGD(trained, lr=1e-9, momentum=0.9)
    optimizer = torch.optim.AdamW(trained, lr=1e-9) if "adamw" in case.way else sgd
    if not lora:
        plant(model, optimizer)
    with (Path(case.folder) / "log.jsonl").open("a", buffering=1) as log:
        try:
            exchange, called = build(case, model, optimizer)
        except MismatchError as error:
            log.write(json.dumps({"error": str(error)}) + "\n")
            return
        joined = {"sent": traffic.sent, "received": traffic.received}

        def write(step: int) -> None:
            line = {"step": step, "found": traffic.found, "sent": traffic.sent, "joined": joined}
            if not lora:
                line |= {"mark": float(model.mark), "norm": float(model.norm.running_var.sum())}
                line["body"] = float(model.body.weight.double().square().sum())
            log.write(json.dumps(line) + "\n")

        counter = {"local": "steps", "server": "version"}.get(way, "step")
        while (step := getattr(exchange, counter)) < last_step(case, step):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + site)
            inputs = torch.randn(7, 1024 if lora else 12, generator=generator)
            outputs = called(inputs)
            (outputs.square().mean() if lora else nn.functional.cross_entropy(outputs, inputs.argmax(1) % 5)).backward()
            if not lora:
                plant(model, optimizer)
            step_of(exchange, way, step, optimizer)
            if not lora:
                plant(model, optimizer)
            write(step)
            if 0 <= case.leave <= step:
                os._exit(3)
            time.sleep(0.01)
        if way == "server":
            exchange.finish()
            write(exchange.version)


def step_of(exchange: Any, way: str, step: int, optimizer: torch.optim.Optimizer) -> None:
    """Make a step, and now and then average the buffers."""
    if way in ("local", "server"):
        exchange.step()
        return
    exchange.synchronize() if way != "ddp" else None
    optimizer.step()
    if not step % 3:
        exchange.average_buffers()
        assert exchange.first_difference() is None


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Case(**json.loads(sys.argv[1])))
