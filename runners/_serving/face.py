"""Requests of a predictor as an ASGI application: /predict, /feedback, /metrics, /health and the status page."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from dadplug.serving import InputError, Prediction, Predictor, ServingError
from dadplug.serving.call import Call

from . import bodies
from .page import PAGE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_LARGE = 1 << 18  # bytes of a body that is parsed in another thread
_TEXT, _HTML = "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"
_POLICY = b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


class Refused(ServingError):
    """A request that is not answered for its HTTP properties: method, path, size, pace."""


class Face:
    """ASGI application in front of a predictor.

    Args:
        predictor: the predictor.
        max_body: largest size of a request's body in bytes.
        read_seconds: time limit for receiving a body.
        api_key: key that each request needs in the header ``X-API-Key``; None for no key.
    """

    def __init__(self, predictor: Predictor, max_body: int, read_seconds: float, api_key: str | None = None) -> None:
        self._predictor, self._max_body, self._read_seconds = predictor, max_body, read_seconds
        self._key = None if api_key is None else api_key.encode()
        self._open: dict[Call, None] = {}
        self._ended: list[tuple[asyncio.Future[Any], Prediction | ServingError]] = []
        self._lock = threading.Lock()  # of `_ended`
        self._sweeping = False
        self._interval = max(0.005, predictor.options.slo / 5)
        self.routes: dict[tuple[str, str], Callable[[Scope, Receive, float], Awaitable[tuple[int, str, bytes]]]] = {
            ("POST", "/predict"): self._predict,
            ("POST", "/feedback"): self._feedback,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/health"): self._health,
            ("GET", "/status"): self._page,
            ("GET", "/status.json"): self._status,
        }
        self.paths = {path for _, path in self.routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; errors become answers with their status."""
        arrived = time.monotonic()
        try:
            status, kind, body = await self._routed(scope, receive, arrived)
        except ServingError as error:
            status, kind, body = error.status, bodies.JSON, json.dumps({"error": f"{error}"}).encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if kind == _HTML:
            headers.append((b"content-security-policy", _POLICY))
        if status in (408, 413):  # the rest of the body is not read
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _routed(self, scope: Scope, receive: Receive, arrived: float) -> tuple[int, str, bytes]:
        if self._key is not None and not hmac.compare_digest(_header(scope, b"x-api-key"), self._key):
            raise Refused("the header X-API-Key is missing or wrong", status=401)
        handler = self.routes.get((scope["method"], scope["path"]))
        if handler is None:
            raise Refused(f"{scope['path']} is not for {scope['method']}", status=405)
        return await handler(scope, receive, arrived)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()
        late, task = asyncio.Event(), asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(self._read_seconds, _cancel, task, late)
        try:  # `asyncio.wait_for` would make a task for each request
            return await self._received(receive)
        except asyncio.CancelledError:
            if not late.is_set():
                raise
            if sys.version_info >= (3, 11):  # the timer's cancellation ends here
                task.uncancel()
            raise Refused(f"the body did not arrive in {self._read_seconds:g} s", status=408) from None
        finally:
            timer.cancel()

    async def _received(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused("the client has left", status=400)
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_body:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> Refused:
        return Refused(f"the body is larger than {self._max_body} bytes", status=413)

    async def _parsed(self, parse: Callable[[bytes], Any], body: bytes) -> Any:
        return await asyncio.to_thread(parse, body) if len(body) > _LARGE else parse(body)

    # Routes: each returns status, content type and body

    async def _predict(self, scope: Scope, receive: Receive, arrived: float) -> tuple[int, str, bytes]:
        kind, field = _kind(scope), self._predictor.options.context
        body = await self._body(scope, receive)
        if kind == bodies.NPY:
            x = await self._parsed(bodies.parse_npy, body)
            values = parse_qs(scope.get("query_string", b"").decode("latin1"))
            context = values.get(field or "", [None])[0]
        elif kind == bodies.JSON:
            request = await self._parsed(bodies.parse_json, body)
            unknown = sorted(map(str, set(request) - {"input", field}))
            if unknown or "input" not in request:
                raise InputError(f"the request needs 'input', and has {', '.join(unknown) or 'none'} besides")
            x, context = request["input"], request.get(field) if field else None
        else:
            raise Refused(f"the content type has to be {bodies.JSON} or {bodies.NPY}", status=415)
        return 200, bodies.JSON, bodies.answer_of(await self._predicted(x, context, arrived))

    async def _predicted(self, x: Any, context: str | None, arrived: float) -> Prediction:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        future: asyncio.Future[Prediction | ServingError] = loop.create_future()

        def done(answer: Prediction | ServingError) -> None:
            if threading.get_ident() == thread:  # from the cache, or at its deadline
                if not future.done():
                    future.set_result(answer)
                return
            with self._lock:  # models answer in threads of their own
                first = not self._ended
                self._ended.append((future, answer))
            if first:  # otherwise a call of `_deliver` is due
                loop.call_soon_threadsafe(self._deliver)

        call = self._predictor.submit(x, done, context=context, arrived=arrived)
        if not future.done():
            self._open[call] = None
            if not self._sweeping:
                self._sweeping = True
                loop.call_later(self._interval, self._sweep)
        try:
            answer = await future
        finally:
            self._open.pop(call, None)
        if isinstance(answer, ServingError):
            raise answer
        return answer

    def _deliver(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for future, answer in ended:
            if not future.done():
                future.set_result(answer)

    def _sweep(self) -> None:
        """End calls whose time is over; runs while there are any."""
        now = time.monotonic()
        for call in list(self._open):
            if call.straggling <= now:
                call.expire(now)
        self._sweeping = bool(self._open)
        if self._sweeping:
            asyncio.get_running_loop().call_later(self._interval, self._sweep)

    async def _feedback(self, scope: Scope, receive: Receive, arrived: float) -> tuple[int, str, bytes]:
        if _kind(scope) != bodies.JSON:
            raise Refused(f"the content type has to be {bodies.JSON}", status=415)
        request = bodies.parse_json(await self._body(scope, receive))
        if set(request) != {"id", "y"}:
            raise InputError("feedback needs 'id' and 'y', and nothing else")
        self._predictor.feedback(request["id"], request["y"])
        return 200, bodies.JSON, b"{}"

    async def _metrics(self, scope: Scope, receive: Receive, arrived: float) -> tuple[int, str, bytes]:
        return 200, _TEXT, self._predictor.prometheus().encode()

    async def _health(self, scope: Scope, receive: Receive, arrived: float) -> tuple[int, str, bytes]:
        models = {name: each["ready"] for name, each in self._predictor.status()["models"].items()}
        return 200 if all(models.values()) else 503, bodies.JSON, json.dumps({"ready": models}).encode()

    async def _status(self, scope: Scope, receive: Receive, arrived: float) -> tuple[int, str, bytes]:
        state = self._predictor.status() | {"history": self._predictor.metrics.history()}
        return 200, bodies.JSON, json.dumps(state).encode()

    async def _page(self, scope: Scope, receive: Receive, arrived: float) -> tuple[int, str, bytes]:
        return 200, _HTML, PAGE.encode()


def _cancel(task: asyncio.Task[Any], late: asyncio.Event) -> None:
    late.set()
    task.cancel()


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for each, value in scope["headers"] if each == name), b"")


def _kind(scope: Scope) -> str:
    """Return the content type; pages of other origins cannot send these without asking, unlike forms and text."""
    return _header(scope, b"content-type").split(b";")[0].strip().lower().decode("latin1")
