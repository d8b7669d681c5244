"""Server of a predictor on LitServe, which runs the HTTP server's process, its middleware, keys, TLS and shutdown.

Requests do not pass through LitServe's own queue and workers: the predictor, with its batches, lives in the HTTP
server's process, and each model in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any

from dadplug.serving import LoadError, Predictor

from ...logs import get_logger
from .bounded_connection import Limits
from .connection import connection_class
from .face import Face, Receive, Scope, Send

_log = get_logger("dadplug.serving")
_READY_POLL_SECONDS = 0.02
_SWITCH_SECONDS = 5e-4  # threads of models have their answers and wait for the interpreter: 5 ms, unless it is set


class _Front:
    """Middleware that answers the face's paths, and passes others on to LitServe."""

    def __init__(self, app: Any, server: Any) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        face = self._server.face
        chosen = face if scope["type"] == "http" and face is not None and scope["path"] in face.paths else self._app
        await chosen(scope, receive, send)


_Base: Any = object  # `litserve.LitServer` in the class that `build` makes: LitServe is imported only there


class _Parts(_Base):
    """Parts of the server that differ from LitServe's.

    Args:
        api: API that LitServe asks for.
        models: as for `Predictor`.
        options: likewise.
        max_body: largest size of a request's body in bytes.
        read_seconds: time limit for receiving a head, and for receiving a body.
        max_connections: largest number of connections.

    Attributes:
        face: what answers requests, in the HTTP server's process while it runs.
        errors: connection that receives the message of an error at the start of that process.
        ready: called in the HTTP server's process once it answers.
        address: host and port that it listens on.
    """

    def __init__(
        self,
        api: Any,
        models: Mapping[str, Any],
        options: Mapping[str, Any],
        max_body: int,
        read_seconds: float,
        max_connections: int,
    ) -> None:
        super().__init__(api, accelerator="cpu", timeout=False, disable_openapi_url=True)
        self._models, self._options = models, options
        self._max_body, self._read_seconds = max_body, read_seconds
        self.limits = Limits(max_connections, read_seconds)
        self.face: Face | None = None
        self.ready: Callable[[], object] | None = None
        self.address = ("", 0)
        self.errors, self._report = multiprocessing.Pipe(duplex=False)

    def launch_inference_worker(self, lit_api: Any) -> list[Any]:
        """Start no worker of LitServe: models have processes of their own."""
        from litserve.utils import WorkerSetupStatus

        self.workers_setup_status["predict_0"] = WorkerSetupStatus.READY
        threading.Thread(target=self._end_with_the_http_server, daemon=True).start()
        return []

    def _end_with_the_http_server(self) -> None:
        while True:
            for process in multiprocessing.active_children():
                if process.name.startswith("LitServer-"):
                    wait([process.sentinel])  # `join` would take its exit status, for which LitServe waits
                    with contextlib.suppress(OSError, EOFError):  # the manager may have ended
                        self._shutdown_event.set()
                    return
            time.sleep(0.05)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        """Run the predictor while the HTTP server runs."""
        async with super().lifespan(app):
            _end_with_the_parent()
            _end_alike()
            _use_one_thread()
            try:
                predictor = await asyncio.to_thread(Predictor, self._models, **self._options)
            except Exception as error:
                self._report.send(f"{error}")
                if isinstance(error, ValueError):  # a user's error, which `run` raises: without uvicorn's traceback
                    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
                raise
            key = os.environ.get("LIT_SERVER_API_KEY") or None
            self.face = Face(predictor, self._max_body, self._read_seconds, key)
            app.middleware_stack = _Front(app.middleware_stack, self)  # the outermost, since each one costs time
            sys.setswitchinterval(_SWITCH_SECONDS)
            gc.freeze()  # what was imported is not searched for garbage while requests wait
            announcing = asyncio.create_task(self._announce())
            try:
                yield
            finally:
                announcing.cancel()
                self.face = None
                await asyncio.to_thread(predictor.close)

    async def _announce(self) -> None:
        """Call `ready` once the port accepts connections: uvicorn listens after the start of its application."""
        host, port = self.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        while self.ready is not None:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                await asyncio.sleep(_READY_POLL_SECONDS)
            else:
                writer.close()
                self.ready()
                return


def build(
    models: Mapping[str, Any], options: Mapping[str, Any], max_body: int, read_seconds: float, max_connections: int
) -> Any:
    """Return a `litserve.LitServer` for a predictor, which starts when the server does.

    Args:
        models: as for `Predictor`.
        options: likewise.
        max_body: largest size of a request's body in bytes.
        read_seconds: time limit for receiving a head, and for receiving a body.
        max_connections: largest number of connections.

    Raises:
        ImportError: if LitServe is not installed.
    """
    try:
        import litserve
    except ImportError as error:
        raise ImportError(
            "dadplug.serve needs LitServe, which is not installed: pip install 'dadplug[serve]'"
        ) from error

    class Nothing(litserve.LitAPI):
        """API that LitServe asks for; the face answers in its place."""

        def setup(self, device: Any) -> None: ...

        def predict(self, x: Any) -> Any: ...

    class Server(_Parts, litserve.LitServer): ...

    return Server(Nothing(), models, options, max_body, read_seconds, max_connections)


def run(server: Any, host: str, port: int, log_level: str, ready: Callable[[], object] | None = None) -> None:
    """Run a server until it is stopped by Ctrl-C or SIGTERM.

    Args:
        server: result of `build`.
        host: address to listen on.
        port: the port.
        log_level: level of the HTTP server's log.
        ready: called in the HTTP server's process once it answers.

    Raises:
        LoadError: if a model cannot be loaded.
    """
    server.ready, server.address = ready, (host, port)
    with _interrupted_once():
        server.run(
            host=host,
            port=port,
            num_api_servers=1,
            log_level=log_level,
            generate_client_file=False,
            timeout_keep_alive=30,
            access_log=False,
            proxy_headers=False,
            http=connection_class(lambda: server.face, server.limits),
        )
    if server.errors.poll():
        raise LoadError(server.errors.recv())


@contextlib.contextmanager
def _interrupted_once() -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C interrupt this process, and ignore further ones until the context ends.

    An interrupt of the shutdown would leave processes behind. `timeout` sends SIGTERM twice, and users press Ctrl-C
    again. Processes forked from this one end as if there was no handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pid, interrupted = os.getpid(), False

    def handle(number: int, frame: Any) -> None:
        nonlocal interrupted
        if os.getpid() != pid:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    former = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.suppress(KeyboardInterrupt):  # before LitServe expects it
            yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _end_alike() -> None:
    """Let Ctrl-C end the HTTP server as SIGTERM does: a second one would end it without closing the predictor."""
    if threading.current_thread() is threading.main_thread():
        terminate: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGINT, lambda _, frame: terminate(signal.SIGTERM, frame))


def _use_one_thread() -> None:
    """Keep torch from using threads: those of the process that this one was forked from are gone."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _end_with_the_parent() -> None:
    """End this process when the one that has started it ends, also if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
