"""Comparisons of the sites in every step: of the settings of optimizers, of weights, and of the first batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from ...exchange import Transport
from ...options import Options
from ..reducer.handler import StepHeader
from .sameness import FirstBatch, LookedUpRows, OptimizerSettings, Weights


class Comparisons:
    """Comparisons of a site with the others, by two numbers in its step headers.

    Args:
        model: the part of the model that the sites share.
        options: the options.
        first_batch: digest of the site's first batch; None where it is not compared.

    Attributes:
        settings: settings of the model's optimizers.
        weights: the weights of the model.
    """

    def __init__(self, model: nn.Module, options: Options, first_batch: FirstBatch | None) -> None:
        self.settings = OptimizerSettings(options.may_differ)
        self.weights = Weights(model, options.compare_every)
        self._first_batch = first_batch
        self._looked_up = LookedUpRows(model, elastic=options.min_sites is not None)
        self._pauses = False

    def digest(self, step: int) -> int:
        """Return what the header of a step carries of the first batch or the weights."""
        if self._pauses:
            return 0
        if self._first_batch is not None:
            digest = self._first_batch.take()
            if step == 0:
                return digest
            self._first_batch = None  # of a site that has lost its place meanwhile, or a training that goes on
        return self.weights.last_digest(step)

    def compare(self, headers: Sequence[StepHeader], step: int, transport: Transport) -> None:
        """Compare the sites by the digests in their headers; see `dadplug.step.model_sync.sameness`."""
        self._looked_up.renormalise(transport)
        self.settings.compare([header.settings for header in headers], step, transport)
        digests = [header.digest for header in headers]
        if self._first_batch is not None:
            self._first_batch.compare(digests, transport)
            self._first_batch = None
        else:
            self.weights.compare(digests, step, transport)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave this site's weights out inside a ``with`` block."""
        self._pauses = True
        try:
            yield
        finally:
            self._pauses = False

    def detach(self) -> None:
        """Remove the hooks of tables."""
        self._looked_up.detach()
