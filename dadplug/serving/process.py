"""Backend in a process of its own, and the launcher that starts such processes."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

from ..errors import BackendFailedError, InputError, LoadError, ModelError
from ..logs import get_logger
from . import frames
from .backends import Array
from .last_good import LastGood
from .model import Model
from .schema import Schema

_log = get_logger("dadplug.serving")
_PROGRAM = "import sys; sys.path[:] = {path!r}; from dadplug.serving.launcher import main; main()"
_START_SECONDS = 120.0  # for the launcher to import torch
INSIDE = "DADPLUG_SERVING_MODEL"  # set in the environment of models' processes


class Launcher:
    """The program `launcher.py`, started when it is first needed and shared by all models of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process that started it: a fork needs a launcher of its own

    def start(self, description: dict[str, Any]) -> tuple[socket.socket, int]:
        """Start the process of a model.

        Returns:
            The connection to it, and its process id.

        Raises:
            LoadError: if no process can be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                return ours, int(self._ask({"start": description}, [theirs.fileno()])["pid"])
        except (OSError, ValueError) as error:
            ours.close()
            raise LoadError(f"no process can be started: {error}") from error

    def kill(self, pid: int) -> None:
        """End the process of a model."""
        with contextlib.suppress(OSError, ValueError):
            self._ask({"kill": pid}, [], restart=False)

    def close(self) -> None:
        """End the launcher and all processes that it has started."""
        with self._lock:
            self._drop()

    def _ask(self, request: dict[str, Any], descriptors: list[int], restart: bool = True) -> dict[str, Any]:
        with self._lock:
            if self._owner != os.getpid():
                self._control = self._process = None
            if self._control is None:
                if not restart:
                    return {}  # its processes have ended with it
                self._begin()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [json.dumps(request).encode() + b"\n"], descriptors)
                answer = self._control.recv(1000)
                if not answer:
                    raise OSError("the launcher of models has ended")
            except OSError:
                self._drop()
                raise
        return dict(json.loads(answer))

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_SECONDS)
        with theirs:
            program = _PROGRAM.format(path=[path or os.getcwd() for path in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=theirs.fileno(),
                env={**os.environ, INSIDE: "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the server, which ends them
            )
        self._control, self._owner = ours, os.getpid()

    def _drop(self) -> None:
        if self._owner != os.getpid():
            return
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None


LAUNCHER = Launcher()
atexit.register(LAUNCHER.close)


class ProcessBackend:
    """A model in a process of its own; see `Backend`.

    Args:
        model: description of the model.
        hang_seconds: time without an answer after which `run` gives up.
        load_seconds: time limit of `start`.
        threads: threads of the process.
    """

    def __init__(self, model: Model, hang_seconds: float, load_seconds: float, threads: int) -> None:
        if INSIDE in os.environ:
            raise LoadError(
                "a model's process serves models itself: put the part of the builder's file that serves under "
                '`if __name__ == "__main__":`'
            )
        self.schema: Schema | None = None
        self.pid: int | None = None
        self.last_good = False
        self._model, self._threads = model, threads
        self._kept = LastGood(model.path)
        self._hang_seconds, self._load_seconds = hang_seconds, load_seconds
        self._connection: socket.socket | None = None

    def start(self) -> None:
        """Start the process and load the model, or the copy of it that was loaded last; see `Backend.start`."""
        self._end_process()
        stamp = self._kept.stamp()
        try:
            self._load(self._model)
        except LoadError as error:
            if self._kept.copy is None:
                raise
            self._load(replace(self._model, path=self._kept.copy))
            self.last_good = True
            _log.error("%s; its last good version is served, until the file is replaced", error)
        else:
            self.last_good = False
            self._kept.keep(stamp)

    def _load(self, model: Model) -> None:
        description = model.description() | {"threads": self._threads}
        self._connection, self.pid = LAUNCHER.start(description)
        self._connection.settimeout(self._load_seconds)
        try:
            head, _ = frames.receive(self._connection)
        except (OSError, EOFError, ValueError) as error:
            self._end_process()
            raise LoadError(f"{model.path}: its process ended or did not answer: {error}") from error
        if "error" in head:
            self._end_process()
            raise LoadError(f"{model.path}: {head['error']}")
        shape = head["input_shape"]
        self.schema = Schema(None if shape is None else tuple(shape), head["input_dtype"])
        self._connection.settimeout(self._hang_seconds)

    def run(self, batch: Array) -> Array:
        """Return the outputs of a batch; see `Backend.run`."""
        if self._connection is None:
            raise BackendFailedError("its process has not been started")
        try:
            frames.send(self._connection, {}, batch)
            head, outputs = frames.receive(self._connection)
        except TimeoutError as error:
            raise BackendFailedError(f"process {self.pid} gave no answer for {self._hang_seconds:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            raise BackendFailedError(f"process {self.pid} has ended") from error
        if "error" in head:
            raise (InputError if head["input"] else ModelError)(head["error"])
        if outputs is None or len(outputs) != len(batch):
            raise BackendFailedError(f"process {self.pid} sent an answer of another size")
        return outputs

    def stop(self) -> None:
        """End the process, and forget the copy of the file."""
        self._end_process()
        self._kept.close()

    def _end_process(self) -> None:
        connection, pid, self._connection, self.pid = self._connection, self.pid, None, None
        if connection is not None:
            connection.close()
        if pid is not None:
            LAUNCHER.kill(pid)
