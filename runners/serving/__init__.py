"""Serving over HTTP: `dadplug.serve`, and the client of its server."""

from __future__ import annotations

import http.client
import importlib.util
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from dadplug.serving import (
    FeedbackError,
    InputError,
    ModelError,
    Prediction,
    ServingError,
    ServingOptions,
    UnavailableError,
)
from dadplug.serving.options import check_models

from .http_app import JSON, NPY, dump_npy

__all__ = ["PredictionClient", "PredictionServer", "serve"]

_KINDS: dict[int, type[ServingError]] = {400: InputError, 422: InputError, 500: ModelError, 503: UnavailableError}


class PredictionServer:
    """Server of models over HTTP, on LitServe; made by `dadplug.serve`.

    Args:
        models: as for `dadplug.serving.Predictor`.
        max_body: largest size of a request's body in bytes.
        read_seconds: time limit for receiving a head, and for receiving a body.
        max_connections: largest number of connections; a further one ends the one that has waited longest for a
            request.
        options: fields of `dadplug.serving.ServingOptions`.

    Raises:
        ImportError: if LitServe is not installed; the message names the extra.
        ValueError: if an option is wrong, or there is no model.
    """

    def __init__(
        self,
        models: Mapping[str, Any],
        *,
        max_body: int = 4 << 20,
        read_seconds: float = 10.0,
        max_connections: int = 1000,
        **options: Any,
    ) -> None:
        ServingOptions.create(**options)
        check_models(models)
        if importlib.util.find_spec("litserve") is None:
            raise ImportError("dadplug.serve needs LitServe, which is not installed: pip install 'dadplug[serve]'")
        from .lit_server import PredictorServer

        self._server = PredictorServer(models, options, max_body, read_seconds, max_connections)

    def run(
        self,
        port: int = 8000,
        host: str = "127.0.0.1",
        log_level: str = "warning",
        ready: Callable[[], object] | None = None,
        ends_process: bool = False,
    ) -> None:
        """Serve until Ctrl-C or SIGTERM.

        Args:
            port: the port, from 1024 to 65535.
            host: ``"127.0.0.1"`` for this machine only, ``"0.0.0.0"`` or ``"::"`` for all networks.
            log_level: level of the HTTP server's log.
            ready: called once all models are loaded and the server answers, in the thread of the HTTP server.
            ends_process: whether the process ends next, so that further signals stay ignored after this method.

        Raises:
            LoadError: if a model cannot be loaded.
            ValueError: if the port or the host is not valid.
        """
        self._server.serve(host, port, log_level, ready, ends_process)


def serve(models: Mapping[str, Any], **options: Any) -> PredictionServer:
    """Return a server of models over HTTP; call its `run`.

    Args:
        models: by name, each a path, a `dadplug.serving.Model`, a `torch.nn.Module` or a function of arrays.
        options: fields of `dadplug.serving.ServingOptions`, and ``max_body``, ``read_seconds`` and
            ``max_connections`` of `PredictionServer`.

    Returns:
        The server.

    Raises:
        ImportError: if LitServe is not installed; the message names the extra.
        ValueError: if an option is wrong, or there is no model.
    """
    return PredictionServer(models, **options)


class PredictionClient:
    """Client of `dadplug.serve`, with one connection that is kept for each thread.

    Args:
        url: address of the server, such as ``"http://127.0.0.1:8000"``.
        context: name of the field for contexts, as at the server; None without contexts.
        timeout: seconds to wait for an answer.
        api_key: key of the server, if it needs one.

    Raises:
        ValueError: if the address is not of http or https.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        context: str | None = None,
        timeout: float = 30.0,
        api_key: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of http or https")
        self._parts, self._field, self._timeout = parts, context, timeout
        self._headers = {} if api_key is None else {"X-API-Key": api_key}
        self._local = threading.local()

    def predict(self, x: Any, *, context: str | None = None) -> Prediction:
        """Return the answer to one input.

        Args:
            x: a tensor, an array or nested lists of numbers, without the dimension of the batch.
            context: context of the request.

        Raises:
            InputError: if the server refuses the input.
            UnavailableError: if no model has answered in time.
            ModelError: if the model raised an error.
            OSError: if the server cannot be reached.
        """
        if hasattr(x, "detach"):
            x = x.detach().cpu().numpy()
        if isinstance(x, np.ndarray):
            query = f"?{quote(self._field)}={quote(context)}" if self._field and context is not None else ""
            answer = self._ask("POST", "/predict" + query, dump_npy(x), NPY)
        else:
            request = {"input": x} | ({self._field: context} if self._field and context is not None else {})
            answer = self._ask("POST", "/predict", json.dumps(request).encode(), JSON)
        output = np.array(answer["output"], dtype=np.float64)
        return Prediction(**{**answer, "output": output, "models": tuple(answer["models"])})

    def feedback(self, id: str, y: Any) -> None:
        """Report the right answer to a prediction.

        Args:
            id: id of the prediction.
            y: the class, or the numbers for regression.

        Raises:
            FeedbackError: if the server refuses it; nothing has changed then.
            OSError: if the server cannot be reached.
        """
        y = y.tolist() if hasattr(y, "tolist") else y
        try:
            self._ask("POST", "/feedback", json.dumps({"id": id, "y": y}).encode(), JSON)
        except ServingError as error:
            raise FeedbackError(f"{error}", status=error.status) from None

    def status(self) -> dict[str, Any]:
        """Return the state of the models, the cache and the weights, and the history of the last seconds."""
        return self._ask("GET", "/status.json", b"", JSON)

    def close(self) -> None:
        """Close the connection of this thread."""
        self._connection().close()

    def _connection(self) -> http.client.HTTPConnection:
        """Return the connection of this thread, which is opened by its next request if it is closed."""
        if not hasattr(self._local, "connection"):
            chosen = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            self._local.connection = chosen(self._parts.netloc.rpartition("@")[2], timeout=self._timeout)
        connection: http.client.HTTPConnection = self._local.connection
        return connection

    def _ask(self, method: str, path: str, body: bytes, kind: str) -> dict[str, Any]:
        kept = self._connection().sock is not None
        try:
            status, content = self._exchange(method, path, body, kind)
        except (ConnectionError, http.client.BadStatusLine):
            if not kept or path == "/feedback":  # feedback may have arrived: a second time would be an error
                raise
            status, content = self._exchange(method, path, body, kind)  # the server has closed a kept connection
        try:
            answer: dict[str, Any] = json.loads(content)
        except ValueError:
            answer = {"error": content.decode("utf-8", "replace")[:200]}
        if status != 200:
            raise _KINDS.get(status, ServingError)(f"{answer.get('error', answer)}", status=status)
        return answer

    def _exchange(self, method: str, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
        connection = self._connection()
        try:
            connection.request(method, path, body or None, {"Content-Type": kind, **self._headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise
