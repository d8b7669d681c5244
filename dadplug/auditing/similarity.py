"""Similarity of reconstructions to originals: correlation, PSNR and SSIM, and which row is which.

Rows are centred by the mean of the batch before they are compared, since a picture of a digit is similar to any mean of
digits: a correlation of 1 means that what distinguishes the sample from the rest of its batch has been recovered.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .attacks.base import Result
from .capture import Batch, LayerView, call

_BLOCK = 1024  # true rows that are compared at a time


def centre(rows: Tensor) -> Tensor:
    """Return the mean of rows, of shape (1, width); of a single row its own mean."""
    return rows.mean(0, keepdim=True) if len(rows) > 1 else rows.mean().expand(1, rows.shape[1])


def matched(found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Assign a recovered row to each true row, in the scale that fits it best.

    Args:
        found: recovered rows, of shape (k, width), in any order and scale.
        truth: true rows, of shape (n, width).

    Returns:
        The rows that are closest to the true ones, of shape (n, width), and their correlations, of shape (n,).
    """
    found, truth = found.double(), truth.double()
    mean = centre(truth)
    if not len(found):
        return mean.expand_as(truth), truth.new_zeros(len(truth))
    squares, along, length = found.square().sum(1).clamp_min(1e-30), found @ mean[0], mean.square().sum()
    best = torch.empty_like(truth)
    for start in range(0, len(truth), _BLOCK):
        rows = truth[start : start + _BLOCK]
        products = rows @ found.T
        scales = products / squares  # of each recovered row for each true one, by least squares
        inner = scales * (products - along) - (rows @ mean[0])[:, None] + length
        norms = (scales.square() * squares - 2 * scales * along + length).clamp_min(1e-30).sqrt()
        place = (inner / norms).argmax(1, keepdim=True)
        best[start : start + _BLOCK] = found[place[:, 0]] * scales.gather(1, place)
    return best, correlations(best, truth)


def correlations(found: Tensor, truth: Tensor) -> Tensor:
    """Return the correlation of each row with the true one beyond the mean of the batch, from 0 to 1."""
    mean = centre(truth)
    own, other = truth - mean, found - mean
    norms = own.norm(dim=1) * other.norm(dim=1)
    same = own.norm(dim=1) < 1e-12 * truth.norm(dim=1).clamp_min(1e-30)  # equal to the mean: nothing to distinguish
    values = (own * other).sum(1) / norms.clamp_min(1e-30)
    return torch.where(same, torch.zeros_like(values), values.clamp(0, 1))


def by_sample(scores: Tensor, samples: int) -> Tensor:
    """Return the mean score of the rows of each sample, where each has as many rows; else the scores."""
    return scores.view(samples, -1).mean(1) if samples and len(scores) % samples == 0 else scores


class Places(NamedTuple):
    """Place of each number of the data in the rows of a layer's input.

    Attributes:
        order: for each number of one sample's data, its place among the numbers of one sample's rows.
    """

    order: Tensor

    def data(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Return rows in the shape of the data.

        Args:
            rows: the rows of all samples.
            shape: shape of the data.
        """
        return rows.reshape(shape[0], -1)[:, self.order].reshape(shape)


def places(batch: Batch, view: LayerView) -> Places | None:
    """Find where a layer's input has the numbers of the data, by a sample of distinct numbers; None if it has not.

    Args:
        batch: the batch.
        view: the layer, with its input.
    """
    data, size = batch.data, batch.data[0].numel()
    if batch.is_text or view.truth is None or len(view.truth) != len(data) or view.truth[0].numel() < size:
        return None
    probe = torch.arange(1.0, size + 1, dtype=data.dtype, device=data.device).view_as(data[:1]).expand_as(data)
    found = layer_input(batch, view.layer, batch.with_data(probe.contiguous()))
    if found is None or found.shape != view.truth.shape:
        return None
    values = found[0].reshape(-1)
    order = torch.full((size + 1,), -1, dtype=torch.long, device=data.device)
    whole = (values == values.round()) & (values >= 0) & (values <= size)
    order[values[whole].long()] = torch.nonzero(whole).flatten()
    return Places(order[1:]) if bool((order[1:] >= 0).all()) else None


class _Reached(Exception):
    """The forward pass has reached a layer."""


def layer_input(batch: Batch, layer: str, inputs: object, *, differentiable: bool = False) -> Tensor | None:
    """Compute the input of a layer; None if the forward pass fails or does not reach it.

    The model is in evaluation mode, but in its own where the result is to be differentiated.

    Args:
        batch: the batch, with the model.
        layer: name of the layer.
        inputs: inputs of the model.
        differentiable: whether the result can be differentiated.
    """
    model, reached = batch.model, []

    def stop(_: object, args: tuple[Tensor, ...]) -> None:
        reached.append(args[0])
        raise _Reached

    training = {module: module.training for module in model.modules()}
    handle = model.get_submodule(layer).register_forward_pre_hook(stop)
    try:
        if not differentiable:
            model.eval()
        with torch.set_grad_enabled(differentiable):
            call(model, inputs)
    except _Reached:
        return reached[0]
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    finally:
        handle.remove()
        for module, mode in training.items():
            module.training = mode
    return None


def is_picture(data: Tensor) -> bool:
    """Return whether a tensor has the shape of pictures: (samples, 1 or 3 channels, height, width)."""
    return data.is_floating_point() and data.dim() == 4 and data.shape[1] in (1, 3) and min(data.shape[2:]) >= 8


def judge_pictures(result: Result, data: Tensor) -> None:
    """Add PSNR and SSIM to a result with reconstructed pictures, clipped to the range of the originals."""
    if result.pictures is None or not is_picture(data):
        return
    found = result.pictures.to(data)
    low, high = float(data.min()), float(data.max())
    result.pictures = found = found.clamp(low, high)
    errors = (found - data).square().flatten(1).mean(1).clamp_min(1e-12)
    result.psnr = float((20 * math.log10(max(high - low, 1e-12)) - 10 * errors.log10()).mean())
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError:  # without torchmetrics the report has no SSIM
        return
    window = min(11, min(data.shape[2:]) - 1) // 2 * 2 + 1
    window = window if window <= min(data.shape[2:]) else window - 2
    value = structural_similarity_index_measure(
        found.float(), data.float(), data_range=max(high - low, 1e-12), kernel_size=window
    )
    assert isinstance(value, Tensor)
    result.ssim = float(value)
