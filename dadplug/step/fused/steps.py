"""Steps in which an optimizer applies gradients that are not formed, but held as products of factors.

The products are formed tile by tile. The state has the names and types that torch gives it, so that fused and ordinary
steps may take turns, and an optimizer's ``state_dict`` is the same. A further optimizer is a subclass of `Update`,
registered by `register_update`.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module

from ...hooks import OwnHook
from ...support.registry import Registry
from .products import GradientProduct

Group = Mapping[str, Any]
_HOOKS_OF_ALL = optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks


class Update(ABC):
    """One step of an optimizer for one weight, block by block.

    Args:
        weight: the weight.
        group: options of its group of parameters.
        state: the optimizer's state of the weight, which is changed.

    Attributes:
        states: tensors of the state that have the weight's shape.
    """

    refused: ClassVar[tuple[str, ...]] = ("differentiable", "capturable")
    """Options of a group with which the ordinary step is taken."""

    def __init__(self, weight: Tensor, group: Group, state: dict[str, Any]) -> None:
        self.rate = float(group["lr"])
        self.decay = float(group.get("weight_decay", 0.0))
        self.states: Sequence[Tensor] = ()

    @property
    @abstractmethod
    def compiled(self) -> tuple[str, Sequence[float]]:
        """Name of the numba kernel that updates a block, and its scalars.

        There is a second kernel, ``..._of_product``, for the whole of a weight whose gradient has few rows.
        """

    @abstractmethod
    def portable(self, weight: Tensor, gradient: Tensor, *states: Tensor) -> None:
        """Update a block by torch, on any device.

        Args:
            weight: a block of rows of the weight.
            gradient: the same block of the gradient, which may be changed.
            states: the same block of each of `states`.
        """


UPDATES: Registry[type[torch.optim.Optimizer], type[Update]] = Registry("optimizer")
"""Steps by the optimizer's class. Subclasses are not found by their bases, since they may do something else."""


def register_update(optimizer: type[torch.optim.Optimizer]) -> Callable[[type[Update]], type[Update]]:
    """Register the step of a class of optimizers; a class decorator."""
    return UPDATES.register(optimizer)


@register_update(torch.optim.SGD)
class SGD(Update):
    """Step of `torch.optim.SGD`, with momentum, Nesterov's too, and dampening."""

    def __init__(self, weight: Tensor, group: Group, state: dict[str, Any]) -> None:
        super().__init__(weight, group, state)
        self._keep = float(group["momentum"])
        self._nesterov = bool(group["nesterov"])
        self._take = 1.0 - float(group["dampening"])
        if self._keep:
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
                self._take = 1.0  # the first gradient is not dampened
            self.states = [state["momentum_buffer"]]

    @property
    def _factors(self) -> tuple[float, float]:
        """Factors of the momentum and of the gradient in the step."""
        return (self._keep, 1.0) if self._nesterov else (1.0, 0.0)

    @property
    def compiled(self) -> tuple[str, Sequence[float]]:
        if not self._keep:
            return "sgd", (self.rate, self.decay)
        return "momentum", (self.rate, self.decay, self._keep, self._take, *self._factors)

    def portable(self, weight: Tensor, gradient: Tensor, *states: Tensor) -> None:
        gradient.add_(weight, alpha=self.decay)
        if self._keep:
            (velocity,) = states
            velocity.mul_(self._keep).add_(gradient, alpha=self._take)
            ahead, own = self._factors
            gradient = gradient.mul_(own).add_(velocity, alpha=ahead)
        weight.add_(gradient, alpha=-self.rate)


@register_update(torch.optim.Adam)
class Adam(Update):
    """Step of `torch.optim.Adam` and `torch.optim.AdamW`, without ``amsgrad``."""

    refused = (*Update.refused, "amsgrad")
    decoupled = False
    """Whether weights shrink beside the step, where the group does not say so."""

    def __init__(self, weight: Tensor, group: Group, state: dict[str, Any]) -> None:
        super().__init__(weight, group, state)
        if "exp_avg" not in state:
            state["step"] = state.get("step", self._no_steps(weight, group))
            state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        self.states = [state["exp_avg"], state["exp_avg_sq"]]
        state["step"] += 1
        step = float(state["step"])
        self._first, self._second = (float(beta) for beta in group["betas"])
        self._epsilon = float(group["eps"])
        self._size = self.rate / (1.0 - self._first**step)
        self._correction = math.sqrt(1.0 - self._second**step)
        self._shrink = 1.0
        if group.get("decoupled_weight_decay", self.decoupled):
            self._shrink, self.decay = 1.0 - self.rate * self.decay, 0.0

    @staticmethod
    def _no_steps(weight: Tensor, group: Group) -> Tensor:
        """Return a count of zero steps where torch has it: in single precision at least, or steps would be lost."""
        if group.get("fused"):  # torch's own kernel reads it on the weight's device
            return torch.zeros((), dtype=torch.float32, device=weight.device)
        wide = torch.get_default_dtype() == torch.float64
        return torch.zeros((), dtype=torch.float64 if wide else torch.float32)

    @property
    def compiled(self) -> tuple[str, Sequence[float]]:
        averages = 1.0 - self._first, self._second, 1.0 - self._second
        return "adam", (self._shrink, self.decay, *averages, self._size, 1.0 / self._correction, self._epsilon)

    def portable(self, weight: Tensor, gradient: Tensor, *states: Tensor) -> None:
        mean, square = states
        gradient.add_(weight, alpha=self.decay)
        mean.lerp_(gradient, 1.0 - self._first)
        square.mul_(self._second).addcmul_(gradient, gradient, value=1.0 - self._second)
        denominator = torch.sqrt(square, out=gradient).div_(self._correction).add_(self._epsilon)
        weight.mul_(self._shrink).addcdiv_(mean, denominator, value=-self._size)


@register_update(torch.optim.AdamW)
class AdamW(Adam):
    """Step of `torch.optim.AdamW`."""

    decoupled = True


@register_update(torch.optim.Adagrad)
class Adagrad(Update):
    """Step of `torch.optim.Adagrad`."""

    def __init__(self, weight: Tensor, group: Group, state: dict[str, Any]) -> None:
        super().__init__(weight, group, state)
        state["step"] += 1
        self.states = [state["sum"]]
        self.rate /= 1.0 + (float(state["step"]) - 1.0) * float(group["lr_decay"])
        self._epsilon = float(group["eps"])

    @property
    def compiled(self) -> tuple[str, Sequence[float]]:
        return "adagrad", (self.rate, self.decay, self._epsilon)

    def portable(self, weight: Tensor, gradient: Tensor, *states: Tensor) -> None:
        (total,) = states
        gradient.add_(weight, alpha=self.decay)
        total.addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, total.sqrt().add_(self._epsilon), value=-self.rate)


def reason_against(optimizer: torch.optim.Optimizer, group: Group, weight: nn.Parameter) -> str:
    """Return why the gradient of a weight is formed for an optimizer; empty if it need not be.

    Args:
        optimizer: the optimizer.
        group: the group that the weight is in.
        weight: the weight.
    """
    update = UPDATES.get(type(optimizer))
    if update is None:
        return f"{type(optimizer).__name__} has no fused step"
    for option in update.refused:
        if group.get(option):
            return f"{option}=True has no fused step"
    if _has_user_hooks(optimizer):
        return "hooks of the optimizer may read the gradient"
    if weight.dtype not in (torch.float32, torch.float64) or not weight.is_contiguous():
        return "the fused step takes contiguous weights of float32 or float64"
    return ""


def _has_user_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps of an optimizer, or of all optimizers, have hooks that are not of this package."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    hooks = [hook for each in (*own, *_HOOKS_OF_ALL) for hook in each.values()]
    return any(not isinstance(hook, OwnHook) for hook in hooks)


@functools.cache
def _kernels() -> ModuleType | None:
    """Return the numba kernels, or None, with a warning, where numba cannot run."""
    try:
        from . import kernels
    except ImportError as error:
        warnings.warn(f"no numba: fused steps are taken by torch, in several passes ({error})", stacklevel=2)
        return None
    return kernels


def engine_for(weights: Iterable[nn.Parameter]) -> str:
    """Return what takes fused steps of some weights, ``"numba"`` or ``"torch"``, whose results differ by rounding."""
    return "torch" if any(weight.is_cuda for weight in weights) or _kernels() is None else "numba"


@torch.no_grad()
def apply_products(optimizer: torch.optim.Optimizer, products: Mapping[nn.Parameter, GradientProduct]) -> None:
    """Take an optimizer's step for the weights whose gradients are products, as its ``step`` does for others.

    Args:
        optimizer: the optimizer.
        products: gradients by weight; weights that are not the optimizer's are left out.
    """
    make = UPDATES[type(optimizer)]
    for group in optimizer.param_groups:
        for weight in group["params"]:
            product = products.get(weight)
            if product is not None:
                state = optimizer.state[weight]
                _apply(make(weight, group, state), weight, product, group.get("maximize", False))
                if not state:  # of SGD without momentum
                    del optimizer.state[weight]


def _apply(update: Update, weight: nn.Parameter, product: GradientProduct, ascend: bool) -> None:
    if ascend:
        product = copy.copy(product)
        product.scale(-1.0)
    tensors = [each.view(product.shape) for each in (weight.data, *update.states)]
    kernels = None if weight.is_cuda else _kernels()
    if kernels is None:
        for start, end, gradient in product.tiles():
            target, *states = (each[start:end] for each in tensors)
            update.portable(target, gradient, *states)
    else:
        _apply_compiled(kernels, update, [each.numpy() for each in tensors], product)
    torch.autograd.graph.increment_version(weight)


def _apply_compiled(kernels: ModuleType, update: Update, matrices: Sequence[Any], product: GradientProduct) -> None:
    """Update a weight by numba kernels.

    Args:
        kernels: the module of the kernels.
        update: the update.
        matrices: the weight and the optimizer's state.
        product: the gradient.
    """
    name, values = update.compiled
    number, width = matrices[0].dtype.type, product.shape[1]
    scalars = [number(value) for value in values]
    if product.is_narrow:
        left, right, block = product.padded(kernels.ROWS)
        getattr(kernels, f"{name}_of_product")(left.numpy(), right.numpy(), block.numpy(), *matrices, *scalars)
        return
    flat = [each.reshape(-1) for each in matrices]
    for start, end, gradient in product.tiles():
        block, *rest = (each[start * width : end * width] for each in flat)
        getattr(kernels, name)(block, gradient.view(-1).numpy(), *rest, *scalars)


def reasons_against(optimizers: Iterable[torch.optim.Optimizer]) -> dict[nn.Parameter, str]:
    """Return for every weight of some optimizers why its gradient is formed; empty where it need not be.

    Raises:
        TypeError: if one of them is not an optimizer.
    """
    reasons: dict[nn.Parameter, str] = {}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"apply() takes optimizers of torch.optim, got {type(optimizer).__name__}")
        for group in optimizer.param_groups:
            for weight in group["params"]:
                twice = weight in reasons
                reasons[weight] = "two optimizers have it" if twice else reason_against(optimizer, group, weight)
    return reasons


def fused_remarks(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Return the lines of a plan that say which weights' gradients are formed for optimizers, and why."""
    names = {weight: name for name, weight in model.named_parameters()}
    reasons = {weight: reason for weight, reason in reasons_against(optimizers).items() if weight in names}
    formed = {weight: reason for weight, reason in reasons.items() if reason}
    if formed and len(formed) == len(reasons):
        return (f"fused steps: no, {'; '.join(sorted(set(formed.values())))}",)
    return ("fused steps: yes", *(f"  {names[weight]}: no, {reason}" for weight, reason in formed.items()))


def take_step(optimizers: Iterable[torch.optim.Optimizer], products: Mapping[nn.Parameter, GradientProduct]) -> None:
    """Take the steps of optimizers: ordinary ones for gradients in ``.grad``, fused ones for products."""
    for optimizer in optimizers:
        optimizer.step()
        if type(optimizer) in UPDATES:
            apply_products(optimizer, products)
