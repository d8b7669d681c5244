"""Attacks on what a site sends, a file each; their order is that of the imports."""

from . import rows, span, words, labels, membership, tokens, spear, components, inversion  # noqa: F401, I001
from .base import ATTACKS, RECOVERED, Attack, Budget, Result, register_attack

__all__ = ["ATTACKS", "RECOVERED", "Attack", "Budget", "Result", "register_attack"]
