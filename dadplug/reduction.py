"""Gradient reduction: a model in, agreed gradients out."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .exchange import Traffic, open_transport
from .exchange.wire import wire_format
from .methods import Quality, loss_scale, make_method
from .methods.feedback import ErrorFeedback
from .model_sync import replicas
from .model_sync.batchnorm import SyncedBatchNorms
from .model_sync.guards import check_model, refuse_unsynchronised
from .model_sync.samples import SampleCounter
from .model_sync.structure import without_managed
from .options import Options
from .planning.plan import Plan
from .planning.planner import Planner
from .reducer.attached import AttachedGradients
from .signature import takes_keywords_of
from .units.base import Unit
from .units.factor import FactorUnit


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
        site_rank: number of this site, from 0.
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

    @takes_keywords_of(Options)
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
        self.traffic = Traffic()
        self.stopped = False
        self._step = 0
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._transport = open_transport(
            process_group, self.traffic, device, self.options.timeout, self.options.hierarchy
        )
        self.site_rank, self.world_size = self._transport.rank, self._transport.world_size
        settings = {name: getattr(self.options, name) for name in Options.names() if name != "timeout"}
        replicas.check_alike(model, settings, self._transport)
        replicas.broadcast_model(model, self._transport)
        self._counter = SampleCounter(model, lambda: self._planner.before_forward(), self._drop_cleared)
        self._epoch_samples = 0
        self._norms: SyncedBatchNorms | None = None
        if self.options.sync_batchnorm:
            own = open_transport(process_group, self.traffic, device, self.options.timeout, self.options.hierarchy)
            self._norms = SyncedBatchNorms(model, own, self._counter if self.options.weighting == "samples" else None)
        self._method = make_method(self.options)
        self._renormalised = replicas.tables_with_max_norm(model)
        self._syncing = True
        self._pending = False
        self._agreed_samples = 0
        self.share: float | None = None
        self._planner = Planner(model, self._method, self.options, self._transport, self._samples, self._arrived)
        self._attached: AttachedGradients | None = None
        self._guard = register_optimizer_step_pre_hook(refuse_unsynchronised(self))
        self._remembers = self._method.errors.enabled or wire_format(self.options.wire).quantised
        if self._remembers:
            loss_scale.watch()
            self._unwatch = weakref.finalize(self, loss_scale.unwatch)
        self.traffic.start()

    def _arrived(self, unit: Unit) -> None:
        """Notes that a backward pass has delivered a unit's gradient; sends it if that was all of it."""
        unit.arrivals += 1
        self._pending = True
        if self._remembers:
            self._method.loss_scales.record(unit.name)
        if isinstance(unit, FactorUnit):
            unit.prepare(self._counter.owned, exact=self._method.traits.exact)
        self._planner.record_arrival(unit, self._syncing)
        if isinstance(unit, FactorUnit):
            unit.show_arrival()
            unit.keep(self._counter.owned)

    def _drop_cleared(self) -> None:
        """Discard what has arrived for parameters whose gradients the program has cleared since."""
        cleared = [unit.drop_cleared() for unit in self._planner.units if unit.arrivals]
        if self._attached is not None and self._attached.arrived:
            cleared.append(self._attached.cleared)
        if cleared and all(cleared):
            self._counter.discard()
            self._pending = False

    def _samples(self) -> int:
        """Tells the samples that this site's gradients stand for so far in the step."""
        by_samples = self.options.weighting == "samples"
        return self._counter.of_step(self._pending, by_samples=by_samples, alone=self.world_size == 1)

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
        planner = self._planner
        self._drop_cleared()
        planner.before_synchronization()
        self._pending |= planner.holds_gradients or self._has_attached
        self._counter.follow()
        for table in self._renormalised:
            replicas.renormalise(table)
        if not planner.is_complete:
            planner.complete_plan(self._step)
        try:
            headers = planner.exchange(self._step, stop, self._attached)
            self.stopped = any(header.stop for header in headers)
            self._agreed_samples = sum(header.samples for header in headers)
            self.share = headers[self.site_rank].samples / self._agreed_samples if self._agreed_samples else 0.0
            if self._attached is not None and all(header.finite for header in headers):
                self._attached.apply_share(self.share)
            elif self._attached is not None:
                self._attached.fill_with_inf()
        finally:
            self._epoch_samples += self._counter.count
            self._end_step()
        planner.follow_sizes([header.samples for header in headers])

    def attach(self, gradients: AttachedGradients) -> None:
        """Weight, check and drop gradients that this reduction does not send along with those it sends."""
        self._attached = gradients

    @property
    def _has_attached(self) -> bool:
        return self._attached is not None and self._attached.arrived and not self._attached.cleared

    def _end_step(self) -> None:
        self._planner.end_step()
        self._counter.reset()
        self._method.loss_scales.end_step()
        if self._norms is not None:
            self._norms.end_step()
        self.traffic.end_step()
        self._pending = False
        self._step += 1

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

    def loss_scale(self, scale: float) -> Any:
        """State the factor that the losses of the backward passes inside are multiplied by.

        For error memory and rounding to int8, where another scaler than `torch.amp.GradScaler` scales the loss, whose
        scale is found by itself.

        Args:
            scale: the factor.

        Returns:
            A context manager.
        """
        return self._method.loss_scales.stated(scale)

    @property
    def plan(self) -> Plan:
        """Which parameter takes which path, and what it costs; final after the first step."""
        return self._planner.plan

    @property
    def rank(self) -> int:
        """Deprecated name of `site_rank`, which is not the option ``rank``."""
        warnings.warn("reduction.rank is deprecated: use reduction.site_rank", DeprecationWarning, stacklevel=2)
        return self.site_rank

    @property
    def quality(self) -> dict[str, Quality]:
        """Effective rank and relative residual of this site's compressed gradients, by name of the weight."""
        return self._method.quality()

    @property
    def pending(self) -> bool:
        """Whether gradients have arrived that are not agreed on yet, and have not been cleared."""
        self._drop_cleared()
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

    def broadcast_model(self) -> None:
        """Replace every site's parameters and buffers by those of rank 0; all sites must call it.

        The reduction does so when it is built. Call it again after adding layers whose first values differ.
        """
        with self.traffic.apart(), without_managed(self.model):
            replicas.broadcast_model(self.model, self._transport)

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
        with self.traffic.apart(), without_managed(self.model):
            return replicas.first_difference(self.model, self._transport)

    def gather_objects(self, item: Any) -> list[Any]:
        """Gathers an object from every site, by rank; all sites must call it.

        Args:
            item: plain data, tensors, arrays, or registered classes, see `dadplug.exchange.codec.encode`. Tensors come
                back on the CPU.

        Raises:
            TypeError: on all sites, if the object of one cannot be sent.
        """
        with self.traffic.apart():
            return self._transport.gather_objects(item)

    def abort(self, reason: str) -> None:
        """Tell the other sites why this one leaves, and close the connections to them, so that none of them waits."""
        self._transport.sites.announce(reason)
        self._transport.close()
        if self._norms is not None:
            self._norms.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns this site's state beside the model's: what the compressor carries from step to step.

        It involves no other site. Each site may save its own; one that gets another's starts a little colder.
        """
        own = {"step": self._step, "mode": self.options.mode, "method": self._method.state_dict()}
        return own | self._planner.state_dict()

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
        self._planner.load_state_dict(state)

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores this site's state among those of all sites, as a checkpoint holds them.

        A site that has none there, for it is new or the checkpoint was written after others had gone, takes the step
        over and begins with a cold compressor.

        Raises:
            ValueError: if the states are of another mode.
        """
        if self.site_rank < len(states):
            self.load_state_dict(states[self.site_rank])
        elif states:
            self.load_state_dict(
                states[0] | {"method": self._method.state_dict(), "rounding": ErrorFeedback(True).state_dict()}
            )

    def detach(self, *, discard: bool = False) -> None:
        """Take everything off the model, which then trains alone. May be called twice.

        Gradients that have not been synchronized become this site's own in ``.grad``. One that is on its way to the
        other sites already, and not here any more, raises an error when it is read.

        Args:
            discard: drop gradients that have not been synchronized instead.
        """
        self._drop_cleared()
        self._planner.release(discard=discard)
        self._pending = False
        self._counter.detach()
        if self._norms is not None:
            self._norms.detach()
        if self._remembers:
            self._unwatch()
        self._guard.remove()
