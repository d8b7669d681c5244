"""Payload of one layer: the rows of which a site's gradient is the product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class FactorPayload(NamedTuple):
    """Rows whose product ``left.T @ right`` is a site's gradient of one weight.

    Attributes:
        left: of shape (k, out); dAD: the deltas.
        right: of shape (k, in); dAD: the activations.
        bias: gradient of the bias, of shape (out,), where it is sent and not the sum of the rows of `left`.
    """

    left: Tensor
    right: Tensor
    bias: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows k."""
        return self.left.shape[0]

    def part(self, start: int, end: int | None = None, *, with_bias: bool = True) -> FactorPayload:
        """Return some of the rows; the payload itself if that is all of it."""
        if start == 0 and end == self.left.shape[0] and with_bias:
            return self
        return FactorPayload(self.left[start:end], self.right[start:end], self.bias if with_bias else None)

    def without_rows(self) -> FactorPayload:
        """Return the payload of a gradient of zeros."""
        return FactorPayload(self.left[:0], self.right[:0], None if self.bias is None else torch.zeros_like(self.bias))

    def plus(self, other: FactorPayload) -> FactorPayload:
        """Return the sum with another payload of the same layer: rows are stacked, bias gradients added."""
        bias = self.bias
        if other.bias is not None:
            bias = other.bias if bias is None else bias + other.bias
        return FactorPayload(torch.cat([self.left, other.left]), torch.cat([self.right, other.right]), bias)

    def to(self, device: torch.device, dtype: torch.dtype) -> FactorPayload:
        """Return the payload on a device, with floating-point tensors in a type."""

        def move(part: Tensor) -> Tensor:
            if part.dtype == dtype and part.device == device:
                return part
            return part.to(device, dtype if part.is_floating_point() else None)

        return FactorPayload(move(self.left), move(self.right), None if self.bias is None else move(self.bias))

    def finite(self) -> bool:
        """Return whether the payload holds neither NaN nor Inf."""
        return all(finite(part) for part in self if part is not None)


def finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor Inf. A finite sum proves it in one pass; sums may overflow."""
    tensor = tensor._values() if tensor.is_sparse else tensor
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
