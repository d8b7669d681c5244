"""Rules by which contributions are committed: options of the parameter server, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..signature import check_choice, number, whole_number

LATE = ("scale", "drop", "keep")
DEALS = ("own", "shared")
MODES = ("dsgd", "dad", "rankdad")


class Rules(NamedTuple):
    """Rules of a sequencer. Made by `make_rules`, which checks them.

    Attributes:
        staleness: the largest number of versions between the one that a contribution was computed at and the one that
            it is committed to.
        quorum: number of sites whose contributions make a commit.
        late: ``"scale"``, ``"drop"`` or ``"keep"``.
        gather: the largest part of its site's step for which a contribution waits for those of other sites.
    """

    staleness: int
    quorum: int
    late: str
    gather: float = 0.0

    def scale(self, age: int) -> float:
        """Return the factor of the learning rate for a contribution.

        Args:
            age: number of versions τ that have been committed since it was computed.
        """
        return 1.0 / (1 + age) if self.late == "scale" else 1.0


def make_rules(staleness: Any, quorum: Any, late: Any, gather: Any = 0.0) -> Rules:
    """Check the options of a parameter server that do not depend on the sites.

    Args:
        staleness: a whole number of at least 0.
        quorum: a whole number of at least 1.
        late: one of `LATE`.
        gather: a number from 0 to 1.

    Raises:
        ValueError: if one of them is not valid.
    """
    whole_number(0)("staleness", staleness)
    whole_number(1)("quorum", quorum)
    check_choice("late", late, LATE)
    number("a number from 0 to 1", lambda value: 0 <= value <= 1)("gather", gather)
    return Rules(staleness, quorum, late, float(gather))


def check_deal(deal: object) -> None:
    """Raise ValueError for an unknown value of the option ``deal``."""
    check_choice("deal", deal, DEALS)


def check_mode(mode: object) -> None:
    """Raise ValueError if a method cannot be used with a parameter server.

    Args:
        mode: value of the option ``mode``.
    """
    if mode in MODES:
        return
    reasons = {
        "edad": "mode 'edad' recomputes deltas from the rows of all sites in one step, which are not there",
        "powersgd": "mode 'powersgd' sums over all sites twice in each step",
        "topk": "mode 'topk' is not built for it",
        "auto": "mode 'auto' chooses paths by the time of synchronous steps",
    }
    reason = reasons.get(str(mode), f"unknown mode {mode!r}")
    raise ValueError(f"{reason}; valid modes of a parameter server are {', '.join(map(repr, MODES))}")
