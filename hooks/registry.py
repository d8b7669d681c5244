"""Registry of layer families: the layers whose gradients have factors, found by the forward that a family replaces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..support.registry import Registry
from .factor import LINEAR, Form


class _Due(Enum):
    ABSENT = auto()  # there is no such parameter, or it is not trained
    NOTHING = auto()  # this pass computes other gradients
    ACCUMULATED = auto()  # into ``.grad``
    RETURNED = auto()  # by `torch.autograd.grad`


class GradientUse(NamedTuple):
    """Work of a captured layer in a backward pass.

    Attributes:
        record: whether to record its factors.
        weight: whether to compute the weight's gradient.
        bias: whether to compute the bias's gradient.
    """

    record: bool
    weight: bool
    bias: bool


def gradient_use(node: Any, weight_gradients: bool, weight: int = 1, bias: int | None = 2) -> GradientUse:
    """Return the gradients that the running backward pass needs of a captured layer.

    Factors replace the gradients that autograd would add to ``.grad`` of weight and bias. Autograd computes gradients
    itself if `torch.autograd.grad` returns them, if they are to be differentiated again (``create_graph=True``), or if
    ``backward(inputs=...)`` contains only one of weight and bias.

    Args:
        node: ``ctx`` of the layer's `torch.autograd.Function` in backward.
        weight_gradients: whether gradients are computed in addition to the factors.
        weight: index of the weight among the function's inputs.
        bias: index of the bias, or None.
    """
    needed, functions, due = node.needs_input_grad, node.next_functions, [_Due.ABSENT, _Due.ABSENT]
    for place, index in enumerate((weight, bias)):
        if index is not None and needed[index]:
            try:
                executes = torch._C._will_engine_execute_node(functions[index][0])
                due[place] = _Due.ACCUMULATED if executes else _Due.NOTHING
            except RuntimeError:  # how torch says that the gradient of a leaf is returned and not accumulated
                due[place] = _Due.RETURNED
    of_weight, of_bias = due
    if weight_gradients:
        return GradientUse(of_weight is _Due.ACCUMULATED, _wanted(of_weight), _wanted(of_bias))
    together = of_weight is _Due.ACCUMULATED and of_bias in (_Due.ABSENT, _Due.ACCUMULATED)
    record = together and not torch.is_grad_enabled()
    return GradientUse(record, not record and _wanted(of_weight), not record and _wanted(of_bias))


def _wanted(due: _Due) -> bool:
    return due in (_Due.ACCUMULATED, _Due.RETURNED)


def is_accumulated(parameter: Tensor) -> bool:
    """Return whether the running backward pass adds a gradient to ``.grad``, and `torch.autograd.grad` does not run."""
    try:
        executes: bool = torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:  # as in `gradient_use`
        return False
    return executes


class Recorder(Protocol):
    """Function that receives a layer's factors in backward."""

    def __call__(self, activations: Tensor, deltas: Tensor, form: Form = LINEAR) -> None:
        """Receive the factors of one call of the layer.

        Args:
            activations: A of shape (rows, in).
            deltas: D of shape (rows, out).
            form: how the two make the gradient.
        """


class LayerFamily(ABC):
    """Interface of a family of layers; see `hooks/linear.py` for the smallest one.

    Attributes:
        weight: name of the parameter that has factors.
        bias: name of the parameter whose gradient is the sum of the deltas; a layer may have none.
        methods: names of the layer's methods that `forward` replaces; a subclass that overrides one is not captured.

    Example:
        >>> @register_family(MyLinear)  # a layer that computes F.linear(input, self.weight, self.bias)
        ... class MyLinearFamily(dadplug.hooks.linear.Linear):
        ...     pass
    """

    weight = "weight"
    bias = "bias"
    methods: tuple[str, ...] = ("forward",)

    @abstractmethod
    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of ``module(*args, **kwargs)``, and call `record` in backward.

        Args:
            module: layer to compute.
            record: function that receives the factors in backward.
            weight_gradients: whether backward also computes the gradients of weight and bias.
            args: positional arguments of the layer's forward.
            kwargs: keyword arguments of the layer's forward.

        Returns:
            The layer's output.
        """

    def forward_untraced(
        self, module: nn.Module, record: Recorder, weight_gradients: bool, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute the same as `forward`, where the layer's output may have any number of nodes in autograd's graph.

        Args:
            module: layer to compute.
            record: function that receives the factors in backward.
            weight_gradients: whether backward also computes the gradients of weight and bias.
            args: positional arguments of the layer's forward.
            kwargs: keyword arguments of the layer's forward.
        """
        return self.forward(module, record, weight_gradients, *args, **kwargs)

    def known_form(self, module: nn.Module) -> Form | None:
        """Return the form of the layer's factors, or None if it depends on the inputs.

        Args:
            module: the layer.
        """
        return None

    def refuses(self, module: nn.Module) -> str:
        """Return the reason why a layer of this type has no factors; an empty string if it has factors.

        Args:
            module: the layer.
        """
        return ""


_FAMILIES: Registry[type[nn.Module], LayerFamily] = Registry("layer family")
# By qualified name of a class whose library need not be installed.
_NAMED_FAMILIES: Registry[str, LayerFamily] = Registry("layer family", exact=True)
# Modules that use their children's weights without calling the children, so that no hook on a child ever fires.
_OPAQUE: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,)


def register_family(*layer_types: type[nn.Module] | str) -> Callable[[type[LayerFamily]], type[LayerFamily]]:
    """Register a family for layer types; a decorator for a class without constructor arguments.

    Args:
        layer_types: the types, or their qualified names, such as ``"transformers.pytorch_utils.Conv1D"``, which are
            looked up without an import.
    """

    def decorate(family: type[LayerFamily]) -> type[LayerFamily]:
        for layer_type in layer_types:
            if isinstance(layer_type, str):
                _NAMED_FAMILIES.register(layer_type)(family())
            else:
                _FAMILIES.register(layer_type)(family())
        return family

    return decorate


def family_of(module: nn.Module) -> LayerFamily | None:
    """Return the family of a layer, or None if it has none.

    A subclass counts only while it keeps the forward and the plain weight of the registered type: an overridden
    forward may use the weight in ways that have no factors, and a parametrized weight is no parameter. Complex weights
    have no factors here.

    Args:
        module: the layer.
    """
    family = _fitting(module)
    return None if family is None or family.refuses(module) else family


def refusal_of(module: nn.Module) -> str:
    """Return why a layer has no factors although its type has a family; an empty string for all other layers.

    Args:
        module: the layer.
    """
    family = _fitting(module)
    return "" if family is None else family.refuses(module)


def _fitting(module: nn.Module) -> LayerFamily | None:
    for layer_type, family in _candidates(module):
        weight = module._parameters.get(family.weight)
        kept = all(getattr(type(module), each) is getattr(layer_type, each) for each in family.methods)
        if kept and _has_own_forward(module) and _is_plain(weight):
            return family
    return None


def _is_plain(weight: object) -> bool:
    """Return whether a weight is an initialised, dense parameter of real numbers."""
    fits = isinstance(weight, nn.Parameter) and not is_lazy(weight) and weight.is_floating_point()
    return fits and is_dense(weight)


def is_dense(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor in whose memory all its numbers lie: neither sparse nor nested, no wrapper.

    Args:
        value: the value.
    """
    kind = type(value)
    own_memory = kind is Tensor or (issubclass(kind, Tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__)
    return own_memory and value.layout is torch.strided and not value.is_nested


def _candidates(module: nn.Module) -> Iterator[tuple[type[nn.Module], LayerFamily]]:
    """Yield the registered types that a module is an instance of, with their families; named ones first."""
    for base in type(module).__mro__:
        named = _NAMED_FAMILIES.get(f"{base.__module__}.{base.__qualname__}")
        if named is not None:
            yield base, named
    for layer_type, family in _FAMILIES.items():
        if isinstance(module, layer_type):
            yield layer_type, family


def capturable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model that have a family and a trained weight, by name.

    Args:
        model: the model.

    Returns:
        A dictionary from names, as in `named_modules`, to layers.
    """
    opaque = [f"{name}." if name else "" for name, module in model.named_modules() if isinstance(module, _OPAQUE)]
    layers = {}
    for name, module in model.named_modules():
        family = family_of(module)
        if family is None or any(name.startswith(prefix) for prefix in opaque):
            continue
        if getattr(module, family.weight).requires_grad:
            layers[name] = module
    return layers


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether a call of the module runs the forward of its class, not one set on the instance."""
    forward = vars(module).get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward
