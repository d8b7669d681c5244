"""Backends: what computes the batches of a model, in this process or in a process of its own.

Processes of models are started by fork from a program that has torch imported (`loading.main`): the launchers of
`multiprocessing` would run the user's main module again in each of them.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BackendFailedError, InputError, LoadError, ModelError
from ..support.logs import get_logger
from .options import Model, Schema, ServingOptions

Array = np.ndarray[Any, Any]
Stamp = tuple[int, int, int] | None

_log = get_logger("dadplug.serving")
_PROGRAM = "import sys; sys.path[:] = {path!r}; from dadplug.serving.loading import main; main()"
_START_SECONDS = 120.0  # for the launcher to import torch
_INSIDE = "DADPLUG_SERVING_MODEL"  # set in the environment of models' processes
_SIZES = struct.Struct("<IQ")  # of the head and of the array of a message
_LARGEST_HEAD = 1 << 20
_AT_ONCE = 1 << 16


class Backend:
    """Base of what computes the batches of one model.

    Attributes:
        schema: schema of its inputs, as far as it is known.
        pid: its process; None without one.
        last_good: whether it computes with a copy of the file that was loaded before, since the file is damaged.
        module: a module that the program may change; None where only another version has other outputs.
    """

    schema = Schema()
    pid: int | None = None
    last_good = False
    module: Any = None

    def start(self) -> None:
        """Load the model, or load it again after a failure.

        Raises:
            LoadError: if it cannot be loaded.
        """

    def run(self, batch: Array) -> Array:
        """Return the outputs of a batch, of shape (samples, ...).

        Raises:
            ModelError: if the model raises an error or returns something else; the backend can be used on.
            InputError: if the model finds an input not valid; likewise.
            BackendFailedError: if the process has ended or hangs.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """End the backend."""


class ObjectBackend(Backend):
    """Model given as an object, which belongs to the caller: it runs in this process, in the thread of its queue.

    A module may be trained meanwhile: it answers in evaluation mode by its present weights, and stays as it is.

    Args:
        model: a `torch.nn.Module`, or a function of an array of shape (samples, ...) that returns one of shape
            (samples, ...), the same for the same input.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        if hasattr(model, "state_dict"):
            self.schema, self.module = Schema(None, dtype_of(model)), model

    def run(self, batch: Array) -> Array:
        """Return the outputs of a batch; see `Backend.run`."""
        return checked_outputs(self._model if self.module is None else runner_of(evaluated(self.module, {})), batch)


def evaluated(item: Any, known: dict[int, Any]) -> Any:
    """Return a copy of a module in evaluation mode, with the same tensors, for one call.

    Switching the module itself would change the mode of a forward pass in another thread.

    Args:
        item: the module, or the value of an attribute: modules in lists and dictionaries are copied, too.
        known: copies of modules, by `id`.
    """
    import torch

    kind = type(item)
    if kind in (list, tuple):
        return kind(evaluated(each, known) for each in item)
    if kind is dict:
        return {name: evaluated(each, known) for name, each in item.items()}
    if not isinstance(item, torch.nn.Module):
        return item
    if id(item) not in known:
        if isinstance(item, torch.jit.ScriptModule):
            return known.setdefault(id(item), copy.deepcopy(item).eval())
        item = getattr(item, "_orig_mod", item)  # without torch.compile, whose code is for the module itself
        found = known[id(item)] = object.__new__(type(item))
        vars(found).update(evaluated(vars(item), known) | {"training": False, "_compiled_call_impl": None})
    return known[id(item)]


def backend_of(model: Any, options: ServingOptions) -> Backend:
    """Return the backend of a model.

    Args:
        model: a `dadplug.serving.Model`, a module or a function.
        options: options of the predictor.

    Raises:
        LoadError: if it is none of these.
    """
    if isinstance(model, Model):
        return ProcessBackend(model, options)
    if callable(model) and not isinstance(model, type):
        return ObjectBackend(model)
    kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise LoadError(f"a model is a path, a dadplug.serving.Model, a module or a function, not {kind}")


def runner_of(module: Any, channels_last: bool = False) -> Callable[[Array], Any]:
    """Return a function of arrays that calls a `torch.nn.Module` in evaluation mode, without gradients.

    Args:
        module: the module.
        channels_last: whether inputs of four dimensions are stored with their channels last.
    """
    import torch

    if module.training:
        module.eval()

    def run(batch: Array) -> Any:
        with torch.inference_mode():
            inputs = torch.from_numpy(batch)
            if channels_last and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            return module(inputs)

    return run


def dtype_of(module: Any) -> str | None:
    """Return the dtype of a module's parameters; None if it has tables, whose inputs are integers."""
    import torch

    if any(isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) for each in module.modules()):
        return None
    found = next((each.dtype for each in module.parameters() if each.is_floating_point()), None)
    return None if found is None or found is torch.bfloat16 else str(found).removeprefix("torch.")


def checked_outputs(function: Callable[[Array], Any], batch: Array) -> Array:
    """Call a model and check its outputs.

    Raises:
        InputError: if the model raises it, since an input is not valid.
        ModelError: if it raises another error, or does not return an array with a row of numbers for each sample.
    """
    try:
        found = function(batch)
        if hasattr(found, "detach"):
            found = found.detach().cpu()
            found = found.float().numpy() if str(found.dtype) == "torch.bfloat16" else found.numpy()
    except InputError:
        raise
    except Exception as error:
        raise ModelError(f"the model raised {type(error).__name__}: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiub":
        raise ModelError(f"the model returned {type(found).__name__}, not one tensor or array of numbers")
    if found.ndim == 0 or len(found) != len(batch):
        raise ModelError(f"the model returned shape {found.shape} for {len(batch)} samples")
    return found


# Messages between the server and a model's process: a JSON head, and the bytes of one array. No pickles. The code is
# dadplug's own since a small message has to be received by one call: each call lets other threads run, which may keep
# the interpreter. Therefore a reader has a buffer.


def reader_of(connection: socket.socket) -> io.BufferedReader:
    """Return the reader of a connection, for `receive`."""
    return io.BufferedReader(socket.SocketIO(connection, "r"), _AT_ONCE)


def send(connection: socket.socket, head: dict[str, Any], array: Array | None = None) -> None:
    """Send a message.

    Args:
        connection: a stream socket.
        head: values that JSON can hold.
        array: numbers of a plain dtype.

    Raises:
        OSError: if the other end is closed, or does not read in time.
    """
    body = memoryview(b"")
    if array is not None:
        head = {**head, "shape": array.shape, "dtype": array.dtype.str}
        body = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    text = json.dumps(head).encode()
    start = _SIZES.pack(len(text), len(body)) + text
    if len(body) < _AT_ONCE:
        connection.sendall(start + body)
    else:
        connection.sendall(start)
        connection.sendall(body)


def receive(reader: io.BufferedReader) -> tuple[dict[str, Any], Array | None]:
    """Receive a message.

    Raises:
        EOFError: if the other end is closed.
        OSError: if the connection fails, or nothing arrives in time.
        ValueError: if this is no message of `send`.
    """
    size, length = _SIZES.unpack(_read(reader, _SIZES.size))
    if size > _LARGEST_HEAD:
        raise ValueError(f"the head of a message has {size} bytes")
    head, body = json.loads(_read(reader, size)), _read(reader, length)
    if "dtype" not in head:
        return head, None
    return head, np.frombuffer(body, np.dtype(head["dtype"])).reshape(head["shape"])


def _read(reader: io.BufferedReader, size: int) -> bytearray:
    """Read bytes, into a buffer of their own, so that numbers in it are aligned."""
    found = bytearray(size)
    if reader.readinto(found) < size:
        raise EOFError("the connection is closed")
    return found


class Launcher:
    """The program `loading.main`, started when it is first needed and shared by all models of this process."""

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
                env={**os.environ, _INSIDE: "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
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


class ProcessBackend(Backend):
    """A model in a process of its own; see `Backend`.

    Args:
        model: description of the model.
        options: options of the predictor.
    """

    def __init__(self, model: Model, options: ServingOptions) -> None:
        if _INSIDE in os.environ:
            raise LoadError(
                "a model's process serves models itself: put the part of the builder's file that serves under "
                '`if __name__ == "__main__":`'
            )
        self._model, self._options = model, options
        self._kept = _LastGood(Path(model.path))
        self._connection: socket.socket | None = None
        self._reader: io.BufferedReader | None = None

    def start(self) -> None:
        """Start the process and load the model, or the copy of it that was loaded last; see `Backend.start`."""
        self._end_process()
        stamp = stamp_of(Path(self._model.path))
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
        description = model.description() | {"threads": self._options.threads}
        self._connection, self.pid = LAUNCHER.start(description)
        self._connection.settimeout(self._options.load_seconds)
        self._reader = reader_of(self._connection)
        try:
            head, _ = receive(self._reader)
        except (OSError, EOFError, ValueError) as error:
            self._end_process()
            raise LoadError(f"{model.path}: its process ended or did not answer: {error}") from error
        if "error" in head:
            self._end_process()
            raise LoadError(f"{model.path}: {head['error']}")
        shape = head["input_shape"]
        self.schema = Schema(None if shape is None else tuple(shape), head["input_dtype"])
        self._connection.settimeout(self._options.hang_seconds)

    def run(self, batch: Array) -> Array:
        """Return the outputs of a batch; see `Backend.run`."""
        if self._connection is None or self._reader is None:
            raise BackendFailedError("its process has not been started")
        try:
            send(self._connection, {}, batch)
            head, outputs = receive(self._reader)
        except TimeoutError as error:
            seconds = self._options.hang_seconds
            raise BackendFailedError(f"process {self.pid} gave no answer for {seconds:g} s") from error
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


class _LastGood:
    """Copy of the file that a model was loaded from last, in a temporary folder of this user.

    It is for a process that has to be started again while the file is damaged.

    Args:
        path: the file; a folder of shards is not copied.

    Attributes:
        copy: the copy; None while there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._stamp: Stamp = None
        self.copy: Path | None = None

    def keep(self, loaded: Stamp) -> None:
        """Copy the file, which has been loaded, unless that was done or it has changed meanwhile.

        Args:
            loaded: its stamp before it was loaded.
        """
        if loaded is None or self._path.is_dir() or (self.copy is not None and loaded == self._stamp):
            return
        try:
            folder = tempfile.TemporaryDirectory(prefix="dadplug-serving-", ignore_cleanup_errors=True)
            copy = Path(folder.name, self._path.name)  # loaders go by the ending of the name
            shutil.copyfile(self._path, copy)
        except OSError as error:
            _log.warning("no copy of %s can be kept, for a restart while it is damaged: %s", self._path, error)
            return
        if stamp_of(self._path) != loaded:
            folder.cleanup()
            return
        self.close()
        self._folder, self._stamp, self.copy = folder, loaded, copy

    def close(self) -> None:
        """Remove the copy."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = self.copy = self._stamp = None


def stamp_of(path: Path) -> Stamp:
    """Return what changes when a file is replaced or written: time, size and number; None without a file."""
    try:
        found = os.stat(path / "index.json" if path.is_dir() else path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
