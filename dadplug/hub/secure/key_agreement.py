"""Agreement of the sites on secrets that the hub does not learn, in three messages of each site to all others.

The hub carries the messages, and is trusted with nothing: it may alter, exchange, repeat or leave out any of them.

1. **Offer**: an X25519 key made for this run, a random number, the digest of the roster, the site's certificate, and a
   signature of all this by the certificate's key. Receivers check the certificate (authority, project, name at this
   slot, dates, revocation) and the signature.
2. **Share**: a secret contribution, encrypted for each of the others by a key of the pair, and a signature that covers
   the digest of all offers: sites that were shown different offers find out here, as they do if an offer of an earlier
   run was repeated, whose private key does not exist any more.
3. **Confirmation**: a code over the digest of all offers and shares, by a key derived from all contributions.

The group's secret is derived from the contributions of all sites, the pairs' from their X25519 keys; both are bound to
the digests. Private keys are held in memory only, for the time of the agreement: who records the traffic and steals a
kit later cannot decrypt it. Random numbers are made of the operating system's and the kit's key (as in RFC 8937), so
that a machine whose random numbers can be guessed does not give the secrets away.

Who can make certificates of the project can take the place of a site: the authority's folder does not belong on the
machine of a hub that is not to read the payloads. Revocations count as far as the kits of the other sites know them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...errors import KitError, SealingError
from ..pki.files import read_file
from ..pki.kits import (
    Certificate,
    Key,
    Kit,
    certified_name,
    current_time,
    dates,
    is_issued_by,
    key_from_pem,
    public_key_of,
)
from .sealing import SECRET_BYTES, Keys, derive, extract

OFFER_BYTES = 4096
CONFIRMATION_BYTES = 32
_HEAD = struct.Struct(">16sH32s32s32sH")  # magic, slot, random number, X25519 key, digest of the roster, size
_MAGIC = b"dadplug sealing1"
_NUMBER = 32  # bytes of a scalar of P-256
SIGNATURE = 2 * _NUMBER
_DIGEST = 32
_WRAPPED = SECRET_BYTES + 16
# Errors of a certificate that was altered, and those of this module's checks, which are KitErrors.
_DAMAGED = (ValueError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension)
_ALGORITHM = ec.ECDSA(hashes.SHA256())


class Offers:
    """Signed X25519 keys of sites: makes this site's, and checks those of others.

    Args:
        kit: the kit of this site.
        names: names of all sites by slot, which all of them have to know; None for those of the kit's roster.
        now: time at which certificates have to be valid; None for the present.
    """

    def __init__(self, kit: Kit, names: Sequence[str] | None = None, now: datetime | None = None) -> None:
        self.names = kit.roster.sites if names is None else names
        self.key = key_from_pem(read_file(kit.key_file), str(kit.key_file))
        self._kit = kit
        self._fixed_time = now

    @property
    def _now(self) -> datetime:
        return self._fixed_time or current_time()

    def make(self) -> tuple[X25519PrivateKey, bytes]:
        """Return a new private key, and the offer of its public key, of `OFFER_BYTES`.

        Raises:
            KitError: if the kit's own certificate is not valid, or is too large.
        """
        self._kit.check_dates(self._now)
        private = X25519PrivateKey.from_private_bytes(random_secret(self.key))
        certificate = self._kit.certificate.public_bytes(serialization.Encoding.DER)
        public = private.public_key().public_bytes_raw()
        digest = roster_digest(self._kit.roster.project, self.names)
        head = _HEAD.pack(_MAGIC, self._kit.slot, random_secret(self.key), public, digest, len(certificate))
        content = head + certificate
        offer = content + sign(self.key, b"offer" + content)
        if len(offer) > OFFER_BYTES:
            raise KitError(f"the certificate of {self._kit.folder} has {len(certificate)} bytes, too many for sealing")
        return private, offer.ljust(OFFER_BYTES, b"\0")

    def check(self, slot: int, offer: bytes) -> tuple[Certificate, X25519PublicKey]:
        """Check a site's offer, and return its certificate and X25519 key.

        Args:
            slot: slot of the site.
            offer: the offer.

        Raises:
            SealingError: if it is damaged, or of a site that may not take part.
        """
        offer = bytes(offer)
        if len(offer) != OFFER_BYTES or not offer.startswith(_MAGIC):
            raise self.error(slot, "its offer is damaged, or of another version of dadplug")
        _, sender, _, public, digest, size = _HEAD.unpack_from(offer)
        end = _HEAD.size + size
        if end + SIGNATURE > len(offer) or any(offer[end + SIGNATURE :]):
            raise self.error(slot, "its offer is damaged")
        if sender != slot:
            raise self.error(slot, f"its offer is that of slot {sender}: offers were exchanged on their way")
        if digest != roster_digest(self._kit.roster.project, self.names):
            raise self.error(slot, "the rosters of its kit and of this site's kit differ")
        try:
            certificate = x509.load_der_x509_certificate(offer[_HEAD.size : end])
            self._check_certificate(slot, certificate)
            if not verify(certificate, b"offer" + offer[:end], offer[end : end + SIGNATURE]):
                raise KitError("the signature of its offer is not its own: the offer was altered")
        except _DAMAGED as error:
            raise self.error(slot, str(error)) from error
        return certificate, X25519PublicKey.from_public_bytes(public)

    def secret(self, slot: int, private: X25519PrivateKey, public: X25519PublicKey) -> bytes:
        """Return the secret of this site's private key and another one's public key.

        Raises:
            SealingError: if there is none.
        """
        try:
            return private.exchange(public)
        except ValueError:
            raise self.error(slot, "its offer holds a key without a secret") from None

    def _check_certificate(self, slot: int, certificate: Certificate) -> None:
        kit, name = self._kit, self.names[slot]
        if not is_issued_by(certificate, kit.authority):
            raise KitError("its certificate is signed by another authority than that of this kit")
        if certified_name(certificate) != name:
            raise KitError(f"its certificate is that of {certified_name(certificate)}")
        organization = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
        if [each.value for each in organization] != [kit.roster.project]:
            raise KitError(f"its certificate is not one of the project {kit.roster.project}")
        usages = [each.value for each in certificate.extensions if isinstance(each.value, x509.ExtendedKeyUsage)]
        if not any(ExtendedKeyUsageOID.CLIENT_AUTH in usage for usage in usages):
            raise KitError("its certificate is not that of a site")
        if not certificate.not_valid_before_utc <= self._now <= certificate.not_valid_after_utc:
            clock = f"{self._now:%Y-%m-%d %H:%M} UTC"
            raise KitError(f"its certificate is valid from {dates(certificate)}; this machine's clock says {clock}")
        if certificate.serial_number in kit.revoked:
            raise KitError("its certificate has been revoked")

    def error(self, slot: int, what: str) -> SealingError:
        """Return an error that names a site."""
        return SealingError(f"no key can be agreed on with site {slot} ({self.names[slot]}): {what}")


class Agreement:
    """One site's part in an agreement. Every method is called once, in the order below.

    Args:
        kit: the site's kit.
        slots: slots of the sites that take part, this site included; None for all.
        now: time at which certificates have to be valid; None for the present.

    Attributes:
        slots: slots of the sites that take part.
        offer: this site's first message, of `OFFER_BYTES`.
        keys: the secrets; only after `confirmation`. Messages that they open come from sites that have them.
        identities: digests of the offers, by slot; only after `share`.

    Raises:
        KitError: if the kit's own certificate is not valid.
    """

    def __init__(self, kit: Kit, slots: Sequence[int] | None = None, now: datetime | None = None) -> None:
        self._checks = Offers(kit, now=now)
        self._error = self._checks.error
        self._kit = kit
        self.slots = tuple(sorted(range(len(kit.roster.sites)) if slots is None else slots))
        self._key = self._checks.key
        self._private, self.offer = self._checks.make()
        self._contribution = random_secret(self._key)
        self.identities: dict[int, bytes] = {}
        self._certificates: dict[int, Certificate] = {}
        self._pairs: dict[int, bytes] = {}
        self._offers = self._share = self._transcript = self._group = b""

    @property
    def share_bytes(self) -> int:
        """Size of each site's second message."""
        return _DIGEST + _WRAPPED * (len(self.slots) - 1) + SIGNATURE

    @property
    def serials(self) -> dict[int, int]:
        """Serial numbers of the certificates of the other sites, by slot; only after `share`."""
        return {slot: certificate.serial_number for slot, certificate in self._certificates.items()}

    def share(self, offers: Mapping[int, bytes]) -> bytes:
        """Check the other sites' offers, and return this site's second message.

        Args:
            offers: first messages by slot; this site's own is not needed.

        Raises:
            SealingError: if one is missing, damaged, or of a site that may not take part.
        """
        self._offers = self._digest(offers, self.offer)
        for slot in self._others():
            self._certificates[slot], public = self._checks.check(slot, offers[slot])
            secret = self._checks.secret(slot, self._private, public)
            self._pairs[slot] = extract(secret, self._offers, "pair", *sorted((self._kit.slot, slot)))
        wrapped = b"".join(
            self._wrapping(self._kit.slot, slot).encrypt(bytes(12), self._contribution, self._offers)
            for slot in self._others()
        )
        signed = self._offers + wrapped
        everything = {**offers, self._kit.slot: self.offer}
        self.identities = {slot: hashlib.sha256(bytes(everything[slot])).digest() for slot in self.slots}
        self._share = signed + sign(self._key, b"share" + self._kit.slot.to_bytes(2, "big") + signed)
        return self._share

    def confirmation(self, shares: Mapping[int, bytes]) -> bytes:
        """Check the other sites' shares, and return this site's third message.

        Args:
            shares: second messages by slot; this site's own is not needed.

        Raises:
            SealingError: if one is missing or damaged, or its site has seen other offers than this one.
        """
        self._transcript = hashlib.sha256(self._offers + self._digest(shares, self._share)).digest()
        contributions = {slot: self._opened_share(slot, shares[slot]) for slot in self._others()}
        contributions[self._kit.slot] = self._contribution
        material = b"".join(contributions[slot] for slot in self.slots)
        self._group = extract(material, self._transcript, "group")
        names = dict(enumerate(self._kit.roster.sites))
        pairs = {slot: extract(pair, self._transcript, "messages") for slot, pair in self._pairs.items()}
        self.keys = Keys(self._kit.slot, names, derive(self._group, "messages"), pairs)
        return self._code(self._kit.slot)

    def check(self, confirmations: Mapping[int, bytes]) -> None:
        """Check the other sites' confirmations; nothing may be sent by the secrets before.

        Args:
            confirmations: third messages by slot; this site's own is not needed.

        Raises:
            SealingError: if one is missing, or its site has got another secret.
        """
        self._digest(confirmations, b"")
        for slot in self._others():
            if not hmac.compare_digest(bytes(confirmations[slot]), self._code(slot)):
                raise self._error(slot, "it has not got the same secret as this site, or its confirmation was altered")
        del self._private, self._contribution, self._group, self._pairs

    def _others(self) -> list[int]:
        return [slot for slot in self.slots if slot != self._kit.slot]

    def _digest(self, messages: Mapping[int, bytes], own: bytes) -> bytes:
        """Return the digest of the messages of all sites; raise if one is missing."""
        digest = hashlib.sha256(b"messages")
        for slot in self.slots:
            if slot != self._kit.slot and not messages.get(slot):
                raise self._error(slot, "a message is missing")
            content = own if slot == self._kit.slot else bytes(messages[slot])
            digest.update(struct.pack(">HI", slot, len(content)) + content)
        return digest.digest()

    def _opened_share(self, slot: int, share: bytes) -> bytes:
        """Check a site's share, and return its contribution."""
        share = bytes(share)
        if len(share) != self.share_bytes:
            raise self._error(slot, f"its share has {len(share)} bytes, not {self.share_bytes}")
        signed, signature = share[:-SIGNATURE], share[-SIGNATURE:]
        message = b"share" + slot.to_bytes(2, "big") + signed
        if not verify(self._certificates[slot], message, signature):
            raise self._error(slot, "the signature of its share is not its own: the share was altered")
        if signed[:_DIGEST] != self._offers:
            raise self._error(
                slot, "it was shown other offers than this site: one was exchanged, or repeated from an earlier run"
            )
        receivers = [each for each in self.slots if each != slot]
        begin = _DIGEST + _WRAPPED * receivers.index(self._kit.slot)
        try:
            return self._wrapping(slot, slot).decrypt(bytes(12), signed[begin : begin + _WRAPPED], self._offers)
        except InvalidTag:
            raise self._error(slot, "its contribution cannot be decrypted: it was not made in this run") from None

    def _wrapping(self, sender: int, other: int) -> AESGCM:
        """Return the cipher of a contribution, which seals nothing else."""
        return AESGCM(derive(self._pairs[other], "contribution", sender))

    def _code(self, slot: int) -> bytes:
        return hmac.digest(derive(self._group, "confirmation", slot), self._transcript, "sha256")


def roster_digest(project: str, names: Sequence[str]) -> bytes:
    """Return the digest of what all kits of a project have to agree on."""
    return hashlib.sha256(json.dumps([project, list(names)]).encode()).digest()


def random_secret(key: Key) -> bytes:
    """Return 32 random bytes that can be guessed only by who knows both the operating system's and the key."""
    form = (serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    salt = hashlib.sha256(b"dadplug sealing" + key.private_bytes(*form)).digest()
    return extract(os.urandom(SECRET_BYTES), salt, "random", time.time_ns(), os.getpid())


def sign(key: Key, content: bytes) -> bytes:
    """Return a signature, of `SIGNATURE` bytes."""
    numbers = utils.decode_dss_signature(key.sign(content, _ALGORITHM))
    return b"".join(number.to_bytes(_NUMBER, "big") for number in numbers)


def verify(certificate: Certificate, content: bytes, signature: bytes) -> bool:
    """Return whether a signature is that of the certificate's key."""
    numbers = int.from_bytes(signature[:_NUMBER], "big"), int.from_bytes(signature[_NUMBER:], "big")
    try:
        public_key_of(certificate).verify(utils.encode_dss_signature(*numbers), content, _ALGORITHM)
    except InvalidSignature:
        return False
    return True
