"""Options of local steps: the one definition of their names, types, defaults and help texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..exchange import DEFAULT_TIMEOUT
from ..exchange.deadline import check_seconds
from ..exchange.transport import Requirements
from ..options import WEIGHTINGS, WIRES, Options, check_mode, check_setting_names
from ..signature import OptionSet, number, option, whole_number

Schedule = Callable[[int], int]
"""Function of the number of steps so far that returns the number of steps until the next agreement."""


@dataclass(frozen=True)
class LocalOptions(OptionSet):
    """Options of `dadplug.LocalSGD`, its strategy and its runner.

    Raises:
        ValueError: if a value is out of its range; the message lists the valid ones.
    """

    every: int | Schedule = option(  # noqa: RUF009
        64, "steps between agreements, or a function of the steps so far", whole_number(1, "or a function", callable)
    )
    outer_lr: float = option(
        1.0,
        "share of the mean delta by which the agreed model moves",
        number("a positive number", lambda value: 0 < value < math.inf),
    )
    outer_momentum: float = option(
        0.0,
        "Nesterov momentum of the agreed model; 0: plain averaging",
        number("a number from 0 up to, but not, 1", lambda value: 0 <= value < 1),
    )
    wire: str = option(
        "fp32", "number format of deltas on the network; fp32 stands for the parameters' own", choices=WIRES
    )
    rank: int | None = option(
        None,
        "send the deltas of matrices as factors of this rank; None: whole",
        whole_number(1, "or None", lambda value: value is None),
    )
    overlap: bool = option(True, "send deltas while the next local steps run, and correct one round later")
    error_feedback: bool = option(True, "add what rounding and rank have left out to the next delta")
    weighting: str = option(
        "samples", "share of a site in the mean over sites: by its rows, or equal", choices=WEIGHTINGS
    )
    warm_up: int = option(0, "synchronous steps before the local ones", whole_number(0))
    warm_up_mode: str = option("dsgd", "method of agreement of the synchronous steps", check_mode)
    sync_batchnorm: bool = option(False, "normalise by the statistics of all sites' rows, in every step")
    check_finite: bool = option(True, "NaN or Inf in a synchronous gradient is an error; not under a GradScaler")
    fused: bool = option(False, "apply gradients of linear layers in local steps without forming them")
    may_differ: tuple[str, ...] = option(
        (), 'settings that may differ between sites, such as ("lr",)', check_setting_names
    )
    min_sites: int | None = option(
        None,
        "with a hub: training goes on while this many sites are there; None: all must stay",
        whole_number(1, "or None", lambda value: value is None),
        kind=int,
    )
    site_timeout: float = option(
        10.0,
        "with min_sites: seconds of silence after which a site counts as lost, and with late=skip is late",
        check_seconds,
    )
    late: str = option(
        "wait",
        "with min_sites: wait for late sites, or skip them, so that their steps count in a later agreement",
        choices=("wait", "skip"),
    )
    round_seconds: float | None = option(
        None,
        "with min_sites: seconds between agreements, in which each site takes as many steps as it can, in place of every",
        number("a positive number or None", lambda value: 0 < value < math.inf, optional=True),
    )
    timeout: float = option(DEFAULT_TIMEOUT, "seconds after which a silent site counts as lost", check_seconds)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_sites is None:
            given = {"late": self.late != "wait", "round_seconds": self.round_seconds is not None}
            for name in [name for name, differs in given.items() if differs]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} needs min_sites, the number of sites with which training goes on, "
                    "and a hub: LocalSGD(..., min_sites=1) after dadplug.connect(kit=...)"
                )
            return
        reasons = {
            f"warm_up={self.warm_up}": self.warm_up > 0,
            "sync_batchnorm=True": self.sync_batchnorm,
        }
        for refused in [what for what, holds in reasons.items() if holds]:
            raise ValueError(f"{refused} needs all sites in every step: leave min_sites out")

    @property
    def requirements(self) -> Requirements | None:
        """Requirements for the sites that are present; None where all of them have to stay."""
        return Requirements.of(self.min_sites, self.site_timeout, self.late, patience=0.0)

    def interval(self, step: int) -> int:
        """Return the number of steps from a step to the next agreement.

        Args:
            step: number of steps so far.

        Raises:
            ValueError: if the schedule returns something else than a whole number of at least 1.
        """
        steps = self.every if isinstance(self.every, int) else self.every(step)
        whole_number(1)(f"every({step})", steps)
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
