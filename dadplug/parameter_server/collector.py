"""Collector of one site's gradients: from backward passes to what a step has to send."""

from __future__ import annotations

from torch import nn

from ..exchange import Transport
from ..methods import Method, feedback
from ..model_sync.samples import SampleCounter
from ..options import Options
from ..units.base import Unit
from ..units.factor import FactorUnit
from .gradients import ModelGradients, UnitGradient
from .statistics import CommittedBatchNorms


class GradientCollector:
    """Collector of a model's gradients and of the samples that they stand for.

    Args:
        model: the model.
        method: the method.
        options: the options.

    Attributes:
        counter: counter of samples.
        gradients: the gradients by unit.
        pending: whether gradients have arrived that have not been collected.
        counted: samples of the passes of the last collection.
        norms: batch normalisations with the statistics of all sites; None without such.
    """

    def __init__(self, model: nn.Module, method: Method, options: Options) -> None:
        self._method = method
        self._options = options
        self.counter = SampleCounter(model, self._before_forward, self._before_backward)
        self.gradients = ModelGradients(model, method, options, self._arrived)
        self.pending = self._scaled = False
        self.counted = 0
        self.norms: CommittedBatchNorms | None = None
        feedback.watch()

    def _before_forward(self) -> None:
        self.gradients.check_unchanged()

    def _before_backward(self) -> None:
        self._drop_cleared(begins=True)

    def _drop_cleared(self, *, begins: bool = False) -> None:
        """Forget passes whose gradients have been cleared, besides one whose backward begins."""
        if self.gradients.drop_cleared():
            self.counter.discard()
            self.pending = False
            if self.norms is not None:
                self.norms.drop(but_last=begins)

    def _arrived(self, unit: Unit) -> None:
        unit.arrivals += 1
        self.pending = True
        self._scaled |= feedback.running().value != 1.0
        if isinstance(unit, FactorUnit):
            unit.prepare(self.counter.owned, exact=self._method.traits.exact)
        self.gradients.record_arrival(unit)
        if isinstance(unit, FactorUnit):
            unit.show_arrival()
            unit.keep(self.counter.owned)

    def collect(self, transport: Transport) -> tuple[dict[str, UnitGradient], int]:
        """Return the gradients since the last call and their samples, and clear them.

        Args:
            transport: the transport; in the first call all sites report over it.

        Raises:
            ValueError: if a GradScaler has scaled the loss.
        """
        self._drop_cleared()
        self.counter.follow()
        by_samples = self._options.weighting == "samples"
        samples = self.counter.of_step(self.pending, by_samples=by_samples, alone=transport.world_size == 1)
        if self._scaled:
            self.gradients.discard()
            self._end()
            raise ValueError(
                "a ParameterServer cannot train with a GradScaler, whose scale each site changes on its own: use "
                "bfloat16, which needs none"
            )
        if not self.gradients.reference:
            self.gradients.complete(transport, samples)
        taken = self.gradients.take()
        self._end()
        if self.norms is not None and taken and samples:
            self.norms.keep()
        elif self.norms is not None:
            self.norms.drop()
        return taken, samples

    def _end(self) -> None:
        self.counted = self.counter.count
        self.counter.reset()
        self._method.loss_scales.end_step()
        self.pending = self._scaled = False

    def release(self) -> None:
        """Remove all hooks from the model; gradients that have arrived are dropped."""
        self.gradients.release()
        self.counter.detach()
        if self.norms is not None:
            self.norms.detach()
        feedback.unwatch()
