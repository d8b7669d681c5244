"""Popularity of cache keys: a count-min sketch with aging, for admission by frequency (TinyLFU).

Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Trans. Storage 13, 2017. Counts are
approximate, never too small, and halved now and then, so that keys that were popular once are forgotten.
"""

from __future__ import annotations

_ROWS = 4
_MOST = 255  # value at which a count stays
_HALVED = bytes(count // 2 for count in range(256))
_WIDEST = 1 << 20


class PopularitySketch:
    """Approximate number of recent requests by key.

    Args:
        width: number of counters in each of the four rows; rounded up to a power of two, from 256 to 2^20.
    """

    def __init__(self, width: int) -> None:
        self._mask = (1 << max(8, (min(width, _WIDEST) - 1).bit_length())) - 1
        self._rows = [bytearray(self._mask + 1) for _ in range(_ROWS)]
        self._recorded = 0

    def record(self, digest: bytes, period: int) -> None:
        """Count a request.

        Args:
            digest: digest of the key; its first 16 bytes are used.
            period: number of requests after which all counts are halved.
        """
        rows, places = self._rows, self._places(digest)
        counts = [row[place] for row, place in zip(rows, places, strict=True)]
        least = min(counts)
        if least < _MOST:  # only the smallest ones: the others are too large already
            for row, place, count in zip(rows, places, counts, strict=True):
                if count == least:
                    row[place] = least + 1
        self._recorded += 1
        if self._recorded >= period:
            self._recorded //= 2
            self._rows = [row.translate(_HALVED) for row in rows]

    def estimate(self, digest: bytes) -> int:
        """Return the approximate number of recent requests of a key.

        Args:
            digest: digest of the key.
        """
        return min(row[place] for row, place in zip(self._rows, self._places(digest), strict=True))

    def _places(self, digest: bytes) -> tuple[int, int, int, int]:
        bits, mask = int.from_bytes(digest[:16], "little"), self._mask
        return bits & mask, bits >> 32 & mask, bits >> 64 & mask, bits >> 96 & mask
