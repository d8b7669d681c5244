"""The Gaussian mechanism of a site, and what it has spent: settings, Poisson sampling, and the ledger of steps.

The accountant is Opacus's, by privacy loss random variables (arXiv:2106.02848).
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import PrivacyError
from ..support.refusals import refuse
from ..support.signature import check_choice, number, whole_number

LOSS_REDUCTIONS = ("mean", "sum")
_LEAST_SHARED_NOISE = 0.1
LEAST_SITES = 3  # of a secure sum


@dataclass(frozen=True)
class DifferentialPrivacy:
    """Differential privacy of the records of a site: what each of its gradients is clipped to, and its noise.

    A step's gradient of a site is ``(sum of clipped gradients of its samples + noise) / expected_batch``. It is private
    for each record of the site, against the other sites, a hub and all who get the model.

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
        secure_sum: whether sites add up their gradients under masks, in mode dsgd and from three sites on. Each adds
            only its part of the noise; `noise_multiplier` and epsilon are those of the sum. Equal at all sites, as
            `noise_multiplier` and `max_grad_norm` are then.

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
    secure_sum: bool = False

    def __post_init__(self) -> None:
        number("a number of at least 0", lambda value: 0 <= value < math.inf)("noise_multiplier", self.noise_multiplier)
        number("a number above 0", lambda value: 0 < value < math.inf)("max_grad_norm", self.max_grad_norm)
        number("a number above 0 and up to 1", lambda value: 0 < value <= 1)("sample_rate", self.sample_rate)
        whole_number(1)("expected_batch", self.expected_batch)
        check_choice("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        refuse(
            (not isinstance(self.secure, bool), f"secure must be True or False, got {self.secure!r}"),
            (not isinstance(self.secure_sum, bool), f"secure_sum must be True or False, got {self.secure_sum!r}"),
            (
                self.secure_sum and 0 < self.noise_multiplier < _LEAST_SHARED_NOISE,
                f"secure_sum needs a noise_multiplier of at least {_LEAST_SHARED_NOISE}, got {self.noise_multiplier}: "
                "a site's part of less is lost in fixed-point numbers",
            ),
        )

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


class Spending(NamedTuple):
    """Some steps of a site.

    Attributes:
        noise_multiplier: standard deviation of the noise, in units of the largest norm of a sample's gradient.
        sample_rate: probability with which a record was in a batch.
        steps: number of steps.
        sites: number of sites that have added the noise together.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    sites: int = 1

    def left_by(self, insiders: int) -> tuple[float, float, int]:
        """Return noise, rate and steps as seen by some sites together, which know their own parts of the noise."""
        others = 1.0 if self.sites == 1 else max(0, self.sites - insiders) / self.sites
        return self.noise_multiplier * math.sqrt(others), self.sample_rate, self.steps


class Ledger:
    """Steps that a site has made with its records, and the epsilon that they cost.

    Attributes:
        entries: the steps, in order.
    """

    def __init__(self) -> None:
        self.entries: list[Spending] = []

    def spend(self, privacy: DifferentialPrivacy, steps: int = 1, sites: int = 1) -> None:
        """Count steps.

        Args:
            privacy: their settings.
            steps: their number.
            sites: number of sites that have added the noise together.
        """
        last = self.entries[-1] if self.entries else None
        key = privacy.noise_multiplier, privacy.sample_rate, sites
        if last is not None and (last.noise_multiplier, last.sample_rate, last.sites) == key:
            steps += self.entries.pop().steps
        self.entries.append(Spending(privacy.noise_multiplier, privacy.sample_rate, steps, sites))

    def epsilon(self, delta: float, insiders: int = 0) -> float:
        """Return the epsilon that all steps cost together; infinity where one had no noise.

        Args:
            delta: the delta; below one over the number of records.
            insiders: number of sites that put together what they know. With secure sums they know their own parts of
                the noise, so that the rest protects from them.

        Raises:
            ValueError: if a value is out of its range.
            ImportError: if Opacus is not installed.
        """
        check_delta(delta)
        whole_number(0)("insiders", insiders)
        if not self.entries:
            return 0.0
        history = [each.left_by(insiders) for each in self.entries]
        if any(noise == 0 for noise, *_ in history):
            return math.inf
        accountant = _opacus("").PRVAccountant()
        accountant.history = history
        return float(accountant.get_epsilon(delta=delta))

    def state_dict(self) -> dict[str, Any]:
        """Return the entries."""
        return {"entries": [list(each) for each in self.entries]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the entries of `state_dict`; raise ValueError if one has a number out of range."""
        entries = [
            Spending(float(noise), float(rate), int(steps), *map(int, sites))
            for noise, rate, steps, *sites in state["entries"]
        ]
        if not all(each.noise_multiplier >= 0 <= each.sample_rate <= 1 <= min(each[2:]) for each in entries):
            raise ValueError("the ledger of privacy has a number out of range")
        self.entries = entries


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


class PoissonSampler(Sampler[list[int]]):
    """Batches of row numbers in which each row is with a probability; some may be empty.

    Args:
        rows: number of rows.
        sample_rate: the probability.
        steps: number of batches.
        generator: draws them; None for one that the operating system seeds in each pass.
    """

    def __init__(self, rows: int, sample_rate: float, steps: int, generator: torch.Generator | None = None) -> None:
        self._rows, self._rate, self._steps, self._generator = rows, sample_rate, steps, generator

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        generator = self._generator
        if generator is None:
            generator = torch.Generator()
            generator.manual_seed(secrets.randbits(63))
        for _ in range(self._steps):
            yield torch.nonzero(torch.rand(self._rows, generator=generator) < self._rate)[:, 0].tolist()


class _Collate:
    """Collation of a batch; a batch without records holds no value of any record.

    Before the first batch, a record is collated alone and twice. A dimension that doubles counts records, and is zero
    in a batch without any. Its tensors are allocated in that shape, not cut from those of the record. Keys have to be
    names, and the same for another record.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Dataset[Any], empty: Any) -> None:
        self._collate, self._dataset, self._empty = collate, dataset, empty

    def __call__(self, records: list[Any]) -> Any:
        if self._empty is None:
            self._empty = self._without_records()
        return self._collate(records) if records else copy.deepcopy(self._empty)

    def _without_records(self) -> Any:
        try:
            record, other = self._dataset[0], self._dataset[len(cast("Sized", self._dataset)) - 1]
            drawn = [record], [record, record], [other]
            return _emptied(*(self._collate([copy.deepcopy(each) for each in records]) for records in drawn))
        except Exception as error:
            reason = error
        try:
            return _emptied(*[self._collate([])] * 3)
        except Exception as error:
            raise PrivacyError(
                "PoissonLoader cannot make the batch for a draw without records, which may hold no value of a record: "
                f"{reason}. Give it empty=, the batch without records, or a collate_fn that makes one of an empty list "
                f"(this one: {type(error).__name__}: {error})"
            ) from reason


_PLAIN = type("_Plain", (), {})  # whose objects hold nothing besides their attributes


def _emptied(one: Any, two: Any, other: Any, name: str = "batch") -> Any:
    """Return what a collation makes of no records.

    Args:
        one: what it has made of a record.
        two: what it has made of the same record twice.
        other: what it has made of another record.
        name: its name in messages.

    Raises:
        TypeError: if it is not known how many records a part of it belongs to.
    """
    kind: Any = type(one)
    if kind is type(two):
        if one is None:
            return None
        if isinstance(one, (torch.Tensor, np.ndarray)):
            grown = [dim for dim, (few, many) in enumerate(zip(one.shape, two.shape, strict=False)) if few != many]
            if 0 in one.shape or (len(grown) == 1 and two.shape[grown[0]] == 2 * one.shape[grown[0]]):
                shape = [0 if dim in grown else size for dim, size in enumerate(one.shape)]
                return one.new_empty(shape) if isinstance(one, torch.Tensor) else np.empty(shape, one.dtype)
        elif kind in (list, tuple) and len(two) == 2 * len(one):
            return kind()
        elif (kind in (list, tuple) or hasattr(kind, "_fields")) and len(two) == len(one):
            parts = [_emptied(*each, f"{name}[{n}]") for n, each in enumerate(zip(one, two, other, strict=True))]
            return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
        elif isinstance(one, dict) or all(
            getattr(kind, each) == getattr(_PLAIN, each)
            for each in ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")
        ):
            empty = copy.copy(one)
            for into, few, many, others in zip(*map(_tables, (empty, one, two, other)), strict=True):
                if few.keys() != others.keys() or not all(isinstance(key, str) for key in few):
                    raise TypeError(f"{name} ({kind.__name__}) has keys that may come from the records")
                for key, value in few.items():
                    into[key] = _emptied(value, many[key], others[key], f"{name}[{key!r}]")
            return empty
    raise TypeError(f"{name} ({kind.__name__}) has no dimension that counts the records")


def _tables(item: Any) -> list[dict[Any, Any]]:
    """Return the dictionaries in which an object holds its values."""
    return [each for each in (item, getattr(item, "__dict__", None)) if isinstance(each, dict)]


class PoissonLoader(DataLoader[Any]):
    """Loader of Poisson batches, which the accounting of privacy assumes.

    A pass has ``1 / sample_rate`` batches. A draw without records gives a batch of no rows: the step takes place, with
    noise alone. It is derived from how `collate_fn` collates one record and two: each tensor, array and list needs one
    dimension that doubles. Where that is not so, ``collate_fn([])`` is used if it holds nothing.

    Args:
        dataset: a dataset with a length.
        sample_rate: probability with which a record is in a batch.
        steps: batches of a pass; None for ``1 / sample_rate``, rounded.
        generator: draws the batches; None for one that the operating system seeds in each pass. A seed that others
            know makes the proof of privacy void.
        empty: the batch for a draw without records; None to derive it.
        options: further keywords of `torch.utils.data.DataLoader`.

    Raises:
        ValueError: if a value is out of its range, or a keyword decides what a batch is.
        PrivacyError: before the first batch, if one without records cannot be derived.

    Example:
        >>> loader = PoissonLoader(dataset, sample_rate=64 / len(dataset))
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sample_rate: float,
        *,
        steps: int | None = None,
        generator: torch.Generator | None = None,
        empty: Any = None,
        **options: Any,
    ) -> None:
        number("a number above 0 and up to 1", lambda value: 0 < value <= 1)("sample_rate", sample_rate)
        if steps is not None:
            whole_number(1)("steps", steps)
        if wrong := {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & set(options):
            raise ValueError(f"{sorted(wrong)[0]}= does not go with Poisson sampling, where batches vary in size")
        rows = len(cast("Sized", dataset))
        sampler = PoissonSampler(rows, sample_rate, steps or max(1, math.floor(1 / sample_rate + 0.5)), generator)
        collate = options.pop("collate_fn", None) or torch.utils.data.default_collate
        super().__init__(dataset, batch_sampler=sampler, collate_fn=_Collate(collate, dataset, empty), **options)
        self.sample_rate = sample_rate
