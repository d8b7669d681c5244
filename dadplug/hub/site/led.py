"""Transport of a site with several processes, where sites may leave: they act as one site.

All processes make the same calls. The leader alone exchanges with the other sites, over its link to the hub, and passes
on to the processes of its site what each call returns or raises, and which sites are present. So all of them compute
the same from the same numbers, as one process would. What a process itself would send is not sent: before gradients
are encoded, those of all processes of the site are added up, see `dadplug.step.model_sync.site_sum`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ... import errors
from ...errors import DadplugError, MismatchError, SiteError
from ...exchange import codec
from ...exchange.framing import bytes_of
from ...exchange.hierarchy import Job
from ...exchange.rounds import Rounds, Shown
from ...exchange.status import PeerNames
from ...exchange.traffic import Traffic
from ...exchange.transport import AllToAll, Exchange, Gather, Nodes
from .elastic import ElasticTransport, check_left
from .link import HubLink
from .processes import ALIVE_SECONDS, LocalSite, NoStreams, SiteTransport
from .transport import CollectiveTransport

_PATIENCE = 1e6  # seconds; the leader may wait that long for other sites, and is asked meanwhile whether it is alive
_Result = TypeVar("_Result")


class InsideTransport(SiteTransport):
    """Messages between the processes of one site.

    Args:
        local: the processes.
        link: link to the hub, at the leader; None at the others.
        traffic: the meter.
        timeout: seconds after which a silent process counts as lost.
    """

    def __init__(self, local: LocalSite, link: HubLink | None, traffic: Traffic, timeout: float) -> None:
        place = local.place
        nodes = Nodes.of([range(place.processes)], place.local_rank)
        super().__init__(local, None, local.processes, nodes, traffic, timeout, patience=_PATIENCE)
        self._link = link  # which is left where a process of this site is lost

    def wait_for(self, job: Job) -> None:
        assert self._local is not None
        heard = time.monotonic()
        while not wait([job], ALIVE_SECONDS).done and self._error is None:
            try:
                if self._local.processes.check_alive():
                    heard = time.monotonic()
                elif time.monotonic() > heard + self.timeout:
                    raise self.lost(TimeoutError("timed out"))
            except (SiteError, MismatchError) as error:
                raise self._failed(error) from error
        super().wait_for(job)

    def pass_on(self, content: bytes) -> bytes | memoryview:
        """Send the leader's bytes to the other processes; the argument is ignored at these.

        Raises:
            SiteError: if a process of the site has ended or does not answer.
        """
        peers, leads = [0] * len(self.nodes.peers), self.nodes.index == 0
        size = self.gather([1, *peers], torch.int64, once=True)
        if leads:
            size.payload[0] = len(content)
        size.launch()
        (count,) = size.wait()[0].tolist()
        codec.check_lengths([count], self.sites.__getitem__, codec.MAX_BYTES)
        body = self.gather([count, *peers], torch.uint8, once=True)
        if leads:
            body.payload.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        body.launch()
        received = body.wait()[0]
        return content if leads else bytes_of(received)


class LedSites(PeerNames):
    """Sites of a hub, at a process that has no connection to it.

    Args:
        rank: this site.
        names: names of the sites.
        local: the processes of this site.
    """

    def __init__(self, rank: int, names: Sequence[str], local: LocalSite) -> None:
        super().__init__(rank, names)
        self._local = local.processes

    def follow(self, names: Sequence[str]) -> None:
        """Take the names that the leader has; a run may grow."""
        self._names = list(names)

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError | MismatchError:
        return self._local.lost(error, timeout, 0)


class LedRounds(Rounds):
    """Rounds in which the leader of a site takes part for all its processes.

    Args:
        inside: messages between the processes of this site.
        hub: messages between the sites, at the leader; None at the others.
        sites: the sites by name.
    """

    elastic = True
    grows = behind = hub_is_away = False
    gone: Mapping[int, str] = {}
    position = 0

    def __init__(self, inside: InsideTransport, hub: ElasticTransport | None, sites: PeerNames) -> None:
        super().__init__(len(sites))
        self._inside = inside
        self._hub = hub
        self._sites = sites
        self._failure: DadplugError | None = None  # of a call that returns before the others are informed of it
        self._least = 1 if hub is None else hub.rounds.least
        self.led(lambda _: None)

    # What the leader sees, the same at all processes after each call

    def _state(self, hub: ElasticTransport) -> tuple[Any, ...]:
        rounds, names = hub.rounds, [hub.sites.name(rank) for rank in range(len(hub.sites))]
        flags = rounds.joins, rounds.listens, rounds.grows, rounds.behind, rounds.hub_is_away
        return sorted(rounds.absent), rounds.size, flags, dict(rounds.gone), rounds.position, names, rounds.least

    def _follow(self, state: tuple[Any, ...]) -> None:
        absent, self.size, flags, self.gone, self.position, names, self._least = state
        self.absent = frozenset(absent)
        self.joins, self.listens, self.grows, self.behind, self.hub_is_away = flags
        if isinstance(self._sites, LedSites):
            self._sites.follow(names)

    def led(self, call: Callable[[ElasticTransport], _Result]) -> _Result:
        """Return what a call returns at the leader, at all processes of the site; raise what it raises there."""
        hub = self._hub
        if hub is None:
            kind, text, result, state = codec.decode(self._inside.pass_on(b""))
            self._follow(state)
            if kind:
                raise _error(kind, text)
            return cast(_Result, result)
        kept: Any = None
        failure = self._failure
        self._failure = None
        try:
            kept = call(hub) if failure is None else None
        except DadplugError as error:
            failure = error
        state = self._state(hub)
        self._follow(state)
        kind, text = ("", "") if failure is None else (type(failure).__name__, str(failure))
        self._inside.pass_on(codec.encode((kind, text, kept, state)))
        if failure is not None:
            raise failure
        return cast(_Result, kept)

    def begin(self, call: Callable[[ElasticTransport], object]) -> None:
        """Make a call at the leader that returns nothing; if it fails, the next one raises the error everywhere."""
        if self._hub is None or self._failure is not None:
            return
        try:
            call(self._hub)
        except DadplugError as error:
            self._failure = error

    def grow(self) -> None:
        self.led(lambda hub: hub.rounds.grow())

    def close(self, admits: bool = False, idle: bool = False) -> None:
        def close_round(hub: ElasticTransport) -> None:
            hub.rounds.donate = self.donate
            hub.rounds.close(admits, idle)

        self.led(close_round)
        self.in_step |= admits

    def leave_out(self, rank: int, error: Exception) -> None:
        def leave(hub: ElasticTransport) -> None:
            with suppress(MismatchError):  # raised below, at all processes
                hub.rounds.leave_out(rank, error)

        self.absent |= {rank}
        self.begin(leave)
        check_left(self, error, self._least)

    def end_step(self) -> None:
        self.in_step = self.listens = False
        self.begin(lambda hub: hub.rounds.end_step())

    def rejoin(self) -> None:
        self.in_step = False
        self.led(lambda hub: hub.rounds.rejoin())

    def receive_state(self, most: int) -> Any:
        return self.led(lambda hub: hub.rounds.receive_state(most)) if self.joins else None

    def take_part(self) -> bool:
        return self.led(lambda hub: hub.rounds.take_part())

    def begin_plan(self) -> None:
        self.begin(lambda hub: hub.rounds.begin_plan())

    # What only the leader reports

    def wait_for_hub(self, seconds: float) -> None:
        self.begin(lambda hub: hub.rounds.wait_for_hub(seconds))

    def show(self, shown: Shown) -> None:
        self.begin(lambda hub: hub.rounds.show(shown))


class LedTransport(CollectiveTransport, NoStreams):
    """Messages between sites that may leave, at each process of a site with several.

    Args:
        inside: messages between the processes of this site.
        hub: messages between the sites, at the leader; None at the others.
        sites: the sites by name.
        traffic: the meter; what goes to other sites is counted at the leader, once for the site.
        timeout: seconds after which a silent site counts as lost.

    Attributes:
        hub: messages between the sites, at the leader; None at the others.
    """

    inside: InsideTransport
    rounds: LedRounds

    def __init__(
        self,
        inside: InsideTransport,
        hub: ElasticTransport | None,
        sites: PeerNames,
        traffic: Traffic,
        timeout: float,
    ) -> None:
        cpu, rounds = torch.device("cpu"), LedRounds(inside, hub, sites)
        super().__init__(sites, traffic, sites.rank, cpu, timeout, rounds)
        self.inside = inside
        self.hub = hub
        self.copies, self.ring = 1, 1.0

    def opened(self, call: Callable[[ElasticTransport], _Result]) -> _Result | None:
        """Return what the leader opens; None at the other processes."""
        return None if self.hub is None else call(self.hub)

    def close(self) -> None:
        self.inside.close()

    def gather(self, sizes: Sequence[int], dtype: torch.dtype, **use: Any) -> _LedGather:
        use = {name: each.opened if isinstance(each, _LedGather) else each for name, each in use.items()}
        return _LedGather(self, self.opened(lambda hub: hub.gather(sizes, dtype, **use)), sizes, dtype)

    def all_to_all(self, sizes: Sequence[int], dtype: torch.dtype, replaced: AllToAll | None = None) -> AllToAll:
        before = replaced.opened if isinstance(replaced, _LedAllToAll) else None
        return _LedAllToAll(self, self.opened(lambda hub: hub.all_to_all(sizes, dtype, before)), sizes, dtype)

    def prefers_gather(self, nbytes: int) -> bool:
        return True  # as where each site has one process

    def broadcast(self, tensor: Tensor) -> None:
        def value(hub: ElasticTransport) -> Tensor:
            hub.broadcast(tensor)
            return tensor.detach().cpu()

        agreed = self.rounds.led(value)
        if self.hub is None:
            tensor.detach().copy_(agreed)

    def broadcast_bytes(self, content: bytes) -> bytes:
        return self.rounds.led(lambda hub: hub.broadcast_bytes(content))

    def gather_present(self, item: Any) -> dict[int, Any]:
        return self.rounds.led(lambda hub: hub.gather_present(item))


class _Led(Exchange):
    """Exchange of which the leader makes each call, and passes on what it receives.

    Args:
        transport: the transport.
        opened: the exchange over the hub, at the leader.
        rooms: room for what arrives by sender, at the other processes.
    """

    def __init__(self, transport: LedTransport, opened: Any, rooms: Sequence[Tensor]) -> None:
        self.opened = opened
        self._transport = transport
        self._rooms = [*rooms]

    def post(self) -> None:
        if (opened := self.opened) is not None:
            self._transport.rounds.begin(lambda _: opened.post())

    def launch(self) -> None:
        hub = self._transport.hub
        if (opened := self.opened) is not None and hub is not None:
            hub.more_follows = self._transport.more_follows
            self._transport.rounds.begin(lambda _: opened.launch())

    def wait(self) -> list[Tensor]:
        opened = self.opened
        payloads, missing = self._transport.rounds.led(lambda _: (opened.wait(), sorted(opened.missing)))
        self.missing = frozenset(missing)
        if opened is not None:
            return list(payloads)
        for room, payload in zip(self._rooms, payloads, strict=True):
            room.copy_(payload)
        return self._rooms


class _LedGather(_Led, Gather):
    """Gather of the sites' payloads.

    Args:
        transport: the transport.
        opened: the gather over the hub, at the leader.
        sizes: number of elements of each site's payload, by rank.
        dtype: type of the elements.
    """

    def __init__(
        self, transport: LedTransport, opened: Gather | None, sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        rooms = [] if opened is not None else [torch.zeros(size, dtype=dtype) for size in sizes]
        super().__init__(transport, opened, rooms)
        self.payload = rooms[transport.rank] if opened is None else opened.payload


class _LedAllToAll(_Led, AllToAll):
    """Exchange of different payloads for different sites.

    Args:
        transport: the transport.
        opened: the exchange over the hub, at the leader.
        sizes: number of elements that each site sends to the site of this rank, by rank of the receiver.
        dtype: type of the elements.
    """

    def __init__(
        self, transport: LedTransport, opened: AllToAll | None, sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        self.payloads = [torch.zeros(size, dtype=dtype) for size in sizes] if opened is None else opened.payloads
        own = self.payloads[transport.rank]
        super().__init__(transport, opened, [torch.zeros_like(own) for _ in sizes] if opened is None else [])


def _error(kind: str, text: str) -> DadplugError:
    """Return the error that the leader has had; a SiteError where its class takes more than a message."""
    found = getattr(errors, kind, SiteError)
    return found(text) if isinstance(found, type) and issubclass(found, DadplugError) else SiteError(text)
