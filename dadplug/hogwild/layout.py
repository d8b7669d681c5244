"""Places of parameters, buffers and optimizer state in shared memory."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..step.model_sync.structure import check_types, refuse_wrapped
from ..support.refusals import refuse
from .memory import Board, SharedMemory, aligned

# Optimizers of torch whose state, but for "step", begins with zeros and is updated in place. Adagrad creates its own
# in its constructor.
SHAREABLE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.SparseAdam,
)
STEP = "step"


def check_optimizer(optimizer: Any, model: nn.Module, state: str) -> None:
    """Check that processes can train with an optimizer without waiting for one another.

    Args:
        optimizer: the optimizer.
        model: the model.
        state: ``"shared"`` or ``"own"``.

    Raises:
        TypeError: if it is no optimizer, or the model is no module.
        ValueError: if it cannot be used, or its state cannot be shared.
    """
    check_types(model, optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "L-BFGS evaluates the loss several times a step and needs parameters that do not change meanwhile: with "
            "Hogwild!, where all processes change them, use SGD, Adam or another first-order optimizer"
        )
    if state != "shared":
        return
    name = type(optimizer).__name__
    if type(optimizer) not in SHAREABLE:
        valid = ", ".join(each.__name__ for each in SHAREABLE)
        raise ValueError(f'the state of {name} cannot be shared; pass state="own", or use one of {valid}')
    sparse = sparse_weights(model)
    for group in optimizer.param_groups:
        refuse(
            (
                group.get("momentum") and group.get("dampening"),
                'SGD with dampening treats its first step differently: pass state="own"',
            ),
            (
                isinstance(optimizer, torch.optim.SGD)
                and group["momentum"]
                and any(p in sparse for p in group["params"]),
                "SGD's momentum of a sparse gradient is a sparse tensor, which cannot be shared: put the tables into "
                'a parameter group with momentum 0, use SparseAdam or Adagrad, or pass state="own"',
            ),
        )


def divides_by_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps divide by an average of squared gradients, so that processes must take them in turn.

    Between one process's update of the average of gradients and that of their squares, another process would divide a
    gradient by a square that does not contain it. Where the square is still zero, the quotient is of the order of
    1 / eps, and the model is lost.
    """
    return type(optimizer) is not torch.optim.SGD


def coalesce_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sum the rows of sparse gradients that occur several times, as the steps of `divides_by_state` would do first."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()


def sparse_weights(model: nn.Module) -> set[Tensor]:
    """Return the weights whose gradients are sparse tensors."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {module.weight for module in model.modules() if isinstance(module, kinds) and module.sparse}


def create_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Create the state of an optimizer as it is before the first step; existing state is not changed.

    A copy of the optimizer makes a step with gradients of zero on other parameters, whose state has the right names,
    shapes and types.
    """
    sparse = sparse_weights(model)
    always_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state.get(parameter) or not parameter.requires_grad:
                continue
            found = _state_after_zeros(optimizer, group, parameter, always_sparse or parameter in sparse)
            for name, value in found.items():
                if isinstance(value, Tensor):
                    value.zero_()
                    optimizer.state[parameter][name] = value
                elif name == STEP:
                    optimizer.state[parameter][name] = 0


def _state_after_zeros(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, sparse: bool
) -> dict[str, Any]:
    other = torch.zeros_like(parameter, requires_grad=True)
    if sparse:
        indices, values = torch.zeros(1, 0, dtype=torch.int64), parameter.new_zeros(0, *parameter.shape[1:])
        other.grad = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    else:
        other.grad = torch.zeros_like(parameter)
    probe: Any = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    probe.param_groups = [group | {"params": [other]}]
    probe._optimizer_step_pre_hooks = OrderedDict()
    probe._optimizer_step_post_hooks = OrderedDict()
    type(optimizer).step(probe)
    state: dict[str, Any] = probe.state[other]
    return state


def keep_state(optimizer: torch.optim.Optimizer, loaded: Callable[[], None]) -> list[Any]:
    """Have states that an optimizer loads copied into the tensors that it has, which are shared.

    Args:
        optimizer: the optimizer, with its state.
        loaded: called after a state was loaded.

    Returns:
        The handles of the hooks.
    """
    before: dict[Any, dict[str, Any]] = {}

    def remember(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        before.update(optimizer.state)

    def copy_back(optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in before.items():
            given = optimizer.state.get(parameter, {})
            for name, value in state.items():
                new = given.get(name, 0)
                if isinstance(value, Tensor):
                    value.copy_(torch.as_tensor(new))
                else:
                    state[name] = new
            optimizer.state[parameter] = state
        before.clear()
        loaded()

    return [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(copy_back),
    ]


class StepCounts:
    """Numbers of steps of all parameters, counted over all processes.

    Optimizers such as Adam keep a number of steps for each parameter and correct their moments by it. Increments of a
    shared number without a lock get lost. Here each step of a process takes the next number of each of its parameters,
    under a lock of microseconds, and the optimizer sees this number alone.

    Args:
        optimizers: the optimizers.

    Attributes:
        parameters: the parameters with numbers of steps.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        found = [each for optimizer in optimizers for each in optimizer.state.items() if STEP in each[1]]
        self.parameters: list[Tensor] = [parameter for parameter, _ in found]
        self._states: list[dict[str, Any]] = [state for _, state in found]
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._shared = self._initial = self._current()

    def _current(self) -> Tensor:
        """Return the numbers in the states of this process, of shape (parameters,)."""
        return torch.tensor([int(state[STEP]) for state in self._states], dtype=torch.int64)

    def attach(self, shared: Tensor, *, fill: bool) -> None:
        """Count in shared memory from now on.

        Args:
            shared: numbers of steps of all processes, of shape (parameters,).
            fill: whether to write the numbers before the training; otherwise those that are there are taken.
        """
        self._shared = shared
        if fill:
            shared.copy_(self._initial)
        else:
            self.take()

    def take_next(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the next number for each parameter with a gradient; the caller holds the lock."""
        if not self.parameters:
            return
        places = [
            self._place[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and id(parameter) in self._place
        ]
        self._set(places)
        self._shared[places] += 1

    def take(self) -> None:
        """Set the numbers in the states of this process to those of all processes, for checkpoints."""
        self._set(range(len(self._states)))

    def give(self) -> None:
        """Set the numbers of all processes to those of this process, which has loaded them."""
        self._shared.copy_(self._current())

    def _set(self, places: Iterable[int]) -> None:
        values = self._shared.tolist()
        for place in places:
            state = self._states[place]
            if isinstance(state[STEP], Tensor):
                state[STEP].fill_(values[place])
            else:
                state[STEP] = values[place]


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
        counts: numbers of steps of the parameters; of none if each process has its own.
        memory: the shared memory, once `attach` was called.
        board: the control block in it.
    """

    memory: SharedMemory
    board: Board

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: str, processes: int
    ) -> None:
        self._processes = processes
        self._model, self._named = model, dict(_named(model))
        self.counts = StepCounts(optimizers if state == "shared" else ())
        counters = {id(buffer) for buffer in model.buffers() if buffer.dtype == torch.int64}
        self._shared: list[_Entry] = []
        self._counters: list[_Entry] = []
        self.size = aligned(8 * Board.numbers(processes))
        self._count_places = self.size
        self.size += aligned(8 * len(self.counts.parameters))
        for name, tensor in _tensors(model, optimizers, state == "shared"):
            entries = self._counters if id(tensor) in counters else self._shared
            entries.append(_Entry(name, tensor, self.size))
            self.size += aligned(tensor.numel() * tensor.element_size())
        self._views: list[Tensor] = []
        self._shared_counters: list[Tensor] = []
        self._seen: list[Tensor] = []

    @property
    def signature(self) -> str:
        """Digest of names, shapes and types; processes with the same one have the same layout."""
        digest = hashlib.sha256(str(self.size).encode())
        for name, tensor, offset in [*self._shared, *self._counters]:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {offset}\n".encode())
        return digest.hexdigest()

    def attach(self, memory: SharedMemory, *, fill: bool) -> None:
        """Exchange the storage of all tensors.

        Args:
            memory: the shared memory.
            fill: whether to write this process's values; otherwise it takes those that are there.
        """
        self.memory, self.board = memory, Board(memory, self._processes)
        self.counts.attach(memory.tensor(self._count_places, len(self.counts.parameters), torch.int64), fill=fill)
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
        """Copy all values back to memory of this process alone, and close the shared memory."""
        for (_, tensor, _), view in zip(self._shared, self._views, strict=True):
            if tensor.data_ptr() == view.data_ptr():
                tensor.data = view.clone(memory_format=torch.preserve_format)
        for (_, tensor, _), view in zip(self._counters, self._shared_counters, strict=True):
            tensor.copy_(view)
        self.counts.take()
        self.memory.close()

    def merge(self) -> None:
        """Exchange the counters and the numbers of steps of all processes."""
        with self.memory.lock():
            self.share_counters()
        self.counts.take()

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
    """Return a tensor's place; strides are its own if it has no gaps and overlaps, as in channels_last."""
    strides = torch.empty_like(tensor, memory_format=torch.preserve_format, device="meta").stride()
    return memory.tensor(offset, tensor.numel(), tensor.dtype).as_strided(tensor.shape, strides)


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
        ValueError: if a tensor is on another device, is not initialised, or belongs to a wrapper of other processes.
    """
    refuse_wrapped(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no parameter to train")
    for name, tensor in _tensors(model, optimizers, True):
        refuse(
            (
                isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)),
                f"{name} is not initialised: run a forward pass first",
            ),
            (
                tensor.device.type != "cpu",
                f"{name} is on {tensor.device}: Hogwild! shares the memory of CPU processes; move the model to the "
                "CPU, or use GradientReduction or DistributedDataParallel for GPUs",
            ),
            (
                tensor.layout != torch.strided or tensor.is_quantized,
                f"{name} is a {tensor.layout} tensor, which cannot be shared",
            ),
        )
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if not any(id(parameter) in trained for parameter in model.parameters()):
        raise ValueError("the optimizer holds no parameter of the model")
