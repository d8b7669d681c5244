"""Sealing of what a site sends over its link: agreement on keys at the start, and then each frame of a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..errors import SealingError
from ..logs import get_logger
from .frames import Head, Kind, frames
from .key_agreement import CONFIRMATION_BYTES, OFFER_BYTES, Agreement
from .kits import Kit, KitWatch
from .sealing import Keys, Opener, Sealer, opened_offset

_log = get_logger(__name__)
AGREEMENT = 0xFF << 24  # exchanges of the agreement itself, in a channel that nothing else uses

Swap = Callable[[int, bytes, int], Mapping[int, bytes]]


class LinkSealing:
    """Sealing of one link. It is in use where the kit's roster requires it.

    Args:
        kit: kit of this site.

    Attributes:
        required: whether messages have to be sealed.
        keys: the secrets, once the sites have agreed on them.
    """

    def __init__(self, kit: Kit) -> None:
        self.required = kit.roster.sealed
        self.keys: Keys | None = None
        self._names = kit.roster.sites
        self._sealer: Sealer | None = None
        self._openers: dict[int, Opener] = {}
        self._serials: dict[int, int] = {}  # of the certificates of the others, by slot
        self._watch = KitWatch(kit)

    def negotiate(self, kit: Kit, swap: Swap) -> None:
        """Agree on keys with all other sites.

        Args:
            kit: kit of this site.
            swap: function of the number of an exchange, this site's message and the size of each of the others', which
                sends it to all others and returns theirs by slot.

        Raises:
            KitError: if this site's certificate is not valid.
            SealingError: if a message of another site was altered, or the site may not take part.
        """
        agreement = Agreement(kit)
        offers = swap(AGREEMENT, agreement.offer, OFFER_BYTES)
        shares = swap(AGREEMENT | 1, agreement.share(offers), agreement.share_bytes)
        confirmation = agreement.confirmation(shares)
        # A site that has all confirmations may send before this one has them, but not before it has this one's.
        self._openers = {slot: agreement.keys.opener(slot) for slot in agreement.slots if slot != kit.slot}
        agreement.check(swap(AGREEMENT | 2, confirmation, CONFIRMATION_BYTES))
        self._sealer = agreement.keys.sealer()
        self.keys = agreement.keys
        self._serials = agreement.serials

    def check_kit(self) -> None:
        """Read this site's kit again if it has changed: sites do not rely on the hub to tell them of revocations.

        Raises:
            SealingError: if the certificate of another site has been revoked.
        """
        change = self._watch.changed() if self.required and self.keys is not None else None
        if change is None:
            return
        for problem in change.refused:
            _log.warning("the kit has changed, and a part of it is not used: %s", problem)
        if new := change.kit.roster.sites[len(self._names) :]:
            _log.warning("the roster has new sites, which take part in the next run: %s", ", ".join(new))
        for slot, serial in self._serials.items():
            if serial in change.kit.revoked:
                raise SealingError(f"site {slot} ({self._names[slot]}): its certificate has been revoked")

    def covers(self, head: Head) -> bool:
        """Return whether the frames of a message are sealed.

        Args:
            head: head of one of them.

        Raises:
            SealingError: if another site requires it, and this one's kit does not.
        """
        if head.exchange < AGREEMENT:
            return self.required
        if not self.required:
            raise SealingError(
                f"site {head.slot} ({self._names[head.slot]}) has a kit that requires sealed messages, and this site's "
                "kit does not: copy the same roster.json to all kits"
            )
        return False

    def frames(self, head: Head, content: memoryview) -> Iterator[bytes]:
        """Seal a message, unless it is one of the agreement, and cut it into frames.

        Args:
            head: head of the frames.
            content: the message, of bytes.

        Yields:
            The frames, which have to be sent in this order, before those of other messages.

        Raises:
            RuntimeError: if it cannot be sealed, since it is of a kind that the hub has to read.
        """
        if not self.covers(head):
            for packed, body in frames(head, content):
                yield b"".join((packed, body))
        elif head.kind is not Kind.PAYLOAD or self._sealer is None:
            raise RuntimeError(f"a {head.kind.name} message cannot be sealed, which this site's kit requires")
        else:
            yield from self._sealer.frames(head, content)

    def open(self, head: Head, body: memoryview) -> tuple[Head, bytes]:
        """Open a frame that has arrived.

        Args:
            head: its head.
            body: its body.

        Returns:
            Head and body as they were before the message was sealed.

        Raises:
            SealingError: if it is not what its site has sent.
        """
        opener = self._openers.get(head.slot)
        if opener is None:
            raise SealingError(
                f"site {head.slot} ({self._names[head.slot]}) sends messages that are not sealed, which this site's "
                "kit requires: copy the same roster.json to all kits. If they agree, the hub has made up the message"
            )
        content = opener.open(head, body)
        return head._replace(offset=opened_offset(head.offset), length=len(content)), content
