"""Named choices: a table of builders, and one error for a name that is not in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of things by name; names are compared without case, ``-`` and ``_``.

    Args:
        kind: what the things are, for messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, tuple[str, T]] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Registers a thing under its name and further ones; a decorator."""

        def decorate(entry: T) -> T:
            for name in names:
                self._entries[self._key(name)] = (names[0], entry)
            return entry

        return decorate

    def __getitem__(self, name: str) -> T:
        """Finds a thing by name.

        Raises:
            ValueError: if there is none; the message lists the valid names.
        """
        try:
            return self._entries[self._key(name)][1]
        except KeyError:
            raise ValueError(f"unknown {self.kind} {name!r}; valid ones are {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self._entries.values()))

    @staticmethod
    def _key(name: str) -> str:
        return name.lower().replace("-", "").replace("_", "")
