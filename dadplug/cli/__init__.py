"""Command lines: arguments, launch of sites, progress, comparison of methods."""

from __future__ import annotations

from .arguments import add_option_arguments, options_of, place_of, plain_errors

__all__ = ["add_option_arguments", "options_of", "place_of", "plain_errors"]
