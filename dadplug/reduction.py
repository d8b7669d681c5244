"""Gradient reduction between sites, for any PyTorch training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .errors import DroppedError, SiteError
from .exchange import Transport
from .exchange.calls import own_place
from .exchange.fields import check_kinds
from .exchange.rounds import Spent
from .hooks.factor import Write
from .options import Options
from .step.fused.held import FusedSteps
from .step.fused.products import Deferral
from .step.methods import Quality, feedback, make_method
from .step.methods.feedback import ErrorFeedback, LossScales
from .step.model_sync.backward_end import BackwardEnd, as_written
from .step.model_sync.comparisons import Comparisons
from .step.model_sync.private import LocalGradients
from .step.model_sync.replicated_model import JoinState, ReplicatedModel, Stateful, load_joined, named
from .step.model_sync.sameness import FirstBatch
from .step.model_sync.samples import SampleCounter, warn_of_unequal
from .step.model_sync.site_sum import add_up
from .step.model_sync.step_guard import StepGuard
from .step.model_sync.structure import ModelStructure, weak_hook
from .step.planning.choice import Choice
from .step.planning.merging import check_merge, settle_merge
from .step.planning.plan import Plan
from .step.planning.planner import Planner
from .step.reducer.handler import StepHeader
from .step.reducer.reducer import AttachedGradients, StepRequest
from .step.units.base import Unit, drop_cleared
from .support.logs import get_logger
from .support.signature import check_choice, takes_keywords_of, whole_number

if TYPE_CHECKING:
    from .adaptive.noise import GradientNoise
    from .privacy.private_gradients import PrivateGradients
    from .step.model_sync.batchnorm import SyncedBatchNorms

_log = get_logger(__name__)
SYNCHRONIZES = ("call", "backward")


class GradientReduction(FusedSteps, ReplicatedModel):
    """Reduction of gradients between the sites of a process group, for any PyTorch training loop.

    At the start all sites get rank 0's parameters and buffers. Payloads of gradients are sent during backward, as soon
    as they are complete. `synchronize` waits for the rest. After it, every parameter's ``.grad`` is the same on every
    site: the mean over sites that one process with the rows of all sites would compute, exactly or approximately, as
    the mode says.

    Args:
        model: the model, on its device, the same on all sites but for the values of its parameters.
        mode: name of a method, such as ``"dsgd"``, ``"dad"``, ``"rankdad"`` or ``"auto"``.
        process_group: the processes that are the sites; the default group where None. Without torch.distributed the
            site trains alone, by the same method.
        state: objects with ``state_dict`` and ``load_state_dict`` by name, such as optimizer and scheduler, that a site
            needs to join in mid-training, with ``min_sites``.
        synchronize: ``"call"``: the program calls `synchronize`. ``"backward"``: each backward pass outside of
            `no_sync` ends with it, for trainers whose step cannot be edited. All sites make the same number of these
            passes.
        options: the other options, see `dadplug.options.Options`.

    Attributes:
        model: the model.
        options: the options.
        traffic: the meter of bytes sent and of time spent waiting.
        site_rank: number of this site, from 0.
        world_size: number of sites.
        stopped: whether some site has asked all to stop after the last step.
        share: this site's weight in the mean of the last step; None before the first.
        contributors: ranks of the sites that had data in the last step.
        on_arrival: called when a backward pass has delivered a gradient.
        before_idle: called when a step without data begins.
        after_step: functions that are called after each step, when its gradients have been agreed on.
        backward_end: what synchronizes at the end of backward passes; None with ``synchronize="call"``.

    Raises:
        ValueError: if a mode, an option or its value is unknown; the message lists the valid ones.
        PolicyError: if the kit by which this site is connected to a hub does not allow an option.
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

    @takes_keywords_of(Options)
    def __init__(
        self,
        model: nn.Module,
        mode: str = "rankdad",
        *,
        process_group: dist.ProcessGroup | None = None,
        state: Mapping[str, Stateful] | None = None,
        synchronize: str = "call",
        **options: Any,
    ) -> None:
        check_choice("synchronize", synchronize, SYNCHRONIZES)
        super().__init__(model, process_group, Options.create(mode=mode, **options))
        self._step = 0
        self._method = make_method(self.options)
        self._attached: AttachedGradients | None = LocalGradients(self.shared) if self.options.private else None
        self.stopped = False
        self._counter = SampleCounter(
            model,
            weak_hook(self._before_forward),
            weak_hook(self._drop_cleared),
            self._by_samples,
            weak_hook(self._has_arrived),
        )
        self._private = self._make_private()
        self._idles = False  # in a step without data
        self._abstains = False  # in a step without data that is not to be a private one
        self._norms: SyncedBatchNorms | None = None
        if self.options.sync_batchnorm:
            from .step.model_sync.batchnorm import SyncedBatchNorms

            transport = self._open_transport(process_group)
            self._norms = SyncedBatchNorms(self.shared, transport, self._counter, announces=True)
        self._syncing = True
        self._agreed_samples = 0
        self.share: float | None = None
        self.contributors: list[int] = []
        self.on_arrival: Callable[[], object] = bool  # which does nothing, without a call of Python's
        self.before_idle: Callable[[], None] = lambda: None
        self.after_step: list[Callable[[], None]] = []
        self._noise: GradientNoise | None = None
        self._planner = self._make_planner()
        compares_data = self.world_size > 1 and self._joined is None and self._private is None
        self._counter.first_batch = FirstBatch() if compares_data else None
        self._comparisons = Comparisons(self.shared, self.options, self._counter.first_batch)
        self._guard = StepGuard(weakref.proxy(self), self._comparisons.settings)
        self._remembers = False  # the loss scales of gradients
        if self._method.keeps_errors or self._private is not None:
            self._watch_loss_scales()
        self._further = self._stateful(state)
        if self._joined is not None:
            self._adopt(self._joined)
        self.backward_end = self._make_backward_end() if synchronize == "backward" else None
        self._transport.rounds.donate = weak_hook(self._donate)
        self._attach()

    def _make_backward_end(self) -> BackwardEnd:
        """Synchronize at the end of backward passes from now on."""
        this = weakref.proxy(self)
        made = BackwardEnd(
            self.model, weak_hook(self.end_backward), lambda: this.misses_gradients, lambda: this.syncing
        )
        self._counter.on_outputs.append(made.watch)
        self.on_arrival = made.arrived
        return made

    def end_backward(self) -> None:
        """Synchronize at the end of a backward pass, also of one that has reached no parameter."""
        self.take_part()
        self._exchange()

    def _make_private(self) -> PrivateGradients | None:
        if self.options.privacy is None:
            return None
        from .privacy.private_gradients import PrivateGradients  # which most runs do not need

        this = weakref.proxy(self)
        private = PrivateGradients(
            self.model,
            self.options.privacy,
            self._counter,
            lambda: this._method.loss_scales.present().value,
            weak_hook(self._begin_private),
            weak_hook(self._private_arrived),
        )
        private.may_wait = lambda: this._planner.forms_late()  # the planner may be replaced
        if self.options.privacy.secure_sum:
            private.sum_securely(self.site_rank, self.world_size)
        return private

    def _watch_loss_scales(self) -> None:
        """Observe the loss scale of each gradient from now on."""
        if not self._remembers:
            self._remembers = True
            feedback.watch()
            self._unwatch = weakref.finalize(self, feedback.unwatch)

    def _arrived(self, unit: Unit) -> None:
        """Record that a backward pass has delivered a unit's gradient; send the gradient if it is complete."""
        counter = self._counter
        if counter.undelivered:
            counter.deliver()
        if self._private is not None:  # gradients arrive all together
            return
        if self._held is not None:
            raise RuntimeError("backward() between clip_grad_norm_() and apply(optimizer)")
        counter.pending = True
        if self._remembers and LossScales.scaled:
            self._method.loss_scales.record(unit.name)
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(unit.lead.device.type):
            with as_written(unit.lead.device.type):
                self._planner.record_arrival(unit, self._syncing, counter.owned)
        else:
            self._planner.record_arrival(unit, self._syncing, counter.owned)
        self.on_arrival()

    def _before_forward(self) -> None:
        if self.backward_end is not None:
            self.backward_end.begin()
        self._planner.before_forward()
        if self._private is not None:
            self._private.before_forward()

    def _begin_private(self) -> None:
        """Record the loss scale of a backward pass whose gradients are to be private."""
        if self._held is not None:
            raise RuntimeError("backward() between clip_grad_norm_() and apply(optimizer)")
        scales = self._method.loss_scales
        for unit in self._planner.units:
            scales.record(unit.name)

    def _private_arrived(self) -> None:
        self._counter.pending = True
        self.on_arrival()

    def _drop_cleared(self) -> None:
        """Discard what has arrived for parameters whose gradients the program has cleared since."""
        cleared = drop_cleared(self._planner.units)
        if self._private is not None and self._private.holds_gradients:
            cleared.append(self._private.drop_cleared())
        if self._attached is not None and self._attached.arrived:
            cleared.append(self._attached.cleared)
        if cleared and all(cleared):
            self._counter.discard()
            self._counter.pending = False
            if self._noise is not None:
                self._noise.discard()

    def _samples(self) -> int:
        """Return the weight of this site's private gradients: how many samples a batch has is private, too."""
        assert self.options.privacy is not None
        return 0 if self._abstains else self.options.privacy.expected_batch

    def _batch(self) -> int:
        """Samples of this site in the step, as far as they are known and not private; 0 where they are not."""
        return self._counter.count if self.options.privacy is None else self.options.privacy.expected_batch

    def take_part(self) -> None:
        """Count this site in the step, also where its backward pass has reached no parameter."""
        self._counter.pending = True
        self._counter.deliver()

    def weigh_by_dealt(self, samples: int | None) -> None:
        """State the samples of the next steps, which are the site's weight in them, whatever `weighting` says.

        For loaders that deal batches to all sites, and call it at all of them before the same step.

        Args:
            samples: samples that this site gets in a step; None for weights by `weighting` again.
        """
        self._counter.dealt = samples

    def _open_transport(self, process_group: dist.ProcessGroup | None) -> Transport:
        transport = super()._open_transport(process_group)
        check_merge(self.options, transport)
        self.options = settle_merge(self.options, transport)
        return transport

    @property
    def plan(self) -> Plan:
        """The path of every parameter and the bytes that it costs; final after the first step. Prints as a table."""
        return self._planner.plan.with_remarks(self.remarks)

    @property
    def choice(self) -> Choice | None:
        """Rank that ``rank="auto"`` has chosen, and the times by which; None where no rank is chosen."""
        choice = self._planner.choice
        return None if choice is None or choice.given else choice.choice

    def epsilon(self, delta: float, *, insiders: int = 0) -> float:
        """Return what all steps so far have cost the records of this site, by Opacus's PRV accountant.

        It holds for each record of this site by itself: sites whose records are their own do not add up theirs. A hub
        shows the last value in its status, but for those with `insiders`.

        Args:
            delta: the delta, below one over the number of the site's records.
            insiders: with ``secure_sum``, number of sites that put together what they know: 0 for those who see the
                sum alone, 1 for another site, which knows its own part of the noise.

        Raises:
            ValueError: if a value is out of its range, or the reduction has no `privacy`.
            ImportError: if Opacus is not installed.
        """
        if self._private is None:
            raise ValueError("epsilon() needs privacy=DifferentialPrivacy(...)")
        epsilon = self._private.ledger.epsilon(delta, insiders)
        if not insiders:
            self._transport.rounds.show(Spent(epsilon, delta))
        return epsilon

    @property
    def quality(self) -> dict[str, Quality]:
        """Effective rank and relative residual of this site's compressed gradients, by name of the weight."""
        return self._method.quality()

    @property
    def step(self) -> int:
        """Number of steps that have been agreed on, those before a resumption included."""
        return self._step

    @property
    def max_rank(self) -> int | None:
        """The largest rank of a layer's compressed gradient; None for methods without.

        May be set at any time, at each site to another value: the next step's gradients have it. Where owners merge
        and have less room, after a choice of ``rank="auto"``, they get more by the next choice.
        """
        return self._method.max_rank

    @max_rank.setter
    def max_rank(self, rank: int) -> None:
        if self._method.max_rank is None:
            raise ValueError(f"mode {self.options.mode!r} has no rank to set")
        whole_number(1)("rank", rank)
        if self.options.merge != "all" and rank > self.options.largest_rank:
            most = self.options.largest_rank
            raise ValueError(f"where owners merge, the rank is at most {most}, got {rank}: pass merge='all' for more")
        self._method.max_rank = rank
        if self._planner.choice is not None:
            self._planner.choice.given = True

    def synchronize(self, *, stop: bool = False) -> None:
        """Exchange what is left of the gradients, and write the agreed ones to ``.grad``.

        Call it between backward and the optimizer's step, on all sites equally often. Clip and unscale gradients after
        it. Where no gradient has come since the last step, it is `idle`.

        Args:
            stop: whether to ask all sites to stop after this step; `stopped` is then set on each of them.

        Raises:
            NonFiniteError: on all sites, if the gradients of one hold NaN or Inf; ``zero_grad`` and go on, or stop.
            RuntimeError: with ``synchronize="backward"``, where no gradient has arrived since backward synchronized.
            ValueError: on all sites, in the first step of mode edad, if the model has no chain of layers.
            SiteError: if a site is gone or does not answer in time.
            MismatchError: if the sites are not at the same step, or if it is called twice after one backward pass.
        """
        self._exchange(stop)

    def _exchange(self, stop: bool = False, *, deferral: Deferral | None = None) -> None:
        if self._held is not None:
            raise RuntimeError("after clip_grad_norm_() of gradients that are not formed, call apply(optimizer)")
        if self.backward_end is not None and not (self._idles or self.pending or self._planner.holds_own_gradients):
            raise RuntimeError("backward() has synchronized: leave out synchronize(), apply() and clip_grad_norm_()")
        if not (self._idles or self._counter.pending or self._has_arrived() or self._planner.holds_own_gradients):
            self._guard.check_used(None if stop else self._counter.forwards)
            self._planner.drop_earlier()  # as in idle()
        while True:
            try:
                with as_written(self._transport.device.type):
                    self._synchronize(stop, deferral)
                break
            except DroppedError:
                self._rejoin()
            except SiteError as error:  # of another site or the network, so that a traceback of dadplug would not help
                _log.debug("the step has failed", exc_info=error)
                raise error.with_traceback(None) from None
        for function in tuple(self.after_step):
            function()

    def _look_for_changes(self) -> None:
        """Look for gradients that the program has cleared, replaced or changed since backward."""
        self._drop_cleared()
        if self._by_samples and not (self._counter.pending or self._idles) and self._planner.holds_written_gradients:
            self._counter.count_replaced()
        if self._private is None:
            self._guard.warn_of_changes(self._planner.units, self._step)

    def _synchronize(self, stop: bool, deferral: Deferral | None) -> None:
        planner = self._planner
        self._look_for_changes()
        unformed: dict[str, Write] = {}
        if self._private is not None and not self._abstains:
            scale = self._method.loss_scales.of(planner.units[0].name) if planner.units else 1.0
            unformed = self._private.privatise(scale)
        elif self._private is not None:
            self._private.abstain()
        planner.before_synchronization()
        planner.hold_unformed(unformed)
        if self._norms is not None:
            self._norms.end_micro_batches()
        self._counter.pending |= planner.holds_gradients or self._has_attached()
        if not self._counter.pending and not self._idles and self._private is None:
            self._counter.pending = planner.holds_own_gradients
        self._counter.follow()
        if self._private is None:
            self._counter.weight(provisional=self.world_size == 1)  # raises where it has to be stated
        stop = add_up(planner.units, stop, self._transport.inside, self._counter, self._method.loss_scales)
        batch = self._batch()
        if not planner.is_complete:
            planner.complete_plan(self._step, batch)
            if self._step == 0 and not self._by_samples and self._counter.dealt is None and self._private is None:
                warn_of_unequal(planner.batches)
        try:
            wish = self._noise.wish if self._noise else 0
            headers = planner.exchange(
                StepRequest(
                    self._step,
                    stop,
                    self._attached,
                    noise_every=wish,
                    settings=self._comparisons.settings.take(),
                    digest=0 if self.world_size == 1 else self._comparisons.digest(self._step),
                    batch=batch,
                    deferral=None if wish else deferral,  # estimates read the gradients
                    counts=self._by_samples or self._counter.dealt is not None or self.options.privacy is not None,
                    before_end=planner.review,
                )
            )
            if self.site_rank not in self._transport.rounds.absent:
                with self.traffic.apart():
                    self._comparisons.compare(headers, self._step, self._transport)
            self.stopped = any(map(attrgetter("stop"), headers))
            self._agreed_samples = sum(map(attrgetter("samples"), headers))
            self.contributors = [rank for rank, header in enumerate(headers) if header.samples]
            self.share = headers[self.site_rank].samples / self._agreed_samples if self._agreed_samples else 0.0
            if self._attached is not None and all(map(attrgetter("finite"), headers)):
                self._attached.apply_share(self.share)
            elif self._attached is not None:
                self._attached.fill_with_inf()
            self._measure_noise(headers)
        finally:
            self._count(batch)
            self._end_step()
        planner.follow_sizes([header.batch for header in headers])
        if self._noise is not None:
            self._noise.prepare(self.shared, planner.units, self._counter, self._step)

    def _measure_noise(self, headers: Sequence[StepHeader]) -> None:
        """Update the estimates of the gradient's noise, if some site has asked for them."""
        if self._noise is None and not any(map(attrgetter("noise_every"), headers)):
            return
        noise = self._make_noise()
        samples = (self._batch() or 1) if self._counter.pending else 0
        with self.traffic.apart(), suppress(DroppedError):  # this site gets the estimates of another one
            planner, scales = self._planner, self._method.loss_scales
            noise.measure(self._step, headers, samples, planner.units, self._transport, scales)

    def _make_noise(self) -> GradientNoise:
        if self._noise is None:
            if self._transport.inside is not None:
                raise ValueError("estimates of the gradient's noise with min_sites go with one process at each site")
            from .adaptive.noise import GradientNoise  # it stands on the reduction, and few trainings need it

            self._noise = GradientNoise()
            self._watch_loss_scales()
        return self._noise

    @property
    def noise(self) -> GradientNoise:
        """Noise of the gradient: variance, squared norm, noise scale, and the gain of AdaScale.

        Reading it at one site or more turns the estimates on at all of them, from the next step on.
        """
        if self._private is not None:
            raise RuntimeError("privacy: estimates of the gradient's noise show more than private gradients do")
        noise = self._make_noise()
        noise.turn_on()
        return noise

    @property
    def gain(self) -> float:
        """AdaScale's gain of the last step's batch against `noise.base_batch`; 1.0 before the first estimate."""
        return self.noise.gain()

    def _end_step(self) -> None:
        self._end_probe()
        if self._private is not None:
            self._private.end_step()
        self._planner.end_step()
        self._counter.reset()
        self._method.loss_scales.end_step()
        if self._norms is not None:
            self._norms.end_step()
        self.traffic.end_step()
        self._counter.pending = False
        self._step += 1
        self._guard.record_agreement(self._planner.units, self._counter.forwards)
        own_place.step = self._step
        if self._transport.rounds.grows or self._planner.outgrown:
            self._transport.rounds.grow()
            self.world_size = self._transport.world_size
            self._planner.grow()
        self._planner.follow_choice()

    def idle(self, *, stop: bool = False) -> None:
        """Take part in a step without data: contribute nothing, and get the agreed gradients.

        For a site that has run out of batches while others have not. The optimizer's step follows it. Gradients of
        earlier steps that are still in ``.grad`` do not count, and are replaced. Inside `no_sync` it stands for one
        micro-batch. With `privacy` it is a step with an empty batch, whose noise is sent and counted, so that it looks
        like any other step.

        Args:
            stop: whether to ask all sites to stop, as in `synchronize`.

        Raises:
            RuntimeError: with ``sync_batchnorm``, in the first step.
            SiteError: as in `synchronize`, like its other errors.
        """
        if self._syncing:
            self.before_idle()
            self._planner.drop_earlier()
            self._idles = True
            try:
                self.synchronize(stop=stop)
            finally:
                self._idles = False
        elif self._norms is not None:
            self._norms.idle_micro_batch()

    def join(self, step: Callable[[], object] | None = None) -> None:
        """Take part in the steps of the other sites, without data, until all sites have called it.

        All sites must call it, each after its last batch. It clears the gradients before each step.

        Args:
            step: called after each synchronization, such as ``optimizer.step``.

        Example:
            >>> for inputs, targets in loader:
            ...     train(inputs, targets)
            >>> reduction.join(optimizer.step)
        """
        self._abstains = True
        try:
            while True:
                self.model.zero_grad()
                self.idle()
                if not self._agreed_samples:
                    return
                if step is not None:
                    step()
        finally:
            self._abstains = False

    def without_comparison(self) -> AbstractContextManager[None]:
        """Leave this site's weights out of comparisons inside a ``with`` block, since others' will replace them."""
        return self._comparisons.paused()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold gradients back, for accumulation: the next `synchronize` after the block sends them.

        Example:
            >>> with reduction.no_sync():
            ...     criterion(model(first), first_targets).backward()
            >>> criterion(model(second), second_targets).backward()
            >>> reduction.synchronize()
        """
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
        """State the number of samples of the forward passes inside, where the inputs' first dimension is not that.

        Args:
            count: number of samples of all these passes; with 0 the site has no weight in the mean, and its loss must
                be zero.

        Returns:
            A context manager.

        Example:
            >>> with reduction.samples(graph.num_nodes):
            ...     outputs = model(graph)
        """
        return self._counter.fixed(count)

    def loss_scale(self, scale: float) -> Any:
        """State the factor by which the losses of the backward passes inside are multiplied.

        Error memory and rounding to int8 need it. The scale of `torch.amp.GradScaler` is found without it. A site
        without a batch calls `idle` inside, where the scale changes between steps.

        Args:
            scale: the factor.

        Returns:
            A context manager.
        """
        return self._method.loss_scales.stated(scale)

    @property
    def pending(self) -> bool:
        """Whether gradients have arrived that are not agreed on yet, and have not been cleared."""
        self._drop_cleared()
        return self._counter.pending or self._held is not None

    @property
    def present_structure(self) -> ModelStructure | None:
        """Structure of the model by which the plan was made; None where the model has another one now."""
        return self._planner.present_structure

    @property
    def misses_gradients(self) -> bool:
        """Whether parameters that have taken the place of others have gradients of which nothing has been noticed."""
        return self._planner.misses_gradients

    def _has_arrived(self) -> bool:
        """Return whether there are gradients that no unit has noticed."""
        return self._has_attached() or self.misses_gradients

    def _has_attached(self) -> bool:
        return self._attached is not None and self._attached.arrived and not self._attached.cleared

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state beside the model's: what the compressor carries from step to step.

        It involves no other site. Each site may save its own. A site that loads the state of another one approximates
        its gradients less well at first.
        """
        own = {"step": self._step, "mode": self.options.mode, "method": self._method.state_dict()}
        noise = {} if self._noise is None else {"noise": self._noise.state_dict()}
        private = {} if self._private is None else {"privacy": self._private.ledger.state_dict()}
        return own | self._planner.state_dict() | noise | private

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        In mode powersgd, where sites share state, all sites must call it once training has begun.

        Args:
            state: the state.

        Raises:
            ValueError: if the state is of another mode or way to train.
            DamagedError: if it is damaged; nothing of it has been loaded then.
        """
        self._check_state(state, "mode", self.options.mode)
        self._load_whole(self._restore, state)
        self._planner.share_state()

    def _restore(self, state: dict[str, Any]) -> None:
        whole_number(0)("step", state["step"])
        check_kinds(state, {"step": int})  # of 64 bits
        self._step = state["step"]
        self._method.load_state_dict(state["method"])
        self._planner.load_state_dict(state)
        if state.get("noise") is not None:
            self._make_noise().load_state_dict(state["noise"])
        if self._private is not None and "privacy" in state:
            self._private.ledger.load_state_dict(state["privacy"])

    def _state_after(self, state: dict[str, Any]) -> dict[str, Any]:
        rank = {name: value for name, value in state["method"].items() if name == "rank"}
        empty = {"method": self._method.state_dict() | rank, "rounding": ErrorFeedback(True).state_dict()}
        self._count_earlier_steps(state["step"])
        return {name: value for name, value in state.items() if name != "privacy"} | empty

    def load_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        super().load_states(states)
        for rank, state in enumerate(states):
            if state is not None:
                with named(rank):
                    self._method.load_from(state["method"])

    def attach(self, gradients: AttachedGradients) -> None:
        """Weight, check and drop gradients that this reduction does not send with those that it sends.

        Args:
            gradients: gradients of parameters that are managed elsewhere.
        """
        if self._private is not None:
            raise ValueError("privacy: gradients of parameters that are managed elsewhere are not clipped by sample")
        if self.options.private or self.options.clip_sites is not None:
            raise ValueError(
                "private= and clip_sites= do not go with parameters that are managed elsewhere: leave them out"
            )
        self._attached = gradients

    def _donate(self) -> JoinState:
        """Return what a site needs to join now."""
        return self._join_state(self._step, self._planner.plan_state())

    def _join_state(self, step: int, plan: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> JoinState:
        state = super()._join_state(step, plan, tensors)
        return state if self._noise is None else replace(state, noise=self._noise.state_dict())

    def _adopt(self, joined: JoinState) -> None:
        """Go on from the state of another site."""
        if joined.noise is not None:
            load_joined("noise", self._make_noise().load_state_dict, joined.noise)
        self._count_earlier_steps(joined.step - self._step)
        self._step = joined.step
        self._comparisons.weights.last = 0
        self._planner.adopt(joined.plan)
        self._join(joined)

    def _count_earlier_steps(self, steps: int) -> None:
        """Count steps in which this site may have taken part by an earlier process, whose ledger is lost."""
        if self._private is not None and steps > 0:
            self._private.ledger.spend(self._private.privacy, steps)

    def _rejoin(self) -> None:
        """Join again after this site was dropped: its gradients of this step are lost, and its compressor begins anew.

        Raises:
            SiteError: if the others do not let it join.
        """
        self._transport.rounds.rejoin()
        if self._private is not None:
            self._private.forget()
        self._planner.release(discard=True)
        joined = self._receive_state()
        assert joined is not None
        method, max_rank = make_method(self.options), self.max_rank
        if max_rank is not None:
            method.max_rank = max_rank
        self._method = method
        self._planner = self._make_planner()
        self.model.zero_grad()
        self._counter.reset()
        self._counter.pending, self._epoch_samples = False, 0
        self._adopt(joined)

    def _make_planner(self) -> Planner:
        self._method.batch = weak_hook(self._batch)
        given = {} if self._private is None else self._private.handled()
        samples = self._counter.weight if self._private is None else weak_hook(self._samples)
        arrived = weakref.WeakMethod(self._arrived)
        planner = Planner(self.shared, self._method, self.options, self._transport, samples, arrived, given)
        planner.on_release = weak_hook(self._end_probe)
        return planner

    def _end_probe(self) -> None:
        if self._noise is not None:
            self._noise.end_probe()

    def abort(self, reason: str) -> None:
        super().abort(reason)
        if self._norms is not None:
            self._norms.close()

    def detach(self, *, discard: bool = False) -> None:
        """Remove all hooks from the model, which then trains alone. May be called twice.

        Gradients that have not been synchronized become this site's own in ``.grad``. One that has been sent to the
        other sites, and is not held here any more, raises an error when it is read.

        Args:
            discard: whether to drop gradients that have not been synchronized instead.
        """
        super().detach()
        self._drop_cleared()
        self._end_probe()
        self._planner.release(discard=discard)
        self._counter.pending = False
        self._counter.detach()
        self._comparisons.detach()
        if self._private is not None:
            self._private.detach()
        if self._norms is not None:
            self._norms.detach()
        if self._remembers:
            self._unwatch()
        self._guard.remove()
