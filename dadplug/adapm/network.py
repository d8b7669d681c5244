"""Messages from site to site over ZeroMQ: any site sends to any other at any time, from any thread."""

from __future__ import annotations

import math
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..exchange import Traffic
from ..exchange.rendezvous import address_of, interface_in_use
from .messages import Message

_BATCH = 64  # messages taken in between two looks at everything else
_BUFFER = 4 << 20  # bytes that the system keeps for a connection each way: a batch of values
_CLOSE = 1000  # ms that the last messages get to leave


def _zmq() -> Any:
    try:
        import zmq
        import zmq.utils.monitor
    except ImportError as error:
        raise ImportError(
            "the parameter manager needs pyzmq between sites, which is not installed: pip install 'dadplug[adapm]'"
        ) from error
    return zmq


def own_address() -> str:
    """Finds the address under which the other sites reach this one: that of the interface that gloo uses."""
    interface = interface_in_use()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface and (address := address_of(probe, interface)):
            return address
        try:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            probe.connect((socket.gethostbyname(host), 9))  # sends nothing; finds the way
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


class Network:
    """Connections from this site to each other one.

    `send` may be called from any thread, `receive` from one.

    Args:
        rank: this site.
        exchange: gathers one object a site, by rank; all sites call it together.
        timeout: seconds after which a connection without a sign of life counts as lost.
        traffic: the meter.
    """

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]], timeout: float, traffic: Traffic) -> None:
        self._zmq = zmq = _zmq()
        self._rank = rank
        self._traffic = traffic
        self._context = zmq.Context(io_threads=1)
        self._router = self._socket(zmq.ROUTER)
        self._router.bind(f"tcp://{own_address()}:*")
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        # A stranger who connects does not know the secret, and is not heard.
        places = exchange((endpoint, secrets.token_bytes(16) if rank == 0 else b""))
        secret = places[0][1]
        self._ranks = {secret + struct.pack("<H", peer): peer for peer in range(len(places))}
        self._peers: dict[int, Any] = {}
        self._locks = {peer: threading.Lock() for peer in range(len(places))}
        self._monitors: dict[Any, int] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._ring, self._bell = socket.socketpair()
        for end in (self._ring, self._bell):
            end.setblocking(False)
        self._poller.register(self._bell, zmq.POLLIN)
        for peer, (place, _) in enumerate(places):
            if peer == rank:
                continue
            dealer = self._socket(zmq.DEALER)
            dealer.setsockopt(zmq.ROUTING_ID, secret + struct.pack("<H", rank))
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)  # who is gone stays gone
            dealer.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * timeout / 4))
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * timeout))
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
            self._monitors[monitor] = peer
            self._poller.register(monitor, zmq.POLLIN)
            dealer.connect(place)
            self._peers[peer] = dealer

    def _socket(self, kind: int) -> Any:
        opened = self._context.socket(kind)
        opened.setsockopt(self._zmq.SNDHWM, 0)  # two sites that wait for room at each other would wait for ever
        opened.setsockopt(self._zmq.RCVHWM, 0)
        opened.setsockopt(self._zmq.LINGER, _CLOSE)
        for buffer in (self._zmq.SNDBUF, self._zmq.RCVBUF):
            opened.setsockopt(buffer, _BUFFER)
        return opened

    def send(self, peer: int, message: Message) -> None:
        """Sends a message, and returns at once; its arrays must not change afterwards."""
        self._traffic.add(message.nbytes)
        with self._locks[peer], suppress(self._zmq.Again):  # nobody is there any more, as `receive` will tell
            if not self._peers[peer].closed:
                self._peers[peer].send_multipart(message.encode(), self._zmq.NOBLOCK, copy=False)

    def receive(self, timeout: float) -> tuple[list[tuple[int, list[Any]]], list[int]]:
        """Waits for messages.

        Args:
            timeout: seconds to wait at most.

        Returns:
            The frames of messages with their senders, and the sites whose connection has been lost.
        """
        zmq = self._zmq
        messages, lost = [], []
        for source, _ in self._poller.poll(max(0, math.ceil(1000 * timeout))):
            if source == self._bell.fileno():
                while self._rung():
                    pass
            elif source is self._router:
                for _ in range(_BATCH):
                    try:
                        frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
                    except zmq.Again:
                        break
                    sender = self._ranks.get(frames[0].bytes)
                    if sender is not None:
                        messages.append((sender, [frame.buffer for frame in frames[1:]]))
            else:
                zmq.utils.monitor.recv_monitor_message(source)
                lost.append(self._monitors[source])
        return messages, lost

    def wake(self) -> None:
        """Ends the wait of `receive`; from any thread."""
        with suppress(OSError):  # it has been rung often enough
            self._ring.send(b"!")

    def _rung(self) -> bool:
        try:
            return bool(self._bell.recv(4096))
        except OSError:
            return False

    def close(self) -> None:
        """Closes all connections once the last messages have left; from the thread that receives."""
        for peer, dealer in self._peers.items():
            with self._locks[peer]:
                dealer.disable_monitor()
                dealer.close()
        for monitor in self._monitors:
            monitor.close(0)
        self._router.close(0)
        self._ring.close()
        self._bell.close()
        self._context.term()
