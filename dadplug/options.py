"""Options of a gradient reduction: the one definition of their names, types, defaults, valid values and help texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from .exchange import DEFAULT_TIMEOUT, Hierarchy
from .exchange.rounds import Requirements
from .exchange.transport import check_hierarchy
from .exchange.wire import FORMATS
from .privacy.mechanism import LEAST_SITES, DifferentialPrivacy
from .step.methods import METHODS, method_names
from .step.methods.base import GradientPath
from .support.refusals import refuse
from .support.signature import (
    OptionSet,
    check_choice,
    check_hub_timeout,
    check_seconds,
    number,
    option,
    valid,
    whole_number,
)

WEIGHTINGS = ("uniform", "samples")
WIRES = tuple(FORMATS)
DENSES = ("allreduce", "lowrank")
MERGES = ("all", "owner", "auto")
PRIVATE_MODES = ("dsgd", "rankdad")
AUTO = "auto"
_RANK = 8  # with rank="auto"
# Numbers from which rankdad sends gradients in int8 with rank="auto", though not their factors: those of a table whose
# rows are sent, and of all gradients together that are summed.
_MANY: dict[str, float] = {GradientPath.FACTORS: 1 << 18, GradientPath.ALLREDUCE: 1 << 15}


_LOCAL = "local steps are not a mode of a reduction but dadplug.LocalSGD(model, optimizer)"
_NO_MODES = {  # what may be taken for a mode
    **dict.fromkeys(("localsgd", "local", "fedavg", "postlocalsgd"), _LOCAL),
    "diloco": f"{_LOCAL}, with outer_momentum=0.9 for DiLoCo",
    **dict.fromkeys(("ddp", "allreduce"), "'dsgd' averages whole gradients, as DistributedDataParallel does"),
    "parameterserver": "the parameter server is dadplug.ParameterServer(model, optimizer)",
    "hogwild": "processes of one machine share a model by dadplug.Hogwild",
    "adapm": "tables of embeddings are managed by dadplug.adapm",
}


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def check_mode(name: str, value: object) -> None:
    """Raise ValueError if a value is no method of agreement."""
    if hint := _NO_MODES.get(str(value).lower().replace("-", "").replace("_", "")):
        raise ValueError(f"unknown {name} {value!r}: {hint}; valid ones are {', '.join(map(repr, method_names()))}")
    check_choice(name, value, method_names())  # methods may be registered later than this module is imported


check_setting_names = valid(
    "a tuple of names, such as ('lr',)",
    lambda value: isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value),
)
"""Raises ValueError, for the name of an option and its value, if the value is no tuple of names."""

check_patterns = valid(
    "a pattern of names or a tuple of them, such as ('head.*', '*.norm*')",
    lambda value: all(isinstance(each, str) and each for each in as_patterns(value)),
)
"""Raises ValueError, for the name of an option and its value, if the value is no pattern and no tuple of patterns."""


def as_patterns(value: Any) -> tuple[Any, ...]:
    """Return the patterns of names in an option: one alone, or several."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@dataclass(frozen=True)
class Options(OptionSet):
    """Options of `GradientReduction`, the runners, the strategies and the command line.

    The strategies, runners and command lines derive their keywords and arguments from these fields. The metadata of a
    field are described at `dadplug.support.signature.option`.

    Raises:
        ValueError: if a value is out of its range; the message lists the valid ones.
    """

    mode: str = option("rankdad", "method of agreement", check_mode)
    rank: int | Literal["auto"] = option(
        AUTO,
        "rankdad, powersgd: largest rank of a layer's compressed gradient; auto: 8",
        whole_number(1, "or 'auto'", lambda value: value == AUTO),
        kind=_number_or_word,
    )
    budget: int | None = option(
        None,
        "rankdad with rank=auto: bytes of low-rank factors that a site sends in a step, which the rank follows from",
        whole_number(1, "or None", lambda value: value is None),
        kind=int,
    )
    iterations: int = option(1, "rankdad: power iterations a step", whole_number(0))
    tolerance: float = option(
        1e-3,
        "rankdad: singular values up to this share of the largest are not sent",
        number("a number from 0 up to, but not, 1", lambda value: 0 <= value < 1),
    )
    warm_start: bool = option(True, "rankdad: begin from the last step's basis")
    density: float = option(
        0.01,
        "topk: share of a gradient's elements that is sent",
        number("a number above 0 and up to 1", lambda value: 0 < value <= 1),
    )
    error_feedback: bool | None = option(
        None,
        "add what was not sent to the next step's gradient; None: powersgd and topk add all of it, rankdad too where "
        "forming the gradient costs little, else its strongest singular vectors",
        valid("True, False or None", lambda value: value in (None, True, False)),
    )
    memory_decay: float | None = option(
        None,
        "rankdad with error_feedback=True, as with privacy: factor in each step on the memory of what was not sent; "
        "None: 1",
        number("a number from 0 to 1 or None", lambda value: 0 <= value <= 1, optional=True),
        kind=float,
    )
    weighting: str = option(
        "uniform",
        "share of a site in the mean over sites: equal, as in DDP, or by its samples; with privacy, by those expected",
        choices=WEIGHTINGS,
    )
    wire: str = option(
        AUTO,
        "number format on the network; fp32 stands for the parameters' own; auto: int8 for the low-rank factors of "
        "rankdad with rank=auto, its rows of large tables, and with few sites its many sums; else fp32",
        choices=(*WIRES, AUTO),
    )
    dense: str = option("lowrank", "rankdad: treatment of weights that have no factors", choices=DENSES)
    merge: str = option(
        AUTO,
        "rankdad: who adds up the sites' factors: all sites, or the owner of each layer; auto: from three sites on an "
        "owner, where sites reach one another, unless all sites are predicted to be faster",
        choices=MERGES,
    )
    share_inputs: bool = option(True, "False: layers fed by raw data are all-reduced, so that it stays on its site")
    sync_batchnorm: bool = option(False, "normalise by the statistics of all sites' rows")
    average_buffers: bool = option(True, "average running statistics over sites before evaluation and checkpoints")
    check_finite: bool = option(True, "NaN or Inf in a gradient is an error; switch off under a GradScaler")
    bucket_mb: float | None = option(
        None,
        "payload of a bucket in MB; None: 0.03 for factors, else 0.1 to 4",
        number("a positive number or None", lambda value: value > 0, optional=True),
    )
    hierarchy: Hierarchy = option(  # noqa: RUF009
        None,
        "which processes share a node: auto, a number on each, or lists of ranks; None: all links are alike",
        check_hierarchy,
        kind=_number_or_word,
    )
    min_sites: int | None = option(
        None,
        "with a hub: training goes on while this many sites are there; None: all must stay",
        whole_number(1, "or None", lambda value: value is None),
        kind=int,
    )
    site_timeout: float = option(
        10.0,
        "with min_sites: seconds of silence after which a site counts as lost",
        check_seconds,
    )
    hub_timeout: float | None = option(
        None,
        "with a hub: seconds after which a hub that is away is given up; None: a day with min_sites, else 30 s",
        check_hub_timeout,
        kind=float,
    )
    late: str = option(
        "wait", "with min_sites: wait for late sites, or skip their part of a step", choices=("wait", "skip")
    )
    patience: float = option(
        3.0,
        "with late=skip: time after which a site is late, in median steps",
        number("a number above 1", lambda value: 1 < value < math.inf),
    )
    clip_sites: float | None = option(
        None,
        "clip each site's gradient to this multiple of the median of the sites' norms; None: not at all",
        number("a number of 1 or more, or None", lambda value: 1 <= value < math.inf, optional=True),
        kind=float,
    )
    private: str | tuple[str, ...] = option(
        (),
        "names of parameters and buffers that stay at their site, never sent or compared, as patterns such as head.*",
        check_patterns,
        kind=lambda text: tuple(text.split(",")),
    )
    compare_every: int = option(100, "steps between comparisons of the sites' weights; 0: never", whole_number(0))
    may_differ: tuple[str, ...] = option(
        (),
        "what may differ between sites: torch, numba, dadplug, kernels, or settings of optimizers such as lr or class; "
        "optimizer stands for all of these",
        check_setting_names,
        kind=lambda text: tuple(text.split(",")),
    )
    privacy: DifferentialPrivacy | None = option(  # noqa: RUF009
        None,
        "differential privacy of each site's records, for dsgd and rankdad; on command lines as "
        "noise_multiplier=1.1,sample_rate=0.01,expected_batch=64",
        valid("a DifferentialPrivacy or None", lambda value: value is None or isinstance(value, DifferentialPrivacy)),
        kind=DifferentialPrivacy.parse,
    )
    timeout: float = option(
        DEFAULT_TIMEOUT,
        "seconds after which a silent site counts as lost",
        check_seconds,
    )

    def __post_init__(self) -> None:
        if isinstance(self.privacy, dict):  # from a file of settings
            object.__setattr__(self, "privacy", DifferentialPrivacy(**self.privacy))
        super().__post_init__()
        object.__setattr__(self, "private", as_patterns(self.private))
        merges = self.merge == "owner"
        refuse(
            (
                merges and self.mode != "rankdad",
                f"merge={self.merge!r} is an option of mode='rankdad', got mode={self.mode!r}",
            ),
            (
                merges and self.hierarchy is not None,
                "merge='owner' does not work with hierarchy, which merges the gradients of a node",
            ),
        )
        if self.privacy is not None:
            self._follow_privacy()
        refuse(
            (
                self.memory_decay is not None and not (self.mode == "rankdad" and self.error_feedback),
                f"memory_decay={self.memory_decay} needs mode='rankdad' with error_feedback=True, or with privacy",
            ),
            (
                self.budget is not None and ((self.mode, self.rank) != ("rankdad", AUTO) or self.merge == "owner"),
                "budget= needs mode='rankdad' with rank='auto', and no merge='owner'",
            ),
            (
                self.clip_sites is not None and self.hierarchy is not None,
                "clip_sites= does not go with hierarchy=, which merges the gradients of a node: leave it out",
            ),
        )
        if self.min_sites is not None:
            self._check_min_sites()
        elif self.late != "wait":
            raise ValueError(
                f"late={self.late!r} needs min_sites, the number of sites with which a step counts, and a hub"
            )

    def unused(self) -> dict[str, str]:
        methods = {mode: METHODS[mode] for mode in method_names()}
        modes = {mode: method.traits.reads for mode, method in methods.items() if hasattr(method, "traits")}
        found = {}
        if (own := modes.get(self.mode)) is not None:
            for name in {name for reads in modes.values() for name in reads or ()}.difference(own):
                others = " or ".join(repr(mode) for mode, reads in modes.items() if name in (reads or ()))
                found[name] = f"mode={self.mode!r} does not read it. Leave it out, or take mode={others}"
        if self.min_sites is None:
            found["site_timeout"] = "it needs min_sites, the number of sites with which training goes on, and a hub"
        if self.late != "skip":
            found["patience"] = "it needs late='skip', which does not wait for late sites"
        return found

    @property
    def largest_rank(self) -> int:
        """Largest rank of a layer's compressed gradient."""
        return self.rank if isinstance(self.rank, int) else _RANK

    def wire_of(self, path: str, numbers: int = 0) -> str:
        """Return the name of the number format of gradients that take a path.

        Args:
            path: the path.
            numbers: of a table whose rows are sent, or of all gradients that are summed together; 0 if not known.
        """
        if self.wire != AUTO:
            return self.wire
        if (self.mode, self.rank) != ("rankdad", AUTO):
            return "fp32"
        return "int8" if path == GradientPath.LOWRANK or numbers >= _MANY.get(path, math.inf) else "fp32"

    @property
    def requirements(self) -> Requirements | None:
        """Requirements for the sites that are present; None where all of them have to stay."""
        return Requirements.of(self.min_sites, self.site_timeout, self.late, self.patience)

    def check_all_stay(self, trainer: str) -> None:
        """Raise ValueError if sites may leave, for a trainer that needs all of them.

        Args:
            trainer: name of the trainer, for the message.
        """
        if self.min_sites is not None:
            raise ValueError(
                f"{trainer} needs all sites until the end: leave min_sites out. Sites may leave and return in loops of "
                "your own, and with DADStrategy and DistributedRunner"
            )

    def _follow_privacy(self) -> None:
        """Refuse what would show more than private gradients, and compress these, which are formed."""
        refuse(
            (
                self.mode not in PRIVATE_MODES,
                f"privacy= goes with mode={' or '.join(map(repr, PRIVATE_MODES))}, got mode={self.mode!r}, which sends "
                "what has not been made private, or chooses by it",
            ),
            (self.private, "privacy= does not go with private=: it clips the gradients of whole samples"),
            (
                self.sync_batchnorm,
                "privacy= does not go with sync_batchnorm=True, which shares statistics of the samples",
            ),
        )
        if self.privacy is not None and self.privacy.secure_sum:
            self._follow_secure_sum()
        if self.mode == "rankdad":  # a frozen instance is changed before anything has read it
            object.__setattr__(self, "dense", "lowrank")
            if self.error_feedback is None:
                object.__setattr__(self, "error_feedback", True)

    def _follow_secure_sum(self) -> None:
        """Refuse what does not go with sums under masks."""
        if self.mode != "dsgd":
            raise ValueError(
                f"secure_sum=True goes with mode='dsgd', got mode={self.mode!r}: low-rank factors are not added up, so "
                "that masks would not cancel"
            )
        reasons = {
            f"clip_sites={self.clip_sites!r}": (self.clip_sites is not None, "the norm of a site's part is not shown"),
            f"wire={self.wire!r}": (self.wire not in (AUTO, "fp32"), "masked numbers have 32 bits"),
            f"hierarchy={self.hierarchy!r}": (self.hierarchy is not None, "each process masks for all others"),
            f"late={self.late!r}": (self.late != "wait", "each site that is left out restarts the step"),
            f"min_sites={self.min_sites!r}": (
                self.min_sites is not None and self.min_sites < LEAST_SITES,
                f"a step needs {LEAST_SITES} sites or more",
            ),
        }
        refuse(
            *(
                (holds, f"secure_sum=True does not go with {refused}: {reason}")
                for refused, (holds, reason) in reasons.items()
            )
        )

    def _check_min_sites(self) -> None:
        """Refuse what does not go on without a site."""
        traits = METHODS[self.mode].traits
        reasons = {
            f"mode={self.mode!r}": traits.recomputes_deltas or traits.shares_state,
            "sync_batchnorm=True": self.sync_batchnorm,
            f"hierarchy={self.hierarchy!r}": self.hierarchy is not None,
        }
        refuse(
            *((holds, f"{what} needs all sites in every step: leave min_sites out") for what, holds in reasons.items())
        )

    def bucket_bytes(self, default_mb: float) -> int:
        """Return the payload bytes at which a bucket is full.

        Args:
            default_mb: size in MB if the option ``bucket_mb`` is None.
        """
        return int((default_mb if self.bucket_mb is None else self.bucket_mb) * 1e6)
