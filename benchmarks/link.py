"""Runs a program on two sites joined by a link of a given rate and latency, each site a network namespace of its own.

    sudo python benchmarks/link.py [--round-trip MS] RATE PROGRAM [ARGUMENT…]
    sudo python benchmarks/link.py 100mbit python benchmarks/step_time.py
    sudo python benchmarks/link.py --round-trip 40 100mbit python benchmarks/step_time.py

RATE is as tc writes it (10mbit, 1gbit), or none for an unshaped link. A round trip in milliseconds is made by a relay
of packets in this program, which takes some processor time. Linux only; needs root, iproute2, and the kernel's tbf. The
program starts once for each site with torchrun's variables and GLOO_SOCKET_IFNAME set, so that the interface's counters
in /sys/class/net count what was sent. Site 0's standard output is shown, and the last messages of a site that fails.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress

from command import parser_of

ADDRESSES = ("10.77.0.1", "10.77.0.2")
FAILURE_SECONDS = 20.0  # that a site may go on after the other one has failed

# Has glibc keep freed memory: else one run in two, by the heap's moods, spends milliseconds a step on new pages.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}


def run(*command: str) -> None:
    subprocess.run(command, check=True)


class Relay(threading.Thread):
    """Thread that passes packets between two devices, each after a delay. It ends with the program.

    Args:
        devices: file descriptors of the devices.
        delay: seconds that each packet takes.
    """

    def __init__(self, devices: list[int], delay: float) -> None:
        super().__init__(name="relay", daemon=True)
        self._devices, self._delay = devices, delay

    def passes(self) -> bool:
        """Return whether a packet that arrives now is passed on."""
        return True

    def run(self) -> None:
        """Pass packets on."""
        other = dict(zip(self._devices, self._devices[::-1], strict=True))
        waiting: deque[tuple[float, int, bytes]] = deque()
        while True:
            left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
            for device in select.select(self._devices, (), (), left)[0]:
                try:
                    packet = os.read(device, 1 << 16)
                except OSError:  # the interfaces have been removed
                    return
                if self.passes():
                    waiting.append((time.monotonic() + self._delay, other[device], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, device, packet = waiting.popleft()
                with suppress(OSError):  # the interface is not up yet, or not any more
                    os.write(device, packet)


def make_device(name: str) -> int:
    """Make a network interface whose packets a program reads and writes; return its file descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH", name.encode(), 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
    return device


class Link:
    """Two namespaces and the link between them, which go when the block ends.

    Args:
        rate: rate of the link, as tc writes it, or none.
        round_trip: milliseconds of a round trip; 0 for that of the kernel.
    """

    def __init__(self, rate: str, round_trip: float = 0.0) -> None:
        self.round_trip = round_trip
        self.spaces = [f"site{rank}-{os.getpid()}" for rank in range(2)]
        self.interfaces = [f"dp{rank}-{os.getpid()}" for rank in range(2)]
        self.rate = rate

    def __enter__(self) -> Link:
        for space in self.spaces:
            run("ip", "netns", "add", space)
        if self.round_trip:
            devices = [make_device(interface) for interface in self.interfaces]
            Relay(devices, self.round_trip / 2000).start()
        else:
            run("ip", "link", "add", self.interfaces[0], "type", "veth", "peer", "name", self.interfaces[1])
        for space, interface, address in zip(self.spaces, self.interfaces, ADDRESSES, strict=True):
            run("ip", "link", "set", interface, "netns", space)
            inside = ("ip", "netns", "exec", space)
            run(*inside, "ip", "addr", "add", f"{address}/24", "dev", interface)
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "ip", "link", "set", interface, "up")
            if self.rate != "none":
                run(*inside, *shaping(interface, self.rate))
        return self

    def __exit__(self, *exc: object) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], check=False)

    def start(self, rank: int, program: list[str], port: int, **streams) -> subprocess.Popen:
        environment = site_environment(rank, ADDRESSES[0], port, self.interfaces[rank])
        return subprocess.Popen(["ip", "netns", "exec", self.spaces[rank], *program], env=environment, **streams)


class Loopback:
    """Two sites on loopback, for users without the right to make links."""

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is left."""

    def start(self, rank: int, program: list[str], port: int, **streams) -> subprocess.Popen:
        return subprocess.Popen(program, env=site_environment(rank, "127.0.0.1", port, "lo"), **streams)


def site_environment(rank: int, host: str, port: int, interface: str) -> dict[str, str]:
    """Return the environment of a site: torchrun's variables and the interface."""
    return (
        KEEP_MEMORY
        | os.environ
        | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
    )


def shaping(interface: str, rate: str) -> list[str]:
    """The command that holds what an interface sends to a rate."""
    # A bucket of about a millisecond: a small payload is held to the rate like a large one.
    shape = ["tbf", "rate", rate, "burst", str(burst(rate)), "latency", "400ms"]
    return ["tc", "qdisc", "replace", "dev", interface, "root", *shape]


def reshape(rate: str) -> None:
    """Give the link another rate; for a program that runs on it, at each of its sites."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    if rate == "none":
        subprocess.run(["tc", "qdisc", "del", "dev", interface, "root"], check=False, stderr=subprocess.DEVNULL)
    else:
        run(*shaping(interface, rate))


def may_make_links() -> bool:
    """Return whether this process may make network namespaces."""
    return sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None


def burst(rate: str) -> int:
    """Bytes that a link of this rate carries in a millisecond, at least 16 kB."""
    number, unit = re.fullmatch(r"([\d.]+)(k|m|g)bit", rate).groups()
    return max(16_000, int(float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit] / 8 / 1000))


def wait_for_both(first: subprocess.Popen, second: subprocess.Popen) -> int:
    """Return the exit status of two sites; after one has failed, the other one has some seconds to end, too."""
    failed = 0.0
    while None in (codes := [site.poll() for site in (first, second)]):
        if any(codes):
            failed = failed or time.monotonic()
            if time.monotonic() - failed > FAILURE_SECONDS:
                first.kill()
                second.kill()
        time.sleep(0.02)
    return codes[0] or codes[1] or 0


def main() -> int:
    parser = parser_of(
        __doc__,
        round_trip=(0.0, "milliseconds"),
    )
    parser.add_argument("rate")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.rate != "none" and not re.fullmatch(r"[\d.]+[kmg]bit", arguments.rate):
        parser.error(f"a rate reads like 100mbit, or none, got {arguments.rate!r}")
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go, too
    with (
        Link(arguments.rate, arguments.round_trip) as link,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as other,
    ):
        second = link.start(1, arguments.program, 29500, stdout=other, stderr=other)
        first = link.start(0, arguments.program, 29500, stderr=errors)
        try:
            status = wait_for_both(first, second)
        except BaseException:
            first.kill()
            second.kill()
            raise
        if status:
            for rank, stream in enumerate((errors, other)):
                stream.seek(0)
                print(f"-- site {rank}", *stream.read().decode().splitlines()[-15:], sep="\n", file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main())
