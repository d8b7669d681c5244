"""Predictions that wait for feedback: joined by id within a time limit."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from ..errors import FeedbackError
from .policies import Choice


class Record(NamedTuple):
    """Part of a prediction that is kept until its feedback.

    Attributes:
        context: its context.
        choice: the models that ran.
        outputs: what the task keeps of each model's output; None for a model that failed.
    """

    context: str
    choice: Choice
    outputs: dict[str, tuple[float, ...] | None]


class FeedbackJournal:
    """Records by id.

    Ids cannot be guessed, and contain the time, so that late feedback is told from feedback with an unknown id.

    Args:
        seconds: time limit.
        most: largest number of records; beyond it the oldest are dropped, as if they were late.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._records: OrderedDict[str, tuple[float, Record | None]] = OrderedDict()
        self._issued = secrets.token_hex(4)  # of this server: an id of another one is unknown
        self._secret, self._number = secrets.token_bytes(32), itertools.count()
        self._dropped = float("-inf")  # when the last dropped record was made
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record, now: float) -> str:
        """Keep a record, and return its id.

        Args:
            record: the record.
            now: the time in seconds.
        """
        # A keyed hash of a counter, since a call of the system for each id would let other threads run in between.
        number = next(self._number).to_bytes(8, "little")
        unguessable = hashlib.blake2b(number, key=self._secret, digest_size=8).hexdigest()
        key = f"{self._issued}{int(now * 1000):012x}{unguessable}"
        with self._lock:
            self._records[key] = (now, record)
            while self._records and (
                len(self._records) > self._most or next(iter(self._records.values()))[0] + self._seconds <= now
            ):
                self._dropped = self._records.popitem(last=False)[1][0]
        return key

    def find(self, key: Any, now: float) -> Record:
        """Return the record of an id.

        Raises:
            FeedbackError: if it is unknown, late or has had feedback.
        """
        with self._lock:
            made, record = self._records.get(key, (None, None)) if isinstance(key, str) else (None, None)
        if made is None:
            if isinstance(key, str) and self._was_dropped(key):
                raise FeedbackError(f"feedback came later than {self._seconds:g} s after prediction {key}", status=410)
            raise FeedbackError(f"there is no prediction with the id {key!r:.60}", status=404)
        if made + self._seconds <= now:
            raise FeedbackError(f"feedback came later than {self._seconds:g} s after prediction {key}", status=410)
        if record is None:
            raise FeedbackError(f"prediction {key} has had its feedback", status=409)
        return record

    def close(self, key: str) -> bool:
        """Mark a record as answered; return whether it was open, which is true for one caller only."""
        with self._lock:
            made, record = self._records.get(key, (0.0, None))
            if record is None:
                return False
            self._records[key] = (made, None)
            return True

    def _was_dropped(self, key: str) -> bool:
        """Return whether an id reads like one that this server has issued and dropped since."""
        try:
            made = int(key[len(self._issued) : len(self._issued) + 12], 16) / 1000
        except ValueError:
            return False
        return key.startswith(self._issued) and len(key) == len(self._issued) + 28 and made <= self._dropped


def plain(y: Any) -> Any:
    """Return the numbers of a tensor or an array; of one with a single number, that number."""
    if not hasattr(y, "tolist"):
        return y
    y = y.tolist()
    return y[0] if isinstance(y, list) and len(y) == 1 else y
