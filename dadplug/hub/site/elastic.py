"""Transport over the hub for training that goes on while sites leave and come.

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

from abc import abstractmethod
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from ...errors import MismatchError
from ...exchange import codec
from ...exchange.rounds import Requirements, Rounds
from ...exchange.traffic import Traffic
from ..wire.messages import RoundKind
from .link import HubLink
from .transport import COLLECTIVES, HubAllToAll, HubExchange, HubGather, HubRounds, HubTransport

_PART_BYTES = 1 << 20  # of a payload that are cleared at once


class ElasticRounds(HubRounds):
    """Rounds of the sites of a hub, of which some may be absent.

    Args:
        link: the link.
        traffic: the meter, for the time of waiting.
        timeout: seconds after which a silent site counts as lost.
        requirements: number of sites that are needed, and when a silent one is lost.

    Attributes:
        launched: exchanges that are not settled.
    """

    elastic = True

    def __init__(self, link: HubLink, traffic: Traffic, timeout: float, requirements: Requirements) -> None:
        super().__init__(link)
        self.launched: list[ElasticExchange] = []
        self._traffic = traffic
        self._timeout = timeout
        self._requirements = requirements
        self.joins = self.listens = link.rounds.joins
        if not self.joins:
            link.rounds.begin(requirements)
        self.size = link.world_size
        self.absent = self._of_run(link.rounds.absent)

    def _of_run(self, slots: frozenset[int]) -> frozenset[int]:
        return frozenset(slot for slot in slots if slot < self.size)

    @property
    def least(self) -> int:
        """Number of sites below which a step cannot go on."""
        return self._requirements.min_sites

    @property
    def grows(self) -> bool:
        return self.size < self.link.rounds.size

    def grow(self) -> None:
        before, size = self.size, self.link.rounds.size
        if before < size:
            self.size = size
            self.absent |= frozenset(range(before, size))

    def close(self, admits: bool = False, idle: bool = False) -> None:
        kind = RoundKind.FIRST if admits else RoundKind.FURTHER if self.in_step else RoundKind.COLLECTIVE
        number, in_step = self.link.step, self.in_step or admits
        # Payloads may be launched in a collective's round, and counted in that of the step.
        ended = [each for each in self.launched if in_step or each.exchange & COLLECTIVES]
        self.launched = [each for each in self.launched if each not in ended]
        counted = [incoming for each in ended for incoming in each.incoming]
        answer = self._answer if admits else None
        with self._traffic.waiting():
            absent = self._of_run(self.link.rounds.end(self._timeout, answer, kind, idle, counted))
        self.absent = absent | self.absent if self.in_step else absent
        if admits:
            self.in_step = True
            self.link.rounds.first = number
            self._collectives = 0
        for rank in self.link.rounds.apart & {*self.present}:
            name = self.link.name(rank)
            self.leave_out(rank, MismatchError(f"{name} goes on, though it was left out of a round before"))
        for each in ended:
            each.finish(ended=True)

    def leave_out(self, rank: int, error: Exception) -> None:
        self.absent |= {rank}
        self.link.rounds.leave_out(rank, str(error))
        check_left(self, error, self.least)

    def end_step(self) -> None:
        self.in_step = self.listens = False
        self.launched = [each for each in self.launched if each.is_open]  # as deltas that count in a later step
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
        return self.absent if self.in_step else frozenset()

    @property
    def silent(self) -> bool:
        """Whether nothing that this site sends counts: it has no part in the step, or is late."""
        return self.link.rounds.listens or self.link.rank in self.left_out or self.link.rounds.behind

    def _answer(self) -> bytes:
        """Return the state of this site, for one that joins."""
        assert self.donate is not None
        return codec.encode(self.donate(), compact=True)

    def rejoin(self) -> None:
        with self._traffic.waiting():
            self.link.rounds.rejoin(self._timeout)
        self.joins = self.listens = True
        self.in_step = False
        self.launched.clear()

    def receive_state(self, most: int) -> Any:
        if not self.joins:
            return None
        if not self.link.rounds.states.awaits:  # else it has asked again after a loss of the connection
            self.link.rounds.begin(self._requirements)
        state = self.link.rounds.receive_state(self._timeout, most)
        self.size = self.link.world_size  # the run may have grown while this site waited
        return codec.decode(state)

    def take_part(self) -> bool:
        self.joins = not self.link.rounds.confirm()
        return not self.joins

    def begin_plan(self) -> None:
        self._gathers = 0


def check_left(rounds: Rounds, error: Exception, least: int) -> None:
    """Check that a step can go on without a site.

    Args:
        rounds: the rounds.
        error: the error for which the site is left out.
        least: number of sites that are needed.

    Raises:
        MismatchError: if too few sites are left.
    """
    left = len(rounds.present)
    if rounds.in_step and left < least:
        raise MismatchError(f"{error}. {left} of {rounds.size} sites are left, and this run needs {least}")


class ElasticExchange(HubExchange):
    """Exchange in which sites may be absent."""

    _transport: ElasticTransport
    _round = 0

    def launch(self) -> None:
        self.missing = set()
        self._round = self._transport.link.step
        self._transport.rounds.launched.append(self)
        if self._transport.rounds.silent:
            self._transport.link.rounds.mark()  # as at the sites that send
            self.post()
        else:
            super().launch()

    def _lost(self) -> set[int]:
        """Wait for the payloads that can arrive; return the ranks of the sites of which none has."""
        if not self.incoming:
            return set()
        with self._transport.traffic.waiting():
            lost = self._transport.link.rounds.wait_for(self.incoming, self._round, self._transport.timeout)
        self.incoming = []
        return lost

    @property
    def is_open(self) -> bool:
        """Whether its round has not been closed for this site."""
        return self._round == self._transport.link.step

    @abstractmethod
    def finish(self, *, ended: bool = False) -> None:
        """Take what has arrived once the round is closed; `ended` is whether this site has ended it."""


class ElasticGather(ElasticExchange, HubGather):
    """Gather of payloads, in which those of absent sites are zeros."""

    def wait(self) -> list[Tensor]:
        transport = self._transport
        self.collect()
        if transport.link.rounds.closed >= self._round:
            self.finish()
        absent = transport.rounds.absent
        self._blank(absent | {transport.rank} if transport.link.rounds.listens else absent)
        return self.payloads

    def collect(self) -> list[Tensor]:
        self._blank(self._lost())
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
        lacking = sorted(self.missing - transport.rounds.absent - (set() if ended else transport.link.gone.keys()))
        others, last = {*transport.rounds.present} - {transport.rank}, transport.link.step - 1
        alone = lacking and others == {*lacking}
        if alone and (transport.rounds.listens or all(inbox.begun_by(each, last) for each in others)):
            raise MismatchError(
                f"{self._describe(lacking[0])}: is nothing else exchanged between backward() and synchronize() when a "
                f"site joins? Otherwise {transport.sites.mismatch()}"
            )
        for rank in lacking:
            transport.rounds.leave_out(rank, MismatchError(self._describe(rank)))

    def _describe(self, rank: int) -> str:
        count = self.payloads[rank].numel()
        return f"{self._transport.sites[rank]} has ended the round without its payload of {count} elements"

    def _blank(self, ranks: Set[int]) -> None:
        for rank in ranks - self.missing:
            if rank < len(self.payloads):  # else it is new, and was announced after the gather was made
                for part in self.payloads[rank].view(torch.uint8).split(_PART_BYTES):
                    if part.any():  # writing takes the memory of what has only been announced
                        part.zero_()
        self.missing |= ranks


class ElasticAllToAll(ElasticExchange, HubAllToAll):
    """Exchange of different payloads, of which those of absent sites are missing.

    To be waited for once the round in which it was launched is closed. Only the receiver finds out that a site which is
    present has not sent its payload, and has to let the others know.
    """

    def wait(self) -> list[Tensor]:
        self.finish()
        self.missing |= self._transport.rounds.absent
        return self._received

    def finish(self, *, ended: bool = False) -> None:
        self.missing |= self._lost()


class ElasticTransport(HubTransport):
    """Messages between the sites of a hub, of which some may be absent.

    Args:
        link: the link.
        traffic: the meter; it counts what this site sends to the hub.
        timeout: seconds after which a silent site counts as lost.
        requirements: number of sites that are needed, and when a silent one is lost.
        for_trainer: whether it is for a trainer's messages besides those of its gradient reduction.
    """

    rounds: ElasticRounds
    _gather, _all_to_all = ElasticGather, ElasticAllToAll

    def __init__(
        self,
        link: HubLink,
        traffic: Traffic,
        timeout: float,
        requirements: Requirements,
        for_trainer: bool = False,
    ) -> None:
        rounds = (TrainerRounds if for_trainer else ElasticRounds)(link, traffic, timeout, requirements)
        super().__init__(link, traffic, timeout, rounds)

    def prefers_gather(self, nbytes: int) -> bool:
        return True  # a sum that the hub has formed holds the share of a site that has left since


class TrainerRounds(ElasticRounds):
    """Rounds of a trainer's messages besides those of its gradient reduction.

    A site that joins in mid-training runs the program from its beginning, and so comes to exchanges that the others had
    long ago. Until the end of its first step it therefore exchanges nothing: it is alone in every exchange, and `joins`
    is true. The trainer calls `end_step` after every step of its reduction, which ends that.
    """

    @property
    def alone(self) -> bool:
        return self.joins

    @property
    def present(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.link.rounds.absent]

    def end_step(self) -> None:
        super().end_step()
        self.joins = False
        self.grow()
        self.absent, self._collectives = self._of_run(self.link.rounds.absent), 0  # the same at a site that has joined

    @property
    def place(self) -> int:
        return self.channel

    def close(self, admits: bool = False, idle: bool = False) -> None:
        if not self.alone:
            super().close(admits, idle)
