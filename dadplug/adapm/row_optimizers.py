"""Optimizers of managed rows: from values and gradients to what is pushed. Values are ``[weights | state]``."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from .initialisers import Constant, Initialiser


class Rule(Protocol):
    """The step of one optimizer on rows, as deltas, so that the steps of several sites add up.

    Attributes:
        names: torch's names of the state's parts, of equal widths; rows of a checkpoint's state have them.
        counts_steps: whether a checkpoint's state has a number of steps besides.
    """

    names: tuple[str, ...]
    counts_steps: bool

    def state(self, width: int) -> list[tuple[int, Initialiser]]:
        """Returns the columns of the state beside weights of this width, and what they begin with."""

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        """Computes what is to be added.

        Args:
            values: of shape (n, width and state), as pulled.
            gradients: of shape (n, width).
            step: number of this step, from 1.
            options: those of the optimizer's parameter group.
        """


class SGD:
    """torch.optim.SGD: ``w -= lr g``."""

    names: tuple[str, ...] = ()
    counts_steps = False

    def state(self, width: int) -> list[tuple[int, Initialiser]]:
        return []

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        return gradients * -float(options["lr"])


class Adagrad:
    """torch.optim.Adagrad: ``s += g^2; w -= lr g / (sqrt(s) + eps)``."""

    names: tuple[str, ...] = ("sum",)
    counts_steps = True

    def __init__(self, initial: float) -> None:
        self.initial = initial

    def state(self, width: int) -> list[tuple[int, Initialiser]]:
        return [(width, Constant(self.initial))]

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        rate = float(options["lr"]) / (1 + (step - 1) * options["lr_decay"])
        squares = gradients.square()
        sums = values[:, gradients.shape[1] :] + squares
        return torch.cat([-rate * (gradients / (sums.sqrt() + options["eps"])), squares], 1)


class RowwiseAdagradRule:
    """`RowwiseAdagrad`: ``s += mean(g^2); w -= lr g / (sqrt(s) + eps)``, one s a row."""

    names: tuple[str, ...] = ("sum",)
    counts_steps = False

    def state(self, width: int) -> list[tuple[int, Initialiser]]:
        return [(1, Constant())]

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        squares = gradients.square().mean(1, keepdim=True)
        sums = values[:, gradients.shape[1] :] + squares
        return torch.cat([gradients * (-float(options["lr"]) / (sums.sqrt() + options["eps"])), squares], 1)


class Adam:
    """torch.optim.SparseAdam, or Adam's formula on the rows that have a gradient; other rows' moments stay.

    Args:
        sparse: eps stands beside the uncorrected root, as in SparseAdam.
    """

    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def __init__(self, sparse: bool) -> None:
        self.sparse = sparse

    def state(self, width: int) -> list[tuple[int, Initialiser]]:
        return [(2 * width, Constant())]

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        width = gradients.shape[1]
        first, second = options["betas"]
        averages, squares = values[:, width : 2 * width], values[:, 2 * width :]
        more, more_squares = (1 - first) * (gradients - averages), (1 - second) * (gradients.square() - squares)
        correction = math.sqrt(1 - second**step)
        rate = float(options["lr"]) * correction / (1 - first**step)
        eps = options["eps"] * (1 if self.sparse else correction)
        moves = -rate * ((averages + more) / ((squares + more_squares).sqrt() + eps))
        return torch.cat([moves, more, more_squares], 1)


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator a row of a matrix, as recommenders use it: ``s += mean(g^2)`` over the row.

    Args:
        params: matrices, or any parameters: what is no matrix counts as one row.
        lr: learning rate.
        eps: keeps the denominator from zero.
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10) -> None:
        if lr < 0 or eps < 0:
            raise ValueError(f"lr and eps must be at least 0, got {lr} and {eps}")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes a step; rows whose gradient is zero stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                matrix = gradient if gradient.dim() == 2 else gradient.reshape(1, -1)
                sums = self.state[parameter].setdefault("sum", matrix.new_zeros(matrix.shape[0], 1))
                sums += matrix.square().mean(1, keepdim=True)
                parameter -= (group["lr"] * matrix / (sums.sqrt() + group["eps"])).view_as(parameter)
        return loss


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Rule:
    """Finds the rule for a parameter group of a torch optimizer.

    Raises:
        ValueError: if the optimizer, or an option of it, has no form that touches only the rows of a batch.
    """
    for option in ("momentum", "weight_decay", "amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(
                f"managed embeddings step only the rows of a batch, which {option}={group[option]} does not allow: "
                "give them a parameter group, or an optimizer, without it"
            )
    if isinstance(optimizer, torch.optim.SGD):
        return SGD()
    if isinstance(optimizer, torch.optim.Adagrad):
        return Adagrad(group["initial_accumulator_value"])
    if isinstance(optimizer, RowwiseAdagrad):
        return RowwiseAdagradRule()
    if isinstance(optimizer, torch.optim.SparseAdam) or type(optimizer) is torch.optim.Adam:
        return Adam(isinstance(optimizer, torch.optim.SparseAdam))
    raise ValueError(
        f"managed embeddings cannot be stepped by {type(optimizer).__name__}: use SGD, Adagrad, SparseAdam, Adam or "
        "dadplug.adapm.RowwiseAdagrad for them"
    )
