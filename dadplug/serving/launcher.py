"""Program that starts the processes of models by fork, with torch already imported, and ends them.

It talks to the server over the socket that is its standard input, one JSON object a line: ``{"start": {...}}`` with the
socket of the new process attached is answered by ``{"pid": n}``; ``{"kill": n}`` by ``{"killed": n}``. The server asks
to kill each process that it has started, also one that has ended: its number is not used again before. When the
server ends, so do the launcher and all processes that it has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any

from ..errors import InputError, ModelError
from .backends import checked_outputs, reader_of, receive, send

_LONGEST = 1 << 20
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


def main() -> None:
    """Serve the socket that is standard input until it is closed."""
    import torch

    from . import loading  # noqa: F401  # processes of models have it then

    torch.set_num_threads(1)  # threads would not survive a fork
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a model's process must not keep the socket open
    os.close(nothing)
    children: set[int] = set()
    while True:
        content, descriptors, _, _ = socket.recv_fds(control, _LONGEST, 1)
        while content and not content.endswith(b"\n"):
            content += control.recv(_LONGEST)
        if not content:
            break
        request = json.loads(content)
        if "start" in request:
            pid = os.fork()
            if not pid:
                control.close()
                _become_model(descriptors[0], request["start"])
            children.add(pid)
            os.close(descriptors[0])
            answer = {"pid": pid}
        else:
            if request["kill"] in children:
                _kill(request["kill"])
                children.remove(request["kill"])
            answer = {"killed": request["kill"]}
        control.sendall(json.dumps(answer).encode() + b"\n")
    for pid in children:
        _kill(pid)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _become_model(descriptor: int, description: dict[str, Any]) -> None:
    """Serve a model in this process, and end it."""
    status = 1
    try:
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        serve(socket.socket(fileno=descriptor), description)
        status = 0
    except BaseException as error:  # no exit handlers of the launcher's libraries
        print(f"dadplug.serving: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def serve(connection: socket.socket, description: dict[str, Any]) -> None:
    """Load a model, and answer batches until the connection is closed.

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
        send(connection, {"error": text})
        return
    send(connection, {"input_shape": loaded.schema.shape, "input_dtype": loaded.schema.dtype})
    reader = reader_of(connection)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            _, batch = receive(reader)
            assert batch is not None
            try:
                outputs = checked_outputs(loaded.run, batch)
            except (InputError, ModelError) as error:
                send(connection, {"error": f"{error}"[:2000], "input": isinstance(error, InputError)})
            else:
                send(connection, {}, outputs)
