"""Algorithms that find a basis for the best low-rank approximation of a gradient G (out x in), and the choice of one.

Each takes G as an `Operator`, the number of columns k, and a `Search`; each returns at least k rows of length out,
whose span is to be made orthonormal. What follows, the projection of G onto it, is the same for all. The rates of the
cost model are in `dadplug.support.schedules.Encoding`, and ``dadplug.tune`` measures them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..hooks.products import product
from ..support.schedules import Encoding, current
from .dispatch import kernels_for, scratch

_JITTER = {torch.float32: 1e-6, torch.float64: 1e-14}
_SQUARED = {torch.float32: 1e-2, torch.float64: 1e-6}  # shares of singular values that squares keep precise
_FEWER_DIGITS = 100.0  # times the smallest normal number: below, errors are beyond rounding
_FURTHER = 6  # columns carried beside those asked for, at least
_COLD_PASSES = 2  # further passes of a cold start
_NOT_FINITE = "the deltas or activations hold NaN or Inf"


@dataclass(frozen=True)
class Search:
    """Parameters of the search for a basis.

    Attributes:
        iterations: passes asked for.
        tolerance: for the published algorithm: at which change of a vector it has converged.
        left: rows of length out to start from, or None.
        right: rows of length in to start from, or None.
        seed: seed of random blocks.
        precise: number of the first columns that are to be precise; None for all.
    """

    iterations: int
    tolerance: float
    left: Tensor | None
    right: Tensor | None
    seed: int
    precise: int | None = None

    def draw(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Return a random block."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(*shape, generator=generator, dtype=like.dtype).to(like.device)


def columns_for(k: int) -> int:
    """Return the columns of an iteration for k: more converge faster; multiples of 4 fill the CPU's vectors."""
    return -(-(k + _FURTHER) // 4) * 4


class Operator:
    """Gradient ``G = D^T A`` as an operator on blocks of k rows, by its factors or as a matrix.

    Results are in scratch buffers; the next product of the same kind overwrites them.

    Args:
        deltas: D of shape (N, out).
        activations: A of shape (N, in).

    Attributes:
        shape: rows and columns of G.
        most: largest rank that G can have.
    """

    def __init__(self, deltas: Tensor, activations: Tensor) -> None:
        self.deltas = deltas
        self.activations = activations
        self.shape = deltas.shape[1], activations.shape[1]
        self.most = min(len(deltas), *self.shape)
        self._formed: Tensor | None = None
        self._inner: Tensor | None = None

    @property
    def formed(self) -> Tensor | None:
        """G as a matrix; None if it is not formed."""
        return self._formed

    def form(self) -> None:
        """Form G, and use it for later products."""
        self._formed = torch.mm(self.deltas.T, self.activations, out=scratch.take("formed", self.shape, self.deltas))

    def apply_transposed(self, rows: Tensor) -> Tensor:
        """Compute ``Q G`` for a block Q of shape (k, out)."""
        result = scratch.take("right", (rows.shape[0], self.shape[1]), rows)
        if self.formed is not None:
            return product(rows, self.formed, result)
        inner = scratch.take("inner", (rows.shape[0], self.deltas.shape[0]), rows)
        self._inner = product(rows, self.deltas.T, inner)
        return product(self._inner, self.activations, result)

    @property
    def kept_digits(self) -> bool:
        """Whether the last `apply_transposed` has used no numbers as small as those of which a type holds few digits.

        Tiny deltas with huge activations may have a gradient of usual size. To be read before the next product.
        """
        if self._inner is None:
            return True
        smallest = _FEWER_DIGITS * torch.finfo(self._inner.dtype).tiny
        return float(torch.linalg.vector_norm(self._inner, math.inf)) > smallest

    def apply(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """Compute ``Z G^T`` for a block Z of shape (k, in)."""
        result = scratch.take("left", (rows.shape[0], self.shape[0]), rows) if into is None else into
        if self.formed is not None:
            made = product(rows, self.formed.T, result)
        else:
            inner = scratch.take("inner", (rows.shape[0], self.deltas.shape[0]), rows)
            made = product(product(rows, self.activations.T, inner), self.deltas, result)
        return made if into is None or made is into else into.copy_(made)

    def sketch(self, search: Search, into: Tensor) -> None:
        """Fill a block with random rows from the span of G's columns, or from a space that contains it."""
        if self.formed is not None:
            torch.mm(search.draw((into.shape[0], self.shape[1]), into), self.formed.T, out=into)
        else:
            torch.mm(search.draw((into.shape[0], self.deltas.shape[0]), into), self.deltas, out=into)

    def rescaled(self) -> tuple[Operator, float] | None:
        """Return the gradient in double precision, with rows scaled so that their products cannot leave its range.

        The largest elements of a row's deltas and activations become equal, and at most one.

        Returns:
            The gradient divided by a number, and that number; None if the gradient is zero.

        Raises:
            FloatingPointError: if the factors hold NaN or Inf.
        """
        deltas, activations = self.deltas.double(), self.activations.double()
        (of_deltas, deltas), (of_activations, activations) = _unit_rows(deltas), _unit_rows(activations)
        sizes = of_deltas.sqrt() * of_activations.sqrt()
        largest = float(sizes.max())
        if largest == 0.0:
            return None
        return Operator(deltas * (sizes / largest), activations * (sizes / largest)), largest * largest


class Formed(Operator):
    """Gradient that is given as a matrix.

    Args:
        gradient: G of shape (out, in).
    """

    def __init__(self, gradient: Tensor) -> None:
        super().__init__(gradient.T, gradient)  # for their shapes
        self._formed = gradient

    def rescaled(self) -> tuple[Operator, float] | None:
        gradient = self.activations.double()
        largest = float(gradient.abs().max())
        if not math.isfinite(largest):
            raise FloatingPointError(_NOT_FINITE)
        return (Formed(gradient / largest), largest) if largest > 0 else None


def _unit_rows(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each row, of shape (N, 1), and the rows divided by it."""
    largest = factor.abs().amax(1, keepdim=True)
    if not bool(largest.isfinite().all()):  # NaN, too
        raise FloatingPointError(_NOT_FINITE)
    return largest, factor / torch.where(largest > 0, largest, 1.0)


def direct(operator: Operator, k: int, search: Search) -> Tensor:
    """Return a basis of all of G's columns, for a k that is not less than the rank that G can have."""
    out, width = operator.shape
    basis = scratch.take("left", (k, out), operator.deltas)
    if k == out:
        return torch.eye(k, dtype=basis.dtype, device=basis.device, out=basis)
    if k == width:
        return (
            basis.copy_(operator.formed.T)
            if operator.formed is not None
            else torch.mm(operator.activations.T, operator.deltas, out=basis)
        )
    return basis.copy_(operator.deltas)


def gram(operator: Operator, k: int, search: Search) -> Tensor:
    """Return the optimal basis, from the N x N Gram matrices of the factors; see `kernels.gram_vectors`.

    Costs N^2 (out + in) for the Gram matrices; the rest is small for small N.
    """
    deltas, activations = operator.deltas, operator.activations
    rows, dtype = deltas.shape[0], deltas.dtype
    of_deltas, of_activations = (scratch.take(name, (rows, rows), deltas) for name in ("gram", "gram of activations"))
    found = scratch.take("inner", (k, rows), deltas)
    torch.mm(deltas, deltas.T, out=of_deltas)
    torch.mm(activations, activations.T, out=of_activations)
    smallest = kernels_for(deltas).gram_vectors(of_deltas, of_activations, _JITTER[dtype], found)
    if smallest != smallest:  # squares of finite values may overflow: `compress` handles it
        found.fill_(smallest)
    basis = torch.mm(found, deltas, out=scratch.take("left", (k, operator.shape[0]), deltas))
    if smallest < _SQUARED[dtype]:  # the squares have lost digits of the last; a pass on the factors brings them back
        kernels_for(basis).orthonormalise(basis)
        basis = operator.apply(operator.apply_transposed(basis))
    return basis


def iteration(operator: Operator, k: int, search: Search) -> Tensor:
    """Return a basis by block power iteration: multiply by ``G G^T`` and orthonormalise, pass by pass.

    Costs N c (out + in) for a product with G and c columns; a pass has two. A start from the right counts its first
    product with G as the first pass; a cold start takes two more passes.
    """
    like, out = operator.deltas, operator.shape[0]
    passes, columns, known = search.iterations, k, 0
    if passes:
        columns = min(max(k, columns_for(k if search.precise is None else search.precise)), operator.most)
    basis = scratch.take("left", (columns, out), like)
    if search.right is not None:
        known = min(columns, search.right.shape[0])
        operator.apply(search.right[:known].to(like), basis[:known])
        passes = max(0, passes - 1)
    elif search.left is not None:
        known = min(columns, search.left.shape[0])
        basis[:known] = search.left[:known]
    elif passes:
        passes += _COLD_PASSES
    if known < columns:
        operator.sketch(search, basis[known:])
    for _ in range(passes):
        count = kernels_for(basis).orthonormalise(basis)
        if count < columns:  # rows of very different sizes hide one another; random ones find what is hidden
            basis[count:] = search.draw((columns - count, out), basis)
        basis = operator.apply(operator.apply_transposed(basis))
    return basis


def formed(operator: Operator, k: int, search: Search) -> Tensor:
    """Return a basis by block power iteration on G itself."""
    if operator.formed is None:
        operator.form()
    return iteration(operator, k, search)


def deflation(operator: Operator, k: int, search: Search) -> Tensor:
    """Return the vectors of the published algorithm (rank-dAD, section 4), one at a time by deflation.

    A vector is multiplied by ``G G^T`` until it changes by less than the tolerance, `iterations` times at most. This is
    a reference; unlike in the published sum, its vectors are orthonormalised.
    """
    like = operator.deltas
    found = like.new_zeros(k, operator.shape[0])
    operator.sketch(search, found)
    tiny = torch.finfo(like.dtype).tiny
    for index, vector in enumerate(found):
        vector /= vector.norm().clamp_min(tiny)
        for _ in range(search.iterations):
            product = operator.apply(operator.apply_transposed(vector[None]))[0]
            for other in found[:index]:
                product -= (product @ other) * other
            product /= product.norm().clamp_min(tiny)
            moved = float((product - vector).norm())
            vector.copy_(product)
            if moved < search.tolerance:
                break
    return found


def exact(operator: Operator, k: int, search: Search) -> Tensor:
    """Return the optimal basis by LAPACK's singular value decomposition; slow, for what other algorithms fail on."""
    deltas, activations = operator.deltas, operator.activations
    if isinstance(operator, Formed) or len(deltas) >= min(operator.shape):
        whole = operator.formed if operator.formed is not None else deltas.T @ activations
        heads: Tensor = torch.linalg.svd(whole, full_matrices=False)[0]
        return heads.T[:k].contiguous()
    basis, triangle = torch.linalg.qr(deltas.T)
    heads = basis @ torch.linalg.svd(triangle @ torch.linalg.qr(activations.T)[1].T)[0]
    return heads[:, :k].T.contiguous()


Algorithm = Callable[[Operator, int, Search], Tensor]
ALGORITHMS: dict[str, Algorithm] = {
    "gram": gram,
    "iteration": iteration,
    "formed": formed,
    "deflation": deflation,
}


OPTIMAL = 1.2  # the optimum may cost this much more than an approximation


def terms(rows: int, out: int, width: int, k: int, iterations: int) -> dict[str, dict[str, float]]:
    """Return the work of each algorithm, by the name of the rate at which it is done.

    Args:
        rows: rows N of the factors.
        out: width of the deltas.
        width: width of the activations.
        k: number of columns.
        iterations: passes of a block iteration; a warm start halves the first.

    Returns:
        Multiplications and additions by ``"fat"`` and ``"skinny"``, and rows^3 by ``"eigen"``. A constant time of a
        call, such as ``"start_gram"``, is not among them.
    """
    columns, sides = columns_for(k), out + width
    further = columns - k  # which the projection, too, has more of than after the Gram matrices
    products = max(1, 2 * iterations - 1) * columns + further
    return {
        "gram": {"fat": rows * rows * sides, "eigen": rows**3},
        "iteration": {"skinny": products * rows * sides},
        "formed": {"fat": rows * out * width, "skinny": products * out * width},
    }


def predict(
    rows: int, out: int, width: int, k: int, iterations: int, constants: Encoding | None = None
) -> dict[str, float]:
    """Predict the time of each algorithm in microseconds, without the projection that follows.

    Args:
        rows: rows N of the factors.
        out: width of the deltas.
        width: width of the activations.
        k: number of columns.
        iterations: passes of a block iteration; a warm start halves the first.
        constants: the rates; those of this process if None.
    """
    rates = current().encoding if constants is None else constants
    costs = {}
    for algorithm, work in terms(rows, out, width, k, iterations).items():
        starts = getattr(rates, f"start_{algorithm}")
        costs[algorithm] = starts + sum(amount / getattr(rates, name) for name, amount in work.items())
    return costs


def choose(rows: int, out: int, width: int, k: int, iterations: int, constants: Encoding | None = None) -> str:
    """Choose an algorithm; G itself is formed only if there are more rows than its smaller side has."""
    return _chosen(rows, out, width, k, iterations, current().encoding if constants is None else constants)


@functools.lru_cache(4096)
def _chosen(rows: int, out: int, width: int, k: int, iterations: int, constants: Encoding) -> str:
    costs = predict(rows, out, width, k, iterations, constants)
    if costs["gram"] <= OPTIMAL * min(costs["iteration"], costs["formed"]):
        return "gram"
    if rows > min(out, width) and costs["formed"] < costs["iteration"]:
        return "formed"
    return "iteration"
