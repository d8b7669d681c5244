"""Cap of what is sent: a token bucket, shared by all connections that it counts for."""

from __future__ import annotations

import threading
import time

# A full TCP segment takes 1500 bytes of the network for 1448 of a connection (IPv4, timestamps).
_ON_THE_NETWORK = 1500 / 1448
_BURST_SECONDS = 0.05
_SMALLEST_BURST = 1 << 14  # bytes: a full record of TLS
_SMALLEST_PART = 1448  # bytes: a segment is not divided further


class TokenBucket:
    """Number of bytes that may be sent, which grows with time; may be used by several threads.

    Args:
        megabits: megabits per second, with the heads of packets.

    Raises:
        ValueError: if it is not positive.
    """

    def __init__(self, megabits: float) -> None:
        if not megabits > 0:
            raise ValueError(f"rate limit {megabits}: it has to be positive, in Mbit/s")
        self._rate = megabits * 1e6 / 8 / _ON_THE_NETWORK
        self._most = max(_SMALLEST_BURST, self._rate * _BURST_SECONDS)
        self._tokens, self._since = self._most, time.monotonic()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        """Return how many of some bytes may be sent now, which count as sent.

        Args:
            nbytes: the number of bytes.
        """
        with self._lock:
            self._fill()
            if self._tokens < min(nbytes, _SMALLEST_PART):
                return 0
            granted = min(nbytes, int(self._tokens))
            self._tokens -= granted
            return granted

    def give_back(self, nbytes: int) -> None:
        """Take back bytes that `take` has granted, and were not sent.

        Args:
            nbytes: the number of bytes.
        """
        with self._lock:
            self._tokens += nbytes

    def delay(self) -> float:
        """Return the seconds until bytes may be sent again, such that each turn sends a fair part."""
        with self._lock:
            self._fill()
            wanted = min(self._most / 2, 4 * _SMALLEST_PART)
            return max(0.0, (wanted - self._tokens) / self._rate)

    def _fill(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._most, self._tokens + (now - self._since) * self._rate)
        self._since = now


_buckets: dict[str, TokenBucket] = {}


def site_bucket(folder: str, megabits: float | None) -> TokenBucket | None:
    """Return the bucket that all connections of this process with one kit share; None without a limit.

    Args:
        folder: folder of the kit.
        megabits: its limit, in Mbit/s.
    """
    if megabits is None:
        return None
    key = f"{folder} {megabits}"
    return _buckets.setdefault(key, TokenBucket(megabits))
