"""Checks as data: what is wrong with a setting, and the message that says so."""

from __future__ import annotations


def refuse(*reasons: tuple[object, str]) -> None:
    """Raise ValueError for the first reason that holds.

    Args:
        reasons: whether something is wrong, and the message, which names the remedy.
    """
    for wrong, message in reasons:
        if wrong:
            raise ValueError(message)
