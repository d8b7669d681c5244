"""Options of Hogwild! inside of a trainer: the one definition of their names, types, defaults and help texts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..exchange import DEFAULT_TIMEOUT
from ..exchange.deadline import check_seconds
from .training import STATES, check_choice, check_number


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class HogwildOptions:
    """Options of Hogwild!'s strategy and runner.

    Raises:
        ValueError: if a value is not valid; the message lists the valid ones.
    """

    state: str = _option("shared", "shared: one state of the optimizer; own: each process has its own")
    threads: int | None = _option(None, "threads of each process; None: the cores are divided among the processes")
    timeout: float = _option(DEFAULT_TIMEOUT, "seconds after which a process that sends no metrics counts as lost")

    def __post_init__(self) -> None:
        check_choice("state", self.state, STATES)
        check_number("threads", self.threads)
        check_seconds("timeout", self.timeout)

    @classmethod
    def create(cls, **values: Any) -> HogwildOptions:
        """Make options from keyword arguments.

        Raises:
            ValueError: if a name is unknown, or a value not valid; the message lists the valid ones.
        """
        names = [option.name for option in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(f"unknown option {name!r}; valid options are {', '.join(names)}")
        return cls(**values)
