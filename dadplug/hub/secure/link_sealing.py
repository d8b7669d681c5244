"""Sealing of one link: the keys of the run at a site, what of its frames is sealed, and the kit that it goes by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ...errors import SealingError
from ...logs import get_logger
from ..pki.kits import Kit, KitWatch
from ..wire.messages import Exclude, Head, KeyMessage, Kind, frames
from .epochs import AGREEMENT, REKEY, Epochs, Frame
from .key_agreement import CONFIRMATION_BYTES, OFFER_BYTES, Agreement, Offers
from .sealing import Keys, opened_offset

_log = get_logger(__name__)
_EXCLUDE_SECONDS = 10.0  # for the hub to end a site whose certificate has been revoked

Swap = Callable[[int, bytes, int], Mapping[int, bytes]]


class LinkSealing:
    """Sealing of one link. It is in use where the kit's roster requires it.

    Args:
        kit: kit of this site.
        names: names of the sites by slot, to which those of further sites are appended.

    Attributes:
        required: whether messages have to be sealed.
        keys: the secrets of sites that have started together, once they have agreed on them.
        complete: whether this site has the keys of all members.
    """

    def __init__(self, kit: Kit, names: Sequence[str]) -> None:
        self.required = kit.roster.sealed
        self.keys: Keys | None = None
        self._kit, self._names = kit, names
        self._known = len(names)
        self._epochs = Epochs(Offers(kit, names), kit.slot) if self.required else None
        self._watch = KitWatch(kit)
        self._excluded: dict[int, float] = {}  # when the hub was told, by slot

    @property
    def complete(self) -> bool:
        return self._epochs is None or self._epochs.complete

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
        assert self._epochs is not None
        self._epochs.begin(agreement)
        agreement.check(swap(AGREEMENT | 2, confirmation, CONFIRMATION_BYTES))
        self.keys = agreement.keys

    # Members that change

    def offer(self) -> KeyMessage | None:
        """Return the message by which this site asks the members for keys, to join; None where nothing is sealed."""
        if self._epochs is None:
            return None
        self.keys = None
        return KeyMessage(self._kit.slot, self._epochs.offer())

    def enter(self, members: Sequence[int]) -> None:
        """Take the announcement that this site joins some others."""
        if self._epochs is not None:
            self._epochs.enter(members)

    def join(self, slot: int, step: int) -> list[KeyMessage | Exclude]:
        """Take the announcement that another site joins in a step, and return what is to be sent for that."""
        if self._epochs is None:
            return []
        self._epochs.join(slot, step)
        return self._due()

    def leave(self, slot: int) -> None:
        """Take the announcement that a site has left."""
        self._excluded.pop(slot, None)
        if self._epochs is not None:
            self._epochs.leave(slot)

    def close(self, step: int, contributors: Sequence[int]) -> None:
        """Take the announcement that a round is closed."""
        if self._epochs is not None:
            self._epochs.confirm(step, contributors)

    def take(self, message: KeyMessage) -> tuple[list[Frame], list[KeyMessage | Exclude]]:
        """Take a message of another site about keys; return frames that can be opened now, and what is to be sent.

        Raises:
            SealingError: if it is not what the site has sent, or this site's kit does not require sealed messages.
        """
        if self._epochs is None:
            raise SealingError(self._differs(message.slot))
        return [_opened(*each) for each in self._epochs.take(message.slot, message.content)], self._due()

    def _due(self) -> list[KeyMessage | Exclude]:
        assert self._epochs is not None
        posts, refused = self._epochs.posts, self._epochs.refused
        due: list[KeyMessage | Exclude] = [KeyMessage(*posts.popleft()) for _ in range(len(posts))]
        for slot, reason in [refused.popleft() for _ in range(len(refused))]:
            _log.warning("site %d (%s) is refused: %s", slot, self._names[slot], reason)
            due.append(Exclude(slot, reason))
        return due

    def check_kit(self, elastic: bool = False) -> list[Exclude]:
        """Read this site's kit again if it has changed: sites do not rely on the hub to tell them of revocations.

        Args:
            elastic: whether the run goes on without a site that leaves.

        Returns:
            What the hub has to be told: which sites it has to end.

        Raises:
            SealingError: if the certificate of another site has been revoked, and the run needs that site, or the hub
                keeps it.
        """
        if self._epochs is None or not self._epochs.members:
            return []
        change = self._watch.changed()
        for problem in change.refused if change is not None else ():
            _log.warning("the kit has changed, and a part of it is not used: %s", problem)
        if change is None:
            return self._check_excluded()
        if (new := change.kit.roster.sites[self._known :]) and not elastic:
            _log.warning("the roster has new sites, which take part in the next run: %s", ", ".join(new))
        self._epochs.replace_kit(change.kit)
        due = []
        for slot, serial in self._epochs.serials.items():
            if serial in change.kit.revoked and slot not in self._excluded:
                if not elastic:
                    raise self._revoked(slot)
                self._excluded[slot] = time.monotonic()
                due.append(Exclude(slot, "its certificate has been revoked"))
        return due

    def _check_excluded(self) -> list[Exclude]:
        for slot, since in self._excluded.items():
            if time.monotonic() > since + _EXCLUDE_SECONDS:
                raise self._revoked(slot)
        return []

    def _revoked(self, slot: int) -> SealingError:
        return SealingError(f"site {slot} ({self._names[slot]}): its certificate has been revoked")

    # Frames

    def covers(self, head: Head) -> bool:
        """Return whether a frame is sealed, or holds keys, so that `open` takes it.

        Args:
            head: its head.

        Raises:
            SealingError: if another site requires it, and this one's kit does not.
        """
        if head.exchange < AGREEMENT:
            return self.required
        if not self.required:
            raise SealingError(self._differs(head.slot))
        return head.exchange == REKEY

    def _differs(self, slot: int) -> str:
        return (
            f"site {slot} ({self._names[slot]}) has a kit that requires sealed messages, and this site's "
            "kit does not: copy the same roster.json to all kits"
        )

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
        elif head.kind not in (Kind.PAYLOAD, Kind.STATE) or self._epochs is None:
            raise RuntimeError(f"a {head.kind.name} message cannot be sealed, which this site's kit requires")
        else:
            yield from self._epochs.frames(head, content)

    def open(self, head: Head, body: memoryview) -> list[Frame]:
        """Open a frame that has arrived.

        Args:
            head: its head.
            body: its body.

        Returns:
            Head and body as they were before the message was sealed. None of a frame that holds keys, or whose keys
            have not arrived: `take` returns it then.

        Raises:
            SealingError: if it is not what its site has sent.
        """
        assert self._epochs is not None
        return [_opened(*each) for each in self._epochs.open(head, body)]


def _opened(head: Head, content: bytes) -> Frame:
    return head._replace(offset=opened_offset(head.offset), length=len(content)), content
