"""Agreements over a hub, where sites leave and return, and where a late site does not hold up the others.

An agreement is one round of the hub (`dadplug.hub.site.transport`). All that belongs to a site's contribution travels
in it: the header, the deltas and the buffers. The hub closes the round with the list of its contributors, the same at
all sites, and only what these have sent counts:

    a <- a moved by the mean over contributors of  w_s sent_s        w_s: share of the site's samples

With overlap, deltas are sent before the agreement in which they count: after the agreement before, or ``delay`` steps
before it. They belong to the round of the hub that is closed next. With ``fragments``, agreements are on one fragment
after the other. With a the agreed values of a fragment, and x the parameters of a site:

    sent        x - a                 start <- x
    counted     a <- a moved by the mean              x <- a + (x - start)              start <- a
    not         a <- a moved by that of the others    x <- a + (x - a before)           start <- a

A site's contribution does not count where the site was late or has just joined. Its steps are then part of its next
contribution. So no step counts twice, and none is lost but those that a site has not sent before it is killed.

Encoding updates the memory of errors before it is known whether the contribution counts. If it does not count, the
memory is restored to its bits before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidDeltaError, MismatchError, NonFiniteError
from ..exchange import Gather, Transport
from ..exchange.fields import COUNT, fits, invalid, minority
from ..step.model_sync import sameness
from ..step.model_sync.buffers import write_agreed
from ..step.model_sync.private import is_of_site
from ..support.logs import get_logger
from .agreed_model import is_finite
from .agreement import Agreement, Fragment, delta_format, divide
from .delta_format import describe_spoilt
from .header import Header, fingerprint, read_headers
from .options import LocalOptions

_log = get_logger(__name__)
_PLAN = {
    "count": int,
    "chosen": int | None,
    "agreed": dict[str, Any],
    "buffers": list[str],
    "contributions": list[dict[int, int]],
    "last": dict[int, int],
    "fragments": list[list[str]],
}


_SETTING = (bool, int, float, Tensor)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups for a site that joins, see `load_settings`."""
    return [
        {name: value for name, value in group.items() if isinstance(value, _SETTING)} if not is_of_site(group) else {}
        for group in optimizer.param_groups
    ]


def load_settings(optimizer: torch.optim.Optimizer, may_differ: Iterable[str], plan: Mapping[str, Any]) -> None:
    """Replace settings of an optimizer by those of another site.

    Args:
        optimizer: the optimizer.
        may_differ: names of the settings that stay, or "optimizer" for all.
        plan: state of the other site, with what `settings_of` has returned there.

    Raises:
        ValueError: if one is no setting, or stands for something else here, such as parameters.
    """
    own = {*may_differ}
    for group, settings in zip(optimizer.param_groups, plan["groups"], strict=True):
        given = {name: value for name, value in settings.items() if not {name, "optimizer"} & own}
        # A scheduler that is made later adds some.
        if not all(isinstance(each, _SETTING) for name in given for each in (group.get(name, 0.0), given[name])):
            raise ValueError(f"settings {[*given]} are not those of this optimizer")
        group.update(given)


class RoundTime:
    """Time of a round in which each site takes as many steps as it can.

    Args:
        seconds: the time; None where rounds are not timed.
        parts: number of agreements in it.
    """

    def __init__(self, seconds: float | None, parts: int) -> None:
        self._seconds = None if seconds is None else seconds / parts
        self.begin()

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


class DeltaContribution(NamedTuple):
    """Contribution of a site to one agreement, which has not been reached yet.

    Attributes:
        weight: weight of its deltas in the mean; 0 if there are none.
        before: state of the format before they were encoded; None if there are none.
        position: number of the hub's round in which they were sent.
    """

    weight: int
    before: dict[str, Any] | None
    position: int


class ElasticAgreement(Agreement):
    """The agreements of one site with those that are present, over a hub.

    Args:
        model: the model, equal on all sites.
        options: the options.
        transport: the transport.

    Attributes:
        spoilt: whether its steps have been dropped at the last agreement, since they hold NaN or Inf.
        admits: whether sites may join in the agreements that follow.
    """

    def __init__(self, model: nn.Module, options: LocalOptions, transport: Transport) -> None:
        if transport.inside is not None:
            transport.close()
            raise ValueError("LocalSGD with min_sites goes with one process at each site: start one")
        super().__init__(model, options, transport)
        self.spoilt, self.admits = False, True
        self._is_alone = False  # since the hub is away
        self._offered: DeltaContribution | None = None
        self._delay = self.delay.at(0)
        self._planned: tuple[Any, ...] = ()
        self._layout = 0  # of the headers: fingerprint of what is planned
        self._of_buffers: list[Gather] = []
        self._counted: list[dict[int, int]] = [{} for _ in self._fragments]  # weights by rank, for each fragment
        self._last: dict[int, int] = {}  # number of the last agreement with a contribution of each site
        self._present = set(range(transport.world_size)) - transport.rounds.absent

    @property
    def contributions(self) -> dict[int, int]:
        """Weight of all that is part of the whole agreed model, by rank of the site; the same at all sites."""
        ranks = set.intersection(*({*each} for each in self._counted))
        return {rank: min(each[rank] for each in self._counted) for rank in sorted(ranks)}

    @property
    def _fragment(self) -> Fragment:
        """The fragment of the next agreement."""
        return self._fragments[self.count % len(self._fragments)]

    # A site that joins

    def donate(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of the agreed model, by name, and what a site that joins needs besides."""
        plan = {"count": self.count, "agreed": self.agreed.donate(self._model), "buffers": self._buffers.names}
        plan |= {"contributions": [dict(each) for each in self._counted], "last": dict(self._last)}
        plan |= {"fragments": [[*each.names] for each in self._fragments], "chosen": self.delay.steps}
        return self.as_of_model(), plan

    def adopt(self, plan: Mapping[str, Any], step: int) -> None:
        """Go on from the state of another site, whose tensors are in the model; the memory of errors begins empty.

        Args:
            plan: what `donate` has returned at the other site.
            step: number of the steps so far.

        Raises:
            ValueError: if it is not of this model and these options; like KeyError and TypeError.
        """
        names, counted = plan["fragments"], plan["contributions"]
        plain = all(fits(plan[name], kind) for name, kind in _PLAN.items()) and 0 <= plan["count"] <= COUNT
        known = {name for each in names for name in each} <= {*plan["agreed"]["names"]}
        if not (plain and known and len(names) == len(counted) == len(self._fragments)):
            raise ValueError("the agreements are not of this model and these options")
        self.count = plan["count"]
        self.delay.load(plan["chosen"])
        self.first_batch.take()
        self.agreed.adopt(plan["agreed"], self._model)
        self._buffers.load(plan["buffers"])
        for fragment, own in zip(self._fragments, names, strict=True):
            fragment.names, fragment.weight = [*own], 0
            fragment.form = delta_format(self._options, self._transport)
        self._offered, self._planned, self._added = None, (), []
        self._counted, self._last = [dict(each) for each in counted], dict(plan["last"])
        rank = self._transport.rank
        self._present = set(range(self._transport.world_size)) - self._transport.rounds.absent - {rank}
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
        away = self._transport.rounds.hub_is_away
        if away and not self._is_alone:
            _log.warning("the hub is away: local steps go on, and count in the agreement after its return")
        self._is_alone = away
        return away

    def reach(self, step: int, weight: int, finished: bool) -> list[Header]:
        """Agree on the parameters, or on those of the next fragment, with the sites that are present.

        Args:
            step: number of this site's steps.
            weight: weight of its steps since it was last called, or since `end_step` took it; 0 if there are none.
            finished: whether it has no more batches.

        Returns:
            The headers of the contributors. A site has finished where it has sent all its steps, too.

        Raises:
            NonFiniteError: on all sites, if the parameters of every contributor hold NaN or Inf.
            MismatchError: on all sites, if they do not train the same parameters.
            SiteError: if this site or the hub is given up.
            DroppedError: if this site was dropped, and can join again.
        """
        transport, options = self._transport, self._options
        self.agreed.drop_untrained(self._model, ())
        names = [*self.agreed.values]
        finite = self._are_finite(names)
        self.spoilt = not all(finite)
        self._count(0 if self.spoilt else weight)
        if self.spoilt:
            self.agreed.restart(self._model)
            for each in self._fragments:
                each.weight = 0
        self._drop_spoilt_buffers()
        if self._offered is None:
            self._offer(empty=options.overlap and self._delay is None)
        elif self._offered.position != transport.rounds.position:  # rounds have been closed since: it is sent again
            self._fragment.receive()
            self._launch_payloads()
        unsent = any(each.weight for each in self._fragments)
        headers = self._exchange(step, finished and not unsent, finite.index(False) if self.spoilt else -1)
        counted = transport.rank in headers
        self._move(headers, counted)
        self._announce(headers)
        self.count += 1
        transport.rounds.end_step()  # what is sent from now on belongs to the next round
        last = max(header.step for header in headers.values())
        self.delay.follow(headers.values())
        self._delay = self.delay.at(last)
        if options.overlap and (self._delay is None or self._delay >= options.part_of_interval(last, self.count)):
            self._offer()
        if not any(each.weight for each in self._fragments) and not (self._offered and self._offered.weight):
            for table in self._tables:  # as lookups do, since sites look up different rows
                sameness.renormalise(table)
        transport.rounds.grow()
        self._report(headers, counted, names)
        return [*headers.values()]

    def end_step(self, step: int, left: int = 0, weight: int = 0) -> bool:
        """Send what this site has done if the next agreement is ``delay`` steps away."""
        rounds = self._transport.rounds
        due = self._delay is not None and left <= self._delay and self._offered is None
        if not due or rounds.hub_is_away or rounds.behind or not all(self._are_finite(self._fragment.names)):
            return False
        self._count(weight)
        self._offer()
        return True

    def _are_finite(self, names: Iterable[str]) -> list[bool]:
        """Return whether parameters hold neither NaN nor Inf; True for those that the model no longer has."""
        parameters = dict(self._model.named_parameters())
        return [name not in parameters or is_finite(parameters[name].detach()) for name in names]

    def _drop_spoilt_buffers(self) -> None:
        """Set this site's buffers to the agreed ones where its steps are dropped, or its statistics hold NaN or Inf."""
        known = [each for each in self._buffers.known() if each.is_floating_point() and each.element_size() > 1]
        if self.spoilt:
            self._buffers.restore()
        elif not all(is_finite(each) for each in known):
            self._buffers.restore(self._buffers.names)
            _log.warning("the statistics of this site hold NaN or Inf: they are replaced by the agreed ones")

    def _offer(self, *, empty: bool = False) -> None:
        """Encode what this site has done with the next fragment since it has last sent it, and start to send that.

        Args:
            empty: whether to send nothing, but zeros without weight.
        """
        fragment, weight, before = self._fragment, 0, None
        # A site that joins has the state of the donor, which has ended the round.
        ends_round = not (empty or self._transport.rounds.listens)
        self.agreed.drop_untrained(self._model, fragment.names if ends_round else ())
        divide(self._fragments, self.agreed.values)
        self._plan()
        if not empty and fragment.weight:
            weight, fragment.weight, before = fragment.weight, 0, fragment.form.state_dict()
            fragment.form.encode(self.agreed.deltas(self._model, fragment.names, reuse=True), fragment.payloads)
            self.agreed.mark(self._model, fragment.names)
        self._offered = DeltaContribution(weight, before, 0)
        self._launch_payloads()

    def _launch_payloads(self) -> None:
        assert self._offered is not None
        self._offered = self._offered._replace(position=self._transport.rounds.position)
        self._fragment.launch()
        self.delay.launch()

    def has_arrived(self) -> bool:
        return self._offered is not None and self._fragment.has_arrived()

    def _plan(self) -> None:
        """Prepare the gathers, if parameters, buffers or sites have come or gone."""
        transport, count, values = self._transport, self._transport.world_size, self.agreed.values
        added = [sameness.fingerprint(values[name]) for name in self._added if name in values]
        setting = "".join(each.form.begin_round(self.count // len(self._fragments)) for each in self._fragments)
        tensors = {name: values[name] for each in self._fragments for name in each.names}
        planned = (fingerprint(tensors, setting), tuple(self._buffers.names), count)
        self._layout = (planned[0] + sum(added)) % (1 << 62)
        self._added = []
        if planned == self._planned:
            return
        self._planned = planned
        transport.rounds.begin_plan()
        self._headers = transport.gather([len(Header._fields)] * count, torch.int64)
        for each in self._fragments:
            each.form.retain(dict(self._model.named_parameters()))
            sizes = each.form.layout({name: values[name] for name in each.names})
            each.gathers = {dtype: transport.gather([size] * count, dtype) for dtype, size in sizes.items()}
        groups = sameness.flattened(self._buffers.known())
        self._of_buffers = [transport.gather([flat.nbytes] * count, torch.uint8) for flat, _ in groups]

    def _exchange(self, step: int, finished: bool, nonfinite: int) -> dict[int, Header]:
        """Send the header and the buffers, close the round, and return the headers of the contributors by rank."""
        transport, offered = self._transport, self._offered
        assert offered is not None
        averages = self._averages_buffers(self._fragment)
        changed = averages and bool(self._buffers.changed())
        first = *self._first(), self.delay.travel
        header = Header(step, offered.weight, self._layout, finished, nonfinite, changed, *first)
        self._headers.payload.copy_(torch.tensor(header))
        self._headers.launch()
        if averages:
            for gather, (flat, _) in zip(self._of_buffers, sameness.flattened(self._buffers.known()), strict=True):
                gather.payload.copy_(flat.view(torch.uint8))
                gather.launch()
        with self.delay.receiving():
            transport.rounds.close(self.admits, idle=not offered.weight)
        uniform = self._options.weighting == "uniform"
        headers = read_headers(self._headers.wait(), transport, len(self.agreed.values), uniform)
        if not headers:
            raise MismatchError("no site has sent a valid header")
        apart = [*{*minority({rank: header.layout for rank, header in headers.items()})} - {transport.rank}]
        for rank in apart:
            del headers[rank]
            why = "it trains other parameters in this round than most sites"
            transport.rounds.leave_out(rank, invalid("header", transport.sites[rank], why))
        layouts = {header.layout for header in headers.values()}
        if len(layouts) > 1 or (transport.rank in headers and layouts != {self._layout}):
            raise MismatchError(
                "the sites do not train the same parameters in this round: freeze, free and add parameters at the same "
                "step on all sites, with the same values"
            )
        self._compare_first(headers.values())
        return headers

    @torch.no_grad()
    def _move(self, headers: Mapping[int, Header], counted: bool) -> None:
        """Take the outer step with what the contributors have sent, and replace the buffers by their mean.

        The model goes on from the agreed values and this site's steps that are not part of them.

        Args:
            headers: headers of the contributors, by rank.
            counted: whether this site is one of them.
        """
        fragment, offered = self._fragment, self._offered
        assert offered is not None
        self._offered = None
        payloads = fragment.receive()
        if offered.before is not None and not counted:
            fragment.form.load_state_dict(offered.before)
            self._add(fragment, offered.weight)
            self.agreed.unmark(fragment.names)
        headers, shares, sites = dict(headers), list[float](), self._transport.sites
        while total := sum(header.weight for header in headers.values()):
            count = self._transport.world_size
            shares = [headers[rank].weight / total if rank in headers else 0.0 for rank in range(count)]
            try:
                means = fragment.form.decode(payloads, shares)
            except InvalidDeltaError as error:  # all sites find it, and go on without the site
                del headers[error.rank]
                self._transport.rounds.leave_out(error.rank, error)
                continue
            last = max(header.step for header in headers.values())
            if (found := self._check.find_spoilt(fragment.form, payloads, means, shares, last)) is not None:
                del headers[found[0]]
                what = describe_spoilt(sites[found[0]], found[1])
                _log.warning("%s. It has no part in agreement %d", what, self.count + 1)
                continue
            self.agreed.move_and_keep(self._model, means, fragment.rates(means, self._options.outer_lr))
            self._note(headers)
            break
        if self._averages_buffers(fragment):
            self._average_buffers({rank: shares[rank] for rank, header in headers.items() if header.weight})
        if not fragment.weight:  # the agreed values to the bit
            self.agreed.begin_round(self._model, names=fragment.names)

    def _average_buffers(self, shares: Mapping[int, float]) -> None:
        """Replace the buffers by their mean over the contributors; by the agreed ones where there are none.

        Args:
            shares: share in the mean of each contributor with weight, by rank.
        """
        every = [gather.wait() for gather in self._of_buffers]
        if not shares:
            self._buffers.restore(self._buffers.names)
            return
        for rows, (_, tensors) in zip(every, sameness.flattened(self._buffers.known()), strict=True):
            write_agreed(tensors, [rows[rank] for rank in shares], [*shares.values()])
        self._buffers.keep()

    def _note(self, headers: Mapping[int, Header]) -> None:
        """Note what is part of the agreed values of the fragment from now on."""
        counted = self._counted[self.count % len(self._fragments)]
        for rank, header in headers.items():
            if header.weight:
                self._last[rank] = self.count + 1
                counted[rank] = counted.get(rank, 0) + header.weight

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
            if rank in transport.rounds.gone:
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
                f"{self._check.explain(header.step)}at step {header.step} parameter {names[header.nonfinite]!r} holds "
                f"NaN or Inf at {sites[rank]}, and those of all other sites do, too: their steps since the last "
                "agreement are discarded, and the parameters are the agreed ones"
            )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state, with what is in transit."""
        offered, transit = self._offered, None
        if offered is not None and offered.weight:
            sent = [each.clone() for each in self._fragment.payloads.values()]
            transit = {"payloads": sent, "weight": offered.weight, "before": offered.before}
        counted = [dict(each) for each in self._counted]
        own = {"contributions": counted, "last": dict(self._last), "transit": transit, "delay": self._delay}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; what was in transit is sent again."""
        if self._offered is not None:
            self._fragment.receive()
        super().load_state_dict(state)
        self._offered, self._planned, self._delay = None, (), state["delay"]
        self._counted, self._last = [dict(each) for each in state["contributions"]], dict(state["last"])
        transit = state.get("transit")
        if transit is not None:
            self._plan()
            for payload, sent in zip(self._fragment.payloads.values(), transit["payloads"], strict=True):
                payload.copy_(sent)
            self._offered = DeltaContribution(transit["weight"], transit["before"], 0)
            self._launch_payloads()
