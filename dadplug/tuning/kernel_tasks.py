"""Tasks of the kernels: what compresses and decodes gradients of some layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..exchange.factor_buckets import FactorPayload
from ..fused import GradientProduct
from ..fused.updates import apply_products
from ..lowrank import sum_of_products, sum_one_by_one, top_k
from ..schedules import Decoding, Encoding, current, replaced
from .task import Config, Space, Task

_SITES = 2
_CACHE = 1 << 18  # numbers that stay in the cache of a core, about
_CALL = 2e-6  # seconds of a call of torch, about
_MULTIPLY = 2.5e-11  # seconds of a multiplication and addition, about
_MOVE = 4e-10  # seconds of a number that is moved from or to memory, about
_HALF_OCTAVES = tuple(round(2 ** (each / 2)) for each in range(20, 45))  # 2^10 to 2^22


class Layer(NamedTuple):
    """A fully connected layer, or another one whose gradient is a matrix.

    Attributes:
        out: rows of the gradient.
        width: its columns.
        rows: rows of a site's factors in a step.
    """

    out: int
    width: int
    rows: int


MNIST_NET = [Layer(2048, 784, 16), Layer(1024, 2048, 16), Layer(512, 1024, 16), Layer(256, 512, 16)]
"""Layers of MNISTNet with a batch of 16, for a start without a model."""


@functools.cache
def random_rows(count: int, width: int, seed: int) -> Tensor:
    """Return random rows, of shape (count, width), the same ones at each call."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def _payloads(layer: Layer, rows: int) -> list[FactorPayload]:
    return [
        FactorPayload(random_rows(rows, layer.out, 2 * site), random_rows(rows, layer.width, 2 * site + 1))
        for site in range(_SITES)
    ]


class ProductTask(Task):
    """Decoding of low-rank factors: up to how many rows the own product is taken, and its strips.

    Args:
        layers: the layers.
        default: constants to start from.
        counts: rows of all sites' factors.
    """

    def __init__(self, layers: Sequence[Layer], default: Decoding, counts: Sequence[int] = (8, 16, 24, 32)) -> None:
        values = {
            "few": (0, 4, 8, 12, 16, 20, 24, 28, 32, 48),
            "strip": (128, 256, 512, 1024, 2048, 1 << 20),
        }
        super().__init__("sum of low-rank factors", Space(values), (default.few, default.strip))
        self._layers, self._counts = layers, counts

    def prepare(self, config: Config) -> Callable[[], object]:
        constants = replace(Decoding(), **self.space.named(config))
        work = []
        for layer in self._layers:
            for count in self._counts:
                each = _payloads(layer, max(1, count // _SITES))
                work.append(([one.left for one in each], [one.right for one in each]))

        def run() -> None:
            for lefts, rights in work:
                sum_of_products(lefts, rights, [0.5] * _SITES, constants)

        return run

    def prior(self, config: Config) -> float:
        few, strip = config
        seconds = 0.0
        for out, width, _ in self._layers:
            for count in self._counts:
                own = count <= few
                strips = -(-width // strip) if own else 1
                # The own product writes once, and is slower to multiply; each strip reads the left block again.
                seconds += count * out * width * _MULTIPLY * (1.5 if own else 1.0) + out * width * _MOVE * (
                    1 if own else 2
                )
                seconds += strips * (_CALL + count * out * _MOVE) + _CALL
        return seconds


class BlockTask(Task):
    """Decoding of whole factors (dad): sizes of the blocks in which products are added up.

    Args:
        layers: the layers.
        default: constants to start from.
    """

    def __init__(self, layers: Sequence[Layer], default: Decoding) -> None:
        space = Space({"block": _HALF_OCTAVES, "align": (4, 8, 16, 32, 64)})
        super().__init__("sum of whole factors", space, (default.block, default.align))
        self._layers = layers

    def prepare(self, config: Config) -> Callable[[], object]:
        constants = replace(Decoding(), **self.space.named(config))
        work = [_payloads(layer, layer.rows) for layer in self._layers]

        def run() -> None:
            for each in work:
                sum_one_by_one([one.left for one in each], [one.right for one in each], constants)

        return run

    def prior(self, config: Config) -> float:
        block, align = config
        return sum(
            _blocked(
                layer.out, layer.width, layer.rows * _SITES, max(align, block // layer.width // align * align), _SITES
            )
            for layer in self._layers
        )


class TileTask(Task):
    """Fused optimizer step: own products or BLAS, and numbers of a gradient that BLAS forms at a time.

    Args:
        layers: the layers.
        default: constants to start from.
        rank: rows of a site's factors; those of the layers if None.
    """

    def __init__(self, layers: Sequence[Layer], default: Decoding, rank: int | None = 8) -> None:
        values = {"tile": _HALF_OCTAVES, "narrow": (0, Decoding().narrow)}
        super().__init__("fused optimizer step", Space(values), (default.tile, default.narrow))
        self._layers, self._rank = layers, rank

    def prepare(self, config: Config) -> Callable[[], object]:
        constants = replace(Decoding(), **self.space.named(config))
        weights = [nn.Parameter(torch.zeros(layer.out, layer.width)) for layer in self._layers]
        payloads = [_payloads(layer, self._rank or layer.rows) for layer in self._layers]
        optimizer = torch.optim.SGD(weights, lr=0.0, momentum=0.9)

        def run() -> None:
            products = {
                weight: GradientProduct(each, [0.5] * _SITES, constants=constants)
                for weight, each in zip(weights, payloads, strict=True)
            }
            apply_products(optimizer, products)

        return run

    def prior(self, config: Config) -> float:
        rows = _SITES * (self._rank or max(layer.rows for layer in self._layers))
        return sum(_blocked(out, width, rows, max(1, config[0] // width), 3) for out, width, _ in self._layers)


class TopKTask(Task):
    """Search for the largest numbers of a gradient (topk): bits of the first of its two histograms.

    Args:
        sizes: numbers of the gradients.
        default: constants to start from.
    """

    def __init__(self, sizes: Sequence[int], default: Encoding) -> None:
        super().__init__("largest numbers of a gradient", Space({"coarse": tuple(range(8, 23))}), (default.coarse,))
        self._sizes = sizes

    def prepare(self, config: Config) -> Callable[[], object]:
        record = replace(current(), encoding=replace(Encoding(), **self.space.named(config)))
        work = [random_rows(1, size, 0)[0] for size in self._sizes]

        def run() -> None:
            with replaced(record):
                for values in work:
                    top_k(values, len(values) // 100)

        return run

    def prior(self, config: Config) -> float:
        bins: int = (1 << config[0]) + (1 << (31 - config[0]))
        return sum(3 * size * _MOVE + 2 * bins * _MOVE for size in self._sizes)


def _blocked(out: int, width: int, rows: int, height: int, passes: int) -> float:
    """Predict the seconds of a product of which each block is passed over several times.

    Args:
        out: rows of the product.
        width: its columns.
        rows: rows of the factors.
        height: rows of a block.
        passes: passes over a block.
    """
    height = min(height, out)
    blocks, numbers = -(-out // height), out * width
    fits = height * width <= _CACHE
    moves = numbers * (1 if fits else passes) + blocks * rows * width * (0.25 if rows * width <= _CACHE else 1.0)
    return rows * numbers * _MULTIPLY + moves * _MOVE + passes * blocks * _CALL


def layers_of(model: nn.Module, rows: int) -> list[Layer]:
    """Return the layers of a model whose gradients are matrices, each shape once.

    Args:
        model: the model.
        rows: rows of a site's factors in a step: its samples, or times positions.
    """
    found: dict[Layer, Any] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Linear, _ConvNd)) and isinstance(weight, Tensor):
            found.setdefault(Layer(len(weight), weight[0].numel(), rows))
    return [layer for layer in found if min(layer.out, layer.width) >= 16]


def tasks_for(layers: Sequence[Layer], decoding: Decoding, encoding: Encoding) -> list[Task]:
    """Return the tasks of the kernels.

    Args:
        layers: the layers.
        decoding: constants to start from.
        encoding: constants to start from.
    """
    sizes = [layer.out * layer.width for layer in layers]
    return [
        ProductTask(layers, decoding),
        BlockTask(layers, decoding),
        TileTask(layers, decoding),
        TopKTask(sizes, encoding),
    ]
