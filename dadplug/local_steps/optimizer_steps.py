"""Steps of a site's optimizer: ordinary ones, fused ones on gradients that are not formed, and synchronous ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..fused import Deferral, GradientProduct, HeldGradients, clip_norm, reasons_against
from ..model_sync.samples import SampleCounter
from ..reduction import GradientReduction
from .captured import CapturedGradients
from .options import LocalOptions


class OptimizerSteps(HeldGradients):
    """Base of `dadplug.LocalSGD`: what happens between backward and the end of the optimizer's step.

    Attributes:
        optimizer: the optimizer.
        local_options: the options.
    """

    optimizer: torch.optim.Optimizer
    local_options: LocalOptions
    _counter: SampleCounter
    _warm_up: GradientReduction | None = None
    _captured: CapturedGradients | None = None  # in local steps, if some of them are fused
    _may_fuse = True  # until `stop_fusing`, which may be called in the warm-up
    _has_synchronized = False  # in this synchronous step, for `clip_grad_norm_`
    _accumulates = False

    @abstractmethod
    def stepping(self) -> AbstractContextManager[None]:
        """Count a step that the block takes by calling the optimizer."""

    @property
    def synchronous(self) -> bool:
        """Whether the next step is a synchronous one, of the warm-up."""
        return self._warm_up is not None

    @property
    def syncing(self) -> bool:
        """Whether gradients are complete after the next backward pass; False inside `no_sync`."""
        return not self._accumulates if self._warm_up is None else self._warm_up.syncing

    def _begin_capture(self) -> None:
        if self.local_options.fused and self._may_fuse:
            self._captured = CapturedGradients(self.model, self.optimizer, self._counter.owned)
            self.remarks = self._captured.remarks

    def _before_forward(self) -> None:
        if self._captured is not None:
            self._captured.before_forward()

    def stop_fusing(self, reason: str) -> None:
        """Take ordinary steps from now on.

        Args:
            reason: why, for `remarks`.
        """
        self._may_fuse = False
        if self.local_options.fused:
            self.remarks = (f"fused steps: no, {reason}",)
        if self._captured is not None:
            self._captured.release(discard=False)
            self._captured = None

    def step(self, closure: Callable[[], Any] | None = None, *, scaler: Any = None) -> Any:
        """Take a step of the optimizer, and agree with the other sites if it is time; instead of ``optimizer.step()``.

        Call it after backward, once for each batch (with accumulation: once for each update). Clip and unscale
        gradients before it.

        Args:
            closure: passed to the optimizer, for optimizers that evaluate the loss themselves.
            scaler: the `torch.amp.GradScaler` that takes the step, ``scaler.step(optimizer)``; call its ``update`` and,
                where needed, ``unscale_`` yourself. Steps are not fused then.

        Returns:
            What the optimizer's step returns.

        Raises:
            NonFiniteError: on all sites, if the parameters of one hold NaN or Inf at an agreement. The steps since the
                last agreement are discarded on all sites.
            ValueError: with a closure in a synchronous step.
            MismatchError: on all sites, if they do not agree at the same step, or not on the same parameters.
            SiteError: if a site is gone or does not answer in time.
        """
        if closure is not None and self.synchronous:
            raise ValueError("an optimizer with a closure cannot take synchronous steps: leave warm_up out")
        if scaler is not None and scaler.is_enabled():
            self.stop_fusing("a GradScaler scales the loss")
        if self._captured is not None and self._captured.fuses:
            return self._fused_step(closure)
        if self._warm_up is None or self._warm_up.pending or not self._has_synchronized:
            self.synchronize()
        with self.stepping():
            if scaler is not None:
                return scaler.step(self.optimizer)
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def _fused_step(self, closure: Callable[[], Any] | None) -> Any:
        with self.stepping():
            loss = None
            if closure is not None:  # an optimizer with a fused step calls it once, before anything else
                with torch.enable_grad():
                    loss = closure()
            self.hold(self.optimizer)
            self.apply_held(self.optimizer, self.optimizer.step)
        return loss

    def synchronize(self) -> None:
        """Agree on gradients in a synchronous step; in a local one, form those that are not formed. `step` calls it.

        For trainers that call the optimizer themselves, before they clip gradients.
        """
        self._exchange()

    def _exchange(self, *, deferral: Deferral | None = None) -> None:
        if self._warm_up is not None:
            self._warm_up.synchronize()
        elif self._captured is not None:
            self._captured.collect(deferral)
            self.remarks = self._captured.remarks

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the norm of this site's gradients, as `torch.nn.utils.clip_grad_norm_` does; before `step`.

        Norms of gradients that are not formed are taken from the factors' Gram matrices. In a synchronous step it
        synchronizes, and the gradients are those of all sites.

        Args:
            max_norm: largest norm.
            norm_type: which norm, as `torch.linalg.vector_norm` takes it.
            error_if_nonfinite: whether a norm that is not finite is an error.

        Returns:
            The norm before.

        Raises:
            RuntimeError: if the norm is not finite and that is an error.

        Example:
            >>> criterion(model(inputs), targets).backward()
            >>> local.clip_grad_norm_(1.0)
            >>> local.step()
        """
        reasons = reasons_against([self.optimizer])
        deferral = Deferral({weight for weight, reason in reasons.items() if not reason})
        self._exchange(deferral=deferral)
        self._has_synchronized = True
        try:
            return clip_norm(self.model.parameters(), deferral.products, max_norm, norm_type, error_if_nonfinite)
        finally:
            self._put_back(deferral.products)

    def _put_back(self, products: Mapping[nn.Parameter, GradientProduct]) -> None:
        if self._captured is not None:
            self._captured.put_back(products)

    def remark_on(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Do nothing: the remarks have been made by then."""

    def form_gradients(self) -> None:
        """Form the gradients that an ordinary step of the optimizer is about to read."""
        if self._captured is not None:
            self._captured.collect()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold gradients back in a synchronous step, for accumulation; in local steps nothing is sent anyway."""
        if self._warm_up is not None:
            with self._warm_up.no_sync():
                yield
            return
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before
