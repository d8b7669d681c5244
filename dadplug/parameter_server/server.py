"""Parameter server without parameters: sites send gradients, and all apply one log of them in the same order."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import MismatchError, SiteError
from ..exchange import Traffic, Transport, codec
from ..exchange.factor_buckets import finite
from ..exchange.fields import check_kinds
from ..exchange.restrictions import check_declared
from ..exchange.rounds import Rounds
from ..exchange.status import add_announcer, remove_announcer
from ..exchange.transport import Gather, PendingSum
from ..step.methods import Quality, make_method
from ..step.model_sync.buffers import average_packed, pack_buffers
from ..step.model_sync.private import load_joined_state, shared_state
from ..step.model_sync.replicated_model import JoinState, ReplicatedModel, Stateful, load_joined
from ..step.model_sync.structure import check_types, weak_hook
from ..support.logs import get_logger
from ..support.refusals import refuse
from ..support.signature import check_choice, takes_keywords_of
from .connect import (
    ReturnedRounds,
    ReturnedSites,
    ReturnedTransport,
    ServerOptions,
    gather_workers,
    largest_message,
    open_log,
    return_to_log,
)
from .dealing import LogLink, OwnLoader, SharedLoader, SiteLoader
from .gradients import ContributionCodec, ModelGradients, UnsentGradients, not_finite
from .replica import ANY_STATE, LoggedOptimizer, check_site_model
from .service import SequencerHost
from .streams import Commit, Frame, FrameKind

_log = get_logger(__name__)
_DETACHED = "it has called detach()"
_UNFINISHED = "it has called detach() without finish(), so that its replica differs from the others"
_MOST_HELD = 64  # batches: their rows take memory
_LIFETIME = 2  # times `staleness` + 1: a site that takes part has committed another batch by then
_SLACK = 4  # part of `staleness` by which a site may be ahead of the version that it has reported
_GATHERED = b"G"  # first byte of what a site sends for a gather; that of buffers is another one


class ParameterServer(ReplicatedModel):
    """Asynchronous training: each site sends its gradients, and no site waits for the parameters of others.

    No parameters travel. Each site sends its gradient, compressed as in `dadplug.GradientReduction`. A sequencer, which
    the hub has, or site 0 where there is none, orders these contributions in a log. Every site applies the log with its
    own optimizer, so that replicas of one version have the same bits. At the start all sites get rank 0's parameters
    and buffers, but for those that the option ``private`` names: for each batch of its own, a site makes a step of its
    own with the gradients of these.

    Args:
        model: the model, on its device, the same on all sites but for the values of its parameters.
        optimizer: the optimizer of the model's parameters; `step` and `finish` call its ``step``.
        mode: ``"dsgd"``, ``"dad"`` or ``"rankdad"``: how gradients are encoded.
        role: ``"worker"``, or ``"server"`` for a process that makes no batches: it calls `finish` where the others do,
            and then holds their model, to evaluate it and to write checkpoints.
        process_group: the processes that are the sites; the default group where None.
        state: objects that a process needs which replaces a lost one, besides model and optimizer, by name: those with
            ``state_dict`` and ``load_state_dict``, such as a scheduler. The names are the same at all sites.
        in_trainer: for trainers: sites exchange metrics between phases, and return in the midst of a phase only.
        rejoin: in a process that replaces one that was lost: the `return_address` of that one. It needs no connection
            by `dadplug.connect`, and has no process group.
        options: the options, with the names and defaults of `dadplug.parameter_server.ServerOptions`.

    Attributes:
        server_options: the options.
        phases: number of phases that have ended, by `finish`.
        dropped: number of this site's contributions that have been dropped as too late.

    Raises:
        ValueError: on all sites, if an option of one is unknown, its value not valid, or the optimizer cannot be used.
        MismatchError: if models, options or optimizers differ between sites.
        SiteError: if a site is gone or does not answer.

    Example:
        >>> server = ParameterServer(model, optimizer, mode="rankdad", rank=8, staleness=8)
        >>> for inputs, targets in loader:
        ...     criterion(model(inputs), targets).backward()
        ...     server.step()
        >>> server.finish()
    """

    _described: dict[str, str] = {}  # of the start, once that is known

    @takes_keywords_of(ServerOptions)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: str = "rankdad",
        *,
        role: str = "worker",
        process_group: dist.ProcessGroup | None = None,
        rejoin: str | None = None,
        state: Mapping[str, Stateful] | None = None,
        in_trainer: bool = False,
        **options: Any,
    ) -> None:
        check_types(model, optimizer)
        self._problem = ""  # of the arguments
        self._role = role
        self._rejoin, self._in_trainer = rejoin, in_trainer
        self._workers: list[int] = []
        self._service: SequencerHost | None = None
        try:
            check_choice("role", role, ("worker", "server") if rejoin is None else ("worker",))
            self.server_options = ServerOptions.create(mode=mode, **options)
            check_site_model(model)
            self._optimizer = LoggedOptimizer(optimizer, model)
        except ValueError as error:  # raised once the other sites have got it
            self._problem = str(error)
            self.server_options = ServerOptions()
        self._rules = self.server_options.rules
        super().__init__(model, process_group, self.server_options.of_reduction())
        self._further = self._stateful(state)
        self._described = self._describe() | ANY_STATE
        self.phases = 0
        self._earlier = 0  # versions before the start, of a training that this one resumes
        self._method = make_method(self.options)
        sites, lifetime = self._transport.sites, _LIFETIME * (self._rules.staleness + 1)
        self._gradients = ModelGradients(self.shared, self._method, self.options, sites.rank, len(sites), lifetime)
        self._codec = ContributionCodec(self._gradients, self._method, self.options)
        self._version = self.dropped = 0
        self._norms = self._gradients.norms
        self._held = UnsentGradients()
        self._detached = False
        self._unfinished = False  # whether it has made a step in the phase
        self._started = False  # whether it has made a step in a trainer
        self._loader: SiteLoader | None = None  # the last one
        if self._joined is None:
            # Synchronous steps have the bits of a GradientReduction's, which forms the gradients.
            self._optimizer.agree_on_fused(self._transport, self._rules.staleness > 0)
            arguments = self.server_options, self._workers, self._limit, self.traffic, in_trainer
            self._log, self._service, self._address = open_log(self._transport, *arguments)
        self._announcer = weak_hook(self._announce)
        add_announcer(self._announcer)
        if self._joined is not None:
            self._take_over(self._joined)
        self._optimizer.guard()
        self._attach()

    def _open_transport(self, process_group: dist.ProcessGroup | None) -> Transport:
        self._limit = largest_message(self.shared)
        if self._rejoin is not None:
            if self._problem:
                raise ValueError(self._problem)
            arguments = self._rejoin, self.model, self._limit, self.server_options, self.traffic
            self._log, returned = return_to_log(*arguments)
            self._address = self._rejoin.rpartition("/")[0]
            return returned
        transport = super()._open_transport(process_group)
        self._workers = gather_workers(transport, self._role, self._rules.quorum, self._problem)
        return transport

    def _announce(self, reason: str, _: bool) -> None:
        self._warn_unfinished()
        self._log.leave(reason)

    def _warn_unfinished(self) -> None:
        """Warn, once, if this site leaves in the middle of a phase."""
        if self._unfinished:
            self._unfinished = False
            _log.warning(
                "%s leaves the ParameterServer without finish(): its replica differs from those of the other sites. "
                "Call finish() on all sites after the last batch",
                self._transport.sites[self.site_rank],
            )

    def _describe(self) -> dict[str, str]:
        if self._described:
            return self._described
        rules = self._rules._asdict() | {"deal": self.server_options.deal, "in_trainer": self._in_trainer}
        rules = {f"option {name}": repr(value) for name, value in rules.items()}
        described = super()._describe() | rules | self._optimizer.describe()
        return described if self._rejoin is None else described | ANY_STATE

    # Steps

    @property
    def version(self) -> int:
        """Number of commits that this site has applied, with those before a checkpoint that it has loaded."""
        return self._earlier + self._version

    def step(self) -> None:
        """Send the gradients of the backward passes since the last call, then apply what has been committed.

        It clears the gradients. It does not wait, unless this site has more than `staleness` contributions that are not
        committed yet. A contribution that cannot leave, since the last one has not left yet, is held and sent together
        with the next one.

        Raises:
            NonFiniteError: if this site's gradients hold NaN or Inf; nothing has been sent then.
            SiteError: if the sequencer's site is gone, or nothing is committed within the timeout.
            MismatchError: if a contribution of another site does not fit this site's model.
            RuntimeError: in a process with ``role="server"``.
        """
        if self._role == "server":
            raise RuntimeError("a process with role='server' takes no steps: call finish() where the others do")
        self._gradients.check_unchanged()
        begins, self._unfinished = not self._unfinished, True
        self._collect()
        if self._in_trainer and begins:  # sites may return from now on until the end of the phase
            self._started = True
            self._log.send(FrameKind.TRAINS)
        known = self._version  # by the sequencer, as the one that this site goes on at
        self._send_unless_blocked()  # first, so that it is on its way while commits are applied
        self._apply_arrived()
        self._send_unless_blocked()
        waits = self._log.outstanding > self._rules.staleness
        while self._log.outstanding > self._rules.staleness:
            self._log.wait(lambda: self._log.outstanding <= self._rules.staleness)
            self._apply_arrived()
        self._apply_arrived()  # what has arrived meanwhile
        slack = 0 if waits else self._rules.staleness // _SLACK
        if self._rules.staleness and self._version > known + slack and not self._held.samples:
            self._log.send(FrameKind.REACHED, reached=self._version)
        self._warn_of_left()
        self.traffic.end_step()

    def _collect(self) -> None:
        """Move the gradients of the model to those that are held."""
        taken, samples = self._gradients.collect(self._transport)
        self._epoch_samples += self._gradients.counted
        if samples or not taken:
            self._step_private()
        if taken and samples:
            self._held.add(taken, samples, self._version)

    def _step_private(self) -> None:
        """Make a step of the private parameters alone, with the settings of this site."""
        own = self._gradients.private
        if not all(map(finite, own.values())):
            raise not_finite("a private layer")
        for parameter, gradient in own.items():
            parameter.grad = gradient
        if own:
            self._optimizer.step(self._optimizer.settings(), 1.0, {})
        for parameter in own:
            parameter.grad = None

    def _send_unless_blocked(self) -> None:
        """Send what is held, unless the last contribution has not left and this site may go on without it."""
        full = self._log.outstanding >= self._rules.staleness or self._held.batches >= _MOST_HELD
        if self._held.samples and (full or not self._log.blocked):
            self._send()

    def _send(self) -> None:
        """Send what is held."""
        held, self._held = self._held, UnsentGradients()
        body = self._codec.encode(held.mean(), held.samples, self._optimizer.settings())
        self._log.contribute(held.base, self._version, held.samples, self._take_used(), body)

    def _take_used(self) -> int:
        """Return the number of dealt batches that nothing has reported as used."""
        if self._loader is None:
            return 0
        used, self._loader.unreported = self._loader.unreported, 0
        return used

    def _apply_arrived(self) -> Commit | None:
        """Apply the commits that have arrived; return the one that ends the phase, if it has."""
        last = None
        for last in self._log.take():
            self._apply(last)
            if last.asks is not None:
                self._send_state(last.asks)
        return last if last is not None and last.decision.over else None

    def _apply(self, commit: Commit) -> None:
        """Make the optimizer's step of one commit.

        Raises:
            MismatchError: if a contribution does not fit this site's model.
        """
        decision = commit.decision
        self.dropped += sum(site == self.site_rank for site, _ in decision.dropped)
        if not decision.entries:
            return
        unpacked = [
            self._codec.unpack(body, self._transport.sites[entry.site])
            for entry, body in zip(decision.entries, commit.bodies, strict=True)
        ]
        samples = [float(entry.samples) for entry in decision.entries]
        scales = [entry.scale for entry in decision.entries]
        with torch.no_grad():
            contents = [each.content for each in unpacked]
            gradients, products = self._codec.merge(contents, samples, scales, self._optimizer.fused)
            self._gradients.write(gradients)
        scale = sum(count * each for count, each in zip(samples, scales, strict=True)) / sum(samples)
        self._optimizer.step(unpacked[0].settings, scale, products)
        self._gradients.clear()
        self._move_to(decision.version)
        if self._norms is not None:
            for entry, each in zip(decision.entries, unpacked, strict=True):
                self._norms.follow(entry.site, each.statistics or {}, self._version)

    def _move_to(self, version: int, statistics: Any = None) -> None:
        """Set the version; with those of another site or of a checkpoint, the statistics of batch normalisation."""
        self._version = version
        if self._norms is not None:
            self._norms.version = version
            if statistics is not None:
                self._norms.load_state_dict(statistics)

    def _take_end(self) -> Commit:
        """Wait for the end of the phase, and apply what has been committed up to it."""
        while (end := self._apply_arrived()) is None:
            self._log.wait()
        return end

    def finish(self) -> None:
        """End a phase of training: send what is held, and wait until all sites have done so and all is applied.

        All sites must call it, each after its last batch; sites that have left are not waited for. Afterwards the
        replicas have the same bits, and float buffers are averaged over sites unless ``average_buffers=False``.
        Training may go on.

        Raises:
            SiteError: if the sequencer's site is gone, or a site does not call it within the timeout.
        """
        self._flush(True)
        if self._role == "worker":
            self._apply_arrived()
            averages = self.options.average_buffers
            self._log.finish(pack_buffers(self.shared, self._epoch_samples) if averages else b"")
        self._end_phase(self._take_end())
        self._warn_of_left(besides=_DETACHED)  # as a site may after the last phase
        self.traffic.end_step()

    def _end_phase(self, end: Commit) -> None:
        """Average buffers at the end of a phase."""
        if self.options.average_buffers and end.ended:
            average_packed(self.shared, end.ended, self._transport.sites)
        self._epoch_samples = 0
        self._unfinished = False
        self.phases += 1

    def loader(self, loader: Any, *, samples: int | None = None, seed: int = 0) -> SiteLoader:
        """Return a loader whose epochs are those of all sites; every site trains on one, or none does.

        Call `step` for its batches, and `finish` after an epoch, or after several. With ``deal="shared"`` all sites
        have one data set. Its batches are handed out on demand, in an order that depends on `seed` and epoch only, and
        an epoch is over when each has been used once. The batches of a site that is lost, and that it has sent no
        gradient of, go to others.

        With ``deal="own"`` each site has data of its own. An epoch is over once every site has passed over its data; a
        fast site makes further passes meanwhile. The summed step size of each site is proportional to its samples, or
        the same for each with ``weighting="uniform"``.

        Args:
            loader: a DataLoader; with ``deal="shared"`` over the same data on all sites, without a DistributedSampler.
            samples: with ``deal="own"``, number of samples of this site; by default that of the loader's data set.
            seed: with ``deal="shared"``, seed of the order, the same on all sites.

        Raises:
            TypeError: if batches of the loader cannot be dealt, since it is no DataLoader.
            ValueError: if they cannot be dealt for another reason, or the number of samples is not known.
            RuntimeError: in a process with ``role="server"``.
        """
        if self._role == "server":
            raise RuntimeError("a process with role='server' trains on no data")
        self._flush(False)  # batches of another loader
        link = LogLink(self._log, self._flush, self._wait)
        if self.server_options.deal == "shared":
            self._loader = SharedLoader(loader, seed, link)
        else:
            self._loader = OwnLoader(loader, samples, self.options.weighting == "samples", link)
        return self._loader

    def _flush(self, completes: bool) -> None:
        """Send what is held, and report batches without gradients; `completes` joins in reports on the first step."""
        if self._gradients.pending or completes:
            self._collect()
        if self._held.samples:
            self._send()
        if used := self._take_used():
            self._log.send(FrameKind.USED, used=used)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Apply commits until a condition holds, and those that have arrived by then, unless gradients accumulate."""
        if self._gradients.pending:
            self._log.wait(until, entries=False)
            return
        while not until():
            self._log.wait(until)
            self._apply_arrived()
        self._apply_arrived()

    def samples(self, count: int) -> Any:
        """State the number of samples of the forward passes inside, where the inputs' first dimension is not that.

        Args:
            count: number of samples of all these passes.

        Returns:
            A context manager.
        """
        return self._gradients.counter.fixed(count)

    # Sites

    def _warn_of_left(self, besides: str = "") -> None:
        """Warn of sites that have left since the last call, except those with a certain reason."""
        for loss in [each for each in self._log.losses if each[1] != besides]:
            self._log.losses.remove(loss)
            site, reason = loss
            warnings.warn(f"{self._transport.sites[site]} has left, and the others go on: {reason}", stacklevel=3)

    @property
    def present_sites(self) -> list[int]:
        """Ranks of the sites that have not left."""
        return [rank for rank in range(self.world_size) if rank not in self._log.left]

    @property
    def return_address(self) -> str:
        """Address for a process that replaces this one, if this one is lost, as its argument `rejoin`.

        It contains a secret, and holds as long as the training goes on; empty where no site can return.
        """
        return f"{self._address}/{self.site_rank}" if self._address else ""

    @property
    def quality(self) -> dict[str, Quality]:
        """Effective rank and relative residual of this site's compressed gradients, by name of the weight."""
        return self._method.quality()

    def require_all(self) -> None:
        """Check that no site has left: trainers exchange metrics at the end of an epoch, for which they need all.

        Raises:
            SiteError: if one has left, with its name and the reason.
        """
        for site, reason in list(self._log.left.items()):
            raise SiteError(f"{self._transport.sites[site]} is gone, and epochs of a trainer need all sites: {reason}")

    # Gathers over the log, between phases

    @property
    def gathers(self) -> bool:
        """Whether `gather_present` can be called: in a trainer, from the first step on."""
        return self._started and not self._detached

    def gather_present(self, item: Any) -> dict[int, Any]:
        """Gather an object from each site that has not left; all of them must call it at one place between phases.

        Args:
            item: what `dadplug.exchange.codec.encode` takes.

        Returns:
            The objects by rank, in ascending order; the same at all sites.

        Raises:
            TypeError: at all sites, if the object of one cannot be sent.
            MismatchError: if another site is at another place.
            PolicyError: if this site's policy allows fewer bytes.
            SiteError: if the sequencer's site is gone, or another one does not call it within the timeout.
        """
        own, refusal = codec.encode_object(item)
        check_declared(len(own))
        self._log.finish(_GATHERED + own)
        end = self._take_end()
        for rank, body in end.ended.items():
            if not bytes(body[:1]) == _GATHERED:
                raise MismatchError(f"{self._transport.sites[rank]} is at another place: it has ended a phase of steps")
        bodies = {rank: memoryview(body)[1:] for rank, body in end.ended.items()}
        objects = codec.decode_objects(bodies.items(), refusal, self._transport.sites.__getitem__)
        return dict(zip(bodies, objects, strict=True))

    # Sites that return

    def _send_state(self, request: Frame) -> None:
        """Send the state of this site to one that returns, which a frame asks for."""
        state = self._join_state(self._version, list(self._gradients.reports))
        further: dict[str, Any] = {"earlier": self._earlier, "phases": self.phases, "epochs": self._log.epochs}
        further |= {"objects": state.further, "optimizer": shared_state(self._optimizer.optimizer)}
        further |= {"fused": self._optimizer.kind} | self._shared_state()
        state = dataclasses.replace(state, further=further)
        self._log.send(FrameKind.SNAPSHOT, request.number, base=request.base, body=codec.encode(state, compact=True))

    def _take_over(self, state: JoinState) -> None:
        """Go on from the state of another site: apply what has been committed since, and take part.

        Args:
            state: the state, whose tensors the model has already.

        Raises:
            SiteError: if the sites have not made their first step.
            MismatchError: if this site cannot make the steps that the others make.
        """
        objects = state.further["objects"]
        if objects.keys() != self._further.keys():
            raise MismatchError(f"state= names {sorted(self._further)}, and at the other sites {sorted(objects)}")
        if not state.plan:
            raise SiteError("the sites have not made their first step, which needs all of them: start them again")
        self._optimizer.follow_fused(state.further["fused"])
        self._gradients.merge(state.plan)
        self._gradients.reference = state.further["reference"]
        load_joined("optimizer", partial(load_joined_state, self._optimizer.optimizer), state.further["optimizer"])
        self._move_to(state.step, state.further["statistics"])
        for name, value in objects.items():
            load_joined(name, partial(load_joined_state, self._further[name]), value)
        self._earlier, self.phases = state.further["earlier"], state.further["phases"]
        self._log.send(FrameKind.READY)
        self._catch_up()
        self._joined = None

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state beside its model and its optimizer, which are the same on all sites.

        It involves no other site. Each site saves its own, after `finish`.

        Raises:
            RuntimeError: in the middle of a phase, in which replicas differ.
        """
        refuse(
            (
                self._unfinished and not self._in_trainer,
                "this replica differs from those of the other sites: call finish() on all sites before",
            ),
            (
                self._held.samples or self._log.outstanding or self._gradients.pending,
                "some gradients of this site are not committed yet: call finish() on all sites before",
            ),
            error=RuntimeError,
        )
        return {"version": self.version, "epochs": self._log.epochs} | self._own_state()

    def _own_state(self) -> dict[str, Any]:
        state = {"dropped": self.dropped, "method": self._method.state_dict(), "codec": self._codec.state_dict()}
        return state | self._shared_state()

    def _catch_up(self) -> None:
        """Apply what is committed until the sequencer answers that this site takes part, and all that came before that.

        The sequencer refuses a contribution that is computed at an earlier version than that of its answer.
        """
        answered = False
        while not answered:
            self._log.wait(lambda: self._log.first is not None)
            answered = self._log.first is not None  # it may come while entries are applied, behind further ones
            while (end := self._apply_arrived()) is not None:  # of a phase that this site has not taken part in
                self._end_phase(end)

    def _shared_state(self) -> dict[str, Any]:
        statistics = {} if self._norms is None else self._norms.state_dict()
        return {"reference": self._gradients.reference, "statistics": statistics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; all sites must do so, before their first step.

        Args:
            state: the state.

        Raises:
            ValueError: if the state is of another way to train.
            DamagedError: if it is damaged; nothing of it has been loaded then.
        """
        self._check_state(state, "version")
        self._load_whole(self._restore, state)
        if epochs := state.get("epochs", 0):  # 0 in earlier versions at other sites than 0
            self._log.epochs = epochs
            self._log.send(FrameKind.EPOCHS, epochs)

    def _restore(self, state: Mapping[str, Any]) -> None:
        counts = dict.fromkeys(("version", "epochs", "dropped"), int)
        check_kinds(state, counts | {"reference": float, "statistics": Mapping})
        if state.get("epochs", 0) < 0:
            raise ValueError(f"its epoch is {state['epochs']}")
        self._earlier = state["version"] - self._version
        self.dropped = state["dropped"]
        self._gradients.expected_reference = state["reference"]
        self._method.load_state_dict(state["method"])
        self._codec.load_state_dict(state["codec"])
        self._move_to(self._version, state.get("statistics", {}))

    def _state_after(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return dict(state) | self._own_state() | {"reference": state["reference"]}

    # Calls of trainers that need nothing

    @property
    def syncing(self) -> bool:
        """Always False: `synchronize` is not due after a backward pass."""
        return False

    def synchronize(self) -> None:
        """Do nothing: `step` sends the gradients. For trainers that call it after each backward pass."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return an empty context: gradients accumulate until `step` in any case."""
        return nullcontext()

    # End

    def abort(self, reason: str) -> None:
        self._announce(reason, False)
        super().abort(reason)

    def detach(self, *, discard: bool = True) -> None:
        """Remove all hooks from the model, and leave the others; call `finish` before. May be called twice.

        Args:
            discard: without effect; as that of `GradientReduction.detach`.
        """
        if self._detached:
            return
        super().detach()
        self._detached = True
        remove_announcer(self._announcer)
        self._gradients.release()
        self._optimizer.release()
        self._log.leave(_UNFINISHED if self._unfinished else _DETACHED)
        self._warn_unfinished()
        if self._service is not None:
            self._service.close()


_places = itertools.count()


class ServerRounds(Rounds):
    """Steps of a trainer's messages besides those of its parameter server; see `ServerTransport`.

    Args:
        size: number of sites.
        joins: whether this site returns.

    Attributes:
        server: the parameter server, once there is one.
        lowest: rank of the first of the sites that took part in the last exchange.
    """

    elastic = True
    place = lowest = 0

    def __init__(self, size: int, joins: bool) -> None:
        super().__init__(size)
        self.server: ParameterServer | None = None
        self.joins = joins
        self.place = next(_places)

    @property
    def present(self) -> list[int]:
        return super().present if self.server is None else self.server.present_sites

    def end_step(self) -> None:
        self.joins = False


class ServerTransport(Transport):
    """Messages of a trainer besides those of its parameter server.

    Before the first step they go over another transport, which needs all sites. From then on they go over the log,
    between its phases, so that sites that have left are not waited for. A site that returns runs the program from its
    beginning, and comes to exchanges that the others had long ago. Up to its first step it therefore exchanges nothing:
    it is alone in every exchange, and `rounds.joins` is true. The trainer calls `rounds.end_step` after each step.

    Args:
        first: the transport for the beginning; at a site that returns a `ReturnedTransport`.
        device: device of the model.
        timeout: seconds that a wait may take.
    """

    rounds: ServerRounds

    def __init__(self, first: Transport, device: torch.device, timeout: float) -> None:
        rounds = ServerRounds(len(first.sites), isinstance(first, ReturnedTransport))
        super().__init__(first.sites, Traffic(), first.sites.rank, device, timeout, rounds)
        self._first = first

    @classmethod
    def of_returning(cls, rank: int, names: Sequence[str], device: torch.device, timeout: float) -> ServerTransport:
        """Return the transport of a site that returns.

        Args:
            rank: this site.
            names: names of the sites, by rank.
            device: device of the model.
            timeout: seconds that a wait may take.
        """
        sites = ReturnedSites(rank, names)
        first = ReturnedTransport(sites, Traffic(), rank, device, timeout, ReturnedRounds(len(sites)))
        return cls(first, device, timeout)

    def close(self) -> None:
        self._first.close()

    def gather_present(self, item: Any) -> dict[int, Any]:
        if self.rounds.joins:
            return {self.rank: item}
        server = self.rounds.server
        if server is None or not server.gathers:
            return dict(enumerate(self._first.gather_objects(item)))
        every = server.gather_present(item)
        self.rounds.lowest = min(every)
        return every

    def broadcast_bytes(self, content: bytes) -> bytes:
        while not self.rounds.joins:
            source = self.rounds.lowest
            every = self.gather_present(content if self.rank == source else b"")
            if source in every:
                return bytes(every[source])
        return content

    def broadcast(self, tensor: Tensor) -> None:
        if not self.rounds.joins:
            self._first.broadcast(tensor)

    @property
    def group(self) -> Any:
        return self._first.group

    def gather(self, sizes: Sequence[int], dtype: torch.dtype, **use: Any) -> Gather:
        return self._first.gather(sizes, dtype, **use)

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        return self._first.all_reduce(tensor)

    def prefers_gather(self, nbytes: int) -> bool:
        return True
