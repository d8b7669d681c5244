"""Steps of managed rows beside an optimizer's step of all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .layers import ManagedWeight

if TYPE_CHECKING:
    from ..reduction import GradientReduction
    from .manager import ParameterManager


class RowSteps:
    """The gradients of managed weights between backward and the end of a step.

    Args:
        managed: the managed weights by name.
        padding: keys without a gradient, by weight.
        manager: connects the sites.
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

    # What the reduction asks

    @property
    def arrived(self) -> bool:
        """Whether backward has brought gradients that are not agreed on yet, cleared or not."""
        return any(weight.fresh for weight in self._managed.values())

    @property
    def cleared(self) -> bool:
        """Whether all those have been cleared."""
        return not self._unsettled()

    @property
    def names(self) -> list[str]:
        """The names of the managed weights."""
        return list(self._managed)

    def first_not_finite(self) -> int | None:
        """Return the number of the first weight whose gradient holds NaN or Inf; None if there is none."""
        weights = enumerate(self._managed.values())
        return next((number for number, weight in weights if weight.unsettled and not weight.is_finite), None)

    def settle(self, share: float | None) -> None:
        """Weight the rows' gradients by this site's share of the samples; None where that is not known."""
        if self._reduce == "sum":
            share = 0.0 if share == 0.0 else 1.0
        elif share is None:
            share = 1.0 / self._sites
        for weight in self._managed.values():
            weight.settle(share)

    def spoil(self) -> None:
        """Make the gradients Inf on this site too, since those of another are not finite."""
        for weight in self._managed.values():
            weight.spoil()

    # The optimizer's step

    def settle_late(self, what: str) -> None:
        """Settle what no `synchronize` has; where there has to be one, raise.

        Raises:
            RuntimeError: if gradients have arrived since the last `synchronize`.
        """
        late = self._unsettled()
        if late and self._reduction is not None and self._sites > 1:
            raise RuntimeError(
                f"{what} before the gradient of {late[0]!r} is agreed: call synchronize() after backward()"
            )
        if late:
            self.settle(None)

    def _unsettled(self) -> list[str]:
        return [name for name, weight in self._managed.items() if weight.unsettled]

    def begin(self, args: Any, kwargs: Any) -> Any:
        """Keep managed weights from the optimizer, also after a closure has brought their gradients.

        Args:
            args: of ``step``, with the optimizer.
            kwargs: of ``step``.

        Returns:
            Both anew, or None if they stay.
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
        self.settle_late("optimizer.step()")
        for name, weight in self._managed.items():
            if weight.parameter.grad is not None:
                self._hidden[name], weight.parameter.grad = weight.parameter.grad, None

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, {}
        for name, gradient in hidden.items():
            self._managed[name].parameter.grad = gradient

    def step(self, optimizer: Optimizer) -> None:
        """Push what an optimizer adds to the rows."""
        self._show()
        # Fused optimizers get these from a GradScaler, which leaves the rest to them.
        found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return
        factor = 1.0 if scale is None else 1.0 / scale.item()
        for name, weight in self._managed.items():
            weight.step(group_of(optimizer, weight.parameter), factor, self._padding[name])


def group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the optimizer's options for a managed parameter.

    Raises:
        ValueError: if it is not in there any more.
    """
    for group in optimizer.param_groups:
        if any(parameter is other for other in group["params"]):
            return group
    raise ValueError("a managed weight has left the optimizer that AdaModel was made with")
