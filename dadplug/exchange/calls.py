"""Exchanges that sites have begun, to name sites that do not make the same calls.

All sites of a group begin its exchanges in one order. So two sites make different calls if each of them waits for an
exchange that the other has not begun: neither will end. Objects carry the function that gathers them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import DamagedError, MismatchError, escaped
from . import codec

DIFFERENT = "the sites do not make the same calls"
ASK_SECONDS = 2.0  # of a wait, after which a site asks what the others wait for
_TRANSPORTS = ("dadplug.exchange", "dadplug.hub.site", "dadplug.parameter_server")
_groups: weakref.WeakValueDictionary[str, BegunExchanges] = weakref.WeakValueDictionary()


@codec.register
class Wait(NamedTuple):
    """Wait of a process for an exchange.

    Attributes:
        group: name of the group.
        kind: kind of the exchange.
        number: its number among those of the kind.
    """

    group: str
    kind: str
    number: int


class BegunExchanges(Counter[str]):
    """Exchanges that this process has begun in a group, by kind.

    Args:
        group: name of the group, the same at all its sites.
    """

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group = group
        _groups[group] = self

    def begin(self, kind: str) -> Wait:
        """Begin an exchange, and return what the wait for it is."""
        self[kind] += 1
        own_place.last = Wait(self._group, kind, self[kind])
        return own_place.last


class OwnPlace:
    """Place of this process.

    Attributes:
        step: number of the step of training.
        last: the exchange that was begun last; None if none has been.
        wait: wait that takes long, or has ended in an error; None if there is none.
        waiting: threads that wait in an exchange, by their numbers.
    """

    step = 0
    last: Wait | None = None
    wait: Wait | None = None

    def __init__(self) -> None:
        self.waiting: set[int] = set()

    def lacks(self, wait: Wait | None) -> bool:
        """Return whether this process has not begun an exchange of a group that it belongs to."""
        return wait is not None and wait.group in _groups and _groups[wait.group][wait.kind] < wait.number

    def __str__(self) -> str:
        last = self.wait or self.last
        return f"{f'exchange {last.number} of {last.kind}' if last else 'no exchange'}, step {self.step}"


own_place = OwnPlace()


def tagged(item: Any) -> tuple[str, str, Any]:
    """Return an object to gather, with the function that gathers it and the place of this site."""
    frame: Any = sys._getframe(1)
    while (module := frame.f_globals.get("__name__") or "").startswith(_TRANSPORTS):
        frame = frame.f_back
    function = frame.f_code.co_name if module.startswith("dadplug.") else ""  # a program may have any
    return function, f"{function or 'gather_objects'}(), {own_place}", item


def decode_tagged(item: Any) -> tuple[str, str, Any]:
    """Return what `tagged` has returned at another site.

    Raises:
        DamagedError: if it is anything else.
    """
    if not (isinstance(item, tuple) and [*map(type, item[:2])] == [str, str] and len(item) == 3):
        raise DamagedError("a site has sent an object without the call that gathers it")
    return item


def untagged(every: Mapping[int, tuple[str, str, Any]], sites: Any) -> dict[int, Any]:
    """Return objects that sites have tagged, by rank.

    Raises:
        MismatchError: at all sites, if they have not gathered them by the same call.
    """
    if len({function for function, _, _ in every.values()}) > 1:
        raise MismatchError(explain({rank: place for rank, (_, place, _) in every.items()}, sites))
    return {rank: item for rank, (_, _, item) in every.items()}


def explain(places: Mapping[int, str], sites: Any) -> str:
    """Return the message for sites that make different calls.

    Args:
        places: the exchanges that they are in, by rank.
        sites: the sites by name.
    """
    where = ", and ".join(f"{sites[rank]} is in {escaped(place)}" for rank, place in sorted(places.items()) if place)
    return (
        f"{DIFFERENT}: {where}. Every site must make the calls that exchange something "
        "equally often and in the same order, with the same model; a site that has run out of data calls idle()"
    )
