"""Base of the attacks: what an attack is given, what it returns, how that is judged, and the registry of all attacks.

Reconstructions are judged by correlation, PSNR and SSIM. Rows are centred by the mean of the batch before they are
compared, since a picture of a digit is similar to any mean of digits: a correlation of 1 means that what distinguishes
the sample from the rest of its batch has been recovered.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ....exchange.handshake import Deadline
from ....support.registry import Registry
from ..capture import Batch, LayerView, Observation, call

RECOVERED = 0.95
"""Similarity from which a sample counts as recovered."""


@dataclass(eq=False)
class Result:
    """Result of an attack.

    Attributes:
        attack: name of the attack.
        layer: name of the weight that it used; empty for all of them.
        target: what it recovers: ``"data"``, ``"activations"``, ``"labels"`` or ``"membership"``.
        similarity: mean over samples, by `measure`.
        measure: ``"correlation"``, ``"token accuracy"``, ``"label accuracy"`` or ``"AUC"``.
        chance: the similarity without any observation.
        scores: similarity of each sample, of shape (samples,); empty where there is none by sample.
        pictures: reconstructions in the shape of the data; None without.
        psnr: peak signal-to-noise ratio in dB, mean over samples; None unless the data are pictures.
        ssim: structural similarity, mean over samples; None unless the data are pictures.
        note: what a reader has to know; empty for nothing.
        seconds: duration.
    """

    attack: str
    layer: str
    target: str
    similarity: float
    measure: str
    chance: float
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    pictures: Tensor | None = None
    psnr: float | None = None
    ssim: float | None = None
    note: str = ""
    seconds: float = 0.0

    @property
    def recovered(self) -> float:
        """Share of the samples that are recovered, from 0 to 1; of labels and members, the gain over chance."""
        if self.target in ("data", "activations"):
            return float((self.scores >= RECOVERED).float().mean()) if len(self.scores) else 0.0
        return max(0.0, (self.similarity - self.chance) / (1 - self.chance)) if self.chance < 1 else 0.0


class Budget(Deadline):
    """Time that attacks may take.

    Args:
        seconds: time limit.
    """

    def part(self, share: float) -> Budget:
        """Return a budget of a share of the time that is left."""
        return Budget(self.left * share)

    def rounds(self) -> Iterator[int]:
        """Count until the time is over, once at least."""
        number = 0
        while number == 0 or self.left > 0:
            yield number
            number += 1


class Attack(ABC):
    """An attack on one layer's message, or on the messages of a step together.

    A new one is a subclass in a file of its own with `register_attack`, imported in this folder's `__init__.py`.
    """

    name: ClassVar[str]
    """Name in reports; `register_attack` sets it."""
    source: ClassVar[str] = ""
    """Publication."""
    whole: ClassVar[bool] = False
    """Whether it uses the messages of all layers together; `applies` and `run` get no layer then."""
    share: ClassVar[float] = 0.1
    """Share of the time left that one run may take."""
    slow: ClassVar[bool] = False
    """Whether it is left out where remedies are tried, since it takes long, and `span` recovers as much or more."""

    @abstractmethod
    def applies(self, seen: Observation, view: Any) -> str:
        """Return why the attack does not apply; empty where it does.

        Args:
            seen: what the observer has seen.
            view: the layer; None for attacks on all layers together.
        """

    @abstractmethod
    def run(self, seen: Observation, view: Any, budget: Budget) -> Result:
        """Attack, and judge the reconstruction.

        Args:
            seen: what the observer has seen.
            view: the layer; None for attacks on all layers together.
            budget: time limit.
        """


ATTACKS: Registry[str, Attack] = Registry("attack")
"""Attacks by name, in the order in which they run."""


def register_attack(name: str) -> Callable[[type[Attack]], type[Attack]]:
    """Register an attack under a name; a class decorator."""

    def decorate(attack: type[Attack]) -> type[Attack]:
        attack.name = name
        ATTACKS.register(name)(attack())
        return attack

    return decorate


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


def is_grid(data: Tensor) -> bool:
    """Return whether a tensor has the shape of pictures or of volumes, in three dimensions."""
    return is_picture(data[..., 0] if data.dim() == 5 else data)


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
