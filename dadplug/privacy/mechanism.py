"""The Gaussian mechanism of a site, and what it has spent: settings and the ledger of steps.

The accountant is Opacus's, by privacy loss random variables (arXiv:2106.02848).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..signature import check_choice, number, whole_number

LOSS_REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class DifferentialPrivacy:
    """Differential privacy of the records of a site: what each of its gradients is clipped to, and its noise.

    A step's gradient of a site is ``(sum of clipped gradients of its samples + noise) / expected_batch``. It is private
    for each record of the site, against the other sites, a hub and whoever gets the model.

    Attributes:
        noise_multiplier: standard deviation of the noise, in units of `max_grad_norm`; 0 for clipping alone, which is
            not private.
        max_grad_norm: norm that the gradient of a sample is clipped to, over all parameters together.
        sample_rate: probability with which a record is in a batch, as of `PoissonLoader`.
        expected_batch: expected number of samples of a site's step, the divisor: the number of records times
            `sample_rate`. The number that a batch has in fact stays private.
        loss_reduction: how the loss of a batch is made of those of its samples: "mean" or "sum".
        secure: whether noise is drawn so that its low bits betray nothing, see `add_noise`; about a microsecond
            a parameter.

    Raises:
        ValueError: if a value is out of its range.

    Example:
        >>> privacy = DifferentialPrivacy(noise_multiplier=1.1, sample_rate=0.01, expected_batch=64)
        >>> reduction = GradientReduction(model, mode="rankdad", rank=8, privacy=privacy)
    """

    noise_multiplier: float = 1.0
    max_grad_norm: float = 1.0
    sample_rate: float = 0.01
    expected_batch: int = 64
    loss_reduction: str = "mean"
    secure: bool = False

    def __post_init__(self) -> None:
        number("a number of at least 0", lambda value: 0 <= value < math.inf)("noise_multiplier", self.noise_multiplier)
        number("a number above 0", lambda value: 0 < value < math.inf)("max_grad_norm", self.max_grad_norm)
        number("a number above 0 and up to 1", lambda value: 0 < value <= 1)("sample_rate", self.sample_rate)
        whole_number(1)("expected_batch", self.expected_batch)
        check_choice("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        if not isinstance(self.secure, bool):
            raise ValueError(f"secure must be True or False, got {self.secure!r}")

    @classmethod
    def for_epsilon(
        cls, epsilon: float, delta: float, sample_rate: float, steps: int, **settings: Any
    ) -> DifferentialPrivacy:
        """Return the settings with the least noise for which a number of steps costs at most an epsilon.

        Args:
            epsilon: the epsilon.
            delta: the delta.
            sample_rate: as `sample_rate`.
            steps: number of steps.
            settings: the other attributes.

        Raises:
            ValueError: if a value is out of its range.
            ImportError: if Opacus is not installed.
        """
        number("a number above 0", lambda value: 0 < value < math.inf)("epsilon", epsilon)
        check_delta(delta)
        whole_number(1)("steps", steps)
        made = cls(sample_rate=sample_rate, **settings)
        search = _opacus("utils").get_noise_multiplier
        noise = search(
            target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps, accountant="prv"
        )
        return cls(**vars(made) | {"noise_multiplier": float(noise)})

    @classmethod
    def parse(cls, text: str) -> DifferentialPrivacy:
        """Return the settings that a command line names, such as ``noise_multiplier=1.1,sample_rate=0.01``.

        Args:
            text: names and values.

        Raises:
            ValueError: if a name is unknown, or a value out of its range.
        """
        kinds = {name: type(value) for name, value in vars(cls()).items()}
        given: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in kinds:
                raise ValueError(f"unknown setting {name!r} of privacy; valid ones are {', '.join(kinds)}")
            given[name] = value == "True" if kinds[name] is bool else kinds[name](value)
        return cls(**given)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise in each element of a sum of gradients."""
        return self.noise_multiplier * self.max_grad_norm


class Ledger:
    """Steps that a site has made with its records, and the epsilon that they cost.

    Attributes:
        entries: noise multiplier, sample rate and number of steps, in order.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[float, float, int]] = []

    def spend(self, privacy: DifferentialPrivacy, steps: int = 1) -> None:
        """Count steps.

        Args:
            privacy: their settings.
            steps: their number.
        """
        key = privacy.noise_multiplier, privacy.sample_rate
        if self.entries and self.entries[-1][:2] == key:
            steps += self.entries.pop()[2]
        self.entries.append((*key, steps))

    def epsilon(self, delta: float) -> float:
        """Return the epsilon that all steps cost together; infinity where one had no noise.

        Args:
            delta: the delta; below one over the number of records.

        Raises:
            ValueError: if it is not between 0 and 1.
            ImportError: if Opacus is not installed.
        """
        check_delta(delta)
        if not self.entries:
            return 0.0
        if any(noise == 0 for noise, *_ in self.entries):
            return math.inf
        accountant = _opacus("").PRVAccountant()
        accountant.history = list(self.entries)
        return float(accountant.get_epsilon(delta=delta))

    def state_dict(self) -> dict[str, Any]:
        """Return the entries."""
        return {"entries": [list(each) for each in self.entries]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the entries of `state_dict`."""
        self.entries = [(float(noise), float(rate), int(steps)) for noise, rate, steps in state["entries"]]


def check_delta(delta: float) -> None:
    """Raise ValueError if a value is no delta."""
    number("a number above 0 and below 1", lambda value: 0 < value < 1)("delta", delta)


def _opacus(module: str) -> Any:
    import importlib
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("opacus.accountants" + (f".{module}" if module else ""))
    except ImportError as error:
        raise ImportError("the accounting of epsilon needs Opacus: pip install 'dadplug[privacy]'") from error
