"""Which layers have a factor form: one family a file, found by the exact forward that it stands in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

Recorder = Callable[[Tensor, Tensor], None]
"""Takes a layer's activations (rows x in) and deltas (rows x out) when backward has reached it."""


class LayerFamily(Protocol):
    """What a family of layers must offer; see `hooks/linear.py` for the smallest one."""

    weight: str
    """Name of the parameter that has factors; its gradient is ``deltas.T @ activations`` in the parameter's shape."""
    bias: str
    """Name of the parameter whose gradient is the sum of the deltas; a layer may have none."""

    def forward(self, module: nn.Module, record: Recorder, weight_gradients: bool, *inputs: Tensor) -> Tensor:
        """Computes what ``module(*inputs)`` would, and calls `record` in backward.

        Args:
            module: the layer.
            record: where the factors go.
            weight_gradients: whether backward also computes the gradients of weight and bias.
            inputs: the positional inputs of the layer's forward.
        """


_FAMILIES: dict[type[nn.Module], LayerFamily] = {}
# Modules that use their children's weights without calling the children, so that no hook on a child ever fires.
_OPAQUE: tuple[type[nn.Module], ...] = (nn.MultiheadAttention,)


def register_family(*layer_types: type[nn.Module]) -> Callable[[type], type]:
    """Registers a family for layer types; a decorator for a class without constructor arguments."""

    def decorate(family: type) -> type:
        for layer_type in layer_types:
            _FAMILIES[layer_type] = family()
        return family

    return decorate


def family_of(module: nn.Module) -> LayerFamily | None:
    """Finds the family of a layer, or None where there is none.

    A subclass counts only while it keeps the forward and the plain weight of the registered type: an overridden
    forward may use the weight in ways that have no factors, and a parametrized weight is no parameter.
    """
    for layer_type, family in _FAMILIES.items():
        if (
            isinstance(module, layer_type)
            and type(module).forward is layer_type.forward
            and _has_own_forward(module)
            and isinstance(module._parameters.get(family.weight), nn.Parameter)
        ):
            return family
    return None


def capturable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Finds the layers of a model that have a family and a weight that is trained, by name."""
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
    """Says whether calling the module runs its class's forward, and not one set on the instance."""
    forward = vars(module).get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward
