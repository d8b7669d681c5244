"""Options of a predictor: one definition for `Predictor`, `dadplug.serve` and the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .policies import Policy
from .schema import DTYPES


@dataclass(frozen=True)
class ServingOptions:
    """Options of a predictor, given as keywords.

    Attributes:
        slo: latency goal in seconds.
        policy: ``"fixed"``, ``"exp3"``, ``"exp4"`` or a `Policy`.
        context: name of the field that holds a request's context, such as ``"site"``; None without contexts.
        task: ``"classification"``: outputs are scores of classes; ``"regression"``: outputs are numbers.
        scale: for regression, the error that counts as the largest loss.
        input_shape: shape of one input, None for a size that varies; None to have it from the models' files.
        dtype: dtype of the inputs; None to have it from the models' files.
        deadline: seconds after which a request without an answer fails with status 503; None for 20 times `slo`, at
            least 10 seconds.
        max_batch: upper limit of the batch size.
        max_waiting: largest number of requests that wait for one model; further ones fail with status 503.
        cache_bytes: size of the cache; 0 for no cache, also none for concurrent requests.
        feedback_seconds: time limit of feedback.
        max_open: largest number of predictions that wait for feedback.
        max_contexts: largest number of contexts with weights.
        state: file of the policy's weights, read at the start and written after feedback and at the end.
        reload: whether a model is loaded again when its file changes.
        hang_seconds: time without an answer after which a model's process is ended and started again.
        load_seconds: time limit for loading a model.
        threads: threads of each model's process.

    Raises:
        ValueError: if a value is out of range.
    """

    slo: float = 0.05
    policy: str | Policy = "fixed"
    context: str | None = None
    task: str = "classification"
    scale: float = 1.0
    input_shape: tuple[int | None, ...] | None = None
    dtype: str | None = None
    deadline: float | None = None
    max_batch: int = 256
    max_waiting: int = 4096
    cache_bytes: int = 64 << 20
    feedback_seconds: float = 3600.0
    max_open: int = 100_000
    max_contexts: int = 10_000
    state: str | Path | None = None
    reload: bool = True
    hang_seconds: float = 10.0
    load_seconds: float = 120.0
    threads: int = 1

    def __post_init__(self) -> None:
        positive = {
            name: getattr(self, name)
            for name in ("slo", "max_batch", "max_waiting", "feedback_seconds", "max_open", "max_contexts")
        }
        positive |= {"hang_seconds": self.hang_seconds, "load_seconds": self.load_seconds, "threads": self.threads}
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name} has to be positive, not {value}")
        if self.deadline is not None and self.deadline < self.slo:
            raise ValueError(f"deadline ({self.deadline} s) has to be at least slo ({self.slo} s)")
        if self.cache_bytes < 0:
            raise ValueError(f"cache_bytes has to be at least 0, not {self.cache_bytes}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}; valid ones are {', '.join(DTYPES)}")

    @property
    def longest(self) -> float:
        """Seconds that a request may take."""
        return max(10.0, 20 * self.slo) if self.deadline is None else self.deadline
