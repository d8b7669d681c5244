"""Checks as data: what is wrong with a setting, and the message that says so."""

from __future__ import annotations


def first_reason(*reasons: tuple[object, str]) -> str:
    """Return the words for the first reason that holds; empty if none does.

    Args:
        reasons: whether it holds, and the words.
    """
    return next((words for holds, words in reasons if holds), "")


def refuse(*reasons: tuple[object, str], error: type[Exception] = ValueError) -> None:
    """Raise an error for the first reason that holds.

    Args:
        reasons: whether something is wrong, and the message, which names the remedy. All are evaluated.
        error: type of the error.
    """
    if message := first_reason(*reasons):
        raise error(message)
