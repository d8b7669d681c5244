"""Interface between the exchange and the network: gather payloads, sum buckets, and send objects at set-up."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError, SiteError
from ..support.logs import get_logger
from ..support.signature import valid
from .fields import checked
from .rounds import Rounds
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
    """Exchange of payloads that is used step after step, and whose sizes all sites know.

    Attributes:
        missing: ranks of the sites whose payloads have not arrived, or do not count, where sites may be absent.
    """

    missing: Set[int] = frozenset()

    def post(self) -> None:  # noqa: B027  (most implementations need no preparation)
        """Prepare to receive; do nothing when called again before `wait`."""

    @abstractmethod
    def launch(self) -> None:
        """Start to send this site's payloads; return at once."""

    def has_arrived(self) -> bool:
        """Return at once whether `wait` has nothing to wait for; False where that is not known."""
        return False

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

    def collect(self) -> list[Tensor]:
        """Wait for the payloads of all sites that have not left; which of them count, the end of the round decides."""
        return self.wait()


class AllToAll(Exchange):
    """Exchange in which every site sends another payload to each site.

    Attributes:
        payloads: this site's payloads by rank of the receiver, flat tensors, to be filled before `launch`; its own
            arrives as it is.
    """

    payloads: list[Tensor]


class Streams(ABC):
    """Byte streams over the network of a transport, where sites do not reach each other by themselves."""

    @abstractmethod
    def open_streams(self, timeout: float) -> dict[int, socket.socket]:
        """Open a byte stream to each other site; all sites must call it together.

        Nothing may be sent on a stream before all sites have exchanged something else afterwards.

        Args:
            timeout: seconds to connect.

        Returns:
            Connected sockets by rank.

        Raises:
            SiteError: if the network cannot be reached.
        """

    @abstractmethod
    def open_hub_stream(self, timeout: float) -> StreamToHub | None:
        """Open a byte stream to the hub itself.

        Args:
            timeout: seconds to connect.

        Returns:
            The stream; None where the hub may not read what the sites send.
        """


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
    """Collectives of the sites of a group.

    Args:
        sites: the sites by name.
        traffic: the meter.
        rank: rank of this site.
        device: device of the tensors that are exchanged.
        timeout: seconds after which a silent site counts as lost.
        rounds: which sites take part; by default all of them.

    Attributes:
        rounds: which sites take part.
        copies: how many times this site sends a gathered payload to other nodes.
        ring: how many times its own size this site sends of a sum to other nodes.
        nodes: the processes of each node; None where each process counts as a node.
        inside: transport between the processes of this site, where these act as one site; else None.
        more_follows: whether another gather is launched soon, with which a small payload that is launched now may
            leave; set by the exchange.
    """

    nodes: Nodes | None = None
    inside: Transport | None = None
    more_follows = False
    _group: dist.ProcessGroup | None = None
    _no_group = "this site trains alone: it has no process group"
    observe: Callable[[str, list[Any]], None] | None = None
    """Called with the name of a unit and the rows of all senders as they were decoded, for audits; None for none."""

    def __init__(
        self,
        sites: PeerNames,
        traffic: Traffic,
        rank: int,
        device: torch.device,
        timeout: float,
        rounds: Rounds | None = None,
    ) -> None:
        self.sites = sites
        self.traffic = traffic
        self.rank = rank
        self.rounds = Rounds(len(sites)) if rounds is None else rounds
        self.device = device
        self.timeout = timeout
        self.copies = self.world_size - 1
        self.ring = 2 * (self.world_size - 1) / self.world_size

    @property
    def world_size(self) -> int:
        """Number of sites."""
        return self.rounds.size

    @property
    def has_all_to_all(self) -> bool:
        """Whether `all_to_all` is supported."""
        return False

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the sites.

        Raises:
            RuntimeError: if there is none.
        """
        if self._group is None:
            raise RuntimeError(self._no_group)
        return self._group

    def belong_to(self, group: dist.ProcessGroup) -> None:
        """Take the process group of the sites, where another one carries the messages."""
        self._group = group

    @abstractmethod
    def close(self) -> None:
        """Close the connections; nothing can be exchanged afterwards. May be called twice."""

    @abstractmethod
    def gather(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype,
        *,
        once: bool = False,
        replaced: Gather | None = None,
        first: Gather | None = None,
    ) -> Gather:
        """Prepare an all-gather; all sites must prepare theirs in the same order.

        Args:
            sizes: number of elements of each site's payload, by rank.
            dtype: type of the elements.
            once: whether it takes place once.
            replaced: the gather that this one replaces from the next step on; None for none.
            first: the gather whose second round it is, in a step that turns out to need one; a gather may have one in
                each step. None where it is a first round.
        """

    def relayed_gather(self, sizes: Sequence[int], dtype: torch.dtype, **use: Any) -> Gather:
        """Prepare an all-gather of a few sites' payloads, as `gather` does.

        Where sites reach one another, each gets a part of each payload and passes it on to the others: no site sends
        much more than another, and messages travel twice.
        """
        return self.gather(sizes, dtype, **use)

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

    def gather_objects(
        self,
        item: Any,
        kind: Any = Any,
        what: str = "object",
        counts: Callable[[Any], Iterable[float]] = lambda _: (),
    ) -> list[Any]:
        """Gather one object from each site, by rank, for set-up and checkpoints; None of sites that are absent.

        Args:
            item: an object that `dadplug.exchange.codec.encode` takes.
            kind: type of the objects, see `dadplug.exchange.fields.fits`.
            what: what an object is, for errors.
            counts: see `dadplug.exchange.fields.checked`.

        Raises:
            MismatchError: if an object is not such a one; where sites may leave, its site is left out.
        """
        every = checked(self.gather_present(item), kind, what, self, counts)
        return [every.get(rank) for rank in range(self.world_size)]

    @abstractmethod
    def gather_present(self, item: Any) -> dict[int, Any]:
        """Gather one object from each site that is present, as `gather_objects` does.

        Returns:
            The objects by rank, in ascending order.
        """

    @abstractmethod
    def prefers_gather(self, nbytes: int) -> bool:
        """Return whether each site sums tensors of `nbytes` bytes sooner by itself than an all-reduce does."""

    def lost(self, error: BaseException, peer: int | None = None) -> SiteError | MismatchError:
        """Convert a connection's error into one that names the site that is gone.

        Args:
            error: the connection's error.
            peer: rank of the site at the other end, if known.
        """
        _log.debug("a connection to other sites has failed", exc_info=error)  # errors of sites are raised without it
        return self.sites.lost(error, self.timeout, peer)
