"""Checks of what another site has sent, where it is decoded; the error names the site."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Union

from ..errors import MismatchError

COUNT = 1 << 40  # most of a count
NUMBER = 1 << 62  # most of a number of a step, or of a digest
_LONGEST = 1 << 63  # of all whole numbers, above which len() and torch fail

Ranges = Mapping[str, tuple[int, int]]
"""The least and the largest value of each field of a message, by name."""


def check_fields(what: str, sender: str, fields: Mapping[str, int], ranges: Ranges) -> None:
    """Check that the fields of a message are in their ranges.

    Args:
        what: what the message is.
        sender: the site that has sent it.
        fields: the fields.
        ranges: the ranges.

    Raises:
        MismatchError: if one is not.
    """
    for name, (least, most) in ranges.items():
        if not least <= fields[name] <= most:
            raise invalid(what, sender, f"{name} is {fields[name]}, where {least} to {most} is possible")


def check_all(what: str, sender: str, values: Iterable[float], least: int, most: int) -> None:
    """Check that all numbers of a message are in one range; errors as of `check_fields`."""
    for value in values:
        if not least <= value <= most:
            raise invalid(what, sender, f"it holds {value}, where {least} to {most} is possible")


def minority(values: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks of the sites that state something else than more than half of them; none if these differ."""
    ((most, count),) = Counter(values.values()).most_common(1)
    return [rank for rank, value in values.items() if value != most and 2 * count > len(values)]


def invalid(what: str, sender: str, why: str) -> MismatchError:
    """Return the error about a message that no site sends."""
    return MismatchError(f"{sender} has sent an invalid {what}: {why}. Does it run the same program?")


def fits(value: Any, kind: Any) -> bool:
    """Return whether an object that has arrived is of a type.

    Args:
        value: the object.
        kind: the type, also of the items of containers, and of the fields of dataclasses and named tuples. A whole
            number of 64 bits is a float, too; neither is a boolean.
    """
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or origin in (Union, types.UnionType):
        return kind is Any or any(fits(value, each) for each in of)
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
            return False
        return not isinstance(value, Integral) or -_LONGEST <= int(value) < _LONGEST
    if not isinstance(value, origin or kind):
        return False
    if origin is tuple and of[-1] is not ...:
        return len(value) == len(of) and all(map(fits, value, of))
    if isinstance(value, Mapping):
        return not of or all(fits(key, of[0]) and fits(each, of[1]) for key, each in value.items())
    if of and not hasattr(value, "dtype"):  # of arrays the type is enough, and not all commands load numpy
        return all(fits(each, of[0]) for each in value)
    names = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else ()
    names = names or getattr(value, "_fields", ())
    hints = typing.get_type_hints(type(value)) if names else {}
    return all(fits(getattr(value, name), hints[name]) for name in names)


def check_kinds(state: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise ValueError if an entry of a saved state is of another type than its kind, see `fits`; it may be missing."""
    for name, kind in kinds.items():
        if name in state and not fits(state[name], kind):
            raise ValueError(f"the entry {name!r} is not of the type {kind}")


def checked(
    every: Mapping[int, Any],
    kind: Any,
    what: str,
    transport: Any,
    counts: Callable[[Any], Iterable[float]] = lambda _: (),
) -> dict[int, Any]:
    """Return what sites have sent, once it has been checked.

    Args:
        every: the objects by rank.
        kind: their type, see `fits`.
        what: what an object is.
        transport: the transport that has gathered them.
        counts: returns the numbers in an object that may not be negative.

    Returns:
        The objects of the sites that the run goes on with, see `Rounds.leave_out`.

    Raises:
        MismatchError: if one is not of the type, or a count is not possible; where all sites have to stay.
    """
    found = {}
    for rank, item in every.items():
        site = transport.sites[rank]
        try:
            if not fits(item, kind):
                raise invalid(what, site, f"{item!r:.100} is not of the type {getattr(kind, '__name__', kind)}")
            check_all(what, site, counts(item), 0, COUNT)
            found[rank] = item
        except MismatchError as error:
            transport.rounds.leave_out(rank, error)
    return found
