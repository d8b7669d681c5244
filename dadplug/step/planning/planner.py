"""Plans of a model's exchange, made by the first step's reports and anew when the model changes."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn

from ...exchange import Transport
from ...exchange.codec import register, register_family
from ...exchange.fields import COUNT, check_all, check_kinds, checked, fits, invalid
from ...hooks import Factor, Form
from ...hooks.convolution import Geometry
from ...hooks.factor import Write
from ...hooks.linear import TransposedForm
from ...options import Options
from ...support.schedules import Decoding, current
from ..methods import Method, check_allowed
from ..methods.base import GradientPath
from ..methods.feedback import ErrorFeedback
from ..model_sync import sameness
from ..model_sync.private import SharedPart, private_parameters, whole_of
from ..model_sync.structure import ModelStructure, is_managed, without_managed
from ..reducer.clipping import OutsizedGradients
from ..reducer.handler import StepHeader
from ..reducer.reducer import Reducer, StepRequest
from ..units.base import Arrived, Unit, begin_step, count_together, is_zero, mark_agreed
from ..units.factor import ChainedUnit, FactorUnit, LowrankUnit
from .chains import (
    ChainReports,
    collect_chain_reports,
    link_units,
    merge_chain_reports,
    order_followers_first,
    refusal,
)
from .choice import RankChoice
from .merging import LinkCosts, Merging, measure_link
from .partition import partition_parameters, show_inputs
from .plan import PayloadCosts, Plan, dense_bytes

# First step of a plan: reports of the sites on what only a step can show, and the conclusions from them.

register_family(Form)
register(TransposedForm)
register(Geometry)  # which forms of convolutions hold
register(Decoding)


@register
@dataclass(frozen=True)
class FirstStepReport:
    """One site's report on its first step.

    Attributes:
        order: names of the units in the order in which backward reached them.
        reasons: by name of a unit that cannot be sent as factors, why.
        rows: by name of a factor unit, number of rows.
        forms: by name of a factor unit, the forms of its factors.
        samples: weight of the site in the step.
        batch: samples of the step; 0 where they are not known.
        link: measured costs of the link, where the method chooses by them.
        decoding: this site's constants of decoding; those of the first site hold at all sites.
        room: most components for which owners need room.
    """

    order: list[str]
    reasons: dict[str, str]
    rows: dict[str, int]
    forms: dict[str, set[Form]]
    samples: int
    batch: int
    link: LinkCosts | None
    decoding: Decoding
    room: int

    def counts(self) -> list[int]:
        """Return the numbers that are counts."""
        return [self.samples, self.batch, self.room, *self.rows.values()]

    @classmethod
    def of(
        cls,
        units: Sequence[Unit],
        order: Sequence[Unit],
        share_inputs: bool,
        samples: int,
        batch: int,
        link: LinkCosts | None,
        room: int = 1,
    ) -> FirstStepReport:
        """Report on the units after a step's backward passes.

        Args:
            units: the units.
            order: the units whose gradients have arrived, in that order.
            share_inputs: value of the option.
            samples: weight of the site in the step.
            batch: samples of the step; 0 where they are not known.
            link: measured costs of the link, or None.
            room: most components for which owners need room.
        """
        factored = [unit for unit in units if isinstance(unit, FactorUnit)]
        reasons = {unit.name: unit.left_out or "used outside its layer too" for unit in factored if unit.outside}
        if not share_inputs:
            fed = "share_inputs=False: its layer is fed by data"
            reasons |= {unit.name: fed for unit in factored if unit.fed_by_data}
        rows, forms = {unit.name: unit.rows for unit in factored}, {unit.name: unit.forms for unit in factored}
        decoding = current().decoding
        return cls([unit.name for unit in order], reasons, rows, forms, samples, batch, link, decoding, room)


@register
@dataclass(frozen=True)
class MergedReport:
    """Conclusions of all sites from their reports on the first step.

    Attributes:
        reasons: by name of a unit that is all-reduced after all, in this plan and in further ones: why.
        rows: by name of a factor unit, the rows that a site is expected to send.
        samples: weights of all sites in a step, added up.
        batches: samples of each site that has a batch in the step; 0 where they are not known.
        chosen: by name of a factor unit that is all-reduced in this plan, since that is predicted to be faster: by how
            much.
        notices: by name of a unit that is sent as factors, since that is predicted to be faster: by how much.
        largest: samples of the site that has most.
        positions: by name of a unit, its position in the order in which rank 0's backward reached them.
        decoding: constants of decoding: those of the first site that is present.
        room: most components for which owners have room.
        link: costs of the link, where they have been measured.
    """

    reasons: dict[str, str]
    rows: dict[str, int]
    samples: int
    batches: list[int]
    chosen: dict[str, str]
    notices: dict[str, str]
    largest: int
    positions: dict[str, int]
    decoding: Decoding
    room: int
    link: LinkCosts | None

    def order(self, units: Sequence[Unit]) -> list[Unit]:
        """Return units in the order in which rank 0's backward reached them.

        Units that it has not reached come last, in the reverse of the model's order.
        """
        backwards = units[::-1]
        return sorted(backwards, key=lambda unit: self.positions.get(unit.name, len(self.positions)))


def merge_reports(
    reports: Sequence[FirstStepReport], units: Iterable[Unit], method: Method, sites: int
) -> MergedReport:
    """Merge the sites' reports; the result is the same on every site. Sets the form of units that have none yet.

    Args:
        reports: the reports of the sites that are present, by rank.
        units: the units.
        method: the method.
        sites: number of sites, with those that are absent: a plan holds also when they come.
    """
    reasons: dict[str, str] = {}
    rows: dict[str, int] = {}
    chosen: dict[str, str] = {}
    notices: dict[str, str] = {}
    chooses = method.traits.chooses_path and sites > 1
    link = LinkCosts.worst_of(each.link for each in reports)
    for unit in units:
        if not isinstance(unit, FactorUnit):
            continue
        most = max(each.rows.get(unit.name, 0) for each in reports)
        given = [each.reasons[unit.name] for each in reports if unit.name in each.reasons]
        if unit.form is None:
            forms: set[Form] = set().union(*(each.forms[unit.name] for each in reports))
            if len(forms) == 1:
                unit.form = forms.pop()
            else:
                given.append("inputs of several sizes" if forms else "no site used it in the first step")
        if not given and chooses and link is not None and unit.form is not None and not unit.form.sparse:
            dense, factors = _predict(unit, unit.form, most, sites, link)
            words = f"{1e3 * factors:.2f} ms by factors, {1e3 * dense:.2f} ms by all-reduce"
            (chosen if dense < factors else notices)[unit.name] = f"predicted: {words}"
        elif not given and (excess := _excess(unit, most, sites)) >= 1.0:
            given.append(f"its factors would be {excess:.1f} times the bytes")
        if given:
            reasons[unit.name] = given[0]
        encoded = unit.form is None or unit.form.encoded
        rows[unit.name] = method.rows_sent(most, *unit.shape) if encoded else most
    positions = {name: position for position, name in enumerate(reports[0].order)}
    samples = [each.samples for each in reports]
    decoding = reports[0].decoding
    batches = [each.batch for each in reports if each.samples]
    largest, room = max(batches, default=0), max(each.room for each in reports)
    return MergedReport(reasons, rows, sum(samples), batches, chosen, notices, largest, positions, decoding, room, link)


def _excess(unit: FactorUnit, rows: int, sites: int) -> float:
    """Return the bytes of the factors over those of an all-reduce; 0.0 where factors are sent in any case."""
    if unit.form is None or not unit.form.may_be_dense:
        return 0.0
    return max(sites, 2) * rows * sum(unit.widths) / (2 * unit.lead.numel())


def _predict(unit: FactorUnit, form: Form, rows: int, sites: int, link: LinkCosts) -> tuple[float, float]:
    """Predict the seconds of a unit's all-reduce, and those of the exchange of its factors."""
    numel, size = unit.lead.numel(), unit.lead.element_size()
    multiplications = rows * form.positions * (sum(unit.widths) if form.table_rows else numel)
    dense = link.dense(size * numel, multiplications)
    return dense, link.factors(size * rows * sum(unit.widths), multiplications, sites)


Layout = list[list[list[int]]]
"""By handler and slot: what `dadplug.exchange.factor_buckets.Slot.layout` returns."""


@register
@dataclass(frozen=True)
class PlanState:
    """State of a complete plan.

    Attributes:
        sites: number of sites of the plan.
        version: number of the plan.
        earlier: by name of a unit that is all-reduced since earlier plans: why.
        merged: conclusions from the first step's reports.
        forms: by name of a factor unit, the form of its factors.
        reference: samples of all sites in a step, about.
        planned_for: samples of the site that had most in the first step.
        off_plan: steps in succession with batches of another size.
        extent: size of the agreed gradients of the last steps, see `HandlerContext`.
        choice: state of the choice of the rank, see `RankChoice.shared_state`; empty without one.
        layout: room in the buckets, by handler and slot.
    """

    sites: int
    version: int
    earlier: dict[str, str]
    merged: MergedReport
    forms: dict[str, Form]
    reference: int
    planned_for: int
    off_plan: int
    extent: float
    choice: tuple[float, ...]
    layout: Layout

    def check(self, sites: int) -> None:
        """Raise MismatchError if the state, of another site, has a field that no site has; `sites` is their number."""
        if not fits(self, PlanState):
            raise invalid("plan", "another site", f"{self!r:.100} is not of the type PlanState")
        check_all("plan", "another site", [self.sites], 1, sites)
        merged = self.merged
        numbers = [self.version, self.reference, self.planned_for, self.off_plan, merged.samples, merged.largest]
        numbers += [merged.room, *merged.batches, *merged.rows.values(), *merged.positions.values()]
        numbers += [each for rooms in self.layout for slot in rooms for each in slot]
        check_all("plan", "another site", numbers, 0, COUNT)
        if not 0 <= self.extent < math.inf:
            raise invalid("plan", "another site", f"its gradients have the size {self.extent}")
        if not all(each >= 0 for each in self.choice):
            raise invalid("plan", "another site", f"its choice of the rank holds {self.choice}")


_OTHER_SIZE = 1.5  # times as many samples, or as few, make a batch another size
_SOME_STEPS = 8
_numbers = itertools.count()  # of reductions


class Planner:
    """Plans of the exchange of a model's gradients, and the reducer of the present plan.

    A plan begins with a partition of the parameters into units. The first synchronization completes it, with what all
    sites report on that step. Changes of the model, and of batch sizes where the method chooses by them, lead to a new
    plan, which all sites have to make in the same step.

    Args:
        model: the shared part of the model.
        method: the method.
        options: the options.
        transport: the transport.
        samples: returns the samples that this site's gradients stand for so far in the step.
        arrived: reference to the method that gets a unit when a backward pass has delivered its gradient.
        given: objects for handlers that other rooms register, by path.

    Attributes:
        units: the units of the present plan; read only.
        is_complete: whether the first step of the present plan is over; read only.
        choice: the choice of the rank; None where it is not chosen.
        outgrown: whether the plan is that of sites which had not grown yet, so that `grow` has to follow.
        on_release: called before the capture of a plan is removed from the model.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        options: Options,
        transport: Transport,
        samples: Callable[[], int],
        arrived: Arrived,
        given: Mapping[str, Any],
    ) -> None:
        self._model = model
        self._method = method
        self._options = options
        self._transport = transport
        self._samples = samples
        self._arrived = arrived
        self._given = given
        self._structure = ModelStructure(model)
        self._number = next(_numbers)
        self._version = 0
        self._changing = False  # whether the model differs from the plan in this step; then nothing is sent early
        self._reducer: Reducer | None = None
        self._outsized = OutsizedGradients(transport, options.clip_sites)
        self._reasons: dict[str, str] = {}  # why units are all-reduced after all, in further plans too
        self._notices: dict[str, str] = {}  # why parameters take their path, in this plan
        self._rounding = ErrorFeedback(True)  # rounding errors that were kept when the reducer was last asked
        self._expected = 0.0, 1.0  # of the reducer
        self._reference = 0  # samples of all sites in a step, about; 0 before the first
        self._planned_for = self._off_plan = 0  # samples of the largest site then; steps with batches of another size
        self._link: LinkCosts | None = None
        self._resumed: LinkCosts | None = None  # of a run that this one continues, with as many sites
        self._merging = Merging(method, options, transport)
        self._added: set[str] = set()  # parameters that have been added since the last plan was complete
        self._merged: MergedReport | None = None  # of the last complete plan
        self._sites = transport.world_size  # of that plan
        self.outgrown = False
        self.on_release: Callable[[], None] = lambda: None
        self.units: list[Unit]
        self._begin_plan()
        self.choice = RankChoice.of(method, options, transport, weakref.proxy(self))

    def forms_late(self) -> set[str]:
        """Return the weights whose gradients, given as matrices, can be formed while they are compressed.

        Only with one thread: several share the work on a whole gradient better than on its blocks.
        """
        settled = self.is_complete and self._structure.same_tensors() and self._structure.same_training()
        if not settled or not self._method.errors.enabled or torch.get_num_threads() > 1:
            return set()
        units = (unit for unit in self.units if isinstance(unit, LowrankUnit) and not unit.layers)
        return {unit.name for unit in units if unit.lead.device.type == "cpu"}

    def hold_unformed(self, writers: Mapping[str, Write]) -> None:
        """Hold gradients that are formed while they are compressed.

        Args:
            writers: by name.
        """
        for unit in self.units if writers else ():
            if isinstance(unit, LowrankUnit) and unit.name in writers:
                unit.hold_unformed(Factor.unformed(unit.lead.shape, unit.lead.detach(), writers[unit.name]))

    @property
    def plan(self) -> Plan:
        """The path and the costs of every parameter; final after the first step."""
        reducer, owners = self._reducer if self.is_complete else None, self._merging.owners(self.units)
        samples = max(1, self._planned_for)
        costs = PayloadCosts(self._method, self._options, self._transport, reducer, owners, samples)
        factored = (unit for unit in self.units if isinstance(unit, FactorUnit) and unit.left_out)
        left_out = {unit.name: f"in some steps {unit.left_out}" for unit in factored}
        paths = self._paths | dict.fromkeys(private_parameters(self._model), GradientPath.PRIVATE)
        plan = costs.plan(whole_of(self._model), self.units, paths, self._notices | left_out | self._reasons)
        return plan if self.choice is None or self.choice.given else plan.with_remarks([str(self.choice.choice)])

    @property
    def has_owners(self) -> bool:
        """Whether sites merge gradients of layers that they own in this plan."""
        return bool(self._merging.owners(self.units))

    @property
    def busiest_share(self) -> float:
        """Numbers on the link of the busiest site in a step, as a share of those where all sites merge."""
        return self._merging.busiest_share(self.units)

    @property
    def holds_gradients(self) -> bool:
        """Whether a plan that is not complete has gradients of which no backward pass has informed it."""
        held = (unit.has_gradient or (isinstance(unit, FactorUnit) and unit.rows > 0) for unit in self.units)
        return not self.is_complete and any(held)

    @property
    def holds_own_gradients(self) -> bool:
        """Whether there are gradients that the program has written, or that the sites have not agreed on."""
        return any(unit.is_own for unit in self.units)

    @property
    def holds_written_gradients(self) -> bool:
        """Whether there are such gradients that are not zero."""
        own = (each.grad for unit in self.units if unit.is_own for each in unit.parameters.values())
        return not all(is_zero(each) for each in own if each is not None)

    def drop_earlier(self) -> None:
        """Drop gradients of earlier steps to which factors would be added, for a site without data in this one."""
        for unit in self.units:
            if isinstance(unit, FactorUnit) and not unit.arrivals:
                for parameter in unit.parameters.values():
                    parameter.grad = None

    @property
    def present_structure(self) -> ModelStructure | None:
        """Structure of the model by which the plan was made; None where the model has another one now."""
        return self._structure if self._structure.is_present else None

    @property
    def misses_gradients(self) -> bool:
        """Whether the model has other parameters than the plan, with gradients."""
        return not self._structure.same_tensors() and bool(self._new_gradients())

    # During forward and backward

    def before_forward(self) -> None:
        """Make a new plan if parameters have been frozen or freed, and look for other changes of the model.

        Other changes are followed at the end of the step, since `torch.func.functional_call` puts other tensors in
        the place of parameters while it calls the model. Nothing is sent until then.
        """
        if not self._structure.same_tensors() or (not self._structure.same_training() and self._has_sent):
            self._changing = True
        elif not self._structure.same_training():
            self.plan_anew()

    def record_arrival(self, unit: Unit, send: bool, owned: Container[int]) -> None:
        """Record that a backward pass has delivered a unit's gradient.

        Args:
            unit: the unit.
            send: whether to send the gradient if it is complete.
            owned: addresses of memory that the user owns.
        """
        unit.arrivals += 1
        factored = unit if isinstance(unit, FactorUnit) else None
        if factored is not None and unit.sent and not (unit.void or self._method.traits.exact):
            factored.reclaim()  # what is compressed is the whole
        sends = send and self.is_complete and self._transport.inside is None  # else those of the site are added up
        sends = sends and unit.arrivals >= unit.expected > 0 and unit.discards >= unit.expected_discards
        sends = sends and not (unit.sent or self._changing)
        if sends:
            assert self._reducer is not None
            self._reducer.arrive(unit)
        elif not self.is_complete and unit not in self._order:
            self._order.append(unit)
        if factored is not None:
            factored.placeholders.put()
            if not sends:
                factored.keep(owned)
            elif factored.sent_factors:
                factored.hold_sent(owned)
            if not self.is_complete:
                factored.set_aside()

    # Synchronization

    def before_synchronization(self) -> None:
        """Make a new plan if the model has changed, and take the placeholders of gradients off.

        Where gradients of this step have been sent by the present plan, or have arrived for parameters that have been
        frozen since, the step ends by it, and the next one begins a new plan.

        Raises:
            RuntimeError: if they have, and parameters outside of the plan have gradients; nothing has changed then.
        """
        if not (self._structure.same_tensors() and self._structure.same_training()):
            frozen = any(unit.arrivals and not unit.lead.requires_grad for unit in self.units)
            if not (self._has_sent or frozen):
                self.plan_anew()
            elif new := self._new_gradients():
                raise RuntimeError(
                    f"parameter {new[0]!r} was added or freed, and got a gradient, in a step whose other gradients had "
                    "left already: call synchronize() before the model changes"
                )
        self._changing = False
        for unit in self.units:
            if isinstance(unit, FactorUnit) and unit.placeholders.resolve():
                unit.take_formed()

    @property
    def batches(self) -> list[int]:
        """Samples of each site that had a batch in the first step of the plan; 0 where they are not known."""
        return [] if self._merged is None else self._merged.batches

    def complete_plan(self, step: int, batch: int) -> None:
        """Complete the plan in its first step, with all sites: the order of units, and the units that go dense.

        Args:
            step: number of the step.
            batch: samples of this site in the step; 0 where they are not known.

        Raises:
            ValueError: on all sites, if the method needs chains of layers, and the model has none.
            MismatchError: if other sites have no new plan.
        """
        if self._reducer is not None:
            self._keep_rounding(self._reducer)
            self._reducer.close_plan(step, self._version)
        if self._added:
            sameness.check_values(self._model, self._added, self._transport)
            self._added.clear()
        if (self._method.traits.chooses_path or self._merging.needs_link) and self._link is None:
            with self._transport.traffic.apart():
                measured = measure_link(self._transport)  # also where only some of the sites have loaded a state
            self._link = self._resumed or measured
        check_allowed(self._options)
        samples, room = self._samples(), self._method.largest_rank if self.choice is None else self.choice.room
        own = FirstStepReport.of(self.units, self._order, self._options.share_inputs, samples, batch, self._link, room)
        every = checked(
            self._transport.gather_present(own), FirstStepReport, "report", self._transport, FirstStepReport.counts
        )
        reports = [*every.values()]
        sites = self._transport.world_size
        self._conclude(merge_reports(reports, self.units, self._method, sites), sites)

    def _conclude(self, merged: MergedReport, sites: int) -> None:
        """Complete the plan by what follows from the reports of so many sites."""
        self._merged, self._reasons = merged, merged.reasons | self._reasons
        self._merging.link = merged.link
        self._link = self._link or merged.link  # a site that has joined must not measure it alone in a later plan
        self._sites = self._merging.sites = sites
        self._method.largest_rank = merged.room
        self._notices |= merged.notices
        self._planned_for, self._off_plan = merged.largest, 0
        reasons = merged.chosen | self._reasons
        self.units = [new for unit in self.units for new in self._unless_dense(unit, reasons.get(unit.name))]
        count_together(self.units, sites)
        self._reference = self._reference or merged.samples
        self.is_complete = not self._method.traits.recomputes_deltas or self._link_chains()
        self._reducer = Reducer(
            order_followers_first(merged.order(self.units)),
            self._method,
            self._transport,
            self._options,
            merged.rows,
            self._samples,
            self._reference,
            self._version,
            self._merging.owners(self.units),
            merged.decoding,
            self._given,
            self._outsized,
        )
        self._reducer.add_rounding(self._rounding)
        self._reducer.expected = self._expected
        trained = (parameter for parameter in self._model.parameters() if parameter.requires_grad)
        self._transport.traffic.dense_bytes = sum(dense_bytes(parameter, self._transport) for parameter in trained)

    def exchange(self, request: StepRequest) -> list[StepHeader]:
        """Send what is left of a step, wait for the other sites, and write ``.grad``.

        Args:
            request: what this site asks for.

        Returns:
            The headers of all sites, by rank.

        Raises:
            NonFiniteError: if some site's gradient holds NaN or Inf; no ``.grad`` has been written then.
        """
        assert self._reducer is not None
        headers = self._reducer.finish(request)
        if not self.is_complete:
            self._reducer = None  # no site has had any data yet
        mark_agreed(self.units)
        return headers

    def end_step(self) -> None:
        """Forget the step that is over."""
        begin_step(self.units)

    def review(self, step: int) -> None:
        """Choose the rank where it is time for it; all sites call it in the same steps, before these end.

        Args:
            step: number of the step.
        """
        if self.choice is not None:
            self.choice.review(step)

    def follow_choice(self) -> None:
        """Make a new plan if another rank was chosen in the step that is over."""
        if self.choice is not None:
            self.choice.end_step()

    def follow_sizes(self, batches: Sequence[int]) -> None:
        """Make a new plan, where the method chooses by sizes, once batches have had another size for some steps.

        Args:
            batches: samples of each site in the step that is over; 0 where they are not known.
        """
        if not self._method.traits.chooses_path or not any(batches):
            return
        off = not self._planned_for / _OTHER_SIZE <= max(batches) <= self._planned_for * _OTHER_SIZE
        self._off_plan = self._off_plan + 1 if off else 0
        if self._off_plan >= _SOME_STEPS:
            self.plan_anew()

    # State and release

    def plan_state(self) -> PlanState:
        """Return the state of the complete plan, for `adopt` at a site that joins."""
        assert self._reducer is not None
        assert self._merged is not None
        return PlanState(
            sites=self._sites,
            version=self._version,
            earlier=self._earlier,
            merged=self._merged,
            forms={unit.name: unit.form for unit in self.units if isinstance(unit, FactorUnit) and unit.form},
            reference=self._reference,
            planned_for=self._planned_for,
            off_plan=self._off_plan,
            extent=self._reducer.extent,
            choice=() if self.choice is None else self.choice.shared_state(),
            layout=self._reducer.layout(),
        )

    def adopt(self, state: PlanState) -> None:
        """Make the plan that other sites have; raise MismatchError if this site's model leads to another one."""
        PlanState.check(state, self._transport.world_size)
        if self.choice is not None:
            self.choice.adopt(state.choice)
        self.release(discard=True)
        self._follow(state)

    def grow(self) -> None:
        """Make the same plan for more sites, which have sent nothing so far; another one where so many have owners."""
        if self._reducer is not None and self.is_complete:
            self._keep_rounding(self._reducer)
            state = self.plan_state()
            self.release()
            self._follow(state)
            had_owners, self._merging.sites = self.has_owners, self._transport.world_size
            if self.has_owners != had_owners:
                self.plan_anew()
        self.outgrown = False

    def _follow(self, state: PlanState) -> None:
        self._version, self._reasons = state.version, dict(state.earlier)
        self._reference = state.reference
        self._begin_plan()
        for unit in self.units:
            if isinstance(unit, FactorUnit):
                unit.form = state.forms.get(unit.name, unit.form)
        self._conclude(state.merged, state.sites)
        self._off_plan = state.off_plan
        assert self._reducer is not None
        self.outgrown = state.sites != self._transport.world_size
        self._reducer.restore(state.layout)
        self._reducer.extent = state.extent

    def state_dict(self) -> dict[str, Any]:
        """Return what the plan carries from step to step, and the times by which a resumed run chooses the same."""
        if self._reducer is not None:
            self._keep_rounding(self._reducer)
        state = {"reference": self._reference, "rounding": self._rounding.state_dict()}
        chosen = {} if self.choice is None else self.choice.state_dict()
        link = self._merging.link or self._resumed
        measured = () if link is None else (self._transport.world_size, *astuple(link))
        return state | {"expected": self._expected, "choice": chosen, "link": measured}

    def _keep_rounding(self, reducer: Reducer) -> None:
        """Copy what a reducer carries to the next one, beside the errors of parameters that are frozen meanwhile."""
        self._rounding.update(reducer.rounding())
        self._expected = reducer.expected

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; further entries are ignored."""
        check_kinds(state, {"reference": float, "expected": Sequence[float], "choice": dict[str, Any]})
        self._rounding.load_state_dict(state["rounding"])
        self._reference = self._reference or state["reference"]
        self._expected = tuple(state.get("expected", self._expected))
        if self.choice is not None:
            self.choice.load_state_dict(state.get("choice", {}))
        sites, *link = state.get("link") or (0,)
        if sites == self._transport.world_size:
            self._resumed = LinkCosts(*link)
        if self._reducer is not None:
            self._reducer.add_rounding(self._rounding)
            self._reducer.expected = self._expected

    def share_state(self) -> None:
        """Share the state of the method, where sites share it; all sites must call it once training has begun."""
        if self._reducer is not None and self._method.traits.shares_state:
            self._reducer.share_state()

    def release(self, *, discard: bool = False) -> None:
        """Remove hooks and capture from the model; gradients that have arrived stay in ``.grad`` as autograd's would.

        One that is on its way to other sites, and not here any more, raises an error when a program reads it.

        Args:
            discard: drop gradients that have arrived instead.
        """
        self.on_release()
        for unit in self.units:
            unit.leave(discard=discard)
        self._capture.detach()

    # Plans

    def _begin_plan(self) -> None:
        """Partition the parameters into units, and watch for their gradients."""
        check_allowed(self._options)
        compress_dense = self._options.dense == "lowrank"
        private, masked = self._options.privacy is not None, GradientPath.MASKED in self._given
        found = partition_parameters(self._model, self._method, self._reasons.keys(), compress_dense, private, masked)
        self._capture, self.units, self._paths, self._notices = found
        count_together(self.units, self._transport.world_size)
        self._order: list[Unit] = []  # in which gradients arrive
        self._earlier = dict(self._reasons)
        self.is_complete = False
        named = {name for name, _ in self._model.named_parameters()} | {unit.name for unit in self.units}
        self._method.retain(named)  # frozen weights may be trained again
        self._rounding.retain(named)
        compressed = (unit for unit in self.units if unit.path == GradientPath.LOWRANK and isinstance(unit, FactorUnit))
        self._method.fit_budget([unit.shape for unit in compressed])
        for unit in self.units:
            self._watch(unit)
        show_inputs(self._method, self.units)

    def _watch(self, unit: Unit) -> None:
        unit.watch(self._arrived)
        unit.reduction = self._number

    def plan_anew(self) -> None:
        """Begin a new plan, which the next step completes; all sites must do so in the same step."""
        self.release()
        self._version += 1
        known = set(self._structure.parameters)
        with without_managed(self._model):
            if isinstance(self._model, SharedPart):
                self._model.follow()
            self._structure = ModelStructure(self._model)
            self._added |= {name for name, each in self._model.named_parameters() if id(each) not in known}
            self._begin_plan()

    @property
    def _has_sent(self) -> bool:
        return any(unit.sent and not unit.void for unit in self.units)

    def _new_gradients(self) -> list[str]:
        """Return the names of parameters that have a gradient and are not in the plan."""
        planned = {id(parameter) for unit in self.units for parameter in unit.parameters.values()}
        planned |= {id(each) for each in self._model.parameters() if is_managed(each)}
        trained = self._model.named_parameters()
        return [name for name, each in trained if each.grad is not None and id(each) not in planned]

    def _link_chains(self) -> bool:
        """Find the layers whose deltas are recomputed, with all sites; return whether any site had a gradient."""
        own = collect_chain_reports(self.units, self._capture)
        every = checked(self._transport.gather_present(own), ChainReports, "report", self._transport)
        found = merge_chain_reports([*every.values()], self.units)
        if found.seen and self._capture.tracer is not None:
            self._capture.tracer.stop_naming()
        if found.seen and not found.links:
            message = refusal(found, self._model, self._notices | self._reasons)
            if self._version == 0:
                raise ValueError(message)
            warnings.warn(message, stacklevel=5)
        self.units = link_units(self.units, found.links)
        self._notices = self._notices | found.remarks
        for unit in self.units:
            if isinstance(unit, ChainedUnit):
                self._watch(unit)
                self._paths |= dict.fromkeys(unit.parameters, unit.path)
        return found.seen

    def _unless_dense(self, unit: Unit, reason: str | None) -> list[Unit]:
        """Return a unit, or the dense units that replace it.

        Args:
            unit: the unit.
            reason: why its parameters are all-reduced; None if they are not.
        """
        if not isinstance(unit, FactorUnit) or reason is None:
            return [unit]
        known = self._reasons if unit.name in self._reasons else self._notices
        known |= dict.fromkeys(unit.parameters, reason)
        self._paths |= dict.fromkeys(unit.parameters, GradientPath.ALLREDUCE)
        units = unit.become_dense(self._capture, self._arrived)
        for each in units:
            each.reduction = self._number
        return units
