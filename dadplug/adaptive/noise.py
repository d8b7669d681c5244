"""Noise of the gradient, estimated while training, the same at all sites to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..exchange import Transport
from ..methods.loss_scale import LossScales
from ..model_sync.samples import SampleCounter
from ..reducer.step_header import StepHeader
from ..units.base import Unit
from .noise_formulas import NO_ESTIMATE, NoiseEstimate, gain
from .noise_probe import Gradients, NoiseProbe, SiteNorms, gradients_of
from .noise_sums import Pair, effective_samples, estimate_pair, estimate_step, pair_norms

_EVERY = 32  # a measured step may take up to twice as long as others
_MEMORY = 300.0  # steps over which estimates are averaged, about


class GradientNoise:
    """Noise of the gradient of the mean loss; an attribute of `dadplug.GradientReduction`.

    With the gradients of single samples of expectation G and covariance Sigma, a batch of B samples has a gradient of
    expectation G and covariance Sigma / B. The estimates are averages over about the last 300 steps, are made every
    `every` steps, and are the same at all sites.

    Reading ``reduction.noise`` at one site or more turns the estimates on at all of them, for the steps to come.

    Args:
        by_samples: whether step headers have the sites' samples, so that `batch` follows them in every step.

    Attributes:
        base_batch: samples of all sites in a step for which the learning rate has been chosen, which `gain` refers to;
            None before it is set. Set it to the same number at all sites.
        batch: samples of all sites in the last step, or with ``weighting="uniform"`` in that of the last estimate; 0
            before the first.

    Example:
        >>> noise = reduction.noise
        >>> for inputs, targets in loader:
        ...     train(inputs, targets)
        >>> noise.scale, noise.layers["fc1.weight"].variance
    """

    def __init__(self, by_samples: bool) -> None:
        self._by_samples = by_samples
        self.base_batch: int | None = None
        self.batch = 0
        self._every: int | None = None  # that this site asks for
        self._agreed_every = 0
        self._next = -1  # step of the next estimate
        self._averages: dict[str, _Average] = {}
        self._total = NO_ESTIMATE
        self._seen: set[str] = set()  # parameters that have had a gradient in the last estimate
        self._probe: NoiseProbe | None = None
        self._pair: Pair | None = None

    # Results

    @property
    def variance(self) -> float:
        """Trace of the covariance of the gradients of single samples, tr(Sigma); NaN before the first estimate."""
        return self._total.variance

    @property
    def squared_norm(self) -> float:
        """Squared norm of the gradient's expectation, ``|G|^2``; NaN before the first estimate.

        The estimate has no bias, so it may be negative where the noise is much larger than the gradient.
        """
        return self._total.squared_norm

    @property
    def scale(self) -> float:
        """The simple noise scale ``tr(Sigma) / |G|^2``, in samples; NaN before the first estimate.

        A batch of this many samples has a gradient whose noise is as large as the gradient. Infinite where
        `squared_norm` is not positive.
        """
        return self._total.scale

    @property
    def layers(self) -> dict[str, NoiseEstimate]:
        """Variance, squared norm and scale by name of the parameter."""
        return {name: average.value for name, average in sorted(self._averages.items())}

    @property
    def every(self) -> int:
        """Number of steps from one estimate to the next; 32 by default. Of several sites' numbers the smallest counts.

        Raises:
            ValueError: if it is set to something else than a whole number of at least 1.
        """
        return self._agreed_every or self._every or _EVERY

    @every.setter
    def every(self, steps: int) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"noise.every must be a whole number of at least 1, got {steps!r}")
        self._every = steps

    def gain(self, batch: int | None = None, base_batch: int | None = None) -> float:
        """Compute AdaScale's gain: the steps with the base batch that one step with a batch is worth.

        Args:
            batch: samples of all sites in a step; those of the last step where None.
            base_batch: samples of a step for which the learning rate has been chosen; `base_batch` of this object
                where None.

        Returns:
            A number between 1 and ``batch / base_batch``; 1.0 without a base batch or an estimate.
        """
        batch, base_batch = batch or self.batch, base_batch or self.base_batch
        return gain(self._total, batch, base_batch) if batch and base_batch else 1.0

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, the time of the next estimate, and what this site has asked for."""
        return {
            "base_batch": self.base_batch,
            "batch": self.batch,
            "asked": self._every,
            "every": self._agreed_every,
            "next": self._next,
            "averages": {name: list(average) for name, average in self._averages.items()},
            "seen": sorted(self._seen),
            "pair": None if self._pair is None else (sorted(self._pair.gradients), self._pair.samples),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: the state.
        """
        self.base_batch, self.batch = state["base_batch"], state["batch"]
        self._every, self._agreed_every, self._next = state["asked"], state["every"], state["next"]
        self._averages = {name: _Average(*values) for name, values in state["averages"].items()}
        self._seen = set(state["seen"])
        names, samples = state["pair"] or ([], 0.0)
        self._pair = Pair(dict.fromkeys(names), samples) if names else None
        self._sum_up()

    # A step, called by the reduction

    def turn_on(self) -> None:
        """Ask all sites for estimates from the next step on."""
        self._every = self._every or _EVERY

    @property
    def wish(self) -> int:
        """Number of steps after which this site asks for estimates; 0 where it does not ask."""
        return self._every or 0

    def prepare(self, model: nn.Module, units: Sequence[Unit], counter: SampleCounter, step: int) -> None:
        """Install the probe if the gradients of a step that begins are to be measured.

        Args:
            model: the model.
            units: the units of the present plan.
            counter: counts the samples of the step.
            step: number of the step.
        """
        if step == self._next and self._probe is None:
            self._probe = NoiseProbe(model, units, counter, step)

    def discard(self) -> None:
        """Forget the backward passes of the step so far, whose gradients have been cleared."""
        if self._probe is not None:
            self._probe.discard()

    def end_probe(self) -> None:
        """Remove the probe, at the end of a step or when the plan changes."""
        if self._probe is not None:
            self._probe.detach()
            self._probe = None

    def measure(
        self,
        step: int,
        headers: Sequence[StepHeader],
        samples: int,
        units: Sequence[Unit],
        transport: Transport,
        scales: LossScales,
    ) -> None:
        """Update the estimates at the end of a step, where it is time to; all sites must call it.

        Args:
            step: number of the step.
            headers: the headers of all sites.
            samples: samples of this site.
            units: the units of the plan, with agreed gradients in ``.grad``.
            transport: the transport.
            scales: the loss scales that gradients contain.

        Raises:
            DroppedError: if the other sites have gone on without this one.
        """
        weights = {rank: header.samples for rank, header in enumerate(headers) if header.samples}
        if weights:
            self.batch = sum(weights.values()) if self._by_samples else self.batch
            total, due = sum(weights.values()), step == self._next
            shares = {rank: count / total for rank, count in weights.items()}
            if due or self._pair is not None:
                own = gradients_of(units, scales)
                if self._pair is not None:
                    self._estimate_pair(step, shares, samples, own, transport)
                if due:
                    self._estimate(step, shares, samples, own, transport)
        self._schedule(step, headers)

    def _schedule(self, step: int, headers: Sequence[StepHeader]) -> None:
        """Find out when the next estimate is due."""
        wishes = [header.noise_every for header in headers if header.noise_every]
        every = min(wishes, default=self._agreed_every)
        if every != self._agreed_every:
            self._agreed_every, self._next = every, step + 1
        elif every and self._next <= step:
            self._next = step + every

    def _estimate(
        self, step: int, shares: Mapping[int, float], samples: int, own: Gradients, transport: Transport
    ) -> None:
        """Update the averages by what all sites have measured in this step."""
        found = SiteNorms.empty(samples, len(own.names))
        if self._probe is not None and self._probe.names == own.names:
            found = self._probe.report(samples)
        every = transport.gather_present(found.unscaled(own))
        if not shares.keys() <= every.keys():
            return  # a site has left in the meantime
        sites = [(shares[rank], every[rank]) for rank in sorted(shares)]
        self._follow_batch(sum(site.samples for _, site in sites))
        if not all(site.parts for _, site in sites):
            return  # a site has begun its plan anew, and measured nothing
        estimates = estimate_step(sites, own.names, own.compressed)
        self._averages = {name: each for name, each in self._averages.items() if name in estimates}
        self._seen = set(estimates)
        self._add(step, estimates)
        left = [name for name, estimate in estimates.items() if math.isnan(estimate.squared_norm)]
        if left:
            effective = effective_samples([(share, site.samples) for share, site in sites])
            self._pair = Pair({name: own.copy(name) for name in left}, effective)

    def _estimate_pair(
        self, step: int, shares: Mapping[int, float], samples: int, own: Gradients, transport: Transport
    ) -> None:
        """Update the averages by the agreed gradients of this step and the one before."""
        pair, self._pair = self._pair, None
        assert pair is not None
        every = transport.gather_present((samples, pair_norms(pair, own.unscaled())))
        if shares.keys() <= every.keys():
            sites = [(shares[rank], every[rank][0]) for rank in sorted(shares)]
            self._follow_batch(sum(count for _, count in sites))
            norms = [every[rank][1] for rank in sorted(shares)]
            self._add(step, estimate_pair(pair, effective_samples(sites), norms))

    def _follow_batch(self, samples: int) -> None:
        if not self._by_samples:
            self.batch = samples

    def _add(self, step: int, estimates: Mapping[str, NoiseEstimate]) -> None:
        """Add estimates to the averages; those that are not finite do not count."""
        for name, estimate in estimates.items():
            if math.isfinite(estimate.variance) and math.isfinite(estimate.squared_norm):
                self._averages[name] = _Average.after(self._averages.get(name), step, estimate)
        self._sum_up()

    def _sum_up(self) -> None:
        values = [average.value for _, average in sorted(self._averages.items())]
        if not values or len(values) < len(self._seen):
            self._total = NO_ESTIMATE
        else:
            sums = (math.fsum(numbers) for numbers in zip(*values, strict=True))
            self._total = NoiseEstimate(*sums)


class _Average(NamedTuple):
    """Average of estimates, in which older ones count less.

    Attributes:
        variance: weighted sum of the variances.
        squared_norm: weighted sum of the squared norms.
        weight: sum of the weights.
        step: step of the last estimate.
    """

    variance: float
    squared_norm: float
    weight: float
    step: int

    @classmethod
    def after(cls, before: _Average | None, step: int, estimate: NoiseEstimate) -> _Average:
        """Return the average with one more estimate."""
        if before is None:
            return cls(*estimate, 1.0, step)
        keep = _MEMORY / (_MEMORY + step - before.step)
        variance = keep * before.variance + (1.0 - keep) * estimate.variance
        squared_norm = keep * before.squared_norm + (1.0 - keep) * estimate.squared_norm
        return cls(variance, squared_norm, keep * before.weight + (1.0 - keep), step)

    @property
    def value(self) -> NoiseEstimate:
        """The average."""
        return NoiseEstimate(self.variance / self.weight, self.squared_norm / self.weight)
