"""numba kernels that update a block of a weight and of the optimizer's state in one pass over memory.

The first four take flat blocks of one length and one type. Scalars have the blocks' type, so that nothing is widened.
Division does not check for zero, as in numpy, since a check would keep loops from being vectorised. The order of
operations is that of torch's optimizers.

Those named ``..._of_product`` take the factors of a gradient of few rows, and update four rows of the weight at a time:
four rows of the gradient stay in the first cache, the right factor in the second. BLAS is made for larger products.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...lowrank.kernels import four_rows
from ...support.jit import njit

Block = NDArray[np.floating]
_FAST = {
    "contract"
}  # fused multiply-add; NaN and Inf keep their meaning. Without checks of divisors loops are vectorised.
ROWS = 4  # of a weight, that are updated at a time; of factors, that are multiplied at a time


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def sgd(weight: Block, gradient: Block, rate: np.floating, decay: np.floating) -> None:
    """Apply a step of gradient descent.

    Args:
        weight: the weight, changed in place.
        gradient: its gradient.
        rate: learning rate.
        decay: factor of the weight that is added to the gradient.
    """
    for i in range(weight.size):
        weight[i] -= rate * (gradient[i] + decay * weight[i])


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def momentum(
    weight: Block,
    gradient: Block,
    velocity: Block,
    rate: np.floating,
    decay: np.floating,
    keep: np.floating,
    take: np.floating,
    ahead: np.floating,
    own: np.floating,
) -> None:
    """Apply a step of gradient descent with momentum, ``v = keep v + take g``; ``w -= rate (own g + ahead v)``.

    Args:
        weight: the weight, changed in place.
        gradient: its gradient.
        velocity: v, changed in place.
        rate: learning rate.
        decay: factor of the weight that is added to the gradient.
        keep: share of v that is kept.
        take: share of the gradient that is added to v.
        ahead: factor of v in the step.
        own: factor of the gradient in the step: 1 for Nesterov's momentum, else 0.
    """
    for i in range(weight.size):
        slope = gradient[i] + decay * weight[i]
        velocity[i] = keep * velocity[i] + take * slope
        weight[i] -= rate * (own * slope + ahead * velocity[i])


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def adam(
    weight: Block,
    gradient: Block,
    mean: Block,
    square: Block,
    shrink: np.floating,
    decay: np.floating,
    first: np.floating,
    keep: np.floating,
    second: np.floating,
    rate: np.floating,
    corrected: np.floating,
    epsilon: np.floating,
) -> None:
    """Apply a step of Adam or AdamW.

    Args:
        weight: the weight, changed in place.
        gradient: its gradient.
        mean: average of the gradients, changed in place.
        square: average of their squares, changed in place.
        shrink: factor of the weight before the step, by AdamW's decay.
        decay: factor of the weight that is added to the gradient, by Adam's.
        first: share of the gradient in the new mean.
        keep: share of the average of squares that is kept.
        second: share of its square in the new average of squares.
        rate: learning rate over the bias correction of the mean.
        corrected: one over the square root of the bias correction of the squares; a second division would take as long
            as all the rest.
        epsilon: added to the denominator.
    """
    for i in range(weight.size):
        slope = gradient[i] + decay * weight[i]
        mean[i] += first * (slope - mean[i])
        square[i] = keep * square[i] + second * slope * slope
        weight[i] = shrink * weight[i] - rate * mean[i] / (np.sqrt(square[i]) * corrected + epsilon)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def adagrad(
    weight: Block, gradient: Block, total: Block, rate: np.floating, decay: np.floating, epsilon: np.floating
) -> None:
    """Apply a step of Adagrad.

    Args:
        weight: the weight, changed in place.
        gradient: its gradient.
        total: sum of the squares of the gradients, changed in place.
        rate: learning rate.
        decay: factor of the weight that is added to the gradient.
        epsilon: added to the denominator.
    """
    for i in range(weight.size):
        slope = gradient[i] + decay * weight[i]
        total[i] += slope * slope
        weight[i] -= rate * slope / (np.sqrt(total[i]) + epsilon)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def sgd_of_product(left: Block, right: Block, block: Block, weight: Block, *scalars: np.floating) -> None:
    """Apply a step of gradient descent to a matrix.

    Args:
        left: left factor of the gradient, of shape (rows, height), rows a multiple of 4, and height at least 4.
        right: right factor, of shape (rows, width).
        block: room for four rows of some columns of the gradient.
        weight: the weight, of shape (height, width), changed in place.
        scalars: the scalars of `sgd`.
    """
    height, width = weight.shape
    for start in range(0, width, block.shape[1]):
        end = min(start + block.shape[1], width)
        for first in range(0, height, ROWS):
            base = min(first, height - ROWS)  # the last block may contain rows of the one before it
            four_rows(left, right, base, start, end, block[0], block[1], block[2], block[3])
            for i in range(first, min(first + ROWS, height)):
                sgd(weight[i, start:end], block[i - base], *scalars)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def momentum_of_product(
    left: Block, right: Block, block: Block, weight: Block, velocity: Block, *scalars: np.floating
) -> None:
    """Apply a step of gradient descent with momentum to a matrix.

    Args:
        left: left factor of the gradient, of shape (rows, height), rows a multiple of 4, and height at least 4.
        right: right factor, of shape (rows, width).
        block: room for four rows of some columns of the gradient.
        weight: the weight, of shape (height, width), changed in place.
        velocity: the optimizer's state of the same shape, changed in place.
        scalars: the scalars of `momentum`.
    """
    height, width = weight.shape
    for start in range(0, width, block.shape[1]):
        end = min(start + block.shape[1], width)
        for first in range(0, height, ROWS):
            base = min(first, height - ROWS)  # the last block may contain rows of the one before it
            four_rows(left, right, base, start, end, block[0], block[1], block[2], block[3])
            for i in range(first, min(first + ROWS, height)):
                momentum(weight[i, start:end], block[i - base], velocity[i, start:end], *scalars)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def adam_of_product(
    left: Block, right: Block, block: Block, weight: Block, mean: Block, square: Block, *scalars: np.floating
) -> None:
    """Apply a step of Adam or AdamW to a matrix.

    Args:
        left: left factor of the gradient, of shape (rows, height), rows a multiple of 4, and height at least 4.
        right: right factor, of shape (rows, width).
        block: room for four rows of some columns of the gradient.
        weight: the weight, of shape (height, width), changed in place.
        mean: the optimizer's state of the same shape, changed in place.
        square: the optimizer's state of the same shape, changed in place.
        scalars: the scalars of `adam`.
    """
    height, width = weight.shape
    for start in range(0, width, block.shape[1]):
        end = min(start + block.shape[1], width)
        for first in range(0, height, ROWS):
            base = min(first, height - ROWS)  # the last block may contain rows of the one before it
            four_rows(left, right, base, start, end, block[0], block[1], block[2], block[3])
            for i in range(first, min(first + ROWS, height)):
                adam(weight[i, start:end], block[i - base], mean[i, start:end], square[i, start:end], *scalars)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def adagrad_of_product(
    left: Block, right: Block, block: Block, weight: Block, total: Block, *scalars: np.floating
) -> None:
    """Apply a step of Adagrad to a matrix.

    Args:
        left: left factor of the gradient, of shape (rows, height), rows a multiple of 4, and height at least 4.
        right: right factor, of shape (rows, width).
        block: room for four rows of some columns of the gradient.
        weight: the weight, of shape (height, width), changed in place.
        total: the optimizer's state of the same shape, changed in place.
        scalars: the scalars of `adagrad`.
    """
    height, width = weight.shape
    for start in range(0, width, block.shape[1]):
        end = min(start + block.shape[1], width)
        for first in range(0, height, ROWS):
            base = min(first, height - ROWS)  # the last block may contain rows of the one before it
            four_rows(left, right, base, start, end, block[0], block[1], block[2], block[3])
            for i in range(first, min(first + ROWS, height)):
                adagrad(weight[i, start:end], block[i - base], total[i, start:end], *scalars)
