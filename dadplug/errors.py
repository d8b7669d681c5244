"""Errors of dadplug, besides ValueError for wrong arguments."""

from __future__ import annotations


class SiteError(RuntimeError):
    """Another site is missing, silent or gone; the message names it."""


class MismatchError(RuntimeError):
    """The sites do not run the same program: models, options, steps or message sizes differ."""


class NonFiniteError(RuntimeError):
    """A gradient holds NaN or Inf; the message names step, site and layer, and no parameter has been touched."""
