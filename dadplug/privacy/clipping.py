"""Clipping of the gradients of one backward pass: by sample, over the whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..errors import PrivacyError
from ..hooks import CapturedLayer, Factor
from ..logs import get_logger
from .differential_privacy import DifferentialPrivacy
from .sample_gradients import SampleGradients, bias_gradients

_log = get_logger(__name__)


class Batch:
    """What one backward pass has recorded: the calls of layers, and the number of samples.

    Args:
        scale: factor by which the loss was multiplied.

    Attributes:
        scale: this factor.
        samples: number of samples; None where it is not known.
        forwards: numbers of the forward passes that backward has run through.
        factors: captured layers and the factors of their calls.
        formed: parameters and gradients of shape (rows, …) that have been formed.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.samples: int | None = None
        self.forwards: set[int] = set()
        self.factors: list[tuple[CapturedLayer, Factor]] = []
        self.formed: list[tuple[nn.Parameter, Tensor]] = []


def sample_gradients(batch: Batch) -> dict[int, SampleGradients]:
    """Return the gradients of one backward pass for each sample, by the identity of the parameter.

    Args:
        batch: what the backward pass has recorded.

    Raises:
        PrivacyError: if rows of a layer cannot be divided among the samples.
    """
    samples = _number_of_samples(batch)
    gradients: dict[int, SampleGradients] = {}

    def of(parameter: nn.Parameter) -> SampleGradients:
        return gradients.setdefault(id(parameter), SampleGradients(samples))

    for layer, factor in batch.factors:
        table = bool(factor.form.table_rows)
        _check_rows(layer.name, _output_rows(factor), samples)
        factor = (_of_samples(factor, samples) if table else factor).to(_type(layer.weight))
        of(layer.weight).add(factor)
        if layer.bias is not None and not table:
            of(layer.bias).add_formed(bias_gradients(factor, samples))
    for parameter, formed in batch.formed:
        _check_rows("of normalisation", len(formed), samples)
        if len(formed) != samples:
            formed = formed.unflatten(0, (samples, -1)).sum(1)
        of(parameter).add_formed(formed.to(_type(parameter)))
    return gradients


def _output_rows(factor: Factor) -> int:
    """Return the first dimension of a layer's output."""
    if not factor.form.table_rows:
        return factor.rows
    return int(factor.activations[0, 2]) if factor.rows else 0


def _of_samples(factor: Factor, samples: int) -> Factor:
    """Return a table's lookups with the indices of their samples, in place of those of rows of the output."""
    numbers, places, rows = factor.activations.long().unbind(1)
    places = torch.div(places * samples, rows, rounding_mode="floor") if samples else places
    return Factor(torch.stack([numbers, places], 1), factor.deltas, factor.form)


def _number_of_samples(batch: Batch) -> int:
    if batch.samples is not None:
        return batch.samples
    raise PrivacyError(
        "cannot tell how many samples a batch has, since the loss does not come from a call of the model. Say it by "
        "`with reduction.samples(n):` around forward"
    )


def _check_rows(layer: str, rows: int, samples: int) -> None:
    if not rows or (samples and rows % samples == 0):
        return
    raise PrivacyError(
        f"layer {layer!r} has {rows} rows for {samples} samples: they cannot be divided among the samples, which must "
        "be the first dimension of the layer's input"
    )


def _type(parameter: Tensor) -> torch.dtype:
    return parameter.dtype if parameter.dtype == torch.float64 else torch.float32


@torch.no_grad()
def clipped_sums(
    batch: Batch, parameters: Mapping[str, nn.Parameter], privacy: DifferentialPrivacy
) -> dict[str, Tensor]:
    """Clip the gradients of each sample to a norm over all parameters, and add them up.

    A sample whose gradient is not finite counts as zero: otherwise it would show in the step.

    Args:
        batch: what the backward pass has recorded.
        parameters: the parameters by name.
        privacy: the setting.

    Returns:
        The sums by name, in the parameters' shapes; only of parameters that have gradients.
    """
    gradients = sample_gradients(batch)
    if not gradients or not batch.samples:
        return {}
    factor = (batch.samples if privacy.loss_reduction == "mean" else 1) / batch.scale
    norms = torch.stack([each.squared_norms().double() for each in gradients.values()]).sum(0).clamp(min=0).sqrt()
    norms = norms * factor
    weights = factor * (privacy.max_grad_norm / norms.clamp(min=privacy.max_grad_norm))
    finite = norms.isfinite()
    if not bool(finite.all()):
        _log.warning(
            "%d of %d samples have gradients with NaN or Inf, and count as zero", int((~finite).sum()), len(finite)
        )
        weights = torch.where(finite, weights, 0.0)
        for each in gradients.values():
            each.clear(~finite)
    return {
        name: gradients[id(each)].weighted_sum(weights, each.shape).to(each.dtype)
        for name, each in parameters.items()
        if id(each) in gradients
    }
