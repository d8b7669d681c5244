"""Clipping by the norm of gradients, including those of managed rows of all sites."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..lowrank import sparse

if TYPE_CHECKING:
    from .managed_weight import ManagedWeight
    from .manager import ParameterManager


@torch.no_grad()
def clip_grad_norm(
    manager: ParameterManager,
    weights: Iterable[ManagedWeight],
    others: Iterable[Tensor],
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Scale gradients so that their norm is at most `max_norm`; gradients of managed rows are summed over the sites.

    Args:
        manager: the parameter manager.
        weights: managed weights, in the same order on all sites.
        others: gradients that are equal on all sites.
        max_norm: upper bound of the norm.
        norm_type: order of the norm.

    Returns:
        The norm before clipping, on the CPU.
    """
    weights, others = list(weights), list(others)
    parts = [torch.linalg.vector_norm(gradient, norm_type).cpu() for gradient in others]
    parts += [torch.linalg.vector_norm(rows, norm_type) for rows in _rows_of_all_sites(manager, weights)]
    if not parts:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.double() for part in parts]), norm_type)
    factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
    for gradient in (*others, *(weight.parameter.grad for weight in weights)):
        if gradient is not None:
            gradient.mul_(factor)
    return total


def _rows_of_all_sites(manager: ParameterManager, weights: list[ManagedWeight]) -> list[Tensor]:
    """Sum the gradients of managed rows over the sites; return one matrix per weight, of shape (rows, width)."""
    own = [weight.rows_of_gradient() for weight in weights]
    counts = manager.gather_objects([keys.numel() for keys, _ in own])
    found = []
    for number, (keys, rows) in enumerate(own):
        of_sites = [int(count[number]) for count in counts]
        begin = sum(of_sites[: manager.rank])
        mine = slice(begin, begin + keys.numel())
        all_keys = keys.new_zeros(sum(of_sites))
        all_rows = rows.new_zeros(sum(of_sites), rows.shape[1])
        all_keys[mine], all_rows[mine] = keys, rows
        if all_keys.numel():
            manager.sum_over_sites(all_keys)
            manager.sum_over_sites(all_rows)
        found.append(sparse.sum_duplicates(all_keys, all_rows)[1])
    return found
