"""One site of the tests of trainers with a parameter server: is killed where it is told, or waits for others.

The programs that use it are ``returning_lightning.py`` and ``returning_catalyst.py``, run with a case as JSON.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support import until
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dadplug
from dadplug.parameter_server import ParameterServer

SAMPLES, BATCH, EPOCHS = 96, 4, 3
LOST = 2  # rank of the site that is killed, by default
SECONDS = 150.0


@dataclass(frozen=True)
class Case:
    """One process of a site.

    Attributes:
        folder: folder of the site, in that of all sites.
        kit: folder of its kit; empty where the sites connect directly.
        url: the meeting point where they do.
        deal: option of the server.
        ends: whether site 0 is killed, for good, in place of site 2.
        lost: the site that is killed otherwise.
        back: whether the process returns.
    """

    folder: str
    kit: str = ""
    url: str = ""
    deal: str = "shared"
    ends: bool = False
    lost: int = LOST
    back: bool = False

    @property
    def rank(self) -> int:
        return "abc".index(Path(self.folder).name)

    @property
    def returns(self) -> str:
        """File of the site's address."""
        return f"{self.folder}/address"

    def connect(self) -> None:
        """Connect to the other sites, unless this process returns."""
        if Path(self.returns).exists():
            return
        if self.kit:
            dadplug.connect(kit=self.kit, timeout=SECONDS)
        else:
            dadplug.connect(self.rank, 3, self.url, timeout=SECONDS)

    def options(self) -> dict[str, Any]:
        """Return the options of the server."""
        options = {"mode": "rankdad", "rank": 2, "staleness": 3, "deal": self.deal, "timeout": SECONDS}
        return options | {"return_file": self.returns, "error_feedback": True}

    def loader(self) -> DataLoader[Any]:
        """Return the loader of this site: of all data where they are dealt, else of its own."""
        first, last = (0, SAMPLES) if self.deal == "shared" else (32 * self.rank, 32 * self.rank + 32)
        return DataLoader(samples(first, last), BATCH, shuffle=self.deal == "shared")

    def write(self, **line: Any) -> None:
        """Append a line to what this process has written."""
        with Path(self.folder, "back.jsonl" if self.back else "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def touch(self, name: str) -> None:
        Path(self.folder).with_name(name).touch()

    def wait_for(self, name: str) -> None:
        until(Path(self.folder).with_name(name).exists, lambda: name, SECONDS)

    def wait_briefly(self, name: str) -> None:
        """Wait for a file for half a second at most."""
        begin = time.monotonic()
        while not Path(self.folder).with_name(name).exists() and time.monotonic() < begin + 0.5:
            time.sleep(0.01)


def samples(first: int, last: int) -> TensorDataset:
    """Return samples, each of which names itself."""
    return TensorDataset(torch.eye(SAMPLES, dtype=torch.float64)[first:last], torch.arange(first, last) % 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SAMPLES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)).double()


def digest(model: nn.Module, server: Any) -> str:
    """Return a digest of model and optimizer."""
    values = [*model.state_dict().values()]
    values += [each for state in server._optimizer.optimizer.state_dict()["state"].values() for each in state.values()]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()[:16]


class Steps:
    """Steps of this process: it is killed in one, waits before others, and writes what is committed.

    Args:
        case: the case.
        epoch: returns the number of the epoch, from 0.
    """

    def __init__(self, case: Case, epoch: Callable[[], int]) -> None:
        self._case, self._epoch = case, epoch
        self._numbers: dict[int, int] = {}
        original = ParameterServer._apply

        def apply(server: Any, commit: Any) -> None:
            for entry in commit.decision.entries:
                case.write(commit=commit.decision.version, site=entry.site, number=entry.number)
            original(server, commit)

        ParameterServer._apply = apply  # type: ignore[method-assign]

    def begin(self, inputs: torch.Tensor, **line: Any) -> None:
        """Begin a step with a batch."""
        case, epoch = self._case, self._epoch()
        number = self._numbers[epoch] = self._numbers.get(epoch, -1) + 1
        case.write(epoch=epoch, ids=inputs.argmax(1).tolist(), **line)
        if case.back:
            case.touch("working")
        if epoch == 1 and number == 2 and case.rank == (0 if case.ends else case.lost) and not case.back:
            case.touch("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch == 1 and number == 1 and not case.ends and case.rank != case.lost:
            case.wait_for("killed")
            case.touch(f"works{case.rank}")
            for rank in {0, 1, 2} - {case.lost}:  # one that is idle would not keep the other from using up the epoch
                case.wait_for(f"works{rank}")
            if case.rank == 2 - case.lost // 2:  # not the one whose state is taken
                case.wait_for("working")
        elif epoch == 1 and number > 1 and not (case.ends or case.back):
            case.wait_briefly("working")  # until what the other one has sent is known, it does not keep this one back
