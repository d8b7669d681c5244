"""Transport over a site's link to its hub, which passes payloads on and adds up summands.

Transport over the hub for training that goes on while sites leave and come.

Exchanges take place in rounds. Every site ends a round, and the hub closes it with the list of its contributors, which
is the same at all sites. What a site has sent counts only if it is a contributor; what arrives before the close is
provisional. A site that is absent counts as one that sends zeros.

A step of a reduction begins with a round that admits sites: all sites have the same parameters then, and no site
changes them until it is closed. A site that joins gets the state of another one, and all that has been sent in the
round. It listens to this one step, in which nothing that it sends counts, and takes part from the next one on. If its
state is of a later step, since it came late, the others count on it at once.

With ``late="skip"``, the hub closes a round of a step without a site that is late. When that site ends its own part of
the round it learns that it is absent, and goes through the rest of the step as one that listens.
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import DamagedError, MismatchError, SiteError
from ...exchange import codec
from ...exchange.calls import decode_tagged, tagged, untagged
from ...exchange.codec import check_lengths, decode_objects, encode_object
from ...exchange.fields import minority
from ...exchange.framing import bytes_of
from ...exchange.restrictions import check_declared
from ...exchange.status import PeerNames, watch_exit
from ...exchange.traffic import Traffic
from ...exchange.transport import AllToAll, Gather, PendingSum, Requirements, StreamToHub, Transport
from ...exchange.wire import lasting
from ..wire.messages import CODES, Contribution, Kind, Outsized, RoundKind, Spent
from .calls import mismatch
from .inbox import CHANNEL_BITS, Incoming
from .link import HubLink
from .tunnel import check_tunnel, tunnel_of

_AWAY_SECONDS = 2.5  # of silence, after which the hub may be away for long
_GRACE_SECONDS = 1.5  # for the hub's announcement of what a lost stream of the parameter manager is due to


class HubSites(PeerNames):
    """Sites at the other ends of a hub.

    Args:
        link: the link.
    """

    def __init__(self, link: HubLink) -> None:
        super().__init__(link.rank, link.names)
        self._link = link
        self._names = link.names  # to which those of further sites are appended
        watch_exit(self)

    def found_lost(self) -> SiteError | None:
        return self._link.first_lost()

    def check_awaited(self, awaited: Collection[int]) -> None:
        with self._link.lock:
            self._link.transfer()  # the link's thread leaves it to calls that wait for messages
            differ = any(self._link.inbox.begun_by(slot, self._link.step) for slot in awaited)
        if differ:
            raise self.mismatch()

    def mismatch(self) -> MismatchError:
        return mismatch(self._link)

    def lost(self, error: BaseException, timeout: float, peer: int | None = None) -> SiteError:
        if isinstance(error, SiteError):
            return error
        try:
            found = self._link.await_loss(_GRACE_SECONDS)
            check_tunnel(self._link)
        except SiteError as failure:  # of the connection to the hub
            return failure
        if found is not None:
            return found
        who = "one of the other sites" if peer is None else self[peer]
        if isinstance(error, TimeoutError):
            return SiteError(
                f"{who} has not answered for {timeout:g} s, though the hub is connected to it: it is stopped or busy. "
                "A site that may be this slow needs a larger timeout="
            )
        return SiteError(f"{who} is gone: {error}")


SECOND_ROUND = 1 << 23  # bit of the number of a gather's second round
_COLLECTIVES = 1 << 22  # first number of those that are used once, and their count
_SINGLE = 1 << 16  # numbers of those, below some bits of their sizes
_LAYOUTS = _COLLECTIVES // _SINGLE
_PACKET_BYTES = 1 << 14  # that cost less than the hub's work
MOST_RECEIVERS = 254  # that the head of a frame can name
assert 2 * _COLLECTIVES == SECOND_ROUND < 1 << CHANNEL_BITS


class SitesGather(Gather):
    """Gather in which sites may be missing.

    Attributes:
        missing: ranks of the sites whose payloads have not arrived, in the last round.
    """

    missing: Set[int] = frozenset()

    def collect(self) -> list[Tensor]:
        """Wait for the payloads of all sites that have not left; which of them count, the end of the round decides."""
        return self.wait()


class CollectiveTransport(Transport):
    """Part of a transport over the hub: collectives that are made of gathers, where sites may be absent."""

    is_direct = False
    _group: dist.ProcessGroup | None  # of the sites, if there is one
    _in_step = False  # whether a round of a training step has been closed, and others may follow

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this connection to a hub has no process group: connect by dadplug.connect(kit=...)")
        return self._group

    @abstractmethod
    def gather_once(self, sizes: Sequence[int], dtype: torch.dtype) -> SitesGather: ...

    def broadcast(self, tensor: Tensor) -> None:
        while True:
            source = self._source()
            sizes = [tensor.numel() * (rank == source) for rank in range(self.world_size)]
            gather = self.gather_once(sizes, tensor.dtype)
            if self.rank == source:
                gather.payload.copy_(tensor.detach().reshape(-1))
            gather.launch()
            self.close_round()
            if source not in self.absent:
                break
        value = gather.wait()[source]
        if self.rank != source:
            tensor.detach().copy_(value.view(tensor.shape))

    def _source(self) -> int:
        """Return the rank of the site that sends: the first one that has not been absent in the last round."""
        return min(set(range(self.world_size)) - self.absent)

    def broadcast_bytes(self, content: bytes) -> bytes:
        while True:
            source = self._source()
            every = self.gather_bytes(content if self.rank == source else b"")
            if source in every:
                return every[source].tobytes()

    def gather_present(self, item: Any) -> dict[int, Any]:
        own, refusal = encode_object(tagged(item))
        check_declared(len(own))
        objects: dict[int, Any] = {}
        for rank, content in self.gather_bytes(own).items():
            try:
                objects[rank] = decode_tagged(decode_objects([(rank, content)], refusal, self.sites.__getitem__)[0])
            except (DamagedError, TypeError) as error:
                if refusal is not None:
                    raise
                self.leave_out(rank, error)
        apart = minority({rank: function for rank, (function, *_) in objects.items()})
        for rank in apart if self.elastic and self.rank not in apart else ():
            place = objects.pop(rank)[1]
            self.leave_out(rank, MismatchError(f"{self.sites[rank]} is in {place}, and most sites are not"))
        return untagged(objects, self.sites)

    def gather_bytes(self, own: bytes) -> dict[int, memoryview]:
        """Gather byte strings of the sites that are present, by rank; where sites may leave, in a round of its own.

        Sizes go first, and are checked before memory is allocated.
        """
        sizes = self.gather_once([1] * self.world_size, torch.int64)
        sizes.payload[0] = len(own) + 1
        sizes.launch()
        # 0 for a site that is not there; one that was absent in the last round may have joined since
        lengths = [int(size) for size in (sizes.wait() if self._in_step else sizes.collect())]
        for rank, length in enumerate(lengths):
            try:
                check_lengths([length], lambda _: self.sites[rank])  # noqa: B023
            except DamagedError as error:
                self.leave_out(rank, error)
                lengths[rank] = 0
        gather = self.gather_once(lengths, torch.uint8)
        if lengths[self.rank]:  # else nothing that this site sends counts
            gather.payload.copy_(torch.frombuffer(bytearray(b"\0" + own), dtype=torch.uint8))
        gather.launch()
        self.close_round()
        payloads = gather.wait()
        lacking = self.absent | gather.missing
        return {
            rank: bytes_of(payload)[1:]
            for rank, payload in enumerate(payloads)
            if lengths[rank] and rank not in lacking
        }


class HubTransport(CollectiveTransport):
    """Messages between the sites of a hub. All buffers lie on the CPU.

    Args:
        link: the link.
        traffic: the meter; it counts what this site sends to the hub.
        timeout: seconds after which a silent site counts as lost.
        group: process group of the sites, if there is one.

    Attributes:
        channel: first number of its exchanges.
    """

    def __init__(self, link: HubLink, traffic: Traffic, timeout: float, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(HubSites(link), traffic, link.rank, torch.device("cpu"), timeout)
        self.link = link
        self.copies, self.ring = 1, 1.0  # the hub passes on what a site sends once
        self._group = group
        self.has_all_to_all = self.world_size <= MOST_RECEIVERS
        self.channel = link.new_channel()
        self._gathers = self._collectives = 0

    def close(self) -> None:
        """Nothing: the link is the process's, and outlives this transport."""

    def _open_gather(self, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> HubGather:
        return HubGather(self, exchange, sizes, dtype)

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        self._gathers += 1
        if self._gathers >= _COLLECTIVES:
            raise RuntimeError(f"more than {_COLLECTIVES} gathers have been prepared")
        return self._open_gather(self.channel | self._gathers, sizes, dtype)

    def all_to_all(self, sizes: Sequence[int], dtype: torch.dtype, replaced: AllToAll | None = None) -> AllToAll:
        if replaced is None:
            self._gathers += 1
        exchange = replaced.exchange if isinstance(replaced, HubAllToAll) else self.channel | self._gathers
        return self._open_all_to_all(exchange, sizes, dtype)

    def _open_all_to_all(self, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> HubAllToAll:
        return HubAllToAll(self, exchange, sizes, dtype)

    def gather_again(self, first: Gather, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        assert isinstance(first, HubGather)
        return self._open_gather(first.exchange | SECOND_ROUND, sizes, dtype)

    def gather_once(self, sizes: Sequence[int], dtype: torch.dtype) -> HubGather:
        # Those of other sizes have other numbers: sites that make different calls must not take one for the other.
        size = 0 if dtype == torch.uint8 else sum(sizes)  # those of objects may differ where sites come and go
        layout = (7 * size + dtype.itemsize) % _LAYOUTS
        return self._open_gather(self.next_collective() + layout * _SINGLE, sizes, dtype)

    def end_step(self) -> None:
        self.link.end_step()

    def wait_for_hub(self, seconds: float) -> None:
        self.link.wait_for_hub(seconds)

    def show_epsilon(self, epsilon: float, delta: float) -> None:
        with suppress(SiteError):  # the training has ended
            self.link.post_control(Spent(epsilon, delta))

    def show_contribution(self, samples: int, steps: int, waited: float, loss: float | None) -> None:
        with suppress(SiteError):
            self.link.post_control(Contribution(samples, steps, round(1e3 * waited), loss))

    def show_outsized(self, rank: int, step: int, times: float) -> None:
        with suppress(SiteError):
            self.link.post_control(Outsized(rank, step, times))

    def next_collective(self) -> int:
        """Return the number of an exchange that takes place once."""
        self._collectives = (self._collectives + 1) % _SINGLE
        return self.channel | _COLLECTIVES | self._collectives

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        if tensor.dtype in CODES and not self.prefers_gather(tensor.numel() * tensor.element_size()):
            return self._sum_at_hub(tensor)
        gather = self.gather_once([tensor.numel()] * self.world_size, tensor.dtype)
        gather.payload.copy_(tensor.detach().reshape(-1))
        gather.launch()

        def finish() -> None:  # each site adds up the addends of all, in the order of ranks
            tensor.detach().copy_(add_up(gather.wait()).view(tensor.shape))

        return PendingSum(finish)

    def _sum_at_hub(self, tensor: Tensor) -> PendingSum:
        """Start a sum that the hub computes from the summands of all sites, in the order of ranks."""
        own = tensor.detach()
        staged = own.to(self.device).reshape(-1)
        content, exchange = bytes_of(staged), self.next_collective()
        # The link copies what it sends, so that the sum can arrive where the summand lies.
        incoming = self.link.expect(0, exchange, content, Kind.SUM)
        self.traffic.add(len(content))
        self.link.send(exchange, content, Kind.SUMMAND, CODES[tensor.dtype])

        def finish() -> None:
            with self.traffic.waiting():
                self.link.wait([incoming], self.timeout)
            if staged.data_ptr() != own.data_ptr():
                own.copy_(staged.view(own.shape))

        return PendingSum(finish)

    def open_streams(self, timeout: float) -> dict[int, socket.socket]:
        return tunnel_of(self.link, timeout).open(self.gather_objects)

    def open_hub_stream(self, timeout: float) -> StreamToHub | None:
        if self.link.sealing.required:  # the hub cannot read what it would have to order
            return None
        return tunnel_of(self.link, timeout).dial_hub()

    @property
    def hub_is_away(self) -> bool:
        return self.link.is_away or self.link.silent_seconds > _AWAY_SECONDS

    @property
    def left_out(self) -> frozenset[int]:
        """Ranks of the sites that have no part in the rest of the step, since they were absent in its first round."""
        return frozenset()

    def prefers_gather(self, nbytes: int) -> bool:
        peers = self.world_size - 1  # one other site sends as much as the hub would
        return self.link.sealing.required or peers == 1 or peers * nbytes <= _PACKET_BYTES


class HubGather(SitesGather):
    """Gather of payloads that the hub passes on.

    Args:
        transport: the transport.
        exchange: number of the exchange.
        sizes: number of elements of each site's payload, by rank.
        dtype: type of the elements.

    Attributes:
        exchange: number of the exchange.
        payloads: this site's payload and room for the others, by rank.
    """

    def __init__(self, transport: HubTransport, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.exchange = exchange
        self._transport = transport
        self.payloads = [lasting(size, dtype) for size in sizes]
        self.payload = self.payloads[transport.rank]
        self._own = bytes_of(self.payload)
        self._others = [
            (rank, bytes_of(payload))
            for rank, payload in enumerate(self.payloads)
            if rank != transport.rank and payload.numel()
        ]
        self._incoming: list[Incoming] = []

    def post(self) -> None:
        if not self._incoming and self._others:
            link, left_out = self._transport.link, self._transport.left_out
            present = [each for each in self._others if each[0] not in left_out]
            self._incoming = [link.expect(rank, self.exchange, buffer) for rank, buffer in present]

    def launch(self) -> None:
        self.post()
        self._transport.traffic.add(len(self._own))
        self._transport.link.send(self.exchange, self._own, soon=self._transport.more_follows)

    def wait(self) -> list[Tensor]:
        if self._incoming:
            with self._transport.traffic.waiting():
                self._transport.link.wait(self._incoming, self._transport.timeout)
            self._incoming = []
        return self.payloads


class HubAllToAll(AllToAll):
    """Exchange of different payloads, each of which the hub passes on to one site.

    Args:
        transport: the transport.
        exchange: number of the exchange.
        sizes: number of elements that each site sends to the site of this rank, by rank of the receiver.
        dtype: type of the elements.

    Attributes:
        exchange: number of the exchange.
    """

    def __init__(self, transport: HubTransport, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.exchange = exchange
        self._transport = transport
        self.payloads = [lasting(size, dtype) for size in sizes]
        own = self.payloads[transport.rank]
        self._received = [own if rank == transport.rank else torch.zeros_like(own) for rank in range(len(sizes))]
        self._incoming: list[Incoming] = []

    def post(self) -> None:
        transport = self._transport
        if not self._incoming and self._received[transport.rank].numel():
            senders = {*range(len(self.payloads))} - {transport.rank} - transport.left_out
            rooms = [(rank, bytes_of(self._received[rank])) for rank in sorted(senders)]
            self._incoming = [transport.link.expect(rank, self.exchange, room) for rank, room in rooms]

    def launch(self) -> None:
        self.post()
        transport = self._transport
        own = [(rank, bytes_of(payload)) for rank, payload in enumerate(self.payloads) if rank != transport.rank]
        last = max((rank for rank, content in own if len(content)), default=-1)
        for rank, content in own:
            transport.traffic.add(len(content))
            soon = transport.more_follows or rank != last
            transport.link.send(self.exchange, content, soon=soon, to=rank + 1)

    def wait(self) -> list[Tensor]:
        if self._incoming:
            with self._transport.traffic.waiting():
                self._transport.link.wait(self._incoming, self._transport.timeout)
            self._incoming = []
        return self._received


def add_up(addends: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in their order; that of narrow types in single precision, to be rounded once.

    Args:
        addends: the tensors; the first one may be changed.
    """
    first, *others = addends
    total = first.to(torch.promote_types(first.dtype, torch.float32)) if first.is_floating_point() else first
    for each in others:
        total += each
    return total


class ElasticTransport(HubTransport):
    """Messages between the sites of a hub, of which some may be absent.

    Args:
        link: the link.
        traffic: the meter; it counts what this site sends to the hub.
        timeout: seconds after which a silent site counts as lost.
        requirements: number of sites that are needed, and when a silent one is lost.
        group: process group of the sites, if there is one.
    """

    elastic = True

    def __init__(
        self,
        link: HubLink,
        traffic: Traffic,
        timeout: float,
        requirements: Requirements,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(link, traffic, timeout, group)
        self.launched: list[ElasticGather | ElasticAllToAll] = []  # exchanges that are not settled
        self._requirements = requirements
        self.joins = self.listens = link.rounds.joins
        if not self.joins:
            link.rounds.begin(requirements)
        self._resize(link.world_size)
        self.absent = self._of_run(link.rounds.absent)

    # Sites that are new in the roster

    def _resize(self, size: int) -> None:
        """Exchange with so many sites from now on."""
        self.world_size = size
        self.has_all_to_all = size <= MOST_RECEIVERS

    def _of_run(self, slots: frozenset[int]) -> frozenset[int]:
        return frozenset(slot for slot in slots if slot < self.world_size)

    @property
    def least(self) -> int:
        """Number of sites below which a step cannot go on."""
        return self._requirements.min_sites

    @property
    def grows(self) -> bool:
        return self.world_size < self.link.rounds.size

    def grow(self) -> None:
        before, size = self.world_size, self.link.rounds.size
        if before < size:
            self._resize(size)
            self.absent |= frozenset(range(before, size))

    # Rounds

    def close_round(self, admits: bool = False, idle: bool = False) -> None:
        kind = RoundKind.FIRST if admits else RoundKind.FURTHER if self._in_step else RoundKind.COLLECTIVE
        number, in_step = self.link.step, self._in_step or admits
        # Payloads may be launched in a collective's round, and counted in that of the step.
        ended = [each for each in self.launched if in_step or each.exchange & _COLLECTIVES]
        self.launched = [each for each in self.launched if each not in ended]
        counted = [incoming for each in ended for incoming in each._incoming]
        answer = self._answer if admits else None
        with self.traffic.waiting():
            absent = self._of_run(self.link.rounds.end(self.timeout, answer, kind, idle, counted))
        self.absent = absent | self.absent if self._in_step else absent
        if admits:
            self._in_step = True
            self.link.rounds.first = number
            self._collectives = 0
        for rank in self.link.rounds.apart & {*self.present}:
            self.leave_out(rank, MismatchError(f"{self.sites[rank]} goes on, though it was left out of a round before"))
        for each in ended:
            each.finish(ended=True)

    def leave_out(self, rank: int, error: Exception) -> None:
        self.absent |= {rank}
        self.link.rounds.leave_out(rank, str(error))
        left, needed = len(self.present), self.least
        if self._in_step and left < needed:
            raise MismatchError(f"{error}. {left} of {self.world_size} sites are left, and this run needs {needed}")

    def end_step(self) -> None:
        self._in_step = self.listens = False
        self.launched.clear()
        with self.link.lock:  # what was sent besides payloads
            self.link.inbox.forget(last=self.link.step - 1, channel=self.channel)

    @property
    def behind(self) -> bool:
        return self.link.rounds.behind

    @property
    def gone(self) -> Mapping[int, str]:
        return dict(self.link.gone)

    @property
    def position(self) -> int:
        return self.link.step

    @property
    def left_out(self) -> frozenset[int]:
        return self.absent if self._in_step else frozenset()

    @property
    def silent(self) -> bool:
        """Whether nothing that this site sends counts: it has no part in the step, or is late."""
        return self.link.rounds.listens or self.rank in self.left_out or self.link.rounds.behind

    def _answer(self) -> bytes:
        """Return the state of this site, for one that joins."""
        assert self.donate is not None
        return codec.encode(self.donate())

    def rejoin(self) -> None:
        with self.traffic.waiting():
            self.link.rounds.rejoin(self.timeout)
        self.joins = self.listens = True
        self._in_step = False
        self.launched.clear()

    def receive_state(self, most: int) -> Any:
        if not self.joins:
            return None
        if not self.link.rounds.states.awaits:  # else it has asked again after a loss of the connection
            self.link.rounds.begin(self._requirements)
        state = self.link.rounds.receive_state(self.timeout, most)
        self._resize(self.link.world_size)  # the run may have grown while this site waited
        return codec.decode(state)

    def take_part(self) -> bool:
        self.joins = not self.link.rounds.confirm()
        return not self.joins

    # Exchanges

    def begin_plan(self) -> None:
        self._gathers = 0

    def _open_gather(self, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> ElasticGather:
        return ElasticGather(self, exchange, sizes, dtype)

    def _open_all_to_all(self, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> ElasticAllToAll:
        return ElasticAllToAll(self, exchange, sizes, dtype)

    def gather_resized(self, gather: Gather, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        assert isinstance(gather, ElasticGather)
        return ElasticGather(self, gather.exchange, sizes, dtype)

    def prefers_gather(self, nbytes: int) -> bool:
        return True  # a sum that the hub has formed holds the share of a site that has left since


class ElasticGather(HubGather):
    """Gather of payloads, in which those of absent sites are zeros."""

    _transport: ElasticTransport

    def __init__(self, transport: ElasticTransport, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(transport, exchange, sizes, dtype)
        self.missing = set()
        self._round = 0

    def launch(self) -> None:
        self.missing = set()
        self._round = self._transport.link.step
        self._transport.launched.append(self)
        if self._transport.silent:
            self._transport.link.rounds.mark()  # as at the sites that send
            self.post()
        else:
            super().launch()

    def wait(self) -> list[Tensor]:
        transport = self._transport
        self.collect()
        if transport.link.rounds.closed >= self._round:
            self.finish()
        self._blank(transport.absent | {transport.rank} if transport.link.rounds.listens else transport.absent)
        return self.payloads

    def collect(self) -> list[Tensor]:
        transport = self._transport
        if self._incoming:
            with transport.traffic.waiting():
                lost = transport.link.rounds.wait_for(self._incoming, self._round, transport.timeout)
            self._incoming = []
            self._blank(lost)
        return self.payloads

    def finish(self, *, ended: bool = False) -> None:
        """Leave out the sites that have taken part in the round without their payloads, once it is closed.

        Args:
            ended: whether this site has ended the round. Then a site that is not absent has taken part in it, also one
                that has left since: others may have left it out before they knew that.

        Raises:
            MismatchError: if no other site has sent its payload, since all have begun other exchanges, or since this
                site joins: it gets what has been sent in this round, but not what was sent in an earlier one.
        """
        self.collect()
        transport, inbox = self._transport, self._transport.link.inbox
        lacking = sorted(self.missing - transport.absent - (set() if ended else transport.link.gone.keys()))
        others, last = {*transport.present} - {transport.rank}, transport.link.step - 1
        alone = lacking and others == {*lacking}
        if alone and (transport.listens or all(inbox.begun_by(each, last) for each in others)):
            raise MismatchError(
                f"{self._describe(lacking[0])}: is nothing else exchanged between backward() and synchronize() when a "
                f"site joins? Otherwise {transport.sites.mismatch()}"
            )
        for rank in lacking:
            transport.leave_out(rank, MismatchError(self._describe(rank)))

    def _describe(self, rank: int) -> str:
        count = self.payloads[rank].numel()
        return f"{self._transport.sites[rank]} has ended the round without its payload of {count} elements"

    def _blank(self, ranks: Set[int]) -> None:
        for rank in ranks - self.missing:
            self.payloads[rank].zero_()
        self.missing |= ranks


class ElasticAllToAll(HubAllToAll):
    """Exchange of different payloads, of which those of absent sites are missing.

    To be waited for once the round in which it was launched is closed. Only the receiver finds out that a site which is
    present has not sent its payload, and has to let the others know.
    """

    _transport: ElasticTransport
    _round = 0
    _lost: Set[int] = frozenset()

    def launch(self) -> None:
        self._round, self._lost = self._transport.link.step, set()
        self._transport.launched.append(self)
        if self._transport.silent:
            self._transport.link.rounds.mark()  # as at the sites that send
            self.post()
        else:
            super().launch()

    def wait(self) -> list[Tensor]:
        self.finish()
        self.missing = self._lost | self._transport.absent
        return self._received

    def finish(self, *, ended: bool = False) -> None:
        """Wait for the payloads, which have come once the round is closed."""
        transport = self._transport
        if self._incoming:
            with transport.traffic.waiting():
                self._lost = transport.link.rounds.wait_for(self._incoming, self._round, transport.timeout)
            self._incoming = []


class TrainerTransport(ElasticTransport):
    """Messages of a trainer besides those of its gradient reduction.

    A site that joins in mid-training runs the program from its beginning, and so comes to exchanges that the others had
    long ago. Until the end of its first step it therefore exchanges nothing: it is alone in every exchange, and `joins`
    is true. The trainer calls `end_step` after every step of its reduction, which ends that.
    """

    @property
    def present(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.link.rounds.absent]

    def end_step(self) -> None:
        super().end_step()
        self.joins = False
        self.grow()
        self.absent, self._collectives = self._of_run(self.link.rounds.absent), 0  # the same at a site that has joined

    @property
    def place(self) -> int:
        """Number of this transport among those of the process, the same at all sites at the same place of a program."""
        return self.channel

    def close_round(self, admits: bool = False, idle: bool = False) -> None:
        if not self.joins:
            super().close_round(admits, idle)

    def broadcast(self, tensor: Tensor) -> None:
        if not self.joins:
            super().broadcast(tensor)

    def broadcast_bytes(self, content: bytes) -> bytes:
        return content if self.joins else super().broadcast_bytes(content)

    def gather_present(self, item: Any) -> dict[int, Any]:
        return {self.rank: item} if self.joins else super().gather_present(item)
