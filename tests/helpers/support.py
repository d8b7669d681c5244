"""Sites for tests: processes on loopback, each with a place in one process group, kept for many tests.

A test hands over a function of its module; every site runs it and returns its result:

    def trains(mode): ...             # runs on each site, asserts there, returns what pickles

    def test_trains(sites):
        first, second = sites(2).run(trains, "dad")

The whole suite has to run in ten minutes on two cores, so a test should be the first of these that can ask its
question:

1. A function in this process, without sites.
2. `sites(n).run(function, *args)`: the processes are there already; ``@support.at_sites(n)`` makes a function a test
   that all sites run. A call costs milliseconds; still, many cases go into one call. Each call starts with the same
   seeds; environment variables, the folder, the import path, filters of warnings and torch's settings are restored
   after it, and reductions are detached. Patches and threads stay for the next test: undo them.
3. `with Sites(n) as group`: sites of its own, about a second of processor time, for tests that kill or stop some.
   `group.outcomes()` says by site what came of a call, whether it returned, raised, died or did not answer.
4. `run_programs(commands)`: programs of their own, a tenth of a second each and more with the imports they make.
   ``preload=["pytorch_lightning"]`` saves those of trainers. `site_scripts` writes a program for each site.
5. `subprocess`, 2 to 5 seconds: only where the imports of a new interpreter are what is tested.

Sites and programs are started by fork from a process that has imported torch, numba and dadplug; see `forkserver`.
Waits are for events, not for seconds: poll, or give the shortest `timeout` that the machine's load allows. All
processes share one folder of compiled kernels, unless NUMBA_CACHE_DIR names another.

`make test` runs the suite in three processes, file by file, so that a fixture of a module is made once:
``python -m pytest -n 3 --dist loadfile``. They share the servers of programs. Without ``-n`` it runs in one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import multiprocessing
import os
import random
import signal
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import forkserver
import pytest

from dadplug.support.processes import free_port

ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
START_TIMEOUT = 240.0  # seconds, on a busy machine
CALL_TIMEOUT = 240.0
MOST_GROUPS = 12  # process groups that a site leaves open


def need(package: str, minimum: int = 0) -> None:
    """Skip the test if a package is not installed, or has a smaller major version, without an import of it.

    For packages that the programs of a test import, not the test itself: where `lightning` has been imported beside
    `pytorch_lightning`, ``dadplug.DADStrategy`` is ambiguous for all later tests of the process.
    """
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    if minimum and int(importlib.metadata.version(package).partition(".")[0]) < minimum:
        pytest.skip(f"needs {package} {minimum} or newer")


def needs(package: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped if a package is not installed; for tests of `at_sites`, see `need`."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


def valid_modes() -> str:
    """The modes as messages list them."""
    from dadplug.step.methods import method_names

    return ", ".join(map(repr, method_names()))


def load(path: str) -> ModuleType:
    """Import a test module or a benchmark by its path, once; it finds the modules beside it, as when it is run."""
    name = "_".join(["loaded", *Path(path).with_suffix("").parts[-2:]])
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.append(str(Path(path).resolve().parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.pop()
    return sys.modules[name]


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Seed the generators, and restore the settings of the process at the end."""
    import numpy as np
    import torch

    torch.default_generator.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    environment, path, folder = dict(os.environ), list(sys.path), os.getcwd()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = path
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        forget_accelerators()


def forget_accelerators() -> None:
    """Forget what accelerate shares between all accelerators of a process, also those of Catalyst's engines."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def close_unused_groups() -> None:
    """Close the transports and process groups that earlier calls have left open, once they are many.

    Each group of gloo has a thread that wakes up a hundred times a second: hundreds of them take a processor. Looking
    for garbage takes as long as a short call.
    """
    import torch.distributed as dist

    from dadplug.exchange import status

    groups = dist.distributed_c10d._world.pg_map
    if len(groups) > MOST_GROUPS:
        gc.collect()
    if len(groups) > MOST_GROUPS:
        for each in list(status._watched):
            each.close_transports()  # those of nodes have threads, which keep them


def detach_reductions() -> None:
    """Take the reductions that a call has left attached off their models."""
    from dadplug import GradientReduction
    from dadplug.step.model_sync.structure import attached

    for each in attached():
        if isinstance(each, GradientReduction):
            each.detach(discard=True)


def serve_calls(key: bytes, place: dict[str, Any]) -> None:
    """Answer calls through the pipe that was inherited, as one site of a group.

    Args:
        key: key of the pipe.
        place: arguments of `dadplug.connect`.
    """
    import torch

    import dadplug

    multiprocessing.current_process().authkey = key
    pipe = Connection(int(os.environ.pop("INHERITED")))
    torch.set_num_threads(1)
    dadplug.connect(**place, timeout=START_TIMEOUT)
    pipe.send(("ready", None))
    gc.set_threshold(10_000, 10, 5)  # also within calls that open many process groups
    while (call := pipe.recv()) is not None:
        file, name, args = call
        try:
            close_unused_groups()
            function = inspect.unwrap(getattr(load(file), name))  # a test of `at_sites` is the function itself here
            with isolated():
                value = function(*args)
            detach_reductions()
            pipe.send(("ok", value))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


@dataclass
class Outcome:
    """Outcome of a call at one site."""

    kind: str  # "ok", "failed" (raised), "ended" (the process has gone) or "late" (no answer in time)
    value: Any = None  # what the function returned, or the traceback, or what the process had printed
    seconds: float = 0.0  # from the call to the answer


class Sites:
    """A group of processes that run functions together.

    For tests that kill or stop sites, a group of their own: starting one takes about a second.

        with support.Sites(3) as group:
            group.start(trains, "dad")
            group.kill(0)                     # or stop(0): SIGSTOP
            outcomes = group.outcomes(timeout=10)     # a list by rank of kind, value, seconds
            assert "site 0" in outcomes[1].value

    With `kits`, a folder for each process, they connect through a hub, which has to run; processes with the same kit
    are one site, as a launcher starts them. The processes have the trainers that this one has imported, as test modules
    do.
    """

    def __init__(
        self,
        world_size: int,
        env: dict[str, str] | None = None,
        kits: Sequence[Path] = (),
    ) -> None:
        self.world_size = world_size
        self._paused = False
        preload = [name for name in forkserver.TRAINERS if name in sys.modules]
        port, key = free_port(), bytes(multiprocessing.current_process().authkey)
        self.processes: list[forkserver.Program] = []
        self._pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            code = f"import sys; sys.path[:] = {sys.path!r}; import support; "
            names = {"RANK": str(rank)}
            if kits:
                place = {"kit": str(kits[rank])}
                names |= local_place(kits, rank, port)
            else:
                place = {"rank": rank, "num_nodes": world_size, "dist_url": f"tcp://127.0.0.1:{port}"}
                names |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            code += f"support.serve_calls({key!r}, {place!r})"
            environment = os.environ | ONE_THREAD | names | (env or {})
            self.processes.append(forkserver.start(["-c", code], environment, None, preload, [theirs.fileno()]))
            theirs.close()
            self._pipes.append(ours)
        self._started = time.monotonic()
        self._collect(START_TIMEOUT)

    def __enter__(self) -> Sites:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def run(self, function: Any, *args: Any, timeout: float = CALL_TIMEOUT) -> list[Any]:
        """Run a module-level function on every site; return the results by rank, or fail the test."""
        self.start(function, *args)
        return self._collect(timeout)

    def start(self, function: Any, *args: Any) -> None:
        """Start a module-level function on every site; `outcomes` waits for it."""
        self.pause(False)
        function = inspect.unwrap(function)  # of a test of `at_sites`
        self._started = time.monotonic()
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__name__, args))

    def outcomes(self, timeout: float = CALL_TIMEOUT) -> list[Outcome]:
        """Wait for the calls that were started; return the outcome by rank, whether or not all have answered."""
        waiting = dict(enumerate(self._pipes))
        found = [Outcome("late") for _ in waiting]
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for rank in [rank for rank, pipe in waiting.items() if pipe in wait(list(waiting.values()), left)]:
                try:
                    kind, value = waiting.pop(rank).recv()
                except (EOFError, ConnectionResetError):
                    kind, value = "ended", self.processes[rank].read()[1]
                found[rank] = Outcome(kind, value, time.monotonic() - self._started)
        return found

    def kill(self, rank: int) -> None:
        """End a site as a crash would (SIGKILL)."""
        self.processes[rank].kill()

    def stop(self, rank: int) -> None:
        """Freeze a site (SIGSTOP); closing the group ends it, too."""
        self.processes[rank].send_signal(signal.SIGSTOP)

    def pause(self, paused: bool = True) -> None:
        """Freeze all sites between two calls, or let them go on; the next call does so by itself.

        The threads of gloo wake up a hundred times a second, in each process and for each group.
        """
        if paused != self._paused:
            self._paused = paused
            for process in self.processes:
                process.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def _collect(self, timeout: float) -> list[Any]:
        found = self.outcomes(timeout)
        words = {"late": "gave no answer in time", "ended": "ended:", "failed": "raised:"}
        problems = [
            f"site {rank} {words[each.kind]}\n{each.value or ''}"
            for rank, each in enumerate(found)
            if each.kind in words
        ]
        if problems:
            self.close()
            pytest.fail("\n".join(problems), pytrace=False)
        return [each.value for each in found]

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.wait(200)
        for pipe in self._pipes:
            pipe.close()


def until(condition: Any, message: Any = lambda: "the condition has not come true", timeout: float = 60.0) -> None:
    """Wait until a condition is true; what takes long is looked at less often."""
    begin = time.monotonic()
    while not condition():
        waited = time.monotonic() - begin
        assert waited < timeout, message()
        time.sleep(min(0.002 + waited / 20, 0.02))


def refuses(*cases: tuple[Any, ...], error: type[BaseException] = ValueError) -> None:
    """Check that calls are refused.

    Args:
        cases: a call without arguments and a pattern of its error, for each; and the type of the error, where it is
            another one.
        error: type of the errors.
    """
    for call, words, *kind in cases:
        with pytest.raises(kind[0] if kind else error, match=words):
            _call(call, words)


def _call(call: Callable[[], Any], words: str) -> None:
    """Make a call that is to raise an error; fail where it returns."""
    call()
    pytest.fail(f"not refused: {words}")


def local_place(kits: Sequence[Path], rank: int, port: int) -> dict[str, str]:
    """Return the environment of a process among those with the same kit, as torchrun sets it.

    Args:
        kits: kit of each process.
        rank: the process.
        port: a free port, and as many after it as there are processes.
    """
    same = [other for other, kit in enumerate(kits) if kit == kits[rank]]
    if len(same) == 1:
        return {}
    count, index = str(len(same)), str(same.index(rank))
    return {
        "LOCAL_WORLD_SIZE": count,
        "WORLD_SIZE": count,
        "LOCAL_RANK": index,
        "RANK": index,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port + same[0]),
    }


_groups: dict[int, Sites] = {}
atexit.register(lambda: close_all())


def sites(world_size: int) -> Sites:
    """Return the group of this size, started when first asked for; those of other sizes pause."""
    pause_all(world_size)
    if world_size not in _groups or not _groups[world_size].alive:
        _groups[world_size] = Sites(world_size)
    return _groups[world_size]


def at_sites(world_size: int, own: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a test that every site runs, with the parameters and fixtures it names; a decorator.

    Args:
        world_size: number of sites.
        own: whether they are started for this test, which breaks their connections.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            values = [arguments[name] for name in inspect.signature(function).parameters]
            with Sites(world_size) if own else contextlib.nullcontext(sites(world_size)) as group:
                group.run(function, *values)

        return test

    return decorate


def pause_all(but: int = 0) -> None:
    """Freeze the sites of all groups until their next call, but for the group of a size."""
    for size, group in _groups.items():
        if size != but:
            group.pause()


def close_all() -> None:
    """End all groups."""
    while _groups:
        _groups.popitem()[1].close()
    forkserver.stop()


class Finished:
    """A program that has ended."""

    def __init__(self, process: forkserver.Program) -> None:
        self.status = process.returncode
        self.output, self.errors = process.read()


def run_programs(
    commands: Sequence[Sequence[str]],
    timeout: float = CALL_TIMEOUT,
    env: dict[str, str] | None = None,
    folder: Path | None = None,
    preload: Sequence[str] = (),
    destructors: bool = False,
    bare: bool = False,
) -> list[Finished]:
    """Run programs side by side and wait for all; those that take too long are killed, and the test fails.

    Args:
        commands: arguments of the interpreter, for each program; see `forkserver.start` for those it knows.
        timeout: seconds for all of them together.
        env: environment variables besides those of this process.
        folder: where they run.
        preload: trainers that the programs import, see `forkserver.TRAINERS`, or other libraries that take long.
        destructors: for tests of how a program ends, see `forkserver.start`.
        bare: for tests of the import of dadplug.
    """
    environment = os.environ | ONE_THREAD | (env or {})
    processes: list[forkserver.Program] = []
    try:
        for command in commands:
            each = forkserver.start(command, environment, folder, preload, destructors=destructors, bare=bare)
            processes.append(each)
        deadline = time.monotonic() + timeout
        late = []
        for number, process in enumerate(processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                process.send_signal(signal.SIGQUIT)  # it prints where its threads are
                time.sleep(1.0)
                process.kill()
                process.wait(200)
                output, errors = process.read()
                late.append(f"program {number} did not end within {timeout:g} s:\n{output}\n{errors}")
    finally:  # where a limit of pytest, or an interrupt, ends the wait
        for process in processes:
            process.kill()
    if late:
        pytest.fail("\n".join(late), pytrace=False)
    return [Finished(process) for process in processes]


def site_scripts(code: str, tmp_path: Path, world_size: int = 2, port: int | None = None) -> list[list[str]]:
    """Write a script that joins the sites as RANK before `code` runs; return a command for each site."""
    port = free_port() if port is None else port
    script = tmp_path / "site.py"
    head = (
        "import sys, torch, dadplug\nfrom torch import nn\nrank = int(sys.argv[1])\ntorch.set_num_threads(1)\n"
        f"dadplug.connect(rank, {world_size}, 'tcp://127.0.0.1:{port}', timeout=200)\n"
    )
    script.write_text(head + textwrap.dedent(code))
    return [[str(script), str(rank)] for rank in range(world_size)]
