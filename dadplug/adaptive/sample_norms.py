"""Norms of the gradients of single samples, from a layer's factors: pure functions.

With D and A the rows of one sample, its gradient is ``D^T A``, and the square of its norm is the sum of the elements of
``(D D^T) * (A A^T)``. Of the two, the one with fewer multiplications is formed. Rows of several calls of a layer
belong to one sample together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..hooks import LINEAR, Form

_MOST_ELEMENTS = 1 << 22  # of what is unfolded or formed at a time
_ENOUGH = 8  # samples of several rows each: of more, one in up to four is measured, which costs as much less
_ONE_IN = 4


class RowLayout(NamedTuple):
    """Layout of a layer's rows: an array of shape (outer, samples, inner), flattened.

    Attributes:
        outer: rows of a sample that are far apart, as where the first dimension of the input is a sequence's.
        samples: number of samples.
        inner: rows of a sample that follow each other.
    """

    outer: int
    samples: int
    inner: int


class Call(NamedTuple):
    """Factors of one call of a layer.

    Attributes:
        activations: A of shape (rows, in).
        deltas: D of shape (rows, out).
        form: function from the two to the gradient.
        layout: layout of the rows; None where it is not known.
        forward: number of the model's forward pass that the call is part of.
    """

    activations: Tensor
    deltas: Tensor
    form: Form
    layout: RowLayout | None
    forward: int


class SquaredNorms(NamedTuple):
    """Squared norms of a layer's gradient in one backward pass.

    Attributes:
        samples: number of samples; 0 where rows cannot be attributed to samples.
        weight: sum over samples of the squared norms of the weight's gradients, extrapolated where some are measured
            only; None where they are not known.
        bias: the same of the bias.
        total: squared norm of the weight's gradient, the sum over samples; None where it was not formed on the way.
    """

    samples: int
    weight: Tensor | None
    bias: Tensor | None
    total: Tensor | None = None


def layout_of(lead: Sequence[int], samples: int) -> RowLayout | None:
    """Find out how the rows of an input divide into samples.

    The first dimension that has the size of the batch is taken for it. If there is none, and the first one is a
    multiple of it, the rows of a sample are taken to follow each other.

    Args:
        lead: all dimensions of the input but the last one.
        samples: number of samples of the forward pass; 0 where it is not known.
    """
    if samples < 1:
        return None
    for dim, size in enumerate(lead):
        if size == samples:
            return RowLayout(math.prod(lead[:dim]), samples, math.prod(lead[dim + 1 :]))
    if lead and lead[0] and lead[0] % samples == 0:
        return RowLayout(1, samples, math.prod(lead) // samples)
    if samples == 1:
        return RowLayout(1, 1, math.prod(lead))
    return None


def squared_norms(calls: Sequence[Call], dtype: torch.dtype, seed: int = 0) -> SquaredNorms:
    """Compute the squared norms of the gradients of the samples of a backward pass.

    Where a sample has several rows, as in convolutions and sequences, its norm costs about as much as its gradient.
    Then one in up to four samples is measured, at least eight, and the sum is extrapolated, which adds no bias.

    Args:
        calls: the calls of the layers that share a weight.
        dtype: type to compute in.
        seed: number that decides which samples are measured.

    Returns:
        The sums over samples. A sample's gradient is that of all calls in one forward pass; forward passes have other
        samples each.
    """
    unknown = SquaredNorms(0, None, None)
    passes: dict[int, list[Call]] = {}
    for call in calls:
        passes.setdefault(call.forward, []).append(call)
    samples, weights, biases, sums = 0, [], [], []
    for together in passes.values():
        counts = {_samples(call) for call in together}
        if len(counts) != 1 or 0 in counts:
            return unknown
        count = counts.pop()
        samples += count
        rows = [_by_sample(call, dtype) for call in together]
        found = _of_weight(rows, [call.form for call in together], seed)
        if found is None:
            return unknown
        weights.append(found[0])
        sums.append(found[1])
        biases.append(_of_bias(rows, [call.form for call in together]))
    formed = [each for each in sums if each is not None]
    total = torch.stack(formed).sum(0).square().sum(dtype=torch.float64) if len(formed) == len(sums) else None
    return SquaredNorms(samples, torch.stack(weights).sum(), torch.stack(biases).sum(), total)


def _samples(call: Call) -> int:
    """Return the number of samples that a call's rows are of; 0 where it is not known."""
    layout = call.layout
    return 0 if layout is None or math.prod(layout) != call.deltas.shape[0] else layout.samples


def _by_sample(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return D and A of shape (samples, rows of one, ·)."""
    assert call.layout is not None
    both = []
    for rows in (call.deltas, call.activations):
        rows = rows.to(dtype) if rows.is_floating_point() else rows
        both.append(rows.unflatten(0, tuple(call.layout)).transpose(0, 1).flatten(1, 2))
    return both[0], both[1]


def _of_bias(rows: Sequence[tuple[Tensor, Tensor]], forms: Sequence[Form]) -> Tensor:
    calls: list[Tensor] = []
    for (deltas, _), form in zip(rows, forms, strict=True):
        calls.append(form.bias_rows(deltas.flatten(0, 1)).unflatten(0, deltas.shape[:2]).sum(1))
    return torch.stack(calls).sum(0).square().sum(dtype=torch.float64)


def _of_weight(
    rows: Sequence[tuple[Tensor, Tensor]], forms: Sequence[Form], seed: int
) -> tuple[Tensor, Tensor | None] | None:
    """Return the sum of the squared norms of the samples' weight gradients, and their sum where all are formed.

    None if the samples cannot be told apart.
    """
    if all(form == LINEAR or form.transposed for form in forms):
        deltas, activations = _stacked(rows)
        if deltas.shape[1] == 1:
            return _dot(deltas.square().sum(2), activations.square().sum(2)), None
    every = rows[0][0].shape[0]
    stride = max(1, min(_ONE_IN, every // _ENOUGH))
    first = random.Random(seed).randrange(stride)
    rows = [(deltas[first::stride], activations[first::stride]) for deltas, activations in rows]
    samples = rows[0][0].shape[0]
    squares: list[Tensor] = []
    sums: list[Tensor] = []
    start, step = 0, 1  # the first sample shows how much memory one takes
    while start < samples:
        parts = [
            _unfolded(deltas[start : start + step], activations[start : start + step], form)
            for (deltas, activations), form in zip(rows, forms, strict=True)
        ]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        deltas, activations = (torch.cat([part[side] for part in known], 2) for side in (0, 1))
        square, formed = _of_blocks(deltas, activations)
        squares.append(square)
        sums += [] if formed is None else [formed]
        start += step
        of_gradient = deltas.shape[1] * deltas.shape[3] * activations.shape[3]
        of_one = (deltas.numel() + activations.numel()) // step + of_gradient
        step = max(1, _MOST_ELEMENTS // max(1, of_one))
    return torch.stack(squares).sum() * (every / samples), torch.stack(sums).sum(0) if sums and stride == 1 else None


def _unfolded(deltas: Tensor, activations: Tensor, form: Form) -> tuple[Tensor, Tensor] | None:
    """Return D and A of shape (samples, blocks, rows, ·)."""
    pair = form.by_row(deltas.flatten(0, 1), activations.flatten(0, 1))
    if pair is None:
        return None
    left, right = (each.unflatten(0, deltas.shape[:2]).transpose(1, 2).flatten(2, 3) for each in pair)
    return left, right


def _stacked(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(rows) == 1:
        return rows[0]
    return torch.cat([each[0] for each in rows], 1), torch.cat([each[1] for each in rows], 1)


def _of_blocks(deltas: Tensor, activations: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the sum of ``||D^T A||^2`` over samples and blocks, and the sum of the samples' gradients if formed.

    Args:
        deltas: D of shape (samples, blocks, rows, out).
        activations: A of shape (samples, blocks, rows, in).
    """
    out, width, count = deltas.shape[3], activations.shape[3], deltas.shape[2]
    if count * (out + width) <= out * width:
        return _dot(deltas @ deltas.mT, activations @ activations.mT), None
    gradients = deltas.mT @ activations
    return gradients.square().sum(dtype=torch.float64), gradients.sum(0)


def gradient_square(calls: Sequence[Call], dtype: torch.dtype) -> Tensor:
    """Compute the squared norm of the weight's gradient that the calls make together.

    Args:
        calls: the calls.
        dtype: type to compute in.
    """
    if all(call.form == LINEAR or call.form.transposed for call in calls):
        deltas = torch.cat([call.deltas for call in calls]).to(dtype)
        activations = torch.cat([call.activations for call in calls]).to(dtype)
        return _of_blocks(deltas[None, None], activations[None, None])[0]
    if all(call.form.table_rows for call in calls):
        deltas, numbers = torch.cat([call.deltas for call in calls]), torch.cat([call.activations for call in calls])
        if len(calls) > 1:
            deltas, _ = calls[0].form.merge(deltas, numbers)
        return deltas.to(dtype).square().sum(dtype=torch.float64)
    return formed_gradient(calls, dtype).square().sum(dtype=torch.float64)


def formed_gradient(calls: Sequence[Call], dtype: torch.dtype) -> Tensor:
    """Form the weight's gradient that the calls make together.

    Args:
        calls: the calls.
        dtype: type to compute in.
    """
    gradient = None
    for call in calls:
        inputs = call.activations.to(dtype) if call.activations.is_floating_point() else call.activations
        part = call.form.gradient(call.deltas.to(dtype), inputs)
        gradient = part if gradient is None else gradient + part
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


def bias_square(calls: Sequence[Call], dtype: torch.dtype) -> Tensor:
    """Compute the squared norm of the bias's gradient that the calls make together.

    Args:
        calls: the calls.
        dtype: type to compute in.
    """
    sums = [call.form.bias_gradient(call.deltas.to(dtype)) for call in calls]
    return torch.stack(sums).sum(0).square().sum(dtype=torch.float64)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.mul(left, right).sum(dtype=torch.float64)
