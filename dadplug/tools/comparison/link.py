"""A link of a given rate and round trip between processes of this machine.

Each process moves to a network namespace of its own, which ends with the process. Its only interface to the others is a
TUN device, whose packets the parent process reads, delays and passes on. Kernels without netem can do this, too.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

from ...support.processes import Child

_TUN = "/dev/net/tun"
_INTERFACE = "dplink"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_DEVICE, _PLAIN_PACKETS = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
_QUEUE = 0.4  # seconds that a packet waits for the link at most; then it is dropped, as by a router
_POLL = 0.05  # seconds after which the relay looks for new devices
_DESTINATION = 19  # place of the last byte of the receiver's address in an IPv4 packet


@dataclass(frozen=True)
class Link:
    """Rate and round trip of the link that each site has, in both directions.

    Attributes:
        text: both, as the user gave them.
        rate: bits a second.
        round_trip: seconds of a round trip between two sites.
    """

    text: str
    rate: float
    round_trip: float

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read a rate and a round trip, such as ``20mbit,60ms``, and check that this process may make links.

        Raises:
            ValueError: if the text reads otherwise, or links cannot be made here.
        """
        number = r"(\d+(?:\.\d+)?)"
        found = re.fullmatch(rf"{number}([kmg])bit,\s*{number}ms", text.strip().lower())
        if found is None or not float(found[1]):
            raise ValueError(f"a link is a rate and a round trip, such as 20mbit,60ms; got {text!r}")
        needs = {
            "Linux": sys.platform.startswith("linux"),
            "root": hasattr(os, "geteuid") and os.geteuid() == 0,
            "the program ip (iproute2)": shutil.which("ip") is not None,
            _TUN: os.path.exists(_TUN),
        }
        if missing := [name for name, is_there in needs.items() if not is_there]:
            raise ValueError(
                f"a link of its own needs {', '.join(needs)}; there is no {', no '.join(missing)} here. "
                "Run it as root on Linux, or without link"
            )
        rate = float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]
        return cls(text, rate, float(found[3]) / 1e3)

    def __str__(self) -> str:
        return f"a shaped link of this machine: {self.text.replace(',', ', ')} round trip"


def address_of(site: int) -> str:
    """Return the address of a site on the link."""
    return f"10.77.0.{site + 1}"


def enter(pipe: Connection, site: int) -> None:
    """Move this process to a network namespace, whose interface the parent process gets by the pipe.

    Args:
        pipe: the end of a pipe to the parent process, which calls `Relay.receive`.
        site: number of this process, from 0.

    Raises:
        OSError: if it is not allowed; the parent process gets the error.
    """
    import fcntl  # which Windows does not have

    try:
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"no network namespace: {os.strerror(ctypes.get_errno())}")
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH", _INTERFACE.encode(), _PLAIN_PACKETS))
        own = f"addr add {address_of(site)}/24 dev {_INTERFACE}"
        for command in (own, "link set lo up", f"link set {_INTERFACE} up"):
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pipe.send((None, str(error)))
        raise OSError(str(error)) from error
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    pipe.send((None, ""))
    send_handle(pipe, device, os.getppid())
    os.close(device)


class Relay(threading.Thread):
    """Thread that passes packets between sites, each at the rate of the link and after half of a round trip.

    Args:
        link: rate and round trip.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(name="relay", daemon=True)
        self._link = link
        self._devices: dict[int, int] = {}  # by site
        self._sent: dict[int, float] = defaultdict(float)  # when a site's last packet has left it
        self._arrived: dict[int, float] = defaultdict(float)  # when the last packet for a site has arrived
        self._is_over = False

    def receive(self, child: Child, site: int) -> None:
        """Take the interface of a child process, which calls `enter`.

        Raises:
            ValueError: if the child process may not make one.
        """
        _, error = child.receive()
        if error:
            raise ValueError(f"a link of its own cannot be made here: {error}")
        self._devices[site] = recv_handle(child.pipe)

    def end(self) -> None:
        """End the thread."""
        self._is_over = True
        self.join()

    def run(self) -> None:
        """Pass packets on."""
        waiting: list[tuple[float, int, int, bytes]] = []  # when it arrives, its number, its receiver
        number = 0
        while not self._is_over:
            sites = {device: site for site, device in self._devices.items()}
            left = max(0.0, min(_POLL, waiting[0][0] - time.monotonic())) if waiting else _POLL
            for device in select.select(list(sites), (), (), left)[0]:
                try:
                    packet = os.read(device, 1 << 16)
                except OSError:  # the process has ended, and its interface with it
                    os.close(self._devices.pop(sites[device]))
                    continue
                receiver = packet[_DESTINATION] - 1 if packet[0] >> 4 == 4 else -1
                if (due := self._due(sites[device], receiver, len(packet))) is not None:
                    number += 1
                    heapq.heappush(waiting, (due, number, receiver, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, receiver, packet = heapq.heappop(waiting)
                if receiver in self._devices:
                    with suppress(OSError):  # the interface has gone, or its queue is full
                        os.write(self._devices[receiver], packet)
        for device in self._devices.values():
            os.close(device)

    def _due(self, sender: int, receiver: int, nbytes: int) -> float | None:
        """Return when a packet arrives; None if it is dropped."""
        now, seconds = time.monotonic(), 8 * nbytes / self._link.rate
        sent = max(now, self._sent[sender]) + seconds
        reached = sent + self._link.round_trip / 2
        arrived = max(reached, self._arrived[receiver] + seconds)
        if receiver not in self._devices or max(sent - now - seconds, arrived - reached) > _QUEUE:
            return None
        self._sent[sender], self._arrived[receiver] = sent, arrived
        return arrived
