"""Steps in which an optimizer applies gradients that are not formed, but held as products of factors."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MismatchError
from .updates import UPDATES, GradientProduct, apply_products, reason_against

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

    Args:
        weights: parameters whose gradients are in ``.grad``; those without are left out.
        products: further gradients.
        max_norm: largest norm.
        norm_type: which norm.
        error_if_nonfinite: whether a norm that is not finite is an error.

    Returns:
        The norm before.

    Raises:
        RuntimeError: for such a norm.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norms = [product.norm(norm_type) for product in products.values()]
    norms += [torch.nn.utils.get_total_norm([gradient], norm_type) for gradient in gradients]
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {float(total)}, and cannot be clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    for product in products.values():
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
        """Clip the norm of the gradients of some parameters, held ones among them; return the norm before."""
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
            raise RuntimeError("the gradients are agreed already: use torch.nn.utils.clip_grad_norm_, or zero_grad()")
        deferral = Deferral(set(weights))
        self._exchange(deferral=deferral)
        try:
            norm = clip_norm(weights, deferral.products, max_norm, norm_type, error_if_nonfinite)
        except RuntimeError:
            deferral.form(deferral.products)
            raise
        self._held = deferral
        return norm
