"""Pairwise masks that cancel in the sum over sites, and the fixed-point numbers under them (arXiv:1611.04482).

Sites i < j agree on a key by X25519 and HKDF. In each exchange site i adds a stream of that key to its numbers, modulo
2^32, and site j subtracts it. What one site sends is then uniform for all who do not have all its keys, and the
sum over all of them is that of the numbers. A stream is that of AES-256 in counter mode, at a place that is used once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyError

KEY_BYTES = 32
RESOLUTION = 2.0**-12  # of fixed-point numbers, in units of the largest norm of a sample's gradient
_MODULUS_BITS = 32
_PIECE = 1 << 16  # numbers of a stream at a time


class PairwiseKeys:
    """Keys of this site with each other site, from an X25519 key that is made with it, never saved and never shared.

    Args:
        rank: rank of this site.

    Attributes:
        public: the public key, for the other sites.

    Raises:
        ImportError: if the package cryptography is not installed.
    """

    def __init__(self, rank: int) -> None:
        x25519 = _cryptography("asymmetric.x25519")
        self._rank = rank
        self._private = x25519.X25519PrivateKey.generate()
        self.public: bytes = self._private.public_key().public_bytes_raw()
        self._agreed: dict[int, tuple[bytes, bytes]] = {}  # public and common key by rank

    def __reduce__(self) -> Any:
        return PairwiseKeys, (self._rank,)  # a copy has a key of its own

    def derive(self, rank: int, name: str, public: bytes, own_name: str) -> None:
        """Derive the common key with a site; one that is known already stays.

        Args:
            rank: rank of the site.
            name: its name.
            public: its public key.
            own_name: name of this site.

        Raises:
            PrivacyError: if the public key is not valid.
        """
        if self.has(rank, public):
            return
        x25519, hkdf, hashes = (_cryptography(each) for each in ("asymmetric.x25519", "kdf.hkdf", "hashes"))
        pair = sorted([(self._rank, own_name, self.public), (rank, name, public)])
        info = b"dadplug secure sum 1" + b"".join(
            struct.pack(">II", number, len(of.encode())) + of.encode() + key for number, of, key in pair
        )
        try:
            secret = self._private.exchange(x25519.X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise PrivacyError(f"{name} has sent a public key for secure_sum that is not valid: {error}") from error
        key = hkdf.HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)
        self._agreed[rank] = public, key

    def has(self, rank: int, public: bytes) -> bool:
        """Return whether a key has been agreed with a site that has this public key."""
        return self._agreed.get(rank, (b"", b""))[0] == public

    def knows(self, members: Sequence[int]) -> bool:
        """Return whether a key has been agreed with each of some sites."""
        return all(rank == self._rank or rank in self._agreed for rank in members)

    def mask(self, members: Sequence[int], attempt: int, bucket: int, count: int) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the sum of this site's masks, as unsigned numbers of 32 bits.

        Args:
            members: ranks of the sites whose masks cancel.
            attempt: number of the exchange, which no other one with the same keys may have.
            bucket: number of the bucket in it.
            count: how many numbers.
        """
        total = np.zeros(count, np.uint32)
        for rank in members:
            if rank == self._rank:
                continue
            for first, part in _stream(self._agreed[rank][1], attempt, bucket, count):
                place = total[first : first + len(part)]
                if self._rank < rank:
                    place += part
                else:
                    place -= part
        return total


def word_stream(key: bytes, place: bytes, most: int) -> Callable[[int], np.ndarray[Any, np.dtype[Any]]]:
    """Return a function that draws the next unsigned numbers of 32 bits of AES in counter mode.

    The mode is Galois/counter mode, whose tag is not used: libraries have faster instructions for it than for plain
    counter mode. It encrypts ``place``, followed by a counter of 32 bits from 2 on, for at most 64 GB.

    Args:
        key: the key, of 32 bytes.
        place: the part of the counter that stays, of 12 bytes; the same key and place give the same numbers.
        most: how many numbers are drawn at a time, at most; each time they lie in the same memory.

    Raises:
        ImportError: if the package cryptography is not installed.
    """
    ciphers, algorithms, modes = (_cryptography(f"ciphers{each}") for each in ("", ".algorithms", ".modes"))
    encryptor = ciphers.Cipher(algorithms.AES(key), modes.GCM(place)).encryptor()
    zeros = memoryview(bytes(4 * most))
    room = bytearray(len(zeros) + 15)  # what the library asks for

    def draw(count: int) -> np.ndarray[Any, np.dtype[Any]]:
        encryptor.update_into(zeros[: 4 * count], room)
        return np.frombuffer(room, "<u4", count)

    return draw


def _stream(key: bytes, attempt: int, bucket: int, count: int) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[Any]]]]:
    """Yield the numbers of a stream in pieces, each with the place of its first one."""
    draw = word_stream(key, struct.pack(">QI", attempt, bucket), min(count, _PIECE))
    for first in range(0, count, _PIECE):
        yield first, draw(min(count - first, _PIECE))


def members_digest(members: Sequence[int], attempt: int) -> bytes:
    """Return a digest of the sites of an exchange, and its number: equal where their masks cancel."""
    return hashlib.sha256(struct.pack(">Q", attempt) + ",".join(map(str, members)).encode()).digest()[:8]


def encode(values: Tensor, unit: float, sites: int) -> Tensor:
    """Return fixed-point numbers of 32 bits, whose sum over sites cannot overflow.

    Args:
        values: floating-point numbers.
        unit: the value of one.
        sites: number of sites.

    Raises:
        PrivacyError: if one is not finite, or too large.
    """
    limit = (2 ** (_MODULUS_BITS - 1) - 1) // sites
    flat = values.detach().reshape(-1)
    numbers = torch.empty(flat.numel(), dtype=torch.int32, device=flat.device)
    for part, place in zip(flat.split(_PIECE), numbers.split(_PIECE), strict=True):  # pieces stay in the cache
        rounded = part.double().div_(unit).round_()
        largest = float(rounded.abs().max()) if len(rounded) else 0.0
        if not largest <= limit:
            raise PrivacyError(
                f"secure_sum: a sum of clipped gradients is {largest * unit:.3g}, where {limit * unit:.3g} is the most "
                f"of {sites} sites in fixed-point numbers: are batches larger than expected_batch?"
            )
        place.copy_(rounded)
    return numbers


def add_mask(numbers: Tensor, mask: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    """Return numbers plus a mask, modulo 2^32.

    Args:
        numbers: of type int32.
        mask: of as many unsigned numbers of 32 bits.
    """
    masked = numbers.cpu().numpy().view(np.uint32) + mask
    return torch.from_numpy(masked.view(np.int32)).to(numbers.device)


def _cryptography(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"cryptography.hazmat.primitives.{module}")
    except ImportError as error:
        raise ImportError("secure_sum needs the package cryptography: pip install 'dadplug[privacy]'") from error
