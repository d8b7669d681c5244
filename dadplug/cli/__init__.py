"""Command lines: the commands of `python -m dadplug`, and what the experiments and examples share with them."""

from .arguments import add_kit_argument, add_option_arguments, options_of, place_of, plain_errors

__all__ = ["add_kit_argument", "add_option_arguments", "options_of", "place_of", "plain_errors"]
