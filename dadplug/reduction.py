"""Gradient reduction: a model in, agreed gradients out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import chains, replicas
from .agreement import FirstStep, agree
from .batchnorm import SyncedBatchNorms
from .division import find_units
from .exchange import Traffic, open_transport
from .guards import check_model, refuse_unsynchronised
from .link import Link, measure_link
from .methods import Quality, make_method
from .methods.feedback import ErrorFeedback
from .options import Options
from .pipeline import Pipeline
from .plan import Plan, PlanRow
from .samples import SampleCounter
from .stages import DenseStage, stage_kind
from .units import DenseUnit, FactorUnit, Unit

_OTHER_SIZE = 1.5  # times as many samples, or as few, make a batch another size
_SOME_STEPS = 8


class GradientReduction:
    """Agrees on gradients between the sites of a process group, for any PyTorch training loop.

    At the start all sites get rank 0's parameters and buffers. During backward the gradients' payloads leave as soon
    as they are there; `synchronize` waits for the rest, after which every parameter's ``.grad`` is the same on every
    site: the mean over sites that one process with all sites' rows would compute, exactly or nearly.

    Args:
        model: the model, on its device, the same on all sites but for the values of its parameters.
        mode: name of a method, such as ``"dsgd"``, ``"dad"``, ``"rankdad"`` or ``"auto"``.
        process_group: the processes that are the sites; the default group where None. Without torch.distributed the
            site trains alone, by the same method.
        options: the other options, see `dadplug.options.Options`.

    Attributes:
        options: the options.
        traffic: the meter: bytes sent and time spent waiting.
        rank: number of this site.
        world_size: number of sites.
        stopped: whether some site has asked all to stop after the last step.
        share: this site's weight in the mean of the last step; None before the first.

    Raises:
        ValueError: if a mode, an option or its value is unknown; the message lists the valid ones.
        MismatchError: if models or options differ between sites.
        SiteError: if a site is gone or does not answer.

    Example:
        >>> reduction = GradientReduction(model, mode="rankdad", rank=4)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(inputs), targets).backward()
        ...     reduction.synchronize()
        ...     optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        mode: str = "rankdad",
        *,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.options = Options.create(mode=mode, **options)
        check_model(model)
        self.model = model
        self._parameters = list(model.parameters())
        self.traffic = Traffic()
        self.stopped = False
        self._step = 0
        self._version = 0
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._transport = open_transport(process_group, self.traffic, device, self.options.timeout)
        self.rank, self.world_size = self._transport.rank, self._transport.world_size
        settings = {name: getattr(self.options, name) for name in Options.names() if name != "timeout"}
        replicas.check_alike(model, settings, self._transport)
        replicas.broadcast_model(model, self._transport)
        self._counter = SampleCounter(model, self._follow_freezing)
        self._epoch_samples = 0
        self._norms: SyncedBatchNorms | None = None
        if self.options.sync_batchnorm:
            own = open_transport(process_group, self.traffic, device, self.options.timeout)
            self._norms = SyncedBatchNorms(model, own, self._counter if self.options.weighting == "samples" else None)
        self._method = make_method(self.options)
        self._renormalised = replicas.tables_with_max_norm(model)
        self._syncing = True
        self._pending = False
        self._reasons: dict[str, str] = {}
        self._pipeline: Pipeline | None = None
        self._rounding = ErrorFeedback(True)
        self._link: Link | None = None
        self._agreed_samples = 0
        self.share: float | None = None
        self._off_plan = 0
        self._reference = 0  # samples of a step, about; 0 before the first
        self._build()
        self._guard = register_optimizer_step_pre_hook(refuse_unsynchronised(self))
        self.traffic.start()

    def _build(self) -> None:
        """Divides the parameters into units, and watches their gradients arrive."""
        compress_dense = self.options.dense == "lowrank"
        found = find_units(self.model, self._method, set(self._reasons), compress_dense)
        self._capture, self._units, self._paths = found.capture, found.units, found.paths
        self._notices = found.reasons
        self._trained = self._trained_now()
        self._order: list[Unit] = []
        self._settled = False
        self._formed: list[str] = []  # weights whose factors became gradients when the plan changed under them
        for unit in self._units:
            unit.watch(self._arrived)

    def _trained_now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _arrived(self, unit: Unit) -> None:
        """Notes that a backward pass has delivered a unit's gradient; sends it if that was all of it."""
        unit.arrivals += 1
        self._pending = True
        if not self._settled:
            if unit not in self._order:
                self._order.append(unit)
        elif self._syncing and not unit.sent and unit.arrivals >= unit.expected > 0:
            assert self._pipeline is not None
            self._pipeline.arrive(unit)
        if not unit.sent and isinstance(unit, FactorUnit):
            unit.keep()

    def _samples(self) -> int:
        """Tells the samples that this site's gradients stand for so far in the step."""
        count = self._counter.count
        if count == 0 and self._pending:
            if self._counter.said is not None:
                count = self._counter.said
            elif self.options.weighting == "samples":
                count = 1
                if self.world_size > 1:
                    warnings.warn(
                        "cannot tell how many samples a step has, since the loss does not come from a call of the "
                        "model; each site counts the same. Say it by `with reduction.samples(n):` around forward",
                        stacklevel=3,
                    )
            else:
                count = 1
        return count if self.options.weighting == "samples" else int(self._pending and count > 0)

    def synchronize(self, *, stop: bool = False) -> None:
        """Waits until the gradients are agreed; call it between backward and the optimizer's step.

        After it, clip, unscale and step as usual. All sites must call it equally often.

        Args:
            stop: asks all sites to stop after this step; each then finds `stopped` set.

        Raises:
            NonFiniteError: on all sites, if the gradients of one hold NaN or Inf; ``zero_grad`` and go on, or stop.
            ValueError: on all sites, in the first step of mode edad, if the model has no chain of layers.
            SiteError: if a site is gone or does not answer in time.
            MismatchError: if the sites are not at the same step.
        """
        self._follow_freezing()
        for table in self._renormalised:
            replicas.renormalise(table)
        if not self._settled:
            self._settle()
        assert self._pipeline is not None
        try:
            notes = self._pipeline.finish(self._step, stop)
            self.stopped = any(note.stop for note in notes)
            self._agreed_samples = sum(note.samples for note in notes)
            self.share = notes[self.rank].samples / self._agreed_samples if self._agreed_samples else 0.0
            if not self._settled:
                self._pipeline = None  # no site has had any data yet
        finally:
            self._epoch_samples += self._counter.count
            self._end_step()
        self._follow_sizes([note.samples for note in notes])

    def _end_step(self) -> None:
        for unit in self._units:
            unit.begin_step()
        self._counter.reset()
        if self._norms is not None:
            self._norms.end_step()
        self.traffic.end_step()
        self._pending = False
        self._step += 1

    def _follow_freezing(self) -> None:
        """Makes a new plan if parameters have been frozen or freed; gradients that have arrived are kept."""
        if self._trained == self._trained_now():
            return
        formed = []
        for unit in self._units:
            if isinstance(unit, FactorUnit) and unit.rows:
                unit.form_gradients()
                formed.append(unit.name)
            unit.release()
        self._capture.detach()
        self._version += 1
        self._build()
        self._formed = formed

    def _follow_sizes(self, samples: Sequence[int]) -> None:
        """Chooses anew, where the method chooses, once batches have had another size for some steps."""
        if not self._method.chooses or not any(samples):
            return
        off = not self._planned_for / _OTHER_SIZE <= max(samples) <= self._planned_for * _OTHER_SIZE
        self._off_plan = self._off_plan + 1 if off else 0
        if self._off_plan >= _SOME_STEPS:
            for unit in self._units:
                unit.release()
            self._capture.detach()
            self._version += 1
            self._build()

    def _settle(self) -> None:
        """Agrees, in the first step of a plan, on what only a step can show: the order of units, and special cases."""
        if self._pipeline is not None:
            self._rounding = self._pipeline.rounding()
            self._pipeline.retire(self._step, self._version)
        if self._method.chooses and self._link is None:
            with self.traffic.apart():
                self._link = measure_link(self._transport)
        own = FirstStep.of(self._units, self._order, self.options.share_inputs, self._samples(), self._link)
        agreed = agree(self._transport.gather_objects(own), self._units, self._method)
        self._reasons = agreed.reasons | self._reasons
        self._chosen, self._planned_for, self._off_plan = agreed.chosen, agreed.largest, 0
        self._notices |= agreed.notices
        self._units = [new for unit in self._units for new in self._allreduce_if_told(unit)]
        self._reference = self._reference or agreed.samples
        self._settled = not self._method.chains or self._find_chains()
        self._pipeline = Pipeline(
            chains.followers_first(agreed.order(self._units)),
            self._method,
            self._transport,
            self.options,
            agreed.rows,
            self._samples,
            self._reference,
            self._version,
        )
        self._pipeline.add_rounding(self._rounding)
        self.traffic.dense_bytes = sum(self._dense_bytes(p) for p in self.model.parameters() if p.requires_grad)
        for unit in self._units:
            unit.dense |= unit.name in self._formed

    def _find_chains(self) -> bool:
        """Agrees on the layers whose deltas are recomputed; says whether there was anything to see yet."""
        found = chains.agree(self._transport.gather_objects(chains.look(self._units, self._capture)), self._units)
        if found.seen and self._capture.tracer is not None:
            self._capture.tracer.stop_naming()
        if found.seen and not found.links:
            message = chains.refusal(found, self.model, self._notices | self._reasons)
            if self._version == 0:
                raise ValueError(message)
            warnings.warn(message, stacklevel=4)
        self._units = chains.chain_up(self._units, found.links)
        self._notices = self._notices | found.notes
        for unit in self._units:
            if isinstance(unit, chains.ChainedUnit):
                unit.watch(self._arrived)
                self._paths |= dict.fromkeys(unit.parameters, unit.path)
        return found.seen

    def _allreduce_if_told(self, unit: Unit) -> list[Unit]:
        """Moves a unit to the dense path if a site has found a reason to; returns the units that it becomes."""
        reason = self._reasons.get(unit.name) or self._chosen.get(unit.name)
        if not isinstance(unit, FactorUnit) or reason is None:
            return [unit]
        unit.form_gradients()
        unit.release()
        for layer in unit.layers:
            self._capture.release(layer.name)
        units: list[Unit] = []
        for name, parameter in unit.parameters.items():
            new = DenseUnit(name, parameter)
            new.arrivals = unit.arrivals
            new.watch(self._arrived)
            self._paths[name] = "allreduce"
            (self._reasons if unit.name in self._reasons else self._notices)[name] = reason
            units.append(new)
        return units

    def idle(self, *, stop: bool = False) -> None:
        """Takes part in a step without data: contributes nothing, and gets the agreed gradients like everybody.

        For a site that has run out of batches while others have not; follow it by the optimizer's step. Inside
        `no_sync` it stands for one micro-batch.

        Args:
            stop: as in `synchronize`.
        """
        if self._norms is not None:
            self._norms.idle()
            self._norms.end_step()
        if self._syncing:
            self.synchronize(stop=stop)

    def join(self, step: Callable[[], object] | None = None) -> None:
        """Takes part in the others' steps until all sites have come here: for a site whose batches are at an end.

        All sites must call it, each after its last batch. Clears gradients before each step.

        Args:
            step: called after each step that has been agreed on, like ``optimizer.step``.

        Example:
            >>> for inputs, targets in loader:
            ...     train(inputs, targets)
            >>> reduction.join(optimizer.step)
        """
        while True:
            self.model.zero_grad()
            self.idle()
            if not self._agreed_samples:
                return
            if step is not None:
                step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Holds gradients back, for accumulation: they go with the next `synchronize` after it."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before
            if self._norms is not None:
                self._norms.end_step()

    @property
    def syncing(self) -> bool:
        """Whether gradients are sent as they arrive; False inside `no_sync`."""
        return self._syncing

    def samples(self, count: int) -> Any:
        """Says how many samples the forward passes inside have in all, where the inputs do not tell.

        Args:
            count: number of samples; with 0, a loss of zero is expected, and the site has no weight in the mean.

        Returns:
            A context manager.
        """
        return self._counter.fixed(count)

    @property
    def plan(self) -> Plan:
        """Which parameter takes which path, and what it costs; final after the first step."""
        rows = []
        by_name = {name: unit for unit in self._units for name in unit.parameters}
        for name, parameter in self.model.named_parameters():
            unit, dense_bytes = by_name.get(name), self._dense_bytes(parameter)
            nbytes = dense_bytes
            if unit is None:
                nbytes = dense_bytes = 0
            elif isinstance(unit, FactorUnit):
                nbytes = self._factor_bytes(unit, name)
            elif self._pipeline is not None and self._settled:
                nbytes = self._pipeline.sent_bytes(unit)
            else:
                kind = stage_kind(unit.path)
                assert issubclass(kind, DenseStage)
                nbytes = kind.payload_bytes(unit, self._method, self.options.wire, self.world_size)
            reason = self._reasons.get(name) or self._notices.get(name, "")
            rows.append(PlanRow(name, tuple(parameter.shape), self._paths[name], nbytes, dense_bytes, reason))
        return Plan(rows, self.options.mode, self.world_size)

    def _factor_bytes(self, unit: FactorUnit, name: str) -> int:
        size = self._wire_bytes(unit.lead)
        if name != unit.name:
            return (self.world_size - 1) * size * unit.parameters[name].numel() * self._method.sends_bias
        if self._pipeline is not None and self._settled:
            rows = self._pipeline.room(unit)
        else:
            rows = self._method.rows_sent(1, *unit.shape)
        return (self.world_size - 1) * size * rows * sum(unit.widths)

    def _wire_bytes(self, parameter: nn.Parameter) -> int:
        return {"bf16": 2, "int8": 1}.get(self.options.wire, parameter.element_size())

    def _dense_bytes(self, parameter: nn.Parameter) -> int:
        return int(2 * (self.world_size - 1) / self.world_size * parameter.numel() * parameter.element_size())

    @property
    def quality(self) -> dict[str, Quality]:
        """Effective rank and relative residual of this site's compressed gradients, by name of the weight."""
        return self._method.quality()

    @property
    def pending(self) -> bool:
        """Whether gradients have arrived that are not agreed on yet."""
        return self._pending

    @property
    def step(self) -> int:
        """Number of steps that have been agreed on, those before a resumption included."""
        return self._step

    @property
    def max_rank(self) -> int | None:
        """The largest rank of a layer's compressed gradient; None for methods without.

        May be set at any time, at each site to another value: the next step's gradients have it.
        """
        return self._method.max_rank

    @max_rank.setter
    def max_rank(self, rank: int) -> None:
        if self._method.max_rank is None:
            raise ValueError(f"mode {self.options.mode!r} has no rank to set")
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}")
        self._method.max_rank = rank

    @property
    def sites(self) -> list[str]:
        """The sites by name, for messages."""
        return [self._transport.sites[rank] for rank in range(self.world_size)]

    def average_buffers(self) -> None:
        """Averages running statistics and other float buffers over sites, so that all evaluate one model.

        All sites must call it; the runners do before evaluation and at checkpoints.
        """
        weight = float(self._epoch_samples) if self.options.weighting == "samples" else 1.0
        with self.traffic.apart():
            replicas.average_buffers(self.model, self._transport, weight)
        self._epoch_samples = 0

    def first_difference(self) -> str | None:
        """Compares the sites' parameters to the bit; all sites must call it.

        Returns:
            The name of the first parameter that differs, or None if the replicas are equal.
        """
        with self.traffic.apart():
            return replicas.first_difference(self.model, self._transport)

    def gather_objects(self, item: Any) -> list[Any]:
        """Gathers a picklable object from every site, by rank; all sites must call it."""
        with self.traffic.apart():
            return self._transport.gather_objects(item)

    def abort(self, reason: str) -> None:
        """Tells the other sites why this one is about to end; they read it once they miss it."""
        self._transport.sites.announce(reason)

    def state_dict(self) -> dict[str, Any]:
        """Returns this site's state beside the model's: what the compressor carries from step to step.

        It involves no other site. Each site may save its own; one that gets another's starts a little colder.
        """
        if self._pipeline is not None:
            self._rounding = self._pipeline.rounding()
        rounding, method = self._rounding.state_dict(), self._method.state_dict()
        return {
            "step": self._step,
            "mode": self.options.mode,
            "reference": self._reference,
            "method": method,
            "rounding": rounding,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        With powersgd, whose state sites share, all sites must call it once training has begun.

        Raises:
            ValueError: if the state is of another mode.
        """
        if state["mode"] != self.options.mode:
            raise ValueError(f"the state is of mode {state['mode']!r}, this reduction of {self.options.mode!r}")
        self._step = state["step"]
        self._method.load_state_dict(state["method"])
        self._rounding.load_state_dict(state["rounding"])
        self._reference = self._reference or state["reference"]
        if self._pipeline is not None:
            self._pipeline.add_rounding(self._rounding)
            if self._method.shares_state:
                self._pipeline.share_state()

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores this site's state among those of all sites, as a checkpoint holds them.

        A site that has none there, for it is new or the checkpoint was written after others had gone, takes the step
        over and begins with a cold compressor.

        Raises:
            ValueError: if the states are of another mode.
        """
        if self.rank < len(states):
            self.load_state_dict(states[self.rank])
        elif states:
            self.load_state_dict(
                states[0] | {"method": self._method.state_dict(), "rounding": ErrorFeedback(True).state_dict()}
            )

    def detach(self) -> None:
        """Takes everything off the model, which then trains alone. May be called twice."""
        for unit in self._units:
            unit.release()
        self._capture.detach()
        self._counter.detach()
        if self._norms is not None:
            self._norms.detach()
        self._guard.remove()
