"""Replacement of an attribute of another library while it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class SharedPatch:
    """Replacement of an attribute of a module or class while at least one user has the patch open.

    Args:
        find_owner: function that returns the module or class; called when the patch is first opened.
        name: name of the attribute.
        replace: function from the original value to the new one.
    """

    def __init__(self, find_owner: Callable[[], Any], name: str, replace: Callable[[Any], Any]) -> None:
        self._find_owner = find_owner
        self._name = name
        self._replace = replace
        self._open = 0
        self._lock = threading.Lock()
        self._original: Any = None
        self._replacement: Any = None

    def open(self) -> None:
        """Set the new value; each call must be followed by one of `close`."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                owner = self._find_owner()
                self._original = getattr(owner, self._name)
                self._replacement = self._replace(self._original)
                setattr(owner, self._name, self._replacement)

    def close(self) -> None:
        """Restore the original when no user has the patch open any more."""
        with self._lock:
            self._open -= 1
            owner = self._find_owner()
            if not self._open and getattr(owner, self._name) is self._replacement:
                setattr(owner, self._name, self._original)

    def __enter__(self) -> None:
        self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()
