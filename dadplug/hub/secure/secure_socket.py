"""TLS connection that encrypts in memory, so that one system call moves many records.

`ssl.SSLSocket` sends each record of 16 kB by a system call of its own, which wakes up the other end, and receives each
by two. Here OpenSSL works on memory, and the socket below it is read and written in large parts.

Connections that stay inside one machine: their messages pass through a Unix socket, without encryption.

Site and hub have proved by certificates who they are before they compare what each of them sees, over TLS. They share
the running kernel and its network namespace, and the connection has the same pair of addresses and ports at both ends.
A kernel has one connection with that pair. So nothing lies between the ends, neither a relay nor another machine. The
hub then connects to a Unix socket of the site, whose name and secret the site has sent over TLS, and answers there.
Messages in it belong to no network interface, where packets could be captured.

What is sent may be capped: a token bucket is shared by all connections that it counts for.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import ssl
import struct
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ...exchange.framing import send_parts
from ...exchange.handshake import Deadline
from ..wire.messages import Hello

# A full TCP segment takes 1500 bytes of the network for 1448 of a connection (IPv4, timestamps).
_ON_THE_NETWORK = 1500 / 1448
_BURST_SECONDS = 0.05
_UNCONFIRMED = 0x5411  # request of Linux for the bytes of a socket that are not confirmed: SIOCOUTQ
_SMALLEST_BURST = 1 << 14  # bytes: a full record of TLS
_SMALLEST_PART = 1448  # bytes: a segment is not divided further


class TokenBucket:
    """Number of bytes that may be sent, which grows with time; may be used by several threads.

    Args:
        megabits: megabits per second, with the heads of packets.

    Raises:
        ValueError: if it is not positive.
    """

    def __init__(self, megabits: float) -> None:
        if not megabits > 0:
            raise ValueError(f"rate limit {megabits}: it has to be positive, in Mbit/s")
        self._rate = megabits * 1e6 / 8 / _ON_THE_NETWORK
        self._most = max(_SMALLEST_BURST, self._rate * _BURST_SECONDS)
        self._tokens, self._since = self._most, time.monotonic()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        """Return how many of some bytes may be sent now, which count as sent.

        Args:
            nbytes: the number of bytes.
        """
        with self._lock:
            self._fill()
            if self._tokens < min(nbytes, _SMALLEST_PART):
                return 0
            granted = min(nbytes, int(self._tokens))
            self._tokens -= granted
            return granted

    def give_back(self, nbytes: int) -> None:
        """Take back bytes that `take` has granted, and were not sent.

        Args:
            nbytes: the number of bytes.
        """
        with self._lock:
            self._tokens += nbytes

    def delay(self) -> float:
        """Return the seconds until bytes may be sent again, such that each turn sends a fair part."""
        with self._lock:
            self._fill()
            wanted = min(self._most / 2, 4 * _SMALLEST_PART)
            return max(0.0, (wanted - self._tokens) / self._rate)

    def _fill(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._most, self._tokens + (now - self._since) * self._rate)
        self._since = now


_buckets: dict[str, TokenBucket] = {}


def site_bucket(folder: str, megabits: float | None) -> TokenBucket | None:
    """Return the bucket that all connections of this process with one kit share; None without a limit.

    Args:
        folder: folder of the kit.
        megabits: its limit, in Mbit/s.
    """
    if megabits is None:
        return None
    key = f"{folder} {megabits}"
    return _buckets.setdefault(key, TokenBucket(megabits))


_READ_BYTES = 144 << 10  # received by one system call, at most: more than a full frame
_RECORD_CONTENT = 1 << 14  # bytes of a full record's content
_LOCAL_BUFFER = 1 << 19  # bytes that the kernel holds of a Unix socket, if it allows so many
_HEAD_BYTES = 5  # of a record's head, which ends with the length of the rest
_LAST_RECEIVED = struct.Struct("=52xI")  # of Linux's struct tcp_info, milliseconds since bytes have arrived
_ENCRYPTION_BYTES = 17  # of the rest beside the content: its type, and the tag


class _Records:
    """Boundaries of the records in a stream of TLS, which are not encrypted.

    Attributes:
        missing: bytes of the last record that have not arrived.
        content: bytes of that record's content.
        head: beginning of a record of which less than its head has arrived.
    """

    def __init__(self) -> None:
        self.missing = self.content = 0
        self.head = b""

    def count(self, arrived: memoryview) -> None:
        """Count bytes that have arrived."""
        if self.head:
            arrived, self.head = memoryview(self.head + arrived), b""
        start, end = self.missing, len(arrived)
        while start < end:
            if end - start < _HEAD_BYTES:
                self.head = bytes(arrived[start:])
                start = end
                break
            length = arrived[start + 3] << 8 | arrived[start + 4]
            self.content = length - _ENCRYPTION_BYTES
            start += _HEAD_BYTES + length
        self.missing = start - end

    def bytes_for(self, nbytes: int) -> int:
        """Return how many bytes have to arrive, at least, until a number of bytes can be received, 1 for any."""
        left = nbytes - self.content if self.missing else nbytes
        if left <= 0 or nbytes == 1:
            return max(1, self.missing)
        return self.missing - len(self.head) + left + -(-left // _RECORD_CONTENT) * (_HEAD_BYTES + _ENCRYPTION_BYTES)


class SecureSocket:
    """TLS connection over a connected socket. Not to be used by two threads at once.

    The methods are those of `ssl.SSLSocket`, but for `write`, `flush` and `expect`, and what `recv_into` returns.

    Two ends in one machine may go on over a Unix socket once they have proved who they are, see
    `dadplug.hub.secure.secure_socket`.

    Args:
        connection: the connected socket; it may block or not.
        context: the TLS context.
        server_side: whether this end is the server.
        server_hostname: name that the server's certificate has to have, at the client.

    Attributes:
        tls: the session, with the certificate of the other end, the version and the cipher.
        limit: cap of what is sent, once the connection does not block; None without one.
        held: seconds for which bytes have to wait for the cap, as of the last `flush`; 0 where they do not.
    """

    def __init__(
        self,
        connection: socket.socket,
        context: ssl.SSLContext,
        server_side: bool = False,
        server_hostname: str | None = None,
    ) -> None:
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side, server_hostname)
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._unsent = memoryview(b"")
        self._blocks = connection.gettimeout() != 0
        self._drained = False  # whether the last read has taken all that had arrived
        self._ended = False  # whether the other end has closed the connection
        self._records = _Records()
        self._replaced: socket.socket | None = None  # the TCP connection that a Unix socket has replaced
        self._content: deque[memoryview] = deque()  # to be sent as it is
        self._arrived = self._buffer[:0]  # bytes that were not encrypted, not taken yet
        self._mark = 1  # low-water mark of the socket
        self.limit: TokenBucket | None = None
        self.held = 0.0

    def __enter__(self) -> SecureSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def do_handshake(self) -> None:
        """Perform the TLS handshake, as far as possible; where the socket blocks, its timeout is for all of it.

        Raises:
            ssl.SSLWantReadError: if more has to arrive first, where the socket does not block.
            ssl.SSLWantWriteError: if the socket has to take bytes first, where it does not block.
            ssl.SSLError: if the ends do not agree; the other end has been sent an alert.
            OSError: if the connection is lost.
        """
        timeout = self.gettimeout()
        deadline = Deadline(timeout) if timeout else None
        try:
            while True:
                if not self.flush():
                    raise ssl.SSLWantWriteError
                try:
                    self.tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    if deadline is not None:
                        if deadline.over:
                            raise TimeoutError from None
                        self._socket.settimeout(deadline.left or timeout)
                    if not self.flush() or self._receive():
                        continue
                    raise
                except ssl.SSLError:
                    with suppress(OSError):
                        self.flush()  # the alert
                    raise
            if not self.flush():
                raise ssl.SSLWantWriteError
        finally:
            if deadline is not None:
                self._socket.settimeout(timeout)

    # What is sent

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Encrypt bytes, which `flush` sends; they must not be changed before."""
        if self._replaced is not None:
            self._content.append(memoryview(content))
        else:
            self.tls.write(content)

    def continue_over(self, local: socket.socket) -> None:
        """Send and receive over a Unix socket from now on, without encryption; the other end does the same.

        To be called when no bytes wait to be sent or read. The TCP connection stays open, without messages.

        Args:
            local: the connected Unix socket.
        """
        local.settimeout(self._socket.gettimeout())
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            local.setsockopt(socket.SOL_SOCKET, option, _LOCAL_BUFFER)
        self._replaced, self._socket = self._socket, local
        self._records, self._drained, self._mark = _Records(), False, 1

    def flush(self) -> bool:
        """Send what has been encrypted; return whether the socket has taken all of it.

        Raises:
            OSError: if the connection is lost.
        """
        if self._replaced is not None:
            send_parts(self._socket, self._content)
            return not self._content
        while True:
            unsent = self._unsent
            if not unsent:
                if not self._outgoing.pending:
                    return True
                unsent = memoryview(self._outgoing.read())
            granted, self.held = len(unsent), 0.0
            limit = None if self._blocks else self.limit
            if limit is not None:
                granted = limit.take(granted)
                if not granted:
                    self._unsent, self.held = unsent, max(0.001, limit.delay())
                    return False
            try:
                count = self._socket.send(unsent[:granted])
            except BlockingIOError:
                count = 0
            if limit is not None:
                limit.give_back(granted - count)
            self._unsent = unsent[count:]
            if count < granted and not self._blocks:
                return False

    def sendall(self, content: bytes) -> None:
        """Send bytes; where the socket does not block, `flush` sends the rest."""
        self.write(content)
        self.flush()

    # What arrives

    def recv_into(self, buffer: memoryview) -> int | None:
        """Receive bytes.

        Args:
            buffer: room for them.

        Returns:
            Their number; 0 if the other end has closed the connection, and None where more has to arrive first.

        Raises:
            OSError: if the connection is lost.
        """
        if self._replaced is not None:
            return self._take(buffer)
        while True:
            if count := self._decrypt(buffer):
                return count
            if self._ended:
                return 0
            if not self._receive():
                return None

    def _take(self, buffer: memoryview) -> int | None:
        """Receive bytes that are not encrypted; see `recv_into`."""
        if not self._arrived:
            if self._ended:
                return 0
            arrived = self._read()
            if arrived is None:
                return None
            self._arrived = arrived
        taken = self._arrived[: len(buffer)]
        self._arrived = self._arrived[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def _decrypt(self, buffer: memoryview) -> int:
        """Decrypt what has arrived, as far as there is room; return the number of bytes."""
        encrypted, incoming, size = self.tls, self._incoming, len(buffer)
        filled = 0
        while filled < size and (incoming.pending or encrypted.pending()):
            try:
                count: int = encrypted.read(size - filled, buffer[filled:])  # type: ignore[assignment]
            except ssl.SSLWantReadError:  # a record is incomplete
                break
            if not count:  # a closing alert
                self._ended = True
                break
            filled += count
        return filled

    def recv(self, size: int) -> bytes:
        """Receive bytes, up to a number; none if the other end has closed the connection.

        Raises:
            ssl.SSLWantReadError: if more has to arrive first, where the socket does not block.
            OSError: if the connection is lost.
        """
        buffer = bytearray(size)
        count = self.recv_into(memoryview(buffer))
        if count is None:
            raise ssl.SSLWantReadError
        return bytes(buffer[:count])

    def _receive(self) -> bool:
        """Receive encrypted bytes; return whether any have arrived or the connection has ended."""
        arrived = self._read()
        if arrived is None:
            return False
        if arrived:
            self._records.count(arrived)
            self._incoming.write(arrived)
        else:
            self._incoming.write_eof()
        return True

    def _read(self) -> memoryview | None:
        """Return the bytes that have arrived, none at the end of the connection; None where there are none yet."""
        if self._drained:
            self._drained = False
            return None
        try:
            count = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return None
        self._ended |= not count
        self._drained = not self._blocks and 0 < count < _READ_BYTES
        return self._buffer[:count]

    @property
    def partial(self) -> bool:
        """Whether the beginning of a record has arrived, which cannot be decrypted before its end."""
        return bool(self._records.missing or self._records.head)

    def expect(self, nbytes: int) -> None:
        """Let the socket become readable when so many bytes can be received, or the connection ends.

        The socket may become readable sooner, and does not if the other end sends fewer bytes. To be
        called after `recv_into` has returned None. Only Linux takes it.

        Args:
            nbytes: the number; 1 for any.
        """
        if sys.platform != "linux":
            return
        mark = nbytes if self._replaced is not None else self._records.bytes_for(nbytes)
        if mark != self._mark:
            self._mark = mark
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)

    # The socket

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of the socket; 0 for one that does not block."""
        self._socket.settimeout(seconds)
        self._blocks, self._drained = seconds != 0, False

    def gettimeout(self) -> float | None:
        """Return the timeout of the socket."""
        return self._socket.gettimeout()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._socket.setsockopt(level, option, value)

    def give_up_after(self, seconds: float) -> None:
        """Close the connection when the other end has not acknowledged bytes for some seconds, where the system can."""
        if hasattr(socket, "TCP_USER_TIMEOUT") and self._replaced is None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * seconds))

    @property
    def silent_seconds(self) -> float:
        """Seconds since the system has received bytes, read or not; 0 where it does not tell."""
        if sys.platform != "linux" or self._replaced is not None:
            return 0.0
        try:
            information = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_RECEIVED.size)
        except OSError:  # it is lost, or no TCP connection
            return 0.0
        return float(_LAST_RECEIVED.unpack(information)[0]) / 1e3

    @property
    def has_delivered(self) -> bool:
        """Whether the other end's system has confirmed what was sent, but for two segments; True where none tells."""
        with suppress(ImportError, OSError, ValueError):  # it is lost, or no TCP connection
            import fcntl

            left = fcntl.ioctl(self.fileno(), _UNCONFIRMED, bytes(4))
            segment = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            return int.from_bytes(left, sys.byteorder) <= 2 * segment  # which it may confirm late
        return True

    def addresses(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Return host and port of this end and of the other one, of the TCP connection.

        Raises:
            OSError: if the connection is lost.
        """
        connected = self._replaced or self._socket
        here, there = connected.getsockname(), connected.getpeername()
        return (here[0], here[1]), (there[0], there[1])

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def detach(self) -> int:
        """Detach the socket from this connection and return its descriptor."""
        if self._replaced is not None:
            self._replaced.close()
        return self._socket.detach()

    def close(self) -> None:
        """Close the socket, without a closing alert of TLS."""
        self._socket.close()
        if self._replaced is not None:
            self._replaced.close()


_BOOT = Path("/proc/sys/kernel/random/boot_id")  # random, made when the kernel starts
_NAMESPACE = "/proc/self/ns/net"
_PREFIX = "\0dadplug-"  # of names of sockets
_SECRET_BYTES = 32
_SECRET_SECONDS = 0.5  # until the secret has arrived, which the hub sends at once


def connection_mark(connection: SecureSocket, dialled: bool) -> str:
    """Return a digest of kernel, network namespace and addresses of a connection, the same at both ends of a local one.

    Args:
        connection: the connection.
        dialled: whether this end has connected.

    Returns:
        The digest; empty where the system does not tell, or the connection is lost.
    """
    if sys.platform != "linux":
        return ""
    try:
        ends = connection.addresses()
        seen = (_BOOT.read_text().strip(), os.readlink(_NAMESPACE), *(ends if dialled else reversed(ends)))
    except OSError:
        return ""
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def is_local(connection: SecureSocket, mark: str) -> bool:
    """Return whether both ends of a connection are in one machine and network namespace, with nothing in between.

    Args:
        connection: the connection, at the end that was connected to.
        mark: result of `connection_mark` at the other end.
    """
    own = connection_mark(connection, dialled=False) if mark else ""
    return bool(own) and hmac.compare_digest(own.encode(), mark.encode())


class LocalDoor(socket.socket):
    """Unix socket at which a site waits for the answer of a hub in the same machine. To be closed.

    Its name is an abstract one: it belongs to the network namespace, and leaves no file.

    Args:
        mark: result of `connection_mark`.

    Attributes:
        mark: the same.
        place: name of the socket.
        secret: what the hub, which gets to know it over TLS, has to send first.
    """

    def __init__(self, mark: str) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.mark = mark
        self.place, self.secret = (secrets.token_hex(_SECRET_BYTES // 2) for _ in range(2))
        self.setblocking(False)
        self.bind(_PREFIX + self.place)
        self.listen()

    def admit(self) -> socket.socket | None:
        """Return the hub's connection if it has arrived; others are closed."""
        while True:
            try:
                connected, _ = self.accept()
            except OSError:
                return None
            connected.settimeout(_SECRET_SECONDS)
            try:
                found = connected.recv(_SECRET_BYTES)
            except OSError:
                found = b""
            if hmac.compare_digest(found, self.secret.encode()):
                return connected
            connected.close()


def open_door(connection: SecureSocket) -> LocalDoor | None:
    """Return a socket for a hub that may be in the same machine; None where that cannot be.

    Args:
        connection: the connection to the hub, at the end that has connected.
    """
    mark = connection_mark(connection, dialled=True)
    try:
        here, there = connection.addresses()
        return LocalDoor(mark) if mark and here[0] == there[0] else None
    except OSError:
        return None


def dial_back(connection: SecureSocket, hello: Hello) -> socket.socket | None:
    """Return a connection to the Unix socket of a site in the same machine; None where there is none.

    Args:
        connection: the connection from the site, at the hub.
        hello: the site's first message.
    """
    if not hello.place or not is_local(connection, hello.mark):
        return None
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    local.setblocking(False)
    try:
        local.connect(_PREFIX + hello.place)
        local.send(hello.secret.encode())
    except OSError:
        local.close()
        return None
    return local
