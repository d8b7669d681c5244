"""Training without locks by processes of one machine on one model in shared memory (Hogwild!, arXiv:1106.5730).

Memory and training may be changed here without reading another room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..support.loaders import check_loader
from ..support.refusals import refuse
from ..support.signature import whole_number
from .memory import Progress
from .training import DealtLoader, Hogwild

__all__ = ["DealtLoader", "Hogwild", "Progress", "chart_losses", "log_elapsed_time", "train_model"]


Criterion = Callable[[Tensor, Tensor], Tensor]


def train_model(
    model: nn.Module,
    train_dataloader: DataLoader[Any],
    num_processes: int,
    epochs_per_process: int,
    optimizer: torch.optim.Optimizer,
    device: str | torch.device = "cpu",
    log_interval: int = 10,
    loss_tracker: list[float] | None = None,
    seed: int = 42,
    *,
    test_dataloader: Iterable[Any] | None = None,
    criterion: Criterion = nn.functional.cross_entropy,
    state: str = "shared",
) -> list[float]:
    """Train a classifier by several processes, log its accuracy, and return the losses.

    Each process takes as many batches as `epochs_per_process` passes over the data have, on average: altogether the
    data are passed over ``num_processes * epochs_per_process`` times, and in each pass every sample is used once. So 4
    processes with 1 epoch see as many samples as 1 process with 4.

    Args:
        model: classifier on the CPU; trained in place.
        train_dataloader: loader of pairs of inputs and targets.
        num_processes: number of processes.
        epochs_per_process: epochs of each process.
        optimizer: optimizer of the model.
        device: ``"cpu"``; there is no other.
        log_interval: batches of a process between two lines of its log; -1 for no logs.
        loss_tracker: list to which the losses are appended; a new one if None.
        seed: seed of the order of samples, and of the random numbers of each process.
        test_dataloader: loader of the test data; without it the accuracy on the training data is logged, and none if
            `log_interval` is -1.
        criterion: loss of a batch from outputs and targets, by default the cross entropy of logits, which is that of
            log-probabilities, too.
        state: as in `Hogwild`.

    Returns:
        `loss_tracker`: the loss of each batch, in the order of the steps of all processes.

    Raises:
        TypeError, ValueError: for another device, numbers below 1, a loader whose batches cannot be dealt, or what
            `Hogwild` refuses.
        ProcessFailedError: if a process has failed.
    """
    _check(device, num_processes, epochs_per_process, log_interval, seed, criterion)
    check_loader(train_dataloader)
    hogwild = Hogwild(model, optimizer, processes=num_processes, state=state)
    epochs = num_processes * epochs_per_process
    parts = hogwild.run(_train, train_dataloader, epochs, criterion, log_interval, seed)
    losses = [loss for _, loss in sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])]
    tracker: list[float] = [] if loss_tracker is None else loss_tracker
    tracker.extend(losses)
    if test_dataloader is not None:
        _log_accuracy(model, test_dataloader, criterion, "test")
    elif log_interval != -1:
        _log_accuracy(model, train_dataloader, criterion, "training")
    return tracker


def _check(
    device: object, processes: object, epochs: object, log_interval: object, seed: object, criterion: object
) -> None:
    """Raise ValueError for arguments that are wrong."""
    refuse(
        (
            str(device).partition(":")[0] != "cpu",
            f"device must be 'cpu', got {str(device)!r}: Hogwild! shares the memory of CPU processes",
        ),
        (not callable(criterion), f"criterion must be a function of outputs and targets, got {criterion!r}"),
    )
    whole_number(0)("seed", seed)
    for name, number in (("num_processes", processes), ("epochs_per_process", epochs)):
        whole_number(1)(name, number)
    whole_number(1, "or -1 for no logs", lambda value: value == -1)("log_interval", log_interval)


def _train(
    hogwild: Hogwild, loader: DataLoader[Any], epochs: int, criterion: Criterion, log_interval: int, seed: int
) -> list[tuple[int, float]]:
    """Train in one process; return the numbers and losses of its steps."""
    torch.default_generator.manual_seed(seed + hogwild.rank)
    model, dealt = hogwild.model, hogwild.deal(loader)
    model.train()
    losses: list[tuple[int, float]] = []
    for epoch in range(epochs):
        for inputs, targets in dealt:
            for optimizer in hogwild.optimizers:
                optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            hogwild.step()
            losses.append((hogwild.last_step, float(loss.detach())))
            if log_interval > 0 and len(losses) % log_interval == 0:
                print(
                    f"process {hogwild.rank} (pid {hogwild.progress().pid}): pass {epoch + 1} of {epochs}, "
                    f"step {losses[-1][0] + 1}, loss {losses[-1][1]:.4f}",
                    flush=True,
                )
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[Any], criterion: Criterion) -> tuple[float, int, int]:
    """Evaluate a classifier.

    Args:
        model: the classifier.
        loader: loader of pairs of inputs and targets.
        criterion: mean loss of a batch from outputs and targets.

    Returns:
        The sum of the losses over samples, the number of samples that are classified correctly, and that of all.
    """
    training = model.training
    model.eval()
    total, correct, loss = 0, 0, 0.0
    try:
        for inputs, targets in loader:
            outputs = model(inputs)
            loss += float(criterion(outputs, targets)) * len(targets)
            correct += int((outputs.argmax(1) == targets).sum())
            total += len(targets)
    finally:
        model.train(training)
    return loss, correct, total


def _log_accuracy(model: nn.Module, loader: Iterable[Any], criterion: Criterion, name: str) -> None:
    loss, correct, total = evaluate(model, loader, criterion)
    if total:
        print(
            f"{name} data: average loss {loss / total:.4f}, accuracy {correct} of {total} ({correct / total:.2%})",
            flush=True,
        )


def log_elapsed_time(num_processes: int, epochs_per_process: int, start: float, end: float) -> None:
    """Print how long a training took.

    Args:
        num_processes: number of processes.
        epochs_per_process: epochs of each process.
        start: start, in seconds of any clock, such as ``time.perf_counter()``.
        end: end, in seconds of the same clock.
    """
    processes = f"{num_processes} process{'' if num_processes == 1 else 'es'}"
    epochs = f"{epochs_per_process} epoch{'' if epochs_per_process == 1 else 's'}"
    print(f"Elapsed time for {processes} x {epochs}: {end - start:.2f} s", flush=True)


def chart_losses(
    losses_dict: Mapping[str, Sequence[float]],
    title: str = "Comparing Training Losses Across Configurations",
    *,
    path: str | Path | None = None,
) -> Any:
    """Draw a chart of losses over batches, with a curve for each configuration.

    Args:
        losses_dict: losses by label, such as ``{"4 processes x 1 epoch": losses}``.
        title: title of the chart.
        path: file to write; if None the chart is shown, where there is a display.

    Returns:
        The figure of matplotlib.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there are no losses.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("chart_losses needs matplotlib: pip install 'dadplug[examples]'") from error
    if not losses_dict:
        raise ValueError("there are no losses to draw")
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for label, losses in losses_dict.items():
        axes.plot(range(1, len(losses) + 1), list(losses), label=label, linewidth=1)
    axes.set(title=title, xlabel="batch", ylabel="training loss")
    axes.legend()
    figure.tight_layout()
    if path is not None:
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
    else:
        pyplot.show()
    return figure
