"""Parameter server without parameters: sites send gradients, and all apply one log of them in the same order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..exchange import Transport
from ..exchange.exit_reasons import add_announcer, remove_announcer
from ..local_steps.checks import raise_problems
from ..methods import Quality, make_method
from ..model_sync.replicated_model import ReplicatedModel
from ..signature import takes_keywords_of
from .averages import average_buffers, pack_buffers
from .collector import GradientCollector
from .connect import connect_star
from .contribution import ContributionCodec
from .dealer import OwnDealer, SharedDealer
from .dealing import LogLink, OwnLoader, SharedLoader, SiteLoader
from .gradients import HeldGradients
from .log import Commit, Log
from .optimizer import LoggedOptimizer
from .options import ServerOptions
from .replica import Replica, check_site_model
from .sequencer import Sequencer
from .service import SequencerService
from .streams import Kind

_LEAST_LIMIT = 1 << 26  # bytes of a contribution that are possible in any case
_ROLES = ("worker", "server")
_DETACHED = "it has called detach()"


class ParameterServer(ReplicatedModel):
    """Asynchronous training: each site sends its gradients, and nobody waits for the parameters of others.

    No parameters travel. Each site sends its gradient, compressed as in `dadplug.GradientReduction`. A sequencer, which
    one site starts, orders these contributions in a log. Every site applies the log with its own optimizer, so that
    replicas of one version have the same bits. At the start all sites get rank 0's parameters and buffers.

    Args:
        model: the model, on its device, the same on all sites but for the values of its parameters.
        optimizer: the optimizer of the model's parameters; `step` and `finish` call its ``step``.
        mode: ``"dsgd"``, ``"dad"`` or ``"rankdad"``: how gradients are encoded.
        role: ``"worker"``, or ``"server"`` for a process that makes no batches: it calls `finish` where the others do,
            and then holds their model, to evaluate it and to write checkpoints. Rank 0 orders the log in any case.
        process_group: the processes that are the sites; the default group where None.
        options: the options, with the names and defaults of `dadplug.parameter_server.ServerOptions`.

    Attributes:
        server_options: the options.

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
        **options: Any,
    ) -> None:
        self._problem = ""  # of the arguments
        self._role = role
        try:
            if role not in _ROLES:
                raise ValueError(f"unknown role {role!r}; valid ones are {', '.join(map(repr, _ROLES))}")
            self.server_options = ServerOptions.create(mode=mode, **options)
            check_site_model(model)
            self._optimizer = LoggedOptimizer(optimizer, model)
        except ValueError as error:  # raised once the other sites know
            self._problem = str(error)
            self.server_options = ServerOptions()
        self._rules = self.server_options.rules
        super().__init__(model, process_group, self.server_options.of_reduction())
        self._earlier = 0  # versions before the start, of a training that this one resumes
        self._method = make_method(self.options)
        self._collector = GradientCollector(model, self._method, self.options)
        self._gradients = self._collector.gradients
        self._codec = ContributionCodec(self._gradients, self._method, self.options)
        self._replica = Replica(self._gradients, self._codec, self._method, self._optimizer, self._transport.sites)
        self._held = HeldGradients()
        self._detached = False
        self._loader: SiteLoader | None = None  # the last one
        self._reported: set[int] = set()  # sites of which a warning has been given that they have left
        self._connect()
        self._optimizer.guard()
        self.traffic.start()

    def _open_transport(self, process_group: dist.ProcessGroup | None) -> Transport:
        transport = super()._open_transport(process_group)
        roles = transport.gather_objects(self._role)
        self._workers = [rank for rank, role in enumerate(roles) if role == "worker"]
        quorum, workers = self._rules.quorum, len(self._workers)
        if not self._problem and not workers:
            self._problem = "no process has role='worker'"
        if not self._problem and quorum > workers:
            self._problem = f"quorum={quorum} needs as many sites, and there are {workers}"
        raise_problems(self._problem, transport)
        return transport

    def _connect(self) -> None:
        """Start the sequencer at site 0, and connect this site to it."""
        options = self.options
        parameters = list(self.model.parameters())
        limit = _LEAST_LIMIT + 16 * sum(each.numel() * each.element_size() for each in parameters)
        own, served = connect_star(self._transport, 0, options.timeout)
        self._service: SequencerService | None = None
        if served:
            shared = self.server_options.deal == "shared"
            dealer = SharedDealer(self._workers) if shared else OwnDealer(self._workers)
            sequencer = Sequencer(self._workers, self._rules, balanced=not shared)
            self._service = SequencerService(
                served, self._workers, sequencer, dealer, limit, options.site_timeout, self.traffic, self.site_rank
            )
        sites = self._transport.sites
        self._log = Log(own, 0, sites, limit, options.site_timeout, options.timeout, self.traffic)
        add_announcer(self._announce)

    def _announce(self, reason: str, _: bool) -> None:
        self._log.leave(reason)

    def _describe(self) -> dict[str, str]:
        rules = self._rules._asdict() | {"deal": self.server_options.deal}
        rules = {f"option {name}": repr(value) for name, value in rules.items()}
        return super()._describe() | rules | self._optimizer.describe()

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
        """Send the gradients of the backward passes since the last call, and apply what has been committed.

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
        self._collect()
        self._apply_arrived()
        if self._held.samples and (not self._log.blocked or self._log.outstanding >= self._rules.staleness):
            self._send()
        before, waits = self._replica.version, self._log.outstanding > self._rules.staleness
        while self._log.outstanding > self._rules.staleness:
            self._log.wait(lambda: self._log.outstanding <= self._rules.staleness)
            self._apply_arrived()
        self._apply_arrived()  # what has arrived meanwhile
        if waits and self._rules.staleness and self._replica.version > before and not self._held.samples:
            self._log.reach(self._replica.version)
        self._warn_of_left()
        self.traffic.end_step()

    def _collect(self) -> None:
        """Move the gradients of the model to those that are held."""
        taken, samples = self._collector.collect(self._transport)
        self._epoch_samples += self._collector.counted
        if taken and samples:
            self._held.add(taken, samples, self._replica.version)

    def _send(self) -> None:
        """Send what is held."""
        held, self._held = self._held, HeldGradients()
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

    def finish(self) -> None:
        """End a phase of training: send what is held, and wait until all sites have done so and all is applied.

        All sites must call it, each after its last batch; sites that have left are not waited for. Afterwards the
        replicas have the same bits, and float buffers are averaged over sites unless ``average_buffers=False``.
        Training may go on.

        Raises:
            SiteError: if the sequencer's site is gone, or a site does not call it within the timeout.
        """
        averages = self.options.average_buffers
        self._flush(True)
        if self._role == "worker":
            self._apply_arrived()
            self._log.finish(pack_buffers(self.model, self._epoch_samples) if averages else b"")
        while (end := self._apply_arrived()) is None:
            self._log.wait()
        if averages and end.ended:
            average_buffers(self.model, end.ended, self._transport.sites)
        self._epoch_samples = 0
        self._warn_of_left(besides=_DETACHED)  # as a site may after the last phase
        self.traffic.end_step()

    def loader(self, loader: Any, *, samples: int | None = None, seed: int = 0) -> SiteLoader:
        """Return a loader whose epochs are those of all sites; every site trains on one, or none does.

        Call `step` for its batches, and `finish` after an epoch, or after several. With ``deal="shared"`` all sites have one data set. Its batches are handed out on demand, in an order that
        depends on `seed` and epoch only, and an epoch is over when each has been used once. The batches of a site that
        is lost, and that it has sent no gradient of, go to others.

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
            raise RuntimeError("a process with role='server' trains on no data: call finish() where the others do")
        self._flush(False)  # batches of another loader
        link = LogLink(self._log, self._flush, self._wait)
        if self.server_options.deal == "shared":
            self._loader = SharedLoader(loader, seed, link)
        else:
            self._loader = OwnLoader(loader, samples, self.options.weighting == "samples", link)
        return self._loader

    def _flush(self, completes: bool) -> None:
        """Send the gradients that are held, and report dealt batches without gradients.

        Args:
            completes: whether to take part in the reports on the first step, if that has not been made.
        """
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

    @property
    def syncing(self) -> bool:
        """Always False: `synchronize` is not due after a backward pass."""
        return False

    def synchronize(self) -> None:
        """Do nothing: `step` sends the gradients. For trainers that call it after each backward pass."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return an empty context: gradients accumulate until `step` in any case."""
        return nullcontext()

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
        for site, reason in list(self._log.left.items()):
            if site not in self._reported and reason != besides:
                self._reported.add(site)
                warnings.warn(f"{self._transport.sites[site]} has left, and the others go on: {reason}", stacklevel=3)

    @property
    def present_sites(self) -> list[int]:
        """Ranks of the sites that have not left."""
        return [rank for rank in range(self.world_size) if rank not in self._log.left]

    @property
    def quality(self) -> dict[str, Quality]:
        """Effective rank and relative residual of this site's compressed gradients, by name of the weight."""
        return self._method.quality()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state beside its model and its optimizer, which are the same on all sites.

        It involves no other site. Each site saves its own, after `finish`.

        Raises:
            RuntimeError: if gradients have not been committed yet.
        """
        if self._held.samples or self._log.outstanding or self._collector.pending:
            raise RuntimeError("some gradients of this site are not committed yet: call finish() on all sites before")
        return {"version": self.version} | self._replica.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; all sites must do so, before their first step.

        Args:
            state: the state.
        """
        self._earlier = state["version"] - self._replica.version
        self._replica.load_state_dict(state)

    def load_states(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Restore this site's state from those of all sites, as a checkpoint contains them.

        A site that has none in it begins with an empty compressor state, at the version of the others.

        Args:
            states: the states, by rank.
        """
        own = states[self.site_rank] if self.site_rank < len(states) else None
        other = next((each for each in states if each is not None), None)
        if own is not None:
            self.load_state_dict(own)
        elif other is not None:
            empty = self._replica.state_dict() | {"reference": other["reference"]}
            self.load_state_dict(dict(other) | empty)

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
        self._log.leave(_DETACHED)
        if self._service is not None:
            self._service.close()
