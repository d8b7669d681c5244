"""Frames of the open round, which a site that joins in it is sent."""

from __future__ import annotations

from collections.abc import Iterator

from .stream import PackedFrame

_LIMIT = 1 << 30  # bytes


class OpenRound:
    """Frames that all sites are sent in a round, with their senders.

    Args:
        limit: bytes that are kept at most.

    Attributes:
        nbytes: bytes of all frames of the round.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._frames: list[tuple[int, PackedFrame]] = []
        self.nbytes = 0

    @property
    def complete(self) -> bool:
        """Whether all frames of the round have been kept."""
        return self.nbytes <= self._limit

    def append(self, slot: int, frame: PackedFrame) -> None:
        """Keep a frame of a site."""
        self.nbytes += len(frame)
        if self.complete:
            self._frames.append((slot, frame))
        else:
            self._frames.clear()

    def forget(self, slot: int) -> None:
        """Forget the frames of a site that has left."""
        self._frames = [each for each in self._frames if each[0] != slot]

    def clear(self) -> None:
        """Begin a round."""
        self._frames.clear()
        self.nbytes = 0

    def frames(self) -> Iterator[PackedFrame]:
        """Yield the frames, in the order in which they were sent."""
        return (frame for _, frame in self._frames)
