"""TLS 1.3 between hub and sites: contexts, the name of the other end, and reasons for a refusal in plain words.

A connection begins with the TLS handshake. Then the hub sends its verdict: the length of a reason (2 bytes, big endian)
and the reason in UTF-8. Length 0 accepts the site. In TLS 1.3 a client's handshake ends before the server has checked
its certificate, so that a site knows that it is accepted only when it has read the verdict, and sends nothing before.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

from ...errors import KitError, RefusedError, escaped
from ...exchange.handshake import read_exactly
from ...support.logs import get_logger
from ..pki.files import CA, CERTIFICATE, REVOKED, find_passphrase
from ..pki.kits import AUTHORITY_SUFFIX, issuer_of
from ..pki.project import HUB
from ..pki.proxies import connect, find_proxy
from .secure_socket import SecureSocket

if TYPE_CHECKING:
    from ..pki.kits import Kit

_log = get_logger(__name__)
ACCEPTED = b"\0\0"
ALPN = "dadplug"
"""Name of the protocol in TLS (RFC 7301), by which a port can be shared with other services."""
_LONGEST_REASON = 1000  # bytes; a longer one is cut at the hub and refused at a site
_DRAIN = 0.2  # seconds for which the end of a refused connection is awaited

# Reasons by the name that OpenSSL gives an error, as seen by the end that gets it.
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other end has no certificate: it needs a kit",
    "UNSUPPORTED_PROTOCOL": "the other end does not speak TLS 1.3",
    "WRONG_VERSION_NUMBER": "the other end does not speak TLS",
    "WRONG_SSL_VERSION": "the other end does not speak TLS",
    "PACKET_LENGTH_TOO_LONG": "the other end does not speak TLS",
    "RECORD_LAYER_FAILURE": "the other end does not speak TLS",
    "BAD_RECORD_TYPE": "the other end does not speak TLS",
    "UNEXPECTED_MESSAGE": "the other end does not speak TLS",
    "HTTP_REQUEST": "the other end speaks HTTP, not TLS",
    "HTTPS_PROXY_REQUEST": "the other end speaks to a web proxy",
    "NO_PROTOCOLS_AVAILABLE": "the settings of OpenSSL on this machine do not allow TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other end requires another version of TLS; dadplug speaks TLS 1.3",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other end requires a certificate: a kit is needed",
    "TLSV1_ALERT_UNKNOWN_CA": "the other end's kit is of another authority: its certificate authority has not signed "
    "this kit's certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "the other end's kit is of another authority with the same name",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "this kit's certificate has been revoked",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this kit's certificate has expired by the other end's clock, or one of the "
    "other end's files has",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "this kit's certificate is for the other role, hub or site",
    "SSLV3_ALERT_BAD_CERTIFICATE": "this kit's certificate is not accepted: it is damaged, or not valid yet by the "
    "other end's clock, or does not have the name that the other end connects to",
}
# Reasons by OpenSSL's codes of verification, as seen by the end that verifies.
_VERDICTS = {
    7: "the other end's certificate is signed by another authority with the same name",
    9: "the other end's certificate is not valid yet by this end's clock",
    10: "the other end's certificate has expired by this end's clock",
    11: "the revocation list of this kit is not valid yet by this end's clock",
    12: "the revocation list of this kit has expired",
    18: "the other end's certificate is signed by itself, not by the authority of this kit",
    19: "the other end's certificate is signed by another authority",
    20: "the other end's certificate is signed by another authority",
    21: "the other end's certificate is signed by another authority",
    23: "the other end's certificate has been revoked",
    26: "the other end's certificate is for the other role, hub or site",
    62: "the other end's certificate does not have the host name that the site connects to",
    64: "the other end's certificate does not have the address that the site connects to",
}


_OTHER_AUTHORITY = (18, 19, 20, 21)  # codes of verification
_INSPECTION_SECONDS = 2.0


def _inspector(kit: Kit, host: str, port: int) -> str:
    """Return who has issued the certificate that an end shows which is no hub of dadplug; empty if that is not known.

    A failed verification does not tell the certificate. Therefore a second connection looks at it, without a
    certificate of this site, and sends nothing.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([ALPN])
    try:
        with connect(host, port, find_proxy(kit.policy.proxy, host, port), _INSPECTION_SECONDS) as connection:
            secure = SecureSocket(connection, context, server_hostname=host)
            secure.do_handshake()
            issuer, subject = issuer_of(secure.tls.getpeercert(binary_form=True) or b"")
    except (OSError, KitError, ValueError):
        return ""
    return "" if subject == HUB and issuer.endswith(AUTHORITY_SUFFIX) else escaped(issuer)


def hub_context(kit: Kit) -> ssl.SSLContext:
    """Return the TLS context of a hub, which requires certificates of its project's authority.

    Args:
        kit: the hub's kit.

    Raises:
        ssl.SSLError: if a file of the kit is damaged.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no session is resumed, and so none outlives a revocation
    return _configured(context, kit)


def site_context(kit: Kit) -> ssl.SSLContext:
    """Return the TLS context of a site, which checks the hub's certificate and its names.

    Args:
        kit: the site's kit.

    Raises:
        ssl.SSLError: if a file of the kit is damaged.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks host names
    context.hostname_checks_common_name = False
    return _configured(context, kit)


def _configured(context: ssl.SSLContext, kit: Kit) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF | ssl.VERIFY_X509_STRICT
    path = str(kit.key_file)
    context.load_cert_chain(kit.folder / CERTIFICATE, path, lambda: find_passphrase(path))
    context.load_verify_locations(kit.folder / CA)
    context.load_verify_locations(kit.folder / REVOKED)
    return context


def peer_site(connection: SecureSocket, kit: Kit) -> str:
    """Return the name of the site at the other end of a connection, from its certificate.

    Args:
        connection: connection at the hub after its handshake.
        kit: the hub's kit.

    Raises:
        RefusedError: if the site is not part of the project or its certificate has been revoked.
    """
    certificate: dict[str, Any] = dict(connection.tls.getpeercert() or {})
    subject = [pair for group in certificate.get("subject", ()) for pair in group]
    names = [value for kind, value in subject if kind == "commonName"]
    project = [value for kind, value in subject if kind == "organizationName"]
    if len(names) != 1 or project != [kit.roster.project]:
        raise RefusedError(f"the certificate is not one of the project {kit.roster.project}")
    if int(certificate["serialNumber"], 16) in kit.revoked:
        raise RefusedError(f"the certificate of {names[0]} has been revoked")
    if names[0] not in kit.roster.sites:
        raise RefusedError(f"{names[0]} is not a site of {kit.roster.project} by the hub's roster")
    return str(names[0])


def refusal(reason: str) -> bytes:
    """Return the verdict that refuses a site, to be sent before the connection is closed."""
    text = reason.encode()[:_LONGEST_REASON] or b"no reason was given"
    return len(text).to_bytes(2, "big") + text


def dial(kit: Kit, timeout: float, address: tuple[str, int] | None = None, turn: int = 0) -> SecureSocket:
    """Connect a site to its hub, and wait until the hub has accepted it.

    Args:
        kit: the site's kit.
        timeout: seconds for the connection, and for each of the handshake and the hub's verdict.
        address: host and port; None for those of the kit.
        turn: number of the attempt, see `dadplug.hub.pki.proxies.connect`.

    Returns:
        The encrypted connection.

    Raises:
        RefusedError: if the hub refuses the site, or is not the hub of the kit. To connect again is of no use.
        OSError: if the hub cannot be reached, or the connection is lost.
    """
    host, port = address or kit.roster.address()
    connection = connect(host, port, find_proxy(kit.policy.proxy, host, port), timeout, turn)
    secure = encrypt(kit, connection, host, port)
    read_verdict(kit, secure, host, port)
    return secure


def encrypt(kit: Kit, connection: socket.socket, host: str, port: int) -> SecureSocket:
    """Take a site's part in the TLS handshake, the second step of `dial`; its timeout is that of the connection.

    Args:
        kit: the site's kit.
        connection: a connection to the hub; it is closed after an error.
        host: host name or address of the hub, which its certificate has to have.
        port: port of the hub, for messages.

    Returns:
        The encrypted connection.

    Raises:
        RefusedError: if the other end is not the hub of the kit, or the TLS libraries do not agree.
        OSError: if the connection is lost.
    """
    secure = None
    try:
        context = site_context(kit)
        secure = SecureSocket(connection, context, server_hostname=host)
        secure.do_handshake()
    except OSError as error:
        # The other end has not shown that it is the hub, so that it may be repaired.
        given_up = _given_up(secure or connection, error, host, port, lasting=False)
        if getattr(error, "verify_code", 0) in _OTHER_AUTHORITY and (inspector := _inspector(kit, host, port)):
            raise RefusedError(
                f"{host}:{port}: TLS inspection: {explain(error)}: {inspector!r} has issued it. A proxy or firewall on "
                f"the way decrypts connections; it has to pass those to {host}:{port} on unchanged",
                lasting=False,
            ) from None
        raise given_up from None
    return secure


def read_verdict(kit: Kit, connection: SecureSocket, host: str, port: int) -> None:
    """Wait until the hub has accepted the site, the last step of `dial`.

    Args:
        kit: the site's kit.
        connection: result of `encrypt`; it is closed after an error.
        host: host name or address of the hub, for messages.
        port: port of the hub, for messages.

    Raises:
        RefusedError: if the hub refuses the site.
        OSError: if the connection is lost.
    """
    closed = "the hub has closed the connection before it has accepted this site"
    try:
        size = int.from_bytes(read_exactly(connection, 2, closed), "big")
        if size > _LONGEST_REASON:
            raise RefusedError(f"the other end is no {HUB} of dadplug")
        if reason := read_exactly(connection, size, closed).decode(errors="replace"):
            raise RefusedError(f"the hub at {host}:{port} refuses {kit.name}: {escaped(reason)}")
    except (RefusedError, OSError) as error:
        raise _given_up(connection, error, host, port) from None


def _given_up(
    connection: socket.socket | SecureSocket, error: RefusedError | OSError, host: str, port: int, lasting: bool = True
) -> RefusedError | OSError:
    """Close a connection to the hub after an error, and return the error to raise, which says all that users need."""
    _log.debug("the connection to %s:%d is given up", host, port, exc_info=error)
    timeout = connection.gettimeout() or 0.0
    end(connection)
    match error:
        case TimeoutError():
            return TimeoutError(f"{host}:{port} accepts connections, but has not answered within {timeout:g} s")
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            return ConnectionError(f"{host}:{port}: the other end has closed the connection during the handshake")
        case ssl.SSLError():  # what the other end's or this end's TLS has decided
            return RefusedError(f"{host}:{port}: {explain(error)}", lasting)
    return error


def explain(error: Exception) -> str:
    """Return an error of a TLS connection in plain words, with OpenSSL's name for it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = _VERDICTS.get(error.verify_code, "the other end's certificate is not accepted")
        return f"{reason} ({error.verify_message})"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"{_REASONS.get(error.reason, 'TLS error')} ({error.reason.lower().replace('_', ' ')})"
    return str(error) or type(error).__name__


def end(connection: socket.socket | SecureSocket, seconds: float = _DRAIN) -> None:
    """Close a connection so that what was sent last arrives.

    A socket that is closed with bytes unread resets the connection, and the other end may lose the alert or the reason.

    Args:
        connection: the connection.
        seconds: time for which the end of what still arrives is awaited, about.
    """
    if connection.fileno() < 0:  # the TLS layer has closed it, since the other end had reset it
        return
    # The TLS layer is left out: an alert, if any, has been sent.
    with contextlib.suppress(OSError), socket.socket(fileno=connection.detach()) as raw:
        raw.settimeout(seconds)
        raw.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + seconds
        while raw.recv(65536) and time.monotonic() < deadline:
            pass
