"""Secure sum of a step: which sites take part, the noise that each adds, and the number of each exchange.

A site announces its public key and the digest of the sites that it has masked for beside each step. Where all sites of
a round have announced the same, and are those that have taken part, the sum counts. Otherwise all of them, who see the
same announcements, exchange again, with new noise for the sites that are present, and with new masks. What a
first exchange may have shown is counted: each exchange of data is a step of the ledger.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import PrivacyError
from ..exchange.fields import COUNT, NUMBER
from .masks import KEY_BYTES, RESOLUTION, PairwiseKeys, add_mask, encode, members_digest
from .mechanism import LEAST_SITES, DifferentialPrivacy, Ledger

_ANNOUNCEMENT = struct.Struct(f">B{KEY_BYTES}sQ8s")  # version, public key, number of the exchange, digest
ANNOUNCEMENT_BYTES = _ANNOUNCEMENT.size
_VERSION = 1


@dataclass
class _Attempt:
    """One exchange of all buckets.

    Attributes:
        members: ranks of the sites whose masks cancel.
        number: its number.
        numbers: this site's noisy sums in fixed point, by id of the parameter.
        used: numbers of the buckets that have been masked.
    """

    members: tuple[int, ...]
    number: int
    numbers: dict[int, Tensor]
    used: set[int] = field(default_factory=set)


class SecureSum:
    """Secure sum over sites of the clipped gradients of a step, each site's with its part of the noise.

    Args:
        privacy: the settings; noise and norm are the same at all sites.
        ledger: counts each exchange of data.
        rank: rank of this site.
    """

    def __init__(self, privacy: DifferentialPrivacy, ledger: Ledger, rank: int) -> None:
        self._privacy, self._ledger, self._rank = privacy, ledger, rank
        self._keys = PairwiseKeys(rank)
        self.unit = RESOLUTION * privacy.max_grad_norm
        self.abstains = False  # in a step without data that costs nothing: noise alone
        self._sums: dict[int, Tensor] = {}
        self._attempt: _Attempt | None = None
        self._next = 0  # number of the next exchange
        self._contributors: tuple[int, ...] = ()  # to the last step

    # A step

    def begin_step(self, sums: Mapping[nn.Parameter, Tensor], abstains: bool = False) -> None:
        """Take the sums of the clipped gradients of a step.

        Args:
            sums: by parameter; without the loss scale, and without noise.
            abstains: whether the site has no part in the step but for its noise, which the others count on.
        """
        # Noise in a narrow type would be rounded away.
        self._sums = {
            id(parameter): each.to(torch.promote_types(each.dtype, torch.float32)) for parameter, each in sums.items()
        }
        self.abstains, self._attempt = abstains, None

    def planned(self, present: Sequence[int]) -> tuple[int, ...]:
        """Return the sites to mask for before the announcements of the step: those of the last one, if all are known.

        Args:
            present: ranks of the sites that took part in the last round.
        """
        members = tuple(present)
        known = self._rank in members and self._contributors == members and self._keys.knows(members)
        return members if known and len(members) >= LEAST_SITES else ()

    def announcement(self, members: tuple[int, ...]) -> bytes:
        """Return what this site announces beside an exchange for some sites."""
        number = self._next if self._attempt is None else self._attempt.number
        return _ANNOUNCEMENT.pack(_VERSION, self._keys.public, number, members_digest(members, number))

    def masked(
        self, members: tuple[int, ...], bucket: int, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> Tensor:
        """Return what this site sends of some parameters, flat numbers of 32 bits.

        Args:
            members: ranks of the sites whose masks cancel; none for a payload of zeros.
            bucket: number of the bucket.
            parameters: its parameters.
            device: where it is sent from.

        Raises:
            PrivacyError: if the sites are fewer than three, or a sum is too large.
        """
        if 0 < len(members) < LEAST_SITES:
            raise PrivacyError(
                f"secure_sum needs at least {LEAST_SITES} sites in a step, and there are {len(members)}: from a sum of "
                "two, each could tell the other's part"
            )
        if self._rank not in members:
            return torch.zeros(sum(each.numel() for each in parameters), dtype=torch.int32, device=device)
        attempt = self._attempt
        if attempt is None or attempt.members != members or bucket in attempt.used:
            attempt = self._attempt = self._begin(members)
        attempt.used.add(bucket)
        flat = torch.cat([attempt.numbers[id(parameter)] for parameter in parameters])
        return add_mask(flat, self._keys.mask(members, attempt.number, bucket, len(flat))).to(device)

    def _begin(self, members: tuple[int, ...]) -> _Attempt:
        """Draw new noise for the sites of an exchange, and count it."""
        from .noise import add_noise  # numba loads when first used

        number, self._next = self._next, self._next + 1
        if not self.abstains:
            self._ledger.spend(self._privacy, sites=len(members))
        sums = [each.clone() for each in self._sums.values()]
        add_noise(sums, self._privacy.deviation / len(members) ** 0.5, self._privacy.secure)
        numbers = [encode(each, self.unit, len(members)) for each in sums]
        return _Attempt(members, number, dict(zip(self._sums, numbers, strict=True)))

    def read(self, rank: int, announced: bytes, names: Mapping[int, str]) -> tuple[int, bytes]:
        """Return the number and the digest that a site announces, and keep its key; the rest is as of `hear`."""
        version, public, number, digest = _ANNOUNCEMENT.unpack(announced)
        if version != _VERSION:
            raise PrivacyError(f"{names[rank]} announces another version of secure_sum: do all sites use the same?")
        if number > NUMBER:
            raise PrivacyError(f"{names[rank]} announces exchange {number}: {NUMBER} is the last one")
        if rank != self._rank:
            self._keys.derive(rank, names[rank], public, names[self._rank])
        return number, digest

    def invalid(self, announced: Mapping[int, bytes], names: Mapping[int, str]) -> dict[int, PrivacyError]:
        """Return by rank the errors of the sites whose announcements are not valid; arguments as of `hear`."""
        numbers: dict[int, int] = {}
        found: dict[int, PrivacyError] = {}
        for rank, each in announced.items():
            try:
                numbers[rank], _ = self.read(rank, each, names)
            except PrivacyError as error:
                found[rank] = error
        for rank, number in numbers.items():  # all go on after the largest one, which has to stay in its range
            others = max((each for other, each in numbers.items() if other != rank), default=number)
            if number - others > COUNT:
                found[rank] = PrivacyError(
                    f"{names[rank]} announces exchange {number}, and all others {others} at most"
                )
        return found

    def hear(self, announced: Mapping[int, bytes], names: Mapping[int, str]) -> bool:
        """Take the announcements of a round; return whether its sum counts.

        Args:
            announced: announcements of the sites that have taken part, by rank: the same at all sites.
            names: names of the sites, this one's among them.

        Raises:
            PrivacyError: if a site announces what is not valid.
        """
        members, digests, numbers = tuple(sorted(announced)), set(), []
        for error in self.invalid(announced, names).values():
            raise error
        for rank, each in announced.items():
            number, digest = self.read(rank, each, names)
            digests.add((number, digest))
            numbers.append(number)
        self._next = max(self._next, max(numbers) + 1)
        self._contributors = members
        (number, digest), *others = digests
        return not others and digest == members_digest(members, number)
