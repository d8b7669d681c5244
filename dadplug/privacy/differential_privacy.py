"""The setting of differential privacy: how gradients are clipped and noised, and how a site samples its records."""

from __future__ import annotations

import math
from typing import Any

from ..signature import check_choice, number, whole_number

REDUCTIONS = ("mean", "sum")
_FIELDS = ("noise_multiplier", "max_grad_norm", "sample_rate", "expected_batch", "loss_reduction", "secure")


class DifferentialPrivacy:
    """Setting of differentially private training, the option ``privacy`` of `dadplug.GradientReduction`.

    Each sample's gradient is clipped to `max_grad_norm`, and Gaussian noise of standard deviation
    ``noise_multiplier * max_grad_norm`` is added to their sum at each site, before anything leaves it (DP-SGD,
    arXiv:1607.00133). Every site may have its own setting, except for `max_grad_norm`.

    Args:
        noise_multiplier: standard deviation of the noise over `max_grad_norm`; 0 clips only, and epsilon is infinite.
        max_grad_norm: largest norm of a sample's gradient over all parameters.
        sample_rate: probability with which each record is in a batch; `dadplug.PoissonLoader` draws such batches.
        expected_batch: expected number of samples in a step, ``sample_rate`` times the number of records: the divisor
            of this site's sum and its weight in the mean over sites, whatever a batch really holds. None is for
            settings that are only asked for their epsilon.
        loss_reduction: whether the loss is the ``"mean"`` or the ``"sum"`` over the samples of a batch.
        secure: whether the noise comes from the operating system's cryptographic generator, which is slower.

    Raises:
        ValueError: if a value is out of its range.

    Example:
        >>> privacy = DifferentialPrivacy(noise_multiplier=1.1, max_grad_norm=1.0, sample_rate=0.01, expected_batch=64)
        >>> privacy.epsilon(steps=1000, delta=1e-5)
    """

    def __init__(
        self,
        noise_multiplier: float,
        max_grad_norm: float,
        sample_rate: float,
        expected_batch: int | None = None,
        loss_reduction: str = "mean",
        secure: bool = False,
    ) -> None:
        number("a number of at least 0", lambda value: 0 <= value < math.inf)("noise_multiplier", noise_multiplier)
        number("a positive number", lambda value: 0 < value < math.inf)("max_grad_norm", max_grad_norm)
        number("a number above 0 and up to 1", lambda value: 0 < value <= 1)("sample_rate", sample_rate)
        whole_number(1, "or None", lambda value: value is None)("expected_batch", expected_batch)
        check_choice("loss_reduction", loss_reduction, REDUCTIONS)
        if not isinstance(secure, bool):
            raise ValueError(f"secure must be True or False, got {secure!r}")
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.sample_rate = sample_rate
        self.expected_batch = expected_batch
        self.loss_reduction = loss_reduction
        self.secure = secure

    @classmethod
    def for_epsilon(
        cls,
        epsilon: float,
        delta: float,
        sample_rate: float,
        steps: int,
        max_grad_norm: float = 1.0,
        expected_batch: int | None = None,
        loss_reduction: str = "mean",
        secure: bool = False,
    ) -> DifferentialPrivacy:
        """Return the setting with the least noise that keeps a number of steps below an epsilon.

        Args:
            epsilon: the bound, above 0.
            delta: probability with which the bound may fail, below 1; one over the number of records at most.
            sample_rate: probability with which each record is in a batch.
            steps: number of steps.
            max_grad_norm: as of the class.
            expected_batch: as of the class.
            loss_reduction: as of the class.
            secure: as of the class.

        Raises:
            ValueError: if a value is out of its range.
            ImportError: if opacus is not installed (extra ``privacy``).
        """
        from .accounting import check_delta, noise_for

        cls(1.0, max_grad_norm, sample_rate, expected_batch, loss_reduction, secure)  # before the search
        number("a positive number", lambda value: 0 < value < math.inf)("epsilon", epsilon)
        check_delta(delta)
        whole_number(1)("steps", steps)
        multiplier = noise_for(epsilon, delta, sample_rate, steps)
        return cls(multiplier, max_grad_norm, sample_rate, expected_batch, loss_reduction, secure)

    @classmethod
    def parse(cls, text: str) -> DifferentialPrivacy:
        """Read a setting from text such as ``noise_multiplier=1.1,max_grad_norm=1,sample_rate=0.01,expected_batch=64``.

        Args:
            text: names and values.

        Raises:
            ValueError: if a name is unknown or missing, or a value not valid.
        """
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            check_choice("part of privacy", name.strip(), _FIELDS)
            values[name.strip()] = _value(value.strip())
        missing = [name for name in _FIELDS[:3] if name not in values]
        if missing:
            raise ValueError(f"privacy needs {', '.join(missing)}, got {text!r}")
        return cls(**values)

    def epsilon(self, steps: int, delta: float) -> float:
        """Compute the epsilon of a number of steps, by Opacus's accountant (PRV, arXiv:2106.02848).

        Args:
            steps: number of steps.
            delta: probability with which the bound may fail.
        """
        from .accounting import epsilon_of

        return epsilon_of([(self.noise_multiplier, self.sample_rate, steps)], delta)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DifferentialPrivacy) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"DifferentialPrivacy({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def check_privacy(name: str, value: object) -> None:
    """Raise ValueError if a value is neither None nor a setting of differential privacy."""
    if value is not None and not isinstance(value, DifferentialPrivacy):
        raise ValueError(f"{name} must be a dadplug.DifferentialPrivacy or None, got {value!r}")
