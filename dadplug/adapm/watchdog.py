"""Watchdog process of a site on AdaPM's engine: it ends the site if a call into the library does not return.

Many of the library's calls hold the GIL while they wait, so neither Python threads nor signal handlers can run. The
site writes the time of each call to shared memory, which the watchdog reads. It also replies to the watchdogs of other
sites, and exits with its site: a site whose watchdog cannot be reached is lost. The file is run by its path and imports
only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

STAMP = struct.Struct("<d")  # time of the beginning of a call, 0.0 outside of the library
TRACEBACK = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # makes the site print its stack
_STEP = 0.1  # seconds between checks of the site
_PROBES = 10  # steps between probes of other sites
_FAILED = 3  # consecutive probes that must fail
_RESPONSE = 1.0  # seconds to wait for the response of another watchdog


class Watchdog:
    """Handle of the watchdog process in its site.

    Args:
        address: address of this site for other sites.

    Attributes:
        place: host and port of the watchdog.
    """

    def __init__(self, address: str) -> None:
        import faulthandler

        faulthandler.register(TRACEBACK, file=sys.__stderr__ or 2, all_threads=False)
        with socket.create_server((address, 0)) as listener:
            self.place = list(listener.getsockname()[:2])
            descriptor = os.memfd_create("dadplug-watchdog") if hasattr(os, "memfd_create") else _temporary()
            os.ftruncate(descriptor, STAMP.size)
            self._page = mmap.mmap(descriptor, STAMP.size)
            shared = (listener.fileno(), descriptor)
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__, *map(str, shared)], stdin=subprocess.PIPE, pass_fds=shared
            )
            os.close(descriptor)

    def start(self, timeout: float, names: list[str], places: list[list[Any]], rank: int) -> None:
        """Start watching.

        Args:
            timeout: maximum duration of a call in seconds.
            names: names of the sites for messages.
            places: the `place` of each site.
            rank: this site.
        """
        assert self._process.stdin is not None
        settings = {"timeout": timeout, "names": names, "places": places, "rank": rank}
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.flush()

    def enter(self) -> None:
        """Record the beginning of a call into the library."""
        STAMP.pack_into(self._page, 0, time.monotonic())

    def leave(self) -> None:
        """Record that the call has returned."""
        STAMP.pack_into(self._page, 0, 0.0)

    def stop(self) -> None:
        """End the process; may be called twice."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait(10.0)


def _temporary() -> int:
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def watch(listener: socket.socket, page: mmap.mmap) -> None:
    """Watch the parent process, which is the site, until it exits."""
    raw: Any = sys.stdin.buffer  # unbuffered, since no other data may be read from the pipe
    line = raw.raw.readline()
    if not line:
        return
    settings = json.loads(line)
    names, places, rank, timeout = settings["names"], settings["places"], settings["rank"], settings["timeout"]
    site = os.getppid()
    call, waited, failed = 0.0, 0.0, dict.fromkeys(range(len(names)), 0)
    before, steps = time.monotonic(), 0
    while _serve(listener, site):
        now = time.monotonic()
        passed, before = min(now - before, 2 * _STEP), now  # time during which the system was suspended does not count
        (current,) = STAMP.unpack_from(page, 0)
        if current != call or _stopped(site):
            call, waited = current, waited if current == call else 0.0
            continue
        waited += passed if call else 0.0
        steps += 1
        if call and waited > timeout:
            stuck = [names[peer] for peer in failed if peer != rank and _state(places[peer]) != "running"]
            who = f"{', '.join(stuck)} {'do' if len(stuck) > 1 else 'does'} not run" if stuck else "all sites run"
            _end(site, f"a call of {names[rank]} into AdaPM's library has not returned for {timeout:g} s; {who}")
            return
        if call and waited > _STEP * _PROBES and steps % _PROBES == 0:
            for peer in failed:
                if peer != rank:
                    failed[peer] = failed[peer] + 1 if _state(places[peer]) == "gone" else 0
            gone = [names[peer] for peer, times in failed.items() if times >= _FAILED]
            if gone:
                _end(site, f"{', '.join(gone)} {'are' if len(gone) > 1 else 'is'} gone, and {names[rank]} waits for it")
                return


def _serve(listener: socket.socket, site: int) -> bool:
    """Reply to other watchdogs for one step; return False if the site has exited."""
    ready, _, _ = select.select([sys.stdin, listener], [], [], _STEP)
    if sys.stdin in ready or os.getppid() != site:
        return False
    if listener in ready:
        with suppress(OSError):
            asking, _ = listener.accept()
            with asking:
                asking.settimeout(_RESPONSE)
                asking.sendall(b"stopped" if _stopped(site) else b"running")
    return True


def _stopped(process: int) -> bool:
    with suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False


def _state(place: list[Any]) -> str:
    """Return the state of another site by its watchdog: ``"running"``, ``"stopped"``, ``"gone"`` or ``"silent"``."""
    try:
        with socket.create_connection(tuple(place), timeout=_RESPONSE) as asked:
            return asked.recv(16).decode() or "gone"
    except ConnectionError:
        return "gone"
    except OSError:
        return "silent"


def _end(site: int, message: str) -> None:
    print(f"dadplug.SiteError: {message}. The process ends, since the call cannot be", file=sys.stderr, flush=True)
    with suppress(ProcessLookupError):
        os.kill(site, TRACEBACK)
        time.sleep(0.5)
        os.kill(site, signal.SIGKILL)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        watch(inherited, mmap.mmap(int(sys.argv[2]), STAMP.size))
