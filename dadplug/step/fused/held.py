"""Bases of what holds the gradients of a step as products, for optimizers that apply them without forming them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..model_sync.private import is_private
from .products import Deferral, GradientProduct, clip_norm


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
        from .steps import fused_remarks  # here and below: few runs have fused steps

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
        from .steps import reasons_against

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
            from .steps import apply_products

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
        from .steps import reasons_against, take_step

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
