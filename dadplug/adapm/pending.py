"""What asynchronous calls return."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from .requests import Done

T = TypeVar("T")


class Waiter(Protocol):
    """Knows how to wait, and whether waiting is in vain."""

    def wait_for(self, done: Done) -> None: ...


class Pending(Generic[T]):
    """What an asynchronous call has begun.

    Args:
        waiter: waits.
        done: set when it is over; None if it is already.
        result: what `wait` returns.
    """

    def __init__(self, waiter: Waiter, done: Done | None, result: T) -> None:
        self._waiter, self._done, self._result = waiter, done, result

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done is None or self._done.is_set()

    def wait(self) -> T:
        """Waits until it is over, and returns its result.

        Raises:
            SiteError: if a site ends or does not answer.
        """
        if self._done is not None:
            self._waiter.wait_for(self._done)
        return self._result
