"""Units of exchange: a weight with its factors, or a parameter with its dense gradient.

Placeholders stand in ``.grad`` for gradients that are held as factors and not formed. Autograd leaves ``.grad`` of a
captured weight as it was. A placeholder shows what a program does with the gradient before it is synchronized: clearing
it (``zero_grad``, ``.grad = None``, ``.grad.zero_()``) discards the factors, reading it gives the local gradient, and
changing it in place turns it into one that autograd might have formed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ...exchange.wire import WireFormat, wire_format
from ...hooks import OwnHook
from ..methods.base import GradientPath, MethodOptions

_ATEN = torch.ops.aten
# Attribute of a gradient: number of the reduction that has synchronized it, and its version then; empty for a cleared
# placeholder.
_AGREED = "_dadplug_agreed"
_FIRST, _GRADIENT, _VERSION = itemgetter(0), attrgetter("lead.grad"), attrgetter("_version")
_CLEARING = (_ATEN.zero_.default, _ATEN._foreach_zero_.default)


class Clearable(Protocol):
    """Something that a step leaves empty."""

    def clear(self) -> None:
        """Forget the step."""


class GradientSource(Protocol):
    """Holder of the factors of a parameter's gradient."""

    def read_gradient(self, name: str) -> Tensor:
        """Return this site's gradient of a parameter so far, formed anew."""

    def may_change(self) -> bool:
        """Return whether the gradient can still be changed: not once it has been sent to other sites."""

    def own_gradient(self, name: str) -> Tensor:
        """Form this site's gradient of a parameter, and return the tensor that holds it from now on."""


class LazyGradient(Tensor):
    """A gradient that is formed when a program reads it; has the parameter's shape, type and device.

    Args:
        parameter: the parameter.
        name: its name.
        source: the holder of its factors; None for a placeholder without any.

    Attributes:
        earlier: the part of the gradient that is formed, or None.
        value: the gradient, once nothing holds its factors any more; None before that, and where it is not known.
    """

    earlier: Tensor | None
    value: Tensor | None

    @staticmethod
    def __new__(cls: Any, parameter: Tensor, name: str, source: GradientSource | None) -> LazyGradient:
        """Make a tensor without memory."""
        made: LazyGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __init__(self, parameter: nn.Parameter, name: str, source: GradientSource | None) -> None:
        super().__init__()
        self.parameter = parameter
        self.name_of_parameter = name
        self.source = source
        self.earlier = None
        self.value = None

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyGradient({self.name_of_parameter!r}, shape={tuple(self.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.read().clone()

    def __dlpack__(self, **options: Any) -> Any:
        return self._own().__dlpack__(**options)

    @property
    def data(self) -> Tensor:
        """The values; setting them replaces the gradient, since this tensor has no memory to hold them."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if self.parameter.grad is self:
            self.parameter.grad = values.detach()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the gradient that this stands for."""
        if func in _CLEARING:
            return func(*tree_map_only(LazyGradient, LazyGradient._clear, args), **(kwargs or {}))
        get = LazyGradient.read
        if _keeps(func):
            get = LazyGradient._own if func._schema.is_mutable else LazyGradient._view
        result = func(*tree_map_only(LazyGradient, get, args), **tree_map_only(LazyGradient, get, kwargs or {}))
        if func._schema.is_mutable and isinstance(args[0], (list, tuple)):  # torch does not count these changes here
            for each in args[0]:
                if not (isinstance(each, LazyGradient) or each.is_inference()):
                    torch.autograd.graph.increment_version(each)
        return result

    def _stale(self) -> Tensor:
        if self.value is None:
            raise RuntimeError(
                f"the gradient of {self.name_of_parameter!r} is not here: it was cleared, or was on its way to the "
                "other sites when the reduction was detached or the model changed. Clear gradients (zero_grad), and "
                "call backward() again"
            )
        return self.value

    def read(self) -> Tensor:
        """Return the gradient, to be read only."""
        return self._stale() if self.source is None else self.source.read_gradient(self.name_of_parameter)

    def _own(self) -> Tensor:
        """Return the gradient as a tensor that may be changed in place."""
        return self._stale() if self.source is None else self.source.own_gradient(self.name_of_parameter)

    def _view(self) -> Tensor:
        """Return the gradient to make a view of, which may be changed or refuses changes."""
        if self.source is None or self.source.may_change():
            return self._own()
        return ReadOnlyGradient(self.read(), self)

    def _clear(self) -> Tensor:
        """Replace the gradient by zeros, and return them."""
        zeros = self.earlier
        if zeros is None:
            zeros = torch.zeros_like(self.parameter, requires_grad=False)
            setattr(zeros, _AGREED, ())
        if self.parameter.grad is self:
            self.parameter.grad = zeros
        return zeros

    def release(self, value: Tensor | None) -> None:
        """Release the factors; from now on this tensor has a value of its own, or none."""
        self.source, self.earlier, self.value = None, None, value


class ReadOnlyGradient(Tensor):
    """A view of a gradient that has been sent to other sites, and cannot be changed any more.

    Args:
        value: the values.
        gradient: the gradient.
    """

    @staticmethod
    def __new__(cls: Any, value: Tensor, gradient: LazyGradient) -> ReadOnlyGradient:
        """Make a tensor without memory."""
        made: ReadOnlyGradient = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        return made

    def __init__(self, value: Tensor, gradient: LazyGradient) -> None:
        super().__init__()
        self._value = value
        self._gradient = gradient

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the values; a change raises the error of the gradient that this is a view of."""
        kwargs = kwargs or {}
        first = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, ReadOnlyGradient))
        if func._schema.is_mutable:
            first._gradient._own()
        result = func(*tree_map_only(ReadOnlyGradient, _value, args), **tree_map_only(ReadOnlyGradient, _value, kwargs))
        wrap = (lambda each: ReadOnlyGradient(each, first._gradient)) if _keeps(func) else (lambda each: each)
        return tree_map_only(Tensor, wrap, result)

    def __dlpack__(self, **options: Any) -> Any:
        self._gradient._own()  # others may write into what they get
        return self._value.__dlpack__(**options)


def _value(tensor: ReadOnlyGradient) -> Tensor:
    return tensor._value


def _keeps(func: Any) -> bool:
    """Return whether an operation changes one of its arguments or returns a view of it."""
    return any(argument.alias_info is not None for argument in func._schema.arguments)


class Placeholders:
    """The placeholders of a unit's parameters, in ``.grad`` from a gradient's arrival to its synchronization.

    Args:
        parameters: the parameters by name.
        source: what holds their factors.

    Attributes:
        active: those in ``.grad``, unless a program has put something else there, by name of the parameter.
        lifted: names of the parameters without their placeholder while autograd adds to the gradient itself.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], source: GradientSource) -> None:
        self._parameters = parameters
        self._source = source
        self.active: dict[str, LazyGradient] = {}
        # Made before backward: what is made there lies between activations, and would leave gaps when they go.
        self._spare = {name: LazyGradient(parameter, name, None) for name, parameter in parameters.items()}
        self.lifted: set[str] = set()

    def put(self) -> None:
        """Put placeholders into ``.grad``, so that clearing, reading and changing it act on the factors.

        What is there becomes the part that is formed.
        """
        for name, parameter in self._parameters.items():
            lazy = self.active.get(name)
            if lazy is None:
                lazy = self._spare.pop(name, None)
                if lazy is None:
                    lazy = LazyGradient(parameter, name, self._source)
                lazy.source = self._source
                self.active[name] = lazy
            if parameter.grad is not lazy:
                lazy.earlier, parameter.grad = parameter.grad, lazy
        self.lifted.clear()

    def lift(self, name: str) -> None:
        """Put the formed part back into ``.grad``, for autograd to add to it; `put` follows."""
        lazy, parameter = self.active.get(name), self._parameters[name]
        if lazy is not None and parameter.grad is lazy:
            parameter.grad, lazy.earlier = lazy.earlier, None
            self.lifted.add(name)

    def gone(self) -> list[str]:
        """Return the names of the parameters whose placeholder a program has taken away or replaced."""
        gone: list[str] = []
        for name, lazy in self.active.items():
            gradient = self._parameters[name].grad
            if gradient is not lazy and (gradient is None or name not in self.lifted):
                gone.append(name)
        return gone

    def earlier(self, name: str) -> Tensor | None:
        """Return the formed part of a parameter's gradient."""
        lazy = self.active.get(name)
        return self._parameters[name].grad if lazy is None or name in self.lifted else lazy.earlier

    def add(self, name: str, gradient: Tensor) -> Tensor:
        """Add to the formed part of a parameter's gradient, and return it."""
        lazy, parameter = self.active.get(name), self._parameters[name]
        if lazy is None or name in self.lifted:
            parameter.grad = accumulated(parameter.grad, gradient, parameter)
            return parameter.grad
        lazy.earlier = accumulated(lazy.earlier, gradient, parameter)
        return lazy.earlier

    def drop(self, names: Iterable[str], read: Callable[[str], Tensor] | None) -> None:
        """Give placeholders up whose gradients have been discarded, or are not here any more.

        Args:
            names: names of the parameters.
            read: computes the gradient, for programs that have kept the placeholder; None where it is not here.
        """
        for name in names:
            held_elsewhere = sys.getrefcount(self.active[name]) > _OWN_REFERENCES
            value = read(name) if read is not None and held_elsewhere else None
            self.active.pop(name).release(value)
            self.lifted.discard(name)

    def resolve(self) -> bool:
        """Put the formed parts back into ``.grad``, as synchronization begins; return whether it holds anything."""
        formed = False
        for name, parameter in self._parameters.items():
            if (lazy := self.active.get(name)) is not None:
                if parameter.grad is lazy:
                    parameter.grad, lazy.earlier = lazy.earlier, None
                lazy.source = None
            formed |= parameter.grad is not None
        self.lifted.clear()
        self._spare |= self.active
        self.active.clear()
        return formed

    def clear(self) -> None:
        """Forget the step; give programs that have kept a placeholder the agreed gradient."""
        for name in [*self._spare]:
            if sys.getrefcount(self._spare[name]) > _OWN_REFERENCES:
                self._spare.pop(name).release(self._parameters[name].grad)


_TABLE = {"": LazyGradient(nn.Parameter(torch.empty(0)), "", None)}
_OWN_REFERENCES = sys.getrefcount(_TABLE[""])  # of a placeholder that is not in ``.grad`` and that no program holds


def accumulated(present: Tensor | None, gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient plus another as autograd accumulates them, in place where it can be.

    Args:
        present: the gradient so far, or None.
        gradient: what is added, with the parameter's number of elements, in any shape.
        parameter: the parameter.
    """
    gradient = gradient if gradient.is_sparse else gradient.reshape(parameter.shape)
    if present is None:
        return gradient
    return present + gradient if gradient.is_sparse or present.is_sparse else present.add_(gradient)


def is_agreed(parameter: nn.Parameter, reduction: int) -> bool:
    """Return whether ``.grad`` is empty, or was written by a reduction and not changed since, other than cleared.

    Zeros in a tensor of the program are a gradient: the site counts with them in the mean.
    """
    gradient = parameter.grad
    mark = None if gradient is None else getattr(gradient, _AGREED, None)
    if gradient is None or mark == (reduction, version_of(gradient)):
        return True
    return is_cleared(gradient)


def is_cleared(gradient: Tensor) -> bool:
    """Return whether a gradient was written by a reduction, and holds zeros now."""
    return getattr(gradient, _AGREED, None) is not None and is_zero(gradient)


def unmark_agreed(gradient: Tensor) -> None:
    """Remove the mark of a gradient that is equal on all sites, since the program may change it."""
    setattr(gradient, _AGREED, None)


def version_of(gradient: Tensor | None) -> tuple[int, int]:
    """Return numbers that change where a program writes into a gradient, or gives it other memory."""
    if gradient is None:
        return -1, 0
    try:
        return gradient._version, gradient.data_ptr()
    except RuntimeError:  # of tensors that are made in inference mode, or sparse
        return 0 if gradient.is_inference() else gradient._version, 0


def versions_of(gradients: Iterable[Tensor | None]) -> list[tuple[int, int]]:
    """Return what `version_of` returns of each gradient."""
    every: list[Any] = [*gradients]
    try:  # without a call of Python for each
        return [*zip(map(_VERSION, every), map(Tensor.data_ptr, every), strict=True)]
    except (AttributeError, TypeError, RuntimeError):  # of None, of tensors that are sparse or made in inference mode
        return [*map(version_of, every)]


def mark_agreed(units: Iterable[Unit]) -> None:
    """Mark what is in ``.grad`` as agreed on, at the end of a step."""
    found = [
        (gradient, unit.reduction)
        for unit in units
        for parameter in unit.parameters.values()
        if (gradient := parameter.grad) is not None
    ]
    for (gradient, reduction), version in zip(found, versions_of(map(_FIRST, found)), strict=True):
        setattr(gradient, _AGREED, (reduction, version))


_FEW_SITES = 4  # with more, gathering int8 sends hardly less than an all-reduce in single precision
Arrived = Callable[[], "Callable[[Unit], None] | None"]
"""Weak reference to the method that gets a unit whose gradient has arrived; None once its object is gone."""


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
        changed: whether the program has changed its gradient in place since the last backward pass of this step; as
            `drop_cleared` has found it.
        broken: whether its payload cannot be used, since the payload that it depends on has been discarded.
        together: numbers of all gradients that are summed with this one where few sites gather them; 0 otherwise.
        path: the path of its gradient, for which a bucket handler is registered.
        reduction: number of the reduction that it belongs to.
        version: of the gradient, see `version_of`, when it arrived; None where placeholders stand for it.
        placed: the placeholders in ``.grad``, by name of the parameter.
    """

    reduction = -1
    version: tuple[int, int] | None = None
    placed: Mapping[str, LazyGradient] = MappingProxyType({})
    changed = broken = False
    together = 0
    path: str = GradientPath.ALLREDUCE
    _at_first: ClassVar[dict[str, Any]] = dict.fromkeys(("arrivals", "discards"), 0) | dict.fromkeys(
        ("sent", "dense", "void", "changed"), False
    )  # state at the beginning of a step

    def __init__(self, name: str, parameters: dict[str, nn.Parameter]) -> None:
        self.name = name
        self.parameters = parameters
        self.lead = parameters[name]
        self.expected = self.expected_discards = self.arrivals = self.discards = 0
        self.sent = self.dense = self.void = False
        self._hooks: list[RemovableHandle] = []
        self._of_step: Sequence[Clearable] = ()  # what is cleared at the end of a step

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the weight as a matrix: for fully connected layers the widths of output and input."""
        return matrix_shape(self.lead)

    @property
    def table_size(self) -> int:
        """Numbers of a table whose gradient is dense; 0 for anything else."""
        return 0

    def wire(self, options: MethodOptions) -> WireFormat:
        """Return the format in which the gradients are sent."""
        return wire_format(options.wire_of(self.path, self.table_size or self.together), self.lead.dtype)

    @property
    def has_gradient(self) -> bool:
        """Whether ``.grad`` holds something."""
        return any(parameter.grad is not None for parameter in self.parameters.values())

    def watch(self, on_arrival: Arrived) -> None:
        """Call a method whenever a backward pass has delivered all of the gradient of the leading parameter.

        Args:
            on_arrival: a reference to the method, which gets the unit.
        """
        self._hooks.append(self.lead.register_post_accumulate_grad_hook(OwnHook(self._arrive, on_arrival)))

    def _arrive(self, on_arrival: Arrived, parameter: Tensor) -> None:
        if (arrived := on_arrival()) is not None:
            arrived(self)

    def drop_cleared(self) -> bool:
        """Discard what has arrived if the program has cleared it since; return whether that was all of it."""
        return False

    @property
    def is_own(self) -> bool:
        """Whether ``.grad`` has a gradient that the sites have not agreed on."""
        return not all(is_agreed(each, self.reduction) for each in self.parameters.values())

    def discard(self) -> None:
        """Forget the backward passes of this step so far, since their gradients have been cleared."""
        self.void |= self.sent
        self.arrivals = 0
        self.discards += 1
        self.dense = False

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


def begin_step(units: Iterable[Unit]) -> None:
    """Reset what counts within a step."""
    for unit in units:
        if unit.arrivals > unit.expected:
            unit.expected = unit.arrivals
        unit.expected_discards = unit.discards
        vars(unit).update(unit._at_first)
        for each in unit._of_step:
            each.clear()


def count_together(units: Iterable[Unit], sites: int) -> None:
    """Count the numbers that are summed together, by which the wire format of their units is chosen.

    Args:
        units: the units of a plan.
        sites: the number of sites on which all of them have agreed for the plan.
    """
    summed = [unit for unit in units if unit.path == GradientPath.ALLREDUCE and unit.lead.dtype != torch.float64]
    together = sum(unit.lead.numel() for unit in summed) if sites <= _FEW_SITES else 0
    for unit in summed:
        unit.together = together


def drop_cleared(units: Iterable[Unit]) -> list[bool]:
    """Discard what has arrived and the program has cleared since; return, by unit with arrivals, whether that was all.

    It calls `Unit.drop_cleared` where there may be something to discard.
    """
    known, cleared = [], []
    for unit in units:
        if not unit.arrivals:
            continue
        if unit.version is not None:
            known.append(unit)
        else:
            intact = True
            for name, lazy in unit.placed.items():
                intact = intact and unit.parameters[name].grad is lazy
            cleared.append(not intact and unit.drop_cleared())
    for unit, version in zip(known, versions_of(map(_GRADIENT, known)), strict=True):
        cleared.append(version != unit.version and unit.drop_cleared())
    return cleared


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
        self.version = 0, 0

    def _arrive(self, on_arrival: Arrived, parameter: Tensor) -> None:
        if (gradient := parameter.grad) is not None:
            self.version, self.changed = version_of(gradient), False
            if (arrived := on_arrival()) is not None:
                arrived(self)

    def drop_cleared(self) -> bool:
        gradient = self.lead.grad
        self.changed = bool(self.arrivals) and gradient is not None and version_of(gradient) != self.version
        if self.arrivals and (gradient is None or (self.changed and is_zero(gradient))):
            if gradient is not None:
                setattr(gradient, _AGREED, ())  # cleared, as a placeholder would be: the site does not count with it
            self.discard()
            self.changed = False
            return True
        return False


def is_zero(gradient: Tensor) -> bool:
    """Return whether all elements of a gradient are zero."""
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
    present = parameter.grad
    first = present is None and not gradient.is_sparse
    parameter.grad = gradient.reshape(parameter.shape) if first else accumulated(present, gradient, parameter)
