"""Server of a predictor on LitServe, which binds the port, has TLS, and ends the HTTP server, uvicorn in a thread.

Requests do not pass through LitServe's own queue and workers: the predictor, with its batches, lives in this process,
and each model in a process of its own.

Connections are uvicorn's, with limits on their number and pace, and a short way for known requests. uvicorn's own
`limit_concurrency` refuses requests while idle connections stay, and it bounds neither the time nor the size of a head:
clients without a key could block others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dadplug.serving import Predictor

from ...support.logs import get_logger
from .http_app import JSON, REFUSED, HttpApp

# Connections

MOST_CONNECTIONS, READ_SECONDS = 1000, 10.0
_RESERVED = 128  # descriptors for files, models' processes and the event loop
_FEWEST = 16
_LONGEST_HEAD = 1 << 16  # bytes
_HELD_SECONDS = 0.05  # that a head waits for its body: many clients send them one after the other
_END = b"\r\n\r\n"  # of a head
_Protocol: Any = HttpToolsProtocol
_log = get_logger("dadplug.serving")


class Limits:
    """The open connections of a server, and their limits.

    Args:
        most: largest number of connections; fewer where the system allows this process fewer descriptors.
        seconds: time limit of a request's head, and of what is read on after an early answer.
    """

    def __init__(self, most: int = MOST_CONNECTIONS, seconds: float = READ_SECONDS) -> None:
        self.most, self.seconds = min(most, _most_descriptors()), seconds
        self._open: dict[Any, None] = {}  # in the order of their arrival: times of the loop may be equal
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, connection: Any) -> bool:
        """Add a connection; where there are too many, end the one that has waited longest for a request.

        Returns:
            Whether there is room: every other connection may have a request in progress.
        """
        if len(self._open) >= self.most:
            waiting = [each for each in self._open if each.idle]
            if not waiting:
                return False
            self._end(min(waiting, key=lambda each: (each.served, each.touched)))
        self._open[connection] = None
        if self._timer is None:
            self._begin_timer()
        return True

    def remove(self, connection: Any) -> None:
        """Remove a connection that has ended."""
        self._open.pop(connection, None)

    def _end(self, connection: Any) -> None:
        self.remove(connection)  # `connection_lost` follows later
        connection.transport.abort()

    def _begin_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(1.0, self.seconds / 4), self._sweep)

    def _sweep(self) -> None:
        """End connections whose time is over; runs while there are any."""
        self._timer = None
        oldest = asyncio.get_running_loop().time() - self.seconds
        for connection in list(self._open):
            if connection.idle and connection.waiting_since is not None and connection.waiting_since < oldest:
                self._end(connection)
        if self._open:
            self._begin_timer()


def _most_descriptors() -> float:
    """Return the number of connections that the system allows this process."""
    try:
        import resource
    except ImportError:  # Windows
        return math.inf
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if descriptors == resource.RLIM_INFINITY else max(_FEWEST, descriptors - _RESERVED)


class Connection(_Protocol):
    """Protocol of a connection, for uvicorn's option ``http``.

    A request whose head is byte by byte that of the one before, and whose answer is in the cache, is not parsed.

    Args:
        http_app: answers known requests.
        limits: limits of the connections.
        options: arguments of uvicorn's protocol.

    Attributes:
        waiting_since: time from which a head is awaited, or the end of a refused one; None between two requests, which
            uvicorn's own timer bounds.
        touched: time of the last bytes.
        served: whether a request has been received.
    """

    def __init__(self, http_app: HttpApp, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self.http_app, self.limits = http_app, limits

    def connection_made(self, transport: Any) -> None:
        """Admit or refuse the connection; called by the event loop."""
        super().connection_made(transport)
        self.waiting_since: float | None = self.loop.time()
        self.touched, self.served, self._head_bytes = self.waiting_since, False, 0
        self._refused = self._parsing = False
        self._begun: Any = None  # a request that has no task yet, and the application for it
        self._timer: asyncio.TimerHandle | None = None  # while its body is awaited
        self._in_step = True  # whether all bytes so far have come as whole requests, one at a time
        self._head, self._size = b"", 0  # of the last request, if it was answered from the cache
        if not self.limits.admit(self):
            transport.write(_refusal(b"503 Service Unavailable"))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; called by the event loop."""
        self.limits.remove(self)
        self._take_begun()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no request is in progress: a head is awaited, or the rest of a refused request is discarded."""
        return self._awaits_head or REFUSED in self.cycle.scope

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and bound the head; called by the event loop."""
        if self._refused:
            return
        self.touched = self.loop.time()
        end, before = data.find(_END) + len(_END), self.cycle
        if self._head and len(data) == self._size and data.startswith(self._head):
            self._repeat(data[end:])
            return
        if self.waiting_since is None and self._awaits_head:
            self.waiting_since = self.touched
        self._parsing = True
        super().data_received(data)
        self._parsing = False
        is_new = self.cycle is not before and not self.cycle.more_body
        self._in_step = self._in_step and is_new and len(data) == end + len(self.cycle.body)
        if not self._awaits_head:
            self.waiting_since, self._head_bytes, self.served = None, 0, True
        elif self.waiting_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _LONGEST_HEAD:
                self._refuse(_refusal(b"431 Request Header Fields Too Large"))
        if self._begun is not None:
            self._begin_or_hold()
        self._head, self._size = data[:end] if self._in_step and self.cycle.response_complete else b"", len(data)

    def _repeat(self, body: bytes) -> None:
        """Begin a request that differs from the last one in its body only, whose cycle was not used: it had no task."""
        self._unset_keepalive_if_required()
        cycle = self.cycle
        cycle.body, cycle.response_complete = bytearray(body), False
        cycle.default_headers = self.server_state.default_headers
        self._begun = cycle, self.app
        self._begin()

    def send_400_response(self, msg: str) -> None:
        """Answer that a request is not valid; called by uvicorn."""
        if self._awaits_head:
            self._refuse(_refusal(b"400 Bad Request", msg.encode()))
        else:
            super().send_400_response(msg)

    def _refuse(self, answer: bytes) -> None:
        """Answer, then discard all until the client closes the connection or its time is over.

        The kernel answers bytes that nobody has read with a reset, by which the client loses the answer.
        """
        if not self._refused and not self.transport.is_closing():
            self._refused, self.waiting_since = True, self.loop.time()
            self.transport.write(answer)
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def shutdown(self) -> None:
        """Close the connection after the request in progress; called by uvicorn."""
        if self.idle:
            self.transport.close()
        else:
            super().shutdown()

    # Requests whose answers are in the cache need no task

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Note a request, or start its task if it was parsed earlier; called by uvicorn."""
        if self._parsing:
            self._begun = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _begin_or_hold(self) -> None:
        cycle, _ = self._begun
        if cycle.more_body and not cycle.body and not cycle.waiting_for_100_continue:
            if self._timer is None:
                self._timer = self.loop.call_later(_HELD_SECONDS, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        """Answer a request at once, or start its task."""
        cycle, app = self._take_begun()
        if cycle.more_body or not self._answer(cycle):
            self._head = b""
            super()._start_asgi_task(cycle, app)

    def _take_begun(self) -> Any:
        begun, self._begun = self._begun, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return begun

    def _answer(self, cycle: Any) -> bool:
        """Answer a whole request from the cache; return whether that was possible."""
        if not cycle.keep_alive or self.flow.write_paused or self.access_log:
            return False
        try:
            body = self.http_app.answer_known(cycle.scope, bytes(cycle.body))
        except Exception:
            _log.exception("a request is answered the usual way")
            return False
        if body is None:
            return False
        headers = [*cycle.default_headers, (b"content-type", JSON.encode()), (b"content-length", b"%d" % len(body))]
        lines = [b"HTTP/1.1 200 OK", *(name + b": " + value for name, value in headers), b"", body]
        self.transport.write(b"\r\n".join(lines))
        cycle.response_complete = True
        cycle.on_response()
        return True


def _refusal(status: bytes, text: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (status, len(text), text)


# The server

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
        self._monitor_workers = False  # of LitServe: there are none, and its manager ends before the thread
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
