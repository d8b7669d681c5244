"""Agreements between sites on the parameters, after rounds of local steps: headers, deltas, and the outer step.

**Outer step.** With the mean delta d of a round, the outer momentum mu and the outer learning rate lr, as of SGD with
Nesterov momentum on the gradient -d (DiLoCo, arXiv:2311.08105, algorithm 1):

    m <- mu m + d            a <- a + lr (d + mu m)            without momentum: a <- a + lr d

With lr = 1 and mu = 0 this is the mean of the sites' parameters (local SGD).

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

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..background import BackgroundTask
from ..errors import MismatchError, NonFiniteError
from ..exchange import Gather, Transport
from ..model_sync import sameness
from ..model_sync.buffers import MovingBuffers
from ..options import AUTO
from .auto_format import AutoFormat
from .delta_format import DeltaFormat
from .options import DEFAULT_DECAY, LocalOptions
from .sparse_format import SparseFormat

# The agreed model


def outer_step(value: Tensor, delta: Tensor, momentum: Tensor | None, lr: float, mu: float) -> None:
    """Move an agreed value by the mean delta of a round, in place.

    Args:
        value: the agreed value a.
        delta: the mean delta d, of the same shape; may be overwritten.
        momentum: the momentum m, updated; None without.
        lr: outer learning rate.
        mu: outer momentum.
    """
    if momentum is not None:
        momentum.mul_(mu).add_(delta)
        delta = delta.add_(momentum, alpha=mu)
    value.add_(delta, alpha=lr)


class AgreedModel:
    """Agreed values of the parameters that are trained, in single or double precision.

    Args:
        lr: outer learning rate.
        mu: outer momentum.

    Attributes:
        values: the agreed values by name of the parameter.
    """

    def __init__(self, lr: float, mu: float) -> None:
        self._lr, self._mu = lr, mu
        self.values: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}
        self._starts: dict[str, Tensor] = {}  # of the present round; without one: the agreed value
        self._frozen: set[str] = set()  # at the end of the last round

    @torch.no_grad()
    def follow(self, model: nn.Module) -> list[str]:
        """Take in parameters that are trained from now on, before a step changes them; return their names."""
        new = []
        for name, parameter in model.named_parameters():
            known = self.values.get(name)
            if parameter.requires_grad and (known is None or known.shape != parameter.shape):
                wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
                self.values[name] = parameter.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
                self._momenta.pop(name, None)
                self._starts.pop(name, None)
                new.append(name)
        return new

    def drop_untrained(self, model: nn.Module) -> None:
        """Forget parameters that the model no longer has, or that were frozen throughout a round."""
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        for name in [*self.values]:
            if name not in trained or (not trained[name] and name in self._frozen):
                for kept in (self.values, self._momenta, self._starts):
                    kept.pop(name, None)
        self._frozen = {name for name in self.values if not trained[name]}

    @torch.no_grad()
    def deltas(self, model: nn.Module) -> dict[str, Tensor]:
        """Compute what this site has done since the start of the round, by name, in new memory."""
        parameters = dict(model.named_parameters())
        return {
            name: torch.empty_like(value).copy_(parameters[name]).sub_(self._starts.get(name, value))
            for name, value in self.values.items()
        }

    @torch.no_grad()
    def move(self, means: Mapping[str, Tensor]) -> None:
        """Take the outer step.

        Args:
            means: the mean deltas by name; may be overwritten.
        """
        for name, mean in means.items():
            value = self.values.get(name)
            if value is None or value.shape != mean.shape:
                continue
            momentum = None
            if self._mu:
                momentum = self._momenta.get(name)
                if momentum is None:
                    momentum = self._momenta[name] = torch.zeros_like(value)
            outer_step(value, mean.to(value), momentum, self._lr, self._mu)

    @torch.no_grad()
    def begin_round(
        self,
        model: nn.Module,
        in_transit: Mapping[str, Tensor] | None = None,
        unsent: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Set the model to the start of the next round.

        Args:
            model: the model.
            in_transit: the site's deltas that the agreed values do not contain yet; None where there are none.
            unsent: further deltas, which have not been sent, and are part of the next ones; None where there are none.
        """
        parameters = dict(model.named_parameters())
        self._starts = {}
        for name, value in self.values.items():
            start = value
            if in_transit is not None and name in in_transit:
                start = self._starts[name] = value + in_transit[name]
            parameters[name].copy_(start if unsent is None or name not in unsent else start + unsent[name])

    def as_of_model(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the agreed values in the types of the parameters, and all other parameters, by name."""
        named = model.named_parameters()
        return {name: self.values.get(name, each.detach()).to(each.dtype) for name, each in named}

    def donate(self, model: nn.Module) -> dict[str, Any]:
        """Return what a site needs besides `as_of_model` to go on from the agreed values."""
        types = {name: each.dtype for name, each in model.named_parameters()}
        wide = {name: value for name, value in self.values.items() if value.dtype != types[name]}
        frozen = sorted(self._frozen)
        return {"names": [*self.values], "wide": wide, "momenta": dict(self._momenta), "frozen": frozen}

    def adopt(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Take over what `donate` has returned at another site, with the parameters of `as_of_model` in the model."""
        own = {name: each.detach() for name, each in model.named_parameters()}
        wide = state["wide"]
        found = {name: wide[name] if name in wide else own[name].contiguous() for name in state["names"]}
        kept = {"values": found, "momenta": state["momenta"], "starts": {}, "frozen": state["frozen"]}
        self.load_state_dict(kept, model)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the values, momenta and starts."""
        kept = {"values": self.values, "momenta": self._momenta, "starts": self._starts}
        state: dict[str, Any] = {kind: {name: each.clone() for name, each in own.items()} for kind, own in kept.items()}
        return state | {"frozen": sorted(self._frozen)}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Restore what `state_dict` returned, on the device of the model's parameters."""
        devices = {name: parameter.device for name, parameter in model.named_parameters()}

        def restored(kind: str) -> dict[str, Tensor]:
            return {name: each.to(devices[name], copy=True) for name, each in state[kind].items() if name in devices}

        self.values, self._momenta, self._starts = restored("values"), restored("momenta"), restored("starts")
        self._frozen = set(state["frozen"])


# Agreements


def delta_format(options: LocalOptions, transport: Transport) -> DeltaFormat | SparseFormat | AutoFormat:
    """Return the format of payloads that options ask for."""
    if options.density is None:
        return DeltaFormat(options.wire, options.rank, options.error_feedback)
    decay = DEFAULT_DECAY if options.memory_decay is None else options.memory_decay
    if options.density == AUTO:
        return AutoFormat(decay, options.error_feedback, transport.sites.__getitem__)
    return SparseFormat(options.density_at, decay, options.error_feedback, transport.sites.__getitem__)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor Inf; one pass without a copy, unless its sum overflows."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


class Header(NamedTuple):
    """A site's statement before an agreement.

    Attributes:
        step: number of the site's steps.
        weight: weight of its delta in the mean, such as its samples since the last agreement; 0 if it has trained
            nothing.
        layout: fingerprint of the parameters that it agrees on, see `fingerprint`.
        finished: 1 if it has no more batches, else 0.
        nonfinite: number of the first parameter with NaN or Inf, in the order of the layout; -1 if there is none.
        changes: 1 if buffers have changed that the site has not announced yet, else 0.
        batch: digest of its first batch, in the first agreement; 0 for none.
    """

    step: int
    weight: int
    layout: int
    finished: int
    nonfinite: int
    changes: int
    batch: int


def fingerprint(tensors: Mapping[str, Tensor], setting: str = "") -> int:
    """Return a number of 63 bits that stands for names, shapes and types of tensors, in their order, and a setting."""
    text = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]) + setting
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class Agreement:
    """The agreements of one site with the others, one after each round of local steps.

    Args:
        model: the model, equal on all sites.
        options: the options.
        transport: the transport.

    Attributes:
        count: number of agreements so far.
        agreed: the agreed model.
        first_batch: gets the inputs of the first step, which the sites compare in the first agreement.
    """

    def __init__(self, model: nn.Module, options: LocalOptions, transport: Transport) -> None:
        self.count = 0
        self.first_batch = sameness.FirstBatch()
        self.agreed = AgreedModel(options.outer_lr, options.outer_momentum)
        self._model, self._options, self._transport = model, options, transport
        self._format = delta_format(options, transport)
        self._buffers = MovingBuffers(model)
        self._headers: Gather = transport.gather([len(Header._fields)] * transport.world_size, torch.int64)
        self._tables = sameness.tables_with_max_norm(model)
        self._fingerprint = self._tensors = 0  # of the layout of payloads, and of the tensors alone
        self._gathers: dict[torch.dtype, Gather] = {}
        self._shares: list[float] | None = None  # of the round that is in transit
        self._sending: BackgroundTask | None = None  # encodes and sends the round that is in transit
        self._due: int | None = None  # step at which the round in transit is applied, if not at the next agreement
        self._means: dict[str, Tensor] | None = None  # of a round that has arrived and is not applied yet
        self._added: list[str] = []  # parameters since the last agreement, whose values have to be compared

    def begin(self) -> None:
        """Take the model's present parameters and buffers, equal on all sites, as the agreed ones."""
        self.agreed.follow(self._model)
        self._buffers.load([])

    def follow(self) -> None:
        """Take in parameters that are trained from now on; called before each step."""
        self._added += self.agreed.follow(self._model)

    def reach(self, step: int, weight: int, finished: bool) -> list[Header]:
        """Agree on the parameters; all sites must call it together.

        Args:
            step: number of this site's steps.
            weight: weight of its delta; 0 if it has trained nothing since the last agreement.
            finished: whether it has no more batches.

        Returns:
            The headers of all sites by rank. If all have finished, the parameters are equal on all sites afterwards,
            without overlap always.

        Raises:
            NonFiniteError: on all sites, if the parameters of one hold NaN or Inf. The round is discarded: parameters
                are the agreed ones.
            MismatchError: on all sites, if they do not train the same parameters, or are not at the same step.
            SiteError: if a site is gone or silent.
        """
        self._complete()
        self.agreed.drop_untrained(self._model)
        deltas = self.agreed.deltas(self._model)
        headers = self._exchange_headers(step, weight, finished, deltas)
        if any(header.nonfinite >= 0 for header in headers):
            self._discard(headers, list(deltas))
        if any(header.changes for header in headers):
            self._buffers.announce(self._transport)
        total = sum(header.weight for header in headers)
        shares = [header.weight / total if total else 1 / len(headers) for header in headers]
        self._buffers.average(self._transport, dict(enumerate(shares)))
        in_transit = None
        if total:
            in_transit = self._launch(deltas, shares, weight)
            self._due = None if self._options.delay is None else step + self._options.delay
        if not self._options.overlap or all(header.finished for header in headers):
            self._complete()
            in_transit = None
        self.agreed.begin_round(self._model, in_transit)
        if in_transit is None:
            for table in self._tables:  # as lookups do, since sites look up different rows
                sameness.renormalise(table)
        self.count += 1
        return headers

    def _exchange_headers(self, step: int, weight: int, finished: bool, deltas: Mapping[str, Tensor]) -> list[Header]:
        """Exchange headers and compare them; lay the payloads out anew if parameters have come or gone."""
        finite = [is_finite(delta) for delta in deltas.values()]
        nonfinite = -1 if all(finite) else finite.index(False)
        setting = self._format.begin_round(self.count)
        layout, batch = fingerprint(deltas, setting), 0 if self.count else self.first_batch.take()
        self._headers.payload.copy_(
            torch.tensor([step, weight, layout, finished, nonfinite, bool(self._buffers.changed()), batch])
        )
        self._headers.launch()
        headers = [Header(*row.tolist()) for row in self._headers.wait()]
        steps = {header.step: rank for rank, header in enumerate(headers) if not header.finished}
        if len(steps) > 1:
            (one, first), (other, second) = list(steps.items())[:2]
            sites = self._transport.sites
            raise MismatchError(
                f"the sites agree at different steps, {sites[first]} at {one} and {sites[second]} at {other}: each "
                "must call step() once for each of its batches, and finish() after the last one"
            )
        if any(header.layout != layout for header in headers):
            settings: dict[str, Any] = {}
            sameness.check_alike(sameness.describe(self._model, settings), self._transport)
            raise MismatchError("the sites have changed which parameters they train in different rounds")
        self.first_batch.compare([header.batch for header in headers], self._transport)
        if layout != self._fingerprint:
            if (tensors := fingerprint(deltas)) != self._tensors:
                self._check_added()
            self._format.choose(deltas, self._transport)
            sizes, count = self._format.layout(deltas), self._transport.world_size
            self._gathers = {dtype: self._transport.gather([size] * count, dtype) for dtype, size in sizes.items()}
            self._fingerprint, self._tensors = layout, tensors
        self._added = []
        return headers

    def _check_added(self) -> None:
        """Compare the values that added parameters had before they were trained.

        Raises:
            MismatchError: on every site, if they differ.
        """
        own = {
            name: sameness.fingerprint(self.agreed.values[name]) for name in self._added if name in self.agreed.values
        }
        for rank, other in enumerate(self._transport.gather_objects(own)):
            for name in [*own, *other]:
                if own.get(name) != other.get(name):
                    sites = self._transport.sites
                    raise MismatchError(
                        f"parameter {name!r} has been added to the model and did not begin with the same values at "
                        f"{sites[self._transport.rank]} and {sites[rank]}: make it by the same seed on all sites"
                    )

    def _launch(self, deltas: dict[str, Tensor], shares: list[float], weight: int) -> dict[str, Tensor] | None:
        """Start to send the deltas of the round; return them if they will be in transit for a while."""
        overlap, apart = self._options.overlap, self._format.keeps_deltas
        in_transit = {name: each if apart else each.clone() for name, each in deltas.items()} if overlap else None

        def send() -> None:
            if weight:
                self._format.encode(deltas, {dtype: gather.payload for dtype, gather in self._gathers.items()})
            for gather in self._gathers.values():
                gather.launch()

        self._shares = shares
        if overlap and apart and not self._transport.elastic:
            self._sending = BackgroundTask(send, "dadplug-round")
        else:
            send()
        return in_transit

    def postpones(self) -> bool:
        """Return whether a due agreement waits, while local steps go on, since nothing can be exchanged at present."""
        return False

    def end_step(self, step: int) -> None:
        """Apply the round that is in transit if it is due at this step; what was done since it was sent is kept.

        Args:
            step: number of this site's steps.
        """
        if self._due is None or step < self._due:
            return
        progress = self.agreed.deltas(self._model)
        self._complete()
        self.agreed.begin_round(self._model, unsent=progress)

    def _complete(self) -> None:
        """Wait for deltas that are in transit, and take the outer step."""
        self._receive()
        self._due = None
        if self._means is not None:
            self.agreed.move(self._means)
            self._means = None

    def _receive(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            sending.wait()
        if self._shares is not None:
            payloads = {dtype: gather.wait() for dtype, gather in self._gathers.items()}
            self._means = self._format.decode(payloads, self._shares)
            self._shares = None

    def _discard(self, headers: Sequence[Header], names: list[str]) -> None:
        """Discard the round: set the model to the agreed values.

        Raises:
            NonFiniteError: naming the first site with NaN or Inf, and the parameter.
        """
        self.agreed.begin_round(self._model)
        self._buffers.restore()
        rank, header = next((rank, header) for rank, header in enumerate(headers) if header.nonfinite >= 0)
        raise NonFiniteError(
            f"at step {header.step} parameter {names[header.nonfinite]!r} holds NaN or Inf at "
            f"{self._transport.sites[rank]}: the steps since the last agreement are discarded on all sites, and the "
            "parameters are the agreed ones"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state; waits for deltas that are in transit."""
        self._receive()
        means = None if self._means is None else {name: each.clone() for name, each in self._means.items()}
        return {
            "count": self.count,
            "agreed": self.agreed.state_dict(),
            "format": self._format.state_dict(),
            "means": means,
            "due": self._due,
            "buffers": self._buffers.names,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._receive()
        self.count = state["count"]
        self.agreed.load_state_dict(state["agreed"], self._model)
        self._format.load_state_dict(state["format"])
        self._due = state.get("due")
        self._means = state["means"] and {name: each.clone() for name, each in state["means"].items()}
        self._buffers.load(state["buffers"])
        self._added = []
