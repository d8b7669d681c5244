"""Predictors, models and an HTTP server; goals and deadlines are far, so that a busy machine changes no result."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import support

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


# HTTP server of an ASGI application, in a thread of the test


SECONDS = 60.0


@contextlib.contextmanager
def served(app: Any, http: Any = "auto") -> Iterator[int]:
    """Serve an ASGI application by uvicorn, and return its port."""
    import uvicorn

    port = support.free_port()
    server = uvicorn.Server(
        uvicorn.Config(app, port=port, http=http, log_level="error", access_log=False, lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        support.until(lambda: server.started or not thread.is_alive(), lambda: "the server did not start", SECONDS)
        assert thread.is_alive()
        yield port
    finally:
        server.should_exit = True
        thread.join(SECONDS)
