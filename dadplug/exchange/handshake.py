"""Handshakes: how processes listen, prove that they belong to a group, and all connect to one another.

Processes of a node connect by Unix sockets where the system has abstract names for them, as Linux does: those take
about half of the processor time of TCP on the loopback interface.

Deadlines of waits are here, too, and timeouts for calls that have none: torch's store waits forever for a server that
is stopped.
"""

from __future__ import annotations

import atexit
import os
import secrets
import select
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from ..errors import SiteError
from ..support.logs import get_logger
from .fields import fits, invalid

_AT_EXIT = 1.0  # seconds
_CHECK_SECONDS = 2.0  # between two checks of a call that takes long

Result = TypeVar("Result")
_given_up: list[threading.Thread] = []


class Deadline:
    """End of a wait.

    Args:
        seconds: time from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end


def within(seconds: float, call: Callable[[], Result], check: Callable[[], object] = lambda: None) -> Result:
    """Run a call in a thread of its own, and abandon it after the timeout; the thread may continue.

    Args:
        seconds: the timeout.
        call: the call.
        check: called now and then meanwhile; the call is abandoned if it raises an exception.

    Raises:
        TimeoutError: if it has not ended in time.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="dadplug-deadline", daemon=True)
    thread.start()
    deadline = Deadline(seconds)
    try:
        while not wait([future], min(deadline.left, _CHECK_SECONDS)).done:
            if deadline.over:
                raise TimeoutError("timed out")
            check()
    except BaseException:
        _given_up.append(thread)
        raise
    return future.result()


@atexit.register
def _wait_at_exit() -> None:
    """Wait briefly for abandoned threads: one that returns from torch while the interpreter ends aborts it."""
    deadline = Deadline(_AT_EXIT)
    for thread in _given_up:
        thread.join(deadline.left)


_log = get_logger(__name__)

KERNEL_BYTES = 1 << 20  # that the kernel is assumed to buffer in each direction of a connection
_BUFFER_BYTES = 4 << 20  # requested from the kernel for each direction
_CONNECT_SECONDS = 10.0  # for all sites to reach one another
_SWITCH = "DADPLUG_STREAMS"
_HELLO = struct.Struct("<16sI")  # the listener's token, the connecting site's rank
_LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_chosen: str | None = None  # towards the rendezvous address


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """Look up the IPv4 address of a network interface; None where it has none."""
    import fcntl

    request = struct.pack("256s", interface[:15].encode())
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    except OSError:
        return None


def choose_interface(host: str, port: int) -> None:
    """Find the network interface that leads to the rendezvous address, for `gloo_interface` and `own_addresses`."""
    global _chosen
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(host), port))  # sends nothing; selects the route
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == address:
                _chosen = name


@contextmanager
def gloo_interface() -> Iterator[None]:
    """Set gloo's interface for groups that are made inside, unless the user has set it; a context manager.

    By default gloo takes the interface that the host name resolves to, often loopback, and the sites cannot connect.
    """
    if _INTERFACE in os.environ or _chosen is None:
        yield
        return
    os.environ[_INTERFACE] = _chosen
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)


def own_addresses() -> list[str]:
    """Return addresses of this host that others may reach, the most likely first: those that gloo would take."""
    interface = os.environ.get(_INTERFACE, "").split(",")[0] or _chosen  # the user's choice first
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            address = _address_of(probe, interface)
            return [address] if address else []
        with suppress(OSError, KeyError):
            probe.connect((socket.gethostbyname(os.environ["MASTER_ADDR"]), 9))
            found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return [*found, "127.0.0.1"]


def listen(addresses: Sequence[str] = (), large: bool = False) -> socket.socket | None:
    """Open a listening socket; return None if no address allows it.

    Args:
        addresses: addresses of this machine, the first that allows it is used; by default those that others reach.
        large: whether its connections have large buffers, see `large_socket`.
    """
    for address in addresses or own_addresses():
        listener = large_socket(socket.AF_INET) if large else socket.socket(socket.AF_INET)
        with suppress(OSError):
            listener.bind((address, 0))
            listener.listen(1024)
            return listener
        listener.close()
    return None


def explain_unresolved(host: str, error: OSError) -> str:
    """Return what it means that a name has not been resolved."""
    return f"the DNS name {host} does not resolve ({error.strerror or error}); is it right, and does DNS work here?"


class _Address(NamedTuple):
    """Address of a listening site.

    Attributes:
        host: IPv4 address.
        port: TCP port.
        token: what a site that connects sends to prove that it belongs to the group.
        name: abstract name of a Unix socket; empty where it has none.
    """

    host: str
    port: int
    token: bytes
    name: bytes


def _places(every: Sequence[Any]) -> list[_Address]:
    """Return the addresses that sites have sent, by rank, once they have been checked."""
    for rank, each in enumerate(every):
        if not fits(each, tuple[str, int, bytes, bytes]):
            raise invalid("address", f"site {rank}", f"{each!r:.100} is none")
    return [_Address(*each) for each in every]


def connect_sockets(
    rank: int, timeout: float, gather_objects: Callable[..., list[Any]], near: Collection[int] = ()
) -> dict[int, socket.socket] | None:
    """Connect all sites with one another; all of them must call it together.

    Each listens, sends its address to the others, and connects to those of lower rank.

    Args:
        rank: this site.
        timeout: seconds for all sites to reach one another, at most ten.
        gather_objects: `Transport.gather_objects`.
        near: ranks that may be reached by Unix sockets, where that is possible.

    Returns:
        Connected sockets by rank; None on all sites if one of them cannot connect or has DADPLUG_STREAMS=0 in its
        environment. Messages are sent by gloo then.

    Raises:
        SiteError: if a site is gone.
    """
    enabled = os.environ.get(_SWITCH, "1") != "0" and hasattr(select, "poll")
    listener = listen(large=True) if enabled else None
    listeners, address = [], None
    if listener is not None:
        listeners = [listener, *(_listen_near() if near else ())]
        name = listeners[1].getsockname() if len(listeners) > 1 else b""
        address = (*listener.getsockname()[:2], secrets.token_bytes(16), name)
    addresses = gather_objects(address)
    sockets: dict[int, socket.socket] = {}
    if listeners and all(addresses):
        with suppress(SiteError):
            places = _places(addresses)
            sockets = _connect_all(rank, listeners, places, near, min(_CONNECT_SECONDS, timeout), str)
    for each in listeners:
        each.close()
    if all(gather_objects(len(sockets) == len(addresses) - 1, bool, "answer")):
        return sockets
    for connected in sockets.values():
        connected.close()
    return None


def connect_sites(
    rank: int, gather_objects: Callable[..., list[Any]], timeout: float, name: Callable[[int], str]
) -> dict[int, socket.socket]:
    """Connect this site with every other one, or raise an error; all must call it together.

    Each site listens on the one address on which the others reach it, and connects to the sites of lower rank. Sites of
    one node use Unix sockets where Linux provides names for them without files. Connections without the token of the
    listening site are refused.

    Args:
        rank: this site.
        gather_objects: `Transport.gather_objects`.
        timeout: maximum duration in seconds.
        name: function that returns the name of a site for messages.

    Returns:
        The connected sockets by rank.

    Raises:
        OSError: if this site cannot listen.
        SiteError: if a site does not connect.
    """
    host = reachable_address(gather_objects)
    near = _listen_near() if host == _LOOPBACK else []
    listener = near[0] if near else listen([host], large=True)
    if listener is None:
        raise OSError(f"cannot listen on {host}")
    with listener:
        place = ("", 0) if near else listener.getsockname()[:2]
        own = (*place, secrets.token_bytes(16), listener.getsockname() if near else b"")
        addresses = _places(gather_objects(own))
        return _connect_all(rank, [listener], addresses, range(rank), timeout, name)


def reachable_address(gather_objects: Callable[..., list[Any]]) -> str:
    """Return the address to listen on, loopback if all sites are on one node; all sites must call it together."""
    is_one_node = len(set(gather_objects(own_node(), str, "node"))) == 1
    return _LOOPBACK if is_one_node else next(iter(own_addresses()), _LOOPBACK)


def own_node() -> str:
    """Return a string that is equal for processes that reach one another on loopback."""
    node = [socket.gethostname()]
    with suppress(OSError):
        node.append(os.readlink("/proc/self/ns/net"))
    with suppress(OSError):
        node.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(node)


def _listen_near() -> list[socket.socket]:
    """Open a Unix socket with an abstract name, which is gone with the socket; return none where there are none."""
    if sys.platform != "linux":
        return []
    listener = large_socket(socket.AF_UNIX)
    try:
        listener.bind(b"\0dadplug-" + secrets.token_hex(16).encode())
        listener.listen(1024)
    except OSError:
        listener.close()
        return []
    return [listener]


def large_socket(family: socket.AddressFamily) -> socket.socket:
    """Make a socket with large buffers of fixed size; where TCP is granted less, leave their size to the system.

    The system lets them grow with a long link's round trip, unless a program has set their size.
    """
    sized = socket.socket(family)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with suppress(OSError):
            sized.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if family == socket.AF_INET and sized.getsockopt(socket.SOL_SOCKET, option) < KERNEL_BYTES:
            sized.close()
            return socket.socket(family)
    return sized


def _connect_all(
    rank: int,
    listeners: Sequence[socket.socket],
    addresses: Sequence[_Address],
    near: Collection[int],
    timeout: float,
    name: Callable[[int], str],
) -> dict[int, socket.socket]:
    """Connect to the sites of lower rank, and accept the connections of the others.

    Args:
        rank: this site.
        listeners: this site's listening sockets.
        addresses: address of every site, by rank.
        near: ranks that may be reached by Unix sockets.
        timeout: seconds for all sites to reach one another.
        name: function that returns the name of a site for messages.

    Returns:
        Connected sockets by rank.

    Raises:
        SiteError: if a site cannot be reached, or does not connect in time.
    """
    deadline = Deadline(timeout)
    sockets: dict[int, socket.socket] = {}
    try:
        for peer, address in enumerate(addresses[:rank]):
            try:
                sockets[peer] = _connect(address, peer in near, deadline)
                sockets[peer].sendall(_HELLO.pack(address.token, rank))
            except OSError as error:
                at = address.name[1:].decode() or f"{address.host}:{address.port}"
                raise SiteError(f"{name(peer)} cannot be reached at {at} within {timeout:g} s: {error}") from error
        expected = set(range(rank + 1, len(addresses)))
        sockets.update(_accept(listeners, addresses[rank].token, expected, deadline))
        if expected:
            names = ", ".join(map(name, sorted(expected)))
            raise SiteError(f"waited {timeout:g} s for a connection from {names}")
    except SiteError:
        for connected in sockets.values():
            connected.close()
        raise
    return sockets


def _connect(address: _Address, is_near: bool, deadline: Deadline) -> socket.socket:
    """Connect to a listening site, by TCP where its Unix socket cannot be reached: it may be in another container."""
    if is_near and address.name:
        with suppress(OSError):
            return _connected(socket.AF_UNIX, address.name, deadline)
    return _connected(socket.AF_INET, (address.host, address.port), deadline)


def _connected(family: socket.AddressFamily, address: Any, deadline: Deadline) -> socket.socket:
    connected = large_socket(family)
    connected.settimeout(max(0.1, deadline.left))
    try:
        connected.connect(address)
    except OSError:
        connected.close()
        raise
    return connected


def _accept(
    listeners: Sequence[socket.socket], token: bytes, expected: set[int], deadline: Deadline
) -> Iterator[tuple[int, socket.socket]]:
    """Yield the connections of the expected sites; connections of others are closed without a delay for the sites.

    Args:
        listeners: the listening sockets.
        token: what a site sends to prove that it belongs to the group.
        expected: ranks that are to connect; those that have are removed.
        deadline: end of the wait.
    """
    unknown: dict[socket.socket, bytearray] = {}
    refused = 0
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        while expected and not deadline.over:
            for key, _ in selector.select(deadline.left):
                connected = cast(socket.socket, key.fileobj)
                if connected in listeners:
                    with suppress(OSError):
                        connected, _ = connected.accept()
                        connected.setblocking(False)
                        unknown[connected] = bytearray()
                        selector.register(connected, selectors.EVENT_READ)
                    continue
                if not _read_hello(connected, unknown[connected]):
                    continue
                selector.unregister(connected)
                hello = unknown.pop(connected)
                received, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
                if rank in expected and secrets.compare_digest(received, token):
                    expected.remove(rank)
                    yield rank, connected
                else:
                    connected.close()
                    refused += 1
    if refused:
        _log.warning("refused %d connections that did not come from a site", refused)
    for connected in unknown:
        connected.close()


def _read_hello(connected: socket.socket, hello: bytearray) -> bool:
    """Read from a new connection into `hello`; return whether it is complete, or the connection has ended."""
    try:
        received = connected.recv(_HELLO.size - len(hello))
    except BlockingIOError:
        return False
    except OSError:
        return True
    hello += received
    return not received or len(hello) == _HELLO.size


class Readable(Protocol):
    """Connection with a timeout: a socket, or one with TLS."""

    def gettimeout(self) -> float | None: ...

    def settimeout(self, timeout: float | None, /) -> None: ...

    def recv(self, size: int, /) -> bytes: ...


def read_exactly(connected: Readable, size: int, closed: str = "the connection was closed") -> bytes:
    """Return so many bytes of a connection with a timeout, which is for all of them.

    Args:
        connected: the connection.
        size: their number.
        closed: text of the error if the other end closes the connection before.

    Raises:
        OSError: if they do not arrive in time, or the connection is closed.
    """
    content = bytearray()
    timeout = connected.gettimeout()
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while len(content) < size:
            if deadline is not None:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError("timed out")
                connected.settimeout(left)
            part = connected.recv(size - len(content))
            if not part:
                raise ConnectionError(closed)
            content += part
    finally:
        connected.settimeout(timeout)
    return bytes(content)


def write_all(connected: socket.socket, content: bytes) -> None:
    """Send bytes, by a socket with a timeout for each part of them.

    Args:
        connected: the socket.
        content: the bytes.
    """
    while content:
        content = content[connected.send(content) :]


class HasDescriptors(Protocol):
    """Object with descriptors that a forked child has to close."""

    def close_descriptors(self) -> None:
        """Close the descriptors, without a lock and without a message to the other end."""


_open: weakref.WeakSet[HasDescriptors] = weakref.WeakSet()


def close_in_children(connections: HasDescriptors) -> None:
    """Close connections in each child that this process forks, such as a loader's worker.

    They would hide the end of this process from the other end.
    """
    _open.add(connections)


def _close_in_child() -> None:
    for connections in list(_open):
        connections.close_descriptors()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
