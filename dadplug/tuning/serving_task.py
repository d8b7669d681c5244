"""Task of a served model: the way in which it computes its batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import nn

from ..schedules import Serving
from ..serving import schedule
from ..serving.backends import runner_of
from .task import Config, Space, Task

_BATCHES = (1, 8, 32)
_COSTS = {"eager": 1.0, "compiled": 0.8, "onnxruntime": 0.7}  # about, of small convolutional networks


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
        largest = schedule.example_of(model, tuple(shape), max(_BATCHES))
        self._batches = [np.ascontiguousarray(largest[:size]) for size in _BATCHES]
        self._runs: dict[str, schedule.Run] = {}
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

    def prepare(self, config: Config) -> Callable[[], object]:
        run = self._runs[config[0]]

        def compute() -> None:
            for batch in self._batches:
                run(batch)

        return compute

    def prior(self, config: Config) -> float:
        way = self._ways[config[0]]
        return _COSTS[way.backend] * (0.9 if way.fused else 1.0) * (0.95 if way.channels_last else 1.0)

    def _candidates(self) -> list[Serving]:
        """Return the ways to try, the simplest first."""
        modules = list(self._model.modules())
        last = [False, True] if any(isinstance(each, nn.Conv2d) for each in modules) else [False]
        fusing = [False, True] if any(isinstance(each, schedule.NORMS) for each in modules) else [False]
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
            run = schedule.make_run(self._model, way, self._batches[1])
            for batch in self._batches:
                schedule.check(runner_of(self._model), run, batch)
        except Exception as error:  # of any kind, from compilers and tracing
            text: Any = (str(error) or type(error).__name__).strip().splitlines()[0]
            self.notes.append(f"{label(way)}: does not work ({text[:80]})")
            return
        self._runs[label(way)], self._ways[label(way)] = run, way


def label(way: Serving) -> str:
    """Return a name of a way."""
    return way.backend + ", channels last" * way.channels_last + ", fused" * way.fused
