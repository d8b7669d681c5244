"""Options of local steps: the one definition of their names, types, defaults and help texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..exchange import DEFAULT_TIMEOUT
from ..exchange.rounds import Requirements
from ..options import WEIGHTINGS, WIRES, Options, as_patterns, check_mode, check_patterns, check_setting_names
from ..support.refusals import refuse
from ..support.signature import OptionSet, check_hub_timeout, check_seconds, number, option, whole_number

Schedule = Callable[[int], int]
"""Function of the number of steps so far that returns the number of steps until the next agreement."""

DensitySchedule = Callable[[int], float]
"""Function of the number of agreements so far that returns the share of a delta's entries that the next one sends."""

SPARSE_WIRE = "int2"
"""Value of the option ``wire`` for deltas whose largest entries are sent in 2 bits."""

DEFAULT_DECAY = 0.95
"""Factor on the memory of sparse deltas in each round."""


def _check_density(name: str, value: Any) -> None:
    """Raise ValueError if a value is no density."""
    if not callable(value):
        _DENSITY(name, value)


_DENSITY = number("a number above 0 and up to 1, a function or None", lambda value: 0 < value <= 1, optional=True)


@dataclass(frozen=True)
class LocalOptions(OptionSet):
    """Options of `dadplug.LocalSGD`, its strategy and its runner.

    Raises:
        ValueError: if a value is out of its range; the message lists the valid ones.
    """

    every: int | Schedule = option(  # noqa: RUF009
        64, "steps between agreements, or a function of the steps so far", whole_number(1, "or a function", callable)
    )
    outer_lr: float | None = option(
        None,
        "share of the mean delta by which the agreed model moves; None: 1, and with density from 1 to 2.5, by how far "
        "the sites agree on the signs of the entries that they send in a round",
        number("a positive number or None", lambda value: 0 < value < math.inf, optional=True),
        kind=float,
    )
    outer_momentum: float = option(
        0.0,
        "Nesterov momentum of the agreed model; 0: plain averaging",
        number("a number from 0 up to, but not, 1", lambda value: 0 <= value < 1),
    )
    wire: str = option(
        "fp32",
        "number format of deltas on the network; fp32 stands for the parameters' own, int2 is that of sparse deltas",
        choices=(*WIRES, SPARSE_WIRE),
    )
    rank: int | None = option(
        None,
        "send the deltas of matrices as factors of this rank; None: whole",
        whole_number(1, "or None", lambda value: value is None),
    )
    density: float | DensitySchedule | None = option(  # noqa: RUF009
        None,
        "with wire=int2: share of the entries of a delta that is sent, the largest of each block, or a function of the "
        "number of agreements so far; None: all entries",
        _check_density,
        kind=float,
    )
    memory_decay: float | None = option(
        None,
        "with density: factor in each round on the memory of what was not sent; None: 0.95",
        number("a number from 0 to 1 or None", lambda value: 0 <= value <= 1, optional=True),
        kind=float,
    )
    overlap: bool = option(True, "send deltas while the next local steps run, and correct one round later")
    delay: int | None = option(
        None,
        "with overlap: steps after which a round is applied; None: at the next agreement, with density as soon as it "
        "has arrived, about",
        whole_number(1, "or None", lambda value: value is None),
        kind=int,
    )
    fragments: int = option(
        1,
        "with overlap: parts of the model that are sent one after the other in a round; 1: all of it at once",
        whole_number(1),
    )
    error_feedback: bool = option(True, "add what rounding and rank have left out to the next delta")
    weighting: str = option(
        "uniform", "share of a site in the mean over sites: equal, or by its samples", choices=WEIGHTINGS
    )
    warm_up: int = option(0, "synchronous steps before the local ones", whole_number(0))
    warm_up_mode: str = option("dsgd", "method of agreement of the synchronous steps", check_mode)
    sync_batchnorm: bool = option(False, "normalise by the statistics of all sites' rows, in every step")
    check_finite: bool = option(True, "NaN or Inf in a synchronous gradient is an error; not under a GradScaler")
    private: str | tuple[str, ...] = option(
        (),
        "names of parameters and buffers that stay at their site, never sent or compared, as patterns such as head.*",
        check_patterns,
    )
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
    hub_timeout: float | None = option(
        None,
        "with a hub: seconds after which a hub that is away is given up; None: a day with min_sites, else 30 s",
        check_hub_timeout,
        kind=float,
    )
    late: str = option(
        "wait",
        "with min_sites: wait for late sites, or skip them, so that their steps count in a later agreement",
        choices=("wait", "skip"),
    )
    round_seconds: float | None = option(
        None,
        "with min_sites: seconds between agreements, in place of every; each site takes as many steps as it can",
        number("a positive number or None", lambda value: 0 < value < math.inf, optional=True),
    )
    timeout: float = option(DEFAULT_TIMEOUT, "seconds after which a silent site counts as lost", check_seconds)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "private", as_patterns(self.private))
        refuse(
            (
                self.delay is not None and not self.overlap,
                f"delay={self.delay} is for deltas that travel while steps go on: leave overlap=False out",
            ),
            (
                self.fragments > 1 and not self.overlap,
                f"fragments={self.fragments} are sent while steps go on: leave overlap=False out, or fragments",
            ),
        )
        self._check_density()
        self._check_min_sites()

    def _check_min_sites(self) -> None:
        """Refuse what needs sites that leave and return, and what does not go on without a site."""
        if self.min_sites is None:
            given = {"late": self.late != "wait", "round_seconds": self.round_seconds is not None}
            for name in [name for name, differs in given.items() if differs]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} needs min_sites, the number of sites with which training goes on, "
                    "and a hub: LocalSGD(..., min_sites=1) after dadplug.connect(kit=...)"
                )
            return
        if self.delay is not None and self.round_seconds is not None:
            raise ValueError(
                f"delay={self.delay} counts steps, and rounds of round_seconds={self.round_seconds:g} have no fixed "
                "number of them: leave delay out, or set every in place of round_seconds"
            )
        needs_all = "needs all sites in every step: leave min_sites out"
        refuse(
            (self.warm_up > 0, f"warm_up={self.warm_up} {needs_all}"),
            (self.sync_batchnorm, f"sync_batchnorm=True {needs_all}"),
        )

    def _check_density(self) -> None:
        """Refuse what does not go with sparse deltas, or only with them."""
        if self.density is None:
            refuse(
                (
                    self.wire == SPARSE_WIRE,
                    "wire='int2' is the format of sparse deltas: add density=0.02, or take wire='int8' for whole "
                    "deltas",
                ),
                (
                    self.memory_decay is not None,
                    "memory_decay is the decay of the memory of sparse deltas: add density=0.02",
                ),
            )
            return
        refuse(
            (
                self.wire != SPARSE_WIRE,
                f"density sends the largest entries in 2 bits, got wire={self.wire!r}: add wire='int2'",
            ),
            (
                self.rank is not None,
                f"density and rank={self.rank} are two ways to send less of a delta: leave one of them out",
            ),
            (
                self.outer_momentum,
                f"outer_momentum={self.outer_momentum} with density is unstable, since the memory of what was not sent "
                "is a momentum, too: leave outer_momentum out, and set memory_decay in its place",
            ),
        )

    def unused(self) -> dict[str, str]:
        found = {} if self.warm_up else {"warm_up_mode": "it needs warm_up, the number of synchronous steps"}
        if self.min_sites is None:
            found["site_timeout"] = "it needs min_sites, the number of sites with which training goes on, and a hub"
        return found

    @property
    def requirements(self) -> Requirements | None:
        """Requirements for the sites that are present; None where all of them have to stay."""
        return Requirements.of(self.min_sites, self.site_timeout, self.late, patience=0.0)

    def density_at(self, number: int) -> float:
        """Return the share of the entries of a delta that is sent in a round.

        Args:
            number: number of agreements so far.

        Raises:
            ValueError: if the schedule returns something else than a number above 0 and up to 1.
        """
        density = self.density(number) if callable(self.density) else self.density
        if not isinstance(density, (int, float)) or isinstance(density, bool) or not 0 < density <= 1:
            raise ValueError(f"density({number}) must be a number above 0 and up to 1, got {density!r}")
        return float(density)

    def interval(self, step: int) -> int:
        """Return the number of steps from a step to the next agreement.

        Args:
            step: number of steps so far.

        Raises:
            ValueError: if the schedule returns something else than a whole number of at least 1.
        """
        steps = self.every if isinstance(self.every, int) else self.every(step)
        whole_number(1)(f"every({step})", steps)
        if steps < self.fragments:
            raise ValueError(
                f"a round of {steps} steps cannot be divided into fragments={self.fragments}, of which each is sent "
                "after a step of its own: set fragments to the number of steps at most"
            )
        return steps

    def part_of_interval(self, step: int, number: int) -> int:
        """Return the number of steps from a step to the next agreement, which may be one on a fragment.

        Args:
            step: number of steps so far.
            number: number of agreements so far.

        Raises:
            ValueError: as `interval`.
        """
        steps, place = self.interval(step), number % self.fragments
        return steps * (place + 1) // self.fragments - steps * place // self.fragments

    def of_reduction(self) -> Options:
        """Return the options that a `GradientReduction` has in the synchronous steps."""
        return Options(
            mode=self.warm_up_mode,
            rank=self.rank or Options.rank,
            wire="bf16" if self.wire == SPARSE_WIRE else self.wire,
            weighting=self.weighting,
            sync_batchnorm=self.sync_batchnorm,
            private=self.private,
            check_finite=self.check_finite,
            min_sites=self.min_sites,
            site_timeout=self.site_timeout,
            hub_timeout=self.hub_timeout,
            may_differ=self.may_differ,
            timeout=self.timeout,
        )


LOCAL_MODE = "localsgd"
"""Mode by which libraries that take a method of agreement by its name are asked for local steps."""


def options_of(mode: str, **values: Any) -> Options | LocalOptions:
    """Return the options of a mode: those of local steps, or those of a reduction.

    Raises:
        ValueError: if a value is not valid; the message lists the valid ones.
    """
    return LocalOptions.create(**values) if mode == LOCAL_MODE else Options.create(mode=mode, **values)


def options_class(mode: str) -> type[Options] | type[LocalOptions]:
    """Return the class of the options of a mode."""
    return LocalOptions if mode == LOCAL_MODE else Options
