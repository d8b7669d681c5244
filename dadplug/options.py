"""The options of a gradient reduction: one place for names, defaults, checks and help texts."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .exchange import DEFAULT_TIMEOUT, Hierarchy
from .exchange.topology import check_hierarchy
from .exchange.wire import FORMATS
from .methods import method_names

WEIGHTINGS = ("samples", "uniform")
WIRES = tuple(FORMATS)
DENSES = ("allreduce", "lowrank")


def _option(
    default: Any, help_text: str, choices: tuple[str, ...] = (), kind: Callable[[str], Any] | None = None
) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices, "kind": kind})


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdigit() else text


@dataclass(frozen=True)
class Options:
    """Options of `GradientReduction`, the runners and the command line, by the same words.

    Raises:
        ValueError: if a value is out of its range; the message lists the valid ones.
    """

    mode: str = _option("rankdad", "method of agreement")
    rank: int = _option(8, "rankdad, powersgd: largest rank of a layer's compressed gradient")
    iterations: int = _option(1, "rankdad: power iterations a step")
    tolerance: float = _option(1e-3, "rankdad: singular values up to this share of the largest are not sent")
    warm_start: bool = _option(True, "rankdad: begin from the last step's basis")
    density: float = _option(0.01, "topk: share of a gradient's elements that is sent")
    error_feedback: bool | None = _option(
        None, "add what was not sent to the next step's gradient; None: powersgd and topk do, rankdad does not"
    )
    weighting: str = _option("samples", "share of a site in the mean over sites: by its rows, or equal", WEIGHTINGS)
    wire: str = _option("fp32", "number format on the network; fp32 stands for the parameters' own", WIRES)
    dense: str = _option("allreduce", "rankdad: what becomes of weights that have no factors", DENSES)
    share_inputs: bool = _option(True, "False: layers fed by raw data are all-reduced, so that it stays on its site")
    sync_batchnorm: bool = _option(False, "normalise by the statistics of all sites' rows")
    average_buffers: bool = _option(True, "average running statistics over sites before evaluation and checkpoints")
    check_finite: bool = _option(True, "NaN or Inf in a gradient is an error; switch off under a GradScaler")
    bucket_mb: float | None = _option(None, "payload of a bucket in MB; None: 0.03 for factors, else 0.06 to 4")
    hierarchy: Hierarchy = _option(  # noqa: RUF009
        None,
        "which processes share a machine: auto, a number on each, or lists of ranks; None: all links are alike",
        kind=_number_or_word,
    )
    timeout: float = _option(DEFAULT_TIMEOUT, "seconds after which a silent site counts as lost")

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, method_names())
        for option in dataclasses.fields(self):
            if choices := option.metadata["choices"]:
                _one_of(option.name, getattr(self, option.name), choices)
            if isinstance(option.default, bool) and not isinstance(getattr(self, option.name), bool):
                raise ValueError(f"{option.name} must be True or False, got {getattr(self, option.name)!r}")
        _at_least("rank", self.rank, 1, int)
        _at_least("iterations", self.iterations, 0, int)
        if not (isinstance(self.tolerance, (int, float)) and 0 <= self.tolerance < 1):
            raise ValueError(f"tolerance must be a number from 0 up to, but not, 1, got {self.tolerance!r}")
        if not (isinstance(self.density, (int, float)) and 0 < self.density <= 1):
            raise ValueError(f"density must be a number above 0 and up to 1, got {self.density!r}")
        if self.error_feedback not in (None, True, False):
            raise ValueError(f"error_feedback must be True, False or None, got {self.error_feedback!r}")
        if self.bucket_mb is not None and not (isinstance(self.bucket_mb, (int, float)) and self.bucket_mb > 0):
            raise ValueError(f"bucket_mb must be a positive number or None, got {self.bucket_mb!r}")
        check_hierarchy(self.hierarchy)
        if not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds, got {self.timeout!r}")

    @classmethod
    def create(cls, **values: Any) -> Options:
        """Build options from keyword arguments.

        Raises:
            ValueError: if a name is unknown, or a value out of its range; the message lists the valid ones.
        """
        names = cls.names()
        for name in values:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ValueError(f"unknown option {name!r}{hint}; valid options are {', '.join(names)}")
        return cls(**values)

    @classmethod
    def names(cls) -> list[str]:
        """List the names of all options."""
        return [option.name for option in dataclasses.fields(cls)]

    def bucket_bytes(self, default_mb: float) -> int:
        """Return at how many payload bytes a bucket is full."""
        return int((default_mb if self.bucket_mb is None else self.bucket_mb) * 1e6)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; valid ones are {', '.join(map(repr, choices))}")


def _at_least(name: str, value: Any, least: int, kind: type[int]) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
