"""State of optimizers as it is shared: created before the first step, with exact numbers of steps."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        TypeError: if it is no optimizer.
        ValueError: if it cannot be used, or its state cannot be shared.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {name}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "L-BFGS evaluates the loss several times a step and needs parameters that do not change meanwhile: with "
            "Hogwild!, where all processes change them, use SGD, Adam or another first-order optimizer"
        )
    if state != "shared":
        return
    if type(optimizer) not in SHAREABLE:
        valid = ", ".join(each.__name__ for each in SHAREABLE)
        raise ValueError(f'the state of {name} cannot be shared; pass state="own", or use one of {valid}')
    sparse = sparse_weights(model)
    for group in optimizer.param_groups:
        if group.get("momentum") and group.get("dampening"):
            raise ValueError('SGD with dampening treats its first step differently: pass state="own"')
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] and any(p in sparse for p in group["params"]):
            raise ValueError(
                "SGD's momentum of a sparse gradient is a sparse tensor, which cannot be shared: put the tables into "
                'a parameter group with momentum 0, use SparseAdam or Adagrad, or pass state="own"'
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
        initial: their numbers of steps before the training, of shape (parameters,).
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._states: list[dict[str, Any]] = []
        self.parameters: list[Tensor] = []
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                if STEP in state:
                    self.parameters.append(parameter)
                    self._states.append(state)
        self.initial = self.current
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._tensors = [isinstance(state[STEP], Tensor) for state in self._states]

    @property
    def current(self) -> Tensor:
        """Numbers of steps in the states of this process, of shape (parameters,)."""
        return torch.tensor([int(state[STEP]) for state in self._states], dtype=torch.int64)

    def with_gradient(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return which parameters the next step of an optimizer changes, as a mask of shape (parameters,)."""
        mask = torch.zeros(len(self.parameters), dtype=torch.int64)
        places = [
            self._place[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and id(parameter) in self._place
        ]
        mask[places] = 1
        return mask

    def set(self, counts: Tensor, mask: Tensor | None = None) -> None:
        """Set the numbers in the states of this process.

        Args:
            counts: numbers of steps, of shape (parameters,).
            mask: the parameters to set, as from `with_gradient`; all if None.
        """
        places = range(len(self._states)) if mask is None else mask.nonzero()[:, 0].tolist()
        values = counts.tolist()
        for place in places:
            state = self._states[place]
            if self._tensors[place]:
                state[STEP].fill_(values[place])
            else:
                state[STEP] = values[place]
