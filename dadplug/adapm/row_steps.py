"""Steps of managed rows, along with an optimizer's step of all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .managed_weight import ManagedWeight

if TYPE_CHECKING:
    from ..reduction import GradientReduction
    from .manager import ParameterManager


class RowSteps:
    """Gradients of managed weights from backward to the end of the optimizer's step.

    It is the `dadplug.reducer.attached.AttachedGradients` of the reduction.

    Args:
        managed: the managed weights by name.
        padding: keys whose gradient is ignored, by name of the weight.
        manager: the parameter manager.
        reduction: the reduction of the other parameters; None if there are none.
        reduce: ``"mean"`` or ``"sum"``, see `AdaModel`.
    """

    def __init__(
        self,
        managed: Mapping[str, ManagedWeight],
        padding: Mapping[str, set[int]],
        manager: ParameterManager,
        reduction: GradientReduction | None,
        reduce: str,
    ) -> None:
        self._managed, self._padding = managed, padding
        self._sites = manager.world_size
        self._reduction = reduction
        self._reduce = reduce
        self._hidden: dict[str, Tensor] = {}  # gradients, while the optimizer steps all other parameters
        if reduction is not None:
            reduction.attach(self)

    # Interface of the reduction

    @property
    def arrived(self) -> bool:
        """Whether backward has added gradients since the last synchronization, cleared or not."""
        return any(weight.has_arrived for weight in self._managed.values())

    @property
    def cleared(self) -> bool:
        """Whether the program has cleared all of them."""
        return not self._unweighted()

    @property
    def names(self) -> list[str]:
        """The names of the managed weights."""
        return list(self._managed)

    def first_not_finite(self) -> int | None:
        """Return the number of the first weight whose gradient holds NaN or Inf; None if there is none."""
        weights = enumerate(self._managed.values())
        return next((number for number, weight in weights if weight.needs_share and not weight.is_finite), None)

    def apply_share(self, share: float | None) -> None:
        """Weight the gradients that have arrived.

        Args:
            share: this site's share of the samples; None if it is not known.
        """
        if self._reduce == "sum":
            share = 0.0 if share == 0.0 else 1.0
        elif share is None:
            share = 1.0 / self._sites
        for weight in self._managed.values():
            weight.apply_share(share)

    def fill_with_inf(self) -> None:
        """Replace the gradients by ones with Inf, since the gradients of some site are not finite."""
        for weight in self._managed.values():
            weight.fill_with_inf()

    # The optimizer's step

    def finish(self, what: str) -> None:
        """Weight gradients that no `synchronize` has weighted, if that needs no other site.

        Args:
            what: the operation that needs the gradients, for the message of the error.

        Raises:
            RuntimeError: if `synchronize` has to be called first.
        """
        late = self._unweighted()
        if late and self._reduction is not None and self._sites > 1:
            raise RuntimeError(
                f"{what} before the gradient of {late[0]!r} is agreed: call synchronize() after backward()"
            )
        if late:
            self.apply_share(None)

    def _unweighted(self) -> list[str]:
        return [name for name, weight in self._managed.items() if weight.needs_share]

    def begin(self, args: Any, kwargs: Any) -> Any:
        """Hide the gradients of managed weights from the optimizer, also those that a closure computes.

        Args:
            args: positional arguments of ``step``, with the optimizer.
            kwargs: keyword arguments of ``step``.

        Returns:
            The arguments that replace them; None if they do not change.
        """
        closures = {id(each): self._hiding(each) for each in (*args[1:], *kwargs.values()) if callable(each)}
        if not closures:
            self._hide()
            return None
        args = tuple(closures.get(id(each), each) for each in args)
        return args, {name: closures.get(id(each), each) for name, each in kwargs.items()}

    def _hiding(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            self._show()
            result = closure()
            self._hide()
            return result

        return call

    def _hide(self) -> None:
        self.finish("optimizer.step()")
        for name, weight in self._managed.items():
            if weight.parameter.grad is not None:
                self._hidden[name], weight.parameter.grad = weight.parameter.grad, None

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, {}
        for name, gradient in hidden.items():
            self._managed[name].parameter.grad = gradient

    def step(self, optimizer: Optimizer) -> None:
        """Push the deltas of one step of an optimizer."""
        self._show()
        # A GradScaler sets these on fused optimizers, which unscale the gradients themselves.
        found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return
        factor = 1.0 if scale is None else 1.0 / scale.item()
        for name, weight in self._managed.items():
            weight.step(group_of(optimizer, weight.parameter), factor, self._padding[name])


def group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the parameter group of a managed parameter.

    Raises:
        ValueError: if the optimizer no longer has the parameter.
    """
    for group in optimizer.param_groups:
        if any(parameter is other for other in group["params"]):
            return group
    raise ValueError("a managed weight has left the optimizer that AdaModel was made with")
