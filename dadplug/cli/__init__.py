"""Command lines: commands of `python -m dadplug`, arguments, launch of sites, progress, comparison of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import add_kit_argument, add_option_arguments, options_of, place_of, plain_errors

__all__ = ["add_kit_argument", "add_option_arguments", "options_of", "place_of", "plain_errors"]


def __getattr__(name: str) -> Any:  # so that commands without training do not load torch
    if name in __all__:
        from . import arguments

        return getattr(arguments, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
