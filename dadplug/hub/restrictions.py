"""Restrictions that the connection to a hub puts on the options of this process, below any program's options."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PolicyError
from .policy import Policy, Restricted
from .project import Roster


@dataclass(frozen=True, eq=False)
class Restrictions:
    """Restrictions of one connection to a hub.

    Attributes:
        policy: policy of the site's kit.
        roster: members of the project.
    """

    policy: Policy
    roster: Roster

    def check(self, options: Restricted, *, sends_factors: bool) -> None:
        """Check the options of a reduction.

        Args:
            options: the options.
            sends_factors: whether the mode sends layers' inputs and gradients of outputs, compressed or not.

        Raises:
            PolicyError: if one of the options is not allowed.
        """
        self.policy.check(options)
        if sends_factors and self.roster.hub_at is None and not self.roster.sealed:
            raise PolicyError(
                f"mode={options.mode!r} sends factors of gradients, which the hub of {self.roster.project} could read: "
                "it decrypts what it passes on, and a third party runs it. Choose a mode without factors, such as "
                "dsgd or topk, or add sealed = true to the project file, so that sites encrypt for each other; if a "
                'site runs the hub, add hub_at = "NAME OF THE SITE". Then repeat `provision`, and copy roster.json to '
                "all kits"
            )


_in_force: list[Restrictions] = []


def impose(restrictions: Restrictions) -> None:
    """Put restrictions into force; several hold together."""
    _in_force.append(restrictions)


def lift(restrictions: Restrictions) -> None:
    """End restrictions, when their connection is closed; may be called twice."""
    if restrictions in _in_force:
        _in_force.remove(restrictions)


def check(options: Restricted, *, sends_factors: bool) -> None:
    """Check options against all restrictions in force; without a connection to a hub there are none.

    Args:
        options: the options.
        sends_factors: as for `Restrictions.check`.

    Raises:
        PolicyError: if one of the options is not allowed.
    """
    for restrictions in _in_force:
        restrictions.check(options, sends_factors=sends_factors)
