"""Requests of a predictor as an ASGI application: /predict, /feedback, /metrics, /health and the status page.

The routes are a table: Starlette's add HEAD, have error texts of their own, and take five times as long to be found.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import hmac
import io
import json
import math
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
from numpy.lib import format as npy_format

from dadplug.serving import InputError, Prediction, Predictor
from dadplug.serving.policies import Choice
from dadplug.serving.predictor import Call, Recalled

from ...errors import RequestError, ServingError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answer = tuple[int, str, bytes]  # status, content type, body
JSON, NPY = "application/json", "application/x-npy"
PAGE = Path(__file__).with_name("status.html")
_TEXT, _HTML = "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"
_POLICY = b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
_LARGE = 1 << 18  # bytes of a body that is parsed in another thread
_CLOSING = (401, 405, 408, 413)  # statuses of requests whose bodies are not used
_ENCODER = json.JSONEncoder(allow_nan=False)

# In the scope of a request:
WHOLE_BODY = "dadplug.body"  # its body, if all of it had arrived when the application was called
REFUSED = "dadplug.refused"  # set once the request was refused, while the rest of its body is discarded
_ATTEMPT = "dadplug.attempt"  # the attempt to answer it from the cache: its digest, and the models chosen for it


class HttpApp:
    """ASGI application in front of a predictor.

    Args:
        predictor: the predictor.
        max_body: largest size of a request's body in bytes.
        read_seconds: time limit for receiving a body.
        api_key: key that each request needs in the header ``X-API-Key``; None for no key.
        otherwise: ASGI application for other paths; None to answer that there is no such path.
    """

    def __init__(
        self,
        predictor: Predictor,
        max_body: int,
        read_seconds: float,
        api_key: str | None = None,
        otherwise: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None,
    ) -> None:
        self._predictor, self._max_body, self._read_seconds = predictor, max_body, read_seconds
        self._key = None if api_key is None else api_key.encode()
        self._otherwise = otherwise
        self._open: dict[Call, None] = {}
        self._ended: list[tuple[asyncio.Future[Any], Prediction | ServingError]] = []
        self._lock = threading.Lock()  # of `_ended`
        self._sweeping = False
        self._interval = max(0.005, predictor.options.slo / 5)
        self._routes: dict[str, tuple[str, Callable[[Scope, Receive, float], Awaitable[Answer]]]] = {
            "/predict": ("POST", self._predict),
            "/feedback": ("POST", self._feedback),
            "/metrics": ("GET", self._metrics),
            "/health": ("GET", self._health),
            "/status": ("GET", self._page),
            "/status.json": ("GET", self._status),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; errors become answers with their status."""
        if self._otherwise is not None and scope.get("path") not in self._routes:
            await self._otherwise(scope, receive, send)
            return
        unread = WHOLE_BODY not in scope

        async def receive_part() -> MutableMapping[str, Any]:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        try:
            status, kind, body = await self._answer(scope, receive_part, time.monotonic())
        except ServingError as error:
            status, kind, body = error.status, JSON, json.dumps({"error": f"{error}"}).encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if kind == _HTML:
            headers.append((b"content-security-policy", _POLICY))
        if status in _CLOSING:
            headers.append((b"connection", b"close"))
        discards = unread and status in _CLOSING
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": discards})
        if discards:
            # The kernel answers bytes that nobody has read with a reset, by which the client loses the answer.
            scope[REFUSED] = True
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_discard(receive), self._read_seconds)
            await send({"type": "http.response.body", "body": b""})

    async def _answer(self, scope: Scope, receive: Receive, arrived: float) -> Answer:
        if not self._allowed(scope):
            raise RequestError("the header X-API-Key is missing or wrong", status=401)
        path = scope["path"]
        if path not in self._routes:
            raise RequestError(f"there is no {path}", status=404)
        method, handler = self._routes[path]
        if scope["method"] != method:
            raise RequestError(f"use {method} for {path}", status=405)
        return await handler(scope, receive, arrived)

    def _allowed(self, scope: Scope) -> bool:
        return self._key is None or hmac.compare_digest(_header(scope, b"x-api-key"), self._key)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length, whole = _header(scope, b"content-length"), scope.get(WHOLE_BODY)
        if (length.isdigit() and int(length) > self._max_body) or (whole is not None and len(whole) > self._max_body):
            raise self._too_large()
        if whole is not None:
            return bytes(whole)
        try:
            return await asyncio.wait_for(self._received(receive), self._read_seconds)
        except asyncio.TimeoutError:
            raise RequestError(f"the body did not arrive in {self._read_seconds:g} s", status=408) from None

    async def _received(self, receive: Receive) -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError("the client has left", status=400)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(parts)

    def _too_large(self) -> RequestError:
        return RequestError(f"the body is larger than {self._max_body} bytes", status=413)

    # Routes

    async def _predict(self, scope: Scope, receive: Receive, arrived: float) -> Answer:
        try:
            kind = _kind(scope)
            body = await self._body(scope, receive)
            if kind not in (JSON, NPY):
                raise RequestError(f"the content type has to be {JSON} or {NPY}", status=415)
            known = self._recall(kind, scope, body, arrived) if _ATTEMPT not in scope else None
            if known is not None:
                return 200, JSON, known
            x, context = await self._input(kind, scope, body)
        except ServingError as error:  # the predictor counts those requests that reach it
            self._predictor.metrics.request(error.status, time.monotonic() - arrived)
            raise
        prediction = await self._predicted(x, context, arrived, *scope.get(_ATTEMPT, (None, None)))
        return 200, JSON, _answer_text(prediction, output_text(prediction.output))

    async def _input(self, kind: str, scope: Scope, body: bytes) -> tuple[Any, Any]:
        """Return the input and the context of a request."""
        parse: Callable[[bytes], Any] = parse_npy if kind == NPY else parse_json
        request = await asyncio.to_thread(parse, body) if len(body) > _LARGE else parse(body)
        if kind == NPY:
            return request, self._query_context(scope)
        field = self._predictor.options.context
        unknown = sorted(map(str, set(request) - {"input", field}))
        if unknown:
            names = ["input", field] if field else ["input"]
            near = difflib.get_close_matches(unknown[0], names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"a request has {', '.join(map(repr, names))}"
            raise InputError(f"unknown field {unknown[0]!r}; {hint}")
        if "input" not in request:
            raise InputError("the request needs 'input'")
        return request["input"], request.get(field) if field else None

    def _query_context(self, scope: Scope) -> str | None:
        """Return the context in the address, where those of arrays are."""
        query = scope.get("query_string", b"")
        return parse_qs(query.decode("latin1")).get(self._predictor.options.context or "", [None])[0] if query else None

    def answer_known(self, scope: Scope, body: bytes) -> bytes | None:
        """Answer a request from the cache, if it is equal byte by byte to an earlier one, without reading its input.

        Args:
            scope: the request.
            body: its whole body, with which the application is called if there is no answer.

        Returns:
            The body of the answer, which has status 200 and JSON; None if the answer is not in the cache.
        """
        kind = _kind(scope)
        scope[WHOLE_BODY] = body
        if (
            (scope["method"], scope["path"]) != ("POST", "/predict")
            or kind not in (JSON, NPY)
            or len(body) > self._max_body
            or not self._allowed(scope)
        ):
            return None
        return self._recall(kind, scope, body, time.monotonic())

    def _recall(self, kind: str, scope: Scope, body: bytes, arrived: float) -> bytes | None:
        """Return the answer to a known request; or note its digest, and the models that were chosen for it."""
        if not self._predictor.options.cache_bytes or len(body) > _LARGE:
            return None
        digest = hashlib.blake2b(repr((kind, self._query_context(scope))).encode(), digest_size=32)
        digest.update(body)
        found = self._predictor.recall(digest.digest(), output_text, arrived)
        if isinstance(found, Recalled):
            return _answer_text(found.prediction, found.output)
        scope[_ATTEMPT] = digest.digest(), found
        return None

    async def _predicted(
        self, x: Any, context: str | None, arrived: float, body: bytes | None, choice: Choice | None
    ) -> Prediction:
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

    async def _feedback(self, scope: Scope, receive: Receive, arrived: float) -> Answer:
        try:
            if _kind(scope) != JSON:
                raise RequestError(f"the content type has to be {JSON}", status=415)
            request = parse_json(await self._body(scope, receive))
            if set(request) != {"id", "y"}:
                raise InputError("feedback needs 'id' and 'y', and nothing else")
        except ServingError as error:  # likewise
            self._predictor.metrics.feedback(error.status)
            raise
        self._predictor.feedback(request["id"], request["y"])
        return 200, JSON, b"{}"

    async def _metrics(self, scope: Scope, receive: Receive, arrived: float) -> Answer:
        return 200, _TEXT, self._predictor.prometheus().encode()

    async def _health(self, scope: Scope, receive: Receive, arrived: float) -> Answer:
        models = {name: each["ready"] for name, each in self._predictor.status()["models"].items()}
        return 200 if all(models.values()) else 503, JSON, json.dumps({"ready": models}).encode()

    async def _status(self, scope: Scope, receive: Receive, arrived: float) -> Answer:
        state = self._predictor.status() | {"history": self._predictor.metrics.history()}
        return 200, JSON, json.dumps(state).encode()

    async def _page(self, scope: Scope, receive: Receive, arrived: float) -> Answer:
        return 200, _HTML, PAGE.read_bytes()


async def _discard(receive: Receive) -> None:
    more = True
    while more:
        more = (await receive()).get("more_body", False)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for each, value in scope["headers"] if each == name), b"")


def _kind(scope: Scope) -> str:
    """Return the content type; pages of other origins cannot send these without asking, unlike forms and text."""
    return _header(scope, b"content-type").split(b";")[0].strip().lower().decode("latin1")


# Bodies of requests and answers: JSON, and numpy's file format for large inputs


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object in a body.

    Raises:
        InputError: if it is no JSON object.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request body is not valid JSON: {error}", status=400) from None
    if not isinstance(found, dict):
        raise InputError(f"the body has to be a JSON object, not {type(found).__name__}", status=400)
    return found


def parse_npy(body: bytes) -> np.ndarray[Any, Any]:
    """Return the array in a body of `numpy.save`, without copying it; its head has to fit its length.

    Raises:
        InputError: if it is no such file, or has objects.
    """
    try:
        file = io.BytesIO(body)
        version_1 = npy_format.read_magic(file) == (1, 0)
        read_head = npy_format.read_array_header_1_0 if version_1 else npy_format.read_array_header_2_0
        shape, fortran, dtype = read_head(file)  # of at most 10,000 bytes
        start = file.tell()
        if dtype.hasobject or dtype.names is not None or not all(type(each) is int and each >= 0 for each in shape):
            raise ValueError("it has other values than numbers")
        if math.prod(shape) * dtype.itemsize != len(body) - start:
            raise ValueError(f"shape {shape} of {dtype.name} does not fit its length")
        flat = np.frombuffer(body, dtype, offset=start) if len(body) > start else np.empty(0, dtype)
        array = flat.reshape(shape, order="F" if fortran else "C")
    except Exception as error:  # of any kind: the body may have any content
        raise InputError(f"the body is no file of numpy.save: {error}", status=400) from None
    return array.astype(dtype.newbyteorder("="), copy=False)


def dump_npy(x: np.ndarray[Any, Any]) -> bytes:
    """Return an array as a body that `parse_npy` reads."""
    file = io.BytesIO()
    np.save(file, x, allow_pickle=False)
    return file.getvalue()


def output_text(output: np.ndarray[Any, Any]) -> bytes:
    """Return an output as JSON; numbers that are not finite, such as log-probabilities, become null."""
    try:
        return _ENCODER.encode(output.tolist()).encode()
    except ValueError:  # a number is not finite
        replaced = output.astype(object)
        replaced[~np.isfinite(output)] = None
        return _ENCODER.encode(replaced.tolist()).encode()


def _answer_text(prediction: Prediction, output: bytes) -> bytes:
    """Return the body of an answer, with an output as JSON."""
    end = _end_of_answer(prediction.label, prediction.model, prediction.confidence, prediction.models)
    return b"".join((b'{"id": "', prediction.id.encode(), b'", "output": ', output, end))


@lru_cache(maxsize=1024)
def _end_of_answer(label: int | None, model: str, confidence: float, models: tuple[str, ...]) -> bytes:
    values = {"label": label, "model": model, "confidence": confidence, "models": models}
    return b", " + _ENCODER.encode(values)[1:].encode()
