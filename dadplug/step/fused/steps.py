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
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module

from ...errors import MismatchError
from ...exchange.factor_buckets import FactorPayload
from ...hooks import OwnHook
from ...support.registry import Registry
from ...support.schedules import DEFAULTS, Decoding
from ..model_sync.private import is_private

_CUDA_TILE_ELEMENTS = 1 << 22
_LEAST = 4  # rows and columns of a gradient for which these kernels are made
_BLOCK_COLUMNS = 2048  # four rows of so many numbers fit into the first cache
_DOUBLE = 2.0  # a multiplication in double precision costs about this much more
Group = Mapping[str, Any]
_HOOKS_OF_ALL = optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks


class GradientProduct:
    """Agreed gradient of a weight, ``sum over sites of w_s left_s^T right_s``, without the matrix that it makes.

    Args:
        payloads: what each site sent, by rank.
        weights: each site's share in the mean.
        transposed: whether the gradient is ``right^T left``.
        constants: sizes of blocks; the same at all sites, since the last bits depend on them.

    Attributes:
        left: the rows of all sites times their shares, of shape (rows, height).
        right: the rows, of shape (rows, width).
    """

    def __init__(
        self,
        payloads: Sequence[FactorPayload],
        weights: Sequence[float],
        transposed: bool = False,
        constants: Decoding = DEFAULTS.decoding,
    ) -> None:
        self._tile, self._narrow = constants.tile, constants.narrow
        lefts = [payload.left * weight for payload, weight in zip(payloads, weights, strict=True)]
        rights = [payload.right for payload in payloads]
        left, right = (torch.cat(lefts), torch.cat(rights)) if len(lefts) > 1 else (lefts[0], rights[0])
        self.left, self.right = (right, left) if transposed else (left, right)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the gradient."""
        return self.left.shape[1], self.right.shape[1]

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradient by a number."""
        self.left = self.left * factor

    def formed(self) -> Tensor:
        """Return the gradient as a matrix."""
        return self.left.T @ self.right

    @property
    def is_narrow(self) -> bool:
        """Whether the factors have so few rows that kernels of their own multiply them faster than BLAS."""
        return self.left.shape[0] <= self._narrow and min(self.shape) >= _LEAST

    def padded(self, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the kernels for few rows take: both factors, filled up by rows of zeros, and a block to work in.

        Args:
            multiple: their number of rows becomes a multiple of this; it is the number of rows of the block.
        """
        rows, width = self.right.shape
        missing = -rows % multiple if rows else multiple
        left, right = (F.pad(each, (0, 0, 0, missing)) if missing else each for each in (self.left, self.right))
        block = left.new_empty(multiple, min(width, _BLOCK_COLUMNS))
        return left.contiguous(), right.contiguous(), block

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Form the gradient in blocks of its rows.

        Yields:
            First row, the row after the last, and the block, which is valid until the next one.
        """
        height, width = self.shape
        elements = _CUDA_TILE_ELEMENTS if self.left.is_cuda else self._tile
        step = min(height, max(1, elements // max(1, width)))
        scratch = self.left.new_empty(step, width)
        for start in range(0, height, max(1, step)):
            end = min(height, start + step)
            yield start, end, torch.mm(self.left[:, start:end].T, self.right, out=scratch[: end - start])

    def norm(self, order: float = 2.0) -> Tensor:
        """Return the norm of the gradient's elements, a scalar.

        The 2-norm comes from Gram matrices where that takes fewer multiplications,
        ``|L^T R|^2 = sum((L L^T) * (R R^T))``, in double precision, since the terms may cancel.

        Args:
            order: which norm, as `torch.linalg.vector_norm` takes it.
        """
        rows, (height, width) = self.left.shape[0], self.shape
        if order == 2.0 and _DOUBLE * rows * (height + width) < height * width:
            left, right = self.left.double(), self.right.double()
            squares = ((left @ left.T) * (right @ right.T)).sum()
            return squares.clamp_min(0.0).sqrt().to(self.left.dtype)
        norms = [torch.linalg.vector_norm(block, order) for _, _, block in self.tiles()]
        if not norms:
            return self.left.new_zeros(())
        if math.isinf(order):
            return torch.stack(norms).amax() if order > 0 else torch.stack(norms).amin()
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        return total


# Steps of optimizers


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


_NOT_EMPTY = 1 << 32


class Deferral:
    """Weights whose agreed gradients need not be formed in a step, and these gradients as products.

    Sites must form the same gradients, since a step on a product rounds in another way. So each states in its step
    header which weights it means, and all gradients are formed unless the sites agree.

    Args:
        weights: the weights.

    Attributes:
        agreed: whether all sites mean the same weights.
        products: the agreed gradients that have not been formed, by weight.
    """

    def __init__(self, weights: Set[nn.Parameter]) -> None:
        self._weights = weights
        self.agreed = False
        self.products: dict[nn.Parameter, GradientProduct] = {}

    def has(self, weight: nn.Parameter) -> bool:
        """Return whether the gradient of a weight need not be formed."""
        return weight in self._weights

    def digest(self, units: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Return a number that is the same at all sites that mean the same weights.

        Args:
            units: names and weights of all units.
        """
        names = "\n".join(name for name, weight in units if self.has(weight))
        return zlib.crc32(names.encode()) | _NOT_EMPTY

    def form(self, weights: Iterable[nn.Parameter]) -> None:
        """Write gradients to ``.grad`` after all.

        Args:
            weights: weights whose gradients are products.
        """
        for weight in list(weights):
            weight.grad = self.products.pop(weight).formed().view(weight.shape)


def compare_digests(deferral: Deferral | None, own: int, digests: Iterable[int]) -> None:
    """Compare the digests of the sites, so that all of them form the same gradients.

    Args:
        deferral: the gradients that this site would not form; None for those of none.
        own: this site's digest.
        digests: those of the sites that have a part in the step, which may be without this one.

    Raises:
        MismatchError: if this site has no part, and would not do as all others.
    """
    found = set(digests)
    common = found.pop() if len(found) == 1 else 0
    if common and own != common:
        raise MismatchError("the other sites call reduction.apply(optimizer): all sites must call it in the same steps")
    if deferral is not None:
        deferral.agreed = bool(common)


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


@torch.no_grad()
def clip_norm(
    weights: Iterable[nn.Parameter],
    products: Mapping[nn.Parameter, GradientProduct],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip the norm of gradients of which some are products, as `torch.nn.utils.clip_grad_norm_` does.

    Gradients of private parameters are clipped by a norm of their own: that of the others is the same at all sites.

    Args:
        weights: parameters whose gradients are in ``.grad``; those without are left out.
        products: further gradients.
        max_norm: largest norm.
        norm_type: which norm.
        error_if_nonfinite: whether a norm that is not finite is an error.

    Returns:
        The norm before, without private parameters.

    Raises:
        RuntimeError: for such a norm.
    """
    chosen, norms = list(weights), []
    for private in (False, True):
        gradients = [each.grad for each in chosen if each.grad is not None and is_private(each) is private]
        held = [product for weight, product in products.items() if is_private(weight) is private]
        norms.append(_clip(gradients, held, max_norm, norm_type, error_if_nonfinite))
    return norms[0]


def _clip(
    gradients: Sequence[Tensor],
    products: Sequence[GradientProduct],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    norms = [product.norm(norm_type) for product in products]
    norms += [torch.nn.utils.get_total_norm([gradient], norm_type) for gradient in gradients]
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {float(total)}, and cannot be clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    for product in products:
        product.scale(factor)
    return total


class HeldGradients(ABC):
    """Base of what holds gradients of a step as products, for optimizers that apply them without forming them.

    For trainers, where synchronization, clipping and the optimizer's step are at different places.

    Attributes:
        model: the model.
    """

    model: nn.Module
    remarks: tuple[str, ...] = ()
    """Whether optimizer steps are fused, with the reasons where they are not; printed at the end of a plan."""
    _held: Deferral | None = None  # between hold and apply_held, or between clip_grad_norm_ and apply

    @abstractmethod
    def _exchange(self, *, deferral: Deferral | None = None) -> None:
        """Complete the gradients of a step; write them to ``.grad``, but for those that may stay products."""

    def remark_on(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Set the remarks to which weights' gradients are formed for optimizers, and why.

        Args:
            optimizers: the optimizers that will step.
        """
        self.remarks = fused_remarks(self.model, optimizers)

    def stop_fusing(self, reason: str) -> None:
        """Let the plan show why steps are not fused, for trainers.

        Args:
            reason: why.
        """
        self.remarks = (f"fused steps: no, {reason}",)

    def hold(self, *optimizers: torch.optim.Optimizer) -> None:
        """Synchronize, and hold the gradients that need not be formed until `apply_held` is called.

        Args:
            optimizers: the optimizers, all of which step before the next backward pass.
        """
        reasons = reasons_against(optimizers)
        deferral = Deferral({weight for weight, reason in reasons.items() if not reason})
        self._exchange(deferral=deferral)
        self._held = deferral if deferral.products else None

    @property
    def holds(self) -> bool:
        """Whether gradients are held for `apply_held`."""
        return self._held is not None

    def clip_held(self, weights: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip the norm of the gradients of some parameters, held ones among them; return the norm before.

        Unlike `torch.nn.utils.clip_grad_norm_` it clips private parameters by a norm of their own.
        """
        chosen = list(weights)
        products = {} if self._held is None else self._held.products
        own = {weight: products[weight] for weight in chosen if weight in products}
        return clip_norm(chosen, own, max_norm, norm_type, error_if_nonfinite=False)

    def apply_held(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any] | None = None) -> None:
        """Apply the held gradients of an optimizer's weights to them.

        Args:
            optimizer: the optimizer.
            step: takes its ordinary step for all other weights; None if that has been taken.
        """
        held, self._held = self._held, None
        try:
            if step is not None:
                step()
        except BaseException:
            if held is not None:
                self._put_back(held.products)
            raise
        if held is None:
            return
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        products = {weight: held.products.pop(weight) for weight in weights if weight in held.products}
        if products:
            apply_products(optimizer, products)
            self._put_back(products)
        self._held = held if held.products else None

    def _put_back(self, products: Mapping[nn.Parameter, GradientProduct]) -> None:  # noqa: B027
        """Keep gradients after a step, also one that has failed, where programs may read them; or forget them."""


class FusedSteps(HeldGradients):
    """Base of a reduction whose agreed gradients can be applied without being formed."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Whether gradients have arrived that are not agreed on yet, and have not been cleared."""

    def apply(self, *optimizers: torch.optim.Optimizer) -> None:
        """Synchronize, and take the optimizers' steps: `synchronize` and ``optimizer.step()`` in one.

        The agreed gradient of a factored weight is not formed: blocks of it are computed in the processor's cache and
        applied to the weight and to the optimizer's state at once, and ``.grad`` stays None. SGD, Adam, AdamW and
        Adagrad of `torch.optim` do so, without ``amsgrad``, ``capturable`` and ``differentiable``, and without hooks on
        the optimizer, for contiguous weights of float32 or float64. All other gradients are written to ``.grad``, and
        the optimizer takes its ordinary step with them. Results are those of the ordinary step up to rounding.

        All sites must call it in the same steps; those without data, too. Where they do not mean the same weights, all
        gradients are formed. A loss that a `torch.amp.GradScaler` has scaled is not for this: it needs
        ``synchronize()`` and ``scaler.step(optimizer)``.

        Args:
            optimizers: one or more optimizers. Gradients of weights that none of them has are written to ``.grad``.

        Raises:
            TypeError: if an argument is no optimizer.
            NonFiniteError: as in `synchronize`, like its other errors; nothing has been changed then.

        Example:
            >>> for inputs, targets in loader:
            ...     optimizer.zero_grad()
            ...     criterion(model(inputs), targets).backward()
            ...     reduction.apply(optimizer)
        """
        reasons = reasons_against(optimizers)
        deferral, self._held = self._held, None
        if deferral is None:
            deferral = Deferral({weight for weight, reason in reasons.items() if not reason})
            self._exchange(deferral=deferral)
        deferral.form(weight for weight in deferral.products if reasons.get(weight, "not an optimizer's"))
        take_step(optimizers, deferral.products)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all agreed gradients of the model, as `torch.nn.utils.clip_grad_norm_` does.

        It synchronizes, and takes the norms of factored weights' gradients from the factors' Gram matrices; `apply`
        has to follow. After `synchronize`, use `torch.nn.utils.clip_grad_norm_` instead.

        Args:
            max_norm: largest norm.
            norm_type: which norm, as `torch.linalg.vector_norm` takes it.
            error_if_nonfinite: whether a norm that is not finite is an error.

        Returns:
            The norm before, the same on all sites.

        Raises:
            RuntimeError: if the gradients are agreed already, or the norm is not finite and that is an error; then all
                gradients are in ``.grad``, and `apply` does not follow.
            NonFiniteError: as in `synchronize`, like its other errors.

        Example:
            >>> criterion(model(inputs), targets).backward()
            >>> reduction.clip_grad_norm_(1.0)
            >>> reduction.apply(optimizer)
        """
        weights = list(self.model.parameters())
        if not self.pending and any(weight.grad is not None for weight in weights):
            other = "reduction.clip_held" if any(map(is_private, weights)) else "torch.nn.utils.clip_grad_norm_"
            raise RuntimeError(f"the gradients are agreed already: use {other}, or zero_grad()")
        deferral = Deferral(set(weights))
        self._exchange(deferral=deferral)
        try:
            norm = clip_norm(weights, deferral.products, max_norm, norm_type, error_if_nonfinite)
        except RuntimeError:
            deferral.form(deferral.products)
            raise
        self._held = deferral
        return norm
