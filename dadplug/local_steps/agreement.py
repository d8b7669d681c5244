"""Agreements between sites on the parameters, after rounds of local steps: headers, deltas, and when they are applied.

With overlap the mean of a round arrives one round later. Meanwhile a site goes on from the agreed model plus what it
has done in the round that is in transit (CoCoD-SGD, arXiv:1906.12043). At the end of round t, x the site's parameters:

    a <- a moved by the mean of round t - 1            agreed on all sites
    d_t = x - start                                    sent; its mean arrives at the end of round t + 1
    start <- x <- a + d_t

So x - a always holds what this site has done and the others do not have yet, once. If the mean is applied in
mid-round already, n steps after it was sent, then there

    a <- a moved by the mean of round t        x <- a + (x - start)        start <- a
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MismatchError, NonFiniteError
from ..exchange import Gather, Transport
from ..exchange.fields import check_kinds, checked
from ..step.model_sync import sameness
from ..step.model_sync.buffers import MovingBuffers
from ..step.model_sync.samples import warn_of_unequal
from .agreed_model import AgreedModel, is_finite
from .delay import DelayChoice
from .delta_format import DeltaCheck, DeltaFormat, SparseFormat, describe_spoilt
from .header import Header, fingerprint, read_headers, shares_of
from .options import DEFAULT_DECAY, LocalOptions


def delta_format(options: LocalOptions, transport: Transport) -> DeltaFormat | SparseFormat:
    """Return the format of payloads that options ask for."""
    if options.density is None:
        return DeltaFormat(options.wire, options.rank, options.error_feedback)
    decay = DEFAULT_DECAY if options.memory_decay is None else options.memory_decay
    return SparseFormat(options.density_at, decay, options.error_feedback, transport.sites.__getitem__)


class Fragment:
    """Part of the parameters on which sites agree together, and the payloads of its deltas.

    Args:
        form: the format of the payloads.

    Attributes:
        form: the format.
        names: names of its parameters.
        weight: weight of this site's steps since its last agreement.
        layout: fingerprint of the tensors and of the format's setting that the payloads are laid out for.
        tensors: fingerprint of the tensors alone.
        gathers: exchanges of the payloads, by type.
    """

    def __init__(self, form: DeltaFormat | SparseFormat) -> None:
        self.form = form
        self.names: list[str] = []
        self.weight = self.layout = self.tensors = 0
        self.gathers: dict[torch.dtype, Gather] = {}

    @property
    def payloads(self) -> dict[torch.dtype, Tensor]:
        """This site's payloads, by type."""
        return {dtype: gather.payload for dtype, gather in self.gathers.items()}

    def launch(self) -> None:
        """Start to send the payloads."""
        for gather in self.gathers.values():
            gather.launch()

    def rates(self, names: Iterable[str], fixed: float | None) -> dict[str, float]:
        """Return the outer learning rates of the deltas that were decoded last, by name.

        Args:
            names: names of the parameters.
            fixed: the rate of all of them; None where the format chooses it.
        """
        return {name: self.form.rate_of(name) if fixed is None else fixed for name in names}

    def has_arrived(self) -> bool:
        """Return whether the payloads of all sites have arrived, as far as that is known."""
        return all(gather.has_arrived() for gather in self.gathers.values())

    def receive(self) -> dict[torch.dtype, list[Tensor]]:
        """Wait for the payloads of all sites."""
        return {dtype: gather.wait() for dtype, gather in self.gathers.items()}


def check_fragments(model: nn.Module, count: int) -> None:
    """Raise ValueError if a model has fewer trained parameters than fragments.

    Args:
        model: the model.
        count: number of fragments.
    """
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    if count > max(1, trained):
        raise ValueError(f"fragments={count} of a model with {trained} trained parameters: a fragment has at least one")


def divide(fragments: Sequence[Fragment], values: Mapping[str, Tensor]) -> None:
    """Give each parameter that is in no fragment to the smallest one, the largest first; drop those that are gone.

    Args:
        fragments: the fragments.
        values: the agreed values, by name, in an order that is the same on all sites.
    """
    for fragment in fragments:
        fragment.names = [name for name in fragment.names if name in values]
    known = {name for fragment in fragments for name in fragment.names}
    sizes = [sum(values[name].numel() for name in fragment.names) for fragment in fragments]
    for name in sorted((name for name in values if name not in known), key=lambda each: -values[each].numel()):
        smallest = sizes.index(min(sizes))
        fragments[smallest].names.append(name)
        sizes[smallest] += values[name].numel()
    for fragment in fragments:  # in the order of the model
        mine = {*fragment.names}
        fragment.names = [name for name in values if name in mine]


class _Transit:
    """Deltas of a fragment that travel, or have arrived and are not applied yet.

    Args:
        fragment: the fragment.
        layout: fingerprint of its layout at this site.
        headers: headers of all sites by rank; None if they travel beside the deltas.

    Attributes:
        is_settled: whether what the headers say was done when the deltas were sent.
        sending: encodes and sends the deltas; None where that is over.
        arrived: whether they have arrived.
        means: the mean deltas by name, then; None if no site has trained, or a delta holds NaN or Inf.
        rates: the outer learning rates of these.
    """

    def __init__(self, fragment: Fragment, layout: int, headers: list[Header] | None) -> None:
        self.fragment, self.layout, self.headers = fragment, layout, headers
        self.is_settled = headers is not None
        self.sending: Future[None] | None = None
        self.arrived = False
        self.means: dict[str, Tensor] | None = None
        self.rates: dict[str, float] = {}


class Agreement:
    """The agreements of one site with the others, one after each round of local steps, or each part of a round.

    Args:
        model: the model, equal on all sites.
        options: the options.
        transport: the transport.

    Attributes:
        count: number of agreements so far.
        agreed: the agreed model.
        delay: the delay of its deltas.
        first_batch: gets the inputs of the first step, which the sites compare in the first agreement.
    """

    def __init__(self, model: nn.Module, options: LocalOptions, transport: Transport) -> None:
        self.count = 0
        self.first_batch = sameness.FirstBatch()
        self.agreed = AgreedModel(options.outer_momentum)
        self.delay = DelayChoice(options)
        self._model, self._options, self._transport = model, options, transport
        self._fragments = [Fragment(delta_format(options, transport)) for _ in range(options.fragments)]
        self._check = DeltaCheck(transport, options.interval(0))
        self._buffers = MovingBuffers(model)
        self._headers: Gather = transport.gather([len(Header._fields)] * transport.world_size, torch.int64)
        self._tables = sameness.tables_with_max_norm(model)
        self._transit: _Transit | None = None
        self._due: int | None = None  # step at which the deltas in transit are applied, if not at the next agreement
        self._added: list[str] = []  # parameters whose first values have to be compared

    def begin(self) -> None:
        """Take the model's present parameters and buffers, equal on all sites, as the agreed ones."""
        self.agreed.follow(self._model)
        self._buffers.load([])

    def follow(self) -> None:
        """Take in parameters that are trained from now on; called before each step."""
        self._added += self.agreed.follow(self._model)

    def reach(self, step: int, weight: int, finished: bool) -> list[Header]:
        """Agree on the parameters, or on those of the next fragment; all sites must call it together.

        Args:
            step: number of this site's steps.
            weight: weight of its delta; 0 if it has trained nothing since the last agreement.
            finished: whether it has no more batches.

        Returns:
            The headers of all sites by rank; this site's alone where the others' travel beside the next steps, which
            they do not if `finished`. If all have finished, the parameters are equal on all sites afterwards, without
            overlap always.

        Raises:
            NonFiniteError: on all sites, if the parameters of one hold NaN or Inf. The round is discarded: parameters
                are the agreed ones. It may be that of an earlier agreement.
            MismatchError: on all sites, if they do not train the same parameters, or are not at the same step.
            SiteError: if a site is gone or silent.
        """
        self._count(weight)
        headers = self._agree_on_next(step, finished)
        if all(header.finished for header in headers):
            for _ in self._fragments[1:]:
                self._agree_on_next(step, finished)
        return headers

    def _count(self, weight: int) -> None:
        """Add the weight of steps to what each fragment has not sent."""
        for each in self._fragments:
            self._add(each, weight)

    def _add(self, fragment: Fragment, weight: int) -> None:
        by_samples = self._options.weighting == "samples"
        fragment.weight = fragment.weight + weight if by_samples else max(fragment.weight, weight)

    def _agree_on_next(self, step: int, finished: bool) -> list[Header]:
        """Agree on the parameters of the next fragment, as `reach` does on all."""
        fragment = self._fragments[self.count % len(self._fragments)]
        self._complete(keep=self._transit is not None and self._transit.fragment is not fragment)
        self.agreed.drop_untrained(self._model, fragment.names)
        divide(self._fragments, self.agreed.values)
        deltas = self.agreed.deltas(self._model, fragment.names, reuse=True)
        header = self._launch_header(fragment, step, finished, deltas)
        headers = None if self._settles_later(fragment, header) else self._settle(fragment, header, deltas)
        in_transit = None
        if headers is None or any(each.weight for each in headers):
            in_transit = self._launch(fragment, header, headers, deltas)
            delay = self.delay.at(step)
            self._due = None if delay is None else step + delay
        if headers is None:
            headers = self._receive_headers() if finished else [header]
        if not self._options.overlap or all(each.finished for each in headers):
            self._complete(keep=False)
            in_transit = None
        self.agreed.begin_round(self._model, in_transit, names=fragment.names)
        if in_transit is None:
            for table in self._tables:  # as lookups do, since sites look up different rows
                sameness.renormalise(table)
        self.count += 1
        return headers

    # Headers

    def _launch_header(self, fragment: Fragment, step: int, finished: bool, deltas: Mapping[str, Tensor]) -> Header:
        """Start to send this site's header for an agreement on a fragment, and return it."""
        finite = [is_finite(delta) for delta in deltas.values()]
        nonfinite = -1 if all(finite) else finite.index(False)
        setting = fragment.form.begin_round(self.count // len(self._fragments))
        layout = fingerprint(deltas, setting)
        changed = self._averages_buffers(fragment) and bool(self._buffers.changed())
        first = *self._first(), self.delay.travel
        header = Header(step, fragment.weight, layout, finished, nonfinite, changed, *first)
        self._headers.payload.copy_(torch.tensor(header))
        self._headers.launch()
        return header

    def _averages_buffers(self, fragment: Fragment) -> bool:
        """Return whether buffers are averaged in agreements on a fragment: once a round, in that on the last one."""
        return fragment is self._fragments[-1]

    def _settles_later(self, fragment: Fragment, header: Header) -> bool:
        """Return whether headers are read when the deltas are applied, so that no step waits for them.

        They are read at once where the next exchanges depend on them: with a new layout, and for means of buffers.
        """
        options = self._options
        apart = options.overlap and (self.delay.at(header.step) is not None or options.fragments > 1)
        averages = self._averages_buffers(fragment) and bool(self._buffers.known())
        return apart and header.layout == fragment.layout and not averages

    def _receive_headers(self) -> list[Header]:
        """Wait for the headers that travel beside the deltas in transit."""
        transit = self._transit
        assert transit is not None
        if transit.sending is not None:  # one thread at a time uses the connections
            sending, transit.sending = transit.sending, None
            sending.result()
        if transit.headers is None:
            try:
                transit.headers = self._check_headers(transit.fragment, transit.layout)
            except MismatchError:
                self._transit = None
                raise
        return transit.headers

    def _check_headers(self, fragment: Fragment, layout: int) -> list[Header]:
        """Wait for the headers of all sites for an agreement on a fragment, and compare them.

        Raises:
            MismatchError: if one is invalid, or the sites are at different steps, or train different parameters.
        """
        sites, uniform = self._transport.sites, self._options.weighting == "uniform"
        headers = [*read_headers(self._headers.wait(), self._transport, len(fragment.names), uniform).values()]
        steps = {header.step: rank for rank, header in enumerate(headers) if not header.finished}
        if len(steps) > 1:
            (one, first), (other, second) = list(steps.items())[:2]
            raise MismatchError(
                f"the sites agree at different steps, {sites[first]} at {one} and {sites[second]} at {other}: each "
                "must call step() once for each of its batches, and finish() after the last one"
            )
        if any(header.layout != layout for header in headers):
            settings: dict[str, Any] = {}
            sameness.check_alike(sameness.describe(self._model, settings), self._transport)
            raise MismatchError("the sites have changed which parameters they train in different rounds")
        self._compare_first(headers)
        return headers

    def _first(self) -> tuple[int, int]:
        """Return what a header says of this site's first batch."""
        return (0, 0) if self.count else (self.first_batch.take(), self.first_batch.samples)

    def _compare_first(self, headers: Collection[Header]) -> None:
        """Warn where two sites have the same first batch, or where those of sites that count equally differ in size."""
        self.first_batch.compare([header.batch for header in headers], self._transport)
        if self._options.weighting == "uniform":
            warn_of_unequal([header.samples for header in headers if header.weight])

    def _settle(self, fragment: Fragment, header: Header, deltas: Mapping[str, Tensor]) -> list[Header]:
        """Wait for the headers, and do what they say; lay the payloads out anew if parameters have come or gone."""
        headers = self._check_headers(fragment, header.layout)
        if header.layout != fragment.layout:
            if (tensors := fingerprint(deltas)) != fragment.tensors:
                self._check_added(fragment)
            fragment.form.retain(dict(self._model.named_parameters()))
            sizes, count = fragment.form.layout(deltas), self._transport.world_size
            fragment.gathers = {dtype: self._transport.gather([size] * count, dtype) for dtype, size in sizes.items()}
            fragment.layout, fragment.tensors = header.layout, tensors
        self._added = [name for name in self._added if name not in fragment.names]
        self._do_as_headers_say(headers, fragment)
        return headers

    def _do_as_headers_say(self, headers: list[Header], fragment: Fragment) -> None:
        """Agree on buffers; all sites call it at the same place among their exchanges.

        Raises:
            NonFiniteError: on all sites, if the parameters of one hold NaN or Inf.
        """
        if any(header.nonfinite >= 0 for header in headers):
            self._discard(headers, fragment.names)
        if not self._averages_buffers(fragment):
            return
        if any(header.changes for header in headers):
            self._buffers.announce(self._transport)
        self._buffers.average(self._transport, dict(enumerate(shares_of(headers))))

    def _check_added(self, fragment: Fragment) -> None:
        """Compare the values that added parameters had before they were trained.

        Raises:
            MismatchError: on every site, if they differ.
        """
        own = {name: sameness.fingerprint(self.agreed.values[name]) for name in self._added if name in fragment.names}
        every = self._transport.gather_present(own)
        for rank, other in checked(every, dict[str, int], "list of digests", self._transport).items():
            for name in [*own, *other]:
                if own.get(name) != other.get(name):
                    sites = self._transport.sites
                    raise MismatchError(
                        f"parameter {name!r} has been added to the model and did not begin with the same values at "
                        f"{sites[self._transport.rank]} and {sites[rank]}: make it by the same seed on all sites"
                    )

    def _discard(self, headers: Sequence[Header], names: list[str]) -> None:
        """Discard the round: set the model to the agreed values.

        Raises:
            NonFiniteError: naming the first site with NaN or Inf, and the parameter.
        """
        self.agreed.begin_round(self._model)
        self._buffers.restore()
        for fragment in self._fragments:
            fragment.weight = 0
        rank, header = next((rank, header) for rank, header in enumerate(headers) if header.nonfinite >= 0)
        raise NonFiniteError(
            f"{self._check.explain(header.step)}at step {header.step} parameter {names[header.nonfinite]!r} holds NaN "
            f"or Inf at {self._transport.sites[rank]}: the steps since the last agreement are discarded on all sites, "
            "and the parameters are the agreed ones"
        )

    # Deltas

    def _launch(
        self, fragment: Fragment, header: Header, headers: list[Header] | None, deltas: dict[str, Tensor]
    ) -> dict[str, Tensor] | None:
        """Start to send the deltas of a fragment; return them if they will be in transit for a while."""
        overlap, apart = self._options.overlap, fragment.form.keeps_deltas
        in_transit = {name: each if apart else each.clone() for name, each in deltas.items()} if overlap else None
        fragment.weight = 0

        def send() -> None:
            if header.weight and header.nonfinite < 0:
                fragment.form.encode(deltas, fragment.payloads)
            fragment.launch()

        self._transit = _Transit(fragment, header.layout, headers)
        self.delay.launch()
        if overlap and apart and not self._transport.rounds.elastic:
            beside = ThreadPoolExecutor(1, "dadplug-round")
            self._transit.sending = beside.submit(send)
            beside.shutdown(wait=False)
        else:
            send()
        return in_transit

    def as_of_model(self) -> dict[str, Tensor]:
        """Return the agreed parameters, in their types, and the agreed buffers, by name."""
        return {**self.agreed.as_of_model(self._model), **self._buffers.agreed}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Give the model the agreed parameters and buffers inside the block."""
        agreed = self.as_of_model()
        own = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        kept = {name: own[name].detach().clone() for name in agreed}
        try:
            with torch.no_grad():
                for name, value in agreed.items():
                    sameness.write(own[name], value)
            yield
        finally:
            with torch.no_grad():
                for name, value in kept.items():
                    sameness.write(own[name], value)

    def postpones(self) -> bool:
        """Return whether a due agreement waits, while local steps go on, since nothing can be exchanged at present."""
        return False

    def end_step(self, step: int, left: int = 0, weight: int = 0) -> bool:
        """Apply the deltas that are in transit if it is due at this step; what was done since they were sent is kept.

        Args:
            step: number of this site's steps.
            left: number of steps until the next agreement.
            weight: weight of the steps that `reach` has not taken yet.

        Returns:
            Whether it has taken the weight, so that the next call of `reach` does not have it.

        Raises:
            NonFiniteError: as `reach`, like its other errors.
        """
        if self._due is not None and step >= self._due:
            self._complete(keep=True)
        return False

    def has_arrived(self) -> bool:
        """Return whether what is in transit has arrived, as far as that is known."""
        transit = self._transit
        if transit is None or (transit.sending is not None and not transit.sending.done()):
            return False
        return self._headers.has_arrived() and transit.fragment.has_arrived()

    def _complete(self, keep: bool) -> None:
        """Wait for deltas that are in transit, and take the outer step.

        Args:
            keep: whether the model goes on from the agreed values and what it has done since the deltas were sent.
        """
        transit = self._receive()
        self._transit = self._due = None
        if transit is None:
            return
        assert transit.headers is not None
        self.delay.follow(transit.headers)
        self.agreed.drop_untrained(self._model, ())
        if transit.means is not None and keep:
            self.agreed.move_and_keep(self._model, transit.means, transit.rates)
        elif transit.means is not None:
            self.agreed.move(transit.means, transit.rates)
        if not transit.is_settled:
            self._do_as_headers_say(transit.headers, transit.fragment)

    def _receive(self) -> _Transit | None:
        """Wait for what is in transit, and return it."""
        transit = self._transit
        if transit is not None and not transit.arrived:
            with self.delay.receiving():
                headers, payloads = self._receive_headers(), transit.fragment.receive()
            if any(header.weight for header in headers) and all(header.nonfinite < 0 for header in headers):
                shares = shares_of(headers)
                transit.means = transit.fragment.form.decode(payloads, shares)
                last, form = max(header.step for header in headers), transit.fragment.form
                if (found := self._check.find_spoilt(form, payloads, transit.means, shares, last)) is not None:
                    what = describe_spoilt(self._transport.sites[found[0]], found[1])
                    raise NonFiniteError(f"{what}. The round is not applied")
                transit.rates = transit.fragment.rates(transit.means, self._options.outer_lr)
            transit.arrived = True
        return transit

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state; waits for deltas that are in transit.

        Raises:
            NonFiniteError: if these hold NaN or Inf at a site; the round is discarded.
        """
        transit = self._receive()
        if transit is not None and any(header.nonfinite >= 0 for header in transit.headers or ()):
            self._complete(keep=True)
        return {
            "count": self.count,
            "agreed": self.agreed.state_dict(),
            "fragments": [
                {"names": [*each.names], "weight": each.weight, "format": each.form.state_dict()}
                for each in self._fragments
            ],
            "arrived": None if transit is None else self._state_of(transit),
            "due": self._due,
            "chosen": self.delay.steps,
            "buffers": self._buffers.names,
        }

    def _state_of(self, transit: _Transit) -> dict[str, Any]:
        means = None if transit.means is None else {name: each.clone() for name, each in transit.means.items()}
        headers = [list(header) for header in transit.headers or ()]
        own = {"fragment": self._fragments.index(transit.fragment), "headers": headers, "means": means}
        return own | {"rates": transit.rates, "settled": transit.is_settled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: if it is the state of another number of fragments.
        """
        if len(state["fragments"]) != len(self._fragments):
            raise ValueError(
                f"the checkpoint is of a run with fragments={len(state['fragments'])}, and this one has "
                f"fragments={len(self._fragments)}: set it as it was"
            )
        of_parts = Sequence[Mapping[str, Any]]
        kinds = {"count": int, "due": int | None, "chosen": int | None, "buffers": Sequence[str]}
        check_kinds(state, kinds | {"fragments": of_parts})
        self._receive()
        self.delay.load(state.get("chosen"))  # states of 0.4 have none
        self.count = state["count"]
        self.agreed.load_state_dict(state["agreed"], self._model)
        for fragment, own in zip(self._fragments, state["fragments"], strict=True):
            check_kinds(own, {"names": Sequence[str], "weight": int})
            if {*own["names"]} - self.agreed.values.keys():
                raise ValueError("a fragment has parameters without agreed values")
            fragment.names, fragment.weight = [*own["names"]], own["weight"]
            fragment.form.load_state_dict(own["format"])
        self._transit, self._due = None, state["due"]
        if (arrived := state["arrived"]) is not None:
            of_arrived = {"headers": Sequence[Sequence[int]], "rates": Mapping[str, float], "settled": bool}
            check_kinds(arrived, of_arrived | {"means": Mapping[str, Tensor] | None})
            headers = [Header(*row) for row in arrived["headers"]]
            self._transit = _Transit(self._fragments[arrived["fragment"]], 0, headers)
            self._transit.arrived, self._transit.is_settled = True, arrived["settled"]
            means, self._transit.rates = arrived["means"], dict(arrived["rates"])
            self._transit.means = means and {name: each.clone() for name, each in means.items()}
        self._buffers.load(state["buffers"])
        self._added = []
