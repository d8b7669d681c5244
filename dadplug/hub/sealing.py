"""Sealing: payloads encrypted between sites, so that the hub passes on what it cannot read (AES-256-GCM).

A message is cut into pieces, each of which fits a frame and is sealed by itself: a site can send the first before it
has sealed the last, and a receiver opens pieces as they arrive. A sealed piece is the number of the piece (8 bytes),
the encrypted content and a tag (16 bytes): 0.04% of a full frame.

**Keys.** Each sender encrypts by keys of its own, which are derived from the secret that `dadplug.hub.key_agreement`
has agreed on. The number of a piece, counted over all messages of the sender, is the nonce, and every 2**20 pieces
(64 GB) the key changes. A process agrees on new secrets when it starts, so that no nonce is used twice with a key.

**Associated data.** A tag covers the sender's slot, the exchange, the number of the message in this exchange, the place
of the piece in the message, and the size of the message. So a piece that the hub alters, repeats, moves to another
place, message, exchange, sender or run, or leaves out, is found out before anything of it is used.

Sealing does not hide who sends, when and how much, nor what sites write to the key-value store of torch.distributed
(addresses, counters), to which dadplug writes no data of training.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from ..errors import SealingError
from .frames import PIECE_BYTES

SECRET_BYTES = 32
_NUMBER = struct.Struct(">Q")
_PLACE = struct.Struct(">HIQQQ")  # slot, exchange, number of the message, offset, size of the message
_TAG_BYTES = 16
OVERHEAD = _NUMBER.size + _TAG_BYTES  # bytes that a piece grows by
OPEN_BYTES = PIECE_BYTES - OVERHEAD  # content of a piece, at most
_PIECES_BITS = 20  # a key seals 2**20 pieces
_LAST = 1 << 63


@dataclass(frozen=True)
class Place:
    """Place of a message in what a site sends.

    Attributes:
        slot: slot of the sender.
        exchange: number of the exchange.
        occurrence: number of the message among those of the sender in this exchange.
        nbytes: size of the message, before it is sealed.
    """

    slot: int
    exchange: int
    occurrence: int
    nbytes: int

    def pack(self, offset: int) -> bytes:
        """Return the place of the piece at an offset, in bytes."""
        return _PLACE.pack(self.slot, self.exchange, self.occurrence, offset, self.nbytes)


@dataclass(frozen=True)
class Keys:
    """Secrets of a site that `Agreement` has agreed on.

    Attributes:
        slot: this site's slot.
        names: names of the sites by slot.
        group: secret of all sites.
        pairs: secrets of this site and one other, by the slot of the other.
    """

    slot: int
    names: Mapping[int, str]
    group: bytes = field(repr=False)
    pairs: Mapping[int, bytes] = field(repr=False)
    _taken: set[int | None] = field(default_factory=set, repr=False, compare=False)

    def sealer(self, to: int | None = None) -> Sealer:
        """Return what seals this site's messages.

        Args:
            to: slot of the only receiver; None for messages to all sites.

        Raises:
            RuntimeError: if it has been returned before: a second one would begin with the same nonces.
        """
        if to in self._taken:
            raise RuntimeError("these keys have a sealer already, and a second one would repeat its nonces")
        self._taken.add(to)
        return Sealer(_sender_secret(self._shared(to), self.slot), self.slot)

    def opener(self, slot: int, *, pair: bool = False) -> Opener:
        """Return what opens the messages of another site.

        Args:
            slot: slot of the sender.
            pair: whether the messages are for this site only.
        """
        return Opener(_sender_secret(self._shared(slot if pair else None), slot), slot, self.names[slot])

    def _shared(self, other: int | None) -> bytes:
        return self.group if other is None else self.pairs[other]


class Sealer:
    """Encryption of the messages of one sender.

    Args:
        secret: the sender's secret.
        slot: its slot.
    """

    def __init__(self, secret: bytes, slot: int) -> None:
        self._ciphers = _Ciphers(secret)
        self._slot = slot
        self._number = 0  # of the next piece
        self._process = os.getpid()

    def seal(self, exchange: int, occurrence: int, content: bytes | memoryview) -> Iterator[bytes]:
        """Seal a message.

        Args:
            exchange: number of the exchange.
            occurrence: number of the message among those of this exchange. A message whose place is used again, since
                an attempt to send it was given up, is encrypted by other nonces.
            content: the message, of bytes.

        Yields:
            The sealed pieces; none for an empty message.

        Raises:
            RuntimeError: in a process that was forked after the agreement, or when all numbers have been used.
        """
        content = memoryview(content)
        place = Place(self._slot, exchange, occurrence, len(content))
        for offset in range(0, len(content), OPEN_BYTES):
            number = self._next_number()
            piece = content[offset : offset + OPEN_BYTES]
            yield _NUMBER.pack(number) + self._ciphers[number].encrypt(_nonce(number), piece, place.pack(offset))

    def _next_number(self) -> int:
        if os.getpid() != self._process:
            raise RuntimeError("a forked process cannot seal messages: it would repeat the nonces of its parent")
        number = self._number
        if number >= _LAST:
            raise RuntimeError("all numbers of pieces have been used")
        self._number += 1
        return number


class Opener:
    """Decryption of the messages of one sender.

    Args:
        secret: the sender's secret.
        slot: its slot.
        name: its name, for messages.
    """

    def __init__(self, secret: bytes, slot: int, name: str) -> None:
        self._ciphers = _Ciphers(secret)
        self._slot = slot
        self._name = name

    def open_piece(self, exchange: int, occurrence: int, nbytes: int, offset: int, piece: bytes) -> bytes:
        """Decrypt a piece, and check that it is what the sender has put at this place.

        Args:
            exchange: number of the exchange.
            occurrence: number of the message among those of this exchange.
            nbytes: size of the message, before it was sealed.
            offset: place of the piece's content in the message.
            piece: the sealed piece.

        Raises:
            SealingError: if it is anything else.
        """
        expected = min(OPEN_BYTES, nbytes - offset) + OVERHEAD
        if offset % OPEN_BYTES or not OVERHEAD < expected == len(piece):
            raise self._error(exchange, offset, f"has {len(piece)} bytes, not {expected}")
        (number,) = _NUMBER.unpack_from(piece)
        if number >= _LAST:
            raise self._error(exchange, offset, "has an impossible number")
        place = Place(self._slot, exchange, occurrence, nbytes)
        cipher = self._ciphers[number]
        try:
            return cipher.decrypt(_nonce(number), memoryview(piece)[_NUMBER.size :], place.pack(offset))
        except InvalidTag:
            raise self._error(exchange, offset, "is not what it has sent at this place") from None

    def open(self, exchange: int, occurrence: int, nbytes: int, pieces: Iterable[bytes]) -> bytes:
        """Decrypt a message of which all pieces are here.

        Args:
            exchange: number of the exchange.
            occurrence: number of the message among those of this exchange.
            nbytes: size of the message, before it was sealed.
            pieces: the sealed pieces.

        Raises:
            SealingError: if they are not what the sender has sent.
        """
        content = bytearray()
        for piece in pieces:
            content += self.open_piece(exchange, occurrence, nbytes, len(content), piece)
        if len(content) != nbytes:
            raise self._error(exchange, len(content), "is missing")
        return bytes(content)

    def _error(self, exchange: int, offset: int, what: str) -> SealingError:
        return SealingError(
            f"a sealed message of {self._name} (exchange {exchange}): the piece at byte {offset} {what}. The hub, or "
            "someone who controls it, has altered, repeated, exchanged or left out what passes through it"
        )


def sealed_size(nbytes: int) -> int:
    """Return the size of a sealed message.

    Args:
        nbytes: size of the message.
    """
    return nbytes + OVERHEAD * -(-nbytes // OPEN_BYTES)


def derive(secret: bytes, *labels: str | int) -> bytes:
    """Return a key derived from a uniform secret, for one purpose (HKDF-Expand, RFC 5869).

    Args:
        secret: the secret.
        labels: the purpose.
    """
    return HKDFExpand(hashes.SHA256(), SECRET_BYTES, _info(labels)).derive(secret)


def extract(material: bytes, salt: bytes, *labels: str | int) -> bytes:
    """Return a uniform secret from other material (HKDF, RFC 5869).

    Args:
        material: a secret of any form.
        salt: what the secret is bound to.
        labels: the purpose.
    """
    return HKDF(hashes.SHA256(), SECRET_BYTES, salt, _info(labels)).derive(material)


class _Ciphers:
    """Ciphers of a sender by the number of the piece. Only the last one used is kept."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._index = -1
        self._cipher: AESGCM | None = None

    def __getitem__(self, number: int) -> AESGCM:
        index = number >> _PIECES_BITS
        if self._cipher is None or index != self._index:
            self._index, self._cipher = index, AESGCM(derive(self._secret, "pieces", index))
        return self._cipher


def _sender_secret(shared: bytes, slot: int) -> bytes:
    return derive(shared, "sender", slot)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _info(labels: tuple[str | int, ...]) -> bytes:
    return "/".join(("dadplug sealing 1", *map(str, labels))).encode()
