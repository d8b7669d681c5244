"""HTTP proxies on the way to the hub: their addresses, and which one is used."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from ...errors import KitError

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
