"""Transport over a site's link to its hub, which passes payloads on and adds up summands."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...errors import DamagedError, MismatchError, SiteError
from ...exchange.calls import decode_tagged, tagged, untagged
from ...exchange.codec import check_lengths, decode_objects, encode_object
from ...exchange.fields import minority
from ...exchange.framing import bytes_of
from ...exchange.restrictions import check_declared
from ...exchange.rounds import Rounds, Shown
from ...exchange.status import PeerNames, watch_exit
from ...exchange.traffic import Traffic
from ...exchange.transport import AllToAll, Exchange, Gather, PendingSum, Streams, StreamToHub, Transport
from ...exchange.wire import lasting
from ..wire.messages import CODES, Kind, add_up
from .inbox import CHANNEL_BITS, Incoming, mismatch
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
COLLECTIVES = 1 << 22  # first number of those that are used once, and their count
_SINGLE = 1 << 16  # numbers of those, below some bits of their sizes
_LAYOUTS = COLLECTIVES // _SINGLE
_PACKET_BYTES = 1 << 14  # that cost less than the hub's work
MOST_RECEIVERS = 254  # that the head of a frame can name
assert 2 * COLLECTIVES == SECOND_ROUND < 1 << CHANNEL_BITS


class HubRounds(Rounds):
    """Training steps of the sites of a hub, all of which stay, and numbers of their exchanges.

    Args:
        link: the link.

    Attributes:
        link: the link.
        channel: first number of the exchanges.
    """

    def __init__(self, link: HubLink) -> None:
        super().__init__(link.world_size)
        self.link = link
        self.channel = link.new_channel()
        self._gathers = self._collectives = 0

    @property
    def left_out(self) -> frozenset[int]:
        """Ranks of the sites that have no part in the rest of the step, since they were absent in its first round."""
        return frozenset()

    def next_gather(self) -> int:
        """Return the number of an exchange that takes place in every step."""
        self._gathers += 1
        if self._gathers >= COLLECTIVES:
            raise RuntimeError(f"more than {COLLECTIVES} gathers have been prepared")
        return self.channel | self._gathers

    def next_collective(self) -> int:
        """Return the number of an exchange that takes place once."""
        self._collectives = (self._collectives + 1) % _SINGLE
        return self.channel | COLLECTIVES | self._collectives

    def end_step(self) -> None:
        self.link.end_step()

    @property
    def hub_is_away(self) -> bool:
        return self.link.is_away or self.link.silent_seconds > _AWAY_SECONDS

    def wait_for_hub(self, seconds: float) -> None:
        self.link.wait_for_hub(seconds)

    def show(self, shown: Shown) -> None:
        with suppress(SiteError):  # the training has ended
            self.link.post_control(shown)


class CollectiveTransport(Transport):
    """Part of a transport over the hub: collectives that are made of gathers, where sites may be absent."""

    _no_group = "this connection to a hub has no process group: connect by dadplug.connect(kit=...)"

    @property
    def has_all_to_all(self) -> bool:
        return self.world_size <= MOST_RECEIVERS

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        gather = self.gather([tensor.numel()] * self.world_size, tensor.dtype, once=True)
        gather.payload.copy_(tensor.detach().reshape(-1))
        gather.launch()

        def finish() -> None:  # each site adds up the addends of all, in the order of ranks
            tensor.detach().copy_(add_up(gather.wait()).view(tensor.shape))

        return PendingSum(finish)

    def broadcast(self, tensor: Tensor) -> None:
        while not self.rounds.alone:
            source = self._source()
            sizes = [tensor.numel() * (rank == source) for rank in range(self.world_size)]
            gather = self.gather(sizes, tensor.dtype, once=True)
            if self.rank == source:
                gather.payload.copy_(tensor.detach().reshape(-1))
            gather.launch()
            self.rounds.close()
            if source in self.rounds.absent:
                continue
            value = gather.wait()[source]
            if self.rank != source:
                tensor.detach().copy_(value.view(tensor.shape))
            break

    def _source(self) -> int:
        """Return the rank of the site that sends: the first one that has not been absent in the last round."""
        return self.rank if self.rounds.alone else min(set(range(self.world_size)) - self.rounds.absent)

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
                self.rounds.leave_out(rank, error)
        apart = minority({rank: function for rank, (function, *_) in objects.items()})
        for rank in apart if self.rounds.elastic and self.rank not in apart else ():
            place = objects.pop(rank)[1]
            self.rounds.leave_out(rank, MismatchError(f"{self.sites[rank]} is in {place}, and most sites are not"))
        return untagged(objects, self.sites)

    def gather_bytes(self, own: bytes) -> dict[int, memoryview]:
        """Gather byte strings of the sites that are present, by rank; where sites may leave, in a round of its own.

        Sizes go first, and are checked before memory is allocated.
        """
        if self.rounds.alone:
            return {self.rank: memoryview(own)}
        sizes = self.gather([1] * self.world_size, torch.int64, once=True)
        sizes.payload[0] = len(own) + 1
        sizes.launch()
        # 0 for a site that is not there; one that was absent in the last round may have joined since
        lengths = [int(size) for size in (sizes.wait() if self.rounds.in_step else sizes.collect())]
        for rank, length in enumerate(lengths):
            try:
                check_lengths([length], lambda _: self.sites[rank])  # noqa: B023
            except DamagedError as error:
                self.rounds.leave_out(rank, error)
                lengths[rank] = 0
        gather = self.gather(lengths, torch.uint8, once=True)
        if lengths[self.rank]:  # else nothing that this site sends counts
            gather.payload.copy_(torch.frombuffer(bytearray(b"\0" + own), dtype=torch.uint8))
        gather.launch()
        self.rounds.close()
        payloads = gather.wait()
        lacking = self.rounds.absent | gather.missing
        return {
            rank: bytes_of(payload)[1:]
            for rank, payload in enumerate(payloads)
            if lengths[rank] and rank not in lacking
        }


class HubExchange(Exchange):
    """Exchange of payloads that the hub passes on.

    Args:
        transport: the transport.
        exchange: number of the exchange.
        received: this site's payload and room for those of the others, by rank.

    Attributes:
        exchange: number of the exchange.
        incoming: what this site has begun to wait for.
    """

    _alone = False  # whether each payload is for one site alone

    def __init__(self, transport: HubTransport, exchange: int, received: list[Tensor]) -> None:
        self.exchange = exchange
        self._transport = transport
        self._received = received
        self._rooms = [
            (rank, bytes_of(room)) for rank, room in enumerate(received) if rank != transport.rank and room.numel()
        ]
        self.incoming: list[Incoming] = []

    @abstractmethod
    def _send(self) -> None:
        """Send this site's payloads."""

    def post(self) -> None:
        if not self.incoming and self._rooms:
            link, left_out = self._transport.link, self._transport.rounds.left_out
            present = [each for each in self._rooms if each[0] not in left_out]
            self.incoming = [link.expect(rank, self.exchange, room, alone=self._alone) for rank, room in present]

    def launch(self) -> None:
        self.post()
        self._send()

    def has_arrived(self) -> bool:
        return self._transport.link.has_delivered() and all(message.done for message in self.incoming)

    def wait(self) -> list[Tensor]:
        if self.incoming:
            with self._transport.traffic.waiting():
                self._transport.link.wait(self.incoming, self._transport.timeout)
            self.incoming = []
        return self._received


class HubGather(HubExchange, Gather):
    """Gather of payloads that the hub passes on.

    Args:
        transport: the transport.
        exchange: number of the exchange.
        sizes: number of elements of each site's payload, by rank.
        dtype: type of the elements.

    Attributes:
        payloads: this site's payload and room for the others, by rank.
    """

    def __init__(self, transport: HubTransport, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.payloads = [lasting(size, dtype) for size in sizes]
        self.payload = self.payloads[transport.rank]
        self._own = bytes_of(self.payload)
        super().__init__(transport, exchange, self.payloads)

    def _send(self) -> None:
        self._transport.traffic.add(len(self._own))
        self._transport.link.send(self.exchange, self._own, soon=self._transport.more_follows)


class HubAllToAll(HubExchange, AllToAll):
    """Exchange of different payloads, each of which the hub passes on to one site.

    Args:
        transport: the transport.
        exchange: number of the exchange.
        sizes: number of elements that each site sends to the site of this rank, by rank of the receiver.
        dtype: type of the elements.
    """

    _alone = True

    def __init__(self, transport: HubTransport, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.payloads = [lasting(size, dtype) for size in sizes]
        own = self.payloads[transport.rank]
        received = [own if rank == transport.rank else torch.zeros_like(own) for rank in range(len(sizes))]
        super().__init__(transport, exchange, received)

    def _send(self) -> None:
        transport = self._transport
        own = [(rank, bytes_of(payload)) for rank, payload in enumerate(self.payloads) if rank != transport.rank]
        last = max((rank for rank, content in own if len(content)), default=-1)
        for rank, content in own:
            transport.traffic.add(len(content))
            soon = transport.more_follows or rank != last
            transport.link.send(self.exchange, content, soon=soon, to=rank + 1)


class HubTransport(CollectiveTransport, Streams):
    """Messages between the sites of a hub. All buffers lie on the CPU.

    Args:
        link: the link.
        traffic: the meter; it counts what this site sends to the hub.
        timeout: seconds after which a silent site counts as lost.
        rounds: which sites take part; by default all of them.
    """

    rounds: HubRounds
    _gather: type[HubGather] = HubGather
    _all_to_all: type[HubAllToAll] = HubAllToAll

    def __init__(self, link: HubLink, traffic: Traffic, timeout: float, rounds: HubRounds | None = None) -> None:
        cpu, rounds = torch.device("cpu"), HubRounds(link) if rounds is None else rounds
        super().__init__(HubSites(link), traffic, link.rank, cpu, timeout, rounds)
        self.link = link
        self.copies, self.ring = 1, 1.0  # the hub passes on what a site sends once

    def close(self) -> None:
        """Nothing: the link is the process's, and outlives this transport."""

    def gather(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype,
        *,
        once: bool = False,
        replaced: Gather | None = None,
        first: Gather | None = None,
    ) -> HubGather:
        if isinstance(first, HubGather):
            exchange = first.exchange | SECOND_ROUND
        elif once:
            # Those of other sizes have other numbers: sites that make different calls must not take one for the other.
            size = 0  # those of objects may differ where sites come and go
            if dtype != torch.uint8:  # not of the number of sites, which one that joins may know before the others
                size = max(sizes) + 2 * min(sizes)
            layout = (7 * size + dtype.itemsize) % _LAYOUTS
            exchange = self.rounds.next_collective() + layout * _SINGLE
        else:
            exchange = replaced.exchange if isinstance(replaced, HubGather) else self.rounds.next_gather()
        return self._gather(self, exchange, sizes, dtype)

    def all_to_all(self, sizes: Sequence[int], dtype: torch.dtype, replaced: AllToAll | None = None) -> AllToAll:
        exchange = replaced.exchange if isinstance(replaced, HubAllToAll) else self.rounds.next_gather()
        return self._all_to_all(self, exchange, sizes, dtype)

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        if tensor.dtype in CODES and not self.prefers_gather(tensor.numel() * tensor.element_size()):
            return self._sum_at_hub(tensor)
        return super().all_reduce(tensor)

    def _sum_at_hub(self, tensor: Tensor) -> PendingSum:
        """Start a sum that the hub computes from the summands of all sites, in the order of ranks."""
        own = tensor.detach()
        staged = own.to(self.device).reshape(-1)
        content, exchange = bytes_of(staged), self.rounds.next_collective()
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

    def prefers_gather(self, nbytes: int) -> bool:
        peers = self.world_size - 1  # one other site sends as much as the hub would
        return self.link.sealing.required or peers == 1 or peers * nbytes <= _PACKET_BYTES
