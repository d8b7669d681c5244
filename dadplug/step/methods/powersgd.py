"""PowerSGD: ``G ~ P Q^T`` with P and Q summed over sites, so that the mean gradient itself is approximated.

Source: arXiv:1905.13727. One pass of power iteration a step, from the last step's Q, with error feedback. With M_s the
weighted gradient of site s plus its error memory, a step is

    P = sum of project(M_s, Q, transposed=True)      all-reduced
    P = orthonormal_basis(P)
    Q = sum of project(M_s, P)                       all-reduced
    G = decode(P, Q)

Bases are stored as rows: Q has the shape (r, in) and P the shape (r, out).
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...exchange.factor_buckets import finite
from ...lowrank import orthonormalise
from .base import Method, MethodOptions, Traits, register_method
from .feedback import ErrorFeedback


class WeightedGradient(NamedTuple):
    """A site's contribution ``M = weight * gradient + loss_scale / scale * error``, which is not formed.

    Attributes:
        gradient: of shape (out, in); None counts as zero.
        weight: the site's weight in the mean.
        error: error memory of shape (out, in), without the loss scale; None counts as zero.
        loss_scale: the factor that the gradient contains.
        scale: what the sum over sites is expected to be multiplied by to make the mean.
    """

    gradient: Tensor | None
    weight: float
    error: Tensor | None
    loss_scale: float
    scale: float = 1.0


def project(matrix: WeightedGradient, basis: Tensor, *, transposed: bool = False) -> Tensor | None:
    """Compute ``basis @ M``, or ``basis @ M^T``.

    Args:
        matrix: M of shape (out, in).
        basis: of shape (r, out); of shape (r, in) where transposed.
        transposed: whether to multiply by the transpose.

    Returns:
        A tensor of shape (r, in), or (r, out) where transposed; None if M is zero for want of a gradient and an error.
    """
    product = None
    if matrix.gradient is not None:
        product = (basis @ (matrix.gradient.T if transposed else matrix.gradient)).mul_(matrix.weight)
    if matrix.error is None:
        return product
    error = matrix.error.T if transposed else matrix.error
    if product is None:
        return (basis @ error).mul_(matrix.loss_scale / matrix.scale)
    return product.addmm_(basis, error, alpha=matrix.loss_scale / matrix.scale)


def orthonormal_basis(left: Tensor) -> Tensor | None:
    """Orthonormalise the summed P; equal input gives equal bits on every site.

    Args:
        left: of shape (r, out), contiguous; may be overwritten.

    Returns:
        Orthonormal rows of shape (r, out); None if P holds NaN or Inf.
    """
    return orthonormalise(left) if finite(left) else None


def decode(left: Tensor, right: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Compute the agreed gradient ``scale * P^T Q``.

    Args:
        left: the orthonormal P of shape (r, out).
        right: the summed Q of shape (r, in).
        scale: what the sum is multiplied by to make the mean.
        out: room for the result, of shape (out, in).

    Returns:
        The gradient, of shape (out, in).
    """
    return torch.mm((left * scale).T, right, out=out)


def add_to_error(error: Tensor, matrix: WeightedGradient, scale: float = 1.0) -> None:
    """Add the weighted gradient to the error memory, in place; must run before the gradient is overwritten.

    Args:
        error: of shape (out, in), without the loss scale.
        matrix: what the site has sent in this step.
        scale: what the sum of all sites is multiplied by to make the mean.
    """
    if matrix.gradient is not None:
        error.add_(matrix.gradient, alpha=matrix.weight * scale / matrix.loss_scale)


def subtract_sent(error: Tensor, agreed: Tensor, share: float, loss_scale: float) -> None:
    """Subtract a site's part of the agreed gradient from its error memory, in place.

    Args:
        error: of shape (out, in), without the loss scale; `add_to_error` has added the gradient.
        agreed: what `decode` returned, of shape (out, in).
        share: the site's part of it. Parts of all sites sum to 1.
        loss_scale: the factor that the gradient contains.
    """
    error.sub_(agreed, alpha=share / loss_scale)


def fill_empty_rows(basis: Tensor, name: str) -> Tensor:
    """Replace rows of zeros by random ones, equal on all sites.

    A gradient of a lower rank, as of LoRA's first matrix before the second has left zero, leaves rows of zeros, which
    would stay zero in all later steps.

    Args:
        basis: Q of shape (r, in).
        name: name of the weight, the seed of the random rows.

    Returns:
        The basis itself where no row is zero.
    """
    empty = ~basis.any(1)
    if not bool(empty.any()):
        return basis
    return torch.where(empty[:, None], _random_basis(name, (basis.shape[0], basis.shape[1])).to(basis), basis)


@register_method("powersgd")
class PowerSGD(Method):
    """Compression to rank r in two all-reduces of r out and r in values a weight; the second waits for the first.

    A weight whose gradient is not larger than that is all-reduced.
    """

    # The bases Q are the same on all sites.
    traits = Traits(
        exact=False,
        takes_factors=False,
        keeps_state=True,
        shares_state=True,
        reads=("rank", "warm_start", "error_feedback"),
    )

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.max_rank: int = options.largest_rank
        self.errors = ErrorFeedback(options.error_feedback is not False)
        self._bases: dict[str, Tensor] = {}

    def gradient_path(self, out: int, width: int) -> str:
        return "powersgd" if self.columns(out, width) * (out + width) < out * width else "allreduce"

    def columns(self, out: int, width: int) -> int:
        """Return the rank r for a weight of this shape."""
        return min(self.options.largest_rank, out, width)

    def basis(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Return Q, of shape (r, in); before the first step, random values that are equal on all sites.

        Args:
            name: name of the weight.
            shape: its shape as a matrix, (out, in).
            like: gives type and device.
        """
        rows = (self.columns(*shape), shape[1])
        basis = self._bases.get(name) if self.options.warm_start else None
        if basis is None or basis.shape != rows:
            basis = _random_basis(name, rows)
        basis = self._bases[name] = basis.to(like)
        return basis

    def keep(self, name: str, basis: Tensor) -> None:
        """Keep Q, of shape (r, in), for the next step; see `fill_empty_rows`."""
        self._bases[name] = fill_empty_rows(basis, name)

    def state_dict(self) -> dict[str, Any]:
        bases = {name: basis.clone() for name, basis in self._bases.items()}
        return {"bases": bases, "errors": self.errors.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bases = {name: basis.clone() for name, basis in state["bases"].items()}
        self.errors.load_state_dict(state["errors"])


def _random_basis(name: str, shape: tuple[int, int]) -> Tensor:
    """Return the rows of a first Q, equal on all sites."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
