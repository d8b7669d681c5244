"""Running digest of the rounds that the hub has closed for a site; sites compare it to detect a hub that splits a run.

Which sites count in a round decides on the weights, and only the hub says it. So each close is added to a digest at
each site, and the tag of each payload frame holds a mark of the sender's digest before the round of the frame. Where
messages are sealed, the head of a frame is authenticated with its content, and the digest begins with a secret of the
sites: the hub can neither replace a mark nor find out which other close would lead to the same one. A mark is equal by
chance once in 65,535 times, for each round after the lie anew. Where messages are not sealed, marks find faults.

A site that joins gets the digest with the state of its donor, and compares what has arrived before.

The digest also contains the sites that this one has left out of a round, since what they have sent is invalid. All
sites receive the same, so that they leave out the same: a hub that withholds a message from one of them is found out.
So a round is added to the digest when this site next needs it, after it has read what belongs to the round. A site may
not know that others have left it out: its marks differ from then on, which counts as invalid until it joins again.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from ..secure.epochs import DIGEST_BYTES

_KEPT = 8  # rounds
_MOST_EARLY = 1 << 16  # marks: of the rounds by which a late site may be behind
_NO_MARK = -1  # of a sender with two marks for one round: it differs from every mark
_MARKS = 0xFFFF  # the tag of a frame has 16 bits; 0 is none
_CLOSE = struct.Struct("<QHH")  # step, number of contributors, number of those that have joined


class RoundHistory:
    """Digest of the rounds that have been closed for one site. To be called with the link's lock held.

    Attributes:
        differs: slot of the first site with another digest, and the round of its frame; None if there is none.
        apart: the same of the sites that were left out before.
    """

    def __init__(self) -> None:
        self.differs: tuple[int, int] | None = None
        self._digests: dict[int, bytes] = {}  # after the last rounds, by step
        self._early: dict[tuple[int, int], int] = {}  # marks that cannot be compared yet, by slot and step
        self._open: tuple[int, list[int], list[int]] | None = None  # the last close, until it is added
        self._left_out: set[int] = set()  # since the last close that was added
        self._suspects: set[int] = set()  # that were left out since they have joined
        self.apart: set[tuple[int, int]] = set()

    def begin(self, step: int, digest: bytes) -> None:
        """Begin after a closed round.

        Args:
            step: the round; 0 or more.
            digest: the digest of another site after it, or what all sites begin with.
        """
        self._digests, self._open = {step: digest}, None
        self._left_out.clear()
        self._compare_early(step + 1)

    def forget(self) -> None:
        """Forget everything: this site joins anew."""
        self._digests.clear()
        self._early.clear()
        self._open = None
        self._left_out.clear()
        self._suspects.clear()

    def close(self, step: int, contributors: Iterable[int], joined: Iterable[int]) -> None:
        """Take a close; it is added to the digest by `finish`.

        Args:
            step: the round.
            contributors: slots of its contributors.
            joined: slots of the sites that have joined in it.
        """
        self.finish()
        self._suspects -= {*joined}
        self.apart = {each for each in self.apart if each[1] >= step}
        if self._digests:
            self._open = step, sorted(contributors), sorted(joined)

    def leave_out(self, slot: int) -> None:
        """Record that this site leaves another one out of the last round that was closed, or of the one before."""
        self._left_out.add(slot)
        self._suspects.add(slot)

    def finish(self) -> None:
        """Add the last close, and the sites that were left out since the one before."""
        if self._open is None:
            return
        (step, slots, new), left_out, self._open = self._open, sorted(self._left_out), None
        self._left_out.clear()
        last, digest = max(self._digests.items())
        content = struct.pack(f"<{len(slots) + len(new) + len(left_out)}H", *slots, *new, *left_out)
        content = _CLOSE.pack(step, len(slots), len(new)) + content
        self._digests[step] = hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=digest).digest()
        for old in [old for old in self._digests if old <= step - _KEPT]:
            del self._digests[old]
        for key in [key for key in self._early if key[1] <= last]:
            del self._early[key]
        self._compare_early(step + 1)

    def after(self, step: int) -> bytes:
        """Return the digest after a round that has been closed lately."""
        self.finish()
        return self._digests[step]

    @property
    def open_step(self) -> int:
        """Number of the round after the last one that has been closed."""
        return max(self._digests, default=0) + 1

    def mark(self, step: int) -> int:
        """Return the tag of this site's frames of a round; 0 outside of rounds, and before this site has joined."""
        digest = self._digests.get(step - 1)
        return 0 if digest is None else 1 + int.from_bytes(digest[:8], "little") % _MARKS

    def other_mark(self, step: int) -> int:
        """Return a mark that this site's frames of a round do not have."""
        return self.mark(step) % _MARKS + 1

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
            if mark and self._early.setdefault((slot, step), mark) != mark:
                self._early[slot, step] = _NO_MARK  # this site may still leave the sender out of an earlier round
            different = len(self._early) > _MOST_EARLY
        if different and slot in self._suspects:
            self.apart.add((slot, step))
        elif different:
            self.differs = self.differs or (slot, step)

    def _compare_early(self, step: int) -> None:
        for slot, of in [key for key in self._early if key[1] == step]:
            self.compare(slot, of, self._early.pop((slot, of)))
