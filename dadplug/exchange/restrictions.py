"""Restrictions of what leaves this site, by whoever has connected it: a hub's connection puts its kit's policy here."""

from __future__ import annotations

from typing import Protocol


class Restricted(Protocol):
    """The options that a policy restricts: `dadplug.options.Options` or an object with the same attributes."""

    @property
    def mode(self) -> str:
        """Method of agreement."""

    @property
    def share_inputs(self) -> bool:
        """Whether factors of layers that are fed by raw data leave the site."""


class Restrictions(Protocol):
    """Restrictions of a connection, such as `dadplug.hub.pki.project.KitRestrictions`."""

    def check(self, options: Restricted, *, sends_factors: bool) -> None:
        """Check the options of a way to train.

        Args:
            options: the options.
            sends_factors: whether the mode sends layers' inputs and gradients of outputs, compressed or not.

        Raises:
            PolicyError: if one of the options is not allowed.
        """

    def check_bytes(self, nbytes: int, most: int) -> None:
        """Raise PolicyError if more bytes would leave the site than the most that is allowed beside a method."""

    def check_rank(self, name: str, sent: int, rows: int) -> None:
        """Raise PolicyError if too many rows would leave the site for those of a layer's input."""


_in_force: list[Restrictions] = []


def impose_restrictions(restrictions: Restrictions) -> None:
    """Put restrictions into force; several hold together."""
    _in_force.append(restrictions)


def lift_restrictions(restrictions: Restrictions) -> None:
    """End restrictions, when their connection is closed; may be called twice."""
    if restrictions in _in_force:
        _in_force.remove(restrictions)


def check_restrictions(options: Restricted, *, sends_factors: bool) -> None:
    """Check options against all restrictions in force; without a connection to a hub there are none.

    Args:
        options: the options.
        sends_factors: as for `Restrictions.check`.

    Raises:
        PolicyError: if one of the options is not allowed.
    """
    for restrictions in _in_force:
        restrictions.check(options, sends_factors=sends_factors)


def check_restricted_bytes(nbytes: int, most: int) -> None:
    """Check what leaves this site in an exchange that is not one of a method, against all restrictions in force.

    Args:
        nbytes: bytes that would be sent.
        most: bytes that are allowed where a policy restricts methods.

    Raises:
        PolicyError: if these are more.
    """
    for restrictions in _in_force:
        restrictions.check_bytes(nbytes, most)


def check_restricted_rank(name: str, sent: int, rows: int) -> None:
    """Check how many rows leave this site for those of a layer's input, against all restrictions in force.

    Args:
        name: name of the weight.
        sent: number of rows that would be sent.
        rows: number of rows of the layer's input in the step.

    Raises:
        PolicyError: if these are more than one of them allows.
    """
    for restrictions in _in_force:
        restrictions.check_rank(name, sent, rows)
