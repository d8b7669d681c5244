"""Client of a prediction server, for Python programs; it needs neither LitServe nor torch."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from dadplug.serving import FeedbackError, InputError, ModelError, Prediction, ServingError, UnavailableError

from . import bodies

_KINDS: dict[int, type[ServingError]] = {400: InputError, 422: InputError, 500: ModelError, 503: UnavailableError}


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
            answer = self._ask("POST", "/predict" + query, bodies.dump_npy(x), bodies.NPY)
        else:
            request = {"input": x} | ({self._field: context} if self._field and context is not None else {})
            answer = self._ask("POST", "/predict", json.dumps(request).encode(), bodies.JSON)
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
            self._ask("POST", "/feedback", json.dumps({"id": id, "y": y}).encode(), bodies.JSON)
        except ServingError as error:
            raise FeedbackError(f"{error}", status=error.status) from None

    def status(self) -> dict[str, Any]:
        """Return the state of the models, the cache and the weights, and the history of the last seconds."""
        return self._ask("GET", "/status.json", b"", bodies.JSON)

    def close(self) -> None:
        """Close the connection of this thread."""
        connection, self._local.connection = getattr(self._local, "connection", None), None
        if connection is not None:
            connection.close()

    def _ask(self, method: str, path: str, body: bytes, kind: str) -> dict[str, Any]:
        kept = getattr(self._local, "connection", None) is not None
        try:
            status, content = self._exchange(method, path, body, kind)
        except (ConnectionError, http.client.BadStatusLine):
            self.close()
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
        connection = getattr(self._local, "connection", None)
        if connection is None:
            chosen = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            assert self._parts.hostname is not None
            connection = self._local.connection = chosen(self._parts.hostname, self._parts.port, timeout=self._timeout)
        try:
            connection.request(method, path, body or None, {"Content-Type": kind, **self._headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            self.close()
            raise
