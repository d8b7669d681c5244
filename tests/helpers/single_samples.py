"""Gradients of single samples in float64, and clipped sums of them, against which private gradients are held."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dadplug
from dadplug import DifferentialPrivacy

Gradients = dict[str, Tensor]


def by_backward(model: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Tensor]) -> Gradients:
    """Return the gradients of all samples by name, of shape (samples, …), by one backward pass a sample."""
    model = copy.deepcopy(model)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    found: dict[str, list[Tensor]] = {name: [] for name in trained}
    for number in range(len(batch[0])):
        model.zero_grad()
        loss(model, *(each[number : number + 1] for each in batch)).backward()
        for name, each in trained.items():
            found[name].append(torch.zeros_like(each) if each.grad is None else each.grad.to_dense().clone())
    return {name: torch.stack(each) for name, each in found.items()}


def clipped(gradients: Gradients, norm: float) -> tuple[Gradients, Tensor]:
    """Return the sums of the samples' gradients, each clipped over all parameters, and the samples' norms."""
    norms = sum(each.flatten(1).square().sum(1) for each in gradients.values()).sqrt()
    scales = (norm / norms).clamp(max=1.0)
    return {name: torch.einsum("i,i...->...", scales, each) for name, each in gradients.items()}, norms


def sum_of_sites(
    model: nn.Module, loss: Callable[..., Tensor], batches: Sequence[Sequence[Tensor]], norm: float
) -> Gradients:
    """Return the clipped sums over the batches of all sites."""
    parts = [clipped(by_backward(model, loss, batch), norm)[0] for batch in batches]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def off(model: nn.Module, wanted: Gradients, divisor: float) -> float:
    """Return the largest error of the gradients, relative to the largest element of each."""
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name in wanted:
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * divisor
            worst = max(worst, float((found - wanted[name]).abs().max()) / max(float(wanted[name].abs().max()), 1e-8))
    return worst


def reduce(model: nn.Module, norm: float = 1.0, **settings: Any) -> dadplug.GradientReduction:
    """Return a reduction that clips, and adds no noise."""
    return dadplug.GradientReduction(model, "dsgd", privacy=DifferentialPrivacy(0.0, norm, 0.1, 4, **settings))


def check_clipped_sums(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Sequence[Tensor],
    gradients: Gradients,
    loss_reduction: str = "mean",
    parts: int = 1,
) -> dadplug.GradientReduction:
    """Compare the gradients of a step, in which some samples are clipped and some are not.

    Args:
        model: the model.
        loss: its mean loss over the samples of a batch.
        batch: inputs and targets.
        gradients: those of the single samples.
        loss_reduction: how the loss of the step is reduced.
        parts: number of micro-batches.

    Returns:
        The reduction.
    """
    norm = float(clipped(gradients, 1.0)[1].sort().values[len(batch[0]) // 2])
    wanted, _ = clipped(gradients, norm)
    reduction = reduce(model, norm, loss_reduction=loss_reduction)
    *held, last = zip(*(each.tensor_split(parts) for each in batch), strict=True)
    with reduction.no_sync():
        for part in held:
            loss(model, *part).backward()
    (loss(model, *last) * (1 if loss_reduction == "mean" else len(last[0]))).backward()
    reduction.synchronize()
    assert off(model, wanted, 4) < 1e-6
    assert max(float(each.abs().max()) for each in wanted.values()) > 0
    return reduction
