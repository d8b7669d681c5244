"""Options of Hogwild! inside of a trainer: the one definition of their names, types, defaults and help texts."""

from __future__ import annotations

from dataclasses import dataclass

from ..exchange import DEFAULT_TIMEOUT
from ..exchange.deadline import check_seconds
from ..signature import OptionSet, option
from .training import STATES, check_number


@dataclass(frozen=True)
class HogwildOptions(OptionSet):
    """Options of Hogwild!'s strategy and runner.

    Raises:
        ValueError: if a value is not valid; the message lists the valid ones.
    """

    state: str = option("shared", "shared: one state of the optimizer; own: each process has its own", choices=STATES)
    threads: int | None = option(
        None, "threads of each process; None: the cores are divided among the processes", check_number
    )
    timeout: float = option(
        DEFAULT_TIMEOUT, "seconds after which a process that sends no metrics counts as lost", check_seconds
    )
