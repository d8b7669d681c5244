"""Running digest of the rounds that the hub has closed for a site; sites compare it to detect a hub that splits a run.

Which sites count in a round decides on the weights, and only the hub says it. So each close is added to a digest at
each site, and the tag of each payload frame holds a mark of the sender's digest before the round of the frame. Where
messages are sealed, the head of a frame is authenticated with its content, and the digest begins with a secret of the
sites: the hub can neither replace a mark nor find out which other close would lead to the same one. A mark is equal by
chance once in 65,535 times, for each round after the lie anew. Where messages are not sealed, marks find faults.

A site that joins gets the digest with the state of its donor, and compares what has arrived before.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from ..secure.epochs import DIGEST_BYTES

_KEPT = 8  # rounds
_MOST_EARLY = 1 << 12  # marks
_MARKS = 0xFFFF  # the tag of a frame has 16 bits; 0 is none
_CLOSE = struct.Struct("<QHH")  # step, number of contributors, number of those that have joined


class RoundHistory:
    """Digest of the rounds that have been closed for one site. To be called with the link's lock held.

    Attributes:
        differs: slot of the first site with another digest, and the round of its frame; None if there is none.
    """

    def __init__(self) -> None:
        self.differs: tuple[int, int] | None = None
        self._digests: dict[int, bytes] = {}  # after the last rounds, by step
        self._early: dict[tuple[int, int], int] = {}  # marks that cannot be compared yet, by slot and step

    def begin(self, step: int, digest: bytes) -> None:
        """Begin after a closed round.

        Args:
            step: the round; 0 or more.
            digest: the digest of another site after it, or what all sites begin with.
        """
        self._digests = {step: digest}
        self._compare_early(step + 1)

    def forget(self) -> None:
        """Forget everything: this site joins anew."""
        self._digests.clear()
        self._early.clear()

    def close(self, step: int, contributors: Iterable[int], joined: Iterable[int]) -> None:
        """Add a close.

        Args:
            step: the round.
            contributors: slots of its contributors.
            joined: slots of the sites that have joined in it.
        """
        if not self._digests:
            return
        last, digest = max(self._digests.items())
        slots, new = sorted(contributors), sorted(joined)
        content = struct.pack(f"<{len(slots) + len(new)}H", *slots, *new)
        content = _CLOSE.pack(step, len(slots), len(new)) + content
        self._digests[step] = hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=digest).digest()
        for old in [old for old in self._digests if old <= step - _KEPT]:
            del self._digests[old]
        for key in [key for key in self._early if key[1] <= last]:
            del self._early[key]
        self._compare_early(step + 1)

    def after(self, step: int) -> bytes:
        """Return the digest after a round that has been closed lately."""
        return self._digests[step]

    @property
    def open_step(self) -> int:
        """Number of the round after the last one that has been closed."""
        return max(self._digests, default=0) + 1

    def mark(self, step: int) -> int:
        """Return the tag of this site's frames of a round; 0 outside of rounds, and before this site has joined."""
        digest = self._digests.get(step - 1)
        return 0 if digest is None else 1 + int.from_bytes(digest[:8], "little") % _MARKS

    @property
    def other_mark(self) -> int:
        """A mark that the open round does not have."""
        return self.mark(self.open_step) % _MARKS + 1

    def compare(self, slot: int, step: int, mark: int) -> None:
        """Take the tag of a frame.

        Args:
            slot: its sender.
            step: its round.
            mark: the tag.
        """
        own = self.mark(step)
        if own:
            different = mark != own
        elif self._digests and step < self.open_step:  # a round that is closed already
            different = True
        else:
            different = bool(mark) and self._early.setdefault((slot, step), mark) != mark
            different |= len(self._early) > _MOST_EARLY
        if different:
            self.differs = self.differs or (slot, step)

    def _compare_early(self, step: int) -> None:
        for slot, of in [key for key in self._early if key[1] == step]:
            self.compare(slot, of, self._early.pop((slot, of)))
