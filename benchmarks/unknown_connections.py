"""Step times over a hub while unknown programs connect to its port, in alternating segments of one run.

    python benchmarks/unknown_connections.py              rankdad, 8 segments of each, 500 connections in each of 3 s
    python benchmarks/unknown_connections.py --quick      a few, to see that it works

Two sites train over a hub on loopback. In every second segment a process opens connections to the hub's port: a third
send random bytes, a third half of the first message of TLS, and a third nothing; none ends before the segment. The same
training is then repeated without them: the parameters have to be the same, to the bit. A step is timed at site 0, as in
benchmarks/hub.py. All run on one machine, so that what the connections cost their sender counts as well.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hub import Pair, spread
from kits import end, hub_command, make_kits
from link import Loopback

from dadplug.exchange.handshake import free_port


def first_message() -> bytes:
    """Return the first message of a TLS handshake."""
    outgoing = ssl.MemoryBIO()
    connection = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="hub")
    with contextlib.suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def connect(port: int, count: int, seconds: float) -> None:
    """Open connections to a port of this machine, evenly over a time, and keep them open until its end.

    Args:
        port: the port.
        count: number of connections.
        seconds: the time.
    """
    hello, start = first_message(), time.monotonic()
    messages = [os.urandom(2000), hello[: len(hello) // 2], b""]
    connections = []
    for number in range(count):
        time.sleep(max(0.0, start + seconds * number / count - time.monotonic()))
        with contextlib.suppress(OSError):  # the hub may close it, or take no more at the moment
            connections.append(socket.create_connection(("127.0.0.1", port), 1.0))
            connections[-1].sendall(messages[number % len(messages)])
    for each in connections:
        each.close()


def measure(pair: Pair, port: int, arguments: argparse.Namespace) -> dict[bool, list[list[float]]]:
    """Return the times of steps in segments without and with unknown connections."""
    segments: dict[bool, list[list[float]]] = {False: [], True: []}
    times = pair.ask(do="run", steps=20)[0]
    steps = max(5, int(arguments.seconds / statistics.median(times)))
    for number in range(2 * arguments.segments):
        crowded = number % 4 in (1, 2)
        process = multiprocessing.Process(target=connect, args=(port, arguments.connections, arguments.seconds))
        if crowded:
            process.start()
        segments[crowded].append(pair.ask(do="run", steps=steps)[0])
        if crowded:
            process.join()
    return segments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="rankdad", help="as benchmarks/attach.py names them")
    parser.add_argument("--model", default="mnistnet")
    parser.add_argument("--connections", type=int, default=500, help="unknown connections in a segment")
    parser.add_argument("--segments", type=int, default=8, help="segments with, and as many without")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a segment")
    parser.add_argument("--quick", action="store_true", help="two segments of half a second")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.segments, arguments.seconds, arguments.connections = 2, 0.5, 60
    with Loopback() as link, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        port, kits = free_port(), Path(folder, "kits")
        make_kits(kits, "127.0.0.1", port, ("a", "b"))
        journal = Path(folder, "journal")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        stack.callback(end, link.start(0, hub_command(kits, "--journal", str(journal)), 0, **quiet))
        pair = Pair(link, kits, 0)
        stack.callback(end, *(site.process for site in pair.sites))
        order = {"do": "begin", "model": arguments.model, "method": arguments.method, "warm_up": 10}
        pair.ask(**order)
        segments = measure(pair, port, arguments)
        digests = pair.ask(do="digest")
        pair.ask(do="end")
        pair.ask(**order)
        pair.ask(do="run", steps=20 + sum(len(times) for found in segments.values() for times in found))
        repeated = pair.ask(do="digest")
        pair.ask(do="end")
        refused = sum(" refused " in line for line in journal.read_text().splitlines())
    medians = {crowded: [statistics.median(times) for times in found] for crowded, found in segments.items()}
    for crowded, found in segments.items():
        name = f"{arguments.connections} connections a segment" if crowded else "none"
        print(f"{name:28} {spread([time for times in found for time in times])} ms")
    pairs = zip(medians[False], medians[True], strict=True)
    ratios = sorted(crowded / alone for alone, crowded in pairs)
    print(f"ratio of pairs of segments: median {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"lines of refusals in the hub's journal: {refused}")
    same = len({*digests, *repeated}) == 1
    print("the parameters are the same, to the bit" if same else f"THE PARAMETERS DIFFER: {digests} {repeated}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
