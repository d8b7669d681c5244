"""HTTP proxies in threads of a test: one that passes connections on (CONNECT), and answers that go wrong."""

import base64
import contextlib
import select
import socket
import threading
from collections.abc import Iterator

TIMEOUT = 60.0


class ConnectProxy:
    """Proxy that takes CONNECT requests, one thread for each connection.

    Args:
        family: address family that it listens with.
        credentials: ``user:password`` that it requires; empty for none.
        answer: bytes that it sends in place of a connection; None to connect.
        target: address that it connects to in place of the one that it is asked for.

    Attributes:
        address: host and port.
        asked: the addresses that it was asked for.
        passed: bytes that it has passed on to servers.
    """

    def __init__(
        self,
        family: socket.AddressFamily = socket.AF_INET,
        credentials: str = "",
        answer: bytes | None = None,
        target: tuple[str, int] | None = None,
    ) -> None:
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self._server = socket.create_server((host, 0), family=family)
        self.address = self._server.getsockname()[:2]
        self.asked: list[str] = []
        self.passed = 0
        self._credentials, self._answer, self._target = credentials, answer, target
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Address of the proxy, with its credentials."""
        host, port = self.address
        user = f"{self._credentials}@" if self._credentials else ""
        return f"http://{user}[{host}]:{port}" if ":" in host else f"http://{user}{host}:{port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            lines = head.decode().split("\r\n")
            self.asked.append(lines[0].split(" ")[1])
            if self._answer is not None:
                connection.sendall(self._answer)
                if not self._answer:
                    connection.recv(1)  # silent until the other end has gone
                return
            expected = base64.b64encode(self._credentials.encode()).decode()
            if self._credentials and f"Proxy-Authorization: Basic {expected}" not in lines:
                connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            host, _, port = self.asked[-1].rpartition(":")
            try:
                server = socket.create_connection(self._target or (host.strip("[]"), int(port)), TIMEOUT)
            except OSError:
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
                return
            self._connections.append(server)
            with server:
                connection.sendall(b"HTTP/1.1 200 Connection established\r\nVia: a test\r\n\r\n")
                self._pass_on(connection, server)

    def _pass_on(self, connection: socket.socket, server: socket.socket) -> None:
        while True:
            for source in select.select([connection, server], [], [])[0]:
                content = source.recv(1 << 16)
                if not content:
                    return
                if source is connection:
                    self.passed += len(content)
                (server if source is connection else connection).sendall(content)

    def close(self) -> None:
        """End the proxy and all its connections."""
        for each in (self._server, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextlib.contextmanager
def running_proxy(**settings: object) -> Iterator[ConnectProxy]:
    """Run a proxy; arguments are those of `ConnectProxy`."""
    proxy = ConnectProxy(**settings)
    try:
        yield proxy
    finally:
        proxy.close()
