"""Gradients of managed rows: sparse tensors in ``.grad`` of their weight, accumulated and cleared by autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from .layers import ManagedWeight

_NORMS = {torch.norm, Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm, torch._foreach_norm}
_CLAMPS = {torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_}
_CLAMPS |= {torch._foreach_clamp_min_, torch._foreach_clamp_max_}


class RowGradient(Tensor):
    """The gradient of the rows that this site has looked up; a sparse tensor.

    Arithmetic, `zero_` and GradScaler work on it as on every sparse gradient. Norms and bounds depend on what other
    sites have for the same rows, and raise where there are others.

    Attributes:
        alone: whether there is no other site.
    """

    alone = False

    @staticmethod
    def of(gradient: Tensor, alone: bool) -> Tensor:
        """Return a gradient as one of this class."""
        if isinstance(gradient, RowGradient) or gradient.requires_grad:  # with a graph, for derivatives of it
            return gradient
        made: RowGradient = Tensor._make_subclass(RowGradient, gradient)  # type: ignore[attr-defined]
        made.alone = alone
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CLAMPS or func in _NORMS:
            args = tree_map_only(RowGradient, _values, args)
            kwargs = tree_map_only(RowGradient, _values, kwargs or {})
            if func in _CLAMPS:
                raise RuntimeError(_refusal("bounded"))
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))


def _values(gradient: RowGradient) -> Tensor:
    """Return the rows of a gradient, each once, where they are all there is."""
    if not gradient.alone:
        raise RuntimeError(_refusal("measured"))
    return gradient.detach().coalesce().values()


def _refusal(what: str) -> str:
    return (
        f"the gradient of a managed embedding cannot be {what} here: its rows are spread over the sites, and each site "
        "would get another result. Clip with AdaModel.clip_grad_norm_, or leave the managed weights out: "
        "AdaModel.other_parameters()"
    )


class PulledRows(torch.autograd.Function):
    """Rows from a table as a function of the weight that stands for it: backward gives the weight a sparse gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, rows: Tensor, weight: ManagedWeight, lookup: Lookup) -> Tensor:
        ctx.weight, ctx.lookup = weight, lookup
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.weight.gradient_of(ctx.lookup, gradients[0]), None, None, None


class Lookup:
    """One lookup of a weight.

    Args:
        keys: the distinct keys.
        values: what was pulled for them, with the state of their optimizer.
        steps: steps of the weight before it.
    """

    def __init__(self, keys: Tensor, values: Tensor, steps: int) -> None:
        self.keys, self.values, self.steps = keys, values, steps
