"""Optimizers of managed rows: they turn values ``[weights | state]`` and gradients into the deltas to push."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor


class RowOptimizer(ABC):
    """Step of an optimizer on rows, as deltas, so that the steps of several sites add up.

    Attributes:
        state_names: torch's names of the parts of the state, of equal widths; checkpoints use them.
        counts_steps: whether a checkpoint's state also has a number of steps.
        initial: initial value of the state.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    counts_steps: ClassVar[bool] = False
    initial = 0.0

    def state_width(self, width: int) -> int:
        """Return the number of columns of the state for weights of a width."""
        return len(self.state_names) * width

    @abstractmethod
    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        """Compute the deltas of one step.

        Args:
            values: pulled values, of shape (n, width and state).
            gradients: of shape (n, width).
            step: number of this step, from 1.
            options: options of the parameter group of the optimizer.

        Returns:
            The deltas, of the shape of `values`.
        """


class SGDRows(RowOptimizer):
    """Rows stepped as by torch.optim.SGD: ``w -= lr g``."""

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        return gradients * -float(options["lr"])


class AdagradRows(RowOptimizer):
    """Rows stepped as by torch.optim.Adagrad: ``s += g^2; w -= lr g / (sqrt(s) + eps)``.

    Args:
        initial: initial value of ``s``.
    """

    state_names = ("sum",)
    counts_steps = True

    def __init__(self, initial: float) -> None:
        self.initial = initial

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        rate = float(options["lr"]) / (1 + (step - 1) * options["lr_decay"])
        squares = gradients.square()
        sums = values[:, gradients.shape[1] :] + squares
        return torch.cat([-rate * (gradients / (sums.sqrt() + options["eps"])), squares], 1)


class RowwiseAdagradRows(RowOptimizer):
    """Rows stepped as by `RowwiseAdagrad`: ``s += mean(g^2); w -= lr g / (sqrt(s) + eps)``, with one s per row."""

    state_names = ("sum",)

    def state_width(self, width: int) -> int:
        return 1

    def deltas(self, values: Tensor, gradients: Tensor, step: int, options: dict[str, Any]) -> Tensor:
        squares = gradients.square().mean(1, keepdim=True)
        sums = values[:, gradients.shape[1] :] + squares
        return torch.cat([gradients * (-float(options["lr"]) / (sums.sqrt() + options["eps"])), squares], 1)


class AdamRows(RowOptimizer):
    """Rows stepped as by torch.optim.SparseAdam or torch.optim.Adam; moments of rows without a gradient do not change.

    Args:
        sparse: whether eps is added to the uncorrected root, as in SparseAdam.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def __init__(self, sparse: bool) -> None:
        self.sparse = sparse

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
    """Adagrad with one accumulator per row of a matrix, as used for recommenders: ``s += mean(g^2)`` over the row.

    Args:
        params: parameters or parameter groups. A parameter that is not a matrix counts as one row.
        lr: learning rate.
        eps: term added to the denominator.

    Raises:
        ValueError: if `lr` or `eps` is negative.

    Example:
        >>> import torch
        >>> from dadplug.adapm import RowwiseAdagrad
        >>> table = torch.nn.Embedding(10, 4)
        >>> optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"].shape
        torch.Size([10, 1])
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-10) -> None:
        if lr < 0 or eps < 0:
            raise ValueError(f"lr and eps must be at least 0, got {lr} and {eps}")
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step. Rows whose gradient is zero do not change.

        Args:
            closure: function that computes the loss again and returns it.

        Returns:
            The loss of the closure, or None.
        """
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


def row_optimizer_for(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> RowOptimizer:
    """Return the row optimizer that corresponds to a parameter group of a torch optimizer.

    Args:
        optimizer: the optimizer.
        group: its parameter group with the managed weight.

    Raises:
        ValueError: if the optimizer or one of its options cannot step only the rows of a batch.
    """
    for option in ("momentum", "weight_decay", "amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(
                f"managed embeddings step only the rows of a batch, which {option}={group[option]} does not allow: "
                "give them a parameter group, or an optimizer, without it"
            )
    if isinstance(optimizer, torch.optim.SGD):
        return SGDRows()
    if isinstance(optimizer, torch.optim.Adagrad):
        return AdagradRows(group["initial_accumulator_value"])
    if isinstance(optimizer, RowwiseAdagrad):
        return RowwiseAdagradRows()
    if isinstance(optimizer, torch.optim.SparseAdam) or type(optimizer) is torch.optim.Adam:
        return AdamRows(isinstance(optimizer, torch.optim.SparseAdam))
    raise ValueError(
        f"managed embeddings cannot be stepped by {type(optimizer).__name__}: use SGD, Adagrad, SparseAdam, Adam or "
        "dadplug.adapm.RowwiseAdagrad for them"
    )
