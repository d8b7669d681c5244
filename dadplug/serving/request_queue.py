"""Queue of one model: batches of equal shape from what waits, without spinning."""

from __future__ import annotations

import queue
from collections import deque
from typing import Any

from ..errors import UnavailableError
from .ticket import Ticket


class RequestQueue:
    """Requests that wait for a model; many threads add, one takes.

    Args:
        name: name of the model, for messages.
        most: largest number of waiting requests.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._arriving: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._waiting: deque[Ticket] = deque()

    def __len__(self) -> int:
        return self._arriving.qsize() + len(self._waiting)

    def put(self, ticket: Ticket) -> None:
        """Add a request.

        Raises:
            UnavailableError: if too many are waiting.
        """
        if len(self) >= self._most:
            raise UnavailableError(f"{self._most} requests wait for model {self._name!r}")
        self._arriving.put(ticket)

    def wake(self) -> None:
        """Let `wait` return."""
        self._arriving.put(None)

    def wait(self) -> None:
        """Return once a request waits, or after `wake`."""
        if not self._waiting:
            self._take_in(self._arriving.get())
        self.poll()

    def poll(self) -> None:
        """Let `take` see what has arrived."""
        while not self._arriving.empty():
            self._take_in(self._arriving.get())

    def take(self, limit: int, now: float) -> tuple[list[Ticket], list[Ticket]]:
        """Take a batch: the oldest request, and those of the same shape and dtype, in the order of their arrival.

        Args:
            limit: largest size of the batch.
            now: the time in seconds.

        Returns:
            The batch, and the requests whose deadlines have passed, which are not part of it.
        """
        batch: list[Ticket] = []
        expired: list[Ticket] = []
        others: list[Ticket] = []
        while self._waiting and len(batch) < limit:
            ticket = self._waiting.popleft()
            if ticket.deadline <= now:
                expired.append(ticket)
            elif not batch or _kind(ticket) == _kind(batch[0]):
                batch.append(ticket)
            else:
                others.append(ticket)
        self._waiting.extendleft(reversed(others))
        return batch, expired

    def expired(self, now: float = float("inf")) -> list[Ticket]:
        """Take the requests whose deadlines have passed; without a time, all."""
        self.poll()
        found = [ticket for ticket in self._waiting if ticket.deadline <= now]
        self._waiting = deque(ticket for ticket in self._waiting if ticket.deadline > now)
        return found

    def _take_in(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._waiting.append(ticket)


def _kind(ticket: Ticket) -> tuple[Any, ...]:
    return (ticket.x.shape, ticket.x.dtype)
