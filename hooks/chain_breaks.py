"""Reasons for which an operation breaks a chain of layers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

_MIXES = "mixes rows"
_ACROSS = "mixes the numbers of a row"
_HIDDEN = "has a derivative that its output does not tell"
_REASONS: list[tuple[tuple[type[nn.Module], ...], str]] = [
    ((_DropoutNd,), "draws its own numbers"),
    ((nn.MultiheadAttention, nn.RNNBase), _MIXES),
    ((_ConvNd,), "is no fully connected layer"),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.GLU), _ACROSS),
    ((nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish), _HIDDEN),
    ((nn.PReLU,), "has a slope that is trained"),
]


def why_broken(node: Any, made_by: tuple[str, nn.Module] | None, before: str) -> str:
    """Return the reason for which an operation breaks a chain, such as ``3 (BatchNorm1d) mixes rows``.

    Args:
        node: node of the operation in autograd's graph.
        made_by: name and module whose forward ends with the operation, if there is one.
        before: layer that follows the operation.
    """
    if "Compiled" in node.name():
        return f"torch.compile's code before {before} cannot be looked into"
    if made_by is None:
        return f"{node.name()}, an operation outside of modules before {before}, is no function that chains go through"
    name, module = made_by
    title = f"{name} ({type(module).__name__})"
    if isinstance(module, _BatchNorm) and module.training:
        return f"{title} {_MIXES}"
    if isinstance(module, nn.Linear):
        weight = module._parameters.get("weight")  # a parametrised one would be computed anew, with side effects
        frozen = weight is not None and not weight.requires_grad
        return f"{title} is frozen" if frozen else f"{title} sends no factors"
    for types, reason in _REASONS:
        if isinstance(module, types):
            return f"{title} {reason}"
    return f"{title} is no function that chains go through"
