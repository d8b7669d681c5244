"""Environment variables, and other mappings, with other values in a context."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def assign(mapping: Any, values: Mapping[str, Any]) -> None:
    """Set values of a mapping; None stands for a missing one.

    Args:
        mapping: the mapping.
        values: the values by name.
    """
    for name, value in values.items():
        if value is None:
            mapping.pop(name, None)
        else:
            mapping[name] = value


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in a context, and restore them at its end, also if they were set once more.

    Args:
        changes: the values by name; None for variables that are not to be set.
    """
    before = {name: os.environ.get(name) for name in changes}
    assign(os.environ, changes)
    try:
        yield
    finally:
        assign(os.environ, before)
