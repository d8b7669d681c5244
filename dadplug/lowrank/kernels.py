"""numba kernels on skinny blocks: vectors are rows, so that every inner loop runs over contiguous memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import njit
from .portable import HUGE, TINY

# Sums may be reordered, which lets LLVM vectorise them; NaN and Inf keep their meaning.
_FAST = {"reassoc", "contract"}
_MAX_STEPS = 60  # QL steps for one eigenvalue; two or three are usual
_ROUNDING = 1.2e-16  # share of a matrix that rounding makes of it, in double precision


@njit(nogil=True, fastmath=_FAST)
def unit_rows(rows: NDArray[np.floating]) -> None:
    """Divide every row by its length, in place; rows of zeros stay. The squares add up in double precision."""
    for i in range(rows.shape[0]):
        total = 0.0
        for x in range(rows.shape[1]):
            total += np.float64(rows[i, x]) * np.float64(rows[i, x])
        if total > 0.0:
            scale = rows.dtype.type(1.0 / np.sqrt(total))
            for x in range(rows.shape[1]):
                rows[i, x] *= scale


@njit(nogil=True)
def inverse_triangle(gram: NDArray[np.floating], inverse: NDArray[np.floating]) -> float:
    """Find the lower triangle T that makes rows with this Gram matrix orthonormal, ``T gram T^T = I``, by Cholesky.

    Args:
        gram: of shape (k, k), of rows of length 1.
        inverse: of shape (k, k); holds T afterwards, if the rows are independent.

    Returns:
        The least square of what is left of a row beside the earlier ones: 1.0 for orthonormal rows, NaN for NaN.
    """
    k = gram.shape[0]
    least = np.float64(1.0)
    lower = np.zeros((k, k))
    full = np.zeros((k, k))
    for i in range(k):
        for j in range(i + 1):
            dot = np.float64(gram[i, j])
            for x in range(j):
                dot -= lower[i, x] * lower[j, x]
            if j < i:
                lower[i, j] = dot / lower[j, j]
            else:
                if not dot > 1e-14:  # NaN, too
                    return dot if np.isnan(dot) else 0.0
                if dot < least:
                    least = dot
                lower[i, i] = np.sqrt(dot)
    for i in range(k):
        full[i, i] = 1.0 / lower[i, i]
        for j in range(i):
            dot = np.float64(0.0)
            for x in range(j, i):
                dot += lower[i, x] * full[x, j]
            full[i, j] = -dot * full[i, i]
    for i in range(k):
        for j in range(k):
            inverse[i, j] = full[i, j]
    return least


@njit(nogil=True, fastmath=_FAST)
def gram_schmidt(rows: NDArray[np.floating], dependent: float) -> int:
    """Make the rows of a block orthonormal, in place, by modified Gram-Schmidt done twice.

    Rows that depend on earlier ones become zero and move to the end.

    Args:
        rows: block of shape (k, width), rows of length 1 or zero.
        dependent: what is left of a row when it counts as rounding error.

    Returns:
        The number of independent rows; NaN or Inf in a row makes it count, and stay what it is.
    """
    count, width = rows.shape
    zero = rows.dtype.type(0)
    kept = 0
    for i in range(count):
        before = zero
        for x in range(width):
            before += rows[i, x] * rows[i, x]
        for _ in range(2):
            for j in range(kept):
                dot = zero
                for x in range(width):
                    dot += rows[i, x] * rows[j, x]
                for x in range(width):
                    rows[i, x] -= dot * rows[j, x]
        after = zero
        for x in range(width):
            after += rows[i, x] * rows[i, x]
        if after <= dependent * dependent * before:
            continue
        scale = rows.dtype.type(1.0 / np.sqrt(np.float64(after)))
        for x in range(width):
            rows[kept, x] = rows[i, x] * scale
        kept += 1
    rows[kept:] = 0.0
    return kept


@njit(nogil=True, fastmath=_FAST)
def _tridiagonalise(
    matrix: NDArray[np.float64],
    diagonal: NDArray[np.float64],
    off: NDArray[np.float64],
    vectors: NDArray[np.float64],
) -> None:
    """Reduce a symmetric matrix to tridiagonal form by Householder reflections.

    Args:
        matrix: symmetric, of shape (k, k); overwritten.
        diagonal: of shape (k,); holds the diagonal afterwards.
        off: of shape (k,), zeros; the first k - 1 elements hold the secondary diagonal afterwards.
        vectors: of shape (k, k); holds the product of the reflections afterwards, transposed.
    """
    k = matrix.shape[0]
    vectors[:] = 0.0
    for i in range(k):
        vectors[i, i] = 1.0
    # Reflections H = I - 2 v v^T from both sides; their product is kept transposed, rows being vectors.
    v = np.zeros(k)
    p = np.zeros(k)
    for column in range(k - 2):
        length = 0.0
        for i in range(column + 1, k):
            v[i] = matrix[i, column]
            length += v[i] * v[i]
        if length - v[column + 1] * v[column + 1] <= 1e-32 * length:
            continue
        alpha = -np.sqrt(length) if v[column + 1] > 0.0 else np.sqrt(length)
        v[column + 1] -= alpha
        scale = 0.0
        for i in range(column + 1, k):
            scale += v[i] * v[i]
        scale = 2.0 / scale
        dot = 0.0
        for i in range(column + 1, k):
            total = 0.0
            for j in range(column + 1, k):
                total += matrix[i, j] * v[j]
            p[i] = scale * total
            dot += p[i] * v[i]
        for i in range(column + 1, k):
            p[i] -= 0.5 * scale * dot * v[i]
        for i in range(column + 1, k):
            for j in range(column + 1, k):
                matrix[i, j] -= v[i] * p[j] + p[i] * v[j]
        matrix[column + 1, column] = alpha
        for x in range(k):
            p[x] = 0.0
        for i in range(column + 1, k):
            for x in range(k):
                p[x] += v[i] * vectors[i, x]
        for i in range(column + 1, k):
            for x in range(k):
                vectors[i, x] -= scale * v[i] * p[x]
    for i in range(k):
        diagonal[i] = matrix[i, i]
        if i + 1 < k:
            off[i] = matrix[i + 1, i]


@njit(nogil=True, fastmath=_FAST)
def _ql_step(
    values: NDArray[np.float64], off: NDArray[np.float64], vectors: NDArray[np.float64], first: int, last: int
) -> None:
    """Do one implicit QL step with Wilkinson's shift on rows `first` to `last` of a tridiagonal matrix.

    Args:
        values: the diagonal, of shape (k,).
        off: the secondary diagonal, of shape (k,).
        vectors: of shape (k, k); its rows are rotated with the matrix.
        first: first row of an unreduced block.
        last: last row of the block.
    """
    k = values.shape[0]
    shift = (values[first + 1] - values[first]) / (2.0 * off[first])
    root = np.sqrt(shift * shift + 1.0)
    g = values[last] - values[first] + off[first] / (shift + (root if shift >= 0.0 else -root))
    sine, cosine, moved = 1.0, 1.0, 0.0
    for i in range(last - 1, first - 1, -1):
        f, b = sine * off[i], cosine * off[i]
        r = np.sqrt(f * f + g * g)
        off[i + 1] = r
        if r == 0.0:
            values[i + 1] -= moved
            off[last] = 0.0
            return
        sine, cosine = f / r, g / r
        g = values[i + 1] - moved
        r = (values[i] - g) * sine + 2.0 * cosine * b
        moved = sine * r
        values[i + 1] = g + moved
        g = cosine * r - b
        for x in range(k):
            upper, lower = vectors[i, x], vectors[i + 1, x]
            vectors[i + 1, x] = sine * upper + cosine * lower
            vectors[i, x] = cosine * upper - sine * lower
    values[first] -= moved
    off[first] = g
    off[last] = 0.0


@njit(nogil=True)
def _sort_descending(values: NDArray[np.float64], vectors: NDArray[np.float64]) -> None:
    """Sort eigenvalues, largest first, and the rows of their eigenvectors."""
    k = values.shape[0]
    for i in range(k - 1):
        best = i
        for j in range(i + 1, k):
            if values[j] > values[best]:
                best = j
        if best != i:
            values[i], values[best] = values[best], values[i]
            for x in range(k):
                vectors[i, x], vectors[best, x] = vectors[best, x], vectors[i, x]


@njit(nogil=True, fastmath=_FAST)
def eigh(matrix: NDArray[np.float64], values: NDArray[np.float64], vectors: NDArray[np.float64]) -> bool:
    """Diagonalise a small symmetric matrix: Householder to tridiagonal form, then implicit QL.

    For up to some dozens of rows, where a call of LAPACK costs more than its work. An element of the secondary
    diagonal counts as zero beside its two neighbours, or beside the whole matrix: the neighbours alone are rounding
    errors where the matrix has less than full rank, and elements among them never become small beside them (EISPACK's
    tql2 compares with the largest row so far for the same reason).

    Args:
        matrix: symmetric, of shape (k, k); overwritten.
        values: of shape (k,); holds the eigenvalues afterwards, largest first.
        vectors: of shape (k, k); its rows hold the eigenvectors afterwards, in that order.

    Returns:
        Whether it has converged; it does not with NaN or Inf. If not, the results are undefined.
    """
    k = matrix.shape[0]
    off = np.zeros(k)
    _tridiagonalise(matrix, values, off, vectors)
    negligible = 0.0
    for i in range(k):
        negligible = max(negligible, _ROUNDING * (abs(values[i]) + abs(off[i])))
    for first in range(k):
        for step in range(_MAX_STEPS + 1):
            last = first
            while last < k - 1:
                size = abs(off[last])
                if size <= negligible or size <= 1e-15 * (abs(values[last]) + abs(values[last + 1])):
                    break
                last += 1
            if last == first:
                break
            if step == _MAX_STEPS:
                return False
            _ql_step(values, off, vectors, first, last)
    _sort_descending(values, vectors)
    return bool(np.isfinite(values.sum()))


@njit(nogil=True)
def _equal_lengths(
    of_deltas: NDArray[np.floating], of_activations: NDArray[np.floating], scale: NDArray[np.float64]
) -> np.float64:
    """Find the factors that make rows of A as long as those of D, divided by them; zero where a row of either is.

    Returns:
        The largest square of such a length; NaN where there is NaN, or where squares may have vanished.
    """
    largest = np.float64(0.0)
    for i in range(scale.shape[0]):
        d, a = np.float64(of_deltas[i, i]), np.float64(of_activations[i, i])
        if (d < TINY and a > HUGE) or (a < TINY and d > HUGE):
            return np.float64(np.nan)
        if d > 0.0 and a > 0.0:
            scale[i] = np.sqrt(np.sqrt(d / a))
            largest = max(largest, np.sqrt(d) * np.sqrt(a))
        elif d >= 0.0 and a >= 0.0:
            scale[i] = 0.0
        else:
            return np.float64(np.nan)
    return largest


@njit(nogil=True, fastmath=_FAST)
def _cholesky(
    matrix: NDArray[np.floating], scale: NDArray[np.float64], added: np.float64, root: NDArray[np.float64]
) -> bool:
    """Factor a matrix with scaled rows and columns, plus ``added`` on its diagonal, into ``root @ root.T``.

    ``root`` holds zeros before. Return False where there is NaN, or where nothing is left of a row.
    """
    for i in range(matrix.shape[0]):
        for j in range(i + 1):
            dot = np.float64(matrix[i, j]) * scale[i] * scale[j]
            if i == j:
                dot += added
            for x in range(j):
                dot -= root[i, x] * root[j, x]
            if j < i:
                root[i, j] = dot / root[j, j]
            else:  # a row that depends on earlier ones may fall below zero by rounding
                root[i, i] = np.sqrt(max(dot, added))
                if not root[i, i] > 0.0:  # NaN, too
                    return False
    return True


@njit(nogil=True, fastmath=_FAST)
def gram_vectors(
    of_deltas: NDArray[np.floating], of_activations: NDArray[np.floating], jitter: float, found: NDArray[np.floating]
) -> float:
    """Find rows z whose products with D are the leading left singular vectors of ``D^T A``, from Gram matrices.

    With ``A A^T = C C^T`` they are ``z = C y`` for the eigenvectors y of ``C^T (D D^T) C``. Rows of D and A are scaled
    to equal lengths before, which does not change the product: then a row counts by what it adds to it.

    Args:
        of_deltas: ``D D^T``, of shape (N, N).
        of_activations: ``A A^T``, of shape (N, N).
        jitter: added to its diagonal after scaling, times the largest element of that.
        found: of shape (k, N); holds the rows afterwards.

    Returns:
        The last singular value that was asked for, as a share of the first: below about 1e-3 in single precision it
        is rounding error. NaN where there is NaN or Inf, or where the eigenvalues have not converged.
    """
    rows = of_deltas.shape[0]
    k = found.shape[0]
    scale = np.empty(rows)
    largest = _equal_lengths(of_deltas, of_activations, scale)
    if np.isnan(largest):
        return np.nan
    if not largest > 0.0:
        found[:] = 0.0
        return 0.0
    root = np.zeros((rows, rows))  # C
    if not _cholesky(of_activations, scale, jitter * largest, root):
        return np.nan
    for i in range(rows):
        scale[i] = 1.0 / scale[i] if scale[i] > 0.0 else 0.0
    half = np.zeros((rows, rows))  # (D D^T) C
    for i in range(rows):
        for x in range(rows):
            share = np.float64(of_deltas[i, x]) * scale[i] * scale[x]
            for j in range(x + 1):
                half[i, j] += share * root[x, j]
    core = np.zeros((rows, rows))
    for x in range(rows):
        for i in range(x + 1):
            share = root[x, i]
            for j in range(rows):
                core[i, j] += share * half[x, j]
    values = np.empty(rows)
    vectors = np.empty((rows, rows))
    if not eigh(core, values, vectors):
        return np.nan
    for i in range(k):
        for x in range(rows):
            dot = np.float64(0.0)
            for j in range(x + 1):
                dot += root[x, j] * vectors[i, j]
            found[i, x] = dot * scale[x]
    return np.sqrt(max(values[k - 1], 0.0) / values[0]) if values[0] > 0.0 else 0.0
