"""Server of a predictor on LitServe, which binds the port, has TLS, and ends the HTTP server, uvicorn in a thread.

Requests do not pass through LitServe's own queue and workers: the predictor, with its batches, lives in this process,
and each model in a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import litserve
import uvicorn
from litserve.utils import WorkerSetupStatus

from dadplug.serving import Predictor

from .connection import Connection, Limits
from .http_app import HttpApp

_SWITCH_SECONDS = 5e-4  # threads of models have their answers and wait for the interpreter: 5 ms, unless it is set
_Api: Any = litserve.LitAPI
_LitServer: Any = litserve.LitServer
_Uvicorn: Any = uvicorn.Server


class _NoApi(_Api):
    """API that LitServe asks for; `HttpApp` answers in its place."""

    def setup(self, device: Any) -> None: ...

    def predict(self, x: Any) -> Any: ...


class _HttpServer(_Uvicorn):
    """uvicorn's server, which calls `ready` once it accepts connections."""

    ready: Callable[[], object] | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and self.ready is not None:
            self.ready()


class _HttpThread(threading.Thread):
    """Thread of the HTTP server, with the methods of a process by which LitServe ends it."""

    def __init__(self, server: Any, sockets: Any, ended: Callable[[], object]) -> None:
        super().__init__(name="dadplug-serving-http", daemon=True)
        self._server, self._sockets, self._ended = server, sockets, ended

    def run(self) -> None:
        try:
            self._server.run(sockets=self._sockets)
        finally:
            with contextlib.suppress(OSError, EOFError):  # LitServe's manager may have ended
                self._ended()

    def terminate(self) -> None:
        self._server.should_exit = True

    def kill(self) -> None:
        self._server.force_exit = True


class PredictorServer(_LitServer):
    """LitServe's server with a predictor in the place of its workers.

    Args:
        models: as for `Predictor`.
        options: likewise.
        max_body: largest size of a request's body in bytes.
        read_seconds: time limit for receiving a head, and for receiving a body.
        max_connections: largest number of connections.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        options: Mapping[str, Any],
        max_body: int,
        read_seconds: float,
        max_connections: int,
    ) -> None:
        super().__init__(_NoApi(), accelerator="cpu", timeout=False, disable_openapi_url=True)
        self._models, self._options = models, options
        self._max_body, self._limits = max_body, Limits(max_connections, read_seconds)
        self._predictor: Predictor | None = None
        self._ready: Callable[[], object] | None = None

    def serve(
        self, host: str, port: int, log_level: str, ready: Callable[[], object] | None, ends_process: bool
    ) -> None:
        """Serve until Ctrl-C or SIGTERM; see `PredictionServer.run`."""
        self._ready, interval = ready, sys.getswitchinterval()
        with _interrupted_once(restore=not ends_process):
            try:
                self.run(
                    host=host,
                    port=port,
                    num_api_servers=1,
                    log_level=log_level,
                    generate_client_file=False,
                    timeout_keep_alive=30,
                    access_log=False,
                    proxy_headers=False,
                )
            finally:
                sys.setswitchinterval(interval)
                gc.unfreeze()
                if self._predictor is not None:
                    self._predictor.close()

    def launch_inference_worker(self, lit_api: Any) -> list[Any]:
        """Load the models, which have processes of their own; called by LitServe once the port is bound."""
        self._predictor = Predictor(self._models, **self._options)
        self.workers_setup_status["predict_0"] = WorkerSetupStatus.READY
        return []

    def _start_server(self, port: int, count: int, log_level: str, sockets: Any, kind: str, **options: Any) -> Any:
        """Start the HTTP server; called by LitServe, which waits until it ends."""
        assert self._predictor is not None
        key = os.environ.get("LIT_SERVER_API_KEY") or None
        app = HttpApp(self._predictor, self._max_body, self._limits.seconds, key, otherwise=self.app)
        protocol = partial(Connection, app, self._limits)
        server = _HttpServer(uvicorn.Config(app, log_level=log_level, lifespan="off", http=protocol, **options))
        server.ready = self._ready
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.freeze()  # what was imported is not searched for garbage while requests wait
        thread = _HttpThread(server, sockets, self._shutdown_event.set)
        thread.start()
        return {0: thread}


@contextlib.contextmanager
def _interrupted_once(restore: bool) -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C interrupt this process, and ignore further ones until the context ends.

    An interrupt of the shutdown would leave processes behind. `timeout` sends SIGTERM twice, and users press Ctrl-C
    again. Processes forked from this one end as if there was no handler.

    Args:
        restore: whether the former handlers come back at the end; otherwise further signals stay ignored, since one
            between the end of this context and that of the process would change its exit status.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pid, interrupted, ended = os.getpid(), False, False

    def handle(number: int, frame: Any) -> None:
        nonlocal interrupted
        if os.getpid() != pid:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not (interrupted or ended):
            interrupted = True
            raise KeyboardInterrupt

    former = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.suppress(KeyboardInterrupt):  # before LitServe expects it
            yield
    finally:
        ended = True
        for number, handler in former.items():  # Python's own handlers end before its process does
            signal.signal(number, handler if restore else signal.SIG_IGN)
