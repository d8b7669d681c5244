"""Processes of this machine: sites that are copies of a program, and children that call functions.

`launch_sites` starts programs with torchrun's environment. A `Child` is a process with a pipe, whose end is noticed and
has a reason.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from .logs import get_logger
from .schedules import available_cores

_log = get_logger(__name__)
_GRACE = 20.0  # seconds for the others to exit or return after one has failed


def free_port() -> int:
    """Return a TCP port of this machine that is free at the moment.

    It is below those that systems give to outgoing connections (from 32768 on): one of these could take the port before
    the process that it is meant for has started.
    """
    chance = random.SystemRandom()  # not the numbers of another process with the same seed
    while True:
        port = chance.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def launch_sites(arguments: Sequence[str], num_sites: int, port: int | None = None) -> int:
    """Run a Python program once for each site, with torchrun's environment variables, and wait for all.

    The processor's cores are divided among the sites. If one site fails, the others have 20 seconds to exit with their
    own message. Ctrl-C and SIGTERM stop all sites.

    Args:
        arguments: program and its arguments, as after ``python``.
        num_sites: number of sites.
        port: loopback port of the rendezvous; a free port if None.

    Returns:
        0 if all sites have succeeded, else the exit status of the first that has not; 128 and its number for a signal.
    """
    port = free_port() if port is None else port
    threads = max(1, available_cores() // num_sites)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with handling(lambda *_: sys.exit(128 + signal.SIGTERM), signal.SIGTERM):  # so that the sites end, too
            for rank in range(num_sites):
                environment = os.environ | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(num_sites),
                    "WORLD_SIZE": str(num_sites),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
                }
                processes.append(subprocess.Popen([sys.executable, *arguments], env=environment))
            return _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def handling(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle signals by a function in a context; in another thread than the main one, which may not, do nothing.

    Args:
        handler: the handler, as `signal.signal` takes it.
        numbers: the signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    deadline: float | None = None
    status = 0
    while True:
        running = [process for process in processes if process.poll() is None]  # all of them are asked
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        if failed and deadline is None:
            status, deadline = processes[failed[0]].returncode, time.monotonic() + _GRACE
            if status < 0:  # a site that is killed writes nothing, and others may not have met it yet
                cause = f"signal {-status} ({signal.strsignal(-status)})"
                then = f"; the others have {_GRACE:.0f} s to exit" if running else ""
                _log.error("site %d was ended by %s%s", failed[0], cause, then)
        if not running or (deadline is not None and time.monotonic() > deadline):
            status = status or next((processes[rank].returncode for rank in failed), 0)  # after an interruption
            return status if status >= 0 else 128 - status
        try:
            time.sleep(0.05)
        except KeyboardInterrupt:
            for process in processes:  # they got it too, unless they are in another group
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + _GRACE


class Child:
    """Process of this machine, with a pipe.

    Args:
        target: function that the process runs, at the top level of a module; its end of the pipe is the first argument.
        arguments: further arguments.
        method: how the process is started: "spawn", "fork" or "forkserver".

    Attributes:
        pipe: this end of the pipe.
        process: the process, of `multiprocessing`.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any, method: str = "spawn") -> None:
        context: Any = multiprocessing.get_context(method)
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    def receive(self) -> tuple[Any, str]:
        """Wait for what `answer` sends; return the result, and the error, which is empty without one."""
        try:
            result, error = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return None, f"it has ended with status {self.process.exitcode}"
        return result, error

    def end(self, seconds: float = 0.5) -> None:
        """Close the pipe, and kill the process if it does not exit within some seconds. May be called twice."""
        self.pipe.close()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def answer(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a child, and send its result or its error.

    Args:
        pipe: the child's end of the pipe.
        function: the function.
        arguments: its arguments.

    Raises:
        OSError: if the other end is closed.
    """
    try:
        outcome = function(*arguments), ""
    except Exception as error:
        outcome = None, f"{type(error).__name__}: {error}"
    pipe.send(outcome)
