"""Tasks of the tuner: kernels that compress and decode gradients, the cost model of compression, a served model."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ...exchange.factor_buckets import FactorPayload
from ...lowrank import sum_of_products, sum_one_by_one, top_k
from ...lowrank.algorithms import ALGORITHMS, Operator, Search, choose, predict, terms
from ...serving import loading
from ...serving.backends import runner_of
from ...step.fused.products import GradientProduct
from ...step.fused.steps import apply_products
from ...support.schedules import Decoding, Encoding, Serving, current, replaced
from .search import Config, Space, Task, Vector

RATES = ("fat", "skinny", "eigen")
STARTS = ("start_gram", "start_iteration", "start_formed")
_NAMES = ("gram", "iteration", "formed")
_ITERATIONS = 1
_FASTEST = 1e9  # a microsecond, and microseconds: the ends of the valid ranges
_LONGEST = 1e6
_BATCHES = (1, 8, 32)
_COSTS = {"eager": 1.0, "compiled": 0.8, "onnxruntime": 0.7}  # about, of small convolutional networks

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


@cache
def random_rows(count: int, width: int, seed: int) -> Tensor:
    """Return random rows, of shape (count, width), the same ones at each call."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def _factors(layer: Layer, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the left and the right factors of the sites."""
    lefts = [random_rows(rows, layer.out, 2 * site) for site in range(_SITES)]
    return lefts, [random_rows(rows, layer.width, 2 * site + 1) for site in range(_SITES)]


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

    def calls(self, config: Config) -> list[Callable[[], object]]:
        constants = replace(Decoding(), **self.space.named(config))
        work = [_factors(layer, max(1, count // _SITES)) for layer in self._layers for count in self._counts]
        return [partial(sum_of_products, lefts, rights, [0.5] * _SITES, constants) for lefts, rights in work]

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

    def calls(self, config: Config) -> list[Callable[[], object]]:
        constants = replace(Decoding(), **self.space.named(config))
        return [partial(sum_one_by_one, *_factors(layer, layer.rows), constants) for layer in self._layers]

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

    def calls(self, config: Config) -> list[Callable[[], object]]:
        constants = replace(Decoding(), **self.space.named(config))
        weights = [nn.Parameter(torch.zeros(layer.out, layer.width)) for layer in self._layers]
        payloads = [
            [FactorPayload(*pair) for pair in zip(*_factors(layer, self._rank or layer.rows), strict=True)]
            for layer in self._layers
        ]
        optimizer = torch.optim.SGD(weights, lr=0.0, momentum=0.9)

        def run() -> None:
            products = {
                weight: GradientProduct(each, [0.5] * _SITES, constants=constants)
                for weight, each in zip(weights, payloads, strict=True)
            }
            apply_products(optimizer, products)

        return [run]

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

    def calls(self, config: Config) -> list[Callable[[], object]]:
        record = replace(current(), encoding=replace(Encoding(), **self.space.named(config)))

        def run(values: Tensor) -> None:
            with replaced(record):
                top_k(values, len(values) // 100)

        return [partial(run, random_rows(1, size, 0)[0]) for size in self._sizes]

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


class Case(NamedTuple):
    """A compression.

    Attributes:
        rows: rows of the factors.
        out: width of the deltas.
        width: width of the activations.
        k: rank.
    """

    rows: int
    out: int
    width: int
    k: int


def cases_for(layers: Sequence[Layer]) -> list[Case]:
    """Return compressions of some layers, with their own rows and with a few and many."""
    found: dict[Case, None] = {}
    for layer in layers:
        for rows in (layer.rows, 16, 64, 256):
            for k in (4, 8):
                if k < min(rows, layer.out, layer.width):
                    found[Case(rows, layer.out, layer.width, k)] = None
    return list(found)


class AlgorithmTask(Task):
    """Algorithms of compression: each case with each algorithm is a configuration, whose seconds are wanted.

    Args:
        cases: the compressions.
        default: constants of the cost model, whose prediction is the prior.
    """

    def __init__(self, cases: Sequence[Case], default: Encoding) -> None:
        self.cases = list(cases)
        space = Space({"case": range(len(self.cases)), "algorithm": _NAMES})
        super().__init__("algorithms of compression", space, (0, _NAMES[0]))
        self.constants = default

    def calls(self, config: Config) -> list[Callable[[], object]]:
        case, algorithm = self.cases[config[0]], config[1]
        deltas, activations = random_rows(case.rows, case.out, 0), random_rows(case.rows, case.width, 1)
        # A warm start, as in training.
        start = torch.mm(random_rows(case.k, case.rows, 2), activations)
        search = Search(_ITERATIONS, 0.0, None, start, 0)
        return [lambda: ALGORITHMS[algorithm](Operator(deltas, activations), case.k, search)]

    def prior(self, config: Config) -> float:
        return 1e-6 * predict(*self.cases[config[0]], _ITERATIONS, self.constants)[config[1]]

    def choice(self, case: int, constants: Encoding) -> Config:
        """Return the configuration that the cost model chooses for a case."""
        return case, choose(*self.cases[case], _ITERATIONS, constants)


class ChoiceTask(Task):
    """Compression of all cases by the algorithms that the cost model chooses.

    Args:
        algorithms: the task of the algorithms.
        old: the constants today.
        new: the fitted constants.
    """

    def __init__(self, algorithms: AlgorithmTask, old: Encoding, new: Encoding) -> None:
        super().__init__("choice of the algorithm", Space({"rates": ("default", "fitted")}), ("default",))
        self._algorithms, self._constants = algorithms, {"default": old, "fitted": new}

    def chosen(self, config: Config) -> list[Config]:
        """Return case and algorithm for each case."""
        cases = range(len(self._algorithms.cases))
        return [self._algorithms.choice(case, self._constants[config[0]]) for case in cases]

    def calls(self, config: Config) -> list[Callable[[], object]]:
        return [call for each in self.chosen(config) for call in self._algorithms.calls(each)]


def fit_rates(task: AlgorithmTask, seconds: Mapping[Config, float]) -> Encoding:
    """Fit the rates of the cost model: least squares of relative errors, without negative times.

    Args:
        task: the task.
        seconds: measured seconds by configuration.
    """
    names = (*RATES, *STARTS)
    rows = []
    for (number, algorithm), took in seconds.items():
        work = dict(terms(*task.cases[number], _ITERATIONS)[algorithm])
        row = [work.get(name, 0.0) for name in RATES] + [float(name == f"start_{algorithm}") for name in STARTS]
        rows.append([each / (1e6 * took) for each in row])
    matrix = np.array(rows)
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    solution = _nonnegative(matrix / scale, np.ones(len(rows))) / scale
    found = dict(zip(names, map(float, solution), strict=True))
    old = task.constants.values()
    rates = {name: min(_FASTEST, max(1.0, 1.0 / found[name])) if found[name] > 0 else old[name] for name in RATES}
    return Encoding(**{**old, **rates, **{name: min(_LONGEST, found[name]) for name in STARTS}})


def _nonnegative(matrix: Vector, target: Vector) -> Vector:
    """Solve a least-squares problem for numbers that are not negative: those that would be are zero."""
    found = np.zeros(matrix.shape[1])
    active = np.flatnonzero(np.abs(matrix).sum(0) > 0)
    while len(active):
        solution = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        if solution.min() >= 0:
            found[active] = solution
            break
        active = np.delete(active, solution.argmin())
    return found


def prediction_error(task: AlgorithmTask, seconds: Mapping[Config, float], constants: Encoding) -> float:
    """Return the median of the relative errors of predicted times.

    Args:
        task: the task.
        seconds: measured seconds by configuration.
        constants: the constants with which times are predicted.
    """
    return statistics.median(
        abs(1e-6 * predict(*task.cases[number], _ITERATIONS, constants)[algorithm] / took - 1)
        for (number, algorithm), took in seconds.items()
    )


class ServingTask(Task):
    """Ways in which a model can compute batches of 1, 8 and 32 samples.

    Args:
        model: the model.
        shape: shape of one input.
        enough: whether the time for preparing ways is over.

    Attributes:
        notes: ways that do not work, or were not tried, and why.
    """

    def __init__(self, model: nn.Module, shape: Sequence[int], enough: Callable[[], bool]) -> None:
        self._model = copy.deepcopy(model).eval()
        self.shape = ",".join(map(str, shape))
        largest = loading.example_of(model, tuple(shape), max(_BATCHES))
        self._batches = [np.ascontiguousarray(largest[:size]) for size in _BATCHES]
        self._runs: dict[str, loading.Run] = {}
        self._ways: dict[str, Serving] = {}
        self.notes: list[str] = []
        for way in self._candidates():
            if enough() and self._runs:
                self.notes.append(f"{label(way)}: not tried, for want of time")
            else:
                self._try(way)
        if "eager" not in self._runs:
            raise ValueError(f"the model cannot compute inputs of shape {tuple(shape)}: {self.notes[0]}")
        super().__init__("served model", Space({"way": tuple(self._runs)}), ("eager",))

    def way(self, config: Config) -> Serving:
        """Return the way that a configuration stands for."""
        return self._ways[config[0]]

    def calls(self, config: Config) -> list[Callable[[], object]]:
        return [partial(self._runs[config[0]], batch) for batch in self._batches]

    def prior(self, config: Config) -> float:
        way = self._ways[config[0]]
        return _COSTS[way.backend] * (0.9 if way.fused else 1.0) * (0.95 if way.channels_last else 1.0)

    def _candidates(self) -> list[Serving]:
        """Return the ways to try, the simplest first."""
        modules = list(self._model.modules())
        last = [False, True] if any(isinstance(each, nn.Conv2d) for each in modules) else [False]
        fusing = [False, True] if any(isinstance(each, loading.NORMS) for each in modules) else [False]
        found = []
        for backend in ("eager", "onnxruntime", "compiled"):
            if backend == "onnxruntime" and not (find_spec("onnxruntime") and find_spec("onnxscript")):
                self.notes.append("onnxruntime: not tried, since onnxruntime or onnxscript is not installed")
                continue
            for fuse in fusing:
                # onnxruntime chooses its own layout.
                found += [
                    Serving(backend, each, fuse, self.shape) for each in (last if backend != "onnxruntime" else [False])
                ]
        return found

    def _try(self, way: Serving) -> None:
        try:
            run = loading.make_run(self._model, way, self._batches[1])
            for batch in self._batches:
                loading.check(runner_of(self._model), run, batch)
        except Exception as error:  # of any kind, from compilers and tracing
            text: Any = (str(error) or type(error).__name__).strip().splitlines()[0]
            self.notes.append(f"{label(way)}: does not work ({text[:80]})")
            return
        self._runs[label(way)], self._ways[label(way)] = run, way


def label(way: Serving) -> str:
    """Return a name of a way."""
    return way.backend + ", channels last" * way.channels_last + ", fused" * way.fused
