"""Limits of what leaves this site: restrictions of its connections, and exchanges that are declared.

The connection to a hub imposes the policy of its kit here. Where a policy restricts what methods send, the process
group of the hub (`dadplug.hub.torch`) allows declared collectives only, each up to a number of bytes. Without such a
policy there is no bound. The table in docs/guides/kits.md lists the declared exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

METRICS = 1 << 13  # 1024 numbers in double precision
OBJECTS = 1 << 16  # that a program gathers
STATES = 1 << 30  # of the sites, for a checkpoint

# Threads of autograd do not inherit it: what the reducer of torch's DDP sends in backward is never declared.
_most: ContextVar[int | None] = ContextVar("declared", default=None)


class Restricted(Protocol):
    """The options that a policy restricts: `dadplug.options.Options` or an object with the same attributes."""

    @property
    def mode(self) -> str:
        """Method of agreement."""

    @property
    def share_inputs(self) -> bool:
        """Whether factors of layers that are fed by raw data leave the site."""


class Restrictions(Protocol):
    """Restrictions of a connection, such as `dadplug.hub.pki.project.KitRestrictions`."""

    def check(self, options: Restricted, *, sends_factors: bool) -> None:
        """Check the options of a way to train.

        Args:
            options: the options.
            sends_factors: whether the mode sends layers' inputs and gradients of outputs, compressed or not.

        Raises:
            PolicyError: if one of the options is not allowed.
        """

    def check_bytes(self, nbytes: int, most: int) -> None:
        """Raise PolicyError if more bytes would leave the site than the most that is allowed beside a method."""

    def check_rank(self, name: str, sent: int, rows: int) -> None:
        """Raise PolicyError if too many rows would leave the site for those of a layer's input."""


IN_FORCE: list[Restrictions] = []
"""Restrictions that are in force; all of them hold."""


def impose_restrictions(restrictions: Restrictions) -> None:
    """Put restrictions into force; several hold together."""
    IN_FORCE.append(restrictions)


def lift_restrictions(restrictions: Restrictions) -> None:
    """End restrictions, when their connection is closed; may be called twice."""
    if restrictions in IN_FORCE:
        IN_FORCE.remove(restrictions)


def check_restrictions(options: Restricted, *, sends_factors: bool) -> None:
    """Check options against all restrictions in force; without a connection to a hub there are none.

    Args:
        options: the options.
        sends_factors: as for `Restrictions.check`.

    Raises:
        PolicyError: if one of the options is not allowed.
    """
    for restrictions in IN_FORCE:
        restrictions.check(options, sends_factors=sends_factors)


def check_declared(nbytes: int) -> None:
    """Check what leaves this site in a declared exchange against all restrictions in force.

    Args:
        nbytes: bytes that would be sent.

    Raises:
        PolicyError: if these are more than the declaration allows.
    """
    if (most := most_bytes()) is not None:
        for restrictions in IN_FORCE:
            restrictions.check_bytes(nbytes, most)


def check_restricted_rank(name: str, sent: int, rows: int) -> None:
    """Check how many rows leave this site for those of a layer's input, against all restrictions in force.

    Args:
        name: name of the weight.
        sent: number of rows that would be sent.
        rows: number of rows of the layer's input in the step.

    Raises:
        PolicyError: if these are more than one of them allows.
    """
    for restrictions in IN_FORCE:
        restrictions.check_rank(name, sent, rows)


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
