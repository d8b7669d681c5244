"""Errors of dadplug, besides ValueError for wrong arguments."""

from __future__ import annotations


class SiteError(RuntimeError):
    """Another site is missing, silent or gone; the message names it."""


class DroppedError(SiteError):
    """The hub has dropped this site, which takes part again from its next step on; the message has the reason."""


class MismatchError(RuntimeError):
    """The sites do not run the same program: models, options, steps or message sizes differ."""


class NonFiniteError(RuntimeError):
    """A gradient holds NaN or Inf; the message names step, site and layer, and no parameter has been touched."""


class KitError(ValueError):
    """A project file or a kit is incomplete, damaged or contradictory; the message names the file."""


class PolicyError(KitError):
    """An option is not allowed by the site's kit: by its local policy, or since a third party runs the hub."""


class RefusedError(SiteError):
    """A connection between hub and site was refused; the message is the reason, and dialing again does not help."""


class SealingError(SiteError):
    """A sealed message is not what its site has sent, or sites cannot agree on keys; the message names the site."""


class ProcessFailedError(RuntimeError):
    """A process that trains on this machine has raised an error, was killed or is gone; the message names it."""
