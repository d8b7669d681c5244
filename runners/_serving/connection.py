"""Connection of the HTTP server that answers known requests at once, without the HTTP parser and tasks.

Such a request has a head that was parsed before, byte by byte, and a body whose answer is in the cache. All others take
the usual way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...logs import get_logger
from . import bodies
from .bounded_connection import BoundedConnection, Limits
from .face import Face

_log = get_logger("dadplug.serving")
_END = b"\r\n\r\n"  # of a head
_HELD_SECONDS = 0.05  # that a known head waits for its body, before the parser gets it
_Base: Any = object  # uvicorn's protocol in the class that `connection_class` makes


def connection_class(find_face: Callable[[], Face | None], limits: Limits | None = None) -> Any:
    """Return the protocol for uvicorn's option ``http``.

    Args:
        find_face: returns what answers requests, None while there is none.
        limits: limits of the connections; None for the defaults.
    """
    limits_of_all = limits or Limits()
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:  # without httptools
        from uvicorn.protocols.http.h11_impl import H11Protocol

        class PlainConnection(BoundedConnection, H11Protocol):
            limits = limits_of_all

        return PlainConnection

    class Connection(BoundedConnection, _QuickConnection, HttpToolsProtocol):
        face, limits = staticmethod(find_face), limits_of_all

    return Connection


class _QuickConnection(_Base):
    """Part of the connection that differs from uvicorn's."""

    face: Callable[[], Face | None]
    head_ended: Callable[[], None]

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._begun = self._ended = 0  # messages that the parser has seen
        self._quick_time = 0.0  # of the last request that the parser knows nothing about
        self._held = b""  # a known head: many clients send the body by itself
        self._holding: Any = None  # its timer
        self._headers: Any = None  # uvicorn's, which change each second, and
        self._start = b""  # the first part of an answer with them

    def on_message_begin(self) -> None:
        """Count; called by the parser."""
        self._begun += 1
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Count; called by the parser."""
        self._ended += 1
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Answer a known request at once, or parse it; called by the event loop."""
        face = self.face()
        data = self._take_held() + data
        if face is None or not self._is_free():
            super().data_received(data)
            return
        arrived, begun = time.monotonic(), self._begun
        end = data.find(_END) + len(_END)
        if end == len(data) and face.knows_head(data):
            self._held, self._quick_time = data, self.loop.time()
            self._holding = self.loop.call_later(_HELD_SECONDS, self._release)
            return
        try:
            attempt = face.attempt(data, end, arrived)
        except Exception:
            _log.exception("a request is answered the usual way")
            attempt = None
        if attempt is not None and attempt.answer is not None:
            self._write(attempt.answer)
            return
        super().data_received(data)
        if self._begun == self._ended == begun + 1:  # one whole request; its task has not begun
            self.scope["dadplug.attempt"] = attempt
            if attempt is None:
                face.learn_head(self.scope, data, end)

    def _take_held(self) -> bytes:
        data, self._held = self._held, b""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        return data

    def _release(self) -> None:
        """Let the parser wait for the body of a head."""
        data = self._take_held()
        if data and not self.transport.is_closing():
            super().data_received(data)

    def shutdown(self) -> None:
        """Close the connection after the request in progress; called by the server."""
        self._release()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a head without a body; called by the event loop."""
        self._take_held()
        super().connection_lost(exc)

    def _is_free(self) -> bool:
        """Return whether the next bytes begin a request that may be answered at once."""
        return (
            self._begun == self._ended
            and (self.cycle is None or self.cycle.response_complete)  # the last request, and so those before it
            and not self.flow.write_paused
            and not self.transport.is_closing()
            and not self.access_log
            and self.limit_concurrency is None
        )

    def _write(self, body: bytes) -> None:
        state = self.server_state
        if state.default_headers is not self._headers:
            self._headers = state.default_headers
            kind = (b"content-type", bodies.JSON.encode())
            lines = [name + b": " + value for name, value in (*self._headers, kind)]
            self._start = b"\r\n".join((b"HTTP/1.1 200 OK", *lines, b"content-length: "))
        self.head_ended()
        self.transport.write(b"".join((self._start, str(len(body)).encode(), _END, body)))
        state.total_requests += 1
        self._quick_time = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._close_later(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection unless it was used meanwhile; called by a timer."""
        left = self._quick_time + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._close_later(left)
        else:
            super().timeout_keep_alive_handler()

    def _close_later(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)
