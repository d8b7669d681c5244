"""Sealing: payloads encrypted between sites, so that the hub passes on what it cannot read (AES-256-GCM).

A message is cut into pieces, each of which fills a frame and is sealed by itself: the hub passes them on as they come,
and a receiver opens them as they arrive. A sealed piece is the number of the piece (8 bytes), the encrypted content and
a tag (16 bytes): 0.04% of a full frame.

**Keys.** Each sender encrypts by keys of its own: a chain, whose first key is derived from the secrets that
`dadplug.hub.secure.key_agreement` has agreed on, or drawn at random by the sender (`dadplug.hub.secure.epochs`). Each
step has the next key of the chain, from which the one before cannot be computed, and older keys are forgotten. The
number of a piece, counted over all messages of the sender in the step, is the nonce, and every 2**20 pieces (64 GB) of
a step the key changes. Steps only increase, so that no nonce is used twice with a key.

**Order.** A receiver opens a sender's pieces in the order of their numbers, without gaps within a step, and a tag
covers the head of the frame: sender, kind, step, exchange, place in the message, size. So a piece that the hub alters,
repeats, leaves out or moves to another place, message, exchange, step, sender or run is found out before anything of it
is used. A message that is left out at the end of a step never arrives where it is expected, which is an error, too.

Sealing does not hide who sends, when and how much, nor what sites write to the key-value store of torch.distributed
(addresses, counters), to which dadplug writes no data of training. A hub can still end a run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from ...errors import SealingError
from ..wire.messages import PIECE_BYTES, SHORT_PIECE_BYTES, Head

SECRET_BYTES = 32
_NUMBER = struct.Struct(">Q")
_TAG_BYTES = 16
OVERHEAD = _NUMBER.size + _TAG_BYTES  # bytes that a piece grows by
OPEN_BYTES = PIECE_BYTES - OVERHEAD  # content of a piece, at most
_CONTENT_BYTES = SHORT_PIECE_BYTES - OVERHEAD  # the same for a message that is cut here
_PIECES_BITS = 20  # a key seals 2**20 pieces
_LAST = 1 << 63
_MOST_STEPS = 1 << 18  # without a message of a sender; deriving as many keys takes seconds


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
    _taken: set[tuple[int, bytes] | None] = field(default_factory=set, repr=False, compare=False)

    def sealer(self) -> Sealer:
        """Return what seals this site's messages to all others.

        Raises:
            RuntimeError: if it has been returned before: a second one would begin with the same nonces.
        """
        return self._sealer(None, self.group)

    def opener(self, slot: int) -> Opener:
        """Return what opens the messages of another site to all.

        Args:
            slot: slot of the sender.
        """
        return Opener(derive(self.group, "sender", slot), slot, self.names[slot])

    def pair(self, other: int, context: bytes) -> tuple[Sealer, Opener]:
        """Return what seals and opens the messages of a stream between this site and one other.

        Args:
            other: slot of the other site.
            context: name of the stream, the same at both ends and different from that of all others.

        Raises:
            RuntimeError: if they have been returned before.
        """
        secret = derive(self.pairs[other], "stream", context.hex())
        sealer = self._sealer((other, context), secret)
        return sealer, Opener(derive(secret, "sender", other), other, self.names[other])

    def _sealer(self, use: tuple[int, bytes] | None, secret: bytes) -> Sealer:
        if use in self._taken:
            raise RuntimeError("these keys have a sealer already, and a second one would repeat its nonces")
        self._taken.add(use)
        return Sealer(derive(secret, "sender", self.slot), self.slot)


@dataclass(frozen=True)
class ChainKey:
    """Key of a sender in one step, from which those of later steps follow, and of earlier ones do not.

    Attributes:
        step: the step.
        key: the key.
    """

    step: int
    key: bytes = field(repr=False)

    def at(self, step: int) -> ChainKey:
        """Return the key of the same step or a later one.

        Args:
            step: the step.

        Raises:
            ValueError: if the step is earlier, or too far ahead.
        """
        if not 0 <= step - self.step <= _MOST_STEPS:
            raise ValueError(f"a chain of keys at step {self.step} has none for step {step}")
        key = self.key
        for _ in range(step - self.step):
            key = derive(key, "next")
        return ChainKey(step, key)


class Sealer:
    """Encryption of the messages of one sender. Not to be used by two threads at once.

    Args:
        secret: first key of the sender's chain.
        slot: its slot.
        step: step of that key.

    Attributes:
        chain: key of the last step in which a message was sealed.
    """

    def __init__(self, secret: bytes, slot: int, step: int = 0) -> None:
        self.chain = ChainKey(step, secret)
        self._cipher = lru_cache(1)(_cipher)
        self._slot = slot
        self._number = 0  # of the next piece
        self._process = os.getpid()

    def frames(self, head: Head, content: memoryview) -> Iterator[bytes]:
        """Seal a message, and cut it into frames. They have to be sent in this order, before those of other messages.

        Args:
            head: head of the frames; offset and length are filled in.
            content: the message, of bytes.

        Yields:
            The frames; none for an empty message.
        """
        for index, begin in enumerate(range(0, len(content), _CONTENT_BYTES)):
            yield self.frame(head._replace(offset=index * SHORT_PIECE_BYTES), content[begin : begin + _CONTENT_BYTES])

    def frame(self, head: Head, content: bytes | memoryview) -> bytes:
        """Seal a piece, and return its frame.

        Args:
            head: head of the frame; the length is filled in.
            content: content of the piece, `OPEN_BYTES` at most.

        Raises:
            RuntimeError: in a process that was forked after the agreement, or when all numbers have been used.
            ValueError: if the step is earlier than that of the last piece.
        """
        number = self._next_number(head.step)
        head = head._replace(length=len(content) + OVERHEAD)
        place = head._replace(slot=self._slot).pack()
        sealed = self._cipher(self.chain.key, number >> _PIECES_BITS).encrypt(_nonce(number), content, place)
        return b"".join((head.pack(), _NUMBER.pack(number), sealed))

    def _next_number(self, step: int) -> int:
        if os.getpid() != self._process:
            raise RuntimeError("a forked process cannot seal messages: it would repeat the nonces of its parent")
        if step != self.chain.step:
            self.chain, self._number = self.chain.at(step), 0
        number = self._number
        if number >= _LAST:
            raise RuntimeError("all numbers of pieces have been used")
        self._number += 1
        return number


class Opener:
    """Decryption of the messages of one sender, in the order in which they were sent.

    Args:
        secret: first key of the sender's chain.
        slot: its slot.
        name: its name, for messages.
        step: step of that key.
    """

    def __init__(self, secret: bytes, slot: int, name: str, step: int = 0) -> None:
        self._chain = ChainKey(step, secret)
        self._cipher = lru_cache(1)(_cipher)
        self._slot = slot
        self._site = f"site {slot} ({name})"
        self._number = 0  # of the next piece

    def open(self, head: Head, body: bytes | memoryview) -> bytes:
        """Decrypt a frame, and check that it is the next one of its sender.

        Args:
            head: head of the frame; its slot is not used.
            body: body of the frame.

        Returns:
            The content of the piece.

        Raises:
            SealingError: if it is anything else.
        """
        if len(body) <= OVERHEAD:
            raise self._error(head, f"is not sealed: it has {len(body)} bytes")
        chain, expected = self._next(head)
        (number,) = _NUMBER.unpack_from(body)
        if number != expected:
            raise self._error(head, f"has the number {number}, and {expected} comes next")
        place = head._replace(slot=self._slot).pack()
        try:
            content = self._cipher(chain.key, number >> _PIECES_BITS).decrypt(
                _nonce(number), memoryview(body)[_NUMBER.size :], place
            )
        except InvalidTag:
            raise self._error(head, "is not what it has sent at this place") from None
        self._chain, self._number = chain, number + 1
        return content

    def skip(self, head: Head) -> None:
        """Count a piece that only another site gets. Where that is not so, the piece is missing where it is expected.

        Raises:
            SealingError: if it is of an earlier step than the last one.
        """
        self._chain, number = self._next(head)
        self._number = number + 1

    def _next(self, head: Head) -> tuple[ChainKey, int]:
        """Return the key of the step of a frame, and the number of the piece that comes next."""
        if head.step == self._chain.step:
            return self._chain, self._number
        try:
            return self._chain.at(head.step), 0
        except ValueError:
            raise self._error(head, f"is one of step {head.step}, after one of step {self._chain.step}") from None

    def _error(self, head: Head, what: str) -> SealingError:
        return SealingError(
            f"a sealed message of {self._site}: the piece at byte {head.offset} of exchange {head.exchange} {what}. "
            "The hub, or who controls it, has altered, repeated, exchanged or left out what passes through it"
        )


def opened_offset(offset: int) -> int:
    """Return the place of a piece in its message, from its place in the sealed one.

    Args:
        offset: the place in the sealed message.
    """
    return offset // SHORT_PIECE_BYTES * _CONTENT_BYTES


def sealed_size(nbytes: int) -> int:
    """Return the size of a sealed message.

    Args:
        nbytes: size of the message.
    """
    return nbytes + OVERHEAD * -(-nbytes // _CONTENT_BYTES)


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


def _cipher(secret: bytes, index: int) -> AESGCM:
    """Return the cipher for a sender's pieces by the index of its key, which changes every 2**20 pieces."""
    return AESGCM(derive(secret, "pieces", index))


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _info(labels: tuple[str | int, ...]) -> bytes:
    return "/".join(("dadplug sealing 1", *map(str, labels))).encode()
