"""A link of a given rate and round trip between processes of this machine.

Each process moves to a network namespace of its own, which ends with the comparison. Its only interface to the others
is a TUN device, whose packets the parent process reads, delays and passes on. Kernels without netem can do this, too.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import re
import select
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

from ...support.processes import Child, answer

_TUN = "/dev/net/tun"
_INTERFACE, ADDRESS = "dplink", "10.77.0.{}"  # of a site; the address ends with its number, from 1
# CLONE_NEWNET; TUNSETIFF; IFF_TUN | IFF_NO_PI
_NEW_NETWORK, _SET_DEVICE, _PLAIN_PACKETS = 0x40000000, 0x400454CA, 0x1001
_DESTINATION = 19  # place of the last byte of the receiver's address in an IPv4 packet
# Seconds that a packet waits for the link at most, before it is dropped, as by a router; and between looks for devices.
_QUEUE, _POLL = 0.4, 0.05


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
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise ValueError(
                "a link of its own needs network namespaces of Linux, and root: start the program by sudo, or leave "
                "out link, to compare over loopback"
            )
        rate = float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]
        return cls(text, rate, float(found[3]) / 1e3)


def enter(pipe: Connection, site: int) -> None:
    """Move this process to a network namespace, whose interface, or the error, the parent process gets by the pipe.

    Args:
        pipe: the end of a pipe to the parent process, which calls `Relay.receive`.
        site: number of this process, from 0.
    """
    devices: list[int] = []
    answer(pipe, _enter, site, devices)
    for device in devices:
        send_handle(pipe, device, os.getppid())
        os.close(device)


def _enter(site: int, devices: list[int]) -> None:
    import fcntl  # which Windows does not have

    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"no network namespace: {os.strerror(ctypes.get_errno())}")
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH", _INTERFACE.encode(), _PLAIN_PACKETS))
    own = f"addr add {ADDRESS.format(site + 1)}/24 dev {_INTERFACE}"
    for command in (own, "link set lo up", f"link set {_INTERFACE} up"):
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
    devices.append(device)


class Relay(threading.Thread):
    """Thread that passes packets between sites, each at the rate of the link and after half of a round trip.

    It begins with the first site.

    Args:
        link: rate and round trip.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(name="relay", daemon=True)
        self._link = link
        self._devices: dict[int, int] = {}  # by site
        self._sent: dict[int, float] = {}  # when a site's last packet has left it
        self._arrived: dict[int, float] = {}  # when the last packet for a site has arrived

    def receive(self, child: Child, site: int) -> None:
        """Take the interface of a child process, which calls `enter`.

        Raises:
            ValueError: if the child process may not make one.
        """
        _, error = child.receive()
        if error:
            raise ValueError(f"a link of its own cannot be made here: {error}")
        self._devices[site] = recv_handle(child.pipe)
        if len(self._devices) == 1:
            self.start()

    def end(self) -> None:
        """End the thread, and the interfaces, which the open devices keep even after their processes."""
        devices = list(self._devices.values())
        self._devices.clear()
        if devices:
            self.join()
        for device in devices:
            os.close(device)

    def run(self) -> None:
        """Pass packets on."""
        waiting: list[tuple[float, int, bytes]] = []  # when it arrives, its receiver
        while self._devices:
            sites = {device: site for site, device in self._devices.items()}
            left = max(0.0, min(_POLL, waiting[0][0] - time.monotonic())) if waiting else _POLL
            for device in select.select(list(sites), (), (), left)[0]:
                packet = os.read(device, 1 << 16)
                receiver = packet[_DESTINATION] - 1 if packet[0] >> 4 == 4 else -1
                if (due := self._due(sites[device], receiver, len(packet))) is not None:
                    heapq.heappush(waiting, (due, receiver, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, receiver, packet = heapq.heappop(waiting)
                with suppress(OSError, KeyError):  # the queue of the interface is full, or the link ends
                    os.write(self._devices[receiver], packet)

    def _due(self, sender: int, receiver: int, nbytes: int) -> float | None:
        """Return when a packet arrives; None if it is dropped."""
        now, seconds = time.monotonic(), 8 * nbytes / self._link.rate
        sent = max(now, self._sent.get(sender, 0.0)) + seconds
        reached = sent + self._link.round_trip / 2
        arrived = max(reached, self._arrived.get(receiver, 0.0) + seconds)
        if receiver not in self._devices or max(sent - now - seconds, arrived - reached) > _QUEUE:
            return None
        self._sent[sender], self._arrived[receiver] = sent, arrived
        return arrived
