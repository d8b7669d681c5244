"""Agreements between sites on the parameters: headers, buffers, and deltas that may be in transit for a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MismatchError, NonFiniteError
from ..exchange import Gather, Transport
from ..model_sync import sameness
from ..model_sync.buffers import MovingBuffers
from .agreed import AgreedModel
from .deltas import DeltaFormat
from .header import Header, HeaderGather, fingerprint
from .options import LocalOptions


class Agreement:
    """The agreements of one site with the others, one after each round of local steps.

    Args:
        model: the model, equal on all sites.
        options: the options.
        transport: the transport.

    Attributes:
        count: number of agreements so far.
        agreed: the agreed model.
    """

    def __init__(self, model: nn.Module, options: LocalOptions, transport: Transport) -> None:
        self.count = 0
        self.agreed = AgreedModel(options.outer_lr, options.outer_momentum)
        self._model, self._options, self._transport = model, options, transport
        self._format = DeltaFormat(options.wire, options.rank, options.error_feedback)
        self._buffers = MovingBuffers(model)
        self._headers = HeaderGather(transport)
        self._tables = sameness.tables_with_max_norm(model)
        self._layout: dict[str, Tensor] = {}
        self._fingerprint = 0
        self._gathers: dict[torch.dtype, Gather] = {}
        self._shares: list[float] | None = None  # of the round that is in transit
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
        if not self._options.overlap or all(header.finished for header in headers):
            self._complete()
            in_transit = None
        self.agreed.begin_round(self._model, in_transit)
        if in_transit is None:
            self._renormalise()
        self.count += 1
        return headers

    def _exchange_headers(self, step: int, weight: int, finished: bool, deltas: Mapping[str, Tensor]) -> list[Header]:
        """Exchange headers and compare them; lay the payloads out anew if parameters have come or gone."""
        names = enumerate(deltas.values())
        nonfinite = next((number for number, delta in names if not bool(delta.isfinite().all())), -1)
        layout = fingerprint(deltas)
        own = Header(step, weight, layout, finished, nonfinite, bool(self._buffers.changed()))
        headers = self._headers.exchange(own)
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
        if layout != self._fingerprint:
            self._check_added()
            self._lay_out(deltas)
            self._fingerprint = layout
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

    def _lay_out(self, deltas: Mapping[str, Tensor]) -> None:
        sizes = self._format.layout(deltas)
        count = self._transport.world_size
        self._gathers = {dtype: self._transport.gather([size] * count, dtype) for dtype, size in sizes.items()}

    def _launch(self, deltas: dict[str, Tensor], shares: list[float], weight: int) -> dict[str, Tensor] | None:
        """Start to send the deltas of the round; return a copy of them if they will be in transit for a round."""
        in_transit = {name: delta.clone() for name, delta in deltas.items()} if self._options.overlap else None
        if weight:
            self._format.encode(deltas, {dtype: gather.payload for dtype, gather in self._gathers.items()})
        for gather in self._gathers.values():
            gather.launch()
        self._shares = shares
        return in_transit

    def _complete(self) -> None:
        """Wait for deltas that are in transit, and take the outer step."""
        self._receive()
        if self._means is not None:
            self.agreed.move(self._means)
            self._means = None

    def _receive(self) -> None:
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

    def _renormalise(self) -> None:
        """Renormalise tables with ``max_norm`` as lookups do, since sites look up different rows."""
        for table in self._tables:
            sameness.renormalise(table)

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state; waits for deltas that are in transit."""
        self._receive()
        means = None if self._means is None else {name: each.clone() for name, each in self._means.items()}
        return {
            "count": self.count,
            "agreed": self.agreed.state_dict(),
            "format": self._format.state_dict(),
            "means": means,
            "buffers": self._buffers.names,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._receive()
        self.count = state["count"]
        self.agreed.load_state_dict(state["agreed"], self._model)
        self._format.load_state_dict(state["format"])
        self._means = state["means"] and {name: each.clone() for name, each in state["means"].items()}
        self._buffers.load(state["buffers"])
        self._added = []
