"""Requests of a predictor as an ASGI application: /predict, /feedback, /metrics, /health and the status page."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from dadplug.serving import InputError, Prediction, Predictor
from dadplug.serving.call import Call, Recalled
from dadplug.serving.policies import Choice

from ...errors import RequestError, ServingError
from . import bodies
from .page import PAGE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_LARGE = 1 << 18  # bytes of a body that is parsed in another thread
_MOST_HEADS, _LONGEST_HEAD = 256, 4096
_SPECIAL = {b"transfer-encoding", b"upgrade", b"expect"}  # headers of requests that only the parser answers
_TEXT, _HTML = "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"
_POLICY = b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


class Head(NamedTuple):
    """Head of a request: length of the body, and the hash of all else on which the answer depends."""

    length: int
    digest: Any


class Attempt(NamedTuple):
    """Attempt to answer a request from the cache, without reading its input.

    Attributes:
        digest: digest of the request.
        answer: the body of the answer; None if it is not in the cache.
        choice: the models that were chosen for it; None if the request is not known.
    """

    digest: bytes
    answer: bytes | None
    choice: Choice | None


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
        self._heads: dict[bytes, Head] = {}
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
        if status in (401, 405, 408, 413):  # the rest of the body is not read
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _routed(self, scope: Scope, receive: Receive, arrived: float) -> tuple[int, str, bytes]:
        if not self._allowed(scope):
            raise RequestError("the header X-API-Key is missing or wrong", status=401)
        handler = self.routes.get((scope["method"], scope["path"]))
        if handler is None:
            raise RequestError(f"{scope['path']} is not for {scope['method']}", status=405)
        return await handler(scope, receive, arrived)

    def _allowed(self, scope: Scope) -> bool:
        return self._key is None or hmac.compare_digest(_header(scope, b"x-api-key"), self._key)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()
        if "dadplug.attempt" in scope:  # all of it has arrived
            return await self._received(receive)
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
            raise RequestError(f"the body did not arrive in {self._read_seconds:g} s", status=408) from None
        finally:
            timer.cancel()

    async def _received(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError("the client has left", status=400)
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_body:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> RequestError:
        return RequestError(f"the body is larger than {self._max_body} bytes", status=413)

    async def _parsed(self, parse: Callable[[bytes], Any], body: bytes) -> Any:
        return await asyncio.to_thread(parse, body) if len(body) > _LARGE else parse(body)

    # Routes: each returns status, content type and body

    async def _predict(self, scope: Scope, receive: Receive, arrived: float) -> tuple[int, str, bytes]:
        try:
            read = await self._read(scope, receive, arrived)
        except ServingError as error:  # the predictor counts those requests that reach it
            self._predictor.metrics.request(error.status, time.monotonic() - arrived)
            raise
        if isinstance(read, bytes):
            return 200, bodies.JSON, read
        prediction = await self._predicted(*read[:2], arrived, read[2])
        return 200, bodies.JSON, bodies.answer_of(prediction, bodies.output_text(prediction.output))

    async def _read(
        self, scope: Scope, receive: Receive, arrived: float
    ) -> bytes | tuple[Any, str | None, Attempt | None]:
        """Return the answer to a known request, or input and context of another one and the attempt to answer it."""
        kind = _kind(scope)
        body = await self._body(scope, receive)
        if kind not in (bodies.JSON, bodies.NPY):
            raise RequestError(f"the content type has to be {bodies.JSON} or {bodies.NPY}", status=415)
        attempt: Attempt | None = scope.get("dadplug.attempt")
        if attempt is None and self._predictor.recalls and len(body) <= _LARGE:
            attempt = self._recalled(bodies.digest_of(kind, self._query_context(scope)), body, arrived)
        if attempt is not None and attempt.answer is not None:
            return attempt.answer
        return (*await self._input(kind, scope, body), attempt)

    async def _input(self, kind: str, scope: Scope, body: bytes) -> tuple[Any, Any]:
        """Return the input and the context of a request."""
        if kind == bodies.NPY:
            return await self._parsed(bodies.parse_npy, body), self._query_context(scope)
        field = self._predictor.options.context
        request = await self._parsed(bodies.parse_json, body)
        unknown = sorted(map(str, set(request) - {"input", field}))
        if unknown or "input" not in request:
            raise InputError(f"the request needs 'input', and has {', '.join(unknown) or 'none'} besides")
        return request["input"], request.get(field) if field else None

    def _query_context(self, scope: Scope) -> str | None:
        """Return the context in the address, where those of arrays are."""
        query = scope.get("query_string", b"")
        return parse_qs(query.decode("latin1")).get(self._predictor.options.context or "", [None])[0] if query else None

    # Requests that are equal to earlier ones byte by byte

    def attempt(self, data: bytes, end: int, arrived: float) -> Attempt | None:
        """Answer a whole request from the cache, if its head is known.

        Args:
            data: the request.
            end: where its head ends.
            arrived: time of its arrival.

        Returns:
            The attempt; None if the head is not known, or belongs to a body of another length.
        """
        head = self._heads.get(data[:end])
        if head is None or len(data) != end + head.length:
            return None
        return self._recalled(head.digest.copy(), memoryview(data)[end:], arrived)

    def knows_head(self, head: bytes) -> bool:
        """Return whether requests with this head may be answered from the cache.

        Args:
            head: the head.
        """
        return head in self._heads

    def learn_head(self, scope: Scope, data: bytes, end: int) -> None:
        """Remember the head of a request, unless the answer depends on more than it and the body, or it is an error.

        Args:
            scope: the request as it was parsed.
            data: the whole request.
            end: where its head ends.
        """
        headers, kind = scope["headers"], _kind(scope)
        lengths = [value for name, value in headers if name == b"content-length"]
        special = any(
            name in _SPECIAL or (name == b"connection" and value.lower() != b"keep-alive") for name, value in headers
        )
        if (
            special
            or not self._predictor.recalls
            or (scope["http_version"], scope["method"], scope["path"]) != ("1.1", "POST", "/predict")
            or lengths != [str(len(data) - end).encode()]
            or len(data) - end > min(self._max_body, _LARGE)
            or end > _LONGEST_HEAD
            or kind not in (bodies.JSON, bodies.NPY)
            or not self._allowed(scope)
        ):
            return
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
        self._heads[data[:end]] = Head(len(data) - end, bodies.digest_of(kind, self._query_context(scope)))

    def _recalled(self, digest: Any, body: bytes | memoryview, arrived: float) -> Attempt:
        digest.update(body)
        key = digest.digest()
        found = self._predictor.recall(key, bodies.output_text, arrived)
        if isinstance(found, Recalled):
            return Attempt(key, bodies.answer_of(found.prediction, found.output), None)
        return Attempt(key, None, found)

    async def _predicted(self, x: Any, context: str | None, arrived: float, attempt: Attempt | None) -> Prediction:
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

        body, choice = (None, None) if attempt is None else (attempt.digest, attempt.choice)
        call = self._predictor.submit(x, done, context=context, arrived=arrived, body=body, choice=choice)
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
        try:
            if _kind(scope) != bodies.JSON:
                raise RequestError(f"the content type has to be {bodies.JSON}", status=415)
            request = bodies.parse_json(await self._body(scope, receive))
            if set(request) != {"id", "y"}:
                raise InputError("feedback needs 'id' and 'y', and nothing else")
        except ServingError as error:  # likewise
            self._predictor.metrics.feedback(error.status)
            raise
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
