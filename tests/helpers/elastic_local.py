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
from functools import partialmethod
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from elastic_site import hesitate, last_step
from torch import Tensor, nn

import dadplug
from dadplug.local_steps import elastic
from dadplug.local_steps.delta_format import DeltaFormat, SparseFormat
from dadplug.local_steps.elastic import ElasticAgreement
from dadplug.local_steps.header import Header

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
        how: "step" before it, "agreement" before the end of the hub's round, "sent" in the step after an agreement;
            "lies" to send NaN, or what is no code, in place of deltas in the agreement that `spoils` numbers;
            "shouts" to send large numbers in their place from it on;
            "hesitates" to be held up when it is asked for its state.
        late: agreement at which the site waits until another one has reached two more; -1 for none.
        other: folder of the other site.
        spoils: agreement before which a parameter gets NaN; -1 for none.
        header: fields of the site's header in that agreement, in place of NaN.
        pause: seconds between steps.
        norm: whether the model has batch normalisation.
        counts: whether the model has an element for each site, which each of its steps changes by 1 / 64.
        talks: whether the sites exchange objects after every third step.
        resumes: file with the states of the site, which it begins with if it exists; empty for none.
        saves: step after which the site writes that file, and ends.
        begins: `start_sites` and `start_after` of the connection; empty for all sites.
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
    header: dict[str, int] = field(default_factory=dict)
    pause: float = 0.0
    norm: bool = False
    counts: bool = False
    talks: bool = False
    resumes: str = ""
    saves: int = -1
    begins: list[float] = field(default_factory=list)


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


def shout(form: Any, encode: Any, deltas: dict[str, Tensor], payloads: dict[torch.dtype, Tensor]) -> None:
    """Encode finite numbers with which the next steps are out of range."""
    encode(form, {name: torch.full_like(each, 1e200) for name, each in deltas.items()}, payloads)


def disturb(case: Case) -> None:
    """Let the process be killed, be late, or spoil a parameter, where the case says so."""
    exchange, reach = ElasticAgreement._exchange, ElasticAgreement.reach

    def exchanging(self: ElasticAgreement, step: int, *given: Any) -> Any:
        if case.how == "agreement" and step >= case.leave >= 0:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        if case.header and self.count == case.spoils:
            elastic.Header = lambda *values: Header(*values)._replace(**case.header)
        try:
            return exchange(self, step, *given)
        finally:
            elastic.Header = Header

    def reaching(self: ElasticAgreement, step: int, weight: int, finished: bool) -> Any:
        if self.count == case.late and weight:
            before = agreements_of(case.other)
            while agreements_of(case.other) < before + 2:
                time.sleep(0.01)
        self.own_buffers = sums(self._model.buffers())
        if case.how == "lies" and self.count == case.spoils:
            kind = SparseFormat if "density" in case.options else DeltaFormat
            encode = kind.encode
            kind.encode = lambda form, deltas, payloads: (
                encode(form, deltas, payloads),
                [each.view(torch.uint8).fill_(255) for each in payloads.values()],
                setattr(kind, "encode", encode),
            )
        elif case.how == "shouts" and self.count == case.spoils:
            for kind in (SparseFormat, DeltaFormat):
                kind.encode = partialmethod(shout, kind.encode)
        elif self.count == case.spoils and weight and not case.header:
            with torch.no_grad():
                next(self._model.parameters())[0, 0] = float("nan")
                for each in self._model.buffers():
                    each.fill_(float("nan") if each.is_floating_point() else 1)
        return reach(self, step, weight, finished)

    if case.how == "hesitates":
        hesitate()

    ElasticAgreement._exchange, ElasticAgreement.reach = exchanging, reaching


class Record:
    """Log of a site."""

    def __init__(self, case: Case, local: dadplug.LocalSGD) -> None:
        self._local, self._agreements = local, local.agreements
        self._file = (Path(case.folder) / "log.jsonl").open("a", buffering=1)
        offer = ElasticAgreement._offer

        def offering(agreement: ElasticAgreement, **given: Any) -> None:
            offer(agreement, **given)
            self.write(sends=agreement.count + 1, weight=agreement._offered.weight)

        ElasticAgreement._offer = offering

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
        line |= {"own": local._agreement.own_buffers, "delay": local.delay}
        line |= {"buffers": sums(local.model.buffers()), "here": local.site_rank in local.present_sites}
        self.write(**line, time=time.monotonic())


def run(case: Case) -> None:
    dadplug.connect(kit=case.kit, timeout=200, **dict(zip(("start_sites", "start_after"), case.begins)))
    disturb(case)
    model = Counts(torch.distributed.get_rank()) if case.counts else make_model(case.norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 64 if case.counts else 0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 1.0 if case.counts else 0.9)
    options = {"timeout": 200, "every": 4, "overlap": False, "min_sites": 1, "state": {"scheduler": scheduler}}
    local = dadplug.LocalSGD(model, optimizer, **({"weighting": "samples"} | options | case.options))
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


FRAGMENTS = {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]]}
"""Places of the parameters of each fragment, by number of fragments."""


class Member:
    """One site of the reference, which replays what the site has written.

    Args:
        slot: number of the site.
        lines: what it has written.
        fragments: places of the parameters of each fragment.
    """

    def __init__(self, slot: int, lines: list[dict], fragments: list[list[int]]) -> None:
        self._slot, self._lines, self._fragments = slot, lines, fragments
        self._numbers = {line["agreement"] for line in lines if "agreement" in line}
        self._model = make_model()
        self.sent: list[Tensor] = []
        self.weight = 0

    def begin(self, agreed: list[Tensor]) -> None:
        """Begin from the agreed values, as a process that joins does."""
        self.values, self._starts = [each.clone() for each in agreed], [each.clone() for each in agreed]
        self._rows = [0] * len(self._fragments)

    def replay(self, number: int, agreed: list[Tensor]) -> bool:
        """Do what the site has done up to an agreement; return whether it has reached it."""
        if number not in self._numbers:
            return False
        while True:
            line = self._lines.pop(0)
            if "joined" in line:
                self.begin(agreed)
            elif "batch" in line:
                self._train(line["batch"])
            elif line.get("sends") == number:
                self.send(number, line["weight"])
            if "agreement" in line:
                return True
            if line.get("sends") == number + 1:  # after the agreement
                self._lines.insert(1, line)

    def _train(self, number: int) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), self.values, strict=True):
                parameter.copy_(value)
        self._model.zero_grad()
        train_step(self._model, batch(self._slot, number))
        for parameter, value in zip(self._model.parameters(), self.values, strict=True):
            value.sub_(parameter.grad, alpha=0.02 * 0.9 ** (number // 10))
        self._rows = [rows + ROWS[self._slot] for rows in self._rows]

    def send(self, number: int, weight: int) -> None:
        """Send what was done with a fragment since it was last sent."""
        place = (number - 1) % len(self._fragments)
        self.sent, self.weight = [], weight
        if weight:
            assert weight == self._rows[place], (self._slot, number)
            self._rows[place] = 0
            self.sent = [self.values[each] - self._starts[each] for each in self._fragments[place]]
            for each in self._fragments[place]:
                self._starts[each] = self.values[each].clone()

    def settle(self, number: int, before: list[Tensor], agreed: list[Tensor], counts: bool) -> None:
        """Go on from the agreed values and what was done that is not part of them."""
        place = (number - 1) % len(self._fragments)
        if not counts:
            self._rows[place] += self.weight
        for each in self._fragments[place]:
            rest = self.values[each] - (self._starts[each] if counts else before[each])
            self.values[each], self._starts[each] = agreed[each] + rest, agreed[each].clone()


def reference(
    written: Sequence[list[dict]], outer: tuple[float, float] = (1.0, 0.0), fragments: int = 1
) -> dict[int, list[float]]:
    """Compute the agreed model after each agreement, in one process, from what the sites have written.

    Args:
        written: lines of each site, none of which was late.
        outer: outer learning rate and momentum.
        fragments: number of fragments.

    Returns:
        The sum of each parameter, by number of the agreement, up to the first one that no site has written, at the end.
    """
    lr, mu = outer
    agreed = [each.detach().clone() for each in make_model().parameters()]
    momenta = [torch.zeros_like(each) for each in agreed]
    present = {line["agreement"]: line["present"] for lines in written for line in lines if "agreement" in line}
    parts = FRAGMENTS[fragments]
    members = [Member(slot, [*lines], parts) for slot, lines in enumerate(written)]
    found: dict[int, list[float]] = {}
    for number in takewhile(present.__contains__, count(1)):
        before = [each.clone() for each in agreed]
        there = {slot: each for slot, each in enumerate(members) if each.replay(number, before)}
        counted = [there[slot] for slot in present[number]]
        total = sum(each.weight for each in counted)
        for index, place in enumerate(parts[(number - 1) % fragments] if total else []):
            mean = sum(each.sent[index] * (each.weight / total) for each in counted if each.weight)
            momenta[place].mul_(mu).add_(mean)
            agreed[place].add_(mean + mu * momenta[place] if mu else mean, alpha=lr)
        for slot, each in there.items():
            each.settle(number, before, agreed, slot in present[number])
        found[number] = sums(agreed)
    return found


def check(fleet: Any, names: str, fragments: int = 1) -> dict[int, dict]:
    """Check that the agreed models of all sites are equal to the bit; return the agreements of all sites by number.

    Statistics are equal once a round.
    """
    every: dict[int, dict] = {}
    for name in names:
        for number, line in fleet.lines(name).items():
            known = every.setdefault(number, line)
            same = ["agreed", "delay", "present", "step"] if line["here"] and known["here"] else ["agreed", "delay"]
            if len(same) > 2 and number % fragments == 0:
                same.append("buffers")
            for what in same:
                assert line[what] == known[what], (name, number, what, fleet.state())
    finals = [fleet.written(name, "final")[-1] for name in names]
    assert len({line["final"] for line in finals}) == 1, fleet.state()
    assert {line["first"] for line in finals} == {None}
    assert len({line["steps"] for line in finals}) == 1
    return every


def ends(fleet: Any, names: str) -> dict[int, dict]:
    """Stop the sites of a fleet, and check them, see `check`."""
    fleet.stop(12)
    fleet.end(names)
    return check(fleet, names)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Case(**json.loads(sys.argv[1])))
