"""Processes that `Hogwild.run` starts. The programs run outside of this process, which has run backward passes."""

import gc
import os
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import hogwild_training as training
import pytest
import torch
from support import refuses
from torch import nn
from torch.utils.data import DataLoader

import dadplug
from dadplug import Hogwild, ProcessFailedError
from dadplug.hogwild.training import choose_start
from dadplug.support.loaders import check_loader

SGD = partial(torch.optim.SGD, lr=0.1)

# One process: the bits of a plain loop


def one_process_has_the_bits_of_a_plain_loop(folder: str) -> None:
    cases = [(name, training.network, make, 0) for name, make in training.OPTIMIZERS.items()]
    cases.append(("own", training.network, lambda p: torch.optim.NAdam(p, 1e-2), 0))
    cases.append(("loader processes", training.network, training.OPTIMIZERS["adam"], 2))
    cases.append(("sparse", training.Bags, lambda p: torch.optim.SGD(p, 0.5), 0))
    cases.append(("sparse", training.Bags, lambda p: torch.optim.Adagrad(p, 0.5), 0))
    cases.append(("sparse", training.Votes, lambda p: torch.optim.SparseAdam(p, 0.1), 0))
    found = []
    for name, build, make, workers in cases:
        model = build()
        optimizer = make(model.parameters())
        hogwild = Hogwild(model, optimizer, 1, "own" if name == "own" else "shared", threads=1, start="fork")
        found.append((name, model, optimizer, hogwild.run(training.train_dealt, workers)[0]))
    for (name, build, make, workers), (_, model, optimizer, losses) in zip(cases, found, strict=True):
        reference = build()
        other = make(reference.parameters())
        assert losses == training.train_plainly(reference, other, workers), name
        assert training.equal(model.state_dict(), reference.state_dict()), name
        assert training.equal(optimizer.state_dict(), other.state_dict()), name
        training.update(model, optimizer, next(iter(training.loader())))  # they are a plain model and optimizer again


# Several processes


def every_sample_is_used_once_an_epoch_and_every_step_counts(folder: str) -> None:
    for name in ("adam", "sgd"):
        model = training.network()
        model.register_buffer("ids", torch.arange(5))
        optimizer = training.OPTIMIZERS[name](model.parameters())
        before = {key: value.clone() for key, value in model.state_dict().items()}
        results = Hogwild(model, optimizer, 3, threads=1, start="fork").run(training.train_recording, 2)
        updates = training.EPOCHS * training.BATCHES
        for epoch in range(training.EPOCHS):
            seen = [sample for result in results for sample in result[0][epoch]]
            assert sorted(seen) == list(range(training.SAMPLES))
        progress = [result[1] for result in results]
        assert sum(each.steps for each in progress) == sum(each.batches for each in progress) == updates
        assert sum(each.samples for each in progress) == training.EPOCHS * training.SAMPLES
        assert len({each.pid for each in progress}) == 3
        assert [each.unfinished for each in progress] == [[], [], []]
        for _, _, steps, state in results:
            assert steps == updates
            assert training.equal(state, list(model.state_dict().values()))
        assert model[1].num_batches_tracked == updates
        assert torch.equal(model.ids, torch.arange(5))
        changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
        assert set(changed) == set(before) - {"ids"}
        if name == "adam":
            assert [state["step"].item() for state in optimizer.state.values()] == [updates] * 6


LEARNT = 32  # epochs


def several_processes_learn_one_model(folder: str) -> None:
    data = training.Numbered()
    for state in ("shared", "own"):
        model = training.network()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        hogwild = Hogwild(model, optimizer, 2, state, threads=1, start="fork")
        hogwild.run(learn)
        model.eval()
        with torch.no_grad():
            right = (model(data.inputs).argmax(1) == data.targets).float().mean().item()
            assert right > 0.85, (state, right)  # 0.96 to 1.0 in twelve trainings; a half by guessing
            # running statistics are those of the data
            hidden = model[0](data.inputs)
            torch.testing.assert_close(model[1].running_mean, hidden.mean(0), atol=0.25, rtol=0.25)
            torch.testing.assert_close(model[1].running_var, hidden.var(0), atol=0.3, rtol=0.4)
        steps = optimizer.state[model[0].weight]["step"].item()
        assert steps == LEARNT * training.BATCHES if state == "shared" else 0 < steps < LEARNT * training.BATCHES
        assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**4


def learn(hogwild: Hogwild) -> None:
    batches = hogwild.deal(training.loader())
    schedule = torch.optim.lr_scheduler.StepLR(hogwild.optimizer, LEARNT // 4, 0.5)
    for _ in range(LEARNT):
        for batch in batches:
            training.update(hogwild.model, hogwild.optimizer, batch)
        schedule.step()


def processes_divide_by_squares_that_contain_their_gradients(folder: str) -> None:
    """Samples of a few features each: most squares that an optimizer divides by are still zero."""

    def train(hogwild: Hogwild) -> None:
        generator = torch.Generator().manual_seed(hogwild.rank)
        for _ in range(150):
            inputs = torch.zeros(4, 512).scatter_(1, torch.randint(512, (4, 6), generator=generator), 1.0)
            hogwild.optimizer.zero_grad()
            nn.functional.mse_loss(hogwild.model(inputs), inputs[:, :1]).backward()
            hogwild.optimizer.step()

    for make in (torch.optim.Adam, torch.optim.RMSprop):
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
        Hogwild(model, make(model.parameters(), lr=1e-3), 2, threads=1, start="fork").run(train)
        largest = max(float(parameter.detach().abs().max()) for parameter in model.parameters())
        assert largest < 1.5, (make, largest)  # no step of an element is larger than a few learning rates


def steps_with_a_closure_count(folder: str) -> None:
    """A step with a closure takes its number after the gradients are there."""
    model = training.network()
    unused = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([*model.parameters(), unused], 1e-2)

    def train(hogwild: Hogwild) -> None:
        batch = next(iter(training.loader()))

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(evaluate)
        optimizer.step(closure=evaluate)
        hogwild.step()

    Hogwild(model, optimizer, 2, threads=1, start="fork").run(train)
    assert optimizer.state[model[0].weight]["step"] == 6
    assert optimizer.state[unused]["step"] == 0
    assert torch.equal(unused, torch.ones(2))


# Memory and starts


def without_memfd(folder: str) -> None:
    del os.memfd_create
    tempfile.tempdir = folder
    names: list[list[str]] = []
    model = training.network()
    optimizer = torch.optim.Adam(model.parameters())

    def train(hogwild: Hogwild) -> list[str]:
        training.train_dealt(hogwild)
        return os.listdir(folder)

    names = Hogwild(model, optimizer, 2, threads=1, start="fork").run(train)
    assert names == [[], []]
    assert model[1].num_batches_tracked == training.EPOCHS * training.BATCHES


def test_a_deleted_file_serves_where_there_is_no_memfd(tmp_path):
    training.run_here(__file__, "without_memfd", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def starts() -> None:
    torch.set_num_threads(2)
    assert choose_start(1) == choose_start(2) == "fork"
    (torch.randn(1 << 18).exp() @ torch.randn(1 << 18)).item()  # starts OpenMP's threads, which a fork would not have
    assert choose_start(1) == "fork"
    assert choose_start(2) == "spawn"


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
def test_a_fork_is_chosen_where_it_can_train():
    training.run_here(__file__, "starts")


# Failures


def a_process_that_fails_is_named_and_ends_the_others(folder: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for how in ("kill", "raise"):
        model = training.network()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        start = model[0].weight.detach().clone()
        with pytest.raises(ProcessFailedError) as caught:
            Hogwild(model, optimizer, 3, threads=1, start="fork").run(training.end_in_batch, how, folder)
        message, pids = str(caught.value), [int((Path(folder) / str(rank)).read_text()) for rank in range(3)]
        assert f"process 1 (pid {pids[1]}) of 3" in message
        assert all(map(training.gone, pids))
        if how == "kill":
            assert "was killed by SIGKILL, in epoch 1 after" in message
            assert "of 12 (samples " in message
        else:
            assert "KeyError: 'no such thing'" in message
            assert "in end_in_batch" in message
        assert not torch.equal(model[0].weight, start)  # what was trained until then
        training.equal(Hogwild(model, optimizer, 1, threads=1, start="fork").run(training.train_dealt), [])
        del caught, message  # its traceback holds the frames, and they the memory
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def train_replaced(hogwild: Hogwild, kind: str) -> None:
    if hogwild.rank == 1:
        layer = next(each for each in hogwild.model.modules() if isinstance(each, nn.Linear))
        if kind == "parameter":
            layer.weight = nn.Parameter(layer.weight.detach().clone())
        elif kind == "loaded":
            state = {name: value.clone() for name, value in layer.state_dict().items()}
            layer.load_state_dict(state, assign=True)
        elif kind == "storage":
            layer.weight.data = layer.weight.data.clone()
        else:
            hogwild.model.scale = hogwild.model.scale + 1
    training.train_dealt(hogwild, 0)


def a_tensor_that_a_process_replaces_is_an_error(folder: str) -> None:
    kinds = (("parameter", "weight"), ("loaded", "weight"), ("buffer", "scale"), ("storage", "weight"))
    for kind, name in kinds:
        model = training.network()
        model.register_buffer("scale", torch.ones(3))
        hogwild = Hogwild(model, training.OPTIMIZERS["sgd"](model.parameters()), 2, threads=1, start="fork")
        with pytest.raises(ProcessFailedError, match=rf"{name} was replaced (by another tensor )?during") as error:
            hogwild.run(train_replaced, kind)
        assert "process 1" in str(error.value)


def an_interrupt_ends_all_processes(folder: str) -> None:
    model = training.network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    seen = threading.Event()

    def wait_and_interrupt() -> None:
        while not all((Path(folder) / name).exists() for name in "01"):
            seen.wait(0.01)
        os.kill(os.getpid(), 2)

    threading.Thread(target=wait_and_interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        Hogwild(model, optimizer, 2, threads=1, start="fork").run(training_without_end, folder)
    assert all(training.gone(int((Path(folder) / name).read_text())) for name in "01")


def training_without_end(hogwild: Hogwild, folder: str) -> None:
    partial = Path(folder) / f"{hogwild.rank}.part"
    partial.write_text(str(os.getpid()))
    for _ in range(10**9):
        training.train_dealt(hogwild)
        if partial.exists():
            partial.rename(Path(folder) / str(hogwild.rank))


def processes_that_train_for_different_numbers_of_epochs_are_an_error(folder: str) -> None:
    model = training.network()

    def train(hogwild: Hogwild) -> None:
        if hogwild.rank == 0:
            training.train_dealt(hogwild)

    with pytest.raises(ProcessFailedError, match="all processes must train for the same number of epochs"):
        Hogwild(model, torch.optim.SGD(model.parameters(), 0.1), 2, threads=1, start="fork").run(train)


@pytest.mark.parametrize(
    "program",
    [
        one_process_has_the_bits_of_a_plain_loop,
        every_sample_is_used_once_an_epoch_and_every_step_counts,
        several_processes_learn_one_model,
        processes_divide_by_squares_that_contain_their_gradients,
        steps_with_a_closure_count,
        a_process_that_fails_is_named_and_ends_the_others,
        a_tensor_that_a_process_replaces_is_an_error,
        an_interrupt_ends_all_processes,
        processes_that_train_for_different_numbers_of_epochs_are_an_error,
    ],
)
def test_processes(program, tmp_path):
    training.run_here(__file__, program.__name__, str(tmp_path))


# Refusals, before anything is changed


@pytest.mark.parametrize(
    ("build", "make", "arguments", "message"),
    [
        (lambda: training.network().to("meta"), SGD, {}, "0.weight is on meta: Hogwild! shares the memory of CPU"),
        (training.network, torch.optim.LBFGS, {"state": "own"}, "L-BFGS evaluates the loss several times a step"),
        (training.network, torch.optim.Rprop, {}, 'the state of Rprop cannot be shared; pass state="own"'),
        (training.network, partial(SGD, momentum=0.9, dampening=0.1), {}, "SGD with dampening"),
        (training.Bags, partial(SGD, momentum=0.9), {}, "SGD's momentum of a sparse gradient"),
        (lambda: nn.LazyLinear(2), SGD, {}, "weight is not initialised"),
        (training.network, lambda _: SGD(training.network().parameters()), {}, "holds no parameter of the model"),
        (training.network, SGD, {"processes": 0}, "processes must be a whole number of at least 1 or None, got 0"),
        (training.network, SGD, {"state": "mine"}, "unknown state 'mine'; valid ones are 'shared', 'own'"),
        (training.network, lambda _: "sgd", {}, "the optimizer must be a torch.optim.Optimizer, got str"),
        (training.network, lambda _: None, {}, "the optimizer must be a torch.optim.Optimizer, got NoneType"),
        (training.network, lambda _: [3], {}, "the optimizer must be a torch.optim.Optimizer, got int"),
    ],
)
def test_refusals(build, make, arguments, message):
    model = build()
    with pytest.raises((TypeError, ValueError), match=message):
        Hogwild(model, make(model.parameters()), **({"processes": 2} | arguments))


@pytest.mark.parametrize("way", [partial(Hogwild, processes=2), dadplug.LocalSGD, dadplug.ParameterServer])
def test_what_is_no_model_or_no_optimizer(way):
    model = training.network()
    refuses(
        (lambda: way(None, SGD(model.parameters())), r"the model must be a torch\.nn\.Module, got NoneType"),
        (lambda: way(model, None), r"the optimizer must be a torch\.optim\.Optimizer, got NoneType"),
        error=TypeError,
    )


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(2)


def test_loaders_that_cannot_be_dealt():
    data = training.Numbered()
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)
    model = training.network()
    hogwild = dadplug.Hogwild(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    refuses(
        (lambda: check_loader(DataLoader(Endless())), "IterableDataset has no order"),
        (lambda: check_loader(DataLoader(data, batch_size=None)), "makes no batches"),
        (lambda: check_loader(DataLoader(data, sampler=sampler, batch_size=2)), "splits the data already"),
        (lambda: check_loader([1, 2]), "not of list", TypeError),
        (lambda: hogwild.deal(training.loader()), "no training runs", RuntimeError),
    )
