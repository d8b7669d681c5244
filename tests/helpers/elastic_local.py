"""One site of the tests of local steps where sites leave and return: trains, and is killed or late where it is told.

Run as ``elastic_local.py CASE``, where the case is JSON, see `Case`. Writes a line of JSON for each step, with its
batch, and one for each agreement.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from elastic_site import last_step
from torch import Tensor, nn

import dadplug
from dadplug.local_steps.elastic import ElasticAgreement

ROWS = (8, 5, 6, 7)


@dataclass(frozen=True)
class Case:
    """One process of a site.

    Attributes:
        kit: folder of its kit.
        folder: folder for what it writes.
        options: options of the local steps.
        steps: number of steps of the run.
        stop: file that contains the least number of steps, once it exists; empty for none.
        leave: step in which the process is killed; -1 for never.
        how: "step" before it, "agreement" before the end of the hub's round, "sent" in the step after an agreement.
        late: agreement at which the site waits until another one has reached two more; -1 for none.
        other: folder of the other site.
        spoils: agreement before which a parameter gets NaN; -1 for none.
        pause: seconds between steps.
        norm: whether the model has batch normalisation.
        counts: whether the model has an element for each site, which each of its steps changes by 1 / 64.
        talks: whether the sites exchange objects after every third step.
        resumes: file with the states of the site, which it begins with if it exists; empty for none.
        saves: step after which the site writes that file, and ends.
    """

    kit: str
    folder: str
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 1 << 30
    stop: str = ""
    leave: int = -1
    how: str = "step"
    late: int = -1
    other: str = ""
    spoils: int = -1
    pause: float = 0.0
    norm: bool = False
    counts: bool = False
    talks: bool = False
    resumes: str = ""
    saves: int = -1


def make_model(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


class Counts(nn.Module):
    """Model whose element of a site changes by the learning rate in each of the site's steps of SGD."""

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self._slot = slot

    def forward(self, inputs: Tensor) -> Tensor:
        return -self.values[self._slot].expand(len(inputs))


def batch(slot: int, number: int) -> tuple[Tensor, Tensor]:
    """Return a batch of a site."""
    generator = torch.Generator().manual_seed(1000 * slot + number)
    inputs = torch.randn(ROWS[slot], 6, generator=generator, dtype=torch.float64)
    return inputs, torch.stack([inputs.sum(1), inputs[:, 0] * (1 + slot), inputs[:, 1]], 1)


def train_step(model: nn.Module, one: tuple[Tensor, Tensor]) -> None:
    if isinstance(model, Counts):
        model(one[0]).mean().backward()
        return
    nn.functional.mse_loss(model(one[0]), one[1]).backward()


def digest(tensors: Iterable[Tensor]) -> str:
    content = b"".join(each.detach().contiguous().numpy().tobytes() for each in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


def sums(tensors: Iterable[Tensor]) -> list[float]:
    return [float(each.detach().sum()) for each in tensors]


def agreements_of(folder: str) -> int:
    """Return the number of agreements that a site has written."""
    path = Path(folder) / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum('"agreed"' in line for line in lines)


def disturb(case: Case) -> None:
    """Let the process be killed, be late, or spoil a parameter, where the case says so."""
    exchange, reach = ElasticAgreement._exchange, ElasticAgreement.reach

    def exchanging(self: ElasticAgreement, step: int, *given: Any) -> Any:
        if case.how == "agreement" and step >= case.leave >= 0:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(self, step, *given)

    def reaching(self: ElasticAgreement, step: int, weight: int, finished: bool) -> Any:
        if self.count == case.late and weight:
            before = agreements_of(case.other)
            while agreements_of(case.other) < before + 2:
                time.sleep(0.01)
        self.own_buffers = sums(self._model.buffers())
        if self.count == case.spoils and weight:
            with torch.no_grad():
                next(self._model.parameters())[0, 0] = float("nan")
                for each in self._model.buffers():
                    each.fill_(float("nan") if each.is_floating_point() else 1)
        return reach(self, step, weight, finished)

    ElasticAgreement._exchange, ElasticAgreement.reach = exchanging, reaching


class Record:
    """Log of a site."""

    def __init__(self, case: Case, local: dadplug.LocalSGD) -> None:
        self._local, self._agreements = local, local.agreements
        self._file = (Path(case.folder) / "log.jsonl").open("a", buffering=1)

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line | {"pid": os.getpid()}) + "\n")

    def look(self) -> None:
        """Write a line if there has been an agreement."""
        local = self._local
        if local.agreements == self._agreements:
            return
        self._agreements = local.agreements
        values = local._agreement.agreed.values
        line = {"agreement": local.agreements, "present": local.present_sites, "step": local.steps}
        line |= {"agreed": digest(values.values()), "sums": sums(values.values())}
        line |= {
            "contributions": local.contributions,
            "values": values["values"].tolist() if "values" in values else [],
        }
        line |= {"own": local._agreement.own_buffers}
        line |= {"buffers": sums(local.model.buffers()), "here": local.site_rank in local.present_sites}
        self.write(**line, time=time.monotonic())


def run(case: Case) -> None:
    dadplug.connect(kit=case.kit, timeout=200)
    disturb(case)
    model = Counts(torch.distributed.get_rank()) if case.counts else make_model(case.norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 64 if case.counts else 0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 1.0 if case.counts else 0.9)
    options = {"timeout": 200, "every": 4, "overlap": False, "min_sites": 1, "state": {"scheduler": scheduler}}
    local = dadplug.LocalSGD(model, optimizer, **(options | case.options))
    slot = local.site_rank
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "local": local}
    restore(case, parts)
    record = Record(case, local)
    record.write(joined=local.steps, state=len(optimizer.state), schedule=scheduler.last_epoch)
    while local.steps < last_step(case, local.steps):
        step, before = local.steps, local.agreements
        if case.how != "agreement" and case.leave >= 0 and step >= case.leave:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        record.write(batch=step, after=before)
        train_step(model, batch(slot, step))
        local.step()
        scheduler.step()
        record.look()
        if case.talks and local.steps % 3 == 0:
            local.gather_objects(slot)
        if local.steps == case.saves:
            torch.save({name: each.state_dict() for name, each in parts.items()}, case.resumes)
            return
        time.sleep(case.pause)
    local.finish()
    record.look()
    final = [*model.parameters(), *model.buffers()]
    record.write(final=digest(final), first=local.first_difference(), sums=sums(final), steps=local.steps)


def restore(case: Case, parts: dict[str, Any]) -> None:
    if case.resumes and Path(case.resumes).exists():
        states: dict[str, Any] = torch.load(case.resumes, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(states[name])


class Member:
    """One site of the reference: the parameters of a process with steps that do not count yet, and their rows.

    Args:
        slot: number of the site.
        lines: what it has written.
    """

    def __init__(self, slot: int, lines: list[dict]) -> None:
        self._slot, self._lines = slot, lines
        self._values: list[Tensor] | None = None
        self._process = 0
        self.rows = 0

    def train(self, number: int, agreed: list[Tensor], present: bool) -> list[Tensor] | None:
        """Train on what a site has trained on before an agreement; return its deltas, None if it has left."""
        found = None
        batches = [line for line in self._lines if line.get("after") == number - 1]
        last = {line["pid"] for line in self._lines if line.get("agreement") == number}
        for pid in dict.fromkeys(line["pid"] for line in batches):
            if pid not in last and not present:  # was killed
                self._values = None
                continue
            if self._process != pid:
                self._process, self._values, self.rows = pid, None, 0
            model = make_model()
            parameters = [*model.parameters()]
            with torch.no_grad():
                for parameter, value in zip(parameters, self._values or agreed, strict=True):
                    parameter.copy_(value)
            for line in batches:
                if line["pid"] == pid:
                    model.zero_grad()
                    train_step(model, batch(self._slot, line["batch"]))
                    with torch.no_grad():
                        for parameter in parameters:
                            parameter.sub_(parameter.grad, alpha=0.02 * 0.9 ** (line["batch"] // 10))
                    self.rows += ROWS[self._slot]
            found = [here.detach() - there for here, there in zip(parameters, agreed, strict=True)]
        return found

    def settle(self, agreed: list[Tensor], deltas: list[Tensor], counts: bool) -> None:
        """Go on from an agreement, with the steps that do not count in it."""
        self._values = None if counts else [value + each for value, each in zip(agreed, deltas, strict=True)]
        if counts:
            self.rows = 0


def reference(written: Sequence[list[dict]], outer: tuple[float, float] = (1.0, 0.0)) -> dict[int, list[float]]:
    """Compute the agreed model after each agreement, in one process, from what the sites have written.

    A contribution is that of all batches of a process since its last one; it counts where the site was present.

    Args:
        written: lines of each site.
        outer: outer learning rate and momentum.

    Returns:
        The sum of each parameter, by number of the agreement.
    """
    lr, mu = outer
    agreed = [each.detach().clone() for each in make_model().parameters()]
    momenta = [torch.zeros_like(each) for each in agreed]
    present = {line["agreement"]: line["present"] for lines in written for line in lines if "agreement" in line}
    members = [Member(slot, lines) for slot, lines in enumerate(written)]
    found: dict[int, list[float]] = {}
    for number in sorted(present):
        done = {slot: each.train(number, agreed, slot in present[number]) for slot, each in enumerate(members)}
        deltas = {slot: each for slot, each in done.items() if each is not None}
        counted = [slot for slot in deltas if slot in present[number]]
        total = sum(members[slot].rows for slot in counted)
        for place, value in enumerate(agreed if total else []):
            mean = sum(deltas[slot][place] * (members[slot].rows / total) for slot in counted)
            momenta[place].mul_(mu).add_(mean)
            value.add_(mean + mu * momenta[place] if mu else mean, alpha=lr)
        for slot, each in deltas.items():
            members[slot].settle(agreed, each, slot in counted)
        found[number] = sums(agreed)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Case(**json.loads(sys.argv[1])))
