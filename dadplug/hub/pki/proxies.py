"""HTTP proxies on the way to the hub: their addresses, which one is used, and tunnels by CONNECT (RFC 9110, 9.3.6).

The proxy sees the hub's address, sizes and times; what it passes on is encrypted between site and hub.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from ...errors import KitError, ProxyError, escaped
from ...exchange.handshake import Deadline, explain_unresolved

DIRECT = "direct"
"""Value of a kit's entry `proxy` with which the proxy of the environment is not used."""


@dataclass(frozen=True)
class Proxy:
    """Address of a proxy.

    Attributes:
        host: host name or address.
        port: port.
        source: where the address comes from, for messages.
        credentials: user and password as ``user:password``; empty without them.
    """

    host: str
    port: int
    source: str
    credentials: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"http://{target(self.host, self.port)} (from {self.source})"

    @classmethod
    def parse(cls, text: str, source: str) -> Proxy:
        """Read the address of a proxy.

        Args:
            text: ``http://host:port`` or ``http://user:password@host:port``; characters of user and password may be
                written as ``%40``; port 80 if there is none.
            source: where it comes from.

        Raises:
            KitError: if it is something else; the message does not contain it, since it may hold a password.
        """
        form = f"{source}: proxy must be http://HOST:PORT or http://USER:PASSWORD@HOST:PORT"
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port or 80
        except ValueError as error:
            raise KitError(f"{form}; an IPv6 address is in brackets, and a port is from 1 to 65535") from error
        if parts.scheme != "http":
            raise KitError(f"{form}; proxies of the kind {parts.scheme!r} cannot be used")
        if not host or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise KitError(form)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if not (user + password).isprintable() or ":" in user:
            raise KitError(f"{form}; the user has no colon, and both have printable characters only")
        return cls(host, port, source, f"{user}:{password}" if user else "")


def find_proxy(entry: str, host: str, port: int, environment: Mapping[str, str] | None = None) -> Proxy | None:
    """Return the proxy that connections to a hub go through; None if they are direct.

    Args:
        entry: the entry `proxy` of the kit's policy. It counts before the environment; `DIRECT` for no proxy, and empty
            for that of the environment: ``https_proxy`` or ``HTTPS_PROXY``, unless ``no_proxy`` or ``NO_PROXY`` lists
            the hub.
        host: host name or address of the hub.
        port: port of the hub.
        environment: variables; None for those of this process.

    Raises:
        KitError: if the proxy's address is malformed.
    """
    if entry:
        return None if entry == DIRECT else Proxy.parse(entry, "policy.toml")
    variables = os.environ if environment is None else environment
    for name in ("https_proxy", "HTTPS_PROXY"):
        if found := variables.get(name, "").strip():
            exempt = variables.get("no_proxy") or variables.get("NO_PROXY", "")
            return None if is_exempt(host, port, exempt) else Proxy.parse(found, name)
    return None


def is_exempt(host: str, port: int, exempt: str) -> bool:
    """Return whether a list of exemptions from the proxy contains a hub.

    Args:
        host: host name or address of the hub.
        port: port of the hub.
        exempt: entries with commas in between: ``*``, a host name with or without a leading dot (its subdomains are
            exempt, too), an address, a network such as ``10.0.0.0/8``; each may end with a port.
    """
    return any(_covers(each.strip().lower(), host.lower(), port) for each in exempt.split(",") if each.strip())


def _covers(entry: str, host: str, port: int) -> bool:
    found = re.fullmatch(r"(\[[^\]]+\]|[^:]+):(\d+)", entry)
    if found is not None:
        entry = found[1]
        if int(found[2]) != port:
            return False
    entry = entry.strip("[]").removeprefix("*.").lstrip(".")
    if entry == "*" or entry == host:
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # one of them is a name
        return bool(entry) and host.endswith(f".{entry}")


def target(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_LONGEST_ANSWER = 1 << 14  # bytes of the head of an answer
_REFUSALS = {  # statuses that do not change by waiting, with the reason
    400: "it does not take CONNECT requests of this form",
    401: "it requires a user and a password",
    403: "its rules do not allow the connection",
    404: "it is not a proxy, or does not pass connections on",
    405: "it does not pass connections on",
    407: "it requires a user and a password, or does not accept those that are given",
    501: "it does not pass connections on",
}
_TROUBLES = {
    502: "it cannot connect to the hub, or does not resolve its name",
    503: "it cannot connect to the hub, or does not resolve its name",
    504: "the hub has not answered it in time",
}


def connect(host: str, port: int, proxy: Proxy | None, timeout: float, turn: int = 0) -> socket.socket:
    """Connect to a hub, through a proxy if there is one. The name is resolved anew, and all its addresses are tried.

    Args:
        host: host name or address of the hub; a proxy resolves the name itself.
        port: port of the hub.
        proxy: the proxy.
        timeout: seconds for the connection by each address, and again for the proxy's answer; also that of the socket.
        turn: number of the attempt. Each one begins with another address: what answers at one may not be the hub.

    Raises:
        ProxyError: if the proxy cannot be reached, or refuses.
        OSError: if the hub cannot be reached.
    """
    address = (host, port) if proxy is None else (proxy.host, proxy.port)
    try:
        connection = _connect_by_any(address, timeout, turn)
    except OSError as error:
        unresolved = isinstance(error, socket.gaierror)
        reason = explain_unresolved(address[0], error) if isinstance(error, socket.gaierror) else str(error)
        if proxy is not None:
            raise ProxyError(f"the proxy {proxy} cannot be reached: {reason}") from error
        raise ConnectionError(reason) if unresolved else error from error
    if proxy is not None:
        try:
            open_tunnel(connection, proxy, host, port)
        except BaseException:
            connection.close()
            raise
    return connection


def _connect_by_any(place: tuple[str, int], timeout: float, turn: int) -> socket.socket:
    """Connect by the first address of a host, of IPv4 or IPv6, by which that is possible.

    Raises:
        OSError: if it is possible by none.
    """
    found: list[Any] = list(dict.fromkeys(socket.getaddrinfo(*place, type=socket.SOCK_STREAM)))
    first = turn % len(found)
    errors: dict[str, OSError] = {}
    for *_, address in found[first:] + found[:first]:
        try:
            return socket.create_connection(address[:2], timeout)
        except OSError as error:
            errors[str(address[0])] = error
    if len(errors) == 1:
        raise next(iter(errors.values()))
    raise ConnectionError("; ".join(f"{address}: {error}" for address, error in errors.items()))


def open_tunnel(connection: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Ask a proxy for a connection to the hub; afterwards the socket is this connection.

    Args:
        connection: a connection to the proxy. Its timeout is the time for the answer.
        proxy: the proxy.
        host: host name or address of the hub.
        port: port of the hub.

    Raises:
        ProxyError: if the proxy refuses, does not answer, or is no proxy; `lasting` is True if a later attempt would
            fail, too.
    """
    place, timeout = target(host, port), connection.gettimeout() or 0.0
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
    if proxy.credentials:
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(proxy.credentials.encode()).decode()}")
    try:
        connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode())
        answer = _read_head(connection, Deadline(timeout))
    except TimeoutError as error:
        raise ProxyError(f"the proxy {proxy} has not answered CONNECT {place} within {timeout:g} s") from error
    except OSError as error:
        raise ProxyError(f"the proxy {proxy} has closed the connection after CONNECT {place}: {error}") from error
    finally:
        connection.settimeout(timeout)
    status = re.match(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\r?\n", answer)
    if status is None:
        begin = escaped(answer[:40].decode("latin-1"))
        raise ProxyError(f"the proxy {proxy} does not answer as an HTTP proxy: {begin!r}")
    code, reason = int(status[1]), escaped((status[2] or b"").decode("latin-1"))[:100]
    if not 200 <= code < 300:
        meaning = _REFUSALS.get(code) or _TROUBLES.get(code) or "it has refused"
        text = f"the proxy {proxy} refuses CONNECT {place}: {code} {reason}: {meaning}"
        raise ProxyError(text, status=code, lasting=code in _REFUSALS)
    if not answer.endswith((b"\r\n\r\n", b"\n\n")):
        raise ProxyError(f"the proxy {proxy} sends bytes of its own after its answer to CONNECT {place}", lasting=True)


def _read_head(connection: socket.socket, deadline: Deadline) -> bytes:
    """Return what has arrived once it contains the empty line that ends the head of an answer.

    Raises:
        OSError: if the connection is lost, or time is over.
    """
    answer = b""
    while b"\r\n\r\n" not in answer and b"\n\n" not in answer:
        if deadline.over:
            raise TimeoutError
        connection.settimeout(max(0.01, deadline.left))
        part = connection.recv(4096)
        if not part:
            raise ConnectionError("it has answered nothing" if not answer else "its answer is incomplete")
        answer += part
        if len(answer) > _LONGEST_ANSWER:
            raise ConnectionError(f"the head of its answer has more than {_LONGEST_ANSWER} bytes")
    return answer
