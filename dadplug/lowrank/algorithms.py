"""Algorithms that find an orthonormal basis for the best low-rank approximation of ``G = D^T A``.

Each takes the deltas D (N x out), the activations A (N x in), the number of columns k, and a `Search`; each returns a
block of k rows of length out, to be made orthonormal. What follows, the projection of G onto it, is the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import kernels_for

DEPENDENT = {torch.float32: 1e-5, torch.float64: 1e-13}
_JITTER = {torch.float32: 1e-6, torch.float64: 1e-14}
OVERSAMPLING = 4  # further columns, random ones
_COLD_PASSES = 2  # further passes of a cold start
_DENSE_EIGEN = 32  # up to this many rows LAPACK diagonalises faster than a block iteration converges
_SMALL_PASSES = 8  # of the block iteration among N x N numbers, which costs next to nothing


@dataclass(frozen=True)
class Search:
    """How to look for a basis.

    Attributes:
        iterations: passes asked for.
        tolerance: for the published algorithm: at which change of a vector it has converged.
        warm_start: a basis from an earlier call, (out x columns), or None.
        seed: seed of random blocks.
    """

    iterations: int
    tolerance: float
    warm_start: Tensor | None
    seed: int

    def block(self, rows: int, like: Tensor) -> Tensor:
        """Draws a random block of shape (rows, like's rows), on like's device."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(rows, like.shape[0], generator=generator, dtype=like.dtype).to(like.device)


class Operator:
    """``G = D^T A`` as an operator on blocks of k rows, by its factors or by itself.

    Args:
        deltas: D of shape (N, out).
        activations: A of shape (N, in).
        formed: whether to form G, which takes out x in numbers.
    """

    def __init__(self, deltas: Tensor, activations: Tensor, formed: bool = False) -> None:
        self.deltas = deltas
        self.activations = activations
        self.formed = deltas.T @ activations if formed else None

    def apply_transposed(self, rows: Tensor) -> Tensor:
        """Computes ``Q G`` for a block Q of shape (k, out)."""
        if self.formed is not None:
            return rows @ self.formed
        return (rows @ self.deltas.T) @ self.activations

    def apply(self, rows: Tensor) -> Tensor:
        """Computes ``Z G^T`` for a block Z of shape (k, in)."""
        if self.formed is not None:
            return rows @ self.formed.T
        return (rows @ self.activations.T) @ self.deltas


def direct(operator: Operator, k: int, search: Search) -> Tensor:
    """A basis of all of G's columns, where k is as much as the rank that it can have."""
    deltas, activations = operator.deltas, operator.activations
    if k == deltas.shape[0]:
        return deltas.clone(memory_format=torch.contiguous_format)
    if k == deltas.shape[1]:
        return torch.eye(k, dtype=deltas.dtype, device=deltas.device)
    return activations.T @ deltas


def gram(operator: Operator, k: int, search: Search) -> Tensor:
    """The optimum, from the N x N Gram matrices of the factors.

    With ``A A^T = C C^T`` the left singular vectors of G are ``D^T C z`` for the eigenvectors z of ``C^T (D D^T) C``.
    Costs N^2 (out + in) for the Gram matrices; the rest is small.
    """
    deltas, activations = operator.deltas, operator.activations
    rows, dtype = deltas.shape[0], deltas.dtype
    of_deltas, of_activations = (deltas @ deltas.T).double(), (activations @ activations.T).double()
    of_activations.diagonal().add_(_JITTER[dtype] * float(of_activations.diagonal().max()))
    root, _ = torch.linalg.cholesky_ex(of_activations)
    core = root.T @ of_deltas @ root
    if rows <= _DENSE_EIGEN:
        values, vectors = torch.linalg.eigh(core)
        top = vectors[:, -k:].flip(1).T
    else:
        block = search.block(min(rows, k + OVERSAMPLING), core)
        for _ in range(_SMALL_PASSES):
            block = block @ core
            kernels_for(core).orthonormalise(block, DEPENDENT[torch.float64])
        values, vectors = torch.linalg.eigh(block @ core @ block.T)
        top = vectors[:, -k:].flip(1).T @ block
    basis = (top @ root.T).to(dtype) @ deltas
    if math.sqrt(max(0.0, float(values[-k]))) < 1e-2 * math.sqrt(max(0.0, float(values[-1]))):
        # Squares have lost the digits of the smallest; one pass on the factors brings them back.
        kernels_for(basis).orthonormalise(basis, DEPENDENT[dtype])
        basis = operator.apply(operator.apply_transposed(basis))
    return basis


def iteration(operator: Operator, k: int, search: Search) -> Tensor:
    """Block power iteration: a basis is multiplied by ``G G^T`` and made orthonormal again, pass by pass.

    Costs N k (out + in) a product, of which a pass has two. Four random columns are carried beside those of a warm
    start, for what is new in this step; a cold start takes two passes more.
    """
    deltas, dtype = operator.deltas, operator.deltas.dtype
    passes, columns = search.iterations, k
    if passes:
        passes += 0 if search.warm_start is not None else _COLD_PASSES
        columns = min(k + OVERSAMPLING, *deltas.shape, operator.activations.shape[1])
    basis = deltas.new_empty(columns, deltas.shape[1])
    known = 0
    if search.warm_start is not None:
        known = min(columns, search.warm_start.shape[1])
        basis[:known] = search.warm_start.T[:known]
    if known < columns:
        basis[known:] = search.block(columns - known, deltas) @ deltas
    kernels = kernels_for(deltas)
    for _ in range(passes):
        kernels.orthonormalise(basis, DEPENDENT[dtype])
        basis = operator.apply(operator.apply_transposed(basis))
    return basis


def deflation(operator: Operator, k: int, search: Search) -> Tensor:
    """The published algorithm's vectors (rank-dAD, section 4): one at a time, what was found taken off the next.

    A vector is multiplied by ``G G^T`` until it moves by less than the tolerance, `iterations` times at most. Here as
    a reference; its vectors are made orthonormal like all others, which the published sum leaves out.
    """
    found: list[Tensor] = []
    draws = search.block(k, operator.deltas) @ operator.deltas
    for draw in draws:
        vector = draw / draw.norm().clamp_min(torch.finfo(draw.dtype).tiny)
        for _ in range(search.iterations):
            product = operator.apply(operator.apply_transposed(vector[None]))[0]
            for other in found:
                product = product - (product @ other) * other
            product = product / product.norm().clamp_min(torch.finfo(draw.dtype).tiny)
            moved = float((product - vector).norm())
            vector = product
            if moved < search.tolerance:
                break
        found.append(vector)
    return torch.stack(found)


Algorithm = Callable[[Operator, int, Search], Tensor]
ALGORITHMS: dict[str, Algorithm] = {
    "gram": gram,
    "iteration": iteration,
    "formed": iteration,
    "deflation": deflation,
}
