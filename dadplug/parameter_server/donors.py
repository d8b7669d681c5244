"""Choice of the sites that send their state to sites that return."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class Donors:
    """Requests for the state of present sites.

    A site that is asked answers its requests in order, at different places of its log. An answer is of use only if it
    belongs to the last request for its receiver: the log that the receiver gets begins there.

    Args:
        choose: returns the site that is to be asked among some, in ascending order.
    """

    def __init__(self, choose: Callable[[list[int]], int]) -> None:
        self._choose = choose
        self._requests = 0
        self._returning: set[int] = set()  # sites that have no state yet
        self._asked: dict[int, deque[int]] = {}  # requests that a site has not answered
        self._wanted: dict[int, tuple[int, int]] = {}  # by receiver: the last request, and the site that was asked

    def ask(self, receiver: int, present: Iterable[int]) -> int | None:
        """Choose the site that is asked for its state.

        Args:
            receiver: the site that returns.
            present: the connected sites.

        Returns:
            The site, which is to be sent the request; None if there is none.
        """
        self._returning.add(receiver)
        able = sorted(set(present) - self._returning)
        if not able:
            return None
        donor = self._choose(able)
        self._requests += 1
        self._asked.setdefault(donor, deque()).append(self._requests)
        self._wanted[receiver] = self._requests, donor
        return donor

    def answer(self, donor: int, receiver: int) -> bool:
        """Take note of an answer; return whether it is to be passed on to its receiver.

        Raises:
            ValueError: if the site was not asked.
        """
        requests = self._asked.get(donor)
        if not requests:
            raise ValueError("it has sent its state, and was not asked for it")
        if self._wanted.get(receiver) != (requests.popleft(), donor):
            return False
        del self._wanted[receiver]
        return True

    def ready(self, site: int) -> None:
        """Take note that a site that has returned has loaded the state."""
        self._returning.discard(site)

    def leave(self, site: int) -> list[int]:
        """Take note that a site has left; return the sites that wait for its state."""
        self._asked.pop(site, None)
        self._wanted.pop(site, None)
        self._returning.discard(site)
        waiting = [receiver for receiver, (_, donor) in self._wanted.items() if donor == site]
        for receiver in waiting:
            del self._wanted[receiver]
        return waiting
