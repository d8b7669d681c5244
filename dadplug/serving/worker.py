"""Process of one model: loads it, and answers batches until the connection is closed."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from ..errors import InputError, ModelError
from . import frames
from .backends import checked_outputs


def serve(connection: socket.socket, description: dict[str, Any]) -> None:
    """Load a model and serve it.

    Args:
        connection: connection to the server.
        description: `Model.description`, and the number of ``threads``.
    """
    import torch

    from .loading import load

    torch.set_num_threads(description["threads"])
    try:
        loaded = load(description)
    except Exception as error:
        text = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        frames.send(connection, {"error": text})
        return
    schema = loaded.schema
    frames.send(connection, {"input_shape": schema.shape, "input_dtype": schema.dtype})
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            _, batch = frames.receive(connection)
            assert batch is not None
            try:
                outputs = checked_outputs(loaded.run, batch)
            except (InputError, ModelError) as error:
                frames.send(connection, {"error": f"{error}"[:2000], "input": isinstance(error, InputError)})
            else:
                frames.send(connection, {}, outputs)
