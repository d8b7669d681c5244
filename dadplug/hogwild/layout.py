"""Places of parameters, buffers and optimizer state in shared memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model_sync.structure import refuse_wrapped
from .board import Board
from .memory import SharedMemory, aligned
from .optimizer_state import STEP, StepCounts


class _Entry(NamedTuple):
    name: str
    tensor: Tensor
    offset: int


class Layout:
    """Tensors of a model and its optimizers, each with its place in one shared memory.

    The tensor objects remain; only their storage is exchanged, so that the model, the optimizers and everything that
    refers to them need no change. Buffers of type int64 are counters, such as the number of batches that batch
    normalisation has seen: each process has its own, and what it has added is added to the shared one.

    Args:
        model: the model.
        optimizers: its optimizers.
        state: whether to share their state: ``"shared"`` or ``"own"``.
        processes: number of processes.

    Attributes:
        size: bytes that are needed.
        counts: numbers of steps of the parameters; None if each process has its own.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: str, processes: int
    ) -> None:
        self.processes = processes
        self._model, self._named = model, dict(_named(model))
        self.counts = StepCounts(optimizers) if state == "shared" else None
        counters = {id(buffer) for buffer in model.buffers() if buffer.dtype == torch.int64}
        self._shared: list[_Entry] = []
        self._counters: list[_Entry] = []
        self._board = 0
        self.size = aligned(8 * Board.numbers(processes))
        self._count_places = self.size
        self.size += aligned(8 * len(self.counts.parameters) if self.counts else 0)
        for name, tensor in _tensors(model, optimizers, state == "shared"):
            entries = self._counters if id(tensor) in counters else self._shared
            entries.append(_Entry(name, tensor, self.size))
            self.size += aligned(tensor.numel() * tensor.element_size())
        self._views: list[Tensor] = []
        self._shared_counters: list[Tensor] = []
        self._seen: list[Tensor] = []
        self._counts = torch.zeros(0, dtype=torch.int64)

    @property
    def signature(self) -> str:
        """Digest of names, shapes and types; processes with the same one have the same layout."""
        digest = hashlib.sha256(str(self.size).encode())
        for name, tensor, offset in [*self._shared, *self._counters]:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {offset}\n".encode())
        return digest.hexdigest()

    def board(self, memory: SharedMemory) -> Board:
        """Return the control block."""
        return Board(memory, self._board, self.processes)

    def attach(self, memory: SharedMemory, *, fill: bool) -> None:
        """Exchange the storage of all tensors.

        Args:
            memory: the shared memory.
            fill: whether to write this process's values; otherwise it takes those that are there.
        """
        count = len(self.counts.parameters) if self.counts else 0
        self._counts = memory.tensor(self._count_places, count, torch.int64)
        if self.counts:
            if fill:
                self._counts.copy_(self.counts.initial)
            else:
                self.counts.set(self._counts)
        for _, tensor, offset in self._shared:
            view = _view(memory, tensor, offset)
            if fill:
                view.copy_(tensor.detach())
            tensor.data = view
            self._views.append(view)
        for _, tensor, offset in self._counters:
            view = _view(memory, tensor, offset)
            if fill:
                view.copy_(tensor)
            else:
                tensor.copy_(view)
            self._shared_counters.append(view)
            self._seen.append(view.clone())

    def release(self) -> None:
        """Copy all values back to memory of this process alone."""
        for (_, tensor, _), view in zip(self._shared, self._views, strict=True):
            if tensor.data_ptr() == view.data_ptr():
                tensor.data = view.clone(memory_format=torch.preserve_format)
        for (_, tensor, _), view in zip(self._counters, self._shared_counters, strict=True):
            tensor.copy_(view)
        if self.counts:
            self.counts.set(self._counts)

    def take_step_numbers(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the next number of steps for each parameter with a gradient; the caller holds the lock."""
        if self.counts and self.counts.parameters:
            mask = self.counts.with_gradient(optimizer)
            self.counts.set(self._counts, mask)
            self._counts.add_(mask)

    def share_counters(self) -> None:
        """Add what this process has counted, and take what the others have; the caller holds the lock."""
        for (_, tensor, _), shared, seen in zip(self._counters, self._shared_counters, self._seen, strict=True):
            shared.add_(tensor - seen)
            tensor.copy_(shared)
            seen.copy_(shared)

    def give_counters(self, *_event: Any) -> None:
        """Set the counters of all processes to those of this process, which has loaded them."""
        for (_, tensor, _), shared, seen in zip(self._counters, self._shared_counters, self._seen, strict=True):
            shared.copy_(tensor)
            seen.copy_(tensor)

    def take_counts(self) -> None:
        """Set the numbers of steps to those of all processes, for checkpoints."""
        if self.counts:
            self.counts.set(self._counts)

    def give_counts(self) -> None:
        """Set the numbers of steps of all processes to those of this process, which has loaded them."""
        if self.counts:
            self._counts.copy_(self.counts.current)

    def check(self) -> None:
        """Check that every tensor is still in the model and in the shared memory.

        Raises:
            RuntimeError: if one was replaced instead of being updated in place; the message names it.
        """
        present = dict(_named(self._model))
        for name, tensor in self._named.items():
            if present.get(name) is not tensor:  # the model computes with another one, of this process alone
                raise RuntimeError(
                    f"{name} was replaced by another tensor during training, so that the processes no longer share it: "
                    "update it in place, as by copy_()"
                )
        for (name, tensor, _), view in zip(self._shared, self._views, strict=True):
            if tensor.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    f"the storage of {name} was replaced during training, so that the processes no longer share it: "
                    "update it in place, as by copy_()"
                )


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield parameters and buffers under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _view(memory: SharedMemory, tensor: Tensor, offset: int) -> Tensor:
    view = memory.tensor(offset, tensor.numel(), tensor.dtype)
    return view.as_strided(tensor.shape, _strides(tensor))


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor if it has no gaps and overlaps, as in channels_last, and contiguous ones else."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format, device="meta").stride()


def _tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], with_state: bool
) -> Iterable[tuple[str, Tensor]]:
    """Yield each tensor once: parameters, buffers, parameters of the optimizers alone, and the state."""
    names: dict[int, str] = {}

    def new(name: str, tensor: Any) -> bool:
        if not isinstance(tensor, Tensor) or id(tensor) in names:
            return False
        names[id(tensor)] = name
        return True

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if new(name, tensor):
            yield name, tensor
    for number, optimizer in enumerate(optimizers):
        place = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = f"parameter {place} of optimizer {number}"
                place += 1
                if new(name, parameter):
                    yield name, parameter
                for key, value in optimizer.state.get(parameter, {}).items() if with_state else ():
                    if key != STEP and new(f"{key} of {names[id(parameter)]}", value):
                        yield names[id(value)], value


def check_model(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that a model can lie in the memory of this machine.

    Raises:
        TypeError: if it is no module.
        ValueError: if a tensor is on another device, is not initialised, or belongs to a wrapper of other processes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    refuse_wrapped(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no parameter to train")
    for name, tensor in _tensors(model, optimizers, True):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(f"{name} is not initialised: run a forward pass first")
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} is on {tensor.device}: Hogwild! shares the memory of CPU processes; move the model to the "
                "CPU, or use GradientReduction or DistributedDataParallel for GPUs"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{name} is a {tensor.layout} tensor, which cannot be shared")
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in trained for parameter in model.parameters()):
        raise ValueError("the optimizer holds no parameter of the model")
