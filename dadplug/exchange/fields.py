"""Checks of what another site has sent, where it is decoded; the error names the site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

from ..errors import MismatchError

COUNT = 1 << 40  # most of a count
NUMBER = 1 << 62  # most of a number of a step, or of a digest

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


def check_all(what: str, sender: str, values: Iterable[int], least: int, most: int) -> None:
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
