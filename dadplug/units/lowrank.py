"""Unit of a weight, and perhaps a bias, whose gradients are compressed to a low rank."""

from __future__ import annotations

from torch import Tensor, nn

from ..hooks import LINEAR, CapturedLayer, Factor, stack_by_form
from ..methods.paths import GradientPath
from .factor import FactorUnit
from .lazy_gradient import is_agreed, unmark_agreed


class LowrankUnit(FactorUnit):
    """A weight whose gradient is compressed as a matrix, whatever forms its factors have.

    What autograd forms itself is compressed together with the factors: all of it where no layer has factors, else what
    comes from hooks, from other uses of the weight, and from changes of ``.grad``.

    Args:
        weight: name of the weight, of two dimensions or more.
        bias: name of the bias, or None.
        parameters: both, by name.
        layers: the captured layers that use them.
    """

    def __init__(
        self, weight: str, bias: str | None, parameters: dict[str, nn.Parameter], layers: list[CapturedLayer]
    ) -> None:
        super().__init__(weight, bias, parameters, layers, GradientPath.LOWRANK, LINEAR)
        self._aside: dict[str, Tensor | None] = {}  # what is in `.grad` already, while autograd forms a gradient

    def _before_dense(self, name: str, gradient: Tensor | None) -> None:
        self.drop_cleared()
        if gradient is not None:
            self._placeholders.lift(name)
            parameter = self.parameters[name]
            self._aside[name], parameter.grad = parameter.grad, None
            self.outside = bool(self.layers)

    def _after_dense(self, name: str, parameter: Tensor) -> None:
        if name in self._aside:
            gradient, parameter.grad = parameter.grad, self._aside.pop(name)
            if gradient is not None:
                self._hold(name, gradient)
        super()._after_dense(name, parameter)

    def _hold(self, name: str, gradient: Tensor) -> None:
        """Hold a gradient that has been formed, as a factor."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        out, width = self.shape
        if name == self.name:
            zeros = None if self.bias is None else gradient.new_zeros(self.parameters[self.bias].shape)
            formed = Factor.formed(gradient)
            factor = Factor(formed.activations, formed.deltas, formed.form, zeros)
        else:
            factor = Factor(gradient.new_empty(0, width), gradient.new_empty(0, out), LINEAR, gradient)
        self._held.append(factor)
        if len(self._held) > 1:
            self._condense()

    def resolve(self) -> None:
        self._placeholders.resolve()
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not is_agreed(parameter, self.reduction):
                gradient, parameter.grad = parameter.grad, None
                self._hold(name, gradient)

    def own_gradient(self, name: str) -> Tensor:
        own = super().own_gradient(name)
        self.dense = False  # it is compressed as it will be at the end of the step
        unmark_agreed(own)
        return own

    @property
    def rows(self) -> int:
        """Number of rows of the matrices that are compressed."""
        return sum(factor.rows * factor.form.positions for factor in self._peek())

    def take(self) -> Factor | None:
        factors = self._collect()
        self._sent_factors = factors if self._is_small(factors) else []
        return self._matrix(factors) if factors else None

    def _matrix(self, factors: list[Factor]) -> Factor:
        shape = self.lead.shape
        # Rows of linear layers come first: stacked in their form, all stay rows, and no gradient is formed of many.
        ordered = sorted(stack_by_form(factors), key=lambda factor: factor.form != LINEAR)
        return Factor.stack([factor.matrix(shape) for factor in ordered]).matrix(shape)

    def _condense(self) -> None:
        self._held = [self._matrix(self._collect())]
