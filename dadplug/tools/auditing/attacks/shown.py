"""Attacks on what messages show beside the data: row numbers of tables, labels, and who took part.

Row numbers: an embedding's message shows which rows a batch has looked up.

Labels: with cross-entropy the bias of the last layer has the mean of p - y as gradient (iDLG, arXiv:2001.02610). A
delta of a sample is ``softmax - one-hot``: its only negative entry is the label. Where sums are seen, the number of
samples of a class is estimated as ``b (1/C - g_c)``, with g the gradient of the bias, which is exact for a model whose
mean prediction is uniform; without a bias, as the share of what is negative in the sum over the weight's rows.

Membership: whether a known sample was in the batch, by the alignment of its own gradient with what is seen. A second
step is captured with half of the batch. The score of a sample is ``<g_i, G> / ||g_i||``, with g_i its own gradient of a
layer, from its factors: ``<d a^T, G> = d^T G a``. The AUC compares the samples of the half that took part with those of
the other half. 0.5 is chance.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import LayerView, Observation
from .base import Attack, Budget, Result, register_attack


@register_attack("words")
class Words(Attack):
    """Set of the row numbers of a batch, without order: those sent, or the rows of a gradient that are not zero."""

    def applies(self, seen: Observation, view: LayerView) -> str:
        if not view.is_table or view.truth is None:
            return "no table"
        same = len(view.truth) > 1 and bool((view.truth == view.truth[:1]).all())
        return "it looks up the same rows for all samples" if same else ""

    def run(self, seen: Observation, view: LayerView, budget: Budget) -> Result:
        assert view.truth is not None
        table = len(view.weight)
        found, ignored = numbers_of(view), getattr(view.module, "padding_idx", None)
        samples = view.truth.reshape(len(view.truth), -1)
        scores = []
        everything = torch.unique(samples)
        precision = float(torch.isin(found, everything).float().mean()) if len(found) else 0.0
        for sample in samples:
            own = torch.unique(sample if ignored is None else sample[sample != ignored])
            scores.append(float(torch.isin(own, found).float().mean()) if len(own) else 0.0)
        values = torch.tensor(scores) * precision
        chance = len(everything) / table
        note = f"{len(found)} of {table} rows of the table" if len(found) else "no rows can be told from others"
        return Result(
            self.name, view.name, "words", float(values.mean()), "share of row numbers", chance, values, note=note
        )


def numbers_of(view: LayerView) -> Tensor:
    """Return the row numbers that a table's message shows; none if all rows have a gradient."""
    if view.inputs is not None:
        sent: Tensor = torch.unique(view.inputs[:, 0].long())
        return sent
    assert view.formed is not None
    gradient = view.formed
    if gradient.is_sparse:
        touched: Tensor = torch.unique(gradient.coalesce().indices()[0])
        return touched
    norms = gradient.flatten(1).norm(dim=1)
    found = torch.nonzero(norms > 1e-6 * norms.max().clamp_min(1e-30)).flatten()
    return found[:0] if len(found) > len(norms) // 2 else found


@register_attack("labels")
class Labels(Attack):
    """Labels of a classification from the last linear layer."""

    source = "iDLG, arXiv:2001.02610"

    def applies(self, seen: Observation, view: LayerView) -> str:
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

    def run(self, seen: Observation, view: LayerView, budget: Budget) -> Result:
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


_LAYERS = 3


@register_attack("membership")
class Membership(Attack):
    """Samples of the batch among others, by gradient alignment."""

    source = "gradient alignment, as in arXiv:2305.17760"
    whole = True

    def applies(self, seen: Observation, view: None) -> str:
        if seen.again is None or len(seen.batch) < 4:
            return "fewer than 4 samples"
        return "" if _chosen(seen) else "no linear layer"

    def run(self, seen: Observation, view: None, budget: Budget) -> Result:
        other = seen.half
        assert other is not None
        half = len(other.batch)
        views = _chosen(other)
        pairs = _own_gradients(seen, [each.layer for each in views])
        scores = torch.zeros(len(seen.batch), dtype=torch.float64)
        for each in views:
            if each.layer not in pairs:
                continue
            gradient = each.gradient().double()
            inputs, deltas = pairs[each.layer]
            aligned = ((deltas @ gradient) * inputs).sum((1, 2))
            squared = ((deltas @ deltas.transpose(1, 2)) * (inputs @ inputs.transpose(1, 2))).sum((1, 2))
            scores += (aligned / squared.clamp_min(1e-60).sqrt() / gradient.norm().clamp_min(1e-30)).cpu()
        value = auc(scores[:half], scores[half:])
        return Result(
            self.name, "", "membership", value, "AUC", 0.5, note=f"of {half} members among {len(scores)} samples"
        )


def auc(members: Tensor, others: Tensor) -> float:
    """Return the probability that a member scores higher than another sample; ties count half."""
    above = (members[:, None] > others[None]).double() + 0.5 * (members[:, None] == others[None]).double()
    return float(above.mean())


def _chosen(seen: Observation) -> list[LayerView]:
    linear = [each for each in seen.layers if each.is_linear and each.truth is not None and each.module is not None]
    places = sorted({0, len(linear) // 2, len(linear) - 1}) if linear else []
    return [linear[place] for place in places][:_LAYERS]


def _own_gradients(seen: Observation, layers: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return inputs and deltas of layers, of shapes (samples, rows, in) and (samples, rows, out), by name."""
    model = copy.deepcopy(seen.batch.model)
    count = len(seen.batch)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def recorder(name: str) -> Any:
        def record(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            inputs[name] = args[0].detach()
            outputs[name] = output
            output.retain_grad()

        return record

    for name in layers:
        model.get_submodule(name).register_forward_hook(recorder(name))
    seen.batch.loss(model).backward()
    found = {}
    for name, output in outputs.items():
        own, deltas = inputs[name], output.grad
        if deltas is not None and len(own) == count:
            rows = own.numel() // own.shape[-1] // count
            found[name] = own.reshape(count, rows, -1).double(), deltas.reshape(count, rows, -1).double()
    return found
