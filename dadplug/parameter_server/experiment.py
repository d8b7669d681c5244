"""Experiments with numbers of workers: processes of this machine that train with a parameter server, by one call."""

from __future__ import annotations

import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..errors import ProcessFailedError
from ..exchange import connect
from ..hogwild import Criterion, evaluate
from ..hogwild.training import choose_start, quiet_fork
from ..models import build_model
from ..support.processes import Child, free_port
from ..support.refusals import refuse
from ..support.signature import whole_number
from .connect import ServerOptions
from .server import ParameterServer

Part = Callable[[nn.Module, ParameterServer], Any]
"""What a process does, with a replica."""


class Outcome(NamedTuple):
    """Outcome of `launch_ps_and_workers`.

    Attributes:
        accuracy: share of the test data that the trained model classifies correctly.
        seconds: seconds of training, from the first batch to the last commit.
        accuracies: `accuracy` after each epoch of the workers.
        model: the trained model, on the CPU.
    """

    accuracy: float
    seconds: float
    accuracies: list[float]
    model: nn.Module


def launch_ps_and_workers(
    world_size: int,
    epochs_per_worker: int,
    num_gpus: int,
    train_dataloader: DataLoader[Any],
    test_dataloader: Iterable[Any],
    *,
    model: nn.Module | None = None,
    lr: float = 0.03,
    criterion: Criterion = nn.functional.cross_entropy,
    seed: int = 42,
    **options: Any,
) -> Outcome:
    """Train a classifier by a server and ``world_size - 1`` workers, processes of this machine; log its test accuracy.

    Each worker passes over all training data `epochs_per_worker` times, in an order of its own if the loader shuffles.
    So 4 workers with 1 epoch see as many samples as 1 worker with 4. With ``deal="shared"`` the workers pass over the
    data together instead: each batch is used once an epoch, by a worker that is free. The server orders the log and
    evaluates the model after each epoch of the workers. SGD without momentum makes the steps.

    In a program of its own, call it under ``if __name__ == "__main__":``; new processes may import the program again.

    Args:
        world_size: number of processes: the server and the workers.
        epochs_per_worker: epochs of each worker.
        num_gpus: number of GPUs that the workers use in turns; 0 for the CPU.
        train_dataloader: loader of pairs of inputs and targets.
        test_dataloader: loader of the test data.
        model: classifier on the CPU, trained in place; an MNISTNet, for images of 28 x 28, if None.
        lr: learning rate.
        criterion: loss of a batch from outputs and targets.
        seed: seed of the initial parameters of an MNISTNet, and with the rank of the order of a worker's samples.
        options: options of the `ParameterServer`; see `ServerOptions`.

    Returns:
        The test accuracy, the seconds, and the trained model.

    Raises:
        ValueError: if a number is too small, there are fewer GPUs, or an option is not valid.
        ProcessFailedError: if the server or all workers have failed. Without one worker the others go on.

    Example:
        >>> outcome = launch_ps_and_workers(5, 1, 0, train_dataloader, test_dataloader)
        >>> print(outcome.accuracy, outcome.seconds)
    """
    checked = _check(world_size, epochs_per_worker, num_gpus, options)
    if model is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model("MNISTNet")
    serve = partial(_serve, world_size - 1, epochs_per_worker, test_dataloader, criterion)
    work = partial(_work, epochs_per_worker, train_dataloader, checked.deal == "shared", seed, criterion)
    accuracies, seconds, state = _run([serve] + [work] * (world_size - 1), num_gpus, seed, model, lr, checked)
    model.load_state_dict(state)
    return Outcome(accuracies[-1], seconds, accuracies, model)


def _check(world_size: int, epochs: int, num_gpus: int, options: dict[str, Any]) -> ServerOptions:
    """Raise ValueError for arguments that are wrong; return the options."""
    whole_number(2)("world_size", world_size)
    whole_number(1)("epochs_per_worker", epochs)
    whole_number(0)("num_gpus", num_gpus)
    checked, gpus = ServerOptions.create(**options), torch.cuda.device_count()
    refuse(
        (num_gpus > gpus, f"num_gpus={num_gpus}, and there are {gpus}"),
        (checked.private, "private= does not go with launch_ps_and_workers, which returns the model of the server"),
        (
            checked.quorum >= world_size,
            f"quorum={checked.quorum} needs as many workers, and there are {world_size - 1}",
        ),
    )
    return checked


def _run(parts: Sequence[Part], num_gpus: int, *task: Any) -> Any:
    """Start a process for each part of the training, and return what the server reports."""
    threads = max(1, torch.get_num_threads() // (len(parts) - 1))
    start = "spawn" if num_gpus or dist.is_initialized() else choose_start(threads)
    place = len(parts), f"tcp://127.0.0.1:{free_port()}", threads, num_gpus
    with quiet_fork():
        children = [Child(_report, part, rank, *place, *task, method=start) for rank, part in enumerate(parts)]
    return _collect(children)


def _collect(children: Sequence[Child]) -> Any:
    """Wait for what the server reports, and end all processes; warn of workers that fail."""
    failed: dict[int, str] = {}
    waiting: dict[Any, int] = {child.pipe: rank for rank, child in enumerate(children)}
    try:
        while True:
            for pipe in wait(list(waiting)):
                rank = waiting.pop(pipe)
                report, error = children[rank].receive()
                if error:
                    name = f"worker {rank}" if rank else "the server"
                    failed[rank] = f"{name} (pid {children[rank].process.pid}) has failed: {error}"
                    if rank == 0 or len(failed) == len(children) - 1:
                        raise ProcessFailedError("\n".join(failed.values()))
                    warnings.warn(f"{failed[rank]}; the others go on", stacklevel=3)
                elif rank == 0:
                    return report
    finally:
        for child in children:
            child.end(seconds=0)


def _serve(
    workers: int,
    epochs: int,
    loader: Iterable[Any],
    criterion: Criterion,
    model: nn.Module,
    server: ParameterServer,
) -> tuple[list[float], float, dict[str, Tensor]]:
    """Order the log, and evaluate after each epoch; return the accuracies, the seconds, and the state of the model."""
    start, accuracies, seconds = time.perf_counter(), [], 0.0
    for epoch in range(epochs):
        server.finish()
        seconds = time.perf_counter() - start
        _, correct, total = evaluate(model, loader, criterion)
        accuracies.append(correct / max(1, total))
        print(
            f"epoch {epoch + 1} of {epochs} by {workers} worker(s): "
            f"test accuracy {accuracies[-1]:.2%}, elapsed time {seconds:.2f} s",
            flush=True,
        )
    return accuracies, seconds, model.state_dict()


def _work(
    epochs: int, loader: Any, shared: bool, seed: int, criterion: Criterion, model: nn.Module, server: ParameterServer
) -> None:
    """Train as one worker."""
    device = next(model.parameters()).device
    if shared:
        loader = server.loader(loader, seed=seed)
    model.train()
    for _ in range(epochs):
        for inputs, targets in loader:
            criterion(model(inputs.to(device)), targets.to(device)).backward()
            server.step()
        server.finish()


def _report(
    pipe: Connection,
    part: Part,
    rank: int,
    world_size: int,
    address: str,
    threads: int,
    num_gpus: int,
    seed: int,
    model: nn.Module,
    learning_rate: float,
    options: ServerOptions,
) -> None:
    """Connect a process, and let it serve or work with a replica; send the result or the traceback."""
    try:
        torch.set_num_threads(threads)
        torch.manual_seed(seed + rank)
        connect(rank, world_size, address, timeout=options.timeout)
        model = model.to(f"cuda:{(rank - 1) % num_gpus}" if num_gpus and rank else "cpu")
        optimizer = torch.optim.SGD(model.parameters(), learning_rate)
        server = ParameterServer(model, optimizer, role="worker" if rank else "server", **vars(options))
        result = part(model, server)
        server.detach()
        report = pickle.dumps((result, ""))  # by value: tensors that are sent as such live as long as this process
    except BaseException:
        report = pickle.dumps((None, traceback.format_exc()))
    pipe.send_bytes(report)
