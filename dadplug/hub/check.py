"""Check of a site's kit and of the way to its hub, step by step, each with a verdict and advice.

Channel "check": the hub tells its time, takes bytes and sends bytes, so that a site can measure the way to it.

The frames are of the kind `PAYLOAD`, with the request as their tag:

- `TIME`: answered with the hub's time, in nanoseconds since 1970 (8 bytes);
- `UP`: bytes that the hub takes and forgets;
- `DOWN`: 8 bytes with a number; answered with as many bytes, in frames of the same tag;
- `STATUS`: answered with the hub's status as JSON, after 8 bytes with its size.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from ..errors import FrameError, KitError, ProxyError, RefusedError
from ..exchange.handshake import Deadline, within
from .pki.files import REVOKED, read_file
from .pki.kits import RENEW, SOON_DAYS, Kit, certificate_end, current_time, days_left, revocation_list_end
from .pki.proxies import Proxy, find_proxy, open_tunnel
from .secure import tls
from .secure.secure_socket import SecureSocket
from .site.connection import introduce
from .wire.messages import FRESH, VERSION, Head, Hello, Kind, Leave, frames, pack_control
from .wire.streams import FrameReceiver

MOST_BYTES = 8 << 20  # of a check, in each direction
NUMBER = struct.Struct("<Q")
_MOST_REQUESTS = 1000


class CheckRequest(IntEnum):
    """Tag of a frame."""

    TIME = 0
    UP = 1
    DOWN = 2
    STATUS = 3


class CheckHandler:
    """Hub's part in the check of one site.

    Args:
        slot: slot of the site.
        clock: function that returns the time in nanoseconds since 1970.
    """

    def __init__(self, slot: int, clock: Callable[[], int] = time.time_ns) -> None:
        self._slot, self._clock = slot, clock
        self._bytes_in = self._bytes_out = self._requests = 0

    def handle(self, head: Head, body: bytes | memoryview, status: Mapping[str, Any] | None = None) -> list[bytes]:
        """Answer a frame.

        Args:
            head: its head.
            body: its body.
            status: the hub's status.

        Returns:
            The frames of the answer.

        Raises:
            FrameError: if it is no request, or the site sends or asks for more than a check needs.
        """
        self._bytes_in += len(body)
        self._requests += 1
        if self._bytes_in > MOST_BYTES or self._requests > _MOST_REQUESTS:
            raise FrameError(f"a check of more than {MOST_BYTES} bytes or {_MOST_REQUESTS} requests")
        match head.tag:
            case CheckRequest.TIME:
                content = NUMBER.pack(self._clock())
            case CheckRequest.UP:
                return []
            case CheckRequest.STATUS:
                text = json.dumps(status or {}).encode()
                self._count_out(len(text))
                content = NUMBER.pack(len(text)) + text
            case CheckRequest.DOWN if len(body) == NUMBER.size:
                count = NUMBER.unpack(body)[0]
                self._count_out(count)
                content = bytes(count)
            case _:
                raise FrameError(f"an unknown request {head.tag} of {len(body)} bytes in a check")
        answer = Head(Kind.PAYLOAD, self._slot, tag=head.tag)
        return [packed + piece for packed, piece in frames(answer, memoryview(content))]

    def _count_out(self, count: int) -> None:
        self._bytes_out += count
        if self._bytes_out > MOST_BYTES:
            raise FrameError(f"a check that asks for more than {MOST_BYTES} bytes")


_CLOCK_NOTE, _CLOCK_FAILED = 5.0, 3000.0  # seconds of difference; certificates begin an hour before they are made
_ROUND_TRIPS = 10
_FIRST_BYTES = 1 << 16  # of the measurements of the rate; each has four times as many as the one before
_LAST_BYTES = 1 << 22
_ENOUGH_SECONDS = 0.3  # for a measurement of the rate

State = Literal["ok", "note", "failed"]


@dataclass(frozen=True)
class Finding:
    """Verdict on one item.

    Attributes:
        item: the item.
        state: "ok", "note" for something that will need attention, or "failed".
        text: what was found.
        advice: what to do; empty where nothing has to be done.
        days: days until a certificate or list ends; None where the item has no end.
    """

    item: str
    state: State
    text: str
    advice: str = ""
    days: int | None = None


class _FailedError(Exception):
    """Failure of an item without which the items after it cannot be checked."""

    def __init__(self, item: str, text: str, advice: str) -> None:
        super().__init__(text)
        self.finding = Finding(item, "failed", text, advice)


def check_kit(folder: Path, address: tuple[str, int] | None = None, timeout: float = 5.0) -> Iterator[Finding]:
    """Check a kit and the way to its hub. The items that a failed one prevents are left out.

    Args:
        folder: folder of the kit.
        address: host and port of the hub; None for those of the kit.
        timeout: seconds for each step.

    Yields:
        The findings, as they are made.
    """
    try:
        kit = Kit.load(folder)
        if kit.is_hub:
            raise KitError(f"{folder} is the kit of the hub: check the kit of a site")
    except KitError as error:
        yield Finding("kit", "failed", str(error), "Copy the kit again, or ask the project's operator for a new one.")
        return
    yield Finding("kit", "ok", f"{kit.name}, site {kit.slot} of {kit.roster.project}")
    yield from _files(kit)
    host, port = address or kit.roster.address()
    try:
        yield from _way(kit, host, port, timeout, _measurements)
    except _FailedError as error:
        yield error.finding


# The files of the kit


def _files(kit: Kit) -> Iterator[Finding]:
    now = current_time()
    renew = f"Ask the project's operator to run `{RENEW} {kit.name}`."
    for item, certificate, advice in (
        ("certificate", kit.certificate, renew),
        ("authority", kit.authority, "All kits have to be made anew, by a new authority."),
    ):
        yield _dates(item, certificate.not_valid_before_utc, certificate.not_valid_after_utc, now, advice)
    end = revocation_list_end(read_file(kit.folder / REVOKED))
    yield _dates("revocations", None, end, now, "Ask the project's operator for a new revoked.pem.")
    if kit.certificate.serial_number in kit.revoked:
        yield Finding("revoked", "failed", "this kit's certificate has been revoked", "Ask the operator for a new kit.")
    policy = kit.policy
    limits = (
        "all modes" if policy.modes is None else "modes " + (", ".join(policy.modes) or "none"),
        "" if policy.share_inputs else "share_inputs=False",
        "encrypt_local" if policy.encrypt_local else "",
        f"at most {policy.max_rank_share:g} of a layer's rows" if policy.max_rank_share < 1 else "",
        "differential privacy" if policy.require_privacy else "",
        "allow_pickle" if policy.allow_pickle else "",
    )
    place = kit.roster.hub_at
    where = f"site {place} runs the hub" if place else "a third party runs the hub"
    if kit.roster.sealed:
        where += ", and cannot read what sites send"
    elif not place:
        where += ": modes with factors are refused"
    yield Finding("policy", "ok", f"{', '.join(filter(None, limits))}; {where}")


def _dates(item: str, begin: datetime | None, end: datetime, now: datetime, advice: str) -> Finding:
    if begin is not None and now < begin:
        text = f"not valid before {begin:%Y-%m-%d %H:%M} UTC; this machine's clock says {now:%Y-%m-%d %H:%M}"
        return Finding(item, "failed", text, "Correct this machine's clock.")
    if now > end:
        text = f"expired on {end:%Y-%m-%d %H:%M} UTC; this machine's clock says {now:%Y-%m-%d %H:%M}"
        return Finding(item, "failed", text, advice, days_left(end, now))
    days = days_left(end, now)
    return _ending(item, f"valid until {end:%Y-%m-%d} ({days} days)", days, advice)


def _ending(item: str, text: str, days: int, advice: str) -> Finding:
    """Return the verdict on a certificate or list that is valid, for so many days."""
    if days >= SOON_DAYS:
        return Finding(item, "ok", text, days=days)
    return Finding(item, "note", f"ENDS IN {days} DAYS: {text}", advice, days)


# The way to the hub


def _way(
    kit: Kit, host: str, port: int, timeout: float, work: Callable[[_Line], Iterator[Finding]]
) -> Iterator[Finding]:
    """Go the way to the hub as far as possible.

    Args:
        kit: kit of the site.
        host: host name or address of the hub.
        port: its port.
        timeout: seconds for each step.
        work: what is done over the connection at the end.

    Raises:
        _FailedError: if it ends before the hub.
    """
    try:
        proxy = find_proxy(kit.policy.proxy, host, port)
    except KitError as error:
        raise _FailedError("proxy", str(error), "Correct the address, or exempt the hub by NO_PROXY.") from error
    name, number = (host, port) if proxy is None else (proxy.host, proxy.port)
    try:
        addresses = _resolve(name, number, timeout)
        texts = dict.fromkeys(str(each[4][0]) for each in addresses)
        yield Finding("name", "ok", name if name in texts else f"{name} is {', '.join(texts)}")
        connection, text = _connect(addresses, timeout)
    except _FailedError as error:
        if proxy is None:
            raise
        what = f"the proxy {proxy}, through which the way to {host}:{port} goes: {error.finding.text}"
        raise _FailedError("proxy", what, _PROXY_ADVICE[0]) from None
    yield Finding("port", "ok", text)
    if proxy is not None:
        yield _tunnel(connection, proxy, host, port)
    try:
        secure = tls.encrypt(kit, connection, host, port)
    except (RefusedError, OSError) as error:
        raise _FailedError("TLS", str(error), _advice(str(error), kit)) from error
    try:
        end = certificate_end(dict(secure.tls.getpeercert() or {}))
        cipher, *_ = secure.tls.cipher() or ("",)
        text = f"{secure.tls.version()}, {cipher}; the hub's certificate is valid until {end:%Y-%m-%d}"
        yield _ending("TLS", text, days_left(end), f"Ask the project's operator to run `{RENEW} hub`.")
        _enter(kit, secure, host, port, timeout)
        yield Finding("hub", "ok", f"it accepts {kit.name}")
        yield from work(_Line(kit.slot, secure, timeout))
    finally:
        secure.close()


def _tunnel(connection: socket.socket, proxy: Proxy, host: str, port: int) -> Finding:
    """Go through a proxy."""
    begin = time.monotonic()
    try:
        open_tunnel(connection, proxy, host, port)
    except ProxyError as error:
        connection.close()
        advice = _PROXY_ADVICE.get(error.status, f"Ask the proxy's administrator to allow CONNECT {host}:{port}.")
        raise _FailedError("proxy", str(error), advice) from error
    took = time.monotonic() - begin
    return Finding("proxy", "ok", f"the way goes through {proxy}, which has connected after {1e3 * took:.1f} ms")


_PROXY_ADVICE = {  # by status of the proxy's answer
    0: "Compare the proxy's address with that of the browsers here; NO_PROXY exempts a hub that needs no proxy.",
    401: "Write the user and the password into the proxy's address: http://USER:PASSWORD@HOST:PORT.",
    407: "Write the user and the password into the proxy's address: http://USER:PASSWORD@HOST:PORT.",
    502: "Compare the hub's name and port in roster.json with the operator, and whether the hub runs.",
    503: "Compare the hub's name and port in roster.json with the operator, and whether the hub runs.",
    504: "Ask the operator whether the hub runs, and the proxy's administrator whether it may reach it.",
}
_LINK = "Repeat the check. If it fails again, a firewall or a proxy on the way may cut connections."


def _enter(kit: Kit, secure: SecureSocket, host: str, port: int, timeout: float) -> None:
    """Open the channel "check" on a connection.

    Raises:
        _FailedError: if the hub refuses it.
    """
    try:
        tls.read_verdict(kit, secure, host, port)
        hello = Hello(VERSION, secrets.randbits(62), FRESH, "check")
        introduce(secure, kit, hello, (host, port), timeout)
    except (RefusedError, OSError, FrameError) as error:
        raise _FailedError("hub", str(error), _advice(str(error), kit)) from error


def ask_status(folder: Path, address: tuple[str, int] | None = None, timeout: float = 5.0) -> dict[str, Any]:
    """Ask the hub for its status, as a site.

    Args:
        folder: folder of the site's kit.
        address: host and port of the hub; None for those of the kit.
        timeout: seconds for each step.

    Returns:
        The status, see `server.status.for_sites`.

    Raises:
        KitError: if the kit cannot be used, or the hub cannot be reached; the message says what to do.
    """
    kit = Kit.load(folder)
    if kit.is_hub:
        raise KitError(f"{folder} is the kit of the hub: a site asks for the status, by its own kit")
    kit.check_dates()
    host, port = address or kit.roster.address()
    found: dict[str, Any] = {}

    def ask(line: _Line) -> Iterator[Finding]:
        found.update(line.status())
        line.close()
        return iter(())

    try:
        for _ in _way(kit, host, port, timeout, ask):
            pass
    except _FailedError as error:
        raise KitError(". ".join(filter(None, (error.finding.text, error.finding.advice)))) from error
    except (OSError, FrameError, ValueError) as error:
        raise KitError(f"the hub at {host}:{port} has not sent its status: {error}") from error
    if "sites" not in found:
        raise KitError(f"the hub at {host}:{port} has no status yet: ask again in a second")
    return found


def _resolve(host: str, port: int, timeout: float) -> list[Any]:
    """Return the addresses of the hub, as `socket.getaddrinfo` does, within a time."""
    try:
        return within(timeout, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except TimeoutError as error:
        text = f"{host} was not resolved within {timeout:g} s"
        advice = "The name server of this machine does not answer: see its network settings."
        raise _FailedError("name", text, advice) from error
    except OSError as error:
        text = f"{host} cannot be resolved: {error.strerror or error}"
        advice = "Check this machine's name server, and ask the operator whether the name of the hub has changed."
        raise _FailedError("name", text, advice) from error


def _connect(addresses: Sequence[Any], timeout: float) -> tuple[socket.socket, str]:
    """Connect to the first address that answers; return the connection, and how long it has taken."""
    failure: _FailedError | None = None
    for *_, place in addresses:
        name = f"{place[0]}:{place[1]}"
        begin = time.monotonic()
        try:
            connection = socket.create_connection(place[:2], timeout)
        except OSError as error:
            failure = failure or _FailedError("port", *_unreachable(name, error, timeout))
            continue
        took = time.monotonic() - begin
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, f"{name} accepts connections, after {1e3 * took:.1f} ms"
    assert failure is not None
    raise failure


def _unreachable(name: str, error: OSError, timeout: float) -> tuple[str, str]:
    """Return what a failed connection means, and what to do."""
    match error:
        case TimeoutError():
            return f"{name} does not answer within {timeout:g} s", (
                "A firewall drops the packets, or the hub's machine is down. This site has to be allowed to open TCP "
                f"connections to {name}, and the hub's machine to accept them."
            )
        case ConnectionRefusedError():
            return f"{name} refuses connections", (
                "The machine is up, but nothing listens at this port: start the hub (`python -m dadplug hub KIT`), and "
                "compare the port with that in roster.json. Some firewalls answer in this way, too."
            )
    return f"{name} cannot be reached: {error.strerror or error}", "Check this machine's network and its routes."


_NO_ROOM = "the hub cannot open more connections (`ulimit -n`): its log says so."
_ADVICE = {  # by a part of the error
    "TLS inspection": "Ask your IT department to exempt the hub's address from TLS inspection (SSL bump, decryption).",
    "another authority": "The kits are of two projects, or of two calls of `provision`. Use kits of one.",
    "been revoked": "Ask the project's operator for a new kit.",
    "not valid yet": "Compare the clocks of both machines (`date -u`).",
    "expired": "Compare the clocks of both machines (`date -u`), then have the expired kit renewed.",
    "does not have the": "Use a name that the hub's certificate has, or have one added: `renew hub --hub-name NAME`.",
    "do not allow TLS 1.3": "Raise MaxProtocol in openssl.cnf of this machine, or in the file that OPENSSL_CONF names.",
    "another version of TLS": "A proxy or firewall on the way does not pass TLS 1.3 on, something else listens at this "
    "port, or the hub's own OpenSSL does not allow TLS 1.3: its log says so.",
    "not speak TLS": "Something else listens at this port, or a proxy is in between.",
    "speaks HTTP": "A web server listens at this port, or a proxy is in between.",
    "not a site of": "The newest roster.json has to be copied into the hub's kit.",
    "another process is connected": "Another check of this kit runs, or has just ended. Repeat it in a few seconds.",
    "of the protocol": "Install the same version of dadplug at this site and at the hub.",
    "closed the connection": "Something else may listen at this port, a firewall cuts connections, or " + _NO_ROOM,
    "has not answered": "Something else may listen at this port, a firewall holds the connection up, or " + _NO_ROOM,
}


def _advice(reason: str, kit: Kit) -> str:
    found = (advice for part, advice in _ADVICE.items() if part in reason)
    return next(found, f"The log of the hub of {kit.roster.project} has the reason, too.")


class _Line:
    """Connection of the channel "check". Everything blocks, for a time."""

    def __init__(self, slot: int, connection: SecureSocket, timeout: float) -> None:
        self._connection, self._slot, self._timeout = connection, slot, timeout
        self._receiver = FrameReceiver(connection, lambda head: memoryview(bytearray(head.length)))

    def request(self, request: CheckRequest, content: bytes) -> None:
        """Send a request."""
        try:
            for packed, body in frames(Head(Kind.PAYLOAD, self._slot, tag=request), memoryview(content)):
                self._connection.sendall(packed + bytes(body))
        except TimeoutError:
            raise TimeoutError(f"the hub takes no bytes of {request.name} for {self._timeout:g} s") from None

    def answer(self, request: CheckRequest, nbytes: int) -> bytes:
        """Receive frames of the answer to a request.

        Args:
            request: the request.
            nbytes: bytes that are received at least, up to the end of a frame.

        Raises:
            TimeoutError: if no frame of the answer has arrived for the timeout; pings do not count.
        """
        content, deadline = bytearray(), Deadline(self._timeout)
        while len(content) < nbytes:
            try:
                if deadline.over:
                    raise TimeoutError
                head = self._receiver.receive()
            except TimeoutError:
                raise TimeoutError(f"the hub has not answered {request.name} within {self._timeout:g} s") from None
            assert head is not None  # the connection blocks
            if head.kind is Kind.PAYLOAD and head.tag == request:
                content += self._receiver.body
                deadline = Deadline(self._timeout)
            elif head.kind is not Kind.PING:
                raise FrameError(f"a {head.kind.name} frame where the answer to a check is due")
        return bytes(content)

    def time(self) -> tuple[float, float]:
        """Return the round trip, in seconds, and how far the hub's clock is ahead of this machine's."""
        begin, sent = time.time(), time.monotonic()
        self.request(CheckRequest.TIME, b"?")
        theirs = NUMBER.unpack(self.answer(CheckRequest.TIME, NUMBER.size))[0] / 1e9
        took = time.monotonic() - sent
        return took, theirs - begin - took / 2

    def status(self) -> dict[str, Any]:
        """Return the hub's status."""
        self.request(CheckRequest.STATUS, b"?")
        content = self.answer(CheckRequest.STATUS, NUMBER.size)
        size = NUMBER.unpack(content[: NUMBER.size])[0]
        if size > MOST_BYTES:
            raise FrameError(f"a status of {size} bytes, more than {MOST_BYTES}")
        content += self.answer(CheckRequest.STATUS, NUMBER.size + size - len(content))
        found = json.loads(content[NUMBER.size :])
        if not isinstance(found, dict):
            raise FrameError("a status that is no table")
        return found

    def upload(self, size: int) -> None:
        """Send bytes, and wait until they have arrived."""
        self.request(CheckRequest.UP, bytes(size))
        self.time()

    def download(self, size: int) -> None:
        """Receive bytes."""
        self.request(CheckRequest.DOWN, NUMBER.pack(size))
        self.answer(CheckRequest.DOWN, size)

    def close(self) -> None:
        """Tell the hub that the check has ended."""
        with contextlib.suppress(OSError):
            self._connection.sendall(pack_control(Leave(""), self._slot))


def _measurements(line: _Line) -> Iterator[Finding]:
    try:
        trips, ahead = zip(*(line.time() for _ in range(_ROUND_TRIPS)))
        trip = statistics.median(trips)
        yield _clock(min(zip(trips, ahead))[1])
        yield Finding("round trip", "ok", f"{1e3 * trip:.1f} ms, the median of {_ROUND_TRIPS}")
        up, down = _rate(trip, line.upload), _rate(trip, line.download)
        yield Finding("rate", "ok", f"up {_text(up)}, down {_text(down)}")
        line.close()
    except (OSError, FrameError) as error:
        what = "" if isinstance(error, TimeoutError) else "the connection was lost: "
        raise _FailedError("measurements", f"{what}{error}", _LINK) from error


def _clock(ahead: float) -> Finding:
    text = f"the hub's clock is {abs(ahead):.2f} s {'ahead' if ahead > 0 else 'behind'}"
    if abs(ahead) < _CLOCK_NOTE:
        return Finding("clock", "ok", text)
    advice = "Let both machines get their time from a time server (NTP): certificates are checked by the clock."
    return Finding("clock", "note" if abs(ahead) < _CLOCK_FAILED else "failed", text, advice)


def _rate(trip: float, transfer: Callable[[int], None]) -> float:
    """Return the rate of transfers in bytes per second, of growing size until one takes long enough."""
    size, total = _FIRST_BYTES, 0
    while True:
        begin = time.monotonic()
        transfer(size)
        took = time.monotonic() - begin
        total += size
        if took > _ENOUGH_SECONDS + trip or size == _LAST_BYTES:
            assert total <= MOST_BYTES
            return size / max(took - trip, 1e-6)
        size *= 4


def _text(rate: float) -> str:
    bits = 8 * rate / 1e6
    return f"{bits:,.0f} Mbit/s" if bits >= 10 else f"{bits:.2g} Mbit/s"
