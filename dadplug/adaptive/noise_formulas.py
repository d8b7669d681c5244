"""Gradient noise from norms, norms of single samples' gradients, sketches, and AdaScale's gain: pure functions.

**Noise.** All estimates are of the gradient G of the mean loss. A batch has parts, of which each has a gradient of its
own: the batches of the sites, or micro-batches of them. Part g has b_g samples and the weight u_g in the mean; the
weights sum to 1. Sums are rounded once, so that the numbers do not depend on the processor. Sources: arXiv:1812.06162
for the noise scale, arXiv:2007.05105 for the gain.

**Norms of samples.** With D and A the rows of one sample in a layer's factors, its gradient is ``D^T A``, and the
square of its norm is the sum of the elements of ``(D D^T) * (A A^T)``. Of the two, the one with fewer multiplications
is formed. Rows of several calls of a layer belong to one sample together.

**Sketches.** Few numbers, from which inner products of gradients follow without bias. The gradient G of shape (out, in)
is multiplied by random signs, the same at all sites, and its rows and columns are added up in k groups each: a sketch
of k x k numbers. The inner product of two sketches is that of the gradients in expectation over the signs. Source:
count sketches, doi:10.1145/2486788.2486869 for the product of two.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hooks import LINEAR, Form

SKETCH = 16  # rows and columns of a sketch
_MOST_ELEMENTS = 1 << 22  # of what is unfolded or formed at a time
_ENOUGH = 8  # samples of several rows each: of more, one in up to four is measured, which costs as much less
_ONE_IN = 4

Layout = tuple[int, int, int]
"""Layout of a layer's rows: those of a sample that are far apart, as where the first dimension of the input is a
sequence's; samples; rows of a sample that follow each other."""


class NoiseEstimate(NamedTuple):
    """Estimate of the noise of a gradient; NaN where there is none.

    Attributes:
        variance: trace of the covariance of the gradients of single samples, tr(Sigma).
        squared_norm: square of the norm of the gradient's expectation, ``|G|^2``; unbiased, so it may be negative.
    """

    variance: float
    squared_norm: float

    @property
    def scale(self) -> float:
        """The simple noise scale ``tr(Sigma) / |G|^2``, in samples; infinite where `squared_norm` is not positive."""
        if math.isnan(self.variance) or math.isnan(self.squared_norm):
            return math.nan
        return self.variance / self.squared_norm if self.squared_norm > 0.0 else math.inf


NO_ESTIMATE = NoiseEstimate(math.nan, math.nan)


class Part(NamedTuple):
    """Part of a batch, with norms of its gradient.

    Attributes:
        samples: number of samples b_g.
        weight: weight u_g in the mean.
        norm: squared norm of the mean of its samples' gradients.
        squares: sum over samples of the squared norms of their gradients; NaN where it is not known.
    """

    samples: float
    weight: float
    norm: float
    squares: float


def within_parts(parts: Sequence[Part], norm: float) -> NoiseEstimate:
    """Estimate from the deviations of samples from the mean of their part; also where parts have different means.

    Args:
        parts: the parts.
        norm: squared norm of the mean gradient of the batch.

    Returns:
        The estimate; NaN if no part has two samples, or squares are not known.
    """
    freedom = math.fsum(part.samples - 1.0 for part in parts)
    if freedom <= 0.0:
        return NO_ESTIMATE
    deviations = [part.squares - part.samples * part.norm for part in parts]
    return _estimate(math.fsum(deviations) / freedom, parts, norm)


def between_parts(parts: Sequence[Part], norm: float) -> NoiseEstimate:
    """Estimate from the deviations of the parts from the mean; too large where they have different distributions.

    Args:
        parts: the parts.
        norm: squared norm of the mean gradient of the batch.

    Returns:
        The estimate; NaN with fewer than two parts.
    """
    if len(parts) < 2:
        return NO_ESTIMATE
    deviation = math.fsum([*(part.weight * part.norm for part in parts), -norm])
    share = math.fsum(part.weight * (1.0 - part.weight) / part.samples for part in parts)
    return _estimate(deviation / share, parts, norm)


def _estimate(variance: float, parts: Sequence[Part], norm: float) -> NoiseEstimate:
    of_mean = variance * math.fsum(part.weight * part.weight / part.samples for part in parts)
    return NoiseEstimate(variance, norm - of_mean)


def norm_of_mean(parts: Sequence[Part], products: Sequence[Sequence[float]]) -> float:
    """Compute the squared norm of the mean gradient from inner products between parts.

    Args:
        parts: the parts.
        products: inner products of their gradients; those of a part with itself are not used.
    """
    terms = [part.weight * part.weight * part.norm for part in parts]
    for first, one in enumerate(parts):
        for second in range(first):
            terms.append(2.0 * one.weight * parts[second].weight * products[first][second])
    return math.fsum(terms)


def gain(estimate: NoiseEstimate, batch: float, base_batch: float) -> float:
    """Compute AdaScale's gain r, the steps with the base batch that one step with a batch is worth.

    ``r = (s + m) / (s / k + m)`` with the variance ``s = tr(Sigma) / base_batch`` of a gradient of the base batch,
    ``m = |G|^2`` and ``k = batch / base_batch``. It lies between 1 and k.

    Args:
        estimate: variance and squared norm; negative ones count as zero.
        batch: samples of the step.
        base_batch: samples of a step for which the learning rate has been chosen.

    Returns:
        The gain; 1.0 without an estimate.
    """
    if math.isnan(estimate.variance) or math.isnan(estimate.squared_norm):
        return 1.0
    variance, mean = max(estimate.variance, 0.0), max(estimate.squared_norm, 0.0)
    of_step = variance / batch + mean
    return (variance / base_batch + mean) / of_step if of_step > 0.0 else 1.0


# Norms of the gradients of single samples


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
    layout: Layout | None
    forward: int


class SquaredNorms(NamedTuple):
    """Squared norms of a layer's gradient in one backward pass.

    Attributes:
        samples: number of samples.
        weight: sum over samples of the squared norms of the weight's gradients, extrapolated where some are measured
            only.
        bias: the same of the bias.
        total: squared norm of the weight's gradient, the sum over samples; None where it was not formed on the way.
    """

    samples: int
    weight: Tensor
    bias: Tensor
    total: Tensor | None


def layout_of(lead: Sequence[int], samples: int) -> Layout | None:
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
            return math.prod(lead[:dim]), samples, math.prod(lead[dim + 1 :])
    if lead and lead[0] and lead[0] % samples == 0:
        return 1, samples, math.prod(lead) // samples
    if samples == 1:
        return 1, 1, math.prod(lead)
    return None


def squared_norms(calls: Sequence[Call], dtype: torch.dtype, seed: int = 0) -> SquaredNorms | None:
    """Compute the squared norms of the gradients of the samples of a backward pass.

    Where a sample has several rows, as in convolutions and sequences, its norm costs about as much as its gradient.
    Then one in up to four samples is measured, at least eight, and the sum is extrapolated, which adds no bias.

    Args:
        calls: the calls of the layers that share a weight.
        dtype: type to compute in.
        seed: number that decides which samples are measured.

    Returns:
        The sums over samples. A sample's gradient is that of all calls in one forward pass; forward passes have other
        samples each. None where rows cannot be attributed to samples.
    """
    passes: dict[int, list[Call]] = {}
    for call in calls:
        passes.setdefault(call.forward, []).append(call)
    samples, weights, biases, sums = 0, [], [], []
    for together in passes.values():
        counts = {_samples(call) for call in together}
        if len(counts) != 1 or 0 in counts:
            return None
        rows = [_by_sample(call, dtype) for call in together]
        forms = [call.form for call in together]
        found = _of_weight(rows, forms, seed)
        if found is None:
            return None
        samples += counts.pop()
        weights.append(found[0])
        sums.append(found[1])
        of_bias = [
            form.bias_rows(deltas.flatten(0, 1)).unflatten(0, deltas.shape[:2]).sum(1)
            for (deltas, _), form in zip(rows, forms, strict=True)
        ]
        biases.append(_square(torch.stack(of_bias).sum(0)))
    formed = [each for each in sums if each is not None]
    total = _square(torch.stack(formed).sum(0)) if len(formed) == len(sums) else None
    return SquaredNorms(samples, torch.stack(weights).sum(), torch.stack(biases).sum(), total)


def _samples(call: Call) -> int:
    """Return the number of samples that a call's rows are of; 0 where it is not known."""
    layout = call.layout
    return 0 if layout is None or math.prod(layout) != call.deltas.shape[0] else layout[1]


def _by_sample(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return D and A of shape (samples, rows of one, ·)."""
    assert call.layout is not None
    both = []
    for rows in (call.deltas, call.activations):
        rows = rows.to(dtype) if rows.is_floating_point() else rows
        both.append(rows.unflatten(0, call.layout).transpose(0, 1).flatten(1, 2))
    return both[0], both[1]


def _of_weight(
    rows: Sequence[tuple[Tensor, Tensor]], forms: Sequence[Form], seed: int
) -> tuple[Tensor, Tensor | None] | None:
    """Return the sum of the squared norms of the samples' weight gradients, and their sum where all are formed.

    None if the samples cannot be told apart.
    """
    deltas, activations = rows[0]
    if len(rows) == 1 and deltas.shape[1] == 1 and (forms[0] == LINEAR or forms[0].transposed):
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
    return _square(gradients), gradients.sum(0)


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
        return _square(deltas.to(dtype))
    return _square(formed_gradient(calls, dtype))


def formed_gradient(calls: Sequence[Call], dtype: torch.dtype) -> Tensor:
    """Form the weight's gradient that the calls make together.

    Args:
        calls: the calls.
        dtype: type to compute in.
    """
    gradient: Tensor | None = None
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
    return _square(torch.stack([call.form.bias_gradient(call.deltas.to(dtype)) for call in calls]).sum(0))


def _square(values: Tensor) -> Tensor:
    return values.square().sum(dtype=torch.float64)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.mul(left, right).sum(dtype=torch.float64)


# Sketches


def _fold(rows: Tensor, signs: Tensor) -> Tensor:
    """Multiply the columns by signs and add them up in groups.

    Args:
        rows: of shape (rows, columns).
        signs: of shape (columns,).

    Returns:
        A tensor of shape (rows, `SKETCH`).
    """
    signed = F.pad(rows * signs, (0, -rows.shape[1] % SKETCH))
    return signed.view(rows.shape[0], -1, SKETCH).sum(1)


def sketch_matrix(gradient: Tensor, name: str, step: int) -> Tensor:
    """Sketch a gradient that has been formed.

    Args:
        gradient: of shape (out, in).
        name: name of the parameter.
        step: number of the step.

    Returns:
        The sketch, of shape (`SKETCH` * `SKETCH`,).
    """
    left, right = _signs(gradient.shape[0], gradient.shape[1], name, step, gradient)
    return _fold(_fold(gradient, right).T, left).T.flatten()


def sketch_calls(calls: Sequence[Call], shape: tuple[int, int], name: str, step: int, dtype: torch.dtype) -> Tensor:
    """Sketch a gradient from its factors, without forming it for fully connected layers.

    Args:
        calls: the calls whose gradients add up.
        shape: shape of the weight as a matrix.
        name: name of the parameter.
        step: number of the step.
        dtype: type to compute in.

    Returns:
        The sketch, of shape (`SKETCH` * `SKETCH`,).
    """
    if not all(call.form == LINEAR for call in calls):
        return sketch_matrix(formed_gradient(calls, dtype).reshape(shape), name, step)
    left, right = _signs(*shape, name, step, calls[0].deltas.new_empty(0, dtype=dtype))
    parts = [_fold(call.deltas.to(dtype), left).T @ _fold(call.activations.to(dtype), right) for call in calls]
    return torch.stack(parts).sum(0).flatten()


def _signs(out: int, width: int, name: str, step: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the random signs of rows and columns in a step, of the type and on the device of a tensor."""
    found = []
    for side, length in (("out", out), ("in", width)):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {side} {step}".encode()))
        found.append((torch.randint(0, 2, (length,), generator=generator) * 2 - 1).to(like))
    return found[0], found[1]
