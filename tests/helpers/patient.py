"""Predictors and models for tests; goals and deadlines are far, so that a busy machine changes no result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dadplug.serving import Predictor


def patient_predictor(models: Mapping[str, Any], **options: Any) -> Predictor:
    """Return a predictor whose requests have a minute."""
    return Predictor(models, **{"slo": 60.0, "deadline": 60.0, "reload": False, **options})


class HeldModel:
    """Model that computes once `go` is set.

    Attributes:
        go: lets it compute.
        started: set at its first batch.
        batches: what it has been given.
    """

    def __init__(self, go: bool = False, compute: Callable[[Any], Any] = lambda batch: batch) -> None:
        self.go, self.started, self.compute = threading.Event(), threading.Event(), compute
        self.batches: list[Any] = []
        if go:
            self.go.set()

    def __call__(self, batch: Any) -> Any:
        self.batches.append(batch)
        self.started.set()
        assert self.go.wait(60)
        return self.compute(batch)

    @property
    def samples(self) -> int:
        """Number of samples that it has been given."""
        return sum(map(len, self.batches))
