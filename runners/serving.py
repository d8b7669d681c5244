"""Serving over HTTP: `dadplug.serve`, and the client of its server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dadplug.serving import ServingOptions

from ._serving.client import PredictionClient

__all__ = ["PredictionClient", "PredictionServer", "serve"]


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
        from ._serving import lit_server

        ServingOptions(**options)
        if not models:
            raise ValueError("there is no model to serve")
        self._server = lit_server.build(models, options, max_body, read_seconds, max_connections)

    def run(
        self,
        port: int = 8000,
        host: str = "127.0.0.1",
        log_level: str = "warning",
        ready: Callable[[], object] | None = None,
    ) -> None:
        """Serve until Ctrl-C or SIGTERM.

        Args:
            port: the port, from 1024 to 65535.
            host: ``"127.0.0.1"`` for this machine only, ``"0.0.0.0"`` or ``"::"`` for all networks.
            log_level: level of the HTTP server's log.
            ready: called once all models are loaded and the server answers, in the process of the HTTP server.

        Raises:
            LoadError: if a model cannot be loaded.
            ValueError: if the port or the host is not valid.
        """
        from ._serving import lit_server

        lit_server.run(self._server, host, port, log_level, ready)


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
