"""Transport over the hub for training that goes on while sites leave and come.

Exchanges take place in rounds. Every site ends a round, and the hub closes it with the list of its contributors, which
is the same at all sites. What a site has sent counts only if it is a contributor; what arrives before the close is
provisional. A site that is absent counts as one that sends zeros.

A step of a reduction begins with a round that admits sites: all sites have the same parameters then, and no site
changes them until it is closed. A site that joins gets the state of another one, and all that has been sent in the
round. It listens to this one step, in which nothing that it sends counts, and takes part from the next one on.

With ``late="skip"``, the hub closes the first round of a step without a site that is late. When that site ends its own
part of the round it learns that it is absent, and goes through the step as one that listens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MismatchError
from ..exchange import codec
from ..exchange.codec import check_lengths, decode_objects, encode_object
from ..exchange.traffic import Traffic
from ..exchange.transport import Gather, PendingSum, Requirements
from .actions import Round
from .link import HubLink
from .transport import SECOND_ROUND, GatheredSum, HubGather, HubTransport, bytes_of


class ElasticTransport(HubTransport):
    """Messages between the sites of a hub, of which some may be absent.

    Args:
        link: the link.
        traffic: the meter; it counts what this site sends to the hub.
        timeout: seconds after which a silent site counts as lost.
        requirements: number of sites that are needed, and when a silent one is lost.
        group: process group of the sites, if there is one.

    Raises:
        ValueError: if the project requires sealed messages.
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
        if link.sealing.required:
            raise ValueError(
                "min_sites does not go with sealed messages: the sites agree on their key when a run starts, and one "
                "that joins could not read them"
            )
        super().__init__(link, traffic, timeout, group)
        self._requirements = requirements
        self.joins = self.listens = link.rounds.joins
        if not self.joins:
            link.rounds.begin(requirements)
        self.ring = self.copies
        self._in_step = False
        self._resize(link.world_size)
        self.absent = self._of_run(link.rounds.absent)

    # Sites that are new in the roster

    def _resize(self, size: int) -> None:
        """Exchange with so many sites from now on."""
        self.world_size = size
        self.ring = self.copies = size - 1

    def _of_run(self, slots: frozenset[int]) -> frozenset[int]:
        return frozenset(slot for slot in slots if slot < self.world_size)

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
        kind = Round.FIRST if admits else Round.FURTHER if self._in_step else Round.COLLECTIVE
        number = self.link.step
        with self.traffic.waiting():
            absent = self._of_run(self.link.rounds.end(self.timeout, self._answer if admits else None, kind, idle))
        self.absent = absent | self.absent if self._in_step else absent
        if admits:
            self._in_step = True
            self.link.rounds.first = number
            self._collectives = 0

    def end_step(self) -> None:
        self._in_step = self.listens = False

    @property
    def behind(self) -> bool:
        return self.link.rounds.behind

    @property
    def left_out(self) -> frozenset[int]:
        """Ranks of the sites that have no part in the rest of the step, since they were absent in its first round."""
        return self.absent if self._in_step else frozenset()

    @property
    def silent(self) -> bool:
        """Whether nothing that this site sends counts: it has no part in the step, or is late."""
        return self.listens or self.rank in self.left_out or self.link.rounds.behind

    def _answer(self) -> bytes:
        """Return the state of this site, for one that joins."""
        assert self.donate is not None
        return codec.encode(self.donate())

    def rejoin(self) -> None:
        with self.traffic.waiting():
            self.link.rounds.rejoin(self.timeout)
        self.joins = self.listens = True
        self._in_step = False

    def receive_state(self, most: int) -> Any:
        if not self.joins:
            return None
        self.link.rounds.begin(self._requirements)
        state = self.link.rounds.receive_state(self.timeout, most)
        self._resize(self.link.world_size)  # the run may have grown while this site waited
        return codec.decode(state)

    def take_part(self) -> None:
        self.link.rounds.confirm()
        self.joins = False

    # Exchanges

    def begin_plan(self) -> None:
        self._gathers = 0

    def gather(self, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        return ElasticGather(self, self.next_gather(), sizes, dtype)

    def gather_again(self, first: Gather, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        assert isinstance(first, ElasticGather)
        return ElasticGather(self, first.exchange | SECOND_ROUND, sizes, dtype)

    def gather_resized(self, gather: Gather, sizes: Sequence[int], dtype: torch.dtype) -> Gather:
        assert isinstance(gather, ElasticGather)
        return ElasticGather(self, gather.exchange, sizes, dtype)

    def gather_once(self, sizes: Sequence[int], dtype: torch.dtype) -> ElasticGather:
        return ElasticGather(self, self.next_collective(), sizes, dtype)

    def prefers_gather(self, nbytes: int) -> bool:
        return True  # a sum that the hub has formed holds the share of a site that has left since

    def all_reduce(self, tensor: Tensor) -> PendingSum:
        return GatheredSum(self, tensor)

    def broadcast(self, tensor: Tensor) -> None:
        while True:
            source = min(set(range(self.world_size)) - self.absent)
            sizes = [tensor.numel() * (rank == source) for rank in range(self.world_size)]
            gather = self.gather_once(sizes, tensor.dtype)
            if self.rank == source:
                gather.payload.copy_(tensor.detach().reshape(-1))
            gather.launch()
            self.close_round()
            if source not in self.absent:
                value = gather.wait()[source]
                if self.rank != source:
                    tensor.copy_(value.view(tensor.shape))
                return

    def broadcast_bytes(self, content: bytes) -> bytes:
        while True:
            source = min(set(range(self.world_size)) - self.absent)
            every = self._gather_present_bytes(content if self.rank == source else b"")
            if source in every:
                return every[source].tobytes()

    def gather_objects(self, item: Any) -> list[Any]:
        every = self.gather_present(item)
        return [every.get(rank) for rank in range(self.world_size)]

    def gather_present(self, item: Any) -> dict[int, Any]:
        own, refusal = encode_object(item)
        every = self._gather_present_bytes(own)
        return dict(zip(every, decode_objects([*every.values()], refusal), strict=True))

    def _gather_present_bytes(self, own: bytes) -> dict[int, memoryview]:
        """Gather byte strings of the sites that are present, by rank, and end the round."""
        sizes = self.gather_once([1] * self.world_size, torch.int64)
        sizes.payload[0] = len(own) + 1
        sizes.launch()
        # 0 for a site that is not there; one that was absent in the last round may have joined since
        lengths = [int(size) for size in (sizes.wait() if self._in_step else sizes.collect())]
        check_lengths(lengths)
        gather = self.gather_once(lengths, torch.uint8)
        gather.payload.copy_(torch.frombuffer(bytearray(b"\0" + own), dtype=torch.uint8))
        gather.launch()
        self.close_round()
        payloads = gather.wait()
        return {
            rank: bytes_of(payload)[1:]
            for rank, payload in enumerate(payloads)
            if lengths[rank] and rank not in self.absent | gather.missing
        }


class ElasticGather(HubGather):
    """Gather of payloads, in which those of absent sites are zeros.

    Attributes:
        missing: ranks of the sites whose payloads have not arrived, in the last round.
    """

    _transport: ElasticTransport

    def __init__(self, transport: ElasticTransport, exchange: int, sizes: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(transport, exchange, sizes, dtype)
        self.missing: set[int] = set()
        self._round = 0

    def post(self) -> None:
        if not self._incoming:
            present = [each for each in self._others if each[0] not in self._transport.left_out]
            self._incoming = [self._transport.link.expect(rank, self.exchange, buffer) for rank, buffer in present]

    def launch(self) -> None:
        self.missing.clear()
        self._round = self._transport.link.step
        if self._transport.silent:
            self.post()
        else:
            super().launch()

    def wait(self) -> list[Tensor]:
        transport = self._transport
        self.collect()
        self._blank(transport.absent | {transport.rank} if transport.listens else transport.absent)
        return self.payloads

    def collect(self) -> list[Tensor]:
        """Wait for the payloads of all sites that have not left; which of them count, the end of the round decides."""
        transport = self._transport
        if self._incoming:
            with transport.traffic.waiting():
                lost = transport.link.rounds.wait_for(self._incoming, self._round, transport.timeout)
            self._incoming = []
            self._check(lost)
            self._blank(lost)
        return self.payloads

    def _check(self, missing: set[int]) -> None:
        """Raise MismatchError if a site has taken part in the round without its payload.

        A site that joins gets what has been sent in this round, but not what was sent in an earlier one.
        """
        transport, gone = self._transport, self._transport.link.gone
        for rank in sorted(missing - transport.absent - gone.keys()):
            raise MismatchError(
                f"{transport.sites[rank]} has ended the round without its payload of {self.payloads[rank].numel()} "
                "elements: do all sites run the same program, and is nothing else exchanged between backward() and "
                "synchronize() when a site joins?"
            )

    def _blank(self, ranks: set[int] | frozenset[int]) -> None:
        for rank in ranks - self.missing:
            self.payloads[rank].zero_()
        self.missing |= ranks
