"""A server that starts Python programs by fork, with torch, numba and dadplug already imported.

Importing them takes 3 to 6 seconds of processor time, in every process of every test that starts one. Here it is
done once: `start` asks a server for a copy of itself, which becomes the program, with arguments, environment, folder
and output of its own, and ends like any interpreter: messages of unhandled errors, threads, exit handlers, and
destructors of the program's objects. Only the destruction of the libraries' modules and of their C++ objects is left
out, which takes four fifths of the processor time of a short program; a test that is about the end of a program asks
for it.

What a program can notice: the libraries in PRELOADED and PACKAGE are in `sys.modules`; kernels that have been compiled
before are loaded; environment variables that the libraries read when imported have no effect, but for OMP_NUM_THREADS
and numba's; `sys.executable` and the interpreter of `multiprocessing`, with which it starts further sites, are a stand-
in that has the same server start them, so that `os.getppid()` is the server's there; and garbage is collected less
often. A test about the import of dadplug asks for a `bare` program. One that is about the import of another library, or
about such a variable, starts its program with `subprocess`.

`program_server` is the server. A program whose starter has gone, or closes the connection, is killed.
"""

import atexit
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PRELOADED = (
    *("numpy", "numba", "torch", "torch._dynamo", "torch.distributed"),
    *(name for name in ("torchmetrics", "tomllib") if importlib.util.find_spec(name)),  # most of Lightning; kits
)
PACKAGE = (
    "pytest",  # which helpers of tests import
    "dadplug.reduction",
    *(f"dadplug.step.methods.{name}" for name in ("powersgd", "rankdad", "topk")),  # loaded when they are asked for
    *(f"dadplug.step.reducer.{name}" for name in ("merged", "powersgd", "topk")),
    *("dadplug.step.fused.steps", "dadplug.lowrank.sparse"),
    "dadplug.lowrank.kernels",
    "dadplug.hub.connect",
    "dadplug.hub.site.runtime",
    "dadplug.hub.server.hub",
    "dadplug.adapm.kernels",
    "dadplug.adaptive",
    "dadplug.local_steps",
    "dadplug.hogwild",
    "dadplug.parameter_server.server",
    "dadplug.tools.comparison",
    "dadplug.data",
    "dadplug.models",
    "dadplug.experiment",
)
TRAINERS = ("catalyst", "pytorch_lightning")
_LIBRARIES = ("catalyst.dl", "pytorch_lightning", "sklearn.datasets")  # of programs with a trainer
_STRATEGIES = ("strategies", "adapm", "hogwild")  # imported when they are asked for
_RUNNERS = (
    *("dadplug.runners.catalyst", "dadplug.runners.pytorch_lightning"),
    *(f"dadplug.runners._lightning.{name}" for name in _STRATEGIES),
)
_START_TIMEOUT = 240.0
_SHARED = "DADPLUG_TEST_SERVERS"  # environment variable: the folder of the servers that processes of pytest share
LONGEST = 1 << 20  # bytes of a request
MOST_DESCRIPTORS = 100  # of a request
STAND_IN = "-python"  # after the address of a server: the interpreter of its programs
_SERVER = str(Path(__file__).with_name("program_server.py"))


class Program:
    """A started program, with the part of `subprocess.Popen` that tests need; its output goes to files."""

    def __init__(self, connection: socket.socket, output: Any, errors: Any) -> None:
        self._connection, self._output, self._errors = connection, output, errors
        self.returncode: int | None = None
        self.pid = int(self._report(None))

    def _report(self, timeout: float | None) -> str:
        self._connection.settimeout(timeout)
        report = self._connection.recv(100).decode()
        if not report:
            raise RuntimeError("the server that starts programs has ended")
        return report

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the status, negative for a signal.

        Raises:
            TimeoutError: if it takes too long; says where the threads of the program are.
        """
        if self.returncode is None:
            try:
                self.returncode = int(self._report(timeout))
            except TimeoutError:
                self.send_signal(signal.SIGQUIT)  # which prints the stacks
                time.sleep(1.0)
                told = self.read()[1][-6000:]
                raise TimeoutError(f"process {self.pid} has not ended in {timeout} s:\n{told}") from None
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the status, or None while the program runs."""
        with contextlib.suppress(TimeoutError, BlockingIOError):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int, group: bool = False) -> None:
        """Send a signal to the program, or to its group of processes, which it leads."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
                (os.killpg if group else os.kill)(self.pid, number)

    def kill(self) -> None:
        """End the program and all processes of its group."""
        self.send_signal(signal.SIGKILL, group=True)

    def read(self) -> tuple[str, str]:
        """Return what has been printed so far to standard output and to standard error."""
        return _content(self._output), _content(self._errors)


def _content(file: Any) -> str:
    file.flush()
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def start(
    command: Sequence[str],
    env: dict[str, str] | None = None,
    folder: Path | None = None,
    preload: Sequence[str] = (),
    inherit: Sequence[int] = (),
    destructors: bool = False,
    bare: bool = False,
    kept: bool = False,
) -> Program:
    """Start a program, as the leader of a session of its own.

    Args:
        command: a script, or ``-m`` and a module, or ``-c`` and code; then arguments.
        env: all environment variables; those of this process by default.
        folder: where it runs; here by default.
        preload: libraries to import in the server, besides PRELOADED and PACKAGE; each of TRAINERS stands for both,
            and what they need.
        inherit: open file descriptors for the program; it finds their numbers there in INHERITED, comma-separated.
        destructors: whether the libraries' modules and C++ objects are destroyed at the end of the process.
        bare: whether dadplug is left for the program to import.
        kept: whether the program goes on without its starter, who cannot wait for it.
    """
    argv = [str(part) for part in command]
    request: dict[str, Any] = {"argv": argv, "env": dict(env or os.environ), "cwd": str(folder or Path.cwd())}
    request |= {"destructors": destructors, "kept": kept}
    output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (they outlive this call)
    with open(os.devnull, "rb") as nothing:
        descriptors = [nothing.fileno(), output.fileno(), errors.fileno(), *inherit]
        return Program(_ask(_address(_modules(preload, bare)), request, descriptors), output, errors)


def interpreter(preload: Sequence[str] = ()) -> str:
    """Return a stand-in for the interpreter, whose programs have dadplug; for code that starts `sys.executable`.

    Args:
        preload: further libraries, as for `start`.
    """
    return _address(_modules(preload, bare=False)) + STAND_IN


def _modules(preload: Sequence[str], bare: bool) -> tuple[str, ...]:
    """Return what the server of a program imports; one server has all trainers, since each costs seconds to start."""
    if bare:
        return tuple(preload)
    others = [name for name in preload if name not in TRAINERS]
    if len(others) < len(preload) and all(importlib.util.find_spec(name) for name in TRAINERS):
        return (*_LIBRARIES, *others, *PACKAGE, *_RUNNERS)
    return (*preload, *PACKAGE)


def _ask(address: str, request: dict[str, Any], descriptors: list[int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
    return connection


_servers: dict[tuple[str, ...], tuple[str, Any]] = {}


def _address(preload: tuple[str, ...]) -> str:
    """Return the address of the server with these libraries, started when first asked for."""
    if folder := os.environ.get(_SHARED):
        return _shared_address(Path(folder), preload)
    if preload not in _servers or _servers[preload][1].poll() is not None:
        folder = tempfile.mkdtemp(prefix="dadplug-tests-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        address = Path(folder) / "server"
        server: Any
        if preload:  # its programs inherit how it ends
            server = start([_SERVER, str(address), *preload], destructors=True, bare=True)
        else:
            server = _first_server(address)
        _servers[preload] = (str(address), server)
        _await(address, lambda: server.poll() is None)
    return _servers[preload][0]


def _first_server(address: Path) -> subprocess.Popen[bytes]:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, _SERVER, str(address)]
    return subprocess.Popen(command, env=os.environ | threads, stdin=subprocess.DEVNULL)


def _await(address: Path, alive: Callable[[], bool] = lambda: True) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while not address.exists():
        if not alive() or time.monotonic() > deadline:
            raise RuntimeError(f"the server at {address} did not start")
        time.sleep(0.02)


def share() -> str:
    """Start the servers for all processes that this one starts.

    Returns:
        An interpreter for these processes: a stand-in, which has the server with all trainers start them.
    """
    folder = tempfile.mkdtemp(prefix="dadplug-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = _shared(Path(folder), ())
    _servers[()] = (str(address), _first_server(address))
    os.environ[_SHARED] = folder
    installed = [name for name in TRAINERS if importlib.util.find_spec(name)]
    return _address(_modules(installed, bare=False)) + STAND_IN


def _shared(folder: Path, preload: tuple[str, ...]) -> Path:
    return folder / hashlib.sha256(" ".join(preload).encode()).hexdigest()[:12]


def _shared_address(folder: Path, preload: tuple[str, ...]) -> str:
    address = _shared(folder, preload)
    if not address.exists():
        with open(f"{address}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            if preload and not address.exists():
                start([_SERVER, str(address), *preload], destructors=True, bare=True, kept=True)
            _await(address)
    return str(address)


def stop() -> None:
    """End the servers; programs that still run are the business of those who started them."""
    for preload in sorted(_servers, key=len, reverse=True):
        server = _servers.pop(preload)[1]
        server.kill()
        server.wait(200)
