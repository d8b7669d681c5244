"""Gradients of a step that are held as products of factors until an optimizer applies them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor, nn

from ..errors import MismatchError
from .product import GradientProduct
from .updates import UPDATES, apply_products, reason_against

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
