"""Interface between the exchange and the network: gather payloads, sum buckets, and send objects at set-up."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError, SiteError
from ..support.logs import get_logger
from ..support.signature import valid
from ..support.structs import Count, Milliseconds
from .fields import checked
from .traffic import Traffic

if TYPE_CHECKING:
    from .status import PeerNames

_log = get_logger(__name__)

# Layout of hierarchical groups: the processes of each node.

Hierarchy = str | int | Sequence[Sequence[int]] | None

# Environment variables with the number of a node: torchrun, Lightning, SLURM.
_NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Nodes:
    """Processes of each node, and the position of this process among them.

    Attributes:
        members: ranks by node, ascending in each node.
        node: number of this process's node.
        index: index of this process among those of its node.
    """

    members: tuple[tuple[int, ...], ...]
    node: int
    index: int

    @classmethod
    def of(cls, members: Sequence[Sequence[int]], rank: int) -> Nodes:
        """Make the layout as one process sees it.

        Args:
            members: ranks by node.
            rank: rank of the process.
        """
        sorted_members = tuple(tuple(sorted(ranks)) for ranks in members)
        node = next(number for number, ranks in enumerate(sorted_members) if rank in ranks)
        return cls(sorted_members, node, sorted_members[node].index(rank))

    @property
    def count(self) -> int:
        """Number of nodes M."""
        return len(self.members)

    @property
    def own(self) -> tuple[int, ...]:
        """Ranks of this node's processes."""
        return self.members[self.node]

    @property
    def peers(self) -> list[int]:
        """Ranks of the other processes of this node."""
        return [rank for index, rank in enumerate(self.own) if index != self.index]

    @property
    def owners(self) -> int:
        """Number of processes that exchange with other nodes, on every node: as many as the smallest node has."""
        return min(map(len, self.members))

    def partners(self, index: int) -> list[int]:
        """Return the ranks on the other nodes that receive from the process with this index."""
        return [ranks[index % len(ranks)] for number, ranks in enumerate(self.members) if number != self.node]

    def receiver(self, rank: int) -> int:
        """Return the rank on this node that receives from a process of another node."""
        (index,) = (ranks.index(rank) for ranks in self.members if rank in ranks)
        return self.own[index % len(self.own)]


def node_id() -> tuple[str, str]:
    """Return what identifies this process's node: its number, if the launcher gives it one, and its host name."""
    number = next((os.environ[name] for name in _NODE_VARIABLES if name in os.environ), "0")
    return number, socket.gethostname()


def _is_hierarchy(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(ranks, (list, tuple)) for ranks in value)
    return value in (None, "auto") or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


check_hierarchy = valid(
    "None, 'auto', a number of processes on each node, or the ranks by node like [[0, 1], [2, 3]]", _is_hierarchy
)
"""Raises ValueError, for the name of an option and its value, if the value is no hierarchy."""


def members_of(hierarchy: Hierarchy, ids: Sequence[Any]) -> list[list[int]]:
    """Find the processes of each node.

    Args:
        hierarchy: ``"auto"``: processes with the same `node_id`; a number of processes on each node, with consecutive
            ranks; or ranks by node.
        ids: the `node_id` of each process, by rank.

    Returns:
        Ranks by node.

    Raises:
        ValueError: if the hierarchy does not fit the number of processes.
    """
    count = len(ids)
    if hierarchy == "auto":
        return [[rank for rank in range(count) if ids[rank] == each] for each in dict.fromkeys(ids)]
    if isinstance(hierarchy, int):
        if count % hierarchy:
            raise ValueError(
                f"hierarchy={hierarchy} processes on each node do not divide {count} processes: where nodes "
                "have different numbers, give the ranks by node, like [[0, 1, 2], [3]]"
            )
        return [list(range(first, first + hierarchy)) for first in range(0, count, hierarchy)]
    assert not isinstance(hierarchy, str)
    members = [list(ranks) for ranks in hierarchy or ()]
    if sorted(rank for ranks in members for rank in ranks) != list(range(count)) or not all(members):
        raise ValueError(f"hierarchy must name each of the ranks 0 to {count - 1} once, got {members}")
    return members


class Requirements(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Requirements, the same at all sites, which a hub gets as a control message.

    Attributes:
        min_sites: number of sites below which training pauses.
        timeout_ms: milliseconds of silence after which a site counts as lost.
        skips: whether a late site misses a step, and is not waited for.
        patience_percent: time after which a site is late, in hundredths of the median step; 0: so many milliseconds as
            `timeout_ms` after the first site.
        provisional: whether they hold only until a site states others, in a run that may start without all sites.
    """

    min_sites: Count
    timeout_ms: Milliseconds
    skips: bool = False
    patience_percent: Count = 300
    provisional: bool = False

    @classmethod
    def of(
        cls, min_sites: int | None, site_timeout: float, late: str = "wait", patience: float = 3.0
    ) -> Requirements | None:
        """Return the requirements that options state.

        Args:
            min_sites: number of sites below which training pauses; None where all must stay.
            site_timeout: seconds of silence after which a site counts as lost.
            late: "wait" for late sites, or "skip" them.
            patience: time after which a site is late, in median steps; 0: `site_timeout` after the first site.
        """
        if min_sites is None:
            return None
        return cls(min_sites, round(1e3 * site_timeout), late == "skip", round(100 * patience))


class StreamToHub(NamedTuple):
    """Byte stream of a site to the hub itself.

    Attributes:
        connected: the socket.
        hub: name of the hub.
        folder: the kit by which this site is connected to it.
        check: raises the error with which the connection to the hub has failed, if it has.
    """

    connected: socket.socket
    hub: str
    folder: str
    check: Callable[[], None]


class Exchange(ABC):
    """Exchange of payloads that is used step after step, and whose sizes all sites know."""

    def post(self) -> None:  # noqa: B027  (most implementations need no preparation)
        """Prepare to receive; do nothing when called again before `wait`."""

    @abstractmethod
    def launch(self) -> None:
        """Start to send this site's payloads; return at once."""

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """Wait for what all sites have sent to this one.

        Returns:
            The payloads by rank of the sender, valid until the next `post` or `launch`.

        Raises:
            SiteError: if a site is gone or silent.
        """


class Gather(Exchange):
    """Exchange in which every site sends one payload to all sites.

    Attributes:
        payload: this site's payload, a flat tensor, to be filled before `launch`.
    """

    payload: Tensor


class AllToAll(Exchange):
    """Exchange in which every site sends another payload to each site.

    Attributes:
        payloads: this site's payloads by rank of the receiver, flat tensors, to be filled before `launch`; its own
            arrives as it is.
        missing: ranks of the sites whose payloads have not arrived, or do not count, where sites may be absent.
    """

    payloads: list[Tensor]
    missing: Set[int] = frozenset()


class PendingSum:
    """Sum over sites that is in progress.

    Args:
        finish: waits for it; by default it is over.
    """

    def __init__(self, finish: Callable[[], None] = lambda: None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait for the sum, which replaces the tensor's values.

        Raises:
            SiteError: if a site is gone or silent.
        """
        self._finish()


class Transport(ABC):
    """Messages between the sites of a group.

    Args:
        sites: the sites by name.
        traffic: the meter.
        rank: rank of this site.
        device: device of the tensors that are exchanged.
        timeout: seconds after which a silent site counts as lost.

    Attributes:
        world_size: number of sites.
        copies: how many times this site sends a gathered payload to other nodes.
        ring: how many times its own size this site sends of a sum to other nodes.
        nodes: the processes of each node; None where each process counts as a node.
        is_direct: whether sites can open connections to each other.
        has_all_to_all: whether `all_to_all` is supported.
        elastic: whether training goes on without a site that leaves.
        absent: ranks of the sites that are not part of the last round, the same at all sites; what they have sent does
            not count, and gathers return zeros for them. Always empty unless `elastic`.
        joins: whether this site joins others in mid-training, and `receive_state` returns a state.
        listens: whether this site has begun this step with the state of another one, since it joins.
        inside: transport between the processes of this site, where these act as one site; else None.
        more_follows: whether another gather is launched soon, with which a small payload that is launched now may
            leave; set by the exchange.
    """

    nodes: Nodes | None = None
    inside: Transport | None = None
    is_direct: bool = True
    has_all_to_all: bool = False
    elastic = joins = listens = False
    more_follows = False
    absent: frozenset[int] = frozenset()
    observe: Callable[[str, list[Any]], None] | None = None
    """Called with the name of a unit and the rows of all senders as they were decoded, for audits; None for none."""
    donate: Callable[[], Any] | None = None
    """Returns what a site that joins in mid-training needs; called while this site waits for the end of a round that
    admits sites."""

    def __init__(self, sites: PeerNames, traffic: Traffic, rank: int, device: torch.device, timeout: float) -> None:
        self.sites = sites
        self.traffic = traffic
        self.rank = rank
        self.world_size = len(sites)
        self.device = device
        self.timeout = timeout
        self.copies = self.world_size - 1
        self.ring = 2 * (self.world_size - 1) / self.world_size

    @property
    def grows(self) -> bool:
        """Whether there are further sites, for which `grow` is due."""
        return False

    def grow(self) -> None:  # noqa: B027  (of elastic ones only)
        """Take further sites, where `grows`; all sites do so at the end of the same step."""

    @property
    def behind(self) -> bool:
        """Whether the others have ended the open step already, without this site."""
        return False

    @property
    def hub_is_away(self) -> bool:
        """Whether nothing can be exchanged, since the hub is away, and perhaps for long."""
        return False

    @property
    def gone(self) -> Mapping[int, str]:
        """Reasons of the sites that have left and are not back, by rank."""
        return {}

    @property
    def position(self) -> int:
        """Number of the open round, where sites may leave."""
        return 0

    @property
    def present(self) -> list[int]:
        """Ranks of the sites that took part in the last round; all of them unless `elastic`."""
        return [rank for rank in range(self.world_size) if rank not in self.absent]

    @property
    def lowest(self) -> int:
        """Rank of the first site that is present, the same at all sites."""
        return self.present[0]

    @property
    def place(self) -> int:
        """Number of this transport among those of the process, where sites may return.

        It is the same at all sites at the same place of a program.
        """
        return 0

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the sites.

        Raises:
            RuntimeError: if there is none.
        """
        raise RuntimeError("this site trains alone: it has no process group")

    @abstractmethod
    def close(self) -> None:
        """Close the connections; nothing can be exchanged afterwards. May be called twice."""

    @abstractmethod
    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        """Prepare an all-gather; all sites must prepare theirs in the same order.

        Args:
            sizes: number of elements of each site's payload, by rank.
            dtype: type of the elements.
        """

    def all_to_all(self, sizes: Sequence[int], dtype: torch.dtype, replaced: AllToAll | None = None) -> AllToAll:
        """Prepare an exchange of different payloads for different sites, in one order with the gathers.

        Args:
            sizes: number of elements that each site sends to the site of this rank, by rank of the receiver.
            dtype: type of the elements.
            replaced: the exchange that this one replaces from the next step on; None for none.

        Raises:
            NotImplementedError: unless `has_all_to_all`.
        """
        raise NotImplementedError(f"{type(self).__name__} sends one payload to all sites")

    def gather_again(self, first: Gather, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        """Prepare a second all-gather of a step, which only the steps have that turn out to need it.

        Args:
            first: the gather whose second round it is; a gather may have one in each step.
            sizes: number of elements of each site's payload, by rank.
            dtype: type of the elements.
        """
        return self.gather(sizes, dtype)

    def leave_out(self, rank: int, error: Exception) -> None:
        """Go on without a site that has sent what is invalid, where sites may be absent; all sites must find the same.

        Args:
            rank: the site, which is absent until the end of the step.
            error: the error that names it.

        Raises:
            Exception: the error, where all sites have to stay.
            MismatchError: if too few sites are left.
        """
        raise error

    def end_step(self) -> None:  # noqa: B027  (most networks need not know)
        """End a training step, whose exchanges are over at this site."""

    def show_epsilon(self, epsilon: float, delta: float) -> None:  # noqa: B027  (only hubs have a status)
        """Show in the status of a hub what training has cost the records of this site.

        Args:
            epsilon: the epsilon of differential privacy.
            delta: the delta.
        """

    def show_contribution(self, samples: int, steps: int, waited: float, loss: float | None) -> None:  # noqa: B027
        """Show in the status of a hub what this site has contributed.

        Args:
            samples: number of samples; 0 where they are not counted.
            steps: number of steps.
            waited: seconds in which it has waited for others in them.
            loss: loss of its own validation; None without one.
        """

    def show_outsized(self, rank: int, step: int, times: float) -> None:  # noqa: B027  (only hubs have a status)
        """Show in the status of a hub that a site's gradient is out of all proportion.

        Args:
            rank: the site.
            step: number of the step.
            times: its norm over the median of the sites' norms.
        """

    def wait_for_hub(self, seconds: float) -> None:  # noqa: B027  (only some networks have a hub)
        """Wait for a hub that is away, from now on.

        Args:
            seconds: time after which it is given up.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> PendingSum:
        """Start the sum of a tensor over sites, in place.

        Args:
            tensor: a contiguous tensor on `device`.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Replace a tensor's values by those of rank 0; the tensor may be on any device."""

    @abstractmethod
    def broadcast_bytes(self, content: bytes) -> bytes:
        """Send rank 0's bytes to all sites; the argument is ignored on the others."""

    def gather_objects(self, item: Any, kind: Any = Any, what: str = "object") -> list[Any]:
        """Gather one object from each site, by rank, for set-up and checkpoints; None of sites that are absent.

        Args:
            item: an object that `dadplug.exchange.codec.encode` takes.
            kind: type of the objects, see `dadplug.exchange.fields.fits`.
            what: what an object is, for errors.

        Raises:
            MismatchError: if an object is of another type; where sites may leave, its site is left out.
        """
        every = checked(self.gather_present(item), kind, what, self)
        return [every.get(rank) for rank in range(self.world_size)]

    @abstractmethod
    def gather_present(self, item: Any) -> dict[int, Any]:
        """Gather one object from each site that is present, as `gather_objects` does.

        Returns:
            The objects by rank, in ascending order.
        """

    def gather_once(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        """Prepare an all-gather that takes place once; see `gather`."""
        return self.gather(sizes, dtype)

    def gather_resized(self, gather: Gather, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        """Prepare an all-gather that replaces another one from the next step on; see `gather`."""
        return self.gather(sizes, dtype)

    def begin_plan(self) -> None:  # noqa: B027  (most number nothing)
        """Begin a plan, whose gathers follow; all sites call it together, with no exchange in progress."""

    def receive_state(self, most: int) -> Any:
        """Return what `donate` has returned at another site, where this site joins in mid-training; else None.

        Until it is called, the others do not wait for this site.

        Args:
            most: largest size of a state in bytes; one that is announced as larger is refused.

        Raises:
            SiteError: if it does not arrive.
        """
        return None

    def rejoin(self) -> None:  # noqa: B027  (only elastic transports drop sites)
        """Prepare this site, which has been dropped, for `receive_state` and `take_part`; its open step is lost.

        Raises:
            SiteError: if the others do not let it join.
        """

    def take_part(self) -> bool:
        """Confirm that the state has been restored: from the next round on this site takes part.

        In the first round it only listens: nothing that it sends counts.

        Returns:
            Whether it takes part; otherwise the state has become outdated, and `receive_state` returns another one.
        """
        return True

    def close_round(self, admits: bool = False, idle: bool = False) -> None:  # noqa: B027  (only elastic ones have)
        """End a round of gathers: wait until all sites have ended it or left, and update `absent`.

        What arrived before is provisional, where sites may leave. All sites must call it together.

        Args:
            admits: whether the state of this site is that of the beginning of a step, so that others may join.
            idle: whether this site contributes nothing to the step.

        Raises:
            SiteError: if training cannot go on.
        """

    @abstractmethod
    def prefers_gather(self, nbytes: int) -> bool:
        """Return whether each site sums tensors of `nbytes` bytes sooner by itself than an all-reduce does."""

    def open_streams(self, timeout: float) -> dict[int, socket.socket] | None:
        """Open a byte stream to each other site over this transport's network; all sites must call it together.

        Nothing may be sent on a stream before all sites have exchanged something else afterwards.

        Args:
            timeout: seconds to connect.

        Returns:
            Connected sockets by rank; None where the sites reach each other by themselves.

        Raises:
            SiteError: if the network cannot be reached.
        """
        return None

    def open_hub_stream(self, timeout: float) -> StreamToHub | None:
        """Open a byte stream to the hub itself.

        Args:
            timeout: seconds to connect.

        Returns:
            The stream; None where there is no hub, or it may not read what the sites send.
        """
        return None

    def lost(self, error: BaseException, peer: int | None = None) -> SiteError | MismatchError:
        """Convert a connection's error into one that names the site that is gone.

        Args:
            error: the connection's error.
            peer: rank of the site at the other end, if known.
        """
        _log.debug("a connection to other sites has failed", exc_info=error)  # errors of sites are raised without it
        return self.sites.lost(error, self.timeout, peer)
