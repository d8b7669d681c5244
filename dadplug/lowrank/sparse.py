"""Operations on rows of a table by number: gather, sum of duplicates, addition and optimizer steps in place.

The parameter manager and the gradients of embeddings are made of these. On the CPU, numba works on the tensors' own
memory with the GIL released; CUDA tensors, half precision and machines without numba take torch, with equal results.
Sums over duplicates run in the order of the arguments, so that the same call gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import portable
from .dispatch import kernels_for


def gather(table: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Copy rows of a table, ``out[i] = table[rows[i]]``.

    Args:
        table: of shape (count, width), contiguous.
        rows: int64 numbers of rows, of shape (n,).
        out: where to copy to, of shape (n, width), contiguous; a new tensor where None.

    Returns:
        The copy, of shape (n, width).

    Raises:
        ValueError: if a shape, a type or a device does not fit.
        IndexError: if a row lies outside of the table.
    """
    kernels = _check(table, rows)
    if out is None:
        out = torch.empty((rows.numel(), table.shape[1]), dtype=table.dtype, device=table.device)
    else:
        _check_like("out", out, table, (*rows.shape, table.shape[1]), in_place=True)
    kernels.gather(table.detach(), rows, out)
    return out


def unique(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Find the distinct keys, in the order in which they first occur.

    Args:
        keys: int64, of shape (n,); any values.

    Returns:
        The distinct keys, of shape (k,), and ``inverse`` of shape (n,), with ``distinct[inverse] == keys``.

    Raises:
        ValueError: if the keys are not a vector of int64.
    """
    _check_keys("keys", keys)
    found: tuple[Tensor, Tensor] = kernels_for(keys).unique(keys)
    return found


def sum_duplicates(keys: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the deltas of equal keys, in their order.

    Args:
        keys: int64, of shape (n,).
        deltas: one row a key, of shape (n, width).

    Returns:
        The distinct keys, of shape (k,), by first occurrence, and their sums, of shape (k, width). Where all keys are
        distinct these are the arguments themselves.

    Raises:
        ValueError: if a shape, a type or a device does not fit.
    """
    distinct, inverse = unique(keys)
    if deltas.dim() != 2 or deltas.shape[0] != keys.shape[0] or deltas.device != keys.device:
        raise ValueError(
            f"deltas must be ({keys.shape[0]} x width) on {keys.device}, a row for each key, got "
            f"{tuple(deltas.shape)} on {deltas.device}"
        )
    if distinct.numel() == keys.numel():
        return keys, deltas
    sums = torch.empty((distinct.numel(), deltas.shape[1]), dtype=deltas.dtype, device=deltas.device)
    _kernels_for(deltas).sum_by(inverse, deltas.detach(), sums)
    return distinct, sums


def scatter_add(table: Tensor, rows: Tensor, deltas: Tensor, *, scale: float = 1.0) -> None:
    """Add to rows of a table in place, ``table[rows[i]] += scale * deltas[i]``; equal rows add up.

    Args:
        table: of shape (count, width), contiguous.
        rows: int64 numbers of rows, of shape (n,).
        deltas: of the table's type, of shape (n, width).
        scale: factor on the deltas.

    Raises:
        ValueError: if a shape, a type or a device does not fit.
        IndexError: if a row lies outside of the table.
    """
    kernels = _check(table, rows)
    _check_like("deltas", deltas, table, (*rows.shape, table.shape[1]))
    kernels.scatter_add(table.detach(), rows, deltas.detach(), scale)


def adagrad(
    weights: Tensor, sums: Tensor, rows: Tensor, gradients: Tensor, *, lr: float = 1e-2, eps: float = 1e-10
) -> None:
    """Step rows in place as torch.optim.Adagrad steps a sparse gradient: ``s += g^2; w -= lr g / (sqrt(s) + eps)``.

    Args:
        weights: of shape (count, width), contiguous.
        sums: the sums of squares, like the weights.
        rows: int64 numbers of rows, of shape (n,); gradients of equal rows are added up first.
        gradients: of shape (n, width).
        lr: learning rate.
        eps: keeps the denominator from zero.

    Raises:
        ValueError: if a shape, a type, a device or an option does not fit.
        IndexError: if a row lies outside of the table.
    """
    kernels, rows, gradients = _check_step(weights, rows, gradients, lr, eps)
    _check_like("sums", sums, weights, weights.shape, in_place=True)
    kernels.adagrad(weights.detach(), sums, rows, gradients, lr, eps)


def rowwise_adagrad(
    weights: Tensor, sums: Tensor, rows: Tensor, gradients: Tensor, *, lr: float = 1e-2, eps: float = 1e-10
) -> None:
    """Step rows in place with one accumulator a row: ``s += mean(g^2); w -= lr g / (sqrt(s) + eps)``.

    Args:
        weights: of shape (count, width), contiguous.
        sums: the sums of mean squares, of shape (count,).
        rows: int64 numbers of rows, of shape (n,); gradients of equal rows are added up first.
        gradients: of shape (n, width).
        lr: learning rate.
        eps: keeps the denominator from zero.

    Raises:
        ValueError: if a shape, a type, a device or an option does not fit.
        IndexError: if a row lies outside of the table.
    """
    kernels, rows, gradients = _check_step(weights, rows, gradients, lr, eps)
    _check_like("sums", sums, weights, weights.shape[:1], in_place=True)
    kernels.rowwise_adagrad(weights.detach(), sums, rows, gradients, lr, eps)


def adam(
    weights: Tensor,
    averages: Tensor,
    squares: Tensor,
    rows: Tensor,
    gradients: Tensor,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    sparse: bool = True,
) -> None:
    """Step rows in place by Adam; the moments of other rows stay as they are.

    Args:
        weights: of shape (count, width), contiguous.
        averages: the running means of gradients, like the weights.
        squares: the running means of squared gradients, like the weights.
        rows: int64 numbers of rows, of shape (n,); gradients of equal rows are added up first.
        gradients: of shape (n, width).
        step: number of this step, from 1, for the correction of the bias.
        lr: learning rate.
        betas: decay of the two moments.
        eps: keeps the denominator from zero.
        sparse: eps stands as in torch.optim.SparseAdam, beside the uncorrected root; False as in torch.optim.Adam.

    Raises:
        ValueError: if a shape, a type, a device or an option does not fit.
        IndexError: if a row lies outside of the table.
    """
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must lie in 0 to 1, got {betas}")
    kernels, rows, gradients = _check_step(weights, rows, gradients, lr, eps)
    _check_like("averages", averages, weights, weights.shape, in_place=True)
    _check_like("squares", squares, weights, weights.shape, in_place=True)
    correction = math.sqrt(1 - betas[1] ** step)
    rate = lr * correction / (1 - betas[0] ** step)
    eps = eps if sparse else eps * correction
    kernels.adam(weights.detach(), averages, squares, rows, gradients, rate, *betas, eps)


def _kernels_for(tensor: Tensor) -> Any:
    if tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64):
        return kernels_for(tensor)
    return portable


def _check_keys(name: str, keys: Tensor) -> None:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(
            f"{name} must be a vector of int64, got {keys.dtype} of shape {tuple(keys.shape)}: "
            f"use {name}.long().flatten()"
        )


def _check(table: Tensor, rows: Tensor) -> Any:
    _check_keys("rows", rows)
    if table.dim() != 2 or not table.is_floating_point() or not table.is_contiguous():
        raise ValueError(
            "the table must be a contiguous matrix of floating-point numbers, got "
            f"{table.dtype} of shape {tuple(table.shape)} and strides {table.stride()}"
        )
    if rows.device != table.device:
        raise ValueError(f"rows are on {rows.device}, the table on {table.device}: both must be on one device")
    kernels = _kernels_for(table)
    # On CUDA torch asserts the range itself; a check here would wait for the device.
    if not table.is_cuda and (first := kernels.first_outside(rows, table.shape[0])) >= 0:
        raise IndexError(f"row {int(rows[first])} (position {first}) lies outside of the table's {table.shape[0]} rows")
    return kernels


def _check_like(name: str, given: Tensor, like: Tensor, shape: Sequence[int], in_place: bool = False) -> None:
    """Check the shape of a tensor, and that it has the type and the device of another one."""
    if given.shape != tuple(shape) or given.dtype != like.dtype or given.device != like.device:
        raise ValueError(
            f"{name} must be {tuple(shape)} {like.dtype} on {like.device}, got "
            f"{tuple(given.shape)} {given.dtype} on {given.device}"
        )
    if in_place and not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous, since memory is written in place")


def _check_step(weights: Tensor, rows: Tensor, gradients: Tensor, lr: float, eps: float) -> tuple[Any, Tensor, Tensor]:
    """Check the arguments that all optimizers share, and sum the gradients of equal rows."""
    if lr < 0 or eps < 0:
        raise ValueError(f"lr and eps must be at least 0, got {lr} and {eps}")
    kernels = _check(weights, rows)
    _check_like("gradients", gradients, weights, (*rows.shape, weights.shape[1]))
    rows, gradients = sum_duplicates(rows, gradients)
    return kernels, rows, gradients.detach()
