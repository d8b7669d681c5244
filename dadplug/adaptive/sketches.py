"""Sketches of gradients: few numbers, from which inner products of gradients follow without bias.

The gradient G of shape (out, in) is multiplied by random signs, the same at all sites, and its rows and columns are
added up in k groups each: a sketch of k x k numbers. The inner product of two sketches is that of the gradients in
expectation over the signs. Source: count sketches, doi:10.1145/2486788.2486869 for the product of two.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hooks import LINEAR
from .sample_norms import Call, formed_gradient

SIZE = 16


def signs_of(name: str, step: int, length: int, like: Tensor) -> Tensor:
    """Return random signs, of shape (length,), for a parameter in a step.

    Args:
        name: name that seeds the signs, with the step.
        step: number of the step.
        length: number of signs.
        like: gives type and device.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return (torch.randint(0, 2, (length,), generator=generator) * 2 - 1).to(like)


def fold(rows: Tensor, signs: Tensor) -> Tensor:
    """Multiply the columns by signs and add them up in groups.

    Args:
        rows: of shape (rows, columns).
        signs: of shape (columns,).

    Returns:
        A tensor of shape (rows, `SIZE`).
    """
    signed = F.pad(rows * signs, (0, -rows.shape[1] % SIZE))
    return signed.view(rows.shape[0], -1, SIZE).sum(1)


def sketch_matrix(gradient: Tensor, name: str, step: int) -> Tensor:
    """Sketch a gradient that has been formed.

    Args:
        gradient: of shape (out, in).
        name: name of the parameter.
        step: number of the step.

    Returns:
        The sketch, of shape (`SIZE` * `SIZE`,).
    """
    left, right = _signs(gradient.shape[0], gradient.shape[1], name, step, gradient)
    return fold(fold(gradient, right).T, left).T.flatten()


def sketch_calls(calls: Sequence[Call], shape: tuple[int, int], name: str, step: int, dtype: torch.dtype) -> Tensor:
    """Sketch a gradient from its factors, without forming it for fully connected layers.

    Args:
        calls: the calls whose gradients add up.
        shape: shape of the weight as a matrix.
        name: name of the parameter.
        step: number of the step.
        dtype: type to compute in.

    Returns:
        The sketch, of shape (`SIZE` * `SIZE`,).
    """
    if not all(call.form == LINEAR for call in calls):
        return sketch_matrix(formed_gradient(calls, dtype).reshape(shape), name, step)
    left, right = _signs(*shape, name, step, calls[0].deltas.new_empty(0, dtype=dtype))
    parts = [fold(call.deltas.to(dtype), left).T @ fold(call.activations.to(dtype), right) for call in calls]
    return torch.stack(parts).sum(0).flatten()


def _signs(out: int, width: int, name: str, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return signs_of(f"{name} out", step, out, like), signs_of(f"{name} in", step, width, like)
