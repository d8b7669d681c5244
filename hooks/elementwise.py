"""Elementwise functions whose derivative is a function of their output; a chain of layers may contain them.

For ``y = phi(z)`` of these, autograd's own backward kernel gives ``gradient * phi'(z)`` from y, so that what a site
recomputes for others has the bits that autograd had there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..registry import Registry

Backward = Callable[..., Tensor]


class _Kind(NamedTuple):
    backward: Backward
    constants: tuple[str, ...]
    fits: Callable[..., bool]
    rounds: bool


_KINDS: Registry[str, _Kind] = Registry("elementwise function", exact=True)
# Nodes that leave numbers and their order as they are.
_SAME_ROWS = {
    *("AliasBackward0", "CloneBackward0", "ReshapeAliasBackward0", "ToCopyBackward0", "UnsafeViewBackward0"),
    *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "ViewBackward0"),
}


@dataclass(frozen=True)
class Elementwise:
    """Function between two layers; by default the identity. Two of them are equal if they compute the same function.

    Attributes:
        kind: name of the function's node in autograd's graph.
        constants: its constants.
    """

    kind: str = ""
    constants: tuple[float, ...] = ()

    def backward(self, gradient: Tensor, output: Tensor) -> Tensor:
        """Compute ``gradient * phi'(z)``.

        Args:
            gradient: the loss's gradient at the output.
            output: ``phi(z)``, of the same shape.
        """
        return _KINDS[self.kind].backward(gradient, output, *self.constants) if self.kind else gradient

    @property
    def rounds(self) -> bool:
        """Whether the rounding of `backward` may differ from that of autograd, which may have used z."""
        return bool(self.kind) and _KINDS[self.kind].rounds

    @staticmethod
    def of(node: Any) -> Elementwise | None:
        """Return the function of a node of autograd's graph; None for unknown functions.

        Args:
            node: the node, a tensor's ``grad_fn``.
        """
        name = node.name()
        if name in _SAME_ROWS:
            return IDENTITY
        kind = _KINDS.get(name)
        if kind is None:
            return None
        constants = tuple(float(getattr(node, f"_saved_{constant}")) for constant in kind.constants)
        return Elementwise(name, constants) if kind.fits(*constants) else None


IDENTITY = Elementwise()


def register_elementwise(
    nodes: Sequence[str],
    backward: Backward,
    constants: Sequence[str] = (),
    fits: Callable[..., bool] = lambda *constants: True,
    rounds: bool = False,
) -> None:
    """Register an elementwise function.

    Args:
        nodes: names of its nodes in autograd's graph, such as ``"ReluBackward0"``.
        backward: function from the gradient at the output, the output, and the constants to the gradient at the input.
        constants: names of the constants, as the node saves them (``_saved_…``).
        fits: function that returns whether, for given constants, the derivative is a function of the output.
        rounds: whether the rounding of `backward` may differ from that of autograd.
    """
    for node in nodes:
        _KINDS.register(node)(_Kind(backward, tuple(constants), fits, rounds))


_aten = torch.ops.aten
register_elementwise(["ReluBackward0"], lambda gradient, output: _aten.threshold_backward(gradient, output, 0))
register_elementwise(["TanhBackward0"], _aten.tanh_backward)
register_elementwise(["SigmoidBackward0"], _aten.sigmoid_backward)
register_elementwise(
    ["LeakyReluBackward0", "LeakyReluBackward1"],
    lambda gradient, output, slope: _aten.leaky_relu_backward(gradient, output, slope, True),
    ["negative_slope"],
    lambda slope: slope > 0,
)
register_elementwise(
    ["EluBackward0", "EluBackward1"],
    lambda gradient, output, alpha, scale, inner: _aten.elu_backward(gradient, alpha, scale, inner, True, output),
    ["alpha", "scale", "input_scale"],
    lambda alpha, scale, inner: alpha > 0 and scale > 0 and inner > 0,
    rounds=True,
)
