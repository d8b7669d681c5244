"""Program that starts the processes of models by fork, with torch already imported, and ends them.

It talks to the server over the socket that is its standard input, one JSON object a line: ``{"start": {...}}`` with the
socket of the new process attached is answered by ``{"pid": n}``; ``{"kill": n}`` by ``{"killed": n}``. When the server
ends, so do the launcher and all processes that it has started.
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

_LONGEST = 1 << 20
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


def main() -> None:
    """Serve the socket that is standard input until it is closed."""
    import torch

    torch.set_num_threads(1)  # threads would not survive a fork
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a model's process must not keep the socket open
    os.close(nothing)
    children: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(children))
    while True:
        content, descriptors, _, _ = socket.recv_fds(control, _LONGEST, 1)
        while content and not content.endswith(b"\n"):
            content += control.recv(_LONGEST)
        if not content:
            break
        request = json.loads(content)
        if "start" in request:
            pid = _start(control, descriptors[0], request["start"], children)
            control.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        else:
            _kill(request["kill"], children)
            control.sendall(json.dumps({"killed": request["kill"]}).encode() + b"\n")
    for pid in list(children):
        _kill(pid, children)


def _start(control: socket.socket, descriptor: int, description: dict[str, Any], children: set[int]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # the set has the process before its end is seen
    pid = os.fork()
    if pid:
        children.add(pid)
        os.close(descriptor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        return pid
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        control.close()
        _die_with_parent()
        from .worker import serve

        serve(socket.socket(fileno=descriptor), description)
        status = 0
    except BaseException as error:  # no exit handlers of the launcher's libraries
        print(f"dadplug.serving: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.discard(pid)


def _kill(pid: int, children: set[int]) -> None:
    """End a process, if it is one that this launcher has started and not reaped."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    if pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        children.discard(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
