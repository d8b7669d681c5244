"""A weight without factors whose gradient is compressed all the same."""

from __future__ import annotations

from collections.abc import Callable, Container

from torch import Tensor, nn

from .hooks import LINEAR, Factor, OwnHook
from .units import FactorUnit, Unit


class GradientUnit(FactorUnit):
    """A weight that no layer has factors for, whose gradient is compressed once autograd has formed it.

    The gradient of each backward pass is taken away from ``.grad`` as it arrives, since what lies there already has
    been agreed on in earlier steps.

    Args:
        name: name of the weight, of two dimensions or more.
        parameter: the weight.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__(name, None, {name: parameter}, [], "lowrank", LINEAR)
        self._earlier: Tensor | None = None
        self._sum: Tensor | None = None

    def _on_dense(self, name: str, gradient: Tensor | None) -> None:
        self.drop_cleared()
        if gradient is not None:
            self._placeholders.lift(name)
            self._earlier, self.lead.grad = self.lead.grad, None

    def watch(self, on_arrival: Callable[[Unit], None]) -> None:
        def arrive(parameter: Tensor) -> None:
            gradient, parameter.grad, self._earlier = parameter.grad, self._earlier, None
            if gradient is not None:
                self._sum = gradient if self._sum is None else self._sum.add_(gradient)
                on_arrival(self)

        self._hooks.append(self.lead.register_post_accumulate_grad_hook(OwnHook(arrive)))

    def _parts(self, name: str) -> list[Tensor]:
        return [] if self._sum is None else [self._sum.clone()]

    @property
    def rows(self) -> int:
        return 0 if self._sum is None else min(self.shape)

    def take(self) -> Factor | None:
        gradient, self._sum = self._sum, None
        return None if gradient is None else Factor.formed(gradient)

    def keep(self, owned: Container[int] = ()) -> None:
        pass

    def _forget_factors(self) -> None:
        self._sum = None

    def form_gradients(self) -> None:
        if self._sum is not None:
            self._placeholders.add(self.name, self._sum)
            self._sum = None
