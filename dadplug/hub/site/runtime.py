"""Connection of this process to the other sites of a hub: its link, or its leader's, and the default process group."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ...errors import KitError, MismatchError, RefusedError, SealingError, SiteError
from ...exchange.factory import register_network
from ...exchange.fields import checked
from ...exchange.restrictions import impose_restrictions, lift_restrictions
from ...exchange.rounds import Requirements
from ...exchange.status import describe, watch_exit
from ...exchange.traffic import Traffic
from ...exchange.transport import Nodes, Transport
from ...support.logs import get_logger
from ...support.refusals import refuse
from ...support.signature import check_seconds, number, whole_number
from .. import connections, current_connection
from .. import torch as process_group
from ..pki.kits import Kit
from ..pki.project import KitRestrictions
from ..pki.proxies import target
from ..torch import BACKEND, Collectives, HubGroup, HubStore
from ..wire.messages import ALL_SITES, StartTerms, own_release, wire_of
from .elastic import ElasticTransport
from .led import InsideTransport, LedSites, LedTransport
from .link import NEVER_CONNECTED, PROVISIONAL, HubLink
from .processes import LocalPlace, LocalSite, SiteMembers, SiteTransport
from .transport import HubSites, HubTransport

START_AFTER = 60.0  # seconds, where only start_sites is given
_ERRORS = {each.__name__: each for each in (KitError, MismatchError, RefusedError, SealingError)}  # of the leader


class SiteRuntime:
    """Connection of this process: the link to the hub, the process group and the restrictions of the kit.

    Args:
        kit: kit of this site.
        timeout: seconds to wait for all sites, and for messages of the process group.
        place: place of this process among those of its site; None if it is the only one.
        start: when the run may start without all sites.

    Attributes:
        kit: kit of this site.
        nodes: ranks of the processes of each site; None where each has one.

    Raises:
        SiteError: see `connect`.
        MismatchError: see `connect`.
    """

    def __init__(self, kit: Kit, timeout: float, place: LocalPlace | None, start: StartTerms = ALL_SITES) -> None:
        self.kit = kit
        self.start = start
        self.nodes: Nodes | None = None
        self._link: HubLink | None = None
        self._store: HubStore | None = None
        self._hub: HubTransport | None = None  # also where nothing follows: it takes a channel
        self._counts: list[int] = []
        self._groups = 0
        self._site = f"site {kit.slot} ({kit.name})"
        self._late = place is not None and place.late
        self._may_leave = self._has_collectives = False  # whether sites may; whether torch's collectives were used
        self._local = None if place is None else LocalSite(place, self._site, timeout)
        self._restrictions = KitRestrictions(kit.policy, kit.roster)
        impose_restrictions(self._restrictions)
        connections.append(self)
        try:
            counts = self._share(lambda: self._dial(self.processes, timeout), timeout)
            watch_exit(self)
            self._start_group(counts, timeout)
        except BaseException as error:
            if self._link is not None:
                self._link.leave(describe(error))
            if dist.is_initialized():
                dist.destroy_process_group()
            self.close_transports()
            raise

    def _share(self, find: Callable[[], list[int]], timeout: float) -> list[int]:
        """Return the numbers of processes of all sites, by slot.

        Args:
            find: how the leader finds them; the other processes of this site get them from it, or its error.
            timeout: seconds that the leader has.
        """
        local = self._local
        if local is not None and not local.leads:
            kind, content = local.read(2 * timeout)
            if kind != "counts":
                raise _ERRORS.get(kind, SiteError)(content)
            return [int(count) for count in content]
        try:
            counts = find()
        except BaseException as error:
            if local is not None:
                local.post((type(error).__name__, str(error)))
            raise
        if local is not None:
            local.post(("counts", counts))
        return counts

    def _dial(self, count: int, timeout: float) -> list[int]:
        """Connect to the hub, and exchange versions and numbers of processes with the other sites.

        Args:
            count: number of processes of this site.
            timeout: seconds to wait for all sites.
        """
        link = self._link = HubLink.open(self.kit, timeout=timeout, start=self.start)
        if self.start.sites and not link.rounds.joins:  # sites may leave from now on
            self._hub = ElasticTransport(link, Traffic(), timeout, PROVISIONAL)
        else:
            self._hub = HubTransport(link, Traffic(), timeout)
        if not link.rounds.joins:
            return self._exchange_counts(count)
        counts = [1] * link.world_size  # those of the others are not known, nor needed
        counts[self.kit.slot] = count
        return counts

    def _exchange_counts(self, count: int) -> list[int]:
        assert self._hub is not None
        own = own_release()
        every = self._hub.gather_present((own, count))
        every = checked(every, tuple[str, int], "version", self._hub, lambda each: each[1:])
        if any(wire_of(version) != wire_of(own) for version, _ in every.values()):
            pairs = ", ".join(f"{self.link.name(slot)} {version}" for slot, (version, _) in every.items())
            raise MismatchError(f"the sites run different versions of dadplug: {pairs}")
        return [every[slot][1] if slot in every else 1 for slot in range(self.link.world_size)]

    def meet_processes(self, count: int, port: int, timeout: float) -> None:
        """Agree with all other processes on their number, before a trainer begins; all must call it together.

        Where it has changed, since trainers have started processes, the default process group is made anew. A process
        that has been started meanwhile has agreed by its connection, and its first call does nothing.

        Args:
            count: number of processes of this site.
            port: where this process has started others, port of the loopback interface at which it meets them.
            timeout: seconds to wait for all of them.

        Raises:
            SiteError: if a process or a site does not come in time.
            ValueError: if this site has another number of processes already.
        """
        self._check_start(None)
        if self._late:
            self._late = False
            return
        if self._local is None and count > 1:
            self._local = LocalSite(LocalPlace(0, count, port), self._site, timeout)
        elif self._local is not None and self._local.place.processes != count:
            raise ValueError(
                f"this site has {self._local.place.processes} processes, and the trainer is to use {count}: the number "
                "stays the same in a program"
            )
        counts = self._share(lambda: self._exchange_counts(count), timeout)
        if counts != self._counts:
            dist.destroy_process_group()
            self._start_group(counts, timeout)

    @property
    def processes(self) -> int:
        """Number of processes of this site."""
        return 1 if self._local is None else self._local.place.processes

    @property
    def local_rank(self) -> int:
        """Number of this process among those of its site."""
        return 0 if self._local is None else self._local.place.local_rank

    def _start_group(self, counts: Sequence[int], timeout: float) -> None:
        """Start the default process group of all processes.

        Args:
            counts: numbers of processes of all sites, by slot.
            timeout: seconds for messages of the process group.
        """
        self._counts = list(counts)
        starts = [sum(counts[:slot]) for slot in range(len(counts))]
        rank = starts[self.kit.slot] + self.local_rank
        if sum(counts) > len(counts):
            members = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
            self.nodes = Nodes.of(members, rank)
        store: dist.Store
        if self._local is None:
            store = self._store = self._store or HubStore(self.kit, timeout)
        else:
            self._groups += 1
            store = dist.PrefixStore(f"default/{self._groups}", self._local.store)
        dist.init_process_group(
            BACKEND, store=store, rank=rank, world_size=sum(counts), timeout=timedelta(seconds=timeout)
        )

    @property
    def elastic(self) -> bool:
        """Whether training goes on without a site that leaves."""
        return self._may_leave or (self._link is not None and self._link.rounds.elastic)

    @property
    def is_lost(self) -> bool:
        """Whether the connection is closed, or a site or a process of this one is lost."""
        if self._link is not None and (self._link.closed or {*self._link.gone.values()} - {NEVER_CONNECTED}):
            return True
        return self._local is not None and self._local.processes.found_lost() is not None

    @property
    def link(self) -> HubLink:
        """Link to the hub.

        Raises:
            SiteError: if this process is not the leader of its site.
        """
        if self._link is None:
            raise SiteError("this process is not connected to a hub: the first process of its site is")
        return self._link

    def open_group(self, ranks: Sequence[int], rank: int, seconds: float) -> Collectives:
        """Open a process group; see `dadplug.hub.torch.register`."""
        if self.nodes is None:
            return HubGroup(self.link, ranks, rank, seconds)
        world_size = sum(map(len, self.nodes.members))
        opened = partial(self._open_collectives, seconds)
        group = Collectives(opened, ranks, rank, world_size, seconds, self.kit.policy)
        if self._link is not None and len(ranks) > 1:
            self._link.new_channel()  # as where each site has one process, which a site that joins may take for granted
        return group

    def _open_collectives(self, seconds: float) -> SiteTransport:
        if self._may_leave:
            raise ValueError(
                "collectives of torch.distributed do not go with min_sites and several processes at a site: use "
                "GradientReduction.gather_objects"
            )
        self._has_collectives = True
        return self._open_site_transport(Traffic(), seconds)

    def _check_start(self, requirements: Requirements | None) -> None:
        """Raise ValueError if a run that may start without all sites requires all, or more than it may start with."""
        if self.start.sites and requirements is None:
            raise ValueError(
                f"start_sites needs min_sites: this run may start with {self.start.sites} sites, so give min_sites=, "
                f"{self.start.sites} at most, where training is set up, or leave start_sites out of dadplug.connect()"
            )
        if requirements is not None and 0 < self.start.sites < requirements.min_sites:
            raise ValueError(
                f"min_sites={requirements.min_sites} exceeds start_sites={self.start.sites}, with which the run may "
                "start: raise start_sites, or lower min_sites"
            )

    def open_transport(
        self,
        traffic: Traffic,
        timeout: float,
        requirements: Requirements | None,
        for_trainer: bool,
    ) -> Transport:
        """Open a transport; see `dadplug.exchange.factory.open_transport`."""
        self._check_start(requirements)
        if requirements is None and self.nodes is not None:
            return self._open_site_transport(traffic, timeout)
        if requirements is None:
            return HubTransport(self.link, traffic, timeout)
        if self.nodes is not None:
            self._check_united(for_trainer)
        hub, link = None, self._link
        if link is not None:
            link.rounds.rejoins &= not for_trainer  # it has to be started again to go on at another step
            hub = ElasticTransport(link, traffic, timeout, requirements, for_trainer)
        if self._local is not None:
            return self._unite(self._local, hub, traffic, timeout)
        assert hub is not None
        return hub

    def _check_united(self, for_trainer: bool) -> None:
        """Raise ValueError where sites with several processes cannot leave."""
        if for_trainer:
            assert self.nodes is not None
            counts = zip(self.kit.roster.sites, map(len, self.nodes.members), strict=True)
            raise ValueError(
                "min_sites in trainers goes with one process at each site, and "
                + ", ".join(f"{name} has {count}" for name, count in counts)
                + ": start one process at each site, or leave min_sites out, so that all sites have to stay"
            )
        if self._has_collectives:
            raise ValueError(
                "min_sites with several processes at a site goes without collectives of torch.distributed, and some "
                "have been used: leave them out, or use GradientReduction.gather_objects"
            )

    def _unite(
        self,
        local: LocalSite,
        hub: ElasticTransport | None,
        traffic: Traffic,
        timeout: float,
    ) -> LedTransport:
        """Let the processes of this site act as one."""
        self._may_leave, link = True, self._link
        try:
            inside = InsideTransport(local, link, traffic, timeout)
            sites = LedSites(self.kit.slot, self.kit.roster.sites, local) if hub is None else hub.sites
            return LedTransport(inside, hub, sites, traffic, timeout)
        except SiteError as error:
            if link is not None:
                link.leave(str(error))
            raise

    def _open_site_transport(self, traffic: Traffic, timeout: float) -> SiteTransport:
        assert self.nodes is not None
        hub = None if self._link is None else HubSites(self._link)
        local = self._local
        sites = SiteMembers(self.kit.roster.sites, self.nodes, hub, None if local is None else local.processes)
        try:
            return SiteTransport(local, self._link, sites, self.nodes, traffic, timeout)
        except SiteError as error:
            if self._link is not None:
                self._link.leave(str(error))
            raise

    def close_transports(self) -> None:
        """Close the connections to the hub. May be called twice."""
        if self._link is not None:
            self._link.close()
        if self._store is not None:
            self._store.close()
        lift_restrictions(self._restrictions)
        if self in connections:
            connections.remove(self)


def _connected() -> SiteRuntime:
    connection = current_connection()
    if not isinstance(connection, SiteRuntime):
        raise SiteError("this process is not connected to a hub: call dadplug.connect(kit=...)")
    return connection


process_group.register(lambda ranks, rank, seconds: _connected().open_group(ranks, rank, seconds))
register_network(
    lambda group: isinstance(group, Collectives),
    lambda traffic, _, *options: _connected().open_transport(traffic, *options),
    lambda group: _connected().elastic,
)

_log = get_logger(__name__)


def check_not_connected() -> None:
    """Raise ValueError if this process is connected by a kit."""
    if (connection := current_connection()) is not None and not connection.is_lost:
        raise ValueError(
            f"this process is connected by the kit {connection.kit.folder} already: leave out rank, num_nodes, dist_url"
        )


def start_terms(kit: Kit, start_sites: int | None, start_after: float | None, timeout: float) -> StartTerms:
    """Return when the run may start without all sites; raise ValueError if that is out of its range."""
    if start_sites is None:
        return ALL_SITES
    whole_number(1)("start_sites", start_sites)
    after = START_AFTER if start_after is None else start_after
    number("a number of seconds of at least 0", lambda seconds: 0 <= seconds < math.inf)("start_after", after)
    sites, place = kit.roster.sites, LocalPlace.find(os.environ)
    refuse(
        (start_sites > len(sites), f"start_sites={start_sites}, but the roster has {len(sites)}: {', '.join(sites)}"),
        (
            after >= timeout,
            f"start_after={after:g} s is not below timeout={timeout:g} s, for which a site waits for the start: give a "
            "larger timeout",
        ),
        (
            place is not None and place.processes > 1,
            "start_sites goes with one process at each site, as min_sites: start one, or leave start_sites out",
        ),
    )
    return StartTerms(start_sites, round(1e3 * after))


def connect_by_kit(
    kit: str | Path,
    rank: int | None,
    num_nodes: int | None,
    dist_url: str | None,
    backend: str | None,
    timeout: float,
    start_sites: int | None = None,
    start_after: float | None = None,
) -> None:
    """Connect this site to the hub of a kit; see `dadplug.connect`."""
    check_seconds("timeout", timeout)
    loaded = load_site_kit(kit, rank=rank, num_nodes=num_nodes, dist_url=dist_url, backend=backend)
    start = start_terms(loaded, start_sites, start_after, timeout)
    if dist.is_initialized():
        if _is_connected(loaded, start):
            return
        dist.destroy_process_group()
    while (connection := current_connection()) is not None:  # of an earlier run
        connection.close_transports()
    try:
        SiteRuntime(loaded, timeout, LocalPlace.find(os.environ), start)
    except SiteError as error:  # of the hub or the way to it, so that a traceback of dadplug would not help
        _log.debug("this site is not connected", exc_info=error)
        raise error.with_traceback(None) from None
    names = ", ".join(loaded.roster.sites)
    if loaded.policy.allow_pickle:
        _log.warning(
            "the policy of the kit %s has allow_pickle = true: other sites, and the hub where messages are not sealed, "
            "can run programs at this site",
            loaded.folder,
        )
    sealed = "sealed, as its kit requires" if loaded.roster.sealed else "not sealed: the hub can read and change them"
    place = target(*loaded.roster.address()), loaded.slot, names
    _log.info("connected to the hub %s as site %d of %s; messages are %s", *place, sealed)


def load_site_kit(folder: str | Path, **places: object) -> Kit:
    """Load the kit by which this process is to be connected.

    Args:
        folder: folder of the kit.
        places: what a kit determines, by the names of arguments; None where it is not given.

    Raises:
        ValueError: if one of them is given, or the environment announces processes that are not those of one site.
        KitError: if the kit is incomplete or damaged, or that of the hub.
    """
    if given := [name for name, value in places.items() if value is not None]:
        raise ValueError(f"a kit determines the place of this site and its backend: leave out {', '.join(given)}")
    LocalPlace.find(os.environ)  # or an error
    kit = Kit.load(folder)
    if kit.is_hub:
        raise KitError(f"{folder} is the kit of the hub: a site needs its own")
    return kit


def _is_connected(kit: Kit, start: StartTerms) -> bool:
    """Return whether this process is connected by a kit, and none of its sites is lost.

    Args:
        kit: the kit.
        start: what this call states on the start.

    Raises:
        ValueError: if this process is connected otherwise.
    """
    connection = current_connection()
    if connection is None:
        raise ValueError("this process has a process group already, whose messages do not go over the kit's hub")
    if connection.kit.certificate != kit.certificate:
        raise ValueError(f"this process is connected by the kit {connection.kit.folder} already")
    if start.sites and start != connection.start and not connection.is_lost:
        raise ValueError(f"{start}, but this process is connected already, with {connection.start}")
    return not connection.is_lost
