"""Agreements over a hub, where sites leave and return, and where a late site does not hold up the others.

An agreement is one round of the hub (`dadplug.hub.site.transport`). All that belongs to a site's contribution travels
in it: the header, the deltas and the buffers. The hub closes the round with the list of its contributors, the same at
all sites, and only what these have sent counts:

    a <- a moved by the mean over contributors of  w_s sent_s        w_s: share of the site's samples

With overlap, the deltas that a site sends at the end of a round belong to the next round of the hub, and are counted
when that is closed. A site therefore knows at each close whether its contribution is part of the agreed model. If not,
since it was late or has just joined, it keeps the steps: they are part of its next contribution. So no step counts
twice, and none is lost but those that a site has not sent before it is killed.

Encoding updates the memory of errors before it is known whether the contribution counts. If it does not count, the
memory is restored to its bits before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MismatchError, NonFiniteError
from ..exchange import Gather, Transport
from ..logs import get_logger
from ..model_sync import sameness
from ..model_sync.buffers import agreed_value
from .agreement import Agreement, Header, delta_format, fingerprint, is_finite
from .options import LocalOptions

_log = get_logger(__name__)
_Tensors = dict[str, Tensor]


class RoundTime:
    """Time of a round in which each site takes as many steps as it can.

    Args:
        seconds: the time; None where rounds are not timed.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self.begin()

    @property
    def is_timed(self) -> bool:
        """Whether rounds are timed."""
        return self._seconds is not None

    def begin(self) -> None:
        """Begin a round."""
        self._start = self._last = time.monotonic()
        self._step = 0.0

    def expire(self) -> None:
        """Let the round be over after the next step."""
        self._start = -math.inf

    def end_step(self) -> None:
        """Take the end of a step."""
        now = time.monotonic()
        self._step, self._last = now - self._last, now

    @property
    def over(self) -> bool:
        """Whether the next step would end after the time of the round."""
        return self._seconds is not None and self._last + self._step - self._start > self._seconds


class Contribution(NamedTuple):
    """Contribution of a site to one agreement.

    Attributes:
        deltas: the deltas by name; None where they can be computed from the model, or there are none.
        weight: their weight in the mean; 0 if there are none.
        before: state of the format before they were encoded; None if there are none.
        position: number of the hub's round in which they were sent.
    """

    deltas: _Tensors | None = None
    weight: int = 0
    before: dict[str, Any] | None = None
    position: int = 0


class ElasticAgreement(Agreement):
    """The agreements of one site with those that are present, over a hub.

    Args:
        model: the model, equal on all sites.
        options: the options.
        transport: the transport.

    Attributes:
        unsent: weight of this site's steps that are not part of a contribution yet, after an agreement.
        spoilt: whether its steps have been dropped at the last agreement, since they hold NaN or Inf.
        admits: whether sites may join in the agreements that follow.
        contributions: weight of all that is part of the agreed model, by rank of the site; the same at all sites.
    """

    def __init__(self, model: nn.Module, options: LocalOptions, transport: Transport) -> None:
        super().__init__(model, options, transport)
        (self._whole,) = self._fragments
        self.unsent, self.spoilt, self.admits = 0, False, True
        self._is_alone = False  # since the hub is away
        self._offered = Contribution()
        self._planned: tuple[Any, ...] = ()
        self._of_buffers: list[Gather] = []
        self.contributions: dict[int, int] = {}
        self._last: dict[int, int] = {}  # number of the last agreement with a contribution of each site
        self._present = set(range(transport.world_size)) - transport.absent

    # A site that joins

    def donate(self) -> tuple[_Tensors, dict[str, Any]]:
        """Return the tensors of the agreed model, by name, and what a site that joins needs besides."""
        plan = {"count": self.count, "agreed": self.agreed.donate(self._model), "buffers": self._buffers.names}
        plan |= {"contributions": dict(self.contributions), "last": dict(self._last)}
        return self.as_of_model(), plan

    def adopt(self, plan: Mapping[str, Any], step: int) -> None:
        """Go on from the state of another site, whose tensors are in the model; the memory of errors begins empty.

        Args:
            plan: what `donate` has returned at the other site.
            step: number of the steps so far.
        """
        self.count, self.unsent = plan["count"], 0
        self.first_batch.take()
        self.agreed.adopt(plan["agreed"], self._model)
        self._buffers.load(plan["buffers"])
        self._whole.form = delta_format(self._options, self._transport)
        self._offered, self._planned, self._added = Contribution(), (), []
        self.contributions, self._last = dict(plan["contributions"]), dict(plan["last"])
        rank = self._transport.rank
        self._present = set(range(self._transport.world_size)) - self._transport.absent - {rank}
        last = self._last.get(rank)
        before = (
            "it has had no part in it so far"
            if last is None
            else f"its last contribution is that of agreement {last}, and what it had done since and not sent is lost"
        )
        name = self._transport.sites[rank]
        _log.info("%s joins the training at step %d, after agreement %d: %s", name, step, self.count, before)

    # An agreement

    def postpones(self) -> bool:
        away = self._transport.hub_is_away
        if away and not self._is_alone:
            _log.warning("the hub is away: local steps go on, and count in the agreement after its return")
        self._is_alone = away
        return away

    def reach(self, step: int, weight: int, finished: bool) -> list[Header]:
        """Agree on the parameters with the sites that are present.

        Args:
            step: number of this site's steps.
            weight: weight of its delta; 0 if it has trained nothing since the last agreement.
            finished: whether it has no more batches.

        Returns:
            The headers of the contributors. A site has finished where it has sent all its steps, too.

        Raises:
            NonFiniteError: on all sites, if the parameters of every contributor hold NaN or Inf.
            MismatchError: on all sites, if they do not train the same parameters.
            SiteError: if this site or the hub is given up.
            DroppedError: if this site was dropped, and can join again.
        """
        transport, overlap = self._transport, self._options.overlap
        self.agreed.drop_untrained(self._model, self.agreed.values)
        deltas = self.agreed.deltas(self._model)
        finite = [is_finite(delta) for delta in deltas.values()]
        nonfinite = -1 if all(finite) else finite.index(False)
        self.spoilt = nonfinite >= 0
        own = 0 if self.spoilt else weight
        self._drop_spoilt_buffers()
        if not overlap or not self._planned:
            self._offer({} if overlap else deltas, 0 if overlap else own, deltas)
        elif self._offered.position != transport.position:  # other rounds have been closed since: it is sent again
            self._whole.receive()
            self._launch_payloads()
        headers = self._exchange(step, finished and not (overlap and own), nonfinite)
        counted = transport.rank in headers
        if not (overlap or counted or self._whole.form.keeps_deltas):
            deltas = self.agreed.deltas(self._model)  # encoding has overwritten them
        self._move(headers)
        self._announce(headers)
        self.count += 1
        transport.end_step()  # what is offered with overlap belongs to the next round
        self._go_on(None if self.spoilt else deltas, own, counted)
        if transport.grows:
            transport.grow()
        self._report(headers, counted, [*deltas])
        return [*headers.values()]

    def _drop_spoilt_buffers(self) -> None:
        """Set this site's buffers to the agreed ones where its steps are dropped, or its statistics hold NaN or Inf."""
        known = [each for each in self._buffers.known() if each.is_floating_point()]
        if self.spoilt:
            self._buffers.restore()
        elif not all(is_finite(each) for each in known):
            self._buffers.restore(self._buffers.names)
            _log.warning("the statistics of this site hold NaN or Inf: they are replaced by the agreed ones")

    def _offer(self, deltas: _Tensors, weight: int, shapes: _Tensors) -> None:
        """Encode deltas, and start to send them.

        Args:
            deltas: the deltas; they may be overwritten. None are sent, but zeros without weight, where there are none.
            weight: their weight.
            shapes: tensors of their shapes.
        """
        self._plan(shapes)
        before = None
        if weight:
            before = self._whole.form.state_dict()
            self._whole.form.encode(deltas, self._whole.payloads)
        self._offered = Contribution(None, weight, before, 0)
        self._launch_payloads()

    def _launch_payloads(self) -> None:
        self._offered = self._offered._replace(position=self._transport.position)
        self._whole.launch()

    def _plan(self, tensors: _Tensors) -> None:
        """Prepare the gathers, if parameters, buffers or sites have come or gone."""
        transport, count = self._transport, self._transport.world_size
        added = [sameness.fingerprint(self.agreed.values[name]) for name in self._added if name in self.agreed.values]
        planned = (fingerprint(tensors, self._whole.form.begin_round(self.count)), tuple(self._buffers.names), count)
        self._whole.layout = (planned[0] + sum(added)) % (1 << 62)
        self._added = []
        if planned == self._planned:
            return
        self._planned = planned
        transport.begin_plan()
        self._headers = transport.gather([len(Header._fields)] * count, torch.int64)
        sizes = self._whole.form.layout(tensors)
        self._whole.gathers = {dtype: transport.gather([size] * count, dtype) for dtype, size in sizes.items()}
        groups = sameness.flattened(self._buffers.known())
        self._of_buffers = [transport.gather([flat.numel()] * count, flat.dtype) for flat, _ in groups]

    def _exchange(self, step: int, finished: bool, nonfinite: int) -> dict[int, Header]:
        """Send the header and the buffers, close the round, and return the headers of the contributors by rank."""
        transport, offered = self._transport, self._offered
        changed, batch = bool(self._buffers.changed()), 0 if self.count else self.first_batch.take()
        header = Header(step, offered.weight, self._whole.layout, finished, nonfinite, changed, batch)
        self._headers.payload.copy_(torch.tensor(header))
        self._headers.launch()
        for gather, (flat, _) in zip(self._of_buffers, sameness.flattened(self._buffers.known()), strict=True):
            gather.payload.copy_(flat)
            gather.launch()
        transport.close_round(self.admits, idle=not offered.weight)
        rows = self._headers.wait()
        present = [rank for rank in range(transport.world_size) if rank not in transport.absent]
        headers = {rank: Header(*rows[rank].tolist()) for rank in present}
        layouts = {header.layout for header in headers.values()}
        if len(layouts) > 1 or (transport.rank in headers and layouts != {self._whole.layout}):
            raise MismatchError(
                "the sites do not train the same parameters in this round: freeze, free and add parameters at the same "
                "step on all sites, with the same values"
            )
        self.first_batch.compare([header.batch for header in headers.values()], transport)
        return headers

    @torch.no_grad()
    def _move(self, headers: Mapping[int, Header]) -> None:
        """Take the outer step with what the contributors have sent, and replace the buffers by their mean."""
        payloads = self._whole.receive()
        of_buffers = [gather.wait() for gather in self._of_buffers]
        total = sum(header.weight for header in headers.values())
        if not total:
            self._buffers.restore(self._buffers.names)
            return
        count = self._transport.world_size
        shares = [headers[rank].weight / total if rank in headers else 0.0 for rank in range(count)]
        means = self._whole.form.decode(payloads, shares)
        self.agreed.move(means, self._whole.rates(means, self._options.outer_lr))
        weighing = [rank for rank, header in headers.items() if header.weight]
        for rows, (_, tensors) in zip(of_buffers, sameness.flattened(self._buffers.known()), strict=True):
            value = agreed_value([rows[rank] for rank in weighing], [shares[rank] for rank in weighing])
            for tensor, part in zip(tensors, value.split([each.numel() for each in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))
        self._buffers.keep()
        self._last.update(dict.fromkeys(weighing, self.count + 1))
        for rank in weighing:
            self.contributions[rank] = self.contributions.get(rank, 0) + headers[rank].weight

    def _go_on(self, deltas: _Tensors | None, weight: int, counted: bool) -> None:
        """Set the model to the agreed values and the steps of this site that are not part of them.

        Args:
            deltas: what this site has done since the last agreement, or since its last contribution with overlap; None
                if it holds NaN or Inf, and is dropped.
            weight: its weight.
            counted: whether this site's contribution is part of the agreed values.
        """
        offered, self._offered = self._offered, Contribution()
        lost = offered.weight > 0 and not counted
        if lost:
            assert offered.before is not None
            self._whole.form.load_state_dict(offered.before)
        if not self._options.overlap:
            self.unsent = offered.weight if lost else 0
            self.agreed.begin_round(self._model, unsent=deltas if lost else None)
        else:
            self._send_rest(deltas, weight, offered if lost else Contribution())
        if not self.unsent and not self._offered.weight:
            for table in self._tables:  # as lookups do, since sites look up different rows
                sameness.renormalise(table)

    def _send_rest(self, deltas: _Tensors | None, weight: int, lost: Contribution) -> None:
        """Begin to send what this site has done since its last contribution, with that one if it does not count."""
        rest = {} if deltas is None else deltas
        if lost.deltas is not None:
            weight = weight + lost.weight if self._options.weighting == "samples" else 1
            rest = {name: rest[name].add_(each) if name in rest else each for name, each in lost.deltas.items()} | rest
        names = self.agreed.values
        rest = {name: rest[name] if name in rest else torch.zeros_like(value) for name, value in names.items()}
        apart = self._whole.form.keeps_deltas
        kept = {name: each if apart else each.clone() for name, each in rest.items()} if weight else None
        self.agreed.begin_round(self._model, kept)
        self.unsent = 0
        self._offer(rest, weight, rest)
        self._offered = self._offered._replace(deltas=kept)

    def _announce(self, headers: Mapping[int, Header]) -> None:
        """Agree, in further rounds, on buffers that have changed for the first time."""
        if not any(header.changes for header in headers.values()):
            return
        weights = {rank: header.weight for rank, header in headers.items()}
        total = sum(weights.values())
        shares = {rank: each / total if total else 1 / len(weights) for rank, each in weights.items()}
        self._buffers.announce(self._transport, shares)

    # Reports

    def _report(self, headers: Mapping[int, Header], counted: bool, names: list[str]) -> None:
        """Log which sites have left, are late, or have returned, and whose steps are left out.

        Raises:
            NonFiniteError: if those of all contributors are.
        """
        transport, here = self._transport, set(headers)
        sites, number = transport.sites, self.count
        for rank in sorted(self._present - here - {transport.rank}):
            last = f"agreement {self._last[rank]}" if rank in self._last else "the start"
            if rank in transport.gone:
                _log.warning(
                    "%s has left: what it had done since %s, and not sent, is lost. Agreement %d is one of %d sites",
                    *(sites[rank], last, number, len(here)),
                )
            else:
                _log.info("%s is late: its steps since %s count in a later agreement", sites[rank], last)
        for rank in sorted(here - self._present - {transport.rank}):
            _log.info("%s takes part from agreement %d on", sites[rank], number)
        if not counted and transport.rank in self._present:
            _log.info("this site is late: its steps count in a later agreement than number %d", number)
        self._present = here | (self._present & {transport.rank})
        spoilt = {rank: header for rank, header in headers.items() if header.nonfinite >= 0}
        for rank, header in spoilt.items():
            _log.warning(
                "parameter %r holds NaN or Inf at %s: its steps since the last agreement are left out of agreement %d, "
                "and its parameters are the agreed ones",
                *(names[header.nonfinite], sites[rank], number),
            )
        if spoilt and spoilt.keys() == headers.keys():
            rank, header = next(iter(spoilt.items()))
            raise NonFiniteError(
                f"at step {header.step} parameter {names[header.nonfinite]!r} holds NaN or Inf at {sites[rank]}, and "
                "those of all other sites do, too: their steps since the last agreement are discarded, and the "
                "parameters are the agreed ones"
            )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state, with what is in transit."""
        offered = self._offered
        transit = None
        if offered.deltas is not None and offered.weight:
            deltas = {name: each.clone() for name, each in offered.deltas.items()}
            transit = {"deltas": deltas, "weight": offered.weight, "before": offered.before}
        kept = {"contributions": dict(self.contributions), "last": dict(self._last), "transit": transit}
        return super().state_dict() | kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; what was in transit is sent again."""
        if self._planned and self._options.overlap:
            self._whole.receive()
        super().load_state_dict(state)
        self.unsent, self._offered, self._planned = 0, Contribution(), ()
        self.contributions, self._last = dict(state["contributions"]), dict(state["last"])
        transit = state.get("transit")
        if transit is not None:
            self._whole.form.load_state_dict(transit["before"])
            deltas = {name: each.to(self.agreed.values[name], copy=True) for name, each in transit["deltas"].items()}
            self._offer({name: each.clone() for name, each in deltas.items()}, transit["weight"], deltas)
            self._offered = self._offered._replace(deltas=deltas)
