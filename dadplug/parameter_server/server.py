"""Parameter server without parameters: sites send gradients, and all apply one log of them in the same order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..exchange import Transport
from ..exchange.failure_reports import add_announcer, remove_announcer
from ..logs import get_logger
from ..methods import Quality, make_method
from ..model_sync.buffers import average_packed, pack_buffers
from ..model_sync.replicated_model import Stateful
from ..signature import takes_keywords_of
from .collector import GradientCollector
from .connect import check_role, gather_workers, largest_message, open_log, raise_problem
from .contribution import ContributionCodec
from .dealing import LogLink, SiteLoader, make_loader
from .frames import Kind
from .gradients import UnsentGradients
from .log import Commit
from .optimizer import LoggedOptimizer
from .options import ServerOptions
from .replica import ANY_STATE, Replica, check_site_model
from .returning import ReturnedTransport
from .server_state import ServerState
from .service import SequencerService
from .statistics import CommittedBatchNorms
from .trainer_calls import TrainerCalls

_log = get_logger(__name__)
_DETACHED = "it has called detach()"
_UNFINISHED = "it has called detach() without finish(), so that its replica differs from the others"
_MOST_HELD = 64  # batches: their rows take memory
_LIFETIME = 2  # times `staleness` + 1: a site that takes part has committed another batch by then
_SLACK = 4  # part of `staleness` by which a site may be further than the sequencer knows


class ParameterServer(TrainerCalls, ServerState):
    """Asynchronous training: each site sends its gradients, and nobody waits for the parameters of others.

    No parameters travel. Each site sends its gradient, compressed as in `dadplug.GradientReduction`. A sequencer, which
    the hub has, or site 0 where there is none, orders these contributions in a log. Every site applies the log with its
    own optimizer, so that replicas of one version have the same bits. At the start all sites get rank 0's parameters
    and buffers.

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
        self._problem = ""  # of the arguments
        self._role = role
        self._rejoin, self._in_trainer = rejoin, in_trainer
        self._workers: list[int] = []
        self._limit = largest_message(model)
        self._service: SequencerService | None = None
        try:
            check_role(role, rejoin)
            self.server_options = ServerOptions.create(mode=mode, **options)
            check_site_model(model)
            self._optimizer = LoggedOptimizer(optimizer, model)
        except ValueError as error:  # raised once the other sites know
            self._problem = str(error)
            self.server_options = ServerOptions()
        self._rules = self.server_options.rules
        super().__init__(model, process_group, self.server_options.of_reduction())
        self._further = dict(state or {})
        self._described = self._describe() | ANY_STATE
        self.phases = 0
        self._earlier = 0  # versions before the start, of a training that this one resumes
        self._method = make_method(self.options)
        self._collector = GradientCollector(model, self._method, self.options)
        self._gradients = self._collector.gradients
        norms = self._collector.norms = self._make_norms()
        self._codec = ContributionCodec(self._gradients, self._method, self.options, norms)
        sites = self._transport.sites
        self._replica = Replica(self._gradients, self._codec, self._method, self._optimizer, sites, norms)
        self._held = UnsentGradients()
        self._detached = False
        self._unfinished = False  # whether it has made a step in the phase
        self._loader: SiteLoader | None = None  # the last one
        add_announcer(self._announce)
        if self._joined is None:
            # Synchronous steps have the bits of a GradientReduction's, which forms the gradients.
            self._optimizer.agree_on_fused(self._transport, self._rules.staleness > 0)
            arguments = self.server_options, self._workers, self._limit, self.traffic, in_trainer
            opened = open_log(self._transport, *arguments)
            self._log, self._service, self._address = opened
        else:
            self._take_over(self._joined)
        self._optimizer.guard()
        self.traffic.start()

    def _open_transport(self, process_group: dist.ProcessGroup | None) -> Transport:
        if self._rejoin is not None:
            raise_problem(self._problem)
            returned = ReturnedTransport.open(self._rejoin, self.model, self._limit, self.server_options, self.traffic)
            self._log, self._address = returned.log, self._rejoin.rpartition("/")[0]
            return returned
        transport = super()._open_transport(process_group)
        self._workers = gather_workers(transport, self._role, self._rules.quorum, self._problem)
        return transport

    def _make_norms(self) -> CommittedBatchNorms | None:
        """Let layers of batch normalisation use the statistics of all sites, if the options say so."""
        if not self.options.sync_batchnorm:
            return None
        by_samples, lifetime = self.options.weighting == "samples", _LIFETIME * (self._rules.staleness + 1)
        sites = self.site_rank, self.world_size
        return CommittedBatchNorms(self.model, *sites, self._collector.counter, by_samples, lifetime)

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
        rules = self._rules._asdict() | {"deal": self.server_options.deal, "in_trainer": self._in_trainer}
        rules = {f"option {name}": repr(value) for name, value in rules.items()}
        described = super()._describe() | rules | self._optimizer.describe()
        return described if self._rejoin is None else described | ANY_STATE

    # Steps

    @property
    def dropped(self) -> int:
        """Number of this site's contributions that have been dropped as too late."""
        return self._replica.dropped

    @property
    def version(self) -> int:
        """Number of commits that this site has applied, with those before a checkpoint that it has loaded."""
        return self._earlier + self._replica.version

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
        self._unfinished = True
        self._collect()
        self._begin_training()
        known = self._replica.version  # by the sequencer, as the one that this site goes on at
        self._send_unless_blocked()  # first, so that it is on its way while commits are applied
        self._apply_arrived()
        self._send_unless_blocked()
        waits = self._log.outstanding > self._rules.staleness
        while self._log.outstanding > self._rules.staleness:
            self._log.wait(lambda: self._log.outstanding <= self._rules.staleness)
            self._apply_arrived()
        self._apply_arrived()  # what has arrived meanwhile
        slack = 0 if waits else self._rules.staleness // _SLACK
        if self._rules.staleness and self._replica.version > known + slack and not self._held.samples:
            self._log.reach(self._replica.version)
        self._warn_of_left()
        self.traffic.end_step()

    def _collect(self) -> None:
        """Move the gradients of the model to those that are held."""
        taken, samples = self._collector.collect(self._transport)
        self._epoch_samples += self._collector.counted
        if taken and samples:
            self._held.add(taken, samples, self._replica.version)

    def _send_unless_blocked(self) -> None:
        """Send what is held, unless the last contribution has not left and this site may go on without it."""
        full = self._log.outstanding >= self._rules.staleness or self._held.batches >= _MOST_HELD
        if self._held.samples and (full or not self._log.blocked):
            self._send()

    def _send(self) -> None:
        """Send what is held."""
        held, self._held = self._held, UnsentGradients()
        body = self._codec.encode(held.mean(), held.samples, self._optimizer.settings())
        self._log.contribute(held.base, self._replica.version, held.samples, self._take_used(), body)

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
        return last if last is not None and last.decision.over else None

    def _apply(self, commit: Commit) -> None:
        """Make the optimizer's step of one commit."""
        self._replica.apply(commit)
        if commit.asks is not None:
            self._answer(commit.asks)

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
            self._log.finish(pack_buffers(self.model, self._epoch_samples) if averages else b"")
        while (end := self._apply_arrived()) is None:
            self._log.wait()
        self._end_phase(end)
        self._warn_of_left(besides=_DETACHED)  # as a site may after the last phase
        self.traffic.end_step()

    def _end_phase(self, end: Commit) -> None:
        """Average buffers at the end of a phase."""
        if self.options.average_buffers and end.ended:
            average_packed(self.model, end.ended, self._transport.sites)
        self._epoch_samples = 0
        self._trains = self._unfinished = False
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
        self._loader = make_loader(self.server_options, loader, samples, seed, link)
        return self._loader

    def _flush(self, completes: bool) -> None:
        """Send what is held, and report batches without gradients; `completes` joins in reports on the first step."""
        if self._collector.pending or completes:
            self._collect()
        if self._held.samples:
            self._send()
        if used := self._take_used():
            self._log.send(Kind.USED, used=used)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Apply commits until a condition holds, and those that have arrived by then, unless gradients accumulate."""
        if self._collector.pending:
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
        return self._collector.counter.fixed(count)

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
        self._detached = True
        remove_announcer(self._announce)
        self._collector.release()
        self._optimizer.release()
        self._log.leave(_UNFINISHED if self._unfinished else _DETACHED)
        self._warn_unfinished()
        if self._service is not None:
            self._service.close()
