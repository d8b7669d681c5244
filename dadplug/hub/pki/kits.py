"""Kits, the folders by which hub and sites of a project know each other, and what they hold (X.509, RFC 5280).

Keys, certificates, signing requests and revocation lists are made and checked here.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from ...errors import KitError
from ...support.refusals import refuse
from .files import (
    CA,
    CERTIFICATE,
    CREDENTIALS,
    KEY,
    NEXT_KEY,
    POLICY,
    REVOKED,
    ROSTER,
    find_passphrase,
    is_encrypted,
    read_file,
)
from .project import HUB, Policy, Roster, ip_address

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise ImportError(
        "kits need the package cryptography, which is not installed: pip install 'dadplug[hub]'"
    ) from error

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
Certificate = x509.Certificate

# A machine whose clock is behind accepts a new certificate nevertheless.
CLOCK_SKEW = timedelta(hours=1)
_HASH = hashes.SHA256()
AUTHORITY_SUFFIX = " authority"  # of the common name of a project's authority


def new_key() -> Key:
    """Return a new private key, on the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: Key, passphrase: bytes | None = None) -> bytes:
    """Return a private key in PEM (PKCS 8), encrypted if there is a passphrase."""
    form = serialization.PrivateFormat.PKCS8
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        encryption = serialization.BestAvailableEncryption(passphrase)
    return key.private_bytes(serialization.Encoding.PEM, form, encryption)


def key_from_pem(pem: bytes, place: str) -> Key:
    """Return a private key of this module's kind; its passphrase, if it has one, is that of `find_passphrase`.

    Args:
        pem: content of the file.
        place: the file, for messages.

    Raises:
        KitError: if it is something else, or the passphrase is wrong or missing.
    """
    passphrase = find_passphrase(place) if is_encrypted(pem) else None
    try:
        key = serialization.load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if passphrase is not None:
            raise KitError(f"{place} cannot be decrypted: the passphrase is wrong, or the file is damaged") from error
        raise KitError(f"{place} is not a private key: {reason_of(error)}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KitError(f"{place} is not a key on an elliptic curve")
    return key


def to_pem(document: x509.Certificate | x509.CertificateSigningRequest | x509.CertificateRevocationList) -> bytes:
    """Return a certificate, a request or a revocation list in PEM."""
    return document.public_bytes(serialization.Encoding.PEM)


def certificate_from_pem(pem: bytes, place: str) -> Certificate:
    """Return a certificate.

    Raises:
        KitError: if the content is something else; the message names `place`.
    """
    try:
        found = x509.load_pem_x509_certificate(pem)
        found.public_key()
        return found
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise KitError(f"{place} is not a certificate: {reason_of(error)}") from error


def public_key_of(certificate: Certificate) -> PublicKey:
    """Return the public key in a certificate.

    Raises:
        KitError: if it is of another kind than this module's.
    """
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise KitError("the certificate does not hold a key on an elliptic curve")
    return key


def fingerprint(key: PublicKey) -> str:
    """Return the SHA-256 of a public key, for people to compare."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    digest = hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()
    return ":".join(digest[i : i + 4] for i in range(0, len(digest), 4))


def certified_name(document: Certificate | x509.CertificateSigningRequest) -> str:
    """Return the name of the member that a certificate or request is for.

    Raises:
        KitError: if it has not exactly one.
    """
    names = document.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1 or not isinstance(names[0].value, str):
        raise KitError("a certificate or request must have one common name")
    return names[0].value


def issuer_of(content: bytes) -> tuple[str, str]:
    """Return the names of issuer and subject of a certificate: the common name, or all of the name without one.

    Args:
        content: the certificate, in DER.

    Raises:
        ValueError: if it is none.
    """
    certificate = x509.load_der_x509_certificate(content)
    issuer, subject = (
        next((str(each.value) for each in name.get_attributes_for_oid(NameOID.COMMON_NAME)), name.rfc4514_string())
        for name in (certificate.issuer, certificate.subject)
    )
    return issuer, subject


def make_authority(project: str, key: Key, begin: datetime, end: datetime) -> Certificate:
    """Return the certificate of a project's authority, signed by itself.

    Args:
        project: name of the project.
        key: key of the authority.
        begin: start of validity; `CLOCK_SKEW` is subtracted.
        end: end of validity.
    """
    name = _name(project, f"{project}{AUTHORITY_SUFFIX}")
    return _builder(name, name, key.public_key(), begin, end, authority=True).sign(key, _HASH)


def make_certificate(
    name: str, project: str, key: PublicKey, authority: Certificate, authority_key: Key, begin: datetime, end: datetime,
    *, hub_names: Sequence[str] = (),
) -> Certificate:  # fmt: skip
    """Return the certificate of a hub or a site.

    Args:
        name: name of the site, or `HUB`.
        project: name of the project.
        key: public key of the hub or site.
        authority: certificate of the authority.
        authority_key: key of the authority.
        begin: start of validity; `CLOCK_SKEW` is subtracted.
        end: end of validity; it cannot be later than the authority's.
        hub_names: host names and addresses of the hub. Only a certificate for `HUB` has them.
    """
    end = min(end, authority.not_valid_after_utc)
    # A site's certificate cannot serve as the hub's, nor the hub's as a site's.
    usage = ExtendedKeyUsageOID.SERVER_AUTH if name == HUB else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _builder(_name(project, name), authority.subject, key, begin, end, authority=False)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(_issuer_key(authority), critical=False)
    )
    if name == HUB:
        addresses = [(name, ip_address(name)) for name in hub_names]
        names = [x509.IPAddress(address) if address else x509.DNSName(name) for name, address in addresses]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority_key, _HASH)


def make_request(name: str, project: str, key: Key) -> x509.CertificateSigningRequest:
    """Return a signing request, whose signature proves the possession of the key."""
    return x509.CertificateSigningRequestBuilder().subject_name(_name(project, name)).sign(key, _HASH)


def check_request(pem: bytes, name: str, project: str) -> PublicKey:
    """Check a signing request and return its public key. Nothing else of it is used.

    Args:
        pem: content of the request.
        name: name of the site that it has to be for.
        project: name of the project that it has to be for.

    Raises:
        KitError: if the request is damaged, for another name or project, has a weak key, or its sender has not shown
            to have the key.
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KitError(f"not a signing request: {reason_of(error)}") from error
    if not signed:
        raise KitError("the request is not signed by the key that it is for")
    if request.subject != _name(project, certified_name(request)):
        raise KitError(f"the request is for {request.subject.rfc4514_string()}, not for the project {project}")
    if certified_name(request) != name:
        raise KitError(f"the request is for {certified_name(request)!r}, not for {name!r}")
    key = request.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise KitError("the request's key must be on the curve P-256")
    return key


def make_revocation_list(
    authority: Certificate, authority_key: Key, revoked: Mapping[int, datetime], number: int, now: datetime
) -> x509.CertificateRevocationList:
    """Return a signed list of certificates that are no longer accepted. It is valid as long as the authority.

    Args:
        authority: certificate of the authority.
        authority_key: key of the authority.
        revoked: dates of revocation by serial number.
        number: number of the list, larger than that of the list before.
        now: date of the list; `CLOCK_SKEW` is subtracted.
    """
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(max(now - CLOCK_SKEW, authority.not_valid_before_utc))
        .next_update(authority.not_valid_after_utc)
        .add_extension(_issuer_key(authority), critical=False)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial, date in revoked.items():
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(authority_key, _HASH)


def reason_of(error: Exception) -> str:
    """Return the text of an error of the library without its link, which explains other mistakes."""
    return str(error).partition(" See http")[0].rstrip(".")


def read_revocation_list(folder: Path, authority: Certificate) -> tuple[dict[int, datetime], int]:
    """Read the revocation list of a kit or an authority, and check its signature.

    Args:
        folder: the folder.
        authority: certificate of the authority that has to have signed it.

    Returns:
        Dates of revocation by serial number, and the number of the list.

    Raises:
        KitError: if it is something else, or another authority's.
    """
    place = folder / REVOKED
    try:
        found = x509.load_pem_x509_crl(read_file(place))
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion, x509.ExtensionNotFound) as error:
        raise KitError(f"{place} is not a revocation list: {reason_of(error)}") from error
    if not found.is_signature_valid(public_key_of(authority)):
        raise KitError(f"{place} is not signed by the authority of this kit")
    return {entry.serial_number: entry.revocation_date_utc for entry in found}, number


def revocation_list_end(pem: bytes) -> datetime:
    """Return the time until which a revocation list is valid; `read_revocation_list` checks the list itself."""
    return x509.load_pem_x509_crl(pem).next_update_utc or datetime.max.replace(tzinfo=timezone.utc)


def is_issued_by(certificate: Certificate, authority: Certificate) -> bool:
    """Return whether an authority has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def dates(certificate: Certificate) -> str:
    """Return the validity of a certificate, as a text."""
    return f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} to {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"


def current_time() -> datetime:
    """Return the time, in UTC and without fractions, as certificates hold it."""
    return datetime.now(timezone.utc).replace(microsecond=0)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, begin: datetime, end: datetime, *, authority: bool
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _issuer_key(authority: Certificate) -> x509.AuthorityKeyIdentifier:
    """Return the extension that names the key of an authority."""
    subject_key = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject_key)


def _name(project: str, name: str) -> x509.Name:
    organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, project)
    return x509.Name([organization, x509.NameAttribute(NameOID.COMMON_NAME, name)])


@dataclass(frozen=True)
class Kit:
    """A kit that has been read and checked.

    Attributes:
        folder: the folder.
        name: name of the site, or `HUB`.
        roster: members of the project.
        authority: certificate of the project's authority.
        certificate: certificate of this hub or site.
        key_file: path of its key.
        revoked: serial numbers that are no longer accepted.
        policy: local policy; a hub's kit has that which allows everything.
    """

    folder: Path
    name: str
    roster: Roster
    authority: Certificate
    certificate: Certificate
    key_file: Path
    revoked: frozenset[int]
    policy: Policy

    @property
    def slot(self) -> int:
        """Slot of this site, which is its rank.

        Raises:
            KitError: in a hub's kit.
        """
        return self.roster.slot(self.name)

    @property
    def is_hub(self) -> bool:
        """Whether this is the hub's kit."""
        return self.name == HUB

    @classmethod
    def load(cls, folder: str | Path) -> Kit:
        """Read a kit and check that its parts belong together. Dates are checked by `check_dates`.

        Args:
            folder: path of the kit.

        Raises:
            KitError: if a file is missing, damaged or contradicts another, or others can read the key.
            ImportError: if cryptography is not installed.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise KitError(f"{folder} is not a folder: a kit is one, made by `python -m dadplug provision`")
        authority, certificate = _certificates(folder)
        roster, name = Roster.load(folder), certified_name(certificate)
        if name != HUB:
            roster.slot(name)
        revoked, _ = read_revocation_list(folder, authority)
        allowed = Policy() if name == HUB else Policy.load(_policy_file(folder))
        return cls(
            folder, name, roster, authority, certificate, find_key(folder, certificate), frozenset(revoked), allowed
        )

    def check_dates(self, now: datetime | None = None) -> None:
        """Check that the certificates are valid by this machine's clock, and not revoked as far as the kit knows.

        Args:
            now: time to check for; None for the present.

        Raises:
            KitError: if they are not.
        """
        now = now or current_time()
        for certificate in (self.certificate, self.authority):
            if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
                kind = "certificate" if certificate is self.certificate else "certificate authority"
                raise KitError(
                    f"the {kind} of {self.folder} is valid from {dates(certificate)}; this machine's clock says "
                    f"{now:%Y-%m-%d %H:%M} UTC"
                )
        if self.certificate.serial_number in self.revoked:
            raise KitError(f"the certificate of {self.folder} has been revoked")


SOON_DAYS = 30  # before its end, from which on a certificate is to be renewed
RENEW = "python -m dadplug renew"


def certificate_end(certificate: Mapping[str, Any]) -> datetime:
    """Return the end of a certificate, as `ssl.SSLSocket.getpeercert` returns it."""
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), timezone.utc)


def days_left(end: datetime, now: datetime | None = None) -> int:
    """Return the number of whole days until a time; negative after it."""
    return (end - (now or current_time())).days


def renewal_warning(name: str, end: datetime) -> str:
    """Return a warning that a certificate of a project ends soon, with the command that renews it; empty if not.

    Args:
        name: name of the site, or `HUB`.
        end: its end.
    """
    days = days_left(end)
    if days >= SOON_DAYS:
        return ""
    return f"THE CERTIFICATE OF {name} ENDS IN {days} DAYS, on {end:%Y-%m-%d}: run `{RENEW} {name}`, and copy it"


class KitWatch:
    """Watch of a kit's files.

    Args:
        kit: the kit that has been read.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._seen = self._look()

    def changed(self) -> tuple[Kit, list[str]] | None:
        """Read the kit again if one of its files has changed; otherwise return None.

        Each part is applied by itself: a damaged certificate does not keep a revocation from being applied.

        Returns:
            The kit with all that can be applied, the rest as before; and why the other parts are not, by their files.
        """
        seen = self._look()
        if seen == self._seen:
            return None
        self._seen = seen
        refused: list[str] = []
        kit = self._kit
        for apply in (_with_certificate, _with_revocations, _with_roster):
            try:
                kit = apply(kit)
            except (KitError, OSError) as error:
                refused.append(str(error))
        self._kit = kit
        return kit, refused

    def _look(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for name in (CA, CERTIFICATE, KEY, NEXT_KEY, REVOKED, ROSTER):
            try:
                state = (self._kit.folder / name).stat()
                found.append((state.st_ino, state.st_size, state.st_mtime_ns))
            except OSError:
                found.append(None)
        return found


def _certificates(folder: Path) -> tuple[Certificate, Certificate]:
    """Return the certificates of a kit's authority and of its member."""
    authority = certificate_from_pem(read_file(folder / CA), str(folder / CA))
    path = folder / CERTIFICATE
    certificate = certificate_from_pem(read_file(path), str(path))
    if not is_issued_by(authority, authority):
        raise KitError(f"{folder / CA} is damaged, or not that of an authority: its signature is not its own")
    if not is_issued_by(certificate, authority):
        raise KitError(f"{path} is not signed by the authority of this kit")
    return authority, certificate


def _with_certificate(kit: Kit) -> Kit:
    """Return a kit with the certificate and key of its folder."""
    authority, certificate = _certificates(kit.folder)
    if certified_name(certificate) != kit.name:
        raise KitError(f"{kit.folder / CERTIFICATE} is that of {certified_name(certificate)}, not of {kit.name}")
    key = find_key(kit.folder, certificate)
    found = replace(kit, authority=authority, certificate=certificate, key_file=key)
    if certificate != kit.certificate or authority != kit.authority:
        found.check_dates()
    return found


def _with_revocations(kit: Kit) -> Kit:
    """Return a kit with the revocations of its folder."""
    revoked, _ = read_revocation_list(kit.folder, kit.authority)
    return replace(kit, revoked=frozenset(revoked))


def _with_roster(kit: Kit) -> Kit:
    """Return a kit with the roster of its folder, which may have further sites."""
    roster, old, path = Roster.load(kit.folder), kit.roster, kit.folder / ROSTER
    refuse(
        (roster.project != old.project, f"{path} is one of the project {roster.project}, not of {old.project}"),
        (
            roster.sites[: len(old.sites)] != old.sites,
            f"{path}: sites have been removed, renamed or moved, and slots are permanent",
        ),
        (roster.hub != old.hub, f"{path}: the address of the hub has changed: a hub uses it when it is started again"),
        error=KitError,
    )
    return replace(kit, roster=roster)


def _policy_file(folder: Path) -> Path:
    """Return the path of a kit's policy, which is a credential of systemd where this user cannot read the kit's."""
    credential = Path(os.environ.get(CREDENTIALS, "")) / POLICY
    own = folder / POLICY
    return credential if own.exists() and not os.access(own, os.R_OK) and credential.is_absolute() else own


def find_key(folder: Path, certificate: Certificate) -> Path:
    """Return the path of the key that fits the certificate of a kit: in the kit, or a credential of systemd.

    Raises:
        KitError: if there is none, or other users can read it.
    """
    paths = [folder / name for name in (KEY, NEXT_KEY) if os.access(folder / name, os.R_OK)]
    credentials = os.environ.get(CREDENTIALS)
    if credentials and (Path(credentials) / KEY).exists():
        paths.append(Path(credentials) / KEY)
    if not paths:
        if (folder / KEY).exists():
            raise KitError(f"{folder / KEY} cannot be read by this user")
        raise KitError(f"{folder / KEY} is missing: copy the certificate to where `request` made the key")
    for path in paths:
        if key_from_pem(read_file(path), str(path)).public_key() == certificate.public_key():
            break
    else:
        raise KitError(f"{paths[0]} is not the key of {folder / CERTIFICATE}")
    # systemd gives the service's user the right to read a credential by an entry of an access control list.
    others = 0o007 if str(path.parent) == credentials else 0o077
    if os.name == "posix" and path.stat().st_mode & others:
        raise KitError(f"{path} can be read by other users: chmod 600 {path}")
    return path
