"""Exchanges that a kit's policy allows beside those of the methods, each with the most bytes that it may send.

Where a policy restricts what leaves a site, the hub's process group refuses all collectives but these, see
`dadplug.hub.torch`. Without a restriction they have no bound. The table in docs/guides/kits.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

METRICS = 1 << 13  # 1024 numbers in double precision
OBJECTS = 1 << 16  # that a program gathers
STATES = 1 << 30  # of the sites, for a checkpoint

# Threads of autograd do not inherit it: what the reducer of torch's DDP sends in backward is never declared.
_most: ContextVar[int | None] = ContextVar("declared", default=None)


@contextmanager
def declared(most: int) -> Iterator[None]:
    """Declare what is exchanged in a context.

    Args:
        most: bytes that one exchange may send; within another declaration, the larger of both counts.
    """
    before = _most.set(max(most, _most.get() or 0))
    try:
        yield
    finally:
        _most.reset(before)


def most_bytes() -> int | None:
    """Return the most bytes that an exchange may send at present; None where nothing has been declared."""
    return _most.get()
