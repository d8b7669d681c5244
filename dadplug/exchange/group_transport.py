"""Transport over a process group of torch.distributed, with sockets of its own for payloads where they are possible."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError
from .calls import ASK_SECONDS, BegunExchanges, Wait, own_place, tagged, untagged
from .codec import MAX_BYTES, gather_objects
from .framing import Message, PeerSockets, bytes_of, have_arrived, wait_together
from .handshake import Deadline, connect_sockets
from .status import PeerNames
from .traffic import Traffic
from .transport import AllToAll, Gather, PendingSum, Transport
from .wire import lasting

_FEW_BYTES = 1 << 20  # of which receiving a copy costs next to nothing
_PACKET_BYTES = 1 << 14  # that cost less than a few latencies
MAX_TAGS = 2**30  # tags have 32 bits, and are reused
_WARM_UP = (1 << 15, 1 << 19)  # bytes to all sites, this one included, on new connections
_WARM_UP_SECONDS = 0.25  # of the first, after which a second would take too long
_FIRST = itemgetter(0)

Work = dist.Work | Message


class GroupTransport(Transport):
    """Messages by a process group.

    Args:
        group: the process group; its processes are the sites.
        sites: the sites by name.
        traffic: the meter.
        device: device of the model. Buffers lie there if the group's backend can send from it, else on the CPU.
        timeout: seconds after which a silent site counts as lost.
    """

    used = False
    _no_group = "this process has left the other sites: its process group has been closed"

    def __init__(
        self, group: dist.ProcessGroup, sites: PeerNames, traffic: Traffic, device: torch.device, timeout: float
    ) -> None:
        self._group = group
        self._sockets: PeerSockets | None = None
        self._sockets_tried = False
        self._process = os.getpid()
        self._last: object = None
        GroupTransport.used = True
        self._begun = BegunExchanges(group.group_name)
        self._last_payload = Wait(group.group_name, "payloads", 0)
        self._global = dist.get_process_group_ranks(group)
        self._peer_to_peer = device.type == "cpu" or "nccl" not in str(dist.get_backend(group))
        buffers = torch.device("cpu") if self._peer_to_peer else device
        super().__init__(sites, traffic, dist.get_rank(group), buffers, timeout)
        sites.watch(self)

    def close(self) -> None:
        if self._process != os.getpid():
            return  # the threads of the process group do not exist in a forked child: destroying it would wait for them
        if self._sockets is not None:
            self._sockets.close()
        self._last = None  # it holds the group's connections, by whose end the others know that this site has left
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # the program has destroyed all groups since, and made new ones
                dist.destroy_process_group(group)

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:  # `sys` may be gone before this object
        if not is_finalizing():
            self.close()

    @property
    def has_all_to_all(self) -> bool:
        return self._peer_to_peer

    def gather(self, sizes: Sequence[int], dtype: torch.dtype, **use: Any) -> Gather:
        if not self._peer_to_peer:
            return CollectiveGather(self, sizes, dtype)
        payloads = [lasting(size, dtype) for size in sizes]
        self._open_sockets()
        return PairwiseExchange(self, [payloads[self.rank]] * len(sizes), payloads)

    def relayed_gather(self, sizes: Sequence[int], dtype: torch.dtype, **use: Any) -> Gather:
        if not self._peer_to_peer:
            return super().relayed_gather(sizes, dtype, **use)
        self._open_sockets()
        return RelayedGather(self, [lasting(size, dtype) for size in sizes])

    def all_to_all(self, sizes: Sequence[int], dtype: torch.dtype, replaced: AllToAll | None = None) -> AllToAll:
        if not self.has_all_to_all:
            return super().all_to_all(sizes, dtype)
        payloads = [lasting(size, dtype) for size in sizes]
        received = [torch.zeros_like(payloads[self.rank]) for _ in sizes]
        received[self.rank] = payloads[self.rank]
        self._open_sockets()
        return PairwiseExchange(self, payloads, received)

    def _open_sockets(self) -> None:
        """Open the sites' own connections, which all sites do together when they are first needed."""
        if self._sockets_tried:
            return
        self._sockets_tried = True
        near = () if self.nodes is None else self.nodes.peers
        with self.traffic.apart():
            sockets = connect_sockets(self.rank, self.timeout, self.gather_objects, near)
        if sockets is not None:
            self._sockets = PeerSockets(sockets, self.timeout, in_order=self.nodes is None)
            with self.traffic.apart():
                self._warm_up()

    def _warm_up(self) -> None:
        """Send two messages to all other sites; the second, larger one only if the first has not taken long.

        Congestion control that paces, such as bbr, otherwise sends the small messages of steps at the low rate that it
        assumes for a new connection, since they never show it a higher one. The traffic does not count these messages.
        """
        size = self.world_size
        for nbytes in _WARM_UP:
            messages = [torch.zeros(nbytes // size, dtype=torch.uint8) for _ in range(2 * size)]
            begin = time.perf_counter()
            exchange = PairwiseExchange(self, messages[:size], messages[size:], counts=False)
            exchange.launch()
            exchange.wait()
            if max(self.gather_objects(time.perf_counter() - begin, float, "time")) > _WARM_UP_SECONDS:
                break

    def next_tag(self) -> int:
        """Return the tag of the next exchange that is launched, the same at all sites."""
        self._last_payload = self._begun.begin("payloads")
        return self._last_payload.number % MAX_TAGS

    def start(self, body: memoryview, rank: int, tag: int, sends: bool) -> Work:
        """Start to send a message, or to receive one.

        Args:
            body: the bytes to send, or room for those received; must not change before the message is done.
            rank: rank of the other process.
            tag: tag of the message; messages with the same tag are received in the order in which they are sent.
            sends: whether it is sent.

        Raises:
            RuntimeError: if the connection is closed.
        """
        if self._sockets is not None:
            connection = self._sockets.connections[rank]
            return (connection.send if sends else connection.expect)(body, tag)
        start: Any = dist.isend if sends else dist.irecv
        work: Work = start(torch.frombuffer(body, dtype=torch.uint8), self._global[rank], group=self.group, tag=tag)
        return work

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        self.traffic.add(int(self.ring * tensor.numel() * tensor.element_size()))
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return PendingSum(partial(self.wait, work, begun=self._begun.begin("sums")))

    def broadcast(self, tensor: Tensor) -> None:
        if self.rank == 0:
            self.traffic.add((self.world_size - 1) * tensor.numel() * tensor.element_size())
        staged = tensor.to(self.device)
        source = dist.get_global_rank(self.group, 0)
        sent = torch.view_as_real(staged) if staged.is_complex() else staged  # Gloo of torch 2.8 sends real numbers
        begun = self._begun.begin("broadcasts")
        self.wait(dist.broadcast(sent, source, group=self.group, async_op=True), begun=begun)
        if staged is not tensor:
            tensor.copy_(staged)

    def broadcast_bytes(self, content: bytes) -> bytes:
        size = torch.tensor([len(content)], dtype=torch.int64, device=self.device)
        self.broadcast(size)
        length = int(size)
        if not 0 <= length <= MAX_BYTES:
            raise ValueError(f"{self.sites[0]} announces {length} bytes: there may be {MAX_BYTES} at most")
        data = torch.zeros(length, dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.broadcast(data)
        return data.cpu().numpy().tobytes()

    def gather_present(self, item: Any) -> dict[int, Any]:
        wait = partial(self.wait, begun=self._begun.begin("objects"))
        every = gather_objects(tagged(item), self.group, wait, self.sites.__getitem__)
        return untagged(dict(enumerate(every)), self.sites)

    def wait(self, work: Work, peer: int | None = None, begun: Wait | None = None) -> None:
        """Wait for an operation or a message.

        Args:
            work: the operation or message.
            peer: rank of the site at the other end, if there is one only.
            begun: the same for the other sites, if it is a collective.

        Raises:
            SiteError: if a site is gone or silent.
            MismatchError: if sites do not make the same calls.
        """
        try:
            with self.traffic.waiting():
                if begun is not None and self._peer_to_peer:
                    wait_patiently(work, begun, self.sites, self.timeout)
                else:
                    work.wait()
        except MismatchError as error:
            raise error if str(error) else self.sites.mismatch() from None
        except RuntimeError as error:
            raise self.lost(error, peer) from None
        # Gloo's thread releases the work later than this one. If it were the last to do so, it would free tensors of
        # Python and take a lock of the interpreter: a loader's worker forked meanwhile would find it locked for ever.
        self._last = work

    def wait_all(self, works: list[tuple[Work, int]]) -> None:
        """Wait for operations or messages, each with the rank of the site at the other end, and remove them.

        Raises:
            SiteError: if a site is gone or silent.
            MismatchError: if a site has sent another message than the expected one.
        """
        waited = list(works)
        if self._sockets is not None:  # connections are read side by side
            with self.traffic.waiting():
                check = partial(self.sites.check_calls, self._last_payload)
                failed = wait_together([*map(_FIRST, works)], self.timeout, check)
            own_place.wait = None
            waited = [] if failed is None else [(work, peer) for work, peer in works if work is failed]
        for work, peer in waited:
            self.wait(work, peer)
        works.clear()

    def prefers_gather(self, nbytes: int) -> bool:
        # Two sites send no more that way, and a gather has one latency where an all-reduce has 2 (S - 1).
        peers = self.world_size - 1
        return self._peer_to_peer and ((peers == 1 and nbytes <= _FEW_BYTES) or 0 < peers * nbytes <= _PACKET_BYTES)


def wait_patiently(work: Any, begun: Wait, sites: PeerNames, timeout: float) -> None:
    """Wait for a collective of gloo, and compare the sites' calls while that takes long.

    Args:
        work: the collective.
        begun: the same, for the other sites.
        sites: the sites by name.
        timeout: seconds that it may take.

    Raises:
        MismatchError: if the sites do not make the same calls.
        RuntimeError: if it fails, or the time is up.
    """
    deadline = Deadline(timeout)
    while not work.is_completed() and deadline.left > ASK_SECONDS:
        with suppress(RuntimeError):  # this wait has timed out, the collective goes on
            work.wait(timedelta(seconds=ASK_SECONDS))
        if not work.is_completed():
            sites.check_calls(begun)
    work.wait(timedelta(seconds=max(deadline.left, 0.001)))
    own_place.wait = None


class PairwiseExchange(Gather, AllToAll):
    """Gather, or exchange of different payloads, by one message for each pair of sites, each of its exact size.

    Args:
        transport: the transport.
        sent: this site's payloads by rank of the receiver; in a gather they are all the same tensor.
        received: room for what is received by rank of the sender; this site's own payload is in its place.
        counts: whether the traffic counts its bytes.
    """

    def __init__(
        self, transport: GroupTransport, sent: list[Tensor], received: list[Tensor], *, counts: bool = True
    ) -> None:
        self._transport = transport
        self.payloads = sent
        self.payload = received[transport.rank]
        self._received = received
        peers = [rank % len(sent) for rank in range(transport.rank + 1, transport.rank + len(sent))]
        self._rooms = [(bytes_of(received[peer]), peer) for peer in peers if received[peer].numel()]
        self._own = [(bytes_of(sent[peer]), peer) for peer in peers if sent[peer].numel()]
        self._bytes = sum(len(body) for body, _ in self._own) if counts else 0
        self._works: list[tuple[Work, int]] = []

    def launch(self) -> None:
        transport = self._transport
        transport.traffic.add(self._bytes)
        tag = transport.next_tag()
        for bodies, sends in ((self._rooms, False), (self._own, True)):
            for body, peer in bodies:
                try:
                    self._works.append((transport.start(body, peer, tag, sends), peer))
                except RuntimeError as error:
                    raise transport.lost(error, peer) from None

    def has_arrived(self) -> bool:
        messages = [work for work, _ in self._works if isinstance(work, Message)]
        return len(messages) == len(self._works) and have_arrived(messages)

    def wait(self) -> list[Tensor]:
        self._transport.wait_all(self._works)
        return self._received


class RelayedGather(Gather):
    """Gather of payloads of a few sites, of which each site gets a part and passes it on to the others.

    No site sends much more than another then, and messages travel twice.

    Args:
        transport: the transport.
        payloads: room for the payloads of all sites, by rank.
    """

    def __init__(self, transport: GroupTransport, payloads: list[Tensor]) -> None:
        self.payload = payloads[transport.rank]
        self._payloads = payloads
        rank, sites = transport.rank, range(len(payloads))
        parts = [payload.tensor_split(len(sites)) for payload in payloads]  # by sender, by site that passes it on
        self._scatter = PairwiseExchange(transport, [*parts[rank]], [each[rank] for each in parts])
        self._passed = [[parts[sender][rank] for sender in sites if sender != peer] for peer in sites]  # to each peer
        self._got = [[parts[sender][peer] for sender in sites if sender != rank] for peer in sites]  # from each peer
        self._passed[rank] = self._got[rank] = []
        rooms = [[payloads[0].new_zeros(sum(map(len, part))) for part in way] for way in (self._passed, self._got)]
        self._forward = PairwiseExchange(transport, *rooms)
        self._arrives = False  # something that has not been waited for

    def launch(self) -> None:
        self._scatter.launch()
        self._arrives = True

    def wait(self) -> list[Tensor]:
        if not self._arrives:
            return self._payloads
        self._arrives = False
        self._scatter.wait()
        for parts, message in zip(self._passed, self._forward.payloads, strict=True):
            if parts:
                torch.cat(parts, out=message)
        self._forward.launch()
        for parts, message in zip(self._got, self._forward.wait(), strict=True):
            for part, arrived in zip(parts, message.split([*map(len, parts)]), strict=True):
                part.copy_(arrived)
        return self._payloads


class CollectiveGather(Gather):
    """Gather by one collective, for backends made for them; payloads are padded to the largest.

    Args:
        transport: the transport.
        sizes: number of elements of each site's payload, by rank.
        dtype: type of the elements.
    """

    def __init__(self, transport: GroupTransport, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self._transport = transport
        width = max(sizes)
        self._padded = torch.zeros(width, dtype=dtype, device=transport.device)
        self._gathered = torch.empty(width * len(sizes), dtype=dtype, device=transport.device)
        # The same tensors in every step, by which a receiver knows the views that it has made of them.
        self._payloads = [self._gathered[rank * width :][:size] for rank, size in enumerate(sizes)]
        self.payload = self._padded[: sizes[transport.rank]]
        self._work: dist.Work | None = None

    def launch(self) -> None:
        if not self._padded.numel():
            return
        peers = self._transport.world_size - 1
        self._transport.traffic.add(peers * self._padded.numel() * self._padded.element_size())
        self._work = dist.all_gather_into_tensor(
            self._gathered, self._padded, group=self._transport.group, async_op=True
        )

    def has_arrived(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> list[Tensor]:
        if self._work is not None:
            self._transport.wait(self._work)
            self._work = None
        return self._payloads


def _freeze_in_child() -> None:
    """Collect no garbage from before the fork in a child, such as a loader's worker.

    It may hold process groups, whose destructors wait for threads that do not exist in the child, or crash.
    """
    if GroupTransport.used:
        gc.freeze()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_freeze_in_child)
