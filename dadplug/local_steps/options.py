"""Options of local steps: the one definition of their names, types, defaults and help texts."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..exchange import DEFAULT_TIMEOUT
from ..exchange.deadline import check_seconds
from ..methods import method_names
from ..options import WEIGHTINGS, WIRES, Options

Schedule = Callable[[int], int]
"""Function of the number of steps so far that returns the number of steps until the next agreement."""


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class LocalOptions:
    """Options of `dadplug.LocalSGD`, its strategy and its runner.

    Raises:
        ValueError: if a value is out of its range; the message lists the valid ones.
    """

    every: int | Schedule = _option(64, "steps between agreements, or a function of the steps so far")  # noqa: RUF009
    outer_lr: float = _option(1.0, "share of the mean delta by which the agreed model moves")
    outer_momentum: float = _option(0.0, "Nesterov momentum of the agreed model; 0: plain averaging")
    wire: str = _option("fp32", "number format of deltas on the network; fp32 stands for the parameters' own")
    rank: int | None = _option(None, "send the deltas of matrices as factors of this rank; None: whole")
    overlap: bool = _option(True, "send deltas while the next local steps run, and correct one round later")
    error_feedback: bool = _option(True, "add what rounding and rank have left out to the next delta")
    weighting: str = _option("samples", "share of a site in the mean over sites: by its rows, or equal")
    warm_up: int = _option(0, "synchronous steps before the local ones")
    warm_up_mode: str = _option("dsgd", "method of agreement of the synchronous steps")
    sync_batchnorm: bool = _option(False, "normalise by the statistics of all sites' rows, in every step")
    check_finite: bool = _option(True, "NaN or Inf in a synchronous gradient is an error; not under a GradScaler")
    fused: bool = _option(False, "apply gradients of linear layers in local steps without forming them")
    may_differ: tuple[str, ...] = _option((), 'settings that may differ between sites, such as ("lr",)')
    timeout: float = _option(DEFAULT_TIMEOUT, "seconds after which a silent site counts as lost")

    def __post_init__(self) -> None:
        _whole_number("every", self.every, 1, "or a function", callable(self.every))
        _whole_number("rank", self.rank, 1, "or None", self.rank is None)
        _whole_number("warm_up", self.warm_up, 0)
        _number("outer_lr", self.outer_lr, "a positive number", lambda value: 0 < value < math.inf)
        _number(
            "outer_momentum", self.outer_momentum, "a number from 0 up to, but not, 1", lambda value: 0 <= value < 1
        )
        check_seconds("timeout", self.timeout)
        _choice("wire", self.wire, WIRES)
        _choice("weighting", self.weighting, WEIGHTINGS)
        _choice("warm_up_mode", self.warm_up_mode, method_names())
        for name in ("overlap", "error_feedback", "sync_batchnorm", "check_finite", "fused"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @classmethod
    def create(cls, **values: Any) -> LocalOptions:
        """Make options from keyword arguments.

        Raises:
            ValueError: if a name is unknown, or a value out of its range; the message lists the valid ones.
        """
        names = [option.name for option in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ValueError(f"unknown option {name!r}{hint}; valid options are {', '.join(names)}")
        return cls(**values)

    def interval(self, step: int) -> int:
        """Return the number of steps from a step to the next agreement.

        Args:
            step: number of steps so far.

        Raises:
            ValueError: if the schedule returns something else than a whole number of at least 1.
        """
        steps = self.every if isinstance(self.every, int) else self.every(step)
        _whole_number(f"every({step})", steps, 1)
        return steps

    def of_reduction(self) -> Options:
        """Return the options that a `GradientReduction` has in the synchronous steps."""
        return Options(
            mode=self.warm_up_mode,
            rank=self.rank or Options.rank,
            wire=self.wire,
            weighting=self.weighting,
            sync_batchnorm=self.sync_batchnorm,
            check_finite=self.check_finite,
            may_differ=self.may_differ,
            timeout=self.timeout,
        )


def _whole_number(name: str, value: object, least: int, otherwise: str = "", is_valid: bool = False) -> None:
    if not is_valid and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(
            f"{name} must be a whole number of at least {least}{otherwise and ' ' + otherwise}, got {value!r}"
        )


def _number(name: str, value: object, description: str, is_valid: Callable[[float], bool]) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not is_valid(value):
        raise ValueError(f"{name} must be {description}, got {value!r}")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; valid ones are {', '.join(map(repr, choices))}")
