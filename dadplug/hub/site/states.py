"""Requests for the states of sites: those that this site answers, and the one whose answer it waits for."""

from __future__ import annotations

import threading
from collections import deque

from ..wire.messages import Head, Kind, SendState


class StateRequests:
    """Requests of the hub, of which a later one replaces those before it for the same site. Threads may share it.

    Args:
        rank: slot of this site.

    Attributes:
        awaits: whether this site waits for a state.
        own: the request whose answer this site gets; None where there is none.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._due: deque[SendState] = deque()
        self.awaits = False
        self.own: SendState | None = None

    def clear(self) -> None:
        """Forget all requests: they were those of another hub."""
        self._due.clear()
        self.own = None

    def take(self, request: SendState) -> None:
        """Take a request."""
        self.withdraw(request.joiner)
        if request.donor == self._rank:
            self._due.append(request)
        elif request.joiner == self._rank:
            self.own = request

    def withdraw(self, joiner: int) -> None:
        """Answer no request for a site any more."""
        with self._lock:
            self._due = deque(each for each in self._due if each.joiner != joiner)

    def leave(self, slot: int) -> None:
        """Record that a site has left."""
        self.withdraw(slot)
        if self.own is not None and slot == self.own.donor:
            self.own = None

    def next(self, step: int) -> SendState | None:
        """Return a request that is due in a step, once; None if there is none."""
        with self._lock:
            return self._due.popleft() if self._due and self._due[0].step < step else None

    def is_outdated(self, head: Head) -> bool:
        """Return whether a frame is part of a state that this site does not wait for."""
        if head.kind is not Kind.STATE:
            return False
        own = self.own if self.awaits else None
        return own is None or (own.donor, own.number) != (head.slot, head.tag)
