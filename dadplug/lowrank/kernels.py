"""numba kernels on skinny blocks: vectors are rows, so that every inner loop runs over contiguous memory."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Sums may be reordered, which lets LLVM vectorise them; NaN and Inf keep their meaning.
_FAST = {"reassoc", "contract"}
_SWEEPS = 30  # cyclic Jacobi converges quadratically; ten sweeps are many
_BLOCK = 256  # columns that a rotation takes at a time, so that they stay in the first cache


@njit(cache=True, nogil=True, fastmath=_FAST)
def orthonormalise(rows: NDArray[np.floating], dependent: float) -> int:
    """Makes the rows of a block orthonormal, in place, by modified Gram-Schmidt done twice.

    Rows that depend on earlier ones become zero and move to the end.

    Args:
        rows: block of shape (k, width).
        dependent: share of its length below which what is left of a row counts as rounding error.

    Returns:
        The number of independent rows; NaN or Inf in a row makes it count, and stay what it is.
    """
    count, width = rows.shape
    kept = 0
    for i in range(count):
        before = 0.0
        for x in range(width):
            before += rows[i, x] * rows[i, x]
        for _ in range(2):
            for j in range(kept):
                dot = 0.0
                for x in range(width):
                    dot += rows[i, x] * rows[j, x]
                for x in range(width):
                    rows[i, x] -= dot * rows[j, x]
        after = 0.0
        for x in range(width):
            after += rows[i, x] * rows[i, x]
        if after <= dependent * dependent * before:
            continue
        scale = 1.0 / np.sqrt(after)
        for x in range(width):
            rows[kept, x] = rows[i, x] * scale
        kept += 1
    rows[kept:] = 0.0
    return kept


@njit(cache=True, nogil=True)
def eigh_descending(matrix: NDArray[np.float64], vectors: NDArray[np.float64]) -> None:
    """Diagonalises a small symmetric matrix by cyclic Jacobi rotations, in place.

    Args:
        matrix: symmetric, of shape (k, k); its diagonal holds the eigenvalues afterwards, largest first.
        vectors: of shape (k, k); its rows hold the eigenvectors afterwards, in that order.
    """
    k = matrix.shape[0]
    vectors[:] = 0.0
    for i in range(k):
        vectors[i, i] = 1.0
    for _ in range(_SWEEPS):
        off = 0.0
        total = 0.0
        for i in range(k):
            for j in range(k):
                total += matrix[i, j] * matrix[i, j]
                if i != j:
                    off += matrix[i, j] * matrix[i, j]
        if not off > 1e-28 * total:
            break
        for p in range(k - 1):
            for q in range(p + 1, k):
                if matrix[p, q] == 0.0:
                    continue
                theta = (matrix[q, q] - matrix[p, p]) / (2.0 * matrix[p, q])
                t = 1.0 / (abs(theta) + np.sqrt(theta * theta + 1.0))
                if theta < 0.0:
                    t = -t
                c = 1.0 / np.sqrt(t * t + 1.0)
                s = t * c
                for x in range(k):
                    a, b = matrix[p, x], matrix[q, x]
                    matrix[p, x], matrix[q, x] = c * a - s * b, s * a + c * b
                for x in range(k):
                    a, b = matrix[x, p], matrix[x, q]
                    matrix[x, p], matrix[x, q] = c * a - s * b, s * a + c * b
                    a, b = vectors[p, x], vectors[q, x]
                    vectors[p, x], vectors[q, x] = c * a - s * b, s * a + c * b
    for i in range(k - 1):
        best = i
        for j in range(i + 1, k):
            if matrix[j, j] > matrix[best, best]:
                best = j
        if best != i:
            matrix[i, i], matrix[best, best] = matrix[best, best], matrix[i, i]
            for x in range(k):
                vectors[i, x], vectors[best, x] = vectors[best, x], vectors[i, x]


@njit(cache=True, nogil=True, fastmath=_FAST)
def align(left: NDArray[np.floating], right: NDArray[np.floating]) -> NDArray[np.float64]:
    """Turns ``left.T @ right`` into its singular value decomposition, in place: rows of `right` become orthogonal.

    Args:
        left: orthonormal rows, of shape (k, out).
        right: rows of shape (k, in).

    Returns:
        The lengths of the rows of `right` afterwards, largest first: the singular values.
    """
    k = left.shape[0]
    gram = np.empty((k, k))
    for i in range(k):
        for j in range(i + 1):
            dot = 0.0
            for x in range(right.shape[1]):
                dot += right[i, x] * right[j, x]
            gram[i, j] = dot
            gram[j, i] = dot
    vectors = np.empty((k, k))
    eigh_descending(gram, vectors)
    _rotate(vectors, left)
    _rotate(vectors, right)
    values = np.empty(k)
    for i in range(k):
        length = 0.0
        for x in range(right.shape[1]):
            length += right[i, x] * right[i, x]
        values[i] = np.sqrt(length)
    return values


@njit(cache=True, nogil=True, fastmath=_FAST)
def _rotate(rotation: NDArray[np.float64], rows: NDArray[np.floating]) -> None:
    """Replaces a block of shape (k, width) by ``rotation @ rows``."""
    k, width = rows.shape
    turned = np.empty((k, _BLOCK), rows.dtype)
    for start in range(0, width, _BLOCK):
        size = min(_BLOCK, width - start)
        turned[:] = 0.0
        for i in range(k):
            for j in range(k):
                share = rows.dtype.type(rotation[i, j])
                for x in range(size):
                    turned[i, x] += share * rows[j, start + x]
        for i in range(k):
            for x in range(size):
                rows[i, start + x] = turned[i, x]
