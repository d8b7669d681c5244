"""Launch of several sites on this machine, each a process of the same program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .cores import available_cores
from .exchange.handshake import free_port

_GRACE = 20.0  # seconds for the other sites to exit after one has failed


def launch_sites(arguments: Sequence[str], num_sites: int, port: int | None = None) -> int:
    """Run a Python program once for each site, with torchrun's environment variables, and wait for all.

    The processor's cores are divided among the sites. If one site fails, the others have 20 seconds to exit with their
    own message. Ctrl-C and SIGTERM stop all sites.

    Args:
        arguments: program and its arguments, as after ``python``.
        num_sites: number of sites.
        port: loopback port of the rendezvous; a free port if None.

    Returns:
        0 if all sites have succeeded, else the exit status of the first that has not.
    """
    port = free_port() if port is None else port
    threads = max(1, available_cores() // num_sites)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _sigterm_as_exit():
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
def _sigterm_as_exit() -> Iterator[None]:
    """Convert SIGTERM to SystemExit in a context, so that the launched sites are stopped, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    deadline: float | None = None
    status = 0
    while any(process.poll() is None for process in processes):
        failed = [process.returncode for process in processes if process.poll()]
        if failed and deadline is None:
            status, deadline = failed[0], time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            break
        try:
            time.sleep(0.05)
        except KeyboardInterrupt:
            for process in processes:  # they got it too, unless they are in another group
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + _GRACE
    return status or next((process.returncode for process in processes if process.returncode), 0)
