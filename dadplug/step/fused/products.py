"""Agreed gradients that are held as products of factors, and not formed; their norms, and which ones stay products."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MismatchError
from ...exchange.factor_buckets import FactorPayload
from ...support.schedules import DEFAULTS, Decoding
from ..model_sync.private import is_private

_CUDA_TILE_ELEMENTS = 1 << 22
_LEAST = 4  # rows and columns of a gradient for which these kernels are made
_BLOCK_COLUMNS = 2048  # four rows of so many numbers fit into the first cache
_DOUBLE = 2.0  # a multiplication in double precision costs about this much more


class GradientProduct:
    """Agreed gradient of a weight, ``sum over sites of w_s left_s^T right_s``, without the matrix that it makes.

    Args:
        payloads: what each site sent, by rank.
        weights: each site's share in the mean.
        transposed: whether the gradient is ``right^T left``.
        constants: sizes of blocks; the same at all sites, since the last bits depend on them.

    Attributes:
        left: the rows of all sites times their shares, of shape (rows, height).
        right: the rows, of shape (rows, width).
    """

    def __init__(
        self,
        payloads: Sequence[FactorPayload],
        weights: Sequence[float],
        transposed: bool = False,
        constants: Decoding = DEFAULTS.decoding,
    ) -> None:
        self._tile, self._narrow = constants.tile, constants.narrow
        lefts = [payload.left * weight for payload, weight in zip(payloads, weights, strict=True)]
        rights = [payload.right for payload in payloads]
        left, right = (torch.cat(lefts), torch.cat(rights)) if len(lefts) > 1 else (lefts[0], rights[0])
        self.left, self.right = (right, left) if transposed else (left, right)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the gradient."""
        return self.left.shape[1], self.right.shape[1]

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the gradient by a number."""
        self.left = self.left * factor

    def formed(self) -> Tensor:
        """Return the gradient as a matrix."""
        return self.left.T @ self.right

    @property
    def is_narrow(self) -> bool:
        """Whether the factors have so few rows that kernels of their own multiply them faster than BLAS."""
        return self.left.shape[0] <= self._narrow and min(self.shape) >= _LEAST

    def padded(self, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the kernels for few rows take: both factors, filled up by rows of zeros, and a block to work in.

        Args:
            multiple: their number of rows becomes a multiple of this; it is the number of rows of the block.
        """
        rows, width = self.right.shape
        missing = -rows % multiple if rows else multiple
        left, right = (F.pad(each, (0, 0, 0, missing)) if missing else each for each in (self.left, self.right))
        block = left.new_empty(multiple, min(width, _BLOCK_COLUMNS))
        return left.contiguous(), right.contiguous(), block

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Form the gradient in blocks of its rows.

        Yields:
            First row, the row after the last, and the block, which is valid until the next one.
        """
        height, width = self.shape
        elements = _CUDA_TILE_ELEMENTS if self.left.is_cuda else self._tile
        step = min(height, max(1, elements // max(1, width)))
        scratch = self.left.new_empty(step, width)
        for start in range(0, height, max(1, step)):
            end = min(height, start + step)
            yield start, end, torch.mm(self.left[:, start:end].T, self.right, out=scratch[: end - start])

    def norm(self, order: float = 2.0) -> Tensor:
        """Return the norm of the gradient's elements, a scalar.

        The 2-norm comes from Gram matrices where that takes fewer multiplications,
        ``|L^T R|^2 = sum((L L^T) * (R R^T))``, in double precision, since the terms may cancel.

        Args:
            order: which norm, as `torch.linalg.vector_norm` takes it.
        """
        rows, (height, width) = self.left.shape[0], self.shape
        if order == 2.0 and _DOUBLE * rows * (height + width) < height * width:
            left, right = self.left.double(), self.right.double()
            squares = ((left @ left.T) * (right @ right.T)).sum()
            return squares.clamp_min(0.0).sqrt().to(self.left.dtype)
        norms = [torch.linalg.vector_norm(block, order) for _, _, block in self.tiles()]
        if not norms:
            return self.left.new_zeros(())
        if math.isinf(order):
            return torch.stack(norms).amax() if order > 0 else torch.stack(norms).amin()
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        return total


_NOT_EMPTY = 1 << 32


class Deferral:
    """Weights whose agreed gradients need not be formed in a step, and these gradients as products.

    Sites must form the same gradients, since a step on a product rounds in another way. So each states in its step
    header which weights it means, and all gradients are formed unless the sites agree.

    Args:
        weights: the weights.

    Attributes:
        agreed: whether all sites mean the same weights.
        products: the agreed gradients that have not been formed, by weight.
    """

    def __init__(self, weights: Set[nn.Parameter]) -> None:
        self._weights = weights
        self.agreed = False
        self.products: dict[nn.Parameter, GradientProduct] = {}

    def has(self, weight: nn.Parameter) -> bool:
        """Return whether the gradient of a weight need not be formed."""
        return weight in self._weights

    def digest(self, units: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Return a number that is the same at all sites that mean the same weights.

        Args:
            units: names and weights of all units.
        """
        names = "\n".join(name for name, weight in units if self.has(weight))
        return zlib.crc32(names.encode()) | _NOT_EMPTY

    def form(self, weights: Iterable[nn.Parameter]) -> None:
        """Write gradients to ``.grad`` after all.

        Args:
            weights: weights whose gradients are products.
        """
        for weight in list(weights):
            weight.grad = self.products.pop(weight).formed().view(weight.shape)


def compare_digests(deferral: Deferral | None, own: int, digests: Iterable[int]) -> None:
    """Compare the digests of the sites, so that all of them form the same gradients.

    Args:
        deferral: the gradients that this site would not form; None for those of none.
        own: this site's digest.
        digests: those of the sites that have a part in the step, which may be without this one.

    Raises:
        MismatchError: if this site has no part, and would not do as all others.
    """
    found = set(digests)
    common = found.pop() if len(found) == 1 else 0
    if common and own != common:
        raise MismatchError("the other sites call reduction.apply(optimizer): all sites must call it in the same steps")
    if deferral is not None:
        deferral.agreed = bool(common)


@torch.no_grad()
def clip_norm(
    weights: Iterable[nn.Parameter],
    products: Mapping[nn.Parameter, GradientProduct],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip the norm of gradients of which some are products, as `torch.nn.utils.clip_grad_norm_` does.

    Gradients of private parameters are clipped by a norm of their own: that of the others is the same at all sites.

    Args:
        weights: parameters whose gradients are in ``.grad``; those without are left out.
        products: further gradients.
        max_norm: largest norm.
        norm_type: which norm.
        error_if_nonfinite: whether a norm that is not finite is an error.

    Returns:
        The norm before, without private parameters.

    Raises:
        RuntimeError: for such a norm.
    """
    chosen, norms = list(weights), []
    for private in (False, True):
        gradients = [each.grad for each in chosen if each.grad is not None and is_private(each) is private]
        held = [product for weight, product in products.items() if is_private(weight) is private]
        norms.append(_clip(gradients, held, max_norm, norm_type, error_if_nonfinite))
    return norms[0]


def _clip(
    gradients: Sequence[Tensor],
    products: Sequence[GradientProduct],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    norms = [product.norm(norm_type) for product in products]
    norms += [torch.nn.utils.get_total_norm([gradient], norm_type) for gradient in gradients]
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {float(total)}, and cannot be clipped")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    for product in products:
        product.scale(factor)
    return total
