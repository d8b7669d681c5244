"""Losses by which the gradient of a sample depends on the other samples, as far as they can be seen.

A mean of cross-entropy over those targets that are not ignored divides by their number in the batch; one with weights
of classes by the sum of these. A model that computes its loss shows it in autograd's graph. A loss that a program
computes of a model's outputs shows itself by its deltas: rows of ``s (softmax(outputs) - one hot)``, with one s for all
kept rows, which is one over their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_NODES = 64  # of a graph that are searched
_SAMPLES, _ROWS = 16, 8  # that are compared
_LEAST_DOUBT = 1e-2  # of a row's prediction, from which its scale is found

_REMEDY = (
    "take the mean over the targets of each sample first, and the mean of these over samples; or divide their sum by a "
    "number that does not depend on the batch, with loss_reduction='sum'"
)


def check_loss(loss: Tensor, samples: int) -> None:
    """Raise ValueError if a loss that a model has computed is seen to mix samples.

    Args:
        loss: the loss, with one element.
        samples: number of samples of the batch; 0 where it is not known.
    """
    for node in _nodes(loss.grad_fn):
        if not node.name().startswith("NllLoss") or node._saved_reduction != 1:
            continue
        if node._saved_weight is not None:
            raise ValueError(f"privacy: a mean of cross-entropy with weights of classes mixes samples: {_REMEDY}")
        target, ignored = node._saved_target, node._saved_ignore_index
        ignored -= 2**64 if ignored >= 2**63 else 0  # autograd shows it without its sign
        if samples > 1 and target.numel() % samples == 0:
            _refuse_unequal((target != ignored).view(samples, -1).sum(1))


def _nodes(first: Any) -> Iterator[Any]:
    """Yield the nodes of a graph that are nearest to its end."""
    found, seen = [first], {first}
    for node in found:
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and len(found) < _NODES:
                seen.add(following)
                found.append(following)


def _refuse_unequal(kept: Tensor) -> None:
    if len(kept.unique()) > 1:
        raise ValueError(
            f"privacy: the loss is a mean over targets that are not ignored, {int(kept.min())} to {int(kept.max())} in "
            f"a sample, so that the gradient of a sample depends on the others: {_REMEDY}"
        )


class OutputRows:
    """Some rows of a model's output, by which cross-entropy is found in its deltas.

    Args:
        output: the output.
        samples: number of samples of the batch.
    """

    def __init__(self, output: Tensor, samples: int) -> None:
        self._samples = samples
        self._dims = [-1] if output.dim() == 2 else [-1, 1]
        self._kept = [self._some(self._by_sample(output.detach(), dim)) for dim in self._dims]

    @staticmethod
    def fits(output: Tensor, samples: int) -> bool:
        """Return whether an output may hold predictions of several samples, precise enough to be compared."""
        precise = output.dtype in (torch.float32, torch.float64)
        return precise and samples > 1 and output.dim() >= 2 and output.shape[0] % samples == 0 and output.numel() > 0

    def _by_sample(self, values: Tensor, dim: int) -> Tensor:
        """Return values as (samples, rows, classes)."""
        moved = values.movedim(dim, -1)
        return moved.reshape(self._samples, -1, moved.shape[-1])

    def _some(self, values: Tensor) -> Tensor:
        step = -(-values.shape[0] // _SAMPLES), -(-values.shape[1] // _ROWS)
        return values[:: step[0], :: step[1]].clone()

    def check(self, deltas: Tensor, scale: float) -> bool:
        """Raise ValueError if the deltas are those of a mean over kept targets that mixes samples.

        Args:
            deltas: gradient of the loss at the output.
            scale: the loss scale that it contains.

        Returns:
            Whether it is known that they are not, so that further steps need not be checked.
        """
        known = False
        for dim, logits in zip(self._dims, self._kept, strict=True):
            rows = self._by_sample(deltas, dim)
            kept = (rows != 0).any(-1).sum(1)
            if len(kept.unique()) == 1:
                continue
            some = self._some(rows).flatten(0, 1).double()
            if (found := _scales(some, logits.flatten(0, 1).double())) is None:
                continue
            known = True
            if torch.allclose(found * int(kept.sum()) / scale, torch.ones_like(found), rtol=1e-3):
                _refuse_unequal(kept)
        return known


def _scales(deltas: Tensor, logits: Tensor) -> Tensor | None:
    """Return s of rows ``s (softmax(logits) - one hot)``; None if no row is precise enough, or rows are not such."""
    chances = logits.softmax(-1)
    target = deltas.argmin(-1, keepdim=True)
    doubt = 1 - chances.gather(-1, target)[:, 0]
    usable = (deltas != 0).any(-1) & (doubt > _LEAST_DOUBT)
    if not bool(usable.any()):
        return None
    deltas, chances, target = deltas[usable], chances[usable], target[usable]
    scales = -deltas.gather(-1, target)[:, 0] / doubt[usable]
    expected = scales[:, None] * chances.scatter_add(-1, target, -torch.ones_like(target, dtype=chances.dtype))
    return scales if torch.allclose(deltas, expected, rtol=1e-3, atol=1e-4 * float(scales.abs().max())) else None
