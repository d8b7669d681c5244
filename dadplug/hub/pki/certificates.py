"""Keys, certificates, signing requests and revocation lists of a project (X.509, RFC 5280)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone

from ...errors import KitError
from .passphrases import find_passphrase, is_encrypted
from .project import HUB, ip_address

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
        raise KitError(f"{place} is not a private key: {error}") from error
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
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise KitError(f"{place} is not a certificate: {error}") from error


def public_key_of(certificate: Certificate, place: str = "the certificate") -> PublicKey:
    """Return the public key in a certificate.

    Raises:
        KitError: if it is of another kind than this module's.
    """
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise KitError(f"{place} does not hold a key on an elliptic curve")
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
        builder = builder.add_extension(x509.SubjectAlternativeName(map(_general_name, hub_names)), critical=False)
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
        raise KitError(f"not a signing request: {error}") from error
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


def read_revocation_list(pem: bytes, authority: Certificate, place: str) -> tuple[dict[int, datetime], int]:
    """Check the signature of a revocation list and read it.

    Args:
        pem: content of the list.
        authority: certificate of the authority that has to have signed it.
        place: the file, for messages.

    Returns:
        Dates of revocation by serial number, and the number of the list.

    Raises:
        KitError: if it is something else, or another authority's.
    """
    try:
        found = x509.load_pem_x509_crl(pem)
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (ValueError, x509.ExtensionNotFound) as error:
        raise KitError(f"{place} is not a revocation list: {error}") from error
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


def dates(certificates: Iterable[Certificate]) -> str:
    """Return the validity that certificates have in common, as a text."""
    found = list(certificates)
    begin = max(each.not_valid_before_utc for each in found)
    end = min(each.not_valid_after_utc for each in found)
    return f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"


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


def _general_name(name: str) -> x509.GeneralName:
    address = ip_address(name)
    return x509.IPAddress(address) if address else x509.DNSName(name)
