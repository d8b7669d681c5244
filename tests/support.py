"""Sites for tests: processes on loopback, each with a place in one process group, kept for many tests.

A test hands over a function of its module; every site runs it and returns its result:

    def trains(mode): ...             # runs on each site, asserts there, returns what pickles

    def test_trains(sites):
        first, second = sites(2).run(trains, "dad")
"""

from __future__ import annotations

import atexit
import importlib.util
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

START_TIMEOUT = 90.0  # seconds
CALL_TIMEOUT = 120.0


def free_port() -> int:
    """Finds a port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def valid_modes() -> str:
    """The modes as messages list them."""
    from dadplug.methods import method_names

    return ", ".join(map(repr, method_names()))


def load(path: str) -> ModuleType:
    """Imports a test module by its path, once."""
    name = f"loaded_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _site(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    import dadplug

    torch.set_num_threads(1)
    dadplug.connect(timeout=60)
    pipe.send(("ready", None))
    while (call := pipe.recv()) is not None:
        path, name, args = call
        try:
            pipe.send(("ok", getattr(load(path), name)(*args)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


class Sites:
    """A group of processes that run functions together."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._processes, self._pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_site, args=(theirs, rank, world_size, port))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect(START_TIMEOUT)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Any, *args: Any, timeout: float = CALL_TIMEOUT) -> list[Any]:
        """Runs a module-level function on every site; returns the results by rank, or fails the test."""
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__name__, args))
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results, problems = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.1, deadline - time.monotonic()) if not problems else 5.0):
                    problems.append(f"site {rank} gave no answer in time")
                    continue
                kind, value = pipe.recv()
            except EOFError:
                problems.append(f"site {rank} ended")
                continue
            if kind == "failed":
                problems.append(f"site {rank}:\n{value}")
            results.append(value)
        if problems:
            self.close()
            pytest.fail("\n".join(problems), pytrace=False)
        return results

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            process.kill()
            process.join()


_groups: dict[int, Sites] = {}
atexit.register(lambda: close_all())


def sites(world_size: int) -> Sites:
    """Returns the group of this size, started when first asked for."""
    if world_size not in _groups or not _groups[world_size].alive:
        _groups[world_size] = Sites(world_size)
    return _groups[world_size]


def close_all() -> None:
    """Ends all groups."""
    while _groups:
        _groups.popitem()[1].close()


class Finished:
    """A program that has ended."""

    def __init__(self, process: subprocess.Popen[str], output: str, errors: str) -> None:
        self.status = process.returncode
        self.output = output
        self.errors = errors


def run_programs(
    commands: Sequence[Sequence[str]],
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
    folder: Path | None = None,
) -> list[Finished]:
    """Runs programs side by side and waits for all; those that take too long are killed, and the test fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | (env or {})
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    deadline = time.monotonic() + timeout
    finished, late = [], []
    for number, process in enumerate(processes):
        try:
            output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            late.append(f"program {number} did not end within {timeout:g} s:\n{output}\n{errors}")
        finished.append(Finished(process, output, errors))
    if late:
        pytest.fail("\n".join(late), pytrace=False)
    return finished


def site_scripts(code: str, tmp_path: Path, world_size: int = 2, port: int | None = None) -> list[list[str]]:
    """Writes a script that joins the sites as RANK before `code` runs; returns a command for each site."""
    port = free_port() if port is None else port
    script = tmp_path / "site.py"
    head = (
        "import sys, torch, dadplug\nfrom torch import nn\nrank = int(sys.argv[1])\ntorch.set_num_threads(1)\n"
        f"dadplug.connect(rank, {world_size}, 'tcp://127.0.0.1:{port}', timeout=60)\n"
    )
    script.write_text(head + textwrap.dedent(code))
    return [[str(script), str(rank)] for rank in range(world_size)]
