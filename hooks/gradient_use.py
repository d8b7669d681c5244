"""Gradients that the running backward pass needs of a layer's parameters: factors, gradients, or none."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

import torch


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
    of_weight = _due(node, weight)
    of_bias = _Due.ABSENT if bias is None else _due(node, bias)
    if weight_gradients:
        return GradientUse(of_weight is _Due.ACCUMULATED, _wanted(of_weight), _wanted(of_bias))
    together = of_weight is _Due.ACCUMULATED and of_bias in (_Due.ABSENT, _Due.ACCUMULATED)
    record = together and not torch.is_grad_enabled()
    return GradientUse(record, _wanted(of_weight) and not record, _wanted(of_bias) and not record)


def _wanted(due: _Due) -> bool:
    return due in (_Due.ACCUMULATED, _Due.RETURNED)


def _due(node: Any, index: int) -> _Due:
    if not node.needs_input_grad[index]:
        return _Due.ABSENT
    try:
        executes = torch._C._will_engine_execute_node(node.next_functions[index][0])
    except RuntimeError:  # how torch says that the gradient of a leaf is returned and not accumulated
        return _Due.RETURNED
    return _Due.ACCUMULATED if executes else _Due.NOTHING
