"""Units of exchange: a weight with its factors, or a parameter with its dense gradient."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..hooks import OwnHook
from ..methods.base import GradientPath
from .lazy_gradient import accumulated


class Unit:
    """Parameters whose gradients are exchanged together.

    Args:
        name: name of the leading parameter: the weight, or the only one.
        parameters: the parameters by name.

    Attributes:
        name: name of the leading parameter.
        lead: the leading parameter.
        parameters: the parameters by name.
        arrivals: times its gradient has arrived since the last synchronisation.
        expected: the largest number of arrivals in one step so far; after as many the gradient counts as complete.
        sent: whether its payload has been put into a bucket in this step.
        dense: whether a gradient has arrived that its bucket does not carry, so that it has to be all-reduced.
        void: whether the payload that has been put into a bucket in this step has been discarded since.
        discards: times its gradient has been discarded in this step.
        expected_discards: times it was discarded in the last step; after as many it counts as one to keep.
        changed: whether the program has changed its gradient in place since the last backward pass of this step.
        path: the path of its gradient, for which a bucket handler is registered.
    """

    changed = False
    path: str = GradientPath.ALLREDUCE

    def __init__(self, name: str, parameters: dict[str, nn.Parameter]) -> None:
        self.name = name
        self.parameters = parameters
        self.lead = parameters[name]
        self.arrivals = 0
        self.expected = 0
        self.sent = False
        self.dense = False
        self.void = False
        self.discards = 0
        self.expected_discards = 0
        self._hooks: list[RemovableHandle] = []

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the weight as a matrix: for fully connected layers the widths of output and input."""
        return matrix_shape(self.lead)

    @property
    def has_gradient(self) -> bool:
        """Whether ``.grad`` holds something."""
        return any(parameter.grad is not None for parameter in self.parameters.values())

    @property
    def broken(self) -> bool:
        """Whether its payload cannot be used, since the payload that it depends on has been discarded."""
        return False

    @property
    def gradient_is_due(self) -> bool:
        """Whether its gradient counts as complete, by the arrivals and discards of the steps before."""
        return self.arrivals >= self.expected > 0 and self.discards >= self.expected_discards

    def watch(self, on_arrival: Callable[[Unit], None]) -> None:
        """Call a function whenever a backward pass has delivered all of the gradient of the leading parameter.

        Args:
            on_arrival: called with the unit.
        """
        self._hooks.append(self.lead.register_post_accumulate_grad_hook(OwnHook(lambda _: on_arrival(self))))

    def drop_cleared(self) -> bool:
        """Discard what has arrived if the program has cleared it since; return whether that was all of it."""
        return False

    def discard(self) -> None:
        """Forget the backward passes of this step so far, since their gradients have been cleared."""
        self.void |= self.sent
        self.arrivals = 0
        self.discards += 1
        self.dense = False

    def begin_step(self) -> None:
        """Reset what counts within a step."""
        self.expected = max(self.expected, self.arrivals)
        self.expected_discards, self.discards = self.discards, 0
        self.arrivals = 0
        self.sent = False
        self.dense = False
        self.void = False

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def leave(self, *, discard: bool) -> None:
        """Leave the gradient to autograd from now on; what has arrived stays in ``.grad`` as autograd's would.

        Args:
            discard: drop what has arrived, and is held as factors, instead.
        """
        self.release()


class DenseUnit(Unit):
    """A parameter whose gradient autograd forms.

    Args:
        name: its name.
        parameter: the parameter.
        path: the path of its gradient.
    """

    def __init__(self, name: str, parameter: nn.Parameter, path: str = GradientPath.ALLREDUCE) -> None:
        super().__init__(name, {name: parameter})
        self.path = path
        self._version = 0  # of the gradient, when it arrived

    def watch(self, on_arrival: Callable[[Unit], None]) -> None:
        def arrive(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._version = parameter.grad._version
                on_arrival(self)

        self._hooks.append(self.lead.register_post_accumulate_grad_hook(OwnHook(arrive)))

    @property
    def changed(self) -> bool:  # type: ignore[override]
        gradient = self.lead.grad
        return bool(self.arrivals) and gradient is not None and gradient._version != self._version

    def drop_cleared(self) -> bool:
        if not self.arrivals:
            return False
        gradient = self.lead.grad
        if gradient is None or (gradient._version != self._version and _is_zero(gradient)):
            self.discard()
            return True
        return False


def _is_zero(gradient: Tensor) -> bool:
    return not bool((gradient._values() if gradient.is_sparse else gradient).any())


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return height and width of a parameter as a matrix; of a vector or a scalar, the width is 1."""
    height = parameter.shape[0] if parameter.dim() else 1
    return height, parameter.numel() // max(1, height)


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to ``.grad`` as autograd does.

    Args:
        parameter: the parameter.
        gradient: what is added, with the parameter's number of elements, in any shape.
    """
    parameter.grad = accumulated(parameter.grad, gradient, parameter)
