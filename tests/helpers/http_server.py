"""HTTP server of an ASGI application, in a thread of the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import support

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
        end = time.monotonic() + SECONDS
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.01)
        yield port
    finally:
        server.should_exit = True
        thread.join(SECONDS)
