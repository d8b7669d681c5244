"""Processes that a launcher has started and connected."""

from __future__ import annotations

import hogwild_training as training
import pytest
import torch

from dadplug import Hogwild, MismatchError
from dadplug.hogwild import memory


def trains(named: bool) -> tuple:
    if named:  # no other process's descriptors can be opened
        memory.os = Without(memory.os)
    model = training.network()
    if memory.connected() and torch.distributed.get_rank():
        with torch.no_grad():
            model[0].weight.zero_()  # process 0's values count
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    hogwild = Hogwild(model, optimizer)
    start = model[0].weight.detach().clone()
    recorded = training.train_recording(hogwild)
    hogwild.finish()
    step = optimizer.state[model[0].weight]["step"].item()
    training.update(model, optimizer, next(iter(training.loader())))
    assert optimizer.state[model[0].weight]["step"].item() == step + 1  # no process changes it any more
    if named:
        memory.os = memory.os.module
    return recorded, start, step, model[1].num_batches_tracked.item()


class Without:
    """Module os of a system without /proc."""

    def __init__(self, module) -> None:
        self.module = module
        self.path = self

    def isdir(self, path) -> bool:
        return False

    def __getattr__(self, name):
        return getattr(self.module, name)


@pytest.mark.parametrize("named", [False, True])
def test_connected_processes_share_one_model(sites, named):
    (first, start, step, batches), (second, other, also, also_batches) = sites(2).run(trains, named)
    updates = training.EPOCHS * training.BATCHES
    assert torch.equal(start, other)
    assert start.abs().sum() > 0
    assert step == also == updates
    assert batches == also_batches == updates + 1
    for epoch in range(training.EPOCHS):
        assert sorted(first[0][epoch] + second[0][epoch]) == list(range(training.SAMPLES))
    assert first[2] == second[2] == updates
    assert training.equal(first[3], second[3])
    assert not torch.equal(first[3][0], start)


def refuses() -> list[tuple[str, str]]:
    rank = torch.distributed.get_rank()
    machine, memory._machine = memory._machine, lambda: f"machine {rank}"
    found = []

    def attempt(optimizer=torch.optim.SGD, model=None, **options) -> None:
        model = model or training.network()
        weight = model[0].weight.data_ptr()
        try:
            Hogwild(model, optimizer(model.parameters(), 0.1), **options)
        except (ValueError, MismatchError) as error:
            found.append((type(error).__name__, str(error)))
        assert model[0].weight.data_ptr() == weight

    attempt()
    memory._machine = machine
    attempt(processes=3)
    attempt(state="mine" if rank else "own")
    attempt(torch.optim.Adam if rank else torch.optim.SGD)
    attempt(state="own" if rank else "shared")
    model = training.network()
    hogwild = Hogwild(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match="2 processes are connected already"):
        hogwild.run(training.train_dealt)
    hogwild.finish()
    return found


def test_refusals_reach_all_processes(sites):
    first, second = sites(2).run(refuses)
    for found in (first, second):
        assert found[0][0] == "ValueError"
        assert "are on 2 machines" in found[0][1]
        assert "2 processes are connected, and processes=3 asks for others" in found[1][1]
        assert [kind for kind, _ in found[3:]] == ["MismatchError"] * 2
    assert "process 1 cannot train: unknown state 'mine'" in first[2][1]
    assert second[2][1].startswith("unknown state 'mine'")
