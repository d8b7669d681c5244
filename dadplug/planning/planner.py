"""How a model's parameters are exchanged: their division into units, what the first step shows, and plans anew."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

from torch import nn

from ..exchange import Transport
from ..methods import Method
from ..methods.feedback import ErrorFeedback
from ..model_sync import replicas
from ..model_sync.structure import ModelStructure, is_managed, without_managed
from ..options import Options
from ..reducer.reducer import Reducer
from ..units.base import DenseUnit, Unit
from ..units.factor import FactorUnit
from . import chains
from .first_step import FirstStepReport, merge_reports
from .link_model import LinkCosts, measure_link
from .partition import partition_parameters

_OTHER_SIZE = 1.5  # times as many samples, or as few, make a batch another size
_SOME_STEPS = 8
_numbers = itertools.count()  # of reductions


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
        changing: whether the model has been seen to differ from the plan in this step; then nothing leaves early.
        version: number of the plan.
        reducer: the reducer of the plan; None before one is settled.
        rounding: what rounding had taken away when the reducer was last asked.
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
        self._structure = ModelStructure(model)
        self._number = next(_numbers)
        self.changing = False
        self.reasons: dict[str, str] = {}
        self.version = 0
        self.reducer: Reducer | None = None
        self.rounding = ErrorFeedback(True)
        self.reference = 0
        self.link: LinkCosts | None = None
        self._off_plan = 0
        self._added: set[str] = set()  # parameters that have come since the last plan was settled
        self._build()

    def _build(self) -> None:
        """Divides the parameters into units, and watches their gradients arrive."""
        compress_dense = self.options.dense == "lowrank"
        found = partition_parameters(self.model, self.method, set(self.reasons), compress_dense)
        self.capture, self.units, self.paths = found.capture, found.units, found.paths
        self.notices = found.reasons
        self._order: list[Unit] = []
        self.settled = False
        for unit in self.units:
            unit.watch(self._arrived)
            if isinstance(unit, FactorUnit):
                unit.reduction = self._number

    def record_arrival(self, unit: Unit) -> None:
        """Notes the order in which units arrive, before the plan is settled."""
        if unit not in self._order:
            self._order.append(unit)

    def before_forward(self) -> None:
        """Follow parameters that have been frozen or freed; watch for other changes of the model.

        Those are followed at the end of the step only, since `torch.func.functional_call` puts other tensors in the
        place of parameters while it calls the model. Until then nothing is sent.
        """
        if not self._structure.same_tensors() or (not self._structure.same_training() and self._has_sent):
            self.changing = True
        elif not self._structure.same_training():
            self._plan_anew()

    def before_synchronization(self) -> None:
        """Follow whatever has changed in the model; take what the step has brought out of placeholders.

        Where gradients of this step have left by the present plan, the step ends by it, and the next one follows.

        Raises:
            RuntimeError: if they have, and parameters outside of the plan have gradients; nothing has changed then.
        """
        if not (self._structure.same_tensors() and self._structure.same_training()):
            if not self._has_sent:
                self._plan_anew()
            elif new := self._new_gradients():
                raise RuntimeError(
                    f"parameter {new[0]!r} was added or freed, and got a gradient, in a step whose other gradients had "
                    "left already: call synchronize() before the model changes"
                )
        self.changing = False
        for unit in self.units:
            if isinstance(unit, FactorUnit):
                unit.resolve()

    @property
    def _has_sent(self) -> bool:
        return any(unit.sent and not unit.void for unit in self.units)

    def _new_gradients(self) -> list[str]:
        planned = {id(parameter) for unit in self.units for parameter in unit.parameters.values()}
        planned |= {id(each) for each in self.model.parameters() if is_managed(each)}
        trained = self.model.named_parameters()
        return [name for name, each in trained if each.grad is not None and id(each) not in planned]

    @property
    def holds_gradients(self) -> bool:
        """Whether a plan that is not settled yet has gradients that no backward pass has announced to it."""
        held = (unit.has_gradient or (isinstance(unit, FactorUnit) and unit.rows > 0) for unit in self.units)
        return not self.settled and any(held)

    def mark_agreed(self) -> None:
        """Remember which gradients of factored parameters all sites have alike, at the end of a step."""
        for unit in self.units:
            if isinstance(unit, FactorUnit):
                unit.mark_agreed()

    def end_step(self) -> None:
        """Forget the step that is over."""
        for unit in self.units:
            unit.begin_step()

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
        known = set(self._structure.parameters)
        with without_managed(self.model):
            self._structure = ModelStructure(self.model)
            self._added |= {name for name, each in self.model.named_parameters() if id(each) not in known}
            self._build()

    def release(self, *, discard: bool = False) -> None:
        """Take hooks and capture off the model; gradients that have arrived stay in ``.grad`` as autograd's would.

        One that is on its way to other sites, and not here any more, raises an error when a program reads it.

        Args:
            discard: drop gradients that have arrived instead.
        """
        for unit in self.units:
            if isinstance(unit, FactorUnit):
                unit.drop_cleared()
                if discard:
                    unit.discard()
                elif unit.sent and not unit.void and not unit.reclaim():
                    unit.abandon()
                unit.form_gradients()
                unit.resolve_alone()
            unit.release()
        self.capture.detach()

    def settle(self, step: int) -> Reducer:
        """Agrees, in the first step of a plan, on what only a step can show: the order of units, and special cases.

        Args:
            step: number of the step.

        Raises:
            ValueError: on all sites, if the method needs chains of layers, and the model has none.
            MismatchError: if other sites have no new plan.
        """
        if self.reducer is not None:
            self.rounding = self.reducer.rounding()
            self.reducer.close_plan(step, self.version)
        if self._added:
            replicas.check_values(self.model, self._added, self.transport)
            self._added.clear()
        if self.method.chooses and self.link is None:
            with self.transport.traffic.apart():
                self.link = measure_link(self.transport)
        own = FirstStepReport.of(self.units, self._order, self.options.share_inputs, self._samples(), self.link)
        agreed = merge_reports(self.transport.gather_objects(own), self.units, self.method)
        self.reasons = agreed.reasons | self.reasons
        self._chosen, self._planned_for, self._off_plan = agreed.chosen, agreed.largest, 0
        self.notices |= agreed.notices
        self.units = [new for unit in self.units for new in self._allreduce_if_decided(unit)]
        self.reference = self.reference or agreed.samples
        self.settled = not self.method.chains or self._find_chains()
        self.reducer = Reducer(
            chains.order_followers_first(agreed.order(self.units)),
            self.method,
            self.transport,
            self.options,
            agreed.rows,
            self._samples,
            self.reference,
            self.version,
        )
        self.reducer.add_rounding(self.rounding)
        return self.reducer

    def _find_chains(self) -> bool:
        """Agrees on the layers whose deltas are recomputed; says whether there was anything to see yet."""
        found = chains.merge_chain_reports(
            self.transport.gather_objects(chains.collect_chain_reports(self.units, self.capture)), self.units
        )
        if found.seen and self.capture.tracer is not None:
            self.capture.tracer.stop_naming()
        if found.seen and not found.links:
            message = chains.refusal(found, self.model, self.notices | self.reasons)
            if self.version == 0:
                raise ValueError(message)
            warnings.warn(message, stacklevel=5)
        self.units = chains.link_units(self.units, found.links)
        self.notices = self.notices | found.remarks
        for unit in self.units:
            if isinstance(unit, chains.ChainedUnit):
                unit.watch(self._arrived)
                unit.reduction = self._number
                self.paths |= dict.fromkeys(unit.parameters, unit.path)
        return found.seen

    def _allreduce_if_decided(self, unit: Unit) -> list[Unit]:
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
