"""The units of exchange: a weight with its factors, or a parameter with its dense gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from .hooks import LINEAR, CapturedLayer, Factor, Form, stack_by_form
from .share import Share


class Unit:
    """What is exchanged as one.

    Attributes:
        name: name of the parameter that leads it.
        arrivals: times its gradient has arrived since the last synchronisation.
        expected: the most that ever arrived in one step; with so many it is taken to be complete.
        sent: whether its share has gone to a bucket in this step.
        dense: whether a gradient has arrived that its bucket does not carry, so that it has to be all-reduced.
        path: the path that it takes, which says what kind of stage it goes through.
    """

    path = "allreduce"

    def __init__(self, name: str, parameters: dict[str, nn.Parameter]) -> None:
        self.name = name
        self.parameters = parameters
        self.arrivals = 0
        self.expected = 0
        self.sent = False
        self.dense = False
        self._hooks: list = []

    @property
    def lead(self) -> nn.Parameter:
        """The parameter that leads the unit."""
        return self.parameters[self.name]

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the weight as a matrix: for fully connected layers the widths of output and input."""
        return matrix_shape(self.lead)

    def watch(self, on_arrival: Callable[[Unit], None]) -> None:
        """Calls back whenever autograd has delivered all of a backward pass's gradient for the leading parameter."""
        self._hooks.append(self.lead.register_post_accumulate_grad_hook(lambda _: on_arrival(self)))

    def begin_step(self) -> None:
        """Forgets the step that is over."""
        self.expected = max(self.expected, self.arrivals)
        self.arrivals = 0
        self.sent = False
        self.dense = False

    def release(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class DenseUnit(Unit):
    """A parameter whose gradient autograd forms.

    Args:
        name: its name.
        parameter: the parameter.
        path: what becomes of the gradient.
    """

    def __init__(self, name: str, parameter: nn.Parameter, path: str = "allreduce") -> None:
        super().__init__(name, {name: parameter})
        self.path = path


class FactorUnit(Unit):
    """A weight, and perhaps a bias, whose gradients are sent as factors.

    Several layers share one unit where they share the weight; their rows stack.

    Args:
        weight: name of the weight.
        bias: name of the bias, or None.
        parameters: both, by name.
        layers: the captured layers that use them.
        path: ``"factors"``: rows are sent; ``"lowrank"``: matrices are compressed, whatever form the rows have.
        form: the form in which the factors are sent, or None if it depends on the layers' inputs.

    Attributes:
        outside: whether the weight has been used outside of its layer too, or in a second derivative.
    """

    def __init__(
        self,
        weight: str,
        bias: str | None,
        parameters: dict[str, nn.Parameter],
        layers: list[CapturedLayer],
        path: str,
        form: Form | None,
    ) -> None:
        super().__init__(weight, parameters)
        self.bias = bias
        self.layers = layers
        self.path = path
        self.form = LINEAR if path == "lowrank" else form
        self.outside = False
        self._held: list[Factor] = []
        self._taken_keys: list[int] = []
        self._formed: dict[Form, int] = {}  # rows whose gradient has been formed and added to `.grad`
        for parameter in parameters.values():
            self._hooks.append(parameter.register_hook(self._on_dense))

    def _on_dense(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.dense = self.outside = True

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the two rows that are sent."""
        return self.shape if self.form is None else self.form.widths(self.shape)

    @property
    def fed_by_data(self) -> bool:
        """Whether a layer has had an input that needs no gradient."""
        return any(layer.fed_by_data for layer in self.layers)

    def _peek(self) -> list[Factor]:
        return self._held + [factor for layer in self.layers for factor in layer.peek()]

    @property
    def rows(self) -> int:
        """Number of rows that have arrived; of matrices where those are compressed."""
        if self.path == "lowrank":
            return sum(factor.rows * factor.form.positions for factor in self._peek())
        return sum(factor.rows for factor in self._peek()) + sum(self._formed.values())

    @property
    def row_keys(self) -> list[int]:
        """Numbers of the calls whose rows are sent in this step, in the order of the rows; empty without traces."""
        return self._taken_keys + _keys(self._peek())

    def complete(self, shares: Sequence[Share], known: dict[str, list[Share]]) -> list[Share] | None:
        """Adds to what arrived what the sites do not send, since it follows from what others sent.

        Args:
            shares: what arrived, by site.
            known: complete shares by unit.

        Returns:
            Complete shares, or None if what they follow from is not there yet.
        """
        return list(shares)

    @property
    def forms(self) -> set[Form]:
        """The forms in which rows have arrived."""
        return {factor.form for factor in self._peek()} | set(self._formed)

    def take(self) -> Factor | None:
        """Hands over the factors that have arrived, stacked and in the weight's type; None where there are none.

        Rows in another form than the agreed one, as of images of another size, become a dense gradient.
        """
        factors = self._collect()
        if self.path == "lowrank":
            return self._matrix(factors) if factors else None
        fitting = None
        for factor in stack_by_form(factors):
            if factor.form == self.form:
                fitting = factor
            else:
                self._form(factor)
                self.dense = True
        return fitting

    def _collect(self) -> list[Factor]:
        factors = self._held + [factor for layer in self.layers for factor in layer.take()]
        self._held = []
        self._taken_keys += _keys(factors)
        return [factor.to(self.lead.dtype) for factor in factors]

    def _matrix(self, factors: list[Factor]) -> Factor:
        shape = self.lead.shape
        return Factor.stack([factor.matrix(shape) for factor in stack_by_form(factors)]).matrix(shape)

    def keep(self) -> None:
        """Holds factors that cannot leave yet, in no more room than a gradient where they may be one.

        Inputs from data are copied, since a loader may reuse its buffers.
        """
        for layer in self.layers:
            layer.keep_inputs()
        held = self._peek()
        if sum(factor.numel for factor in held if factor.form.may_be_dense) < self.lead.numel():
            return
        if self.path == "lowrank":
            self._held = [self._matrix(self._collect())]
        else:
            self.form_gradients()
            self.dense = True

    def form_gradients(self) -> None:
        """Adds the gradients of what has arrived to ``.grad``, as autograd would have."""
        for factor in stack_by_form(self._collect()):
            self._form(factor)

    def _form(self, factor: Factor) -> None:
        self._formed[factor.form] = self._formed.get(factor.form, 0) + factor.rows
        add_gradient(self.lead, factor.gradient())
        if self.bias is not None:
            add_gradient(self.parameters[self.bias], factor.bias_gradient())

    def begin_step(self) -> None:
        super().begin_step()
        self.outside = False
        self._formed.clear()
        self._taken_keys.clear()


def _keys(factors: Sequence[Factor]) -> list[int]:
    return [factor.trace.key for factor in factors if factor.trace is not None]


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Height and width of a parameter as a matrix; of a vector or a scalar, the width is 1."""
    height = parameter.shape[0] if parameter.dim() else 1
    return height, parameter.numel() // max(1, height)


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Accumulates a gradient as autograd does; it may have the parameter's numbers in another shape."""
    gradient = gradient if gradient.is_sparse else gradient.reshape(parameter.shape)
    if parameter.grad is None:
        parameter.grad = gradient
    elif gradient.is_sparse or parameter.grad.is_sparse:
        parameter.grad = parameter.grad + gradient
    else:
        parameter.grad.add_(gradient)


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

    def _on_dense(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._earlier, self.lead.grad = self.lead.grad, None

    def watch(self, on_arrival: Callable[[Unit], None]) -> None:
        def arrive(parameter: Tensor) -> None:
            gradient, parameter.grad, self._earlier = parameter.grad, self._earlier, None
            if gradient is not None:
                self._sum = gradient if self._sum is None else self._sum.add_(gradient)
                on_arrival(self)

        self._hooks.append(self.lead.register_post_accumulate_grad_hook(arrive))

    @property
    def rows(self) -> int:
        return 0 if self._sum is None else min(self.shape)

    def take(self) -> Factor | None:
        gradient, self._sum = self._sum, None
        return None if gradient is None else Factor.formed(gradient)

    def keep(self) -> None:
        pass

    def form_gradients(self) -> None:
        if self._sum is not None:
            add_gradient(self.lead, self._sum)
            self._sum = None
