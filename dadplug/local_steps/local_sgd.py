"""Local SGD and DiLoCo, for any PyTorch training loop: the formulas are in `agreed_model` and `agreement` beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DroppedError
from ..exchange import Gather, Transport
from ..exchange.calls import own_place
from ..exchange.fields import check_kinds
from ..exchange.restrictions import check_restrictions
from ..exchange.rounds import Requirements
from ..reduction import GradientReduction
from ..step.fused.held import HeldGradients
from ..step.fused.products import Deferral, GradientProduct, clip_norm
from ..step.fused.steps import reasons_against
from ..step.model_sync import sameness
from ..step.model_sync.batchnorm import SyncedBatchNorms
from ..step.model_sync.private import shared_part
from ..step.model_sync.replicated_model import JoinState, ReplicatedModel, Stateful, load_joined
from ..step.model_sync.samples import SampleCounter
from ..step.model_sync.structure import OptimizerHook, check_types, is_managed, weak_hook
from ..support.logs import get_logger
from ..support.refusals import refuse
from ..support.signature import takes_keywords_of, whole_number
from .agreement import Agreement, check_fragments
from .captured import CapturedGradients
from .delta_format import check_memory
from .elastic import ElasticAgreement, RoundTime, load_settings, settings_of
from .header import Header
from .options import LocalOptions, Schedule

_log = get_logger(__name__)


class _WarmUpOver(Exception):
    """End of the last synchronous step."""


class LocalSGD(HeldGradients, ReplicatedModel):
    """Local steps between the sites of a process group: sites agree on parameters instead of gradients.

    At the start all sites get rank 0's parameters and buffers. Each site then takes ``every`` steps of its own
    optimizer, and sends the change of its parameters. The agreed model moves by the mean change: by all of it (plain
    averaging, local SGD), or by an outer optimizer with Nesterov momentum (DiLoCo: ``outer_lr=0.7,
    outer_momentum=0.9``). The state of the site's own optimizer stays on the site.

    With ``fused`` the gradients of linear layers are not formed in local steps: blocks of them are computed in the
    processor's cache and applied to weight and optimizer state at once, as in `dadplug.GradientReduction.apply`.

    With ``overlap`` the changes travel while the next steps run, and are applied one round later. Parameters then
    differ between sites until `finish`, without it until the next agreement.

    With ``min_sites``, over a hub, training goes on without a site that leaves, and a site whose program is started
    again gets the agreed model from another one. What a site does between two agreements is lost only where it ends
    before it has sent it: a site that is late, with ``late="skip"``, sends it later.

    Args:
        model: the model, on its device, the same on all sites but for the values of its parameters.
        optimizer: the site's optimizer of the model's parameters; `step` calls it, the program does not.
        every: steps between two agreements, or a function of the number of steps so far that returns them.
        process_group: the processes that are the sites; the default group where None. Without torch.distributed the
            site trains alone.
        state: objects with ``state_dict`` and ``load_state_dict`` by name, such as a scheduler, that a site gets from
            another one when it joins in mid-training, with ``min_sites``. Where the optimizer is not among them, it
            gets the settings of the other one, such as the learning rate, and its state is empty.
        in_trainer: whether a trainer calls the local steps, in which all sites take as many steps in an epoch.
        options: the other options, see `dadplug.local_steps.LocalOptions`.

    Attributes:
        model: the model.
        optimizer: the optimizer.
        local_options: the options.
        traffic: the meter of bytes sent and of time spent waiting.
        site_rank: number of this site, from 0.
        world_size: number of sites.
        steps: number of steps so far, the synchronous ones included. With ``min_sites`` it becomes the largest number
            of all contributors at each agreement, and so is the same at all sites after it.
        calls_optimizer: whether the optimizer is being called by `step`.
        remarks: whether steps are fused, and the weights whose steps are not, with the reasons; one line each. Empty
            without ``fused``, and in the warm-up.

    Raises:
        ValueError: on all sites, if an option or its value is not valid at one of them, or if the optimizer has
            parameters that are not the model's.
        PolicyError: if the kit by which this site is connected to a hub does not allow ``"localsgd"``.
        MismatchError: if models or options differ between sites.
        SiteError: if a site is gone or does not answer.

    Example:
        >>> local = LocalSGD(model, optimizer, every=64, wire="int8")
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(inputs), targets).backward()
        ...     local.step()
        >>> local.finish()
    """

    _warm_up: GradientReduction | None = None
    _captured: CapturedGradients | None = None  # in local steps, if some of them are fused
    _may_fuse = True  # until `stop_fusing`, which may be called in the warm-up
    _has_synchronized = False  # in this synchronous step, for `clip_grad_norm_`
    _accumulates = False
    _shows_agreed = False  # in a block of `agreed`
    _follows = False  # whether each step of the optimizer is a local one, whoever calls it
    _is_followed = False  # whether that of the optimizer that is running is such a step
    _after_step: Any = None  # handle of the hook that ends such steps
    _of_optimizer: dict[str, str] | None = None  # settings of the optimizer at the start

    @takes_keywords_of(LocalOptions)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int | Schedule = LocalOptions.every,
        *,
        process_group: dist.ProcessGroup | None = None,
        state: Mapping[str, Stateful] | None = None,
        in_trainer: bool = False,
        **options: Any,
    ) -> None:
        check_types(model, optimizer)
        self.optimizer = optimizer
        self._in_trainer = in_trainer
        self._problem = ""  # of the arguments
        try:
            self.local_options = LocalOptions.create(every=every, **options)
            self.local_options.interval(0)
            if self.local_options.density is not None:
                if callable(self.local_options.density):
                    self.local_options.density_at(0)
                check_memory(shared_part(model, self.local_options.private))
            _check_parameters(model, optimizer)
            check_fragments(shared_part(model, self.local_options.private), self.local_options.fragments)
            if in_trainer and self.local_options.round_seconds is not None:
                raise ValueError(
                    "round_seconds is for loops of your own: in a trainer all sites take as many steps in an epoch, "
                    "and the fastest would wait at its end. Leave round_seconds out, and set every"
                )
        except ValueError as error:  # raised once the other sites know
            self._problem = str(error)
            self.local_options = LocalOptions()
        self._group = process_group
        super().__init__(model, process_group, self.local_options.of_reduction())
        self.steps = 0
        self._next = 0
        self._weight = 0  # of this site's steps since the last agreement
        self.calls_optimizer = False
        self._norms: SyncedBatchNorms | None = None
        self._active: Gather | None = None  # with synchronised normalisation: which sites have taken a step
        if self.local_options.warm_up:
            self._warm_up = GradientReduction(model, process_group=process_group, **vars(self.options))
        self._counter = SampleCounter(
            model,
            weak_hook(self._before_forward),
            weak_hook(self._drop_cleared),
            self._by_samples,
            watches_parameters=self._by_samples,
        )
        self._round = RoundTime(self.local_options.round_seconds, self.local_options.fragments)
        self._over_at = -1  # step at which all sites had finished, and this one has not called `finish` since
        elastic = self.local_options.min_sites is not None
        self._agreement = (ElasticAgreement if elastic else Agreement)(self.shared, self.local_options, self._transport)
        self._further = self._stateful(state)
        if self._warm_up is None:
            self._begin_local_steps()
        self._guard = OptimizerHook(optimizer.register_step_pre_hook(weak_hook(self._check_step)))
        self._attach()

    # Set-up

    def _check_allowed(self, options: Any) -> None:
        # Deltas are sums of whole gradients, and contain no layer's inputs.
        check_restrictions(SimpleNamespace(mode="localsgd", share_inputs=False), sends_factors=False)
        if self.local_options.warm_up:
            super()._check_allowed(options)

    def _open_transport(self, process_group: dist.ProcessGroup | None) -> Transport:
        transport = super()._open_transport(process_group)
        if not transport.rounds.joins:
            sameness.raise_problems(self._problem, transport)
        elif self._problem:
            raise ValueError(self._problem)
        return transport

    def _make_equal(self) -> None:
        if not self.local_options.warm_up:  # the reduction of the synchronous steps does it
            super()._make_equal()

    def _describe(self) -> dict[str, str]:
        settings = dict(vars(self.local_options))
        del settings["timeout"], settings["hub_timeout"], settings["fused"]  # a site's own
        settings["in_trainer"] = self._in_trainer
        for name in ("every", "density"):
            if callable(settings[name]):
                settings[name] = f"a function, {settings[name](0)} at first"
        if self._of_optimizer is None:  # of the start: a schedule changes the learning rate
            optimizer = sameness.OptimizerSettings(self.local_options.may_differ)
            optimizer.record(self.optimizer)
            optimizer.take()
            self._of_optimizer = optimizer.described()
        return (
            sameness.described(self.local_options.may_differ)
            | self._of_optimizer
            | sameness.describe(self.shared, settings)
        )

    def _begin_local_steps(self) -> None:
        """Begin with the model's parameters, which are equal on all sites."""
        if self.local_options.sync_batchnorm:
            transport = super()._open_transport(self._group)
            counter = self._counter if self._by_samples else None
            self._norms = SyncedBatchNorms(self.shared, transport, counter)
            self._active = transport.gather([1] * self.world_size, torch.int64)
        self._agreement.begin()
        if isinstance(self._agreement, ElasticAgreement):
            self._transport.rounds.donate = weak_hook(self._donate)
        if self.world_size > 1 and not self.local_options.warm_up:  # whose reduction compares them
            self._counter.first_batch = self._agreement.first_batch
        self._next = self._step_of_next()
        self._round.begin()
        if self._joined is not None:
            self._adopt(self._joined)
        if self.local_options.fused and self._may_fuse:
            self._captured = CapturedGradients(self.model, self.optimizer, self._counter.owned)
            self.remarks = self._captured.remarks

    # Training

    @property
    def agreements(self) -> int:
        """Number of agreements so far; the same on all sites."""
        return self._agreement.count

    @property
    def contributions(self) -> dict[int, int]:
        """Samples that are part of the whole agreed model so far, by rank of the site; the same at all sites.

        With ``weighting="uniform"`` it is the number of each site's contributions. Empty without ``min_sites``.
        """
        agreement = self._agreement
        return dict(agreement.contributions) if isinstance(agreement, ElasticAgreement) else {}

    @property
    def delay(self) -> int | None:
        """Steps after which deltas that are sent now are applied; None: at the next agreement, or at once.

        Unless the option ``delay`` gives it, that of sparse deltas follows the time in which they arrive.
        """
        return self._agreement.delay.at(self.steps)

    @property
    def pending(self) -> bool:
        """Whether gradients wait for other sites: never."""
        return False

    @property
    def synchronous(self) -> bool:
        """Whether the next step is a synchronous one, of the warm-up."""
        return self._warm_up is not None

    @property
    def syncing(self) -> bool:
        """Whether gradients are complete after the next backward pass; False inside `no_sync`."""
        return not self._accumulates if self._warm_up is None else self._warm_up.syncing

    def step(self, closure: Callable[[], Any] | None = None, *, scaler: Any = None) -> Any:
        """Take a step of the optimizer, and agree with the other sites if it is time; instead of ``optimizer.step()``.

        Call it after backward, once for each batch (with accumulation: once for each update). Clip and unscale
        gradients before it.

        Args:
            closure: passed to the optimizer, for optimizers that evaluate the loss themselves.
            scaler: the `torch.amp.GradScaler` that takes the step, ``scaler.step(optimizer)``; call its ``update`` and,
                where needed, ``unscale_`` yourself. Steps are not fused then.

        Returns:
            What the optimizer's step returns.

        Raises:
            NonFiniteError: on all sites, if the parameters of one hold NaN or Inf at an agreement. The steps since the
                last agreement are discarded on all sites.
            ValueError: with a closure in a synchronous step.
            MismatchError: on all sites, if they do not agree at the same step, or not on the same parameters.
            SiteError: if a site is gone or does not answer in time.
        """
        if closure is not None and self.synchronous:
            raise ValueError("an optimizer with a closure cannot take synchronous steps: leave warm_up out")
        if scaler is not None and scaler.is_enabled():
            self.stop_fusing("a GradScaler scales the loss")
        if self._captured is not None and self._captured.fuses:
            with self.stepping():
                loss = None
                if closure is not None:  # an optimizer with a fused step calls it once, before anything else
                    with torch.enable_grad():
                        loss = closure()
                self.hold(self.optimizer)
                self.apply_held(self.optimizer, self.optimizer.step)
            return loss
        if self._warm_up is None or self._warm_up.pending or not self._has_synchronized:
            self.synchronize()
        with self.stepping():
            if scaler is not None:
                return scaler.step(self.optimizer)
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count a step that the block takes by calling the optimizer; agree at its end if it is time.

        For trainers that call the optimizer themselves.
        """
        self._begin_step()
        try:
            yield
        finally:
            self.calls_optimizer = False
        self._end_step()

    def follow_optimizer(self) -> None:
        """Take each step of the optimizer as a local step, for libraries that call ``optimizer.step()`` themselves.

        A step without samples changes no parameter. Steps are not fused, and none may be synchronous.
        """
        self.stop_fusing("another library calls the optimizer")
        self._follows = True
        self._after_step = OptimizerHook(self.optimizer.register_step_post_hook(weak_hook(self._end_followed_step)))

    def _begin_step(self) -> None:
        if self._shows_agreed:
            raise RuntimeError("a step within local.agreed(), whose parameters are put back at its end: take it behind")
        if self._warm_up is None:
            self._agreement.follow()
        self.calls_optimizer = True

    def _check_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise an error where the program calls the optimizer itself; called before each of its steps.

        Otherwise the gradients are formed that the step reads; with a closure, these do not exist yet.
        """
        if self._follows and not self.calls_optimizer:
            self._begin_followed_step()
            return
        if not self.calls_optimizer:
            raise RuntimeError("optimizer.step() beside local steps: call local.step() instead, which calls it")
        if self._captured is not None and not any(callable(given) for given in (*args, *kwargs.values())):
            self._captured.collect()

    def _begin_followed_step(self) -> None:
        """Begin a step that another library takes; leave out gradients of a batch that stands for no step."""
        self._begin_step()
        self._is_followed = True
        if not self._counter.weight(True, True):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _end_followed_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End a local step that another library has taken; called after each step of the optimizer."""
        if self._is_followed:
            self.calls_optimizer = self._is_followed = False
            self._end_step()

    def _end_step(self) -> None:
        if self._warm_up is not None:
            self._end_synchronous_step()
            return
        trained = any(parameter.grad is not None for parameter in self.model.parameters())
        samples = self._counter.weight(trained, self.world_size == 1)
        self._counter.reset()
        self._counter.follow()
        self._end_local_step(samples, finished=False)

    def idle(self) -> None:
        """Count a step without data and without a step of the optimizer, so that sites stay at the same step.

        For a site that has no batch in a step of a trainer that counts steps on all sites alike.
        """
        self._counter.reset()
        if self._warm_up is not None:
            self.optimizer.zero_grad()
            self._warm_up.idle()
            with self.stepping():
                self.optimizer.step()
            return
        if self._norms is not None and not self._norms.has_exchanged:
            self._norms.idle(first=not self.steps)
        self._end_local_step(0, finished=False)

    def finish(self) -> None:
        """Take part in the agreements of the other sites until all have called it, and end on equal parameters.

        Call it after the last batch, on all sites. A site without further batches contributes nothing, so that sites
        may have different numbers of batches. It may be called in between, such as before an evaluation or a
        checkpoint, at the same step on all sites; training can go on afterwards.

        Raises:
            NonFiniteError: as `step`, like its other errors.
        """
        self._counter.reset()
        if self._warm_up is not None:
            try:
                self._warm_up.join(self._step_without_data)
            except _WarmUpOver:
                pass
            else:
                self._warm_up.average_buffers()
                return
        while self._norms is not None and self.steps:
            self._norms.idle(first=False)
            if not self._count_active(False):
                break
            self._end_local_step(0, finished=True, counted=True)
        if self.steps == self._over_at:  # the others have called it, and this site was not among the contributors
            self._over_at = -1
            return
        while not self._agree(finished=True):
            pass

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Give the model its agreed parameters and statistics inside the block, such as for an evaluation.

        They are those of the agreements that have been applied so far, and the same at all sites at the same step.
        Nothing is sent, and training goes on after the block as if it had not been there. With overlap the model's own
        parameters hold steps of this site that the others do not have yet; `finish` agrees on them.

        Raises:
            RuntimeError: if a step is taken inside.

        Example:
            >>> with local.agreed():
            ...     accuracy = evaluate(model)
        """
        if self._warm_up is not None:
            yield
            return
        self._shows_agreed = True
        try:
            with self._agreement.shown():
                yield
        finally:
            self._shows_agreed = False

    def samples(self, count: int) -> Any:
        """State the number of samples of the forward passes inside, where the inputs' first dimension is not that.

        Args:
            count: number of samples of all these passes.

        Returns:
            A context manager.
        """
        return self._counter.fixed(count) if self._warm_up is None else self._warm_up.samples(count)

    def _end_local_step(self, weight: int, finished: bool, counted: bool = False) -> None:
        """Count a step, and agree if it is time.

        Args:
            weight: weight of this site's step.
            finished: whether the site has no more batches.
            counted: whether the sites have exchanged already who has taken a step.
        """
        self._weight = self._weight + weight if self._by_samples else max(self._weight, weight)
        self.steps += 1
        own_place.step = self.steps
        if self._norms is not None:
            self._norms.end_step()
            if not counted:
                self._count_active(True)
        self._round.end_step()
        self._agreement.delay.end_step(self._agreement.has_arrived)
        due = self.steps >= self._next if self.local_options.round_seconds is None else self._round.over
        if due and (finished or self._in_trainer or not self._agreement.postpones()):
            self._agree(finished)
        elif self._agreement.end_step(self.steps, self._next - self.steps, self._weight):
            self._epoch_samples, self._weight = self._epoch_samples + self._weight, 0
        self._transport.rounds.end_step()
        self.traffic.end_step()

    def _step_of_next(self) -> int:
        """Return the step of the next agreement."""
        return self.steps + self.local_options.part_of_interval(self.steps, self._agreement.count)

    def _count_active(self, active: bool) -> int:
        """Exchange which sites have taken a step with data, and return their number."""
        assert self._active is not None
        self._active.payload.fill_(int(active))
        self._active.launch()
        return sum(int(each) for each in self._active.wait())

    def _agree(self, finished: bool) -> bool:
        """Agree on the parameters; return whether all sites have finished."""
        weight, self._weight = self._weight, 0
        self._epoch_samples += weight
        try:
            headers = self._reach(weight, finished)
        finally:
            self._next = self._step_of_next()
            self._round.begin()
        over = all(header.finished for header in headers)
        if over or self.local_options.min_sites is not None:  # from here on all sites count alike
            self.steps = max(header.step for header in headers)
            self._next = self._step_of_next()
        self._over_at = self.steps if over and not finished else -1
        return over

    def _reach(self, weight: int, finished: bool) -> list[Header]:
        """Reach an agreement, and those that the others have reached since; return the headers of the last one."""
        agreement = self._agreement
        if not isinstance(agreement, ElasticAgreement):
            return agreement.reach(self.steps, weight, finished)
        agreement.admits = not (finished and self._in_trainer)
        while True:
            try:
                headers = agreement.reach(self.steps, weight, finished)
            except DroppedError:
                self._rejoin()
                continue
            finally:
                weight = 0
                self.world_size = self._transport.world_size
                if agreement.spoilt:
                    self._reset_optimizer()
            if self._in_trainer or not self._transport.rounds.behind:
                return headers

    def _reset_optimizer(self) -> None:
        """Clear the optimizer's state if it holds NaN or Inf, which would spoil all further steps."""
        tensors = [each for own in self.optimizer.state.values() for each in own.values() if isinstance(each, Tensor)]
        if not all(bool(each.isfinite().all()) for each in tensors):
            self.optimizer.state.clear()
            _log.warning("the state of this site's optimizer holds NaN or Inf, too: it begins anew")

    # Sites that leave and return

    @property
    def _requirements(self) -> Requirements | None:
        return self.local_options.requirements

    def _donate(self) -> JoinState:
        """Return the state that a site needs to join: that of the agreed model, at the beginning of the last step."""
        assert isinstance(self._agreement, ElasticAgreement)
        tensors, plan = self._agreement.donate()
        plan["groups"] = settings_of(self.optimizer)
        return self._join_state(max(self.steps - 1, 0), plan, tensors)

    def _adopt(self, joined: JoinState) -> None:
        """Go on from the state of another site: with one step, and then with the agreement that the others are in."""
        assert isinstance(self._agreement, ElasticAgreement)
        self.steps, self._weight, self._over_at = joined.step, 0, -1
        self._next = self.steps + 1
        self._round.expire()
        load_joined("local steps", partial(self._agreement.adopt, step=joined.step), joined.plan)
        load_joined("optimizer", partial(load_settings, self.optimizer, self.local_options.may_differ), joined.plan)
        self._join(joined)

    def _rejoin(self) -> None:
        """Join again after this site was dropped: what it had not sent is lost, and its error memory begins anew.

        Raises:
            SiteError: if the others do not let it join.
        """
        self._transport.rounds.rejoin()
        joined = self._receive_state()
        assert joined is not None
        self._epoch_samples = 0
        self._adopt(joined)

    # Gradients

    def synchronize(self) -> None:
        """Agree on gradients in a synchronous step; in a local one, form those that are not formed. `step` calls it.

        For trainers that call the optimizer themselves, before they clip gradients.
        """
        self._exchange()

    def _exchange(self, *, deferral: Deferral | None = None) -> None:
        if self._warm_up is not None:
            self._warm_up.synchronize()
        elif self._captured is not None:
            self._captured.collect(deferral)
            self.remarks = self._captured.remarks

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the norm of this site's gradients, as `torch.nn.utils.clip_grad_norm_` does; before `step`.

        Norms of gradients that are not formed are taken from the factors' Gram matrices. In a synchronous step it
        synchronizes, and the gradients are those of all sites.

        Args:
            max_norm: largest norm.
            norm_type: which norm, as `torch.linalg.vector_norm` takes it.
            error_if_nonfinite: whether a norm that is not finite is an error.

        Returns:
            The norm before.

        Raises:
            RuntimeError: if the norm is not finite and that is an error.

        Example:
            >>> criterion(model(inputs), targets).backward()
            >>> local.clip_grad_norm_(1.0)
            >>> local.step()
        """
        reasons = reasons_against([self.optimizer])
        deferral = Deferral({weight for weight, reason in reasons.items() if not reason})
        self._exchange(deferral=deferral)
        self._has_synchronized = True
        try:
            return clip_norm(self.model.parameters(), deferral.products, max_norm, norm_type, error_if_nonfinite)
        finally:
            self._put_back(deferral.products)

    def _put_back(self, products: Mapping[nn.Parameter, GradientProduct]) -> None:
        if self._captured is not None:
            self._captured.put_back(products)

    def remark_on(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Do nothing: the remarks have been made by then.

        Args:
            optimizers: the optimizers that will step.
        """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold gradients back in a synchronous step, for accumulation; in local steps nothing is sent anyway."""
        if self._warm_up is not None:
            with self._warm_up.no_sync():
                yield
            return
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def _before_forward(self) -> None:
        if self._captured is not None:
            self._captured.before_forward()

    def _drop_cleared(self) -> None:
        """Forget the samples of gradients that the program has cleared."""
        if self._by_samples and self._captured is None and all(each.grad is None for each in self.model.parameters()):
            self._counter.discard()

    def stop_fusing(self, reason: str) -> None:
        """Take ordinary steps from now on.

        Args:
            reason: why, for `remarks`.
        """
        self._may_fuse = False
        if self.local_options.fused:
            self.remarks = (f"fused steps: no, {reason}",)
        if self._captured is not None:
            self._captured.release(discard=False)
            self._captured = None

    # Synchronous steps

    def _end_synchronous_step(self) -> None:
        assert self._warm_up is not None
        self.steps += 1
        self._has_synchronized = False
        self._counter.reset()
        if self.steps >= self.local_options.warm_up:
            self._warm_up.average_buffers()
            self._warm_up.detach(discard=True)
            self._warm_up = None
            self._begin_local_steps()
        self.traffic.end_step()

    def _step_without_data(self) -> None:
        """Take a synchronous step after this site's last batch.

        Raises:
            _WarmUpOver: if it was the last one.
        """
        with self.stepping():
            self.optimizer.step()
        if self._warm_up is None:
            raise _WarmUpOver

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state beside its model and its optimizer, whose states are its own, too.

        It involves no other site, but waits for what is in transit. Each site saves its own: ``model.state_dict()``,
        ``optimizer.state_dict()`` and this.
        """
        warm_up = None if self._warm_up is None else self._warm_up.state_dict()
        own = {"steps": self.steps, "next": self._next, "weight": self._weight, "warm_up": warm_up}
        return own | {"agreement": None if warm_up is not None else self._agreement.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; all sites must do so, each after its model's and optimizer's states.

        Args:
            state: the state.

        Raises:
            ValueError: if the state is of another way to train.
            DamagedError: if it is damaged; nothing of it has been loaded then.
        """
        self._check_state(state, "warm_up")
        self._load_whole(self._restore, state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        whole_number(0)("steps", state["steps"])
        check_kinds(state, {"steps": int, "next": int, "weight": int, "warm_up": Mapping | None})
        self.steps, self._weight = state["steps"], state["weight"]
        if state["warm_up"] is None and self._warm_up is not None:
            self._warm_up.detach(discard=True)
            self._warm_up = None
            self._begin_local_steps()
        elif self._warm_up is not None:
            self._warm_up.load_state_dict(state["warm_up"])
        self._next = state["next"]
        if state["agreement"] is not None:
            self._agreement.load_state_dict(state["agreement"])

    def _state_after(self, state: Mapping[str, Any]) -> dict[str, Any]:
        agreement = state["agreement"]
        if agreement is not None:
            empty = {"weight": 0, "format": {"errors": {}, "carries": {}}}
            fragments = [dict(each) | empty for each in agreement["fragments"]]
            agreement = dict(agreement) | {"fragments": fragments, "transit": None}
        return dict(state) | {"weight": 0, "agreement": agreement}

    def abort(self, reason: str) -> None:
        super().abort(reason)
        if self._warm_up is not None:
            self._warm_up.abort(reason)
        if self._norms is not None:
            self._norms.close()

    def detach(self, *, discard: bool = True) -> None:
        """Remove all hooks from the model and the optimizer. May be called twice.

        Args:
            discard: whether to drop gradients that are not formed; otherwise they are written to ``.grad``.
        """
        super().detach()
        if self._captured is not None:
            self._captured.release(discard=discard)
            self._captured = None
        self._counter.detach()
        self._guard.remove()
        if self._after_step is not None:
            self._after_step.remove()
        if self._warm_up is not None:
            self._warm_up.detach(discard=True)
        if self._norms is not None:
            self._norms.detach()


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer has parameters that sites cannot agree on."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            refuse(
                (
                    not parameter.is_floating_point() and not parameter.is_complex(),
                    f"parameter {names.get(id(parameter), '')!r} is of type {parameter.dtype}: local steps are for "
                    "floating-point parameters, leave it out of the optimizer",
                ),
                (
                    id(parameter) not in names,
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's: sites "
                    "would not agree on it",
                ),
            )
    for name, parameter in model.named_parameters():
        refuse(
            (
                is_managed(parameter),
                f"the rows of {name!r} are spread over the sites by a parameter manager: no local steps",
            ),
            (
                parameter.requires_grad and parameter.is_complex(),
                f"parameter {name!r} is complex: local steps are for real parameters",
            ),
        )
