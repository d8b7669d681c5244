"""Step times over a hub while unknown programs or a member attack it, in alternating segments of one run.

    python benchmarks/unknown_connections.py                      rankdad, 8 segments of each, all attacks
    python benchmarks/unknown_connections.py --attacks hellos,frames --rate 50
    python benchmarks/unknown_connections.py --quick              a few, to see that it works

Sites a and b train with `min_sites=1` over a hub on loopback; site c has left. In every second segment a process
attacks the hub's port:

    silent    unknown programs connect: a third send random bytes, a third half of the first message of TLS, and a third
              nothing; none ends before the segment
    hellos    unknown programs send the complete first message of TLS, and keep the connection open
    foreign   a member of another project connects again and again
    noise     c connects with its kit again and again, and sends random bytes
    bodies    the same with valid heads and random bodies
    pings     c waits to join, and sends pings without end; likewise
    control   valid control messages
    frames    c joins, and sends payloads of the open step without end

`--connections` and `--rate` limit the attacks. The attacker runs at the lowest priority, and the processor time that it
takes is printed: on one machine it counts as well. The training is then repeated in calm: the parameters have to be
the same, to the bit. A step is timed at site a, as in benchmarks/hub.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from command import parser_of
from hub import Pair, spread
from kits import end, hub_command, make_kits
from link import Loopback

from dadplug.errors import RefusedError
from dadplug.exchange.rounds import Requirements, Spent
from dadplug.hub.pki.kits import Kit
from dadplug.hub.secure import tls
from dadplug.hub.wire.messages import (
    FRESH,
    VERSION,
    Close,
    Head,
    Hello,
    Join,
    Kind,
    own_release,
    pack_control,
    read_control,
)
from dadplug.hub.wire.streams import FrameReceiver
from dadplug.support.processes import free_port

SITES = ("a", "b", "c")
TIMEOUT = 5.0  # seconds
_SLOT = 2  # of the site that attacks
_BURST = 1 << 16  # bytes that are sent at a time


# Attacks


def first_message() -> bytes:
    """Return the first message of a TLS handshake."""
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.set_alpn_protocols(["dadplug"])
    connection = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="hub")
    with contextlib.suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def pace(count: int, seconds: float) -> Iterator[int]:
    """Yield numbers, evenly over a time; fewer if they take longer."""
    start = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, start + seconds * number / count - time.monotonic()))
        if time.monotonic() > start + seconds:
            return
        yield number


class Attack:
    """An attack of one segment.

    Args:
        folder: folder with the kits of the project and of another one.
        port: the hub's port.
        arguments: limits of the attack, see `main`.
    """

    def __init__(self, folder: Path, port: int, arguments: argparse.Namespace) -> None:
        self._folder, self._address = folder, ("127.0.0.1", port)
        self._count, self._seconds, self._rate = arguments.connections, arguments.seconds, arguments.rate
        self._open: list[socket.socket] = []

    def run(self, name: str) -> None:
        """Attack until the segment ends."""
        os.nice(19)
        getattr(self, name)()

    def _connect(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the hub may close it, or take no more at the moment
            self._open.append(socket.create_connection(self._address, 1.0))
            self._open[-1].sendall(message)

    def silent(self) -> None:
        """Open connections that stay in their handshake."""
        hello = first_message()
        messages = [os.urandom(2000), hello[: len(hello) // 2], b""]
        for number in pace(self._count, self._seconds):
            self._connect(messages[number % len(messages)])

    def hellos(self) -> None:
        """Let the hub answer handshakes that are then left alone."""
        hello = first_message()
        for _ in pace(self._count, self._seconds):
            self._connect(hello)

    def foreign(self) -> None:
        """Connect with the kit of another project."""
        kit = Kit.load(self._folder / "foreign" / "c")
        for _ in pace(self._count, self._seconds):
            with contextlib.suppress(OSError, RefusedError):
                connected = socket.create_connection(self._address, 1.0)
                context = tls.site_context(kit)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                with context.wrap_socket(connected) as connection:
                    connection.recv(1)

    def _dial(self) -> Any:
        kit = Kit.load(self._folder / "kits" / "c")
        connection = tls.dial(kit, TIMEOUT, self._address)
        hello = Hello(VERSION, random.getrandbits(62), FRESH, "training", release=own_release())
        connection.sendall(pack_control(hello, _SLOT))
        return connection

    def noise(self) -> None:
        """Connect with the kit, and send random bytes."""
        self._send_once(lambda: os.urandom(5000))

    def bodies(self) -> None:
        """Connect with the kit, and send valid heads with random bodies."""
        kinds = itertools.cycle((Kind.CONTROL, Kind.PAYLOAD, Kind.STATE, Kind.SUMMAND))
        self._send_once(lambda: Head(next(kinds), _SLOT, step=1, length=300).pack() + os.urandom(300))

    def _send_once(self, content: Callable[[], bytes]) -> None:
        for _ in pace(self._count, self._seconds):
            with contextlib.suppress(OSError, RefusedError), self._dial() as connection:
                connection.sendall(content())
                connection.recv(1 << 16)

    def pings(self) -> None:
        """Wait to join, and send pings."""
        self._flood(self._dial(), lambda: Head(Kind.PING, _SLOT).pack())

    def control(self) -> None:
        """Wait to join, and send control messages."""
        self._flood(self._dial(), lambda: pack_control(Spent(1.0, 1e-5), _SLOT))

    def _flood(self, connection: Any, frame: Callable[[], bytes]) -> None:
        """Send frames at the limit of the rate."""
        sizes = max(1, int(self._rate * 1e6 / 8 * self._seconds / _BURST))
        with contextlib.suppress(OSError), connection:
            connection.settimeout(self._seconds)
            for _ in pace(sizes, self._seconds):
                packed = frame()
                connection.sendall(packed * max(1, _BURST // len(packed)))

    def frames(self) -> None:
        """Join, and send payloads of the open step, while what arrives is read."""
        connection = self._dial()
        connection.sendall(pack_control(Requirements(1, 10_000), _SLOT))
        step, joined = 0, threading.Event()

        def read() -> None:
            nonlocal step
            receiver = FrameReceiver(connection, lambda head: memoryview(bytearray(head.length)))
            with contextlib.suppress(OSError):
                while True:
                    head = receiver.receive()
                    if head is None or head.kind is not Kind.CONTROL:
                        continue
                    message = read_control(bytes(receiver.body), len(SITES))
                    if isinstance(message, Join) and message.slot == _SLOT:
                        step = message.step
                        joined.set()
                    elif isinstance(message, Close):
                        step = message.step + 1

        threading.Thread(target=read, daemon=True).start()
        joined.wait(TIMEOUT)
        body = os.urandom(1000)
        head = Head(Kind.PAYLOAD, _SLOT, exchange=77, length=len(body))
        self._flood(connection, lambda: head._replace(step=step).pack() + body)


ATTACKS = ("silent", "hellos", "foreign", "noise", "bodies", "pings", "control", "frames")


# Measurement


def processor_seconds(process: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Segment:
    """One segment: times of its steps, and processor time of the hub and the attacker, in seconds."""

    def __init__(self, pair: Pair, steps: int, hub: int, attack: Callable[[], None] | None) -> None:
        before, self.attacker = processor_seconds(hub), 0.0
        process = multiprocessing.Process(target=attack) if attack is not None else None
        if process is not None:
            process.start()
        self.times: list[float] = pair.ask(do="run", steps=steps)[0]
        self.hub = processor_seconds(hub) - before
        if process is not None:
            assert process.pid is not None
            with contextlib.suppress(FileNotFoundError):
                self.attacker = processor_seconds(process.pid)
            process.join()


def measure(pair: Pair, hub: int, attack: Callable[[], None], arguments: argparse.Namespace) -> int:
    """Print what an attack does, and return the number of steps that were made."""
    warm = 20
    steps = max(5, int(arguments.seconds / statistics.median(pair.ask(do="run", steps=warm)[0])))
    segments: dict[bool, list[Segment]] = {False: [], True: []}
    for number in range(2 * arguments.segments):
        attacked = number % 4 in (1, 2)
        segments[attacked].append(Segment(pair, steps, hub, attack if attacked else None))
    for attacked, found in segments.items():
        times = [time for each in found for time in each.times]
        busy = sum(each.hub for each in found) / len(times)
        took = sum(each.attacker for each in found) / sum(sum(each.times) for each in found)
        print(
            f"  {'attacked' if attacked else 'calm':9} {spread(times)} ms, hub {1e3 * busy:.2f} ms a step"
            + f", attacker {100 * took:.0f} % of a core" * attacked
        )
    pairs = zip(segments[False], segments[True], strict=True)
    ratios = sorted(statistics.median(other.times) / statistics.median(calm.times) for calm, other in pairs)
    print(f"  ratio of pairs of segments: median {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}")
    sys.stdout.flush()
    return warm + 2 * arguments.segments * steps


def parse() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        attacks=",".join(ATTACKS),
        method=("rankdad", "as benchmarks/attach.py names them"),
        model="mnistnet",
        connections=(500, "connections of an attack in a segment, at most"),
        rate=(100.0, "megabits per second of an attack, at most"),
        segments=(8, "segments with, and as many without"),
        seconds=(3.0, "length of a segment"),
        quick=(False, "two segments of half a second"),
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.segments, arguments.seconds, arguments.connections = 2, 0.5, 60
    if unknown := {*arguments.attacks.split(",")} - {*ATTACKS}:
        parser.error(f"unknown attacks: {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    return arguments


@contextlib.contextmanager
def training(folder: Path, port: int, order: dict[str, Any]) -> Iterator[tuple[Pair, int]]:
    """Let three sites begin to train over a new hub, and end the last one; yield the others, and the hub's process."""
    with Loopback() as link, contextlib.ExitStack() as stack:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        hub = link.start(0, hub_command(folder / "kits", "--journal", str(folder / "journal")), 0, **quiet)
        stack.callback(end, hub)
        pair = Pair(link, folder / "kits", 0, SITES)
        stack.callback(end, *(site.process for site in pair.sites))
        pair.ask(**order)
        pair.sites.pop().process.kill()
        yield pair, hub.pid


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        make_kits(folder / "kits", "127.0.0.1", port, SITES)
        make_kits(folder / "foreign", "127.0.0.1", port, SITES)
        order = {"do": "begin", "model": arguments.model, "method": f"{arguments.method}:min_sites=1", "warm_up": 10}
        steps = 0
        with training(folder, port, order) as (pair, hub):
            for attack in arguments.attacks.split(","):
                print(attack)
                run = Attack(folder, port, arguments).run
                steps += measure(pair, hub, lambda run=run, attack=attack: run(attack), arguments)
            digests = pair.ask(do="digest")
        with training(folder, port, order) as (pair, _):
            pair.ask(do="run", steps=steps)
            repeated = pair.ask(do="digest")
        journal = (folder / "journal").read_text().splitlines()
    print(f"lines of refusals in the hub's journal: {sum(' refused ' in line for line in journal)}")
    same = len({*digests, *repeated}) == 1
    print("the parameters are the same, to the bit" if same else f"THE PARAMETERS DIFFER: {digests} {repeated}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
