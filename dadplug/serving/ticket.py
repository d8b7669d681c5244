"""One request to one model, from the queue to its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Result(NamedTuple):
    """Result of a request to one model: an output, or an error.

    Attributes:
        model: name of the model.
        output: the output, read-only; None after a failure.
        error: the failure.
    """

    model: str
    output: np.ndarray[Any, Any] | None
    error: Exception | None


Listener = Callable[[Result], object]


class Ticket:
    """Request in the queue of a model.

    Args:
        x: the input, without the dimension of the batch.
        arrived: time of arrival in seconds of `time.monotonic`.
        deadline: time until which the answer is awaited.
        key: key in the cache; None without a cache.
        listeners: functions to call with the result.
    """

    __slots__ = ("arrived", "deadline", "key", "listeners", "x")

    def __init__(
        self,
        x: np.ndarray[Any, Any],
        arrived: float,
        deadline: float,
        key: tuple[str, int, bytes, str, tuple[int, ...]] | None,
        listeners: list[Listener],
    ) -> None:
        self.x, self.arrived, self.deadline = x, arrived, deadline
        self.key, self.listeners = key, listeners
