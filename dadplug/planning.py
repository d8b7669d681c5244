"""How a model's parameters are exchanged: their division into units, what the first step shows, and plans anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import nn

from . import chains
from .agreement import FirstStep, agree
from .division import find_units
from .exchange import Transport
from .link import Link, measure_link
from .methods import Method
from .methods.feedback import ErrorFeedback
from .options import Options
from .pipeline import Pipeline
from .units import DenseUnit, FactorUnit, Unit

_OTHER_SIZE = 1.5  # times as many samples, or as few, make a batch another size
_SOME_STEPS = 8


class Planner:
    """Divides a model's parameters into units, and settles in a plan's first step how they go.

    Args:
        model: the model.
        method: the method.
        options: the options.
        transport: the transport.
        samples: tells the samples that this site's gradients stand for so far in the step.
        arrived: called with a unit when a backward pass has delivered its gradient.

    Attributes:
        units: the units.
        capture: the capture of the layers that go by factors.
        paths: the path of every parameter.
        reasons: why a unit is all-reduced after all; stands in further plans, too.
        notices: why a parameter takes its path, in this plan.
        settled: whether the first step of the plan is over.
        version: number of the plan.
        pipeline: the pipeline of the plan; None before one is settled.
        rounding: what rounding had taken away when the pipeline was last asked.
        reference: samples of a step, about; 0 before the first.
        link: what the link costs, where the method chooses by it.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        options: Options,
        transport: Transport,
        samples: Callable[[], int],
        arrived: Callable[[Unit], None],
    ) -> None:
        self.model = model
        self.method = method
        self.options = options
        self.transport = transport
        self._samples = samples
        self._arrived = arrived
        self._parameters = list(model.parameters())
        self.reasons: dict[str, str] = {}
        self.version = 0
        self.pipeline: Pipeline | None = None
        self.rounding = ErrorFeedback(True)
        self.reference = 0
        self.link: Link | None = None
        self._off_plan = 0
        self._build()

    def _build(self) -> None:
        """Divides the parameters into units, and watches their gradients arrive."""
        compress_dense = self.options.dense == "lowrank"
        found = find_units(self.model, self.method, set(self.reasons), compress_dense)
        self.capture, self.units, self.paths = found.capture, found.units, found.paths
        self.notices = found.reasons
        self._trained = self._trained_now()
        self._order: list[Unit] = []
        self.settled = False
        self._formed: list[str] = []  # weights whose factors became gradients when the plan changed under them
        for unit in self.units:
            unit.watch(self._arrived)

    def _trained_now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def take_down(self, unit: Unit) -> None:
        """Notes the order in which units arrive, before the plan is settled."""
        if unit not in self._order:
            self._order.append(unit)

    def follow_freezing(self) -> None:
        """Makes a new plan if parameters have been frozen or freed; gradients that have arrived are kept."""
        if self._trained == self._trained_now():
            return
        formed = []
        for unit in self.units:
            if isinstance(unit, FactorUnit) and unit.rows:
                unit.form_gradients()
                formed.append(unit.name)
        self._plan_anew()
        self._formed = formed

    def follow_sizes(self, samples: Sequence[int]) -> None:
        """Chooses anew, where the method chooses, once batches have had another size for some steps.

        Args:
            samples: samples of each site in the step that is over.
        """
        if not self.method.chooses or not any(samples):
            return
        off = not self._planned_for / _OTHER_SIZE <= max(samples) <= self._planned_for * _OTHER_SIZE
        self._off_plan = self._off_plan + 1 if off else 0
        if self._off_plan >= _SOME_STEPS:
            self._plan_anew()

    def _plan_anew(self) -> None:
        self.release()
        self.version += 1
        self._build()

    def release(self) -> None:
        """Takes hooks and capture off the model."""
        for unit in self.units:
            unit.release()
        self.capture.detach()

    def settle(self, step: int) -> Pipeline:
        """Agrees, in the first step of a plan, on what only a step can show: the order of units, and special cases.

        Args:
            step: number of the step.

        Raises:
            ValueError: on all sites, if the method needs chains of layers, and the model has none.
            MismatchError: if other sites have no new plan.
        """
        if self.pipeline is not None:
            self.rounding = self.pipeline.rounding()
            self.pipeline.retire(step, self.version)
        if self.method.chooses and self.link is None:
            with self.transport.traffic.apart():
                self.link = measure_link(self.transport)
        own = FirstStep.of(self.units, self._order, self.options.share_inputs, self._samples(), self.link)
        agreed = agree(self.transport.gather_objects(own), self.units, self.method)
        self.reasons = agreed.reasons | self.reasons
        self._chosen, self._planned_for, self._off_plan = agreed.chosen, agreed.largest, 0
        self.notices |= agreed.notices
        self.units = [new for unit in self.units for new in self._allreduce_if_told(unit)]
        self.reference = self.reference or agreed.samples
        self.settled = not self.method.chains or self._find_chains()
        self.pipeline = Pipeline(
            chains.followers_first(agreed.order(self.units)),
            self.method,
            self.transport,
            self.options,
            agreed.rows,
            self._samples,
            self.reference,
            self.version,
        )
        self.pipeline.add_rounding(self.rounding)
        for unit in self.units:
            unit.dense |= unit.name in self._formed
        return self.pipeline

    def _find_chains(self) -> bool:
        """Agrees on the layers whose deltas are recomputed; says whether there was anything to see yet."""
        found = chains.agree(self.transport.gather_objects(chains.look(self.units, self.capture)), self.units)
        if found.seen and self.capture.tracer is not None:
            self.capture.tracer.stop_naming()
        if found.seen and not found.links:
            message = chains.refusal(found, self.model, self.notices | self.reasons)
            if self.version == 0:
                raise ValueError(message)
            warnings.warn(message, stacklevel=5)
        self.units = chains.chain_up(self.units, found.links)
        self.notices = self.notices | found.notes
        for unit in self.units:
            if isinstance(unit, chains.ChainedUnit):
                unit.watch(self._arrived)
                self.paths |= dict.fromkeys(unit.parameters, unit.path)
        return found.seen

    def _allreduce_if_told(self, unit: Unit) -> list[Unit]:
        """Moves a unit to the dense path if a site has found a reason to; returns the units that it becomes."""
        reason = self.reasons.get(unit.name) or self._chosen.get(unit.name)
        if not isinstance(unit, FactorUnit) or reason is None:
            return [unit]
        unit.form_gradients()
        unit.release()
        for layer in unit.layers:
            self.capture.release(layer.name)
        units: list[Unit] = []
        for name, parameter in unit.parameters.items():
            new = DenseUnit(name, parameter)
            new.arrivals = unit.arrivals
            new.watch(self._arrived)
            self.paths[name] = "allreduce"
            (self.reasons if unit.name in self.reasons else self.notices)[name] = reason
            units.append(new)
        return units
