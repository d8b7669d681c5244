"""Transport between sites with several processes each: over loopback inside a site, and over one link to the hub.

The leader of a site sends its processes' payloads to the hub as one, and passes on to them what arrives. A sum is
formed in three steps: the leader adds up the tensors of its site, the hub or every leader adds up those of the sites,
and the leader sends the result to its processes. To a method, a site is a node, see `dadplug.exchange.hierarchy`.

Processes of one site: how they find each other on their machine, and the connections between them.

The process with local rank 0, the leader, holds the site's only connection to the hub. The others meet it at a port of
the loopback interface, and exchange with it, and with each other, over loopback only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import MismatchError, SiteError
from ...exchange import codec
from ...exchange.group_transport import Work
from ...exchange.handshake import within
from ...exchange.hierarchy import Forwarding, Job, NodeMessages, WorkerThreads
from ...exchange.rendezvous import meet
from ...exchange.rounds import Rounds
from ...exchange.status import Member, PeerNames, ProcessSites, Silence, own_member, watch_exit
from ...exchange.traffic import Traffic
from ...exchange.transport import Gather, Nodes, PendingSum, Streams
from .. import LOOPBACK, STARTED_PROCESSES
from ..wire.messages import add_up
from .link import HubLink
from .transport import CollectiveTransport, HubGather, HubSites, HubTransport

_POLL_SECONDS = 0.05  # between two looks for a message of the leader
ALIVE_SECONDS = 2.0  # between two questions whether the others are alive
_ASK_SECONDS = 1.0  # for answers to that
_SLACK_SECONDS = 5.0  # grace period for the leader to report its own timeout
_RELAYED = "relayed: "  # before a reason that the leader has from the hub


class LocalPlace(NamedTuple):
    """Place of a process among those of its site.

    Attributes:
        local_rank: local rank; 0 for the leader.
        processes: number of processes.
        port: port of the rendezvous on the loopback interface.
        by_torchrun: whether torchrun hosts the rendezvous.
        late: whether the leader has started this process when it was connected already, as Lightning's launcher does.
    """

    local_rank: int
    processes: int
    port: int
    by_torchrun: bool = False
    late: bool = False

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> LocalPlace | None:
        """Return the place that a launcher has given to this process; None if it is the only one of its site.

        Args:
            environment: environment variables, of torchrun, of `dadplug.support.processes` or of Lightning's launcher.

        Raises:
            ValueError: if they are not those of several processes on one machine.
        """
        late = STARTED_PROCESSES in environment and environment.get("LOCAL_RANK", "0") != "0"
        here = environment.get(STARTED_PROCESSES if late else "LOCAL_WORLD_SIZE", "1")
        if here == "1":
            return None
        names = (STARTED_PROCESSES if late else "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        numbers = [environment.get(name, "") for name in names]
        if not here.isdigit() or not all(number.isdigit() for number in numbers):
            raise ValueError(
                f"the environment announces {here} processes here (LOCAL_WORLD_SIZE), and its variables "
                f"{', '.join(names)} should be numbers: start the processes of a site by torchrun --standalone"
            )
        world, index, port = map(int, numbers)
        if world != int(here):
            raise ValueError(
                f"the environment announces {world} processes (WORLD_SIZE), of which {here} are here: with a kit, the "
                "processes of a site run on one machine, and each site starts its own: torchrun --standalone "
                f"--nproc_per_node={here}"
            )
        return cls(index, world, port, "TORCHELASTIC_RUN_ID" in environment, late)


class LocalProcesses(ProcessSites):
    """Processes of this site by their local ranks, with exit reasons.

    Args:
        index: local rank of this process.
        members: the processes, by local rank.
        site: name of the site for messages.

    Attributes:
        found: error by which one of them was found lost; None before.
    """

    def __init__(self, index: int, members: Sequence[Member], site: str) -> None:
        super().__init__(index, members)
        self._site = site
        self.found: SiteError | None = None

    def __getitem__(self, rank: int) -> str:
        return f"process {rank} of {self._site}"

    def relay(self, error: BaseException) -> None:
        """Tell the other processes an error of the connection to the hub; to be called by the leader."""
        self.report(f"{_RELAYED}{error}")

    def found_lost(self) -> SiteError | None:
        self.found = self._relayed() or super().found_lost() or self.found
        return self.found

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError | MismatchError:
        found = super().lost(error, timeout, peer)
        self.found = self._relayed() or (found if isinstance(found, SiteError) else None)
        return self.found or found

    def check_alive(self) -> bool:
        """Return whether all of the other processes answer.

        Raises:
            SiteError: if one of them has ended.
        """
        answers = self._ask().values()
        if Silence.REFUSED in answers:
            raise self.lost(ConnectionError("it has ended"), _ASK_SECONDS)
        return Silence.UNANSWERED not in answers

    def _relayed(self) -> SiteError | None:
        """Return the error that the leader has told, if it has."""
        for report in self._reports().values():
            if report.reason and report.reason.startswith(_RELAYED):
                return SiteError(report.reason.removeprefix(_RELAYED))
        return None


class LocalSite:
    """Processes of this site that have met.

    Args:
        place: place of this process.
        site: name of the site for messages.
        timeout: seconds to wait for the others.

    Attributes:
        place: place of this process.
        processes: the processes.
        store: store that they share.

    Raises:
        SiteError: if a process does not come in time.
    """

    _attempts = 0  # of this process

    def __init__(self, place: LocalPlace, site: str, timeout: float) -> None:
        LocalSite._attempts += 1
        self.place = place
        address, own = (LOOPBACK, place.port), own_member([LOOPBACK])
        try:
            store, members = meet(
                place.local_rank, place.processes, address, timeout, own, place.by_torchrun, "process"
            )
        except SiteError as error:
            raise SiteError(f"the processes of {site} have not met: {error}") from error
        self.processes = LocalProcesses(place.local_rank, members, site)
        # The token of the leader tells its runs apart: torchrun keeps its store when it restarts the processes.
        self.store = dist.PrefixStore(f"dadplug/site/{members[0].token.hex()}/{LocalSite._attempts}", store)
        self._groups = self._messages = 0

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.place.local_rank == 0

    def post(self, message: Any) -> None:
        """Send a message to all other processes; to be called by the leader.

        Args:
            message: what `dadplug.exchange.codec.encode` takes.
        """
        self.store.set(self._next_message(), codec.encode(message).hex())

    def _next_message(self) -> str:
        self._messages += 1
        return f"message/{self._messages}"

    def read(self, timeout: float) -> Any:
        """Wait for the next message of the leader.

        Args:
            timeout: seconds that the leader has.

        Raises:
            SiteError: if the leader has ended, or is silent.
        """
        deadline = time.monotonic() + timeout + _SLACK_SECONDS
        asked, key = time.monotonic(), self._next_message()
        while not self._call(timeout, lambda: self.store.check([key])):
            now = time.monotonic()
            if now > deadline:
                raise self.processes.lost(TimeoutError("timed out"), timeout, 0)
            if now > asked + ALIVE_SECONDS:
                asked = now
                self.processes.check_alive()
            time.sleep(_POLL_SECONDS)
        return codec.decode(bytes.fromhex(self._call(timeout, lambda: self.store.get(key)).decode()))

    def _call(self, timeout: float, call: Any) -> Any:
        try:
            return within(timeout, call)
        except (RuntimeError, TimeoutError) as error:
            raise self.processes.lost(error, timeout, 0) from error

    def connect(self, timeout: float, patience: float | None = None) -> Any:
        """Open gloo connections on the loopback interface between all processes of the site.

        All of them must call it together.

        Args:
            timeout: seconds after which a silent process counts as lost.
            patience: seconds that the leader may wait for other sites; None for `timeout`.

        Returns:
            A `dist.ProcessGroupGloo`.

        Raises:
            SiteError: if a process has ended or does not answer.
        """
        self.processes.begin_session()
        self._groups += 1
        store = dist.PrefixStore(f"group/{self._groups}", self.store)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        # What the leader sends to the others may have to wait for other sites, for as long.
        longest = timeout + (timeout if patience is None else patience) + _SLACK_SECONDS
        options._timeout = timedelta(seconds=timeout if self.leads else longest)
        place = self.place
        try:
            return within(
                timeout + _SLACK_SECONDS,
                lambda: gloo(store, place.local_rank, place.processes, options),
                self.processes.check_alive,
            )
        except (RuntimeError, TimeoutError) as error:
            raise self.processes.lost(error, timeout) from error


class SiteMembers(PeerNames):
    """Processes of all sites.

    Args:
        names: names of the sites, by slot.
        nodes: ranks of the processes of each site.
        hub: the sites as the connection to the hub knows them; None at a process that is not its site's leader.
        local: processes of this site; None if it has one.
    """

    def __init__(self, names: Sequence[str], nodes: Nodes, hub: HubSites | None, local: LocalProcesses | None) -> None:
        super().__init__(
            nodes.own[nodes.index],
            [
                f"{name}, process {index}"
                for name, ranks in zip(names, nodes.members, strict=True)
                for index in range(len(ranks))
            ],
        )
        self._sites = list(names)
        self._nodes = nodes
        self._hub = hub
        self._local = local
        watch_exit(self)

    def __getitem__(self, rank: int) -> str:
        slot = next(slot for slot, ranks in enumerate(self._nodes.members) if rank in ranks)
        site = f"site {slot} ({self._sites[slot]})"
        ranks = self._nodes.members[slot]
        return site if len(ranks) == 1 else f"process {ranks.index(rank)} of {site}"

    def found_lost(self) -> SiteError | None:
        # A site that has left may have sent all that is waited for: the wait for the hub itself finds what is missing.
        return None if self._local is None else self._local.found_lost()

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError | MismatchError:
        if isinstance(error, SiteError):
            return error
        own = self._nodes.own
        if self._local is not None and (peer is None or peer in own):
            return self._local.lost(error, timeout, None if peer is None else own.index(peer))
        if self._hub is not None:
            return self._hub.lost(error, timeout)
        assert self._local is not None
        return self._local.lost(error, timeout, 0)  # what comes from other sites comes by way of the leader


_PACKET_BYTES = 1 << 14  # that cost less than a few latencies


class SiteRounds(Rounds):
    """Training steps of sites with several processes, all of which stay.

    Args:
        size: number of processes of all sites.
        hub: transport to the other sites, at the leader of the site; None at its other processes.
    """

    def __init__(self, size: int, hub: HubTransport | None) -> None:
        super().__init__(size)
        self._hub = hub

    def end_step(self) -> None:
        if self._hub is not None:
            self._hub.rounds.end_step()

    def wait_for_hub(self, seconds: float) -> None:
        if self._hub is not None:
            self._hub.rounds.wait_for_hub(seconds)


class NoStreams(Streams):
    """Byte streams of sites with several processes, which have none."""

    def open_streams(self, timeout: float) -> NoReturn:
        raise ValueError(
            "AdaPM's tables and parameter servers exchange messages between pairs of sites, and over a hub each site "
            "has one process for that: start one process at each site"
        )

    def open_hub_stream(self, timeout: float) -> None:
        return None


class SiteTransport(CollectiveTransport, NodeMessages, NoStreams):
    """Messages between the processes of all sites. All buffers lie on the CPU.

    Args:
        local: processes of this site; None if it has one.
        link: link to the hub, at the leader of the site; None at its other processes.
        sites: the processes by name.
        nodes: ranks of the processes of each site.
        traffic: the meter; what goes to other sites is counted at the leader, once for the site.
        timeout: seconds after which a silent process counts as lost.
        patience: as in `LocalSite.connect`.
    """

    has_all_to_all = False  # payloads travel as those of a site

    def __init__(
        self,
        local: LocalSite | None,
        link: HubLink | None,
        sites: PeerNames,
        nodes: Nodes,
        traffic: Traffic,
        timeout: float,
        patience: float | None = None,
    ) -> None:
        self.workers = WorkerThreads()
        self._process = os.getpid()
        self._last: object = None
        self._gloo: Any = None  # connections inside the site; None once they are closed
        self._error: SiteError | MismatchError | None = None  # the first one, which has closed the connections
        super().__init__(sites, traffic, sites.rank, torch.device("cpu"), timeout)
        self.nodes = nodes
        self.copies = int(link is not None)
        self.ring = float(self.copies)
        self._local = local
        self._link = link
        # Two channels: a thread numbers the sums once the tensors of its site have come, in one order at all sites.
        self.hub = None if link is None else HubTransport(link, Traffic(), timeout)
        self.sums = None if link is None else HubTransport(link, Traffic(), timeout)
        self.rounds = SiteRounds(len(sites), self.hub)
        if local is not None:
            self._gloo = local.connect(timeout, patience)
        sites.watch(self)

    @property
    def leader(self) -> int:
        """Rank of the leader of this site."""
        return self.nodes.own[0]

    def close(self) -> None:
        if self._process != os.getpid():
            return  # the threads of gloo do not exist in a forked child: to destroy a group would wait for them
        if self._gloo is None:
            self.workers.close(0.0)
            return
        self._end_workers(self.nodes.peers)
        self._last = None
        self._close_gloo()

    def _close_gloo(self) -> None:
        gloo, self._gloo = self._gloo, None
        with suppress(RuntimeError, AttributeError):
            gloo.shutdown()

    def __del__(self) -> None:
        self.close()

    def lost(self, error: BaseException, peer: int | None = None) -> SiteError | MismatchError:
        return self._error if isinstance(self._error, SiteError) else super().lost(error, peer)

    # Messages inside the site

    def _start(self, tensor: Tensor, rank: int, tag: int, sends: bool) -> dist.Work:
        if self._gloo is None:
            raise RuntimeError("the connection is closed")
        start = self._gloo.send if sends else self._gloo.recv
        work: dist.Work = start([tensor], self.nodes.own.index(rank), tag)
        return work

    def wait(self, work: Work, peer: int | None = None) -> None:
        try:
            with self.traffic.waiting():
                work.wait()
        except RuntimeError as error:
            raise self._failed(self.lost(error, peer)) from error
        self._last = work  # as in `GroupTransport.wait`

    def wait_for(self, job: Job) -> None:
        try:
            super().wait_for(job)
        except (SiteError, MismatchError) as error:
            raise self._failed(error) from error

    def _failed(self, error: SiteError | MismatchError) -> SiteError | MismatchError:
        """Tell the other processes of this site and, if one of these is lost, the other sites; return the error.

        The connections inside the site are closed, so that no process waits for messages that do not come.
        """
        self._error = self._error or error
        if self._link is None or self._local is None:
            return error
        others_end = not self._link.rounds.elastic and self._link.first_lost() is not None
        if not (others_end or self._link.closed):
            self._link.leave(str(error))
        self._local.processes.relay(error)
        self._close_gloo()
        return error

    # Messages between all processes

    def gather(self, sizes: Sequence[int], dtype: torch.dtype, first: Gather | None = None, **use: Any) -> SiteGather:
        over_hub, before = None, first.over_hub if isinstance(first, SiteGather) else None
        if self.hub is not None:
            totals = [sum(sizes[rank] for rank in ranks) for ranks in self.nodes.members]
            over_hub = self.hub.gather(totals, dtype, first=before, **use)
        return SiteGather(self, over_hub, sizes, dtype, self.tags(self.world_size))

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        if self._local is None:
            assert self.sums is not None
            self.traffic.add(tensor.numel() * tensor.element_size())
            return self.sums.all_reduce(tensor)
        return PendingSum(_SiteSum(self, tensor.view(-1), self.tags(2)).finish)

    def prefers_gather(self, nbytes: int) -> bool:
        return (self.world_size - 1) * nbytes <= _PACKET_BYTES


class SiteGather(Forwarding[SiteTransport], Gather):
    """Gather of payloads of all processes: those of a site travel over the hub as one.

    Args:
        transport: the transport.
        over_hub: gather of the sites' payloads, at the leader.
        sizes: number of elements of each process's payload, by rank.
        dtype: type of the elements.
        tag: first of as many tags as there are processes.

    Attributes:
        over_hub: gather of the sites' payloads, at the leader.
    """

    def __init__(
        self, transport: SiteTransport, over_hub: HubGather | None, sizes: Sequence[int], dtype: torch.dtype, tag: int
    ) -> None:
        super().__init__(transport, tag)
        self.over_hub = over_hub
        members, own = transport.nodes.members, transport.nodes.node
        totals = [sum(sizes[rank] for rank in ranks) for ranks in members]
        flats = [torch.zeros(total, dtype=dtype) for total in totals] if over_hub is None else over_hub.payloads
        parts: dict[int, Tensor] = {}
        for ranks, flat in zip(members, flats, strict=True):
            parts.update(zip(ranks, flat.split([sizes[rank] for rank in ranks]), strict=True))
        self._payloads = [parts[rank] for rank in range(transport.world_size)]
        self._remote = [(ranks[0], flats[slot]) for slot, ranks in enumerate(members) if slot != own]
        self._own_bytes = totals[own] * flats[own].element_size()
        self.payload = self._payloads[transport.rank]
        self._arriving: list[tuple[Work, int]] | None = None

    def post(self) -> None:
        if self._arriving is not None:
            return
        transport = self._transport
        self._arriving = []
        for peer in transport.nodes.peers:
            self._arriving += transport.receive(self._payloads[peer], peer, self._tag + peer)
        if self.over_hub is not None:
            self.over_hub.post()
            return
        for first, flat in self._remote:
            self._arriving += transport.receive(flat, transport.leader, self._tag + first)

    def launch(self) -> None:
        self.post()
        transport, arriving = self._transport, self._arriving or []
        over_hub = self.over_hub
        if over_hub is not None:
            transport.traffic.add(self._own_bytes)
            if not transport.nodes.peers:
                over_hub.launch()
                return
        for peer in transport.nodes.peers:
            self._sends += transport.send(self.payload, peer, self._tag + transport.rank)
        steps: list[tuple[str, Callable[[], None]]] = [("up", lambda: transport.arrive(arriving))]
        if over_hub is not None:
            steps = [("up", partial(self._pass_up, over_hub, arriving)), ("down", partial(self._pass_down, over_hub))]
        self._jobs = [transport.workers.submit(*steps)]

    def _pass_up(self, over_hub: HubGather, arriving: Sequence[tuple[Work, int]]) -> None:
        self._transport.arrive(arriving)
        over_hub.launch()

    def _pass_down(self, over_hub: HubGather) -> None:
        transport = self._transport
        over_hub.wait()
        for first, flat in self._remote:
            for peer in transport.nodes.peers:
                self._sends += transport.send(flat, peer, self._tag + first)

    def wait(self) -> list[Tensor]:
        if not self._jobs and self._arriving is not None and self.over_hub is not None:
            with self._transport.traffic.waiting():
                self.over_hub.wait()
        self.finish()
        self._arriving = None
        return self._payloads


class _SiteSum(Forwarding[SiteTransport]):
    """Sum over all processes, of a site with several."""

    def __init__(self, transport: SiteTransport, flat: Tensor, tag: int) -> None:
        super().__init__(transport, tag)
        self._flat = flat
        self._sum: PendingSum | None = None
        peers, leader = transport.nodes.peers, transport.leader
        if transport.sums is None:
            arriving = transport.receive(flat, leader, tag + 1)
            self._sends += transport.send(flat, leader, tag)
            self._jobs = [transport.workers.submit(("back", lambda: transport.arrive(arriving, sums=True)))]
            return
        transport.traffic.add(flat.numel() * flat.element_size())
        addends = [torch.empty_like(flat) for _ in peers]
        add = partial(self._add, transport.sums, addends, self._receive_all(addends, peers, tag))
        self._jobs = [transport.workers.submit(("up", add), ("down", self._send_result))]

    def _add(self, sums: HubTransport, addends: Sequence[Tensor], received: Sequence[tuple[Work, int]]) -> None:
        self._transport.arrive(received)
        total = add_up([self._flat, *addends])
        if total is not self._flat:
            self._flat.copy_(total)
        self._sum = sums.all_reduce(self._flat)

    def _send_result(self) -> None:
        transport = self._transport
        assert self._sum is not None
        self._sum.wait()
        for peer in transport.nodes.peers:
            self._sends += transport.send(self._flat, peer, self._tag + 1)
