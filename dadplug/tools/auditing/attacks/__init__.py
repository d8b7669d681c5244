"""Attacks on what a site sends; their order is that of the imports, and of the classes in a file."""

from . import rows, shown, tokens, separation, inversion  # noqa: F401, I001
from .base import ATTACKS, RECOVERED, Attack, Budget, Result, register_attack

__all__ = ["ATTACKS", "RECOVERED", "Attack", "Budget", "Result", "register_attack"]
