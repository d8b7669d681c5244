"""A server that starts Python programs by fork, with torch, numba and dadplug already imported.

Importing them takes 3 to 6 seconds of processor time, in every process of every test that starts one. Here it is
done once: `start` asks a server for a copy of itself, which becomes the program, with arguments, environment, folder
and output of its own, and ends like any interpreter: messages of unhandled errors, threads, exit handlers, and
destructors of the program's objects. Only the destruction of the libraries' modules and of their C++ objects is left
out, which takes four fifths of the processor time of a short program; a test that is about the end of a program asks
for it.

What a program can notice: the libraries in PRELOADED and PACKAGE are in `sys.modules`; kernels that have
been compiled before are loaded; environment variables that the libraries read when imported have no effect, but for
OMP_NUM_THREADS and numba's; `sys.executable`, with which it starts further sites, is a stand-in that has the same
server start them; and garbage is collected less often. A test about the import of dadplug asks for a `bare` program.
One that is about the import of another library, or about such a variable, starts its program with `subprocess`.

Run as a program, this file is the server: ``forkserver.py ADDRESS [MODULE ...]``. A program whose starter has gone,
or closes the connection, is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PRELOADED = ("numpy", "numba", "torch", "torch._dynamo", "torch.distributed")
PACKAGE = (
    "pytest",  # which helpers of tests import
    "dadplug.reduction",
    "dadplug.lowrank.kernels",
    "dadplug.lowrank.sparse_kernels",
    "dadplug.hub.join",
    "dadplug.hub.server",
    "dadplug.adapm.kernels",
    "dadplug.adaptive",
    "dadplug.local_steps",
    "dadplug.hogwild",
    "dadplug.parameter_server.server",
    "dadplug.racing",
    "dadplug.data",
    "dadplug.models",
    "dadplug.experiment",
)
TRAINERS = ("catalyst", "pytorch_lightning")
_LIBRARIES = ("catalyst.dl", "pytorch_lightning", "torchmetrics", "sklearn.datasets")  # of programs with a trainer
_RUNNERS = ("dadplug.runners.distributed_runner", "dadplug.runners.pytorch_lightning")
_START_TIMEOUT = 240.0
_SHARED = "DADPLUG_TEST_SERVERS"  # environment variable: the folder of the servers that processes of pytest share
_LONGEST = 1 << 20  # bytes of a request


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
        """Wait for the end and return the status, negative for a signal; TimeoutError if it takes too long."""
        if self.returncode is None:
            self.returncode = int(self._report(timeout))
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
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LONGEST)
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
            server = start([__file__, str(address), *preload], destructors=True, bare=True)
        else:
            server = _first_server(address)
        _servers[preload] = (str(address), server)
        _await(address, lambda: server.poll() is None)
    return _servers[preload][0]


def _first_server(address: Path) -> subprocess.Popen[bytes]:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, __file__, str(address)]
    return subprocess.Popen(command, env=os.environ | threads, stdin=subprocess.DEVNULL)


def _await(address: Path, alive: Callable[[], bool] = lambda: True) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while not address.exists():
        if not alive() or time.monotonic() > deadline:
            raise RuntimeError(f"the server at {address} did not start")
        time.sleep(0.02)


def share() -> None:
    """Start a server for all processes that this one starts; they share those with more libraries, too."""
    folder = tempfile.mkdtemp(prefix="dadplug-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = _shared(Path(folder), ())
    _servers[()] = (str(address), _first_server(address))
    os.environ[_SHARED] = folder


def _shared(folder: Path, preload: tuple[str, ...]) -> Path:
    return folder / hashlib.sha256(" ".join(preload).encode()).hexdigest()[:12]


def _shared_address(folder: Path, preload: tuple[str, ...]) -> str:
    address = _shared(folder, preload)
    if not address.exists():
        with open(f"{address}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            if preload and not address.exists():
                start([__file__, str(address), *preload], destructors=True, bare=True, kept=True)
            _await(address)
    return str(address)


def stop() -> None:
    """End the servers; programs that still run are the business of those who started them."""
    for preload in sorted(_servers, key=len, reverse=True):
        server = _servers.pop(preload)[1]
        server.kill()
        server.wait(200)


_library_finalizers: list[weakref.finalize[Any, Any]] = []  # in a server and its programs: those of the libraries


# What stands for the interpreter in a program of a server: it has the server start the program, with its own standard
# input and output, passes signals on, and ends as that does.
_STAND_IN = """#!{python} -ISE
import json, os, signal, socket, sys
arguments = sys.argv[1:]
while arguments and arguments[0] in ("-u", "-B"):
    arguments.pop(0)
if not arguments or arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
request = {{"argv": arguments, "env": dict(os.environ), "cwd": os.getcwd(), "destructors": False}}
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {room})
connection.connect({address!r})
socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
pid = int(connection.recv(100))
def pass_on(number, _):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended, and its status is on its way
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
status = int(connection.recv(100))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def _serve(address: str) -> dict[str, Any] | None:
    """Fork for each request until the parent has ended; return the request in a child, None in the server."""
    parent = os.getppid()
    stand_in = Path(f"{address}-python")
    stand_in.write_text(_STAND_IN.format(python=sys.executable, address=address, room=2 * _LONGEST))
    stand_in.chmod(0o700)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address + ".part")
    listener.listen(64)
    Path(address + ".part").rename(address)
    running: dict[int, socket.socket] = {}
    kernels = _Kernels()
    while os.getppid() == parent:
        readable, _, _ = select.select([listener, wake, *running.values()], [], [], 1.0)
        if wake in readable:
            os.read(wake, 1000)
            _reap(running)
        for pid in [pid for pid, connection in running.items() if connection in readable]:
            os.kill(pid, signal.SIGKILL)  # nobody waits for it any more
            running.pop(pid).close()
        if listener not in readable:
            continue
        connection, _ = listener.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * _LONGEST)
        message, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 16)
        kernels.load()
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            connection.send(str(os.getpid()).encode())
            for other in (listener, connection, *running.values()):
                other.close()
            os.close(wake)
            os.close(woken)
            sys.executable = str(stand_in)
            return json.loads(message) | {"descriptors": descriptors}
        for descriptor in descriptors:
            os.close(descriptor)
        if json.loads(message).get("kept"):
            connection.close()
        else:
            running[pid] = connection
    return None


class _Kernels:
    """Loader of the kernels that programs have compiled: from the disk, each takes a program some 30 milliseconds."""

    def __init__(self) -> None:
        from numba.core.dispatcher import Dispatcher

        modules = [module for name, module in list(sys.modules.items()) if name.startswith("dadplug.")]
        found = {id(each): each for module in modules for each in vars(module).values() if isinstance(each, Dispatcher)}
        self._kernels: list[Any] = [each for each in found.values() if hasattr(each._cache, "_cache_file")]
        self._folders = {each._cache.cache_path: 0 for each in self._kernels}

    def load(self) -> None:
        """Load what is in the caches and has not been loaded; without a change, look at their folders alone."""
        changed = {folder for folder, before in self._folders.items() if _changed(folder) != before}
        self._folders.update({folder: _changed(folder) for folder in changed})
        for kernel in self._kernels:
            cache = kernel._cache
            if cache.cache_path in changed:
                codegen = kernel.targetctx.codegen()
                for key in cache._cache_file._load_index():
                    if key[0] not in kernel.overloads and key == cache._index_key(key[0], codegen):
                        with contextlib.suppress(Exception):  # a program that needs it says what is wrong
                            kernel.compile(key[0])


def _changed(folder: str) -> int:
    return os.stat(folder).st_mtime_ns if os.path.exists(folder) else 0


def _reap(running: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if connection := running.pop(pid, None):
            with contextlib.suppress(OSError):
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            connection.close()


def _become(request: dict[str, Any]) -> None:
    """Run the program in this process, and end the process as the request says."""
    *standard, inherited = *request["descriptors"][:3], request["descriptors"][3:]
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if inherited:
        os.environ["INHERITED"] = ",".join(map(str, inherited))
    _reconfigure()
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None, __loader__=None)
    if request["destructors"]:
        _run(request, main)
    else:
        for finalizer in _library_finalizers:
            finalizer.atexit = False
        _end(_status(request, main), main)


def _run(request: dict[str, Any], main: types.ModuleType) -> None:
    argv: list[str] = request["argv"]
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], request["cwd"]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main
    if argv[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
        code = compile(argv[1], "<string>", "exec", dont_inherit=True)
    else:
        sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
        main.__file__ = os.path.abspath(argv[0])
        code = compile(Path(argv[0]).read_bytes(), argv[0], "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _status(request: dict[str, Any], main: types.ModuleType) -> int:
    """Run the program, report an unhandled error as the interpreter does, and return the status."""
    try:
        _run(request, main)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _end(status: int, main: types.ModuleType) -> None:
    """End the process as the interpreter does, but without the destruction of the libraries' modules.

    That would touch, and therefore copy, most of the memory that the process shares with the server.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if threading.active_count() == 1:  # others may use what is in the module
        kept = (types.ModuleType, types.FunctionType, type)  # which destructors call
        objects = [name for name, value in vars(main).items() if not isinstance(value, kept)]
        vars(main).update(dict.fromkeys(objects))
        gc.collect()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _reconfigure() -> None:
    """Apply what the imported libraries would have read from the environment."""
    import numba
    import numpy as np
    import torch

    numba.core.config.reload_config()
    np.random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    for path in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path[1:]:  # the first one will be replaced by that of the program
            sys.path.insert(1, path)


def _main() -> dict[str, Any] | None:
    for name in (*PRELOADED, *sys.argv[2:]):
        importlib.import_module(name)
    import numba
    import torch._dynamo.utils

    numba.njit(lambda number: number)(1)  # so that the compiler is there, too
    _library_finalizers.extend(weakref.finalize._registry)  # type: ignore[attr-defined]
    atexit.unregister(torch._dynamo.utils.dump_compile_times)  # a search for a library that is not there
    gc.set_threshold(10_000, 20, 50)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts with an ampersand
    return _serve(sys.argv[1])


if __name__ == "__main__" and (_request := _main()) is not None:
    _become(_request)
