"""Membership: whether a known sample was in the batch, by the alignment of its own gradient with what is seen.

A second step is captured with half of the batch. The score of a sample is ``<g_i, G> / ||g_i||``, with g_i its own
gradient of a layer, from its factors: ``<d a^T, G> = d^T G a``. The AUC compares the samples of the half that took part
with those of the other half. 0.5 is chance.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import LayerView, Observation
from .base import Attack, Budget, Result, register_attack

_LAYERS = 3


@register_attack("membership")
class Membership(Attack):
    """Samples of the batch among others, by gradient alignment."""

    source = "gradient alignment, as in arXiv:2305.17760"
    whole = True

    def applies(self, seen: Observation, view: LayerView | None) -> str:
        if seen.again is None or len(seen.batch) < 4:
            return "fewer than 4 samples"
        return "" if _chosen(seen) else "no linear layer"

    def run(self, seen: Observation, view: LayerView | None, budget: Budget) -> Result:
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
