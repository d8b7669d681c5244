"""Results of asynchronous calls."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from .interfaces import Completion

T = TypeVar("T")


class Waiter(Protocol):
    """Object that waits for calls, and raises if their replies cannot arrive."""

    def wait_for(self, done: Completion) -> None: ...


class Pending(Generic[T]):
    """Asynchronous call of a `Table`.

    Args:
        waiter: object that waits for the call.
        done: completion of the call; None if it is complete.
        result: result of the call.

    Example:
        >>> import torch
        >>> from dadplug.adapm import ParameterManager
        >>> with ParameterManager() as manager:
        ...     words = manager.table("words", width=2, rows=10)
        ...     pending = words.pull_async(torch.tensor([3]))
        ...     values = pending.wait()
        >>> values
        tensor([[0., 0.]])
    """

    def __init__(self, waiter: Waiter, done: Completion | None, result: T) -> None:
        self._waiter, self._done, self._result = waiter, done, result

    @property
    def done(self) -> bool:
        """Whether the call is complete."""
        return self._done is None or self._done.is_set()

    def wait(self) -> T:
        """Wait until the call is complete; return its result.

        Raises:
            SiteError: if a site exits or does not answer.
        """
        if self._done is not None:
            self._waiter.wait_for(self._done)
        return self._result
