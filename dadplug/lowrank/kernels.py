"""numba kernels: skinny blocks, whose vectors are rows; and payloads.

Every inner loop runs over contiguous memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..support.jit import njit
from .portable import HUGE, INVERTIBLE, SAFE, SHIFT, SMALLEST, TINY

# Sums may be reordered, which lets LLVM vectorise them; NaN and Inf keep their meaning.
_FAST = {"reassoc", "contract"}
_CHOLESKY = 1e-4  # least square of what is left of a row for which Cholesky's factor is precise enough
_ONCE = 0.5  # and for which one turn is
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
def _gram(rows: NDArray[np.floating], gram: NDArray[np.floating]) -> None:
    """Compute the inner products of rows."""
    for i in range(rows.shape[0]):
        for j in range(i + 1):
            dot = rows.dtype.type(0)
            for x in range(rows.shape[1]):
                dot += rows[i, x] * rows[j, x]
            gram[i, j] = dot
            gram[j, i] = dot


@njit(nogil=True, fastmath=_FAST)
def orthonormalise(rows: NDArray[np.floating], dependent: float) -> int:
    """Make the rows of a block orthonormal, in place, by Cholesky's factor where that is precise enough.

    Args:
        rows: block of shape (k, width); rows that depend on earlier ones become zero and move to the end.
        dependent: what is left of a row of length 1 when it counts as rounding error.

    Returns:
        The number of independent rows; all count where there is NaN or Inf.
    """
    unit_rows(rows)
    k, width = rows.shape
    gram, turn = np.empty((k, k)), np.empty((k, k), rows.dtype)
    for _ in range(2):
        _gram(rows, gram)
        least = inverse_triangle(gram, turn)
        if np.isnan(least):
            break
        if least < _CHOLESKY:
            k = gram_schmidt(rows, dependent)
            break
        for i in range(k - 1, -1, -1):  # rows above i are still what they were
            for x in range(width):
                rows[i, x] *= turn[i, i]
            for j in range(i):
                for x in range(width):
                    rows[i, x] += turn[i, j] * rows[j, x]
        if least > _ONCE:
            break
    return int(k)


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


@njit(nogil=True, fastmath=_FAST)
def _turned(turn: NDArray[np.float64], rows: NDArray[np.floating], row: NDArray[np.floating]) -> None:
    """Write a sum of rows, each times a number, into a row."""
    row[:] = 0.0
    for j in range(rows.shape[0]):
        share = row.dtype.type(turn[j])
        for x in range(rows.shape[1]):
            row[x] += share * rows[j, x]


@njit(nogil=True, fastmath=_FAST)
def diagonalise(
    basis: NDArray[np.floating],
    projected: NDArray[np.floating],
    left: NDArray[np.floating],
    right: NDArray[np.floating],
    further: NDArray[np.floating],
    values: NDArray[np.float64],
) -> bool:
    """Turn an orthonormal basis so that the rows of a projection onto it are orthogonal, the longest first.

    Args:
        basis: of shape (c, out).
        projected: of shape (c, in).
        left: of shape (k, out); holds the first k of the turned basis afterwards, and zeros behind c rows.
        right: of shape (k, in); the same of the projection.
        further: of shape (c - k, in); holds the other rows of the turned projection.
        values: of shape (k,); holds the lengths of the rows of `right`.

    Returns:
        Whether it has converged; if not, the results are undefined.
    """
    count, k = basis.shape[0], left.shape[0]
    gram, squares, turn = np.empty((count, count)), np.empty(count), np.empty((count, count))
    _gram(projected, gram)
    if not eigh(gram, squares, turn):
        return False
    left[count:], right[count:], values[:] = 0.0, 0.0, 0.0
    for i in range(min(k, count)):
        _turned(turn[i], basis, left[i])
        _turned(turn[i], projected, right[i])
        for x in range(right.shape[1]):
            values[i] += right[i, x] * right[i, x]
        values[i] = np.sqrt(values[i])
    for i in range(k, count):
        _turned(turn[i], projected, further[i - k])
    return True


@njit(nogil=True, fastmath=_FAST)
def components(
    basis: NDArray[np.floating],
    projected: NDArray[np.floating],
    left: NDArray[np.floating],
    right: NDArray[np.floating],
    directions: NDArray[np.floating],
    values: NDArray[np.float64],
    tolerance: float,
) -> tuple[int, int]:
    """Do what `diagonalise` does, and count the components that are not small.

    Args:
        basis: as in `diagonalise`.
        projected: as in `diagonalise`.
        left: as in `diagonalise`.
        right: as in `diagonalise`.
        directions: of shape (c, in); holds all rows of the turned projection afterwards.
        values: as in `diagonalise`.
        tolerance: components up to this share of the first are small.

    Returns:
        The number of components that are not small, and of those that are not zero; -1 for the first where it has not
        converged, or where values are of a size for which products may have left the range of the type.
    """
    k = left.shape[0]
    if not diagonalise(basis, projected, left, right, directions[k:], values) or not SAFE[0] < values[0] < SAFE[1]:
        return -1, 0
    directions[:k] = right
    sent, found = 0, 0
    for i in range(k):
        if not np.isfinite(values[i]):
            return -1, 0
        sent += values[i] > tolerance * values[0]
        found += values[i] > 0.0
    return sent, found


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


@njit(nogil=True)
def quantise(
    rows: NDArray[np.floating],
    payload: NDArray[np.int8],
    rounded: NDArray[np.floating],
    rest: NDArray[np.floating],
) -> None:
    """Round each row to whole multiples, -127 to 127, of its scale; a row with NaN or Inf gets NaN for a scale.

    Args:
        rows: of shape (k, width).
        payload: of shape (k, width + 4); filled with the multiples and the bytes of the scale, in single precision.
        rounded: of the shape of the rows; filled with their values after decoding. Without rows if not wanted.
        rest: the same, for what rounding takes from the rows.
    """
    width = rows.shape[1]
    row, scale = np.empty(width, np.float32), np.empty(1, np.float32)
    # The bits of magnitudes are whole numbers, whose maximum vectorises; those of Inf and NaN are the largest.
    sizes, scale_bits, scale_bytes = row.view(np.uint32), scale.view(np.uint32), scale.view(np.int8)
    for i in range(rows.shape[0]):
        bits = np.uint32(0)
        for x in range(width):
            row[x] = rows[i, x]
            bits = max(bits, sizes[x] & np.uint32(0x7FFFFFFF))
        scale_bits[0] = bits
        largest = scale[0]
        small = np.float32(0.0) < largest < np.float32(INVERTIBLE)
        scale[0] = largest / np.float32(127.0) + np.float32(SMALLEST if small else 0.0)
        payload[i, :width] = 0
        if not largest < np.float32(np.inf):
            scale[0] = np.nan
        elif largest > 0.0:
            shift = np.float32(SHIFT if small else 1.0)
            inverse = np.float32(1.0) / (scale[0] * shift) if small else np.float32(127.0) / largest
            for x in range(width):
                payload[i, x] = np.int8(np.rint(row[x] * shift * inverse))
        payload[i, width:] = scale_bytes
        if rounded.shape[0]:
            for x in range(width):
                rounded[i, x] = np.float32(payload[i, x]) * scale[0]
        if rest.shape[0]:
            for x in range(width):
                rest[i, x] = rows[i, x] - np.float32(payload[i, x]) * scale[0]


@njit(nogil=True)
def quantise_factors(
    left: NDArray[np.floating],
    right: NDArray[np.floating],
    bias: NDArray[np.floating],
    lefts: NDArray[np.int8],
    rights: NDArray[np.int8],
    biases: NDArray[np.int8],
    rounded_left: NDArray[np.floating],
    rounded_right: NDArray[np.floating],
    rest: NDArray[np.floating],
    count: int,
    scale: float,
) -> None:
    """Do what `quantise` does for the first rows of two factors, and for the gradient of a bias.

    Args:
        left: of shape (k, out).
        right: of shape (k, in).
        bias: of shape (1, n); n is 0 for none.
        lefts: payload of the left factor.
        rights: payload of the right factor.
        biases: payload of the bias.
        rounded_left: filled with the decoded values.
        rounded_right: filled with the decoded values.
        rest: of the shape of `bias`; filled with what rounding takes from it, divided by `scale`.
        count: rows of the factors that count.
        scale: see `rest`.
    """
    quantise(left[:count], lefts, rounded_left, left[:0])
    quantise(right[:count], rights, rounded_right, right[:0])
    if bias.shape[1]:
        quantise(bias, biases, bias[:0], rest)
        rest /= rest.dtype.type(scale)


@njit(nogil=True)
def dequantise(payload: NDArray[np.int8], rows: NDArray[np.float32]) -> float:
    """Multiply the multiples of each row of a payload by the scale behind them; return the sum of the scales' sizes."""
    scale, total = np.empty(1, np.float32), 0.0
    scale_bytes = scale.view(np.int8)
    for i in range(rows.shape[0]):
        scale_bytes[:] = payload[i, rows.shape[1] :]
        total += abs(scale[0])
        for x in range(rows.shape[1]):
            rows[i, x] = np.float32(payload[i, x]) * scale[0]
    return total


@njit(nogil=True)
def dequantise_parts(payload: NDArray[np.int8], parts: NDArray[np.int64], values: NDArray[np.float32]) -> float:
    """Do what `dequantise` does for parts of a payload; return the sum of the sizes of all scales.

    Args:
        payload: the payload, flat.
        parts: a row a part: its first element in the payload, that of its values, number of rows, and their width.
        values: filled with the values of the parts, flat.
    """
    total = 0.0
    for i in range(parts.shape[0]):
        source, place, rows, width = parts[i, 0], parts[i, 1], parts[i, 2], parts[i, 3]
        encoded = payload[source : source + rows * (width + 4)].reshape((rows, width + 4))
        total += dequantise(encoded, values[place : place + rows * width].reshape((rows, width)))
    return total


@njit(nogil=True)
def top_k(
    values: NDArray[np.float32], indices: NDArray[np.int64], found: NDArray[np.float32], coarse_bits: int
) -> None:
    """Find the elements of largest magnitude, in the order of their indices; the first of equal ones count.

    By their bits: the size of a number is a whole number of 31 bits that orders like it. A histogram of the upper
    bits finds the range in which the smallest of them lies, a second one of the lower bits the number itself.

    Args:
        values: of shape (n,).
        indices: of shape (k,); filled.
        found: of shape (k,); filled.
        coarse_bits: bits of a size that the first histogram counts.
    """
    k = indices.shape[0]
    if k == 0:
        return
    size = values.view(np.uint32)
    low = 31 - coarse_bits
    counts = np.zeros(1 << coarse_bits, np.int32)
    for x in range(size.shape[0]):
        counts[(size[x] & np.uint32(0x7FFFFFFF)) >> low] += 1
    above = 0
    coarse = counts.shape[0] - 1
    while above + counts[coarse] < k:
        above += counts[coarse]
        coarse -= 1
    fine = np.zeros(1 << low, np.int32)
    for x in range(size.shape[0]):
        bits = size[x] & np.uint32(0x7FFFFFFF)
        if np.int64(bits >> low) == coarse:
            fine[bits & np.uint32((1 << low) - 1)] += 1
    last = fine.shape[0] - 1
    while above + fine[last] < k:
        above += fine[last]
        last -= 1
    least = np.uint32((coarse << low) | last)
    ties = k - above
    place = 0
    for x in range(size.shape[0]):
        bits = size[x] & np.uint32(0x7FFFFFFF)
        if bits >= least:
            if bits == least:
                if ties == 0:
                    continue
                ties -= 1
            indices[place] = x
            found[place] = values[x]
            place += 1


@njit(nogil=True, fastmath=_FAST)
def product(left: NDArray[np.floating], right: NDArray[np.floating], result: NDArray[np.floating], strip: int) -> None:
    """Compute ``left.T @ right`` for few rows: four by four, strip by strip.

    A strip of `right` that stays in the first cache is read from there for all rows of the result.

    Args:
        left: of shape (k, out), k a multiple of 4.
        right: of shape (k, in).
        result: of shape (out, in).
        strip: columns of a strip.
    """
    for start in range(0, result.shape[1], strip):
        _product_of_strip(left, right, result, start, min(start + strip, result.shape[1]))


@njit(nogil=True, fastmath=_FAST)
def _product_of_strip(
    left: NDArray[np.floating], right: NDArray[np.floating], result: NDArray[np.floating], start: int, end: int
) -> None:
    """Compute a strip of ``left.T @ right`` for few rows, each element of the result written in one pass."""
    out = result.shape[0]
    for i in range(0, out, 4):
        # The last group may overlap the one before it; it computes the same numbers again.
        i = min(i, out - 4)
        g0, g1 = result[i, start:end], result[i + 1, start:end]
        g2, g3 = result[i + 2, start:end], result[i + 3, start:end]
        four_rows(left, right, i, start, end, g0, g1, g2, g3)


@njit(nogil=True, fastmath=_FAST)
def four_rows(
    left: NDArray[np.floating],
    right: NDArray[np.floating],
    i: int,
    start: int,
    end: int,
    g0: NDArray[np.floating],
    g1: NDArray[np.floating],
    g2: NDArray[np.floating],
    g3: NDArray[np.floating],
) -> None:
    """Compute some columns of four rows of ``left.T @ right``.

    Args:
        left: of shape (k, out), k a multiple of 4.
        right: of shape (k, in).
        i: first of the four rows.
        start: first column.
        end: the column after the last.
        g0: first row of the result, of ``end - start`` elements or more; overwritten, as are the others.
        g1: second row.
        g2: third row.
        g3: fourth row.
    """
    width = end - start
    for k in range(0, left.shape[0], 4):
        r0, r1 = right[k, start:end], right[k + 1, start:end]
        r2, r3 = right[k + 2, start:end], right[k + 3, start:end]
        a0, a1, a2, a3 = left[k, i], left[k + 1, i], left[k + 2, i], left[k + 3, i]
        b0, b1, b2, b3 = left[k, i + 1], left[k + 1, i + 1], left[k + 2, i + 1], left[k + 3, i + 1]
        c0, c1, c2, c3 = left[k, i + 2], left[k + 1, i + 2], left[k + 2, i + 2], left[k + 3, i + 2]
        d0, d1, d2, d3 = left[k, i + 3], left[k + 1, i + 3], left[k + 2, i + 3], left[k + 3, i + 3]
        if k == 0:
            for x in range(width):
                e, f, g, h = r0[x], r1[x], r2[x], r3[x]
                g0[x] = a0 * e + a1 * f + a2 * g + a3 * h
                g1[x] = b0 * e + b1 * f + b2 * g + b3 * h
                g2[x] = c0 * e + c1 * f + c2 * g + c3 * h
                g3[x] = d0 * e + d1 * f + d2 * g + d3 * h
        else:
            for x in range(width):
                e, f, g, h = r0[x], r1[x], r2[x], r3[x]
                g0[x] += a0 * e + a1 * f + a2 * g + a3 * h
                g1[x] += b0 * e + b1 * f + b2 * g + b3 * h
                g2[x] += c0 * e + c1 * f + c2 * g + c3 * h
                g3[x] += d0 * e + d1 * f + d2 * g + d3 * h
