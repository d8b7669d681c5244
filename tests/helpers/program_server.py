"""The server of `forkserver`: ``program_server.py ADDRESS [MODULE ...]`` starts programs as copies of itself."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any

from forkserver import LONGEST, MOST_DESCRIPTORS, PRELOADED, STAND_IN

_library_finalizers: list[weakref.finalize[Any, Any]] = []  # in a server and its programs: those of the libraries


# What stands for the interpreter in a program of a server: it has the server start the program, with its own standard
# input and output and what else it has inherited, passes signals on, and ends as that does.
_STAND_IN = """#!{python} -ISE
import json, os, signal, socket, sys
arguments = sys.argv[1:]
while arguments and arguments[0] in ("-u", "-B"):
    arguments.pop(0)
if not arguments or arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
inherited = []
for number in map(int, os.listdir("/dev/fd")):
    try:
        os.fstat(number)
    except OSError:
        continue  # that of the listing
    if number > 2:
        inherited.append(number)
request = {{"argv": arguments, "env": dict(os.environ), "cwd": os.getcwd(), "destructors": False, "numbers": inherited}}
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {room})
connection.connect({address!r})
socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2, *inherited])
for number in inherited:
    os.close(number)  # whoever waits for the end of a pipe waits for the program, not for this process
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
    stand_in = Path(address + STAND_IN)
    stand_in.write_text(_STAND_IN.format(python=sys.executable, address=address, room=2 * LONGEST))
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
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * LONGEST)
        message, descriptors, _, _ = socket.recv_fds(connection, LONGEST, MOST_DESCRIPTORS)
        if not message:  # the starter has been killed meanwhile
            connection.close()
            continue
        request = json.loads(message) | {"descriptors": descriptors}
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
            multiprocessing.set_executable(sys.executable)
            return request
        for descriptor in descriptors:
            os.close(descriptor)
        if request.get("kept"):
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
                        with contextlib.suppress(Exception):  # a program that needs the kernel reports the error
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
    _end_with_parent()
    *standard, inherited = *request["descriptors"][:3], request["descriptors"][3:]
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    faulthandler.register(signal.SIGQUIT, file=2)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "numbers" in request:
        _renumber(inherited, request["numbers"])
    elif inherited:
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


def _end_with_parent() -> None:
    """Let this process be killed with its parent: after a failed test no test waits for it, and it would train on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _renumber(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that they have in the process that passes them on."""
    beyond = max([*descriptors, *numbers], default=0) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, beyond) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


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
    gc.disable()  # a seventh of the imports' time goes into looking for garbage
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
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts with an ampersand
    return _serve(sys.argv[1])


if __name__ == "__main__" and (_request := _main()) is not None:
    _become(_request)
