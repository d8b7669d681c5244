"""Labels from the last layer, whose bias has the mean of p - y as gradient with cross-entropy (iDLG, arXiv:2001.02610).

A delta of a sample is ``softmax - one-hot``: its only negative entry is the label. Where sums are seen, the number of
samples of a class is estimated as ``b (1/C - g_c)``, with g the gradient of the bias, which is exact for a model whose
mean prediction is uniform; without a bias, as the share of what is negative in the sum over the weight's rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..capture import LayerView, Observation
from .base import Attack, Budget, Result, register_attack


@register_attack("labels")
class Labels(Attack):
    """Labels of a classification from the last linear layer."""

    source = "iDLG, arXiv:2001.02610"

    def applies(self, seen: Observation, view: LayerView | None) -> str:
        assert view is not None
        targets = seen.batch.targets
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.shape != (len(seen.batch),):
            return "targets are not one class a sample"
        linear = [each for each in seen.layers if each.is_linear]
        if not linear or view is not linear[-1]:
            return "not the last linear layer"
        if view.rows != len(seen.batch):
            return "the last linear layer has several rows a sample"
        classes = view.gradient().shape[0]
        return (
            "" if classes > 1 and int(targets.max()) < classes else "the last linear layer has no output for each class"
        )

    def run(self, seen: Observation, view: LayerView | None, budget: Budget) -> Result:
        assert view is not None
        targets: Tensor = seen.batch.targets
        count, classes = len(targets), view.gradient().shape[0]
        own = torch.bincount(targets, minlength=classes)
        even = _whole(torch.full((classes,), count / classes), count)
        chance = float(torch.minimum(own, even).sum()) / count
        if view.sends_rows and view.deltas is not None and len(view.deltas) == count:
            scores = (view.deltas.argmin(1) == targets).float()
            return Result(self.name, view.name, "labels", float(scores.mean()), "label accuracy", chance, scores)
        if view.bias is not None:
            estimate = count * (1 / classes - view.bias.double())
        else:
            sums = (-view.gradient().double().sum(1)).clamp_min(0)
            estimate = count * sums / sums.sum().clamp_min(1e-30)
        found = _whole(estimate.clamp_min(0), count)
        similarity = float(torch.minimum(own, found).sum()) / count
        return Result(
            self.name,
            view.name,
            "labels",
            similarity,
            "label accuracy",
            chance,
            note="how many of each class, not whose",
        )


def _whole(estimate: Tensor, count: int) -> Tensor:
    """Round numbers to whole ones with a given sum, those with the largest rest up."""
    scaled = estimate * (count / estimate.sum().clamp_min(1e-30))
    whole = scaled.floor()
    missing = count - int(whole.sum())
    if missing > 0:
        whole[(scaled - whole).topk(min(missing, len(whole))).indices] += 1
    return whole.long()
