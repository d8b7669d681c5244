"""Options of the parameter server: the one definition of their names, types, defaults and help texts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from ..options import Options
from ..signature import OptionSet, check_choice, option
from .dealing import DEALS
from .sequencer import Rules, make_rules

_REDUCTION = {option.name: option for option in dataclasses.fields(Options)}
MODES = ("dsgd", "dad", "rankdad")
_OWN = ("staleness", "quorum", "gather", "late", "deal")  # not those of a reduction


def _as_in_reductions(name: str) -> Any:
    """Define an option that a gradient reduction has, too."""
    return option(_REDUCTION[name].default, _REDUCTION[name].metadata["help"])


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


@dataclass(frozen=True)
class ServerOptions(OptionSet):
    """Options of `dadplug.ParameterServer`, its strategy and its runner.

    Raises:
        ValueError: if a value is not valid; the message lists the valid ones.
    """

    mode: str = option("rankdad", "how gradients are encoded: dsgd, dad or rankdad")
    staleness: int = option(8, "largest number of versions by which a gradient may be late; 0: synchronous steps")
    quorum: int = option(1, "number of sites whose gradients make a commit; 1 for asynchronous steps")
    gather: float = option(
        0.75,
        "largest part of a site's step for which its gradient waits for those of other sites that are expected, to be "
        "committed together; 0: not at all",
    )
    late: str = option(
        "scale",
        "treatment of a gradient that is t > 0 versions late: scale (learning rate times 1 / (1 + t)), keep, or drop "
        "(above the staleness; then no site waits)",
    )
    deal: str = option(
        "own",
        "data of loaders that server.loader() returns: own (of each site; a fast site makes further passes), or shared "
        "(one data set, whose batches are handed out on demand)",
    )
    site_timeout: float = option(30.0, "seconds of silence after which a site counts as lost; the others go on")
    rank: int | Literal["auto"] = _as_in_reductions("rank")
    iterations: int = _as_in_reductions("iterations")
    tolerance: float = _as_in_reductions("tolerance")
    warm_start: bool = _as_in_reductions("warm_start")
    error_feedback: bool | None = _as_in_reductions("error_feedback")
    weighting: str = _as_in_reductions("weighting")
    wire: str = _as_in_reductions("wire")
    may_differ: tuple[str, ...] = _as_in_reductions("may_differ")
    dense: str = _as_in_reductions("dense")
    share_inputs: bool = _as_in_reductions("share_inputs")
    sync_batchnorm: bool = option(
        False,
        "normalise by the statistics of all sites' rows: of other sites, those that they have committed last; with a "
        "quorum of all sites where these are not equally fast",
    )
    average_buffers: bool = _as_in_reductions("average_buffers")
    timeout: float = _as_in_reductions("timeout")
    hub_timeout: float | None = _as_in_reductions("hub_timeout")

    def __post_init__(self) -> None:
        check_mode(self.mode)
        make_rules(self.staleness, self.quorum, self.late, self.gather)
        check_choice("deal", self.deal, DEALS)
        self.of_reduction()

    @property
    def rules(self) -> Rules:
        """Rules of the sequencer."""
        return make_rules(self.staleness, self.quorum, self.late, self.gather)

    def of_reduction(self) -> Options:
        """Return those options that a gradient reduction has, too."""
        return Options(**{name: value for name, value in vars(self).items() if name not in _OWN})

    @classmethod
    def unknown(cls, name: str) -> ValueError:
        """Return the error for an unknown option, or for one that only a gradient reduction has."""
        if name in _REDUCTION:
            return ValueError(f"a ParameterServer has no option {name!r}; valid options are {', '.join(cls.names())}")
        return super().unknown(name)
