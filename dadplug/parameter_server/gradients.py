"""Gradients of one site: collected after backward, held while they cannot leave, and written before a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from ..exchange import Transport
from ..hooks import Factor, stack_by_form
from ..methods import Method
from ..model_sync.structure import ModelStructure
from ..options import Options
from ..planning.first_step import FirstStepReport, merge_reports
from ..planning.partition import partition_parameters
from ..units.base import DenseUnit, Unit
from ..units.factor import FactorUnit


class UnitGradient(NamedTuple):
    """Gradient of one unit at one site: rows, gradients that have been formed, or both.

    Attributes:
        factor: the rows, in the unit's form.
        dense: formed gradients by name of the parameter.
    """

    factor: Factor | None
    dense: dict[str, Tensor]

    def times(self, weight: float) -> UnitGradient:
        """Return the gradient times a number."""
        factor = self.factor
        if factor is not None:
            bias = None if factor.bias is None else factor.bias * weight
            factor = replace(factor, deltas=factor.deltas * weight, bias=bias)
        return UnitGradient(factor, {name: gradient * weight for name, gradient in self.dense.items()})

    def plus(self, other: UnitGradient) -> UnitGradient:
        """Return the sum with another gradient of the same unit."""
        factors = [each for each in (self.factor, other.factor) if each is not None]
        dense = dict(self.dense)
        for name, gradient in other.dense.items():
            dense[name] = dense[name] + gradient if name in dense else gradient
        return UnitGradient(stack_by_form(factors)[0] if factors else None, dense)


class UnsentGradients:
    """Mean over the samples of some batches of their gradients.

    Attributes:
        samples: number of samples.
        base: version at which the first of them was computed.
        batches: number of batches.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.base = 0
        self.batches = 0
        self._sums: dict[str, UnitGradient] = {}  # times samples, unless it is a single batch

    def add(self, gradients: dict[str, UnitGradient], samples: int, base: int) -> None:
        """Add the gradients of a batch.

        Args:
            gradients: the gradients by name of the unit.
            samples: the batch's samples.
            base: version at which they were computed.
        """
        if not self.batches:
            self._sums, self.base = gradients, base
        else:
            if self.batches == 1:
                self._sums = {name: each.times(self.samples) for name, each in self._sums.items()}
            for name, each in gradients.items():
                weighted = each.times(samples)
                self._sums[name] = self._sums[name].plus(weighted) if name in self._sums else weighted
        self.batches += 1
        self.samples += samples

    def mean(self) -> dict[str, UnitGradient]:
        """Return the mean over samples, by name of the unit."""
        if self.batches == 1:
            return self._sums
        return {name: each.times(1 / self.samples) for name, each in self._sums.items()}


class ModelGradients:
    """Capture of a model's gradients, by units that are the same at all sites.

    Args:
        model: the model.
        method: the method.
        options: the options.
        arrived: called with a unit when a backward pass has delivered its gradient.

    Attributes:
        units: the units, in the model's order.
        reference: samples of all sites in the first step; 0 before it.
        reports: reports of all sites on their first steps; empty before it.
        expected_reference: `reference` of a training that this one resumes, which it takes over; else 0.
    """

    def __init__(self, model: nn.Module, method: Method, options: Options, arrived: Callable[[Unit], None]) -> None:
        self._model = model
        self._method = method
        self._options = options
        self._arrived = arrived
        self._structure = ModelStructure(model)
        found = partition_parameters(model, method, (), options.dense == "lowrank")
        self._capture, self.units = found.capture, found.units
        self._order: list[Unit] = []
        self.reports: Sequence[FirstStepReport] = ()
        self.reference = self.expected_reference = 0
        for unit in self.units:
            unit.watch(arrived)

    def record_arrival(self, unit: Unit) -> None:
        """Record the order in which gradients arrive, in the first step."""
        if not self.reference and unit not in self._order:
            self._order.append(unit)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if layers or parameters have been added, removed, frozen or freed."""
        if not (self._structure.same_tensors() and self._structure.same_training()):
            raise RuntimeError(
                "the model has changed since the ParameterServer was made: call finish() and detach() on all sites, "
                "and make a new one"
            )

    def complete(self, transport: Transport, samples: int) -> None:
        """Complete the units by what all sites report on their first step; all sites must call it together.

        Nothing happens if none of them has a gradient.

        Args:
            transport: the transport.
            samples: samples of this site's first step.
        """
        own = FirstStepReport.of(self.units, self._order, self._options.share_inputs, samples, None)
        reports = transport.gather_objects(own)
        if not any(each.samples for each in reports):
            return
        self.merge(reports)

    def merge(self, reports: Sequence[FirstStepReport]) -> None:
        """Complete the units by the reports of all sites, by rank."""
        self.reports = reports
        merged = merge_reports(reports, self.units, self._method, len(reports))
        self.units = [new for unit in self.units for new in self._unless_dense(unit, merged.reasons.get(unit.name))]
        self.reference = self.expected_reference or merged.samples

    def _unless_dense(self, unit: Unit, reason: str | None) -> Sequence[Unit]:
        """Return a unit, or the dense units that replace it."""
        if not isinstance(unit, FactorUnit) or reason is None:
            return [unit]
        unit.form_gradients()
        unit.resolve_alone()
        unit.release()
        for layer in unit.layers:
            self._capture.release(layer.name)
        units = [DenseUnit(name, parameter) for name, parameter in unit.parameters.items()]
        for new in units:
            new.arrivals = unit.arrivals
            new.watch(self._arrived)
        return units

    def drop_cleared(self) -> bool:
        """Discard what has arrived and been cleared since; return whether that was all there was."""
        cleared = [unit.drop_cleared() for unit in self.units if unit.arrivals]
        return bool(cleared) and all(cleared)

    def take(self) -> dict[str, UnitGradient]:
        """Return the gradients that have arrived, by name of the unit, and clear ``.grad``."""
        taken: dict[str, UnitGradient] = {}
        for unit in self.units:
            factor = None
            if isinstance(unit, FactorUnit):
                unit.resolve()
                factor = unit.take()
                unit.release_sent()
            dense = {name: each.grad.detach() for name, each in unit.parameters.items() if each.grad is not None}
            for parameter in unit.parameters.values():
                parameter.grad = None
            if factor is not None or dense:
                taken[unit.name] = UnitGradient(factor, dense)
            unit.begin_step()
        return taken

    def discard(self) -> None:
        """Forget the gradients that have arrived."""
        self.take()

    def write(self, gradients: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write gradients to ``.grad``.

        Args:
            gradients: by name of the unit, the gradients of its parameters by name.
        """
        for unit in self.units:
            for name, gradient in gradients.get(unit.name, {}).items():
                parameter = unit.parameters[name]
                parameter.grad = gradient if gradient.is_sparse else gradient.view(parameter.shape)

    def clear(self) -> None:
        """Clear ``.grad`` of all parameters."""
        for unit in self.units:
            for parameter in unit.parameters.values():
                parameter.grad = None

    def release(self) -> None:
        """Remove all hooks from the model; gradients that have arrived are dropped."""
        self.discard()
        for unit in self.units:
            if isinstance(unit, FactorUnit):
                unit.resolve_alone()
            unit.release()
        self._capture.detach()
