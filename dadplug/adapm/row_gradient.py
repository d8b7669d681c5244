"""Gradients of managed rows: sparse tensors in ``.grad`` of their weight, accumulated and cleared by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_NORMS = {torch.norm, Tensor.norm, torch.linalg.vector_norm, torch.linalg.norm, torch._foreach_norm}
_CLAMPS = {torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_}
_CLAMPS |= {torch._foreach_clamp_min_, torch._foreach_clamp_max_}


class RowGradient(Tensor):
    """Sparse gradient of the rows that this site has looked up.

    Arithmetic, `zero_` and GradScaler treat it as any sparse gradient. Norms and clamps depend on the gradients of
    other sites for the same rows, and raise if there are other sites.

    Attributes:
        alone: whether there is no other site.
    """

    alone = False

    @staticmethod
    def of(gradient: Tensor, alone: bool) -> Tensor:
        """Return a gradient as a `RowGradient`; one with a graph (for its own derivatives) is returned unchanged."""
        if isinstance(gradient, RowGradient) or gradient.requires_grad:
            return gradient
        made: RowGradient = Tensor._make_subclass(RowGradient, gradient)
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
    """Return the rows of a gradient, each once.

    Raises:
        RuntimeError: if there are other sites.
    """
    if not gradient.alone:
        raise RuntimeError(_refusal("measured"))
    return gradient.detach().coalesce().values()


def _refusal(what: str) -> str:
    return (
        f"the gradient of a managed embedding cannot be {what} here: its rows are spread over the sites, and each site "
        "would get another result. Clip with AdaModel.clip_grad_norm_, or leave the managed weights out: "
        "AdaModel.other_parameters()"
    )


class Lookup:
    """One lookup of a weight.

    Args:
        keys: the distinct keys, of shape (k,).
        values: the pulled values, of shape (k, width and optimizer state).
        steps: number of optimizer steps of the weight before the lookup.
    """

    def __init__(self, keys: Tensor, values: Tensor, steps: int) -> None:
        self.keys, self.values, self.steps = keys, values, steps


class PulledRows(torch.autograd.Function):
    """Pulled rows as a function of the parameter that they replace; backward gives the parameter a sparse gradient."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, rows: Tensor, gradient_of: Callable[[Lookup, Tensor], Tensor], lookup: Lookup
    ) -> Tensor:
        ctx.gradient_of, ctx.lookup = gradient_of, lookup
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gradient_of(ctx.lookup, gradients[0]), None, None, None
